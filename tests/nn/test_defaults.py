"""torch's default dtype and device change no result."""

from __future__ import annotations

import copy

import pytest

import cupynorm

torch = pytest.importorskip("torch")

from cupynorm import fp8_autocast  # noqa: E402
from cupynorm.recipes import DelayedScaling  # noqa: E402

DTYPES = (torch.float64, torch.bfloat16)


@pytest.fixture
def with_defaults():
    """A function that sets torch's default dtype, for the test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["LayerNorm", "Linear", "LayerNormLinear"])
def test_delayed_scales_are_float32(device, with_defaults, kind, dtype):
    """They are made in the first call. Kernels read them as float32."""
    x = torch.randn(16, 32, dtype=torch.float32, device=device)
    sizes = (32,) if kind == "LayerNorm" else (32, 48)
    plain = getattr(cupynorm, kind)(*sizes, device=device)
    module = copy.deepcopy(plain)
    options = {"fp8_output": True} if kind == "LayerNorm" else {}
    results, recipe = [], DelayedScaling(amax_history_len=4)
    for each, default in ((plain, torch.float32), (module, dtype)):
        with_defaults(default)
        for length in (4, 4, 6):  # the last one resizes the history
            rows = x.clone().requires_grad_()
            with fp8_autocast(recipe=DelayedScaling(amax_history_len=length)):
                y = each(rows, **options)
            y = y.dequantize() if kind == "LayerNorm" else y
            y.square().sum().backward()
        results.append((y, rows.grad, *(parameter.grad for parameter in each.parameters())))
    assert recipe and all(map(torch.equal, *results))
    states = [*module._fp8.scales.values()]
    for state in states:
        for tensor in (state.scale, state.amax_history, state.largest):
            assert tensor.dtype == torch.float32
    saved, other = module.state_dict(), copy.deepcopy(plain)
    assert torch.equal(saved["_extra_state"], plain.state_dict()["_extra_state"])
    other.load_state_dict(saved)


def test_the_default_device_is_not_that_of_tensors():
    """Of an empty fp8 state."""
    with torch.device("meta"):
        assert cupynorm.Linear(4, 4, fp8_state=True).state_dict()["_extra_state"].is_cpu


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(24))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_swap_norms_probes_in_float32_on_the_cpu(with_defaults, device, dtype):
    with_defaults(dtype)
    with torch.device(device):
        model = torch.nn.Sequential(Scaled())
        report = cupynorm.swap_norms(model)
    assert [each.now for each in report.swapped] == ["cupynorm.RMSNorm"]
