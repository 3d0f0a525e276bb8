"""swap_norms: modules that are swapped."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import cupynorm
from cupynorm import Launch

torch = pytest.importorskip("torch")
from module_inputs import DEVICES_HERE, MARGINS, random_input  # noqa: E402
from swap_classes import (  # noqa: E402
    AnotherEps,
    ClipLayerNorm,
    CohereLayerNorm,
    GemmaRMSNorm,
    InBfloat16,
    InitialisedLayerNorm,
    LlamaRMSNorm,
    Scaled,
    T5LayerNorm,
    WithGamma,
    WithGammaAndLargeEps,
    WithGammaAndNoEps,
    foreign,
    parameter,
)
from torch.nn.utils import parametrize, prune  # noqa: E402

from cupynorm.nn import modules  # noqa: E402  (imports torch)

TWICE = "x_hat was rounded before the weight, now y alone is"


WIDENED = "y of bfloat16 with float32 weight was float32, now bfloat16"


RECOGNISED = {
    "torch.nn.LayerNorm": (lambda: torch.nn.LayerNorm(64, 0.1), "LayerNorm", False, ""),
    "torch.nn.LayerNorm without bias": (
        lambda: torch.nn.LayerNorm(64, bias=False),
        "LayerNorm",
        False,
        "",
    ),
    "torch.nn.LayerNorm without weight": (
        lambda: torch.nn.LayerNorm(64, elementwise_affine=False),
        "LayerNorm",
        False,
        "",
    ),
    "torch.nn.LayerNorm of two dimensions": (
        lambda: torch.nn.LayerNorm((4, 64)),
        "LayerNorm",
        False,
        "",
    ),
    "torch.nn.RMSNorm": (lambda: torch.nn.RMSNorm(64), "RMSNorm", False, ""),
    "Llama": (lambda: LlamaRMSNorm(64), "RMSNorm", False, f"{TWICE}; {WIDENED}"),
    "T5": (lambda: T5LayerNorm(64), "RMSNorm", False, f"{TWICE}; {WIDENED}"),
    "Gemma": (lambda: GemmaRMSNorm(64), "RMSNorm", True, ""),
    "Cohere": (lambda: CohereLayerNorm(64), "LayerNorm", False, ""),
    "in bfloat16": (
        lambda: InBfloat16(64),
        "RMSNorm",
        False,
        f"more than y was rounded, now y alone is; {WIDENED}",
    ),
    "Clip": (lambda: ClipLayerNorm(64), "LayerNorm", False, ""),
    "a subclass that only initialises": (lambda: InitialisedLayerNorm(64), "LayerNorm", False, ""),
    "another eps": (
        lambda: AnotherEps(64),
        "RMSNorm",
        False,
        f"eps=1e-05, measured; {TWICE}; {WIDENED}",
    ),
    "wide": (lambda: GemmaRMSNorm(16384, 1e-5), "RMSNorm", True, ""),
}


@pytest.mark.parametrize("what", RECOGNISED)
def test_a_known_norm_is_swapped(what):
    make, kind, zero_centered, remark = RECOGNISED[what]
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(module).eval()
    before, state, rng = (
        dict(model.named_parameters()),
        copy.deepcopy(model.state_dict()),
        torch.get_rng_state(),
    )
    x = random_input(3, 2, 4, *(getattr(module, "normalized_shape", None) or module.weight.shape))
    expected = model(x)
    steps = getattr(module, "num_steps", None)
    report = cupynorm.swap_norms(model)
    assert [(swap.name, swap.now, swap.remark) for swap in report.swapped] == [
        ("0", f"cupynorm.{kind}", remark)
    ]
    assert not report.left
    assert (
        type(model[0]) is getattr(cupynorm, kind) and model[0].zero_centered_gamma is zero_centered
    )
    assert model[0].training is False
    # Parameters, their values, the random state and the module's own counter are unchanged.
    assert list(before) == list(dict(model.named_parameters()))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng) and getattr(module, "num_steps", None) == steps
    # Both results are float32, each within the bounds of gradient_check for this width.
    magnitude = float((1 + expected.detach().abs()).max()) * 4
    allowed = 2 * 2.0**-24 * (4 + np.sqrt(model[0].normalized_shape).max()) * magnitude
    torch.testing.assert_close(model(x), expected, rtol=0, atol=allowed)
    report.undo()
    assert model[0] is module and torch.equal(model(x), expected)


RENAMED = {
    "gamma and beta": (lambda: WithGamma(64), "RenamedLayerNorm", 1e-12, False),
    "a large eps": (lambda: WithGammaAndLargeEps(768), "RenamedLayerNorm", 0.1, False),
    "eps of 0": (lambda: WithGammaAndNoEps(64), "RenamedLayerNorm", 0.0, False),
    "scale": (lambda: Scaled(1000), "RenamedRMSNorm", 2.0**-23, True),
    "scale of two dimensions": (lambda: Scaled(4, 32), "RenamedRMSNorm", 2.0**-23, True),
}


@pytest.mark.parametrize("what", RENAMED)
def test_parameters_of_other_names_keep_them(what):
    make, kind, eps, zero_centered = RENAMED[what]
    module = make()
    with torch.no_grad():
        for each in module.parameters():
            each.normal_(generator=torch.Generator().manual_seed(1))
    shape = next(module.parameters()).shape
    model = torch.nn.Sequential(module)
    before, names = list(model.parameters()), list(model.state_dict())
    x = random_input(9, *shape).requires_grad_()
    expected = model(x)
    dy = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, [x, *before], dy)
    report = cupynorm.swap_norms(model)
    (swap,) = report.swapped
    assert swap.now == f"cupynorm.{kind}" and swap.remark.startswith(f"eps={eps}, measured; ")
    assert model[0].eps == eps and model[0].zero_centered_gamma is zero_centered
    assert isinstance(model[0], cupynorm.LayerNorm | cupynorm.RMSNorm)
    assert list(model.state_dict()) == names
    assert all(now is then for now, then in zip(model.parameters(), before))
    assert model[0].weight is before[-1] and (len(before) == 1 or model[0].bias is before[0])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (model, compiled, pickle.loads(pickle.dumps(model))):
        y = call(x)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(compiled(x), [x, *before], dy)
    for one, other in zip(gradients, expected_gradients):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    model.load_state_dict({name: torch.ones(shape) for name in names})
    assert torch.equal(before[-1], torch.ones(shape))
    report.undo()
    assert model[0] is module and all(now is then for now, then in zip(model.parameters(), before))


@pytest.mark.parametrize("what", ["Llama", "T5", "Gemma", "in bfloat16", "torch.nn.RMSNorm"])
@pytest.mark.parametrize("device", DEVICES_HERE)
def test_keep_rounding_reproduces_the_rounding_of_x_hat(what, device):
    """In bfloat16, for modules that round x_hat before the weight. Others are swapped as before."""
    make, _, _, remark = RECOGNISED[what]
    module = make().to(device).bfloat16()
    with torch.no_grad():
        module.weight.normal_()
    x = random_input(50, 64, dtype="bfloat16").to(device)
    expected, rounds = module(x), what in ("Llama", "T5")
    if what == "torch.nn.RMSNorm":  # older torch rounds after each step
        expected = copy.deepcopy(module).double()(x.double()).bfloat16()
    for keep_rounding in (False, True):
        model = torch.nn.Sequential(module)
        report = cupynorm.swap_norms(model, keep_rounding=keep_rounding)
        kept = rounds and keep_rounding
        assert model[0].round_x_hat is kept and ("round_x_hat=True" in repr(model)) is kept
        assert report.swapped[0].remark == (remark.replace(f"{TWICE}; ", "") if kept else remark)
        off = (model(x) != expected).double().mean()
        # float32 and float64 results round to different bfloat16 in about 1 of 10,000 cases.
        assert off < 2e-3 if kept or what in ("Gemma", "torch.nn.RMSNorm") else off > 0.1


@pytest.mark.parametrize(
    "make", [LlamaRMSNorm, GemmaRMSNorm, torch.nn.LayerNorm, torch.nn.RMSNorm, ClipLayerNorm]
)
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_modules_on_other_devices_are_probed_on_the_cpu(make, device):
    model = torch.nn.Sequential(make(64)).to(device).bfloat16()
    before = list(model.parameters())
    report = cupynorm.swap_norms(model)
    assert len(report.swapped) == 1 and not report.left
    assert (
        all(got is parameter for got, parameter in zip(model.parameters(), before))
        and before[0].device.type == device
    )


APEX = "apex.normalization.fused_layer_norm"


TE = "transformer_engine.pytorch.module"


BOTH_PARAMETERS = {"weight": (64,), "bias": (64,)}


FOREIGN = {
    "apex FusedLayerNorm": ("FusedLayerNorm", APEX, BOTH_PARAMETERS, {"eps": 0.1}, "LayerNorm", {}),
    "apex MixedFusedLayerNorm": (
        "MixedFusedLayerNorm",
        APEX,
        BOTH_PARAMETERS,
        {"eps": 0.1, "memory_efficient": True},
        "LayerNorm",
        {"memory_efficient": True},
    ),
    "apex FusedRMSNorm": ("FusedRMSNorm", APEX, {"weight": (4, 64)}, {"eps": 0.1}, "RMSNorm", {}),
    "apex MixedFusedRMSNorm": (
        "MixedFusedRMSNorm",
        APEX,
        {"weight": (64,)},
        {"eps": 0.1},
        "RMSNorm",
        {},
    ),
    "apex FusedRMSNorm without weight": (
        "FusedRMSNorm",
        APEX,
        {},
        {"eps": 0.1, "normalized_shape": torch.Size([64])},
        "RMSNorm",
        {},
    ),
    "apex FastLayerNorm": (
        "FastLayerNorm",
        "apex.contrib.layer_norm.layer_norm",
        BOTH_PARAMETERS,
        {"epsilon": 0.1},
        "LayerNorm",
        {},
    ),
    "TransformerEngine LayerNorm": (
        "LayerNorm",
        f"{TE}.layernorm",
        BOTH_PARAMETERS,
        {
            "eps": 0.1,
            "zero_centered_gamma": True,
            "_sm_margins": MARGINS,
            "sequence_parallel": True,
        },
        "LayerNorm",
        {
            "zero_centered_gamma": True,
            "launch": Launch(sm_margin=MARGINS),
            "sequence_parallel": True,
        },
    ),
    "TransformerEngine RMSNorm": (
        "RMSNorm",
        f"{TE}.rmsnorm",
        {"weight": (64,)},
        {
            "eps": 0.1,
            "zero_centered_gamma": False,
            "_sm_margins": {"fwd": 32, "bwd": 64, "inf": 96},
            "sequence_parallel": None,
        },
        "RMSNorm",
        {"launch": Launch(sm_margin=MARGINS)},
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_classes_of_other_libraries_are_known_by_name(what):
    name, module, shapes, attributes, kind, extras = FOREIGN[what]
    parameters = {key: parameter(*shape) for key, shape in shapes.items()}
    model = torch.nn.ModuleDict({"norm": foreign(name, module, **parameters, **attributes)})
    report = cupynorm.swap_norms(model)
    (swap,) = report.swapped
    assert (
        swap[:3] == ("norm", f"{module.partition('.')[0]}.{name}", f"cupynorm.{kind}")
        and not report.left
    )
    assert ("weight's dtype" in swap.remark) is (module.startswith(TE) or name.startswith("Mixed"))
    made = model["norm"]
    assert type(made) is getattr(cupynorm, kind) and made.eps == 0.1
    assert all(getattr(made, key) is value for key, value in parameters.items())
    assert {key: getattr(made, key) for key in modules.EXTRAS} == modules.EXTRAS | extras
    assert made(random_input(3, 4, 64)).shape == (3, 4, 64)


def test_a_norm_for_inference_is_swapped():
    """It has no gradients, so that none can differ."""

    class ForInference(LlamaRMSNorm):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    model = torch.nn.Sequential(ForInference(64))
    cupynorm.swap_norms(model)
    assert type(model[0]) is cupynorm.RMSNorm


@pytest.mark.parametrize("change", ("parametrized", "pruned"))
def test_a_renamed_parameter_may_be_made_anew_in_each_forward(change):
    """By then it is no parameter of the name that the replacement knows."""
    swapped = torch.nn.Sequential(WithGamma(64))
    with torch.no_grad():
        swapped[0].gamma.copy_(random_input(64))
    model = copy.deepcopy(swapped)
    cupynorm.swap_norms(swapped)
    for each in (swapped, model):
        if change == "pruned":
            prune.l1_unstructured(each[0], "gamma", 0.5)
        else:
            parametrize.register_parametrization(each[0], "gamma", torch.nn.Tanh())
    x = random_input(9, 64, seed=1)
    torch.testing.assert_close(swapped(x), model(x), rtol=1e-5, atol=1e-5)


def test_an_error_leaves_the_model_as_it_was():
    """Nothing could undo a half of it: the report would be lost."""
    wrong = {"eps": 0.1, "_sm_margins": {"forward": -1}}
    broken = foreign("RMSNorm", f"{TE}.rmsnorm", weight=parameter(64), **wrong)
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), broken)
    before = [*model]
    with pytest.raises(ValueError, match="sm_margin is -1"):
        cupynorm.swap_norms(model)
    assert all(now is was for now, was in zip(model, before))
