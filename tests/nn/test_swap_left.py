"""swap_norms: modules that are left."""

from __future__ import annotations

import copy

import pytest

import cupynorm

torch = pytest.importorskip("torch")

from swap_classes import Gated, LlamaRMSNorm, foreign, parameter  # noqa: E402


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


class LearnedEps(torch.nn.Module):
    """Its name says nothing, and its parameters have different shapes."""

    def __init__(self, bias: bool, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.bias = torch.nn.Parameter(torch.ones(64)) if bias else 1
        self.var = torch.nn.Parameter(torch.full(shape, 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, True) + self.var) * self.weight + self.bias


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


def flattened(module: torch.nn.Module) -> torch.nn.Module:
    """As FullyShardedDataParallel(use_orig_params=True) marks the parameters that it shards."""
    for each in module.parameters():
        each._fsdp_flattened = True
    return module


NEITHER = "it computes neither layer_norm nor rms_norm of its weight"


class DetachedRMSNorm(LlamaRMSNorm):
    """Its values are those of rms_norm, and its gradients are not."""

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        size = x.detach().square().mean(-1, keepdim=True)
        return x * torch.rsqrt(size + self.variance_epsilon)


class ClippedGradients(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.clamp(-1, 1))
        return y


class OfRows(LlamaRMSNorm):
    """An RMSNorm unless `is_other` says so of its input."""

    def __init__(self, is_other) -> None:
        super().__init__(64)
        self.is_other = is_other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if self.is_other(x) else super().forward(x)


class OfHeads(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(*x.shape[:-1], -1, len(self.weight))).reshape(x.shape)


class WithoutNaN(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).nan_to_num()


class AnyNumber(LlamaRMSNorm):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(sum(inputs))


class Doubling(torch.nn.LayerNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


class OfOlderKeys(LlamaRMSNorm):
    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] + 1
        super()._load_from_state_dict(state_dict, prefix, *arguments)


OTHER_GRADIENTS = "its gradients are not those of the norm that it computes"

LEFT = {
    "many rows": (
        lambda: OfRows(lambda x: x.numel() > 2**15),
        "it computes another result for input of shape (1020, 64)",
    ),
    "one row": (
        lambda: OfRows(lambda x: x.numel() == 64),
        "it computes another result for input of shape (1, 64)",
    ),
    "no dimension of rows": (
        lambda: OfRows(lambda x: x.ndim == 1),
        "it computes another result for input of shape (64,)",
    ),
    "more dimensions": (
        lambda: OfRows(lambda x: x.ndim == 5),
        "it computes another result for input of shape (1, 20, 1, 1, 64)",
    ),
    "a NaN in other rows": (
        lambda: OfRows(lambda x: x.isnan().any()),
        "it computes another result for a NaN",
    ),
    "no NaN": (lambda: WithoutNaN(64), "it computes another result for a NaN"),
    "heads": (lambda: OfHeads(64), "it takes input of shape (2, 128) too; expected (..., 64)"),
    "any number of inputs": (lambda: AnyNumber(64), "its forward takes inputs; expected one input"),
    "__call__": (lambda: Doubling(64), "its class has a __call__ of its own"),
    "older keys": (lambda: OfOlderKeys(64), "its class has a _load_from_state_dict of its own"),
    "FullyShardedDataParallel": (
        lambda: flattened(torch.nn.LayerNorm(64)),
        "FullyShardedDataParallel has wrapped it; expected the swap before",
    ),
    "tensor attribute": (
        lambda: with_(LlamaRMSNorm(64), gain=torch.ones(64)),
        "its attribute gain is a tensor; expected a parameter",
    ),
    "a detached variance": (lambda: DetachedRMSNorm(64), OTHER_GRADIENTS),
    "clipped gradients": (lambda: ClippedGradients(64), OTHER_GRADIENTS),
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


class Standardize(torch.nn.Module):
    def __init__(self, formula) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x):
        return self.formula(x)


@pytest.mark.parametrize(
    "formula, is_norm",
    (
        (lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-3), True),
        (lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), True),
        (torch.sign, False),  # whose output does not depend on the size of its input either
        (lambda x: torch.nn.functional.normalize(x, dim=-1), False),
        (lambda x: (x - x.mean(-2, keepdim=True)) / x.std(-2, keepdim=True), False),
        (lambda x: x.reshape(-1, 7, 3), False),
    ),
)
def test_modules_without_parameters_are_known_by_what_they_compute(formula, is_norm):
    report = cupynorm.swap_norms(torch.nn.Sequential(Standardize(formula)))
    assert not report.swapped and len(report.left) == is_norm
    assert all("nothing says what it normalises over" in each.remark for each in report.left)


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
    "learned eps": (LearnedEps(True, 1), "it holds bias, var, weight; expected a weight"),
    "no bias": (LearnedEps(False), "its weight has shape (64,), its var has shape ()"),
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


def test_gradients_are_looked_at_in_inference_mode_too():
    model = torch.nn.Sequential(DetachedRMSNorm(64), torch.nn.LayerNorm(64))
    with torch.inference_mode():
        report = cupynorm.swap_norms(model)
    assert [each.remark for each in report.left] == [OTHER_GRADIENTS] and model[1].training


def test_a_compiled_norm_is_left():
    """torch.compile keeps what it has wrapped, whatever else its wrapper holds."""
    compiled = torch.compile(torch.nn.LayerNorm(8), backend="eager")
    for model, name in ((compiled, "_orig_mod"), (torch.nn.Sequential(compiled), "0._orig_mod")):
        report = cupynorm.swap_norms(model)
        assert not report.swapped and [each.name for each in report.left] == [name]
        assert report.left[0].remark == "torch.compile has wrapped it; expected the swap before"


def test_modules_of_torchscript_are_passed_over():
    """Nothing can be exchanged inside them, and their forward cannot be looked at."""
    norm, x = torch.nn.LayerNorm(8), torch.randn(2, 8)
    traced, scripted = torch.jit.trace(norm, x), torch.jit.script(norm)
    activation = torch.jit.trace(torch.nn.GELU(), x)
    model = torch.nn.Sequential(traced, scripted, activation, torch.nn.LayerNorm(8))
    report = cupynorm.swap_norms(model)
    assert [swap.name for swap in report.swapped] == ["3"] and not report.left


class ReLU(torch.nn.Module):
    forward = torch.relu  # has no signature


class ScalarWeight(LlamaRMSNorm):
    """One weight for rows of any width."""

    def __init__(self, num_cols: int) -> None:
        super().__init__(num_cols)
        self.weight = torch.nn.Parameter(torch.ones(1))


def test_modules_without_a_width_or_a_signature_are_passed_over():
    class LazyNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.parameter.UninitializedParameter()

    for module in (ReLU(), torch.nn.LazyLinear(8), LazyNorm()):
        report = cupynorm.swap_norms(torch.nn.Sequential(module))
        assert not report.swapped and not report.left
    model = torch.nn.Sequential(ScalarWeight(8))
    (left,) = cupynorm.swap_norms(model).left
    assert "its weight has shape (1,); expected no dimension of 1" in left.remark
    assert model(torch.randn(2, 8)).shape == (2, 8)
