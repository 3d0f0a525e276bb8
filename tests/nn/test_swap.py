"""swap_norms: which modules are swapped, which are left and why, and undo()."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import cupynorm
from cupynorm import Launch

torch = pytest.importorskip("torch")
from module_inputs import DEVICES_HERE, MARGINS, random_input  # noqa: E402
from swap_classes import (  # noqa: E402
    ClipLayerNorm,
    CohereLayerNorm,
    Gated,
    GemmaRMSNorm,
    In16Bits,
    LlamaRMSNorm,
    T5LayerNorm,
    foreign,
    parameter,
)
from torch.nn import functional  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

from cupynorm.nn import modules  # noqa: E402

# Swapped.

TWICE = "x_hat was rounded to 16 bits before the weight, now y alone is"
WIDENED = "y of 16-bit input with a float32 weight was float32, now 16-bit"
THRICE = f"more than y was rounded to 16 bits, now y alone is; {WIDENED}"


class ForInference(LlamaRMSNorm):
    """It has no gradients, so that none can differ."""

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


# The module, its replacement, whether that is zero-centered, and the remark.
RECOGNISED = {
    "torch.nn.LayerNorm": (lambda: torch.nn.LayerNorm(64, 0.1), "LayerNorm", False, ""),
    "without bias": (lambda: torch.nn.LayerNorm(64, bias=False), "LayerNorm", False, ""),
    "without weight": (lambda: torch.nn.LayerNorm(64, 1e-5, False), "LayerNorm", False, ""),
    "of two dimensions": (lambda: torch.nn.LayerNorm((4, 64)), "LayerNorm", False, ""),
    "torch.nn.RMSNorm": (lambda: torch.nn.RMSNorm(64), "RMSNorm", False, ""),
    "Llama": (lambda: LlamaRMSNorm(64), "RMSNorm", False, WIDENED),
    "T5": (lambda: T5LayerNorm(64), "RMSNorm", False, WIDENED),
    "for inference": (lambda: ForInference(64), "RMSNorm", False, WIDENED),
    "Gemma": (lambda: GemmaRMSNorm(64), "RMSNorm", True, ""),
    "Cohere": (lambda: CohereLayerNorm(64), "LayerNorm", False, ""),
    "in 16 bits": (lambda: In16Bits(64), "RMSNorm", False, THRICE),
    "Clip": (lambda: ClipLayerNorm(64), "LayerNorm", False, ""),
}
ROUNDS = ("Llama", "T5", "for inference")


@pytest.mark.parametrize("what", RECOGNISED)
def test_a_known_norm_is_swapped(what):
    make, kind, zero_centered, remark = RECOGNISED[what]
    module = make()
    with torch.no_grad():
        for each in module.parameters():
            each.normal_(generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(module).eval()
    before, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    x = random_input(3, 2, 4, *(getattr(module, "normalized_shape", None) or module.weight.shape))
    expected, report = model(x), cupynorm.swap_norms(model)
    (swap,) = report.swapped
    assert swap[::2] == ("0", f"cupynorm.{kind}") and not report.left
    assert swap.remark == (f"{TWICE}; {remark}" if what in ROUNDS else remark)
    assert type(model[0]) is getattr(cupynorm, kind)
    assert model[0].zero_centered_gamma is zero_centered and model[0].training is False
    # Parameters, their values and the random state are unchanged.
    after = dict(model.named_parameters())
    assert [*before] == [*after] and all(after[name] is each for name, each in before.items())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    # Both results are float32, each within the bounds of gradient_check for this width.
    magnitude = float((1 + expected.detach().abs()).max()) * 4
    allowed = 2 * 2.0**-24 * (4 + np.sqrt(model[0].normalized_shape).max()) * magnitude
    torch.testing.assert_close(model(x), expected, rtol=0, atol=allowed)
    report.undo()
    assert model[0] is module and torch.equal(model(x), expected)


@pytest.mark.parametrize("what", ["Llama", "T5", "Gemma", "torch.nn.RMSNorm"])
@pytest.mark.parametrize("device", DEVICES_HERE)
def test_keep_rounding_reproduces_the_rounding_of_x_hat(what, device):
    """In bfloat16, for modules that round x_hat before the weight. Others are swapped as before."""
    make, _, _, remark = RECOGNISED[what]
    module = make().to(device).bfloat16()
    with torch.no_grad():
        module.weight.normal_()
    x = random_input(50, 64, dtype="bfloat16").to(device)
    expected, rounds = module(x), what in ROUNDS
    if what == "torch.nn.RMSNorm":  # older torch rounds after each step
        expected = copy.deepcopy(module).double()(x.double()).bfloat16()
    for keep_rounding in (False, True):
        model = torch.nn.Sequential(module)
        report = cupynorm.swap_norms(model, keep_rounding=keep_rounding)
        kept = rounds and keep_rounding
        assert model[0].round_x_hat is kept and ("round_x_hat=True" in repr(model)) is kept
        assert report.swapped[0].remark == (f"{TWICE}; {remark}" if rounds > kept else remark)
        off = (model(x) != expected).double().mean()
        # float32 and float64 results round to different bfloat16 in about 1 of 10,000 cases.
        assert off < 2e-3 if kept or what in ("Gemma", "torch.nn.RMSNorm") else off > 0.1


@pytest.mark.parametrize("make", [LlamaRMSNorm, torch.nn.LayerNorm])
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_modules_on_other_devices_are_probed_on_the_cpu(make, device):
    model = torch.nn.Sequential(make(64)).to(device).bfloat16()
    before = list(model.parameters())
    report = cupynorm.swap_norms(model)
    assert len(report.swapped) == 1 and not report.left
    assert all(now is then for now, then in zip(model.parameters(), before))
    assert before[0].device.type == device


APEX = "apex.normalization.fused_layer_norm"

TE = "transformer_engine.pytorch.module"

PAIR, WEIGHT, EPS = {"weight": (64,), "bias": (64,)}, {"weight": (64,)}, {"eps": 0.1}
ZERO_CENTERED = {"zero_centered_gamma": True, "sequence_parallel": True}
SHORT_MARGINS = {"_sm_margins": {"fwd": 32, "bwd": 64, "inf": 96}}
LAUNCH, EFFICIENT = {"launch": Launch(sm_margin=MARGINS)}, {"memory_efficient": True}

# The class and its module, parameters, attributes, ours, and its options that are no defaults.
FOREIGN = [
    ("FusedLayerNorm", APEX, PAIR, EPS, "LayerNorm", {}),
    ("MixedFusedLayerNorm", APEX, PAIR, EPS | EFFICIENT, "LayerNorm", EFFICIENT),
    ("FusedRMSNorm", APEX, {"weight": (4, 64)}, EPS, "RMSNorm", {}),
    ("MixedFusedRMSNorm", APEX, WEIGHT, EPS, "RMSNorm", {}),
    ("FusedRMSNorm", APEX, {}, EPS | {"normalized_shape": torch.Size([64])}, "RMSNorm", {}),
    ("FastLayerNorm", "apex.contrib.layer_norm", PAIR, {"epsilon": 0.1}, "LayerNorm", {}),
    (
        "LayerNorm",
        f"{TE}.layernorm",
        PAIR,
        EPS | ZERO_CENTERED | {"_sm_margins": MARGINS},
        "LayerNorm",
        ZERO_CENTERED | LAUNCH,
    ),
    ("RMSNorm", f"{TE}.rmsnorm", WEIGHT, EPS | SHORT_MARGINS, "RMSNorm", LAUNCH),
]


@pytest.mark.parametrize("name, module, shapes, attributes, kind, extras", FOREIGN)
def test_classes_of_other_libraries_are_known_by_name(
    name, module, shapes, attributes, kind, extras
):
    parameters = {key: parameter(*shape) for key, shape in shapes.items()}
    model = torch.nn.ModuleDict({"norm": foreign(name, module, **parameters, **attributes)})
    report = cupynorm.swap_norms(model)
    (swap,), made = report.swapped, model["norm"]
    assert swap[:3] == ("norm", f"{module.partition('.')[0]}.{name}", f"cupynorm.{kind}")
    assert ("weight's dtype" in swap.remark) is (module.startswith(TE) or name.startswith("Mixed"))
    assert type(made) is getattr(cupynorm, kind) and made.eps == 0.1 and not report.left
    assert all(getattr(made, key) is value for key, value in parameters.items())
    assert {key: getattr(made, key) for key in modules.EXTRAS} == modules.EXTRAS | extras
    assert made(random_input(3, 4, 64)).shape == (3, 4, 64)


class Block(torch.nn.Module):
    def __init__(self, num_cols: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(num_cols), LlamaRMSNorm(num_cols)])
        self.linear = torch.nn.Linear(num_cols, num_cols)
        self.last = self.norms[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(self.norms[0](x))
        return self.last(x + self.linear(self.norms[1](x)))


def test_a_shared_module_stays_shared():
    model = Block(8)
    shared, order = model.last, [name for name, _ in model.named_parameters()]
    report = cupynorm.swap_norms(model)
    assert model.last is model.norms[1] and type(model.last) is cupynorm.RMSNorm
    assert [swap.name for swap in report.swapped] == ["last", "norms.0", "norms.1"]
    assert report.swapped[2].remark == "the module of last"
    assert [name for name, _ in model.named_parameters()] == order
    assert not cupynorm.swap_norms(model).swapped
    report.undo()
    assert model.last is model.norms[1] is shared


@pytest.mark.parametrize("device", DEVICES_HERE)
def test_a_transformer_computes_the_same(device):
    """In float64, so that only the order of additions differs.

    In training mode, because in eval mode torch fuses the layer and calls no norm.
    """
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, batch_first=True, norm_first=True, dtype=torch.float64
    )
    model = torch.nn.TransformerEncoder(
        layer, 2, torch.nn.RMSNorm(64, dtype=torch.float64), enable_nested_tensor=False
    ).to(device)
    x = random_input(2, 5, 64, dtype="float64").to(device)

    def outcome():
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = outcome()
    report = cupynorm.swap_norms(model)
    assert len(report.swapped) == 5 and not report.left
    # 64 columns and ten rows in twelve products: some hundred roundings of the largest value.
    for got, right in zip(outcome(), expected):
        torch.testing.assert_close(
            got, right, rtol=0, atol=2.0**-53 * 1000 * float(1 + right.abs().max())
        )


# Left.


class Odd(LlamaRMSNorm):
    """Its forward is of(norm, x), where norm is that of Llama in the dtype of x."""

    def __init__(self, of, num_cols: int = 64) -> None:
        super().__init__(num_cols)
        self.of = of

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * self.normalized(x.float())).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(self, x)


class RoundsTheProduct(torch.nn.Module):
    """As DeBERTa's and Chameleon's: x_hat, its product with the weight and y are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = parameter(256), parameter(256)
        self.variance_epsilon = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_hat = functional.layer_norm(x.float(), (256,), eps=self.variance_epsilon).to(x.dtype)
        return x_hat * self.weight + self.bias


