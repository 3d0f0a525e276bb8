"""swap_norms: modules that are swapped, modules that are left, and whole models."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import cupynorm

torch = pytest.importorskip("torch")
from module_inputs import DEVICES_HERE, MARGINS, random_input  # noqa: E402

from cupynorm.nn import modules  # noqa: E402  (imports torch)

# Modules that are swapped.


class LlamaRMSNorm(torch.nn.Module):
    """The norm of Hugging Face's Llama, which rounds x_hat before the weight multiplies it."""

    def __init__(self, num_cols: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(num_cols))
        self.variance_epsilon = eps
        self.num_steps = 0  # not an eps, though its name ends in eps

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return self.weight * self.normalized(hidden_states.float()).to(hidden_states.dtype)


class T5LayerNorm(LlamaRMSNorm):
    """An RMSNorm in spite of its name."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.normalized(x.float()) * (1.0 + self.weight.float())).type_as(x)


class CohereLayerNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight.float() * self.normalized(wide - wide.mean(-1, keepdim=True))).to(
            x.dtype
        )


class InBfloat16(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normalized(x)


class AnotherEps(LlamaRMSNorm):
    """Its eps is not the number in its attribute."""

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class WithGamma(torch.nn.Module):
    """Parameters of other names, in another order, and an eps in the code."""

    eps_in_code = 1e-12

    def __init__(self, num_cols: int) -> None:
        super().__init__()
        self.beta = torch.nn.Parameter(torch.zeros(num_cols))
        self.gamma = torch.nn.Parameter(torch.ones(num_cols))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
        x_hat = (x - mean) / torch.sqrt(variance + type(self).eps_in_code)
        return self.gamma * x_hat + self.beta


class WithGammaAndLargeEps(WithGamma):
    eps_in_code = 0.1


class WithGammaAndNoEps(WithGamma):
    eps_in_code = 0.0


class Scaled(torch.nn.Module):
    """An RMSNorm by neither name nor attribute."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(-self.scale.ndim, 0))
        return (1 + self.scale) * x * torch.rsqrt(x.square().mean(dims, True) + 2.0**-23)


class ClipLayerNorm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


class InitialisedLayerNorm(torch.nn.LayerNorm):
    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight)


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
    "one column": (lambda: LlamaRMSNorm(1), "RMSNorm", False, WIDENED),
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


def foreign(name: str, module: str, **attributes) -> torch.nn.Module:
    """A module with the name of another library's. Its forward raises."""

    def forward(self, x):
        raise AssertionError("only CUDA")

    made = type(
        name, (torch.nn.Module,), {"__module__": module, "__qualname__": name, "forward": forward}
    )()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape))


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
        {"zero_centered_gamma": True, "sm_margin": MARGINS, "sequence_parallel": True},
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
        {"sm_margin": MARGINS},
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


# Modules that are left.


class Gated(LlamaRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * torch.nn.functional.silu(gate))


class WithBuffer(LlamaRMSNorm):
    def __init__(self, num_cols: int) -> None:
        super().__init__(num_cols)
        self.register_buffer("scale", torch.ones(()))


class EpsOutside(LlamaRMSNorm):
    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Normalize(torch.nn.Module):
    """Divides by the larger of the length and 1e-12: no norm with an eps."""

    def __init__(self, num_cols: int) -> None:
        super().__init__()
        self.g = torch.nn.Parameter(torch.ones(num_cols))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=-1) * len(self.g) ** 0.5 * self.g


class Unbiased(LlamaRMSNorm):
    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(
            x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.variance_epsilon
        )


class DroppingRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(x), training=self.training)


class ScaleOnly(LlamaRMSNorm):
    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x