class LayerNorm2d(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def with_(module: torch.nn.Module, **attributes) -> torch.nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def after(module: torch.nn.Module, change) -> torch.nn.Module:
    change(module)
    return module


def flatten(module: torch.nn.Module) -> None:
    """As FullyShardedDataParallel(use_orig_params=True) marks the parameters that it shards."""
    for each in module.parameters():
        each._fsdp_flattened = True


def clip_gradients(own: Odd, x: torch.Tensor) -> torch.Tensor:
    y = own.norm(x)
    if y.requires_grad:
        y.register_hook(lambda dy: dy.clamp(-1, 1))
    return y


def raising(own: Odd, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("Triton kernels\nrun on CUDA")


def rms(own: Odd, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return own.weight * x * torch.rsqrt(size + own.variance_epsilon)


def square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True)


NEITHER = "it computes neither layer_norm nor rms_norm of its weight"
OTHER_GRADIENTS = "its gradients are not those of the norm that it computes"
SHARDED = "it has been sharded, as by FullyShardedDataParallel"
NO_WIDTH = "nothing says what it normalises over"
OTHER_DIMS = "it normalises over other dimensions than the last ones"
LEFT = {
    "heads": (
        Odd(lambda own, x: own.norm(x.reshape(*x.shape[:-1], -1, 64)).reshape(x.shape)),
        "it takes rows of 128 columns too",
    ),
    "dropout": (
        Odd(lambda own, x: functional.dropout(own.norm(x), training=own.training)).eval(),
        "it computes another result in training mode",
    ),
    "limited x": (Odd(lambda own, x: own.norm(x.clamp(-500, 500))), NEITHER),
    "eps outside": (Odd(lambda own, x: own.weight * x / (square(x).sqrt() + 1e-6)), NEITHER),
    "num_cols - 1": (Odd(lambda own, x: rms(own, x, square(x) * 4096 / 4095), 4096), NEITHER),
    "another eps": (Odd(lambda own, x: rms(own, x, square(x) + 1e-5)), NEITHER),
    "no norm": (Odd(lambda own, x: own.weight * x), NEITHER),
    "a detached variance": (Odd(lambda own, x: rms(own, x, square(x.detach()))), OTHER_GRADIENTS),
    "clipped gradients": (Odd(clip_gradients), OTHER_GRADIENTS),
    "limited in bfloat16": (
        Odd(lambda own, x: own.norm(x).clamp(-1, 1) if x.dtype == torch.bfloat16 else own.norm(x)),
        "it computes neither layer_norm nor rms_norm in bfloat16",
    ),
    "raises": (Odd(raising), "its forward raised RuntimeError on the CPU: Triton kernels"),
    "gate": (Gated(64), "its forward takes x, gate; expected one input"),
    "sharded": (after(torch.nn.LayerNorm(64), flatten), SHARDED),
    "forward hook": (
        after(LlamaRMSNorm(64), lambda own: own.register_forward_hook(print)),
        "it has forward_hooks",
    ),
    "parametrized": (
        parametrize.register_parametrization(torch.nn.LayerNorm(64), "weight", torch.nn.Tanh()),
        "its weight is parametrized",
    ),
    "forward of the object": (
        with_(LlamaRMSNorm(64), forward=abs),
        "its forward was replaced on this object",
    ),
    "buffer": (
        after(LlamaRMSNorm(64), lambda own: own.register_buffer("scale", torch.ones(()))),
        "it holds scale, weight; expected a weight and perhaps a bias",
    ),
    "other names": (
        foreign("BertLayerNorm", "old", gamma=parameter(64), beta=parameter(64), eps=0.1),
        "it holds beta, gamma; expected a weight and perhaps a bias",
    ),
    "eps in the code": (
        foreign("RMSNorm", "flux", weight=parameter(64)),
        "it has no number as an attribute named eps",
    ),
    "images": (LayerNorm2d(64), OTHER_DIMS),
    "groups": (torch.nn.GroupNorm(2, 64), OTHER_DIMS),
    "no weight": (foreign("L2RMSNorm", "other", eps=0.1), NO_WIDTH),
    "empty weight": (torch.nn.LayerNorm(0), NO_WIDTH),
    "one weight": (with_(LlamaRMSNorm(8), weight=parameter(1)), NO_WIDTH),
    "a weight of three dimensions": (with_(LlamaRMSNorm(8), weight=parameter(1, 1, 8)), NO_WIDTH),
    "TransformerEngine's operation": (
        foreign(
            "RMSNorm", "transformer_engine.pytorch.ops.basic.rmsnorm", weight=parameter(64), eps=0.1
        ),
        "TransformerEngine fuses it with what follows",
    ),
}


@pytest.mark.parametrize("what", LEFT)
def test_a_module_that_cannot_be_swapped_is_left(what):
    module, reason = LEFT[what]
    model = torch.nn.Sequential(module, torch.nn.LayerNorm(64))
    rng = torch.get_rng_state()
    with torch.inference_mode():  # whose tensors have no gradients
        report = cupynorm.swap_norms(model)
    assert torch.equal(torch.get_rng_state(), rng)  # though some modules have dropout
    ((name, was, now, remark),) = report.left
    assert (name, now) == ("0", "") and was.endswith(type(module).__qualname__)
    assert remark.startswith(reason)
    assert model[0] is module and [swap.name for swap in report.swapped] == ["1"]


def test_a_norm_whose_rounding_cannot_be_kept():
    model = torch.nn.Sequential(RoundsTheProduct(), LlamaRMSNorm(256))
    x = random_input(50, 256, dtype="bfloat16")
    y = copy.deepcopy(model[0]).bfloat16()(x)
    report = cupynorm.swap_norms(copy.deepcopy(model))
    assert "more than y was rounded to 16 bits, now y alone is" in report.swapped[0].remark
    report = cupynorm.swap_norms(model.bfloat16(), keep_rounding=True)
    assert torch.equal(model[0](x), y) and [swap.name for swap in report.swapped] == ["1"]
    assert report.left[0].remark.startswith("it rounds more than x_hat and y")


def test_other_modules_are_not_reported():
    kinds = torch.nn.Linear(8, 8), torch.nn.PReLU(8), torch.nn.LazyLinear(8), torch.nn.GELU()
    ours = cupynorm.LayerNorm(8), cupynorm.RMSNorm(8)
    traced = torch.jit.trace(torch.nn.LayerNorm(8), torch.ones(2, 8))
    model = torch.nn.Sequential(*kinds, *ours, traced)
    before = [*model]
    report = cupynorm.swap_norms(model)
    assert not report.swapped and not report.left
    assert all(now is then for now, then in zip(model, before))
    assert str(report).splitlines()[-1] == "0 swapped, 0 left"


def test_the_model_itself_is_left():
    for model in (torch.nn.LayerNorm(8), LlamaRMSNorm(8)):
        report = cupynorm.swap_norms(model)
        assert [swap.name for swap in report.left] == ["(model)"] and not report.swapped
        assert (
            "it is the model itself" in report.left[0].remark
            and "torch.nn.Sequential(model)" in report.left[0].remark
        )
    assert not cupynorm.swap_norms(cupynorm.LayerNorm(8)).left
    with pytest.raises(TypeError, match="model is a list; expected a torch.nn.Module"):
        cupynorm.swap_norms([torch.nn.LayerNorm(8)])


def test_a_compiled_norm_is_left():
    """torch.compile keeps what it has wrapped, whatever else its wrapper holds."""
    compiled = torch.compile(torch.nn.LayerNorm(8), backend="eager")
    report = cupynorm.swap_norms(torch.nn.Sequential(compiled))
    assert not report.swapped and [each.name for each in report.left] == ["0._orig_mod"]
    assert report.left[0].remark == "torch.compile has wrapped it; expected the swap before"


# The report, undo() and errors.


def test_the_report_groups_layers():
    layers = [torch.nn.ModuleDict({"a": LlamaRMSNorm(8), "b": Gated(8)}) for _ in range(12)]
    layers[4]["a"] = torch.nn.Identity()
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers), "last": LlamaRMSNorm(8)})
    report = cupynorm.swap_norms(model)
    assert len(report.swapped) == 12 and report.swapped[1].name == "layers.0.a"
    assert str(report).splitlines() == [
        "name                  was                        now",
        "last                  swap_classes.LlamaRMSNorm  cupynorm.RMSNorm  [1]",
        "layers.*.a, 11 norms  swap_classes.LlamaRMSNorm  cupynorm.RMSNorm  [1]",
        "layers.*.b, 12 norms  swap_classes.Gated                           [2]",
        f"[1] {TWICE}; {WIDENED}",
        "[2] its forward takes x, gate; expected one input",
        "12 swapped, 12 left; compiled by torch.compile, a model runs torch's norms",
    ]
    assert "<br>[2] its forward takes x, gate" in report._repr_html_()


def two_norms():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Identity(), GemmaRMSNorm(8))
    return model, [model[0], model[2]], cupynorm.swap_norms(model)


def test_undo_keeps_the_current_parameters():
    model, originals, report = two_norms()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(random_input(3, 8)).square().sum().backward()
    optimizer.step()
    model.half().eval()
    state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    current = list(model.parameters())
    report.undo()
    report.undo()
    assert [model[0], model[2]] == originals and not model[2].training
    assert all(now is then for now, then in zip(model.parameters(), current))
    assert model[0].weight.dtype == torch.float16


class Wrap(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_undo_follows_replacements_to_other_places():
    """Into the wrapper of an adapter, and behind a layer that was inserted."""
    model, (first, last), report = two_norms()
    model[0] = Wrap(model[0])
    model.insert(1, torch.nn.Linear(8, 8))
    report.undo()
    assert type(model[0]) is Wrap and model[0].inner is first and model[3] is last


UNDONE = {
    "copied": (lambda model: setattr(model, "0", copy.deepcopy(model[0])), "no longer holds its"),
    "deleted": (lambda model: model.pop(0), "the model no longer holds its replacement"),
    "hooked": (lambda model: model[0].register_forward_hook(print), "it has forward_hooks"),
    "replaced forward": (lambda model: with_(model[0], forward=abs), "its forward was replaced"),
    "parametrized": (
        lambda model: parametrize.register_parametrization(model[0], "bias", torch.nn.Tanh()),
        "its bias is parametrized",
    ),
    "sharded": (lambda model: flatten(model[0]), SHARDED),
    "of another class": (
        lambda model: with_(model[0], __class__=type("FSDPNorm", (cupynorm.LayerNorm,), {})),
        "it is a FSDPNorm now",
    ),
}


@pytest.mark.parametrize("what", UNDONE)
def test_undo_names_what_it_does_not_put_back(what):
    change, reason = UNDONE[what]
    model, (first, last), report = two_norms()
    change(model)
    with pytest.warns(UserWarning, match=rf"undo\(\) did not put back 0: .*{reason}"):
        report.undo()
    assert model[-1] is last and first not in [*model.modules()]


def test_a_wrong_margin_leaves_the_model_as_it_was():
    wrong = {"eps": 0.1, "_sm_margins": {"forward": -1}}
    broken = foreign("RMSNorm", f"{TE}.rmsnorm", weight=parameter(64), **wrong)
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), broken)
    before = [*model]
    with pytest.raises(ValueError):
        cupynorm.swap_norms(model)
    assert all(now is was for now, was in zip(model, before))