class LayerNorm2d(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 4:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class NoTensor(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class Raising(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Triton kernels\nrun on CUDA")


class OtherParameter(torch.nn.Parameter):
    pass


def hooked(register: str) -> torch.nn.Module:
    module = LlamaRMSNorm(64)
    getattr(module, register)(lambda *given: None)
    return module


def parametrized() -> torch.nn.Module:
    return torch.nn.utils.parametrize.register_parametrization(
        torch.nn.LayerNorm(64), "weight", torch.nn.Softplus()
    )


def with_(module: torch.nn.Module, **attributes) -> torch.nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


NEITHER = "it computes neither layer_norm nor rms_norm of its weight"


LEFT = {
    "forward hook": (lambda: hooked("register_forward_hook"), "it has forward_hooks"),
    "forward pre-hook": (lambda: hooked("register_forward_pre_hook"), "it has forward_pre_hooks"),
    "backward hook": (lambda: hooked("register_full_backward_hook"), "it has backward_hooks"),
    "state dict hook": (
        lambda: hooked("register_state_dict_pre_hook"),
        "it has state_dict_pre_hooks",
    ),
    "parametrized": (parametrized, "its weight is parametrized"),
    "forward of the object": (
        lambda: with_(LlamaRMSNorm(64), forward=lambda x: x),
        "its forward was replaced on this object",
    ),
    "gate": (lambda: Gated(64), "its forward takes x, gate; expected one input"),
    "buffer": (
        lambda: WithBuffer(64),
        "it holds scale, weight; expected a weight and perhaps a bias",
    ),
    "eps outside": (lambda: EpsOutside(64), NEITHER),
    "length": (lambda: Normalize(64), NEITHER),
    "num_cols - 1": (lambda: Unbiased(4096), NEITHER),
    "dropout": (lambda: DroppingRMSNorm(64).eval(), NEITHER),
    "no norm": (lambda: ScaleOnly(64), NEITHER),
    "channels first": (
        lambda: LayerNorm2d(64),
        "its forward raised RuntimeError on the CPU: Given normalized_shape=[64]",
    ),
    "no tensor": (lambda: NoTensor(64), "its forward raised AttributeError on the CPU: "),
    "raises": (lambda: Raising(64), "its forward raised RuntimeError on the CPU: Triton kernels"),
    "no parameters": (
        lambda: with_(foreign("OlmoLayerNorm", "olmo"), normalized_shape=(64,)),
        "its forward raised AssertionError on the CPU: only CUDA",
    ),
    "no weight": (
        lambda: with_(foreign("L2RMSNorm", "other"), eps=0.1),
        "nothing says what it normalises over",
    ),
    "empty weight": (lambda: torch.nn.LayerNorm(0), "nothing says what it normalises over"),
    "other shapes": (
        lambda: with_(torch.nn.LayerNorm(64), bias=parameter(1)),
        "its weight has shape (64,), its bias has shape (1,)",
    ),
    "other parameter": (
        lambda: with_(torch.nn.RMSNorm(64), weight=OtherParameter(torch.ones(64))),
        "its weight is a OtherParameter; expected a plain",
    ),
    "TransformerEngine's operation": (
        lambda: foreign(
            "RMSNorm", "transformer_engine.pytorch.ops.basic.rmsnorm", weight=parameter(64), eps=0.1
        ),
        "TransformerEngine fuses it with what follows",
    ),
}


class Affine(torch.nn.Module):
    """A norm of any formula, whose class does not say so. buffers: the names that are buffers."""

    def __init__(self, names: str, formula, shape=(64,), buffers: str = "") -> None:
        super().__init__()
        self.names, self.formula = names.split(), formula
        for at, name in enumerate(self.names):
            self.register_parameter(name, parameter(*shape).requires_grad_())
            if name in buffers.split():
                del self._parameters[name]
                self.register_buffer(name, torch.full(shape, float(1 - at)))

    def forward(self, x):
        return self.formula(x, *(getattr(self, name) for name in self.names))


class Masked(Affine):
    def forward(self, x, mask=None):
        return super().forward(x)


def normal(x, gamma, beta=0.0, eps=1e-6, dim=-1):
    centred = x - x.mean(dim, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim, keepdim=True) + eps) * gamma + beta


def by_std(x, gain, shift):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (x.std(-1, keepdim=True) + 1e-6) * gain + shift


def of_images(x, gamma, beta):
    return normal(x, gamma[:, None, None], beta[:, None, None], dim=1)


def only_on_cuda(x, gamma, beta):
    assert x.is_cuda
    return x


def rms(x, scale, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps.mean()) * scale


def unit(x, g):
    return torch.nn.functional.normalize(x, dim=-1) * 8 * g


ONES = "has shape (1, 1, 64); expected no dimension of 1"
UNNAMED = {
    "second input": (Masked("gamma beta", normal), "its forward takes x, mask; expected one input"),
    "beta is a buffer": (Affine("gamma beta", normal, buffers="beta"), "it holds beta, gamma; "),
    "eps is a buffer": (Affine("scale eps", rms, buffers="eps"), "it holds eps, scale; "),
    "a_2 and b_2": (Affine("a_2 b_2", by_std), NEITHER),
    "gain and shift": (Affine("gain shift", by_std), NEITHER),
    "length": (Affine("g", unit), NEITHER),
    "images": (Affine("gamma beta", of_images), "it normalises images of shape (N, C, H, W)"),
    "raises": (Affine("gamma beta", only_on_cuda), "its forward raised AssertionError on the CPU"),
    "dimensions of 1": (Affine("g b", normal, (1, 1, 64)), f"its g {ONES}"),
    "one of its weight": (Affine("weight", normal, (1, 1, 64)), f"its weight {ONES}"),
    "limited y": (Affine("g b", lambda *a: normal(*a).clamp(-6e4, 6e4)), NEITHER),
    "limited x": (Affine("g b", lambda x, *a: normal(x.clamp(-500, 500), *a)), NEITHER),
    "limited x_hat": (Affine("g", lambda x, g: normal(x, 1).clamp(-6, 6) * g), NEITHER),
}


@pytest.mark.parametrize("what", UNNAMED)
def test_a_norm_that_only_its_values_show_is_listed(what):
    module, reason = UNNAMED[what]
    model = torch.nn.Sequential(module)
    buffers = copy.deepcopy(dict(module.named_buffers()))
    report = cupynorm.swap_norms(model)
    assert not report.swapped and model[0] is module
    ((name, was, now, remark),) = report.left
    assert (name, now) == ("0", "") and remark.startswith(reason)
    assert all(torch.equal(value, buffers[name]) for name, value in module.named_buffers())


@pytest.mark.parametrize("eps", [1.25e-5, 1.234e-6])
def test_an_eps_of_several_digits_is_measured(eps):
    model = torch.nn.Sequential(Affine("gamma beta", lambda *given: normal(*given, eps=eps)))
    report = cupynorm.swap_norms(model)
    assert not report.left and model[0].eps == eps


def test_layers_of_one_vector_that_are_no_norms_are_not_listed():
    """Their output grows with their input."""
    kinds = [
        Affine("gain", lambda x, gain: x * gain),
        Affine("scale shift", lambda x, scale, shift: torch.tanh(x * scale) + shift),
        Affine("alpha", lambda x, alpha: x + torch.sin(alpha * x) ** 2),
        Affine("gate", lambda x, gate: torch.nn.functional.silu(x) * gate),
    ]
    report = cupynorm.swap_norms(torch.nn.Sequential(*kinds))
    assert not report.swapped and not report.left


@pytest.mark.parametrize("what", LEFT)
def test_a_module_that_cannot_be_swapped_is_left(what):
    make, reason = LEFT[what]
    module = make()
    model = torch.nn.Sequential(module, torch.nn.LayerNorm(64))
    rng = torch.get_rng_state()
    report = cupynorm.swap_norms(model)
    assert torch.equal(torch.get_rng_state(), rng)  # though some modules have dropout
    ((name, was, now, remark),) = report.left
    assert (
        (name, now) == ("0", "")
        and was.endswith(type(module).__qualname__)
        and remark.startswith(reason)
    )
    assert model[0] is module and [swap.name for swap in report.swapped] == ["1"]


def test_other_modules_are_not_reported():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.GroupNorm(2, 8),
        torch.nn.PReLU(8),
        cupynorm.LayerNorm(8),
        cupynorm.RMSNorm(8),
        torch.nn.LocalResponseNorm(2),
    )
    before = list(model)
    report = cupynorm.swap_norms(model)
    assert (
        not report.swapped
        and not report.left
        and all(now is then for now, then in zip(model, before))
    )
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


# Whole models.


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


def test_undo_keeps_the_current_parameters():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), GemmaRMSNorm(8))
    originals = list(model)
    report = cupynorm.swap_norms(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(random_input(3, 8)).square().sum().backward()
    optimizer.step()
    model.half().eval()
    state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    current = list(model.parameters())
    report.undo()
    report.undo()
    assert all(now is original for now, original in zip(model, originals)) and not model[1].training
    assert (
        all(now is then for now, then in zip(model.parameters(), current))
        and model[0].weight.dtype == torch.float16
    )


def test_the_report_is_a_table():
    model = torch.nn.ModuleDict({"first": torch.nn.LayerNorm(8), "second": Gated(8)})
    assert str(cupynorm.swap_norms(model)).splitlines() == [
        "name    was                    now",
        "first   torch.LayerNorm        cupynorm.LayerNorm",
        "second  test_swap_norms.Gated                      "
        "its forward takes x, gate; expected one input",
        "1 swapped, 1 left",
    ]


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
