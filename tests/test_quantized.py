"""y in 8-bit floats: to the byte what the reference makes of the y that the same call gives in the arithmetic's dtype."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.reference import fp8

import cupynorm
from cupynorm import arrays, quantized
from cupynorm.dtypes import FLOAT8S, compute_dtype
from cupynorm.quantized import QuantizedTensor

torch = pytest.importorskip("torch")

SCALES = ("given", "tensor", "row", "block", "mx")


@pytest.fixture(params=["kernels", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Where the kernels run."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return "cuda" if request.param == "gpu" else "cpu"


def random(*shape, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def numpy(tensor):
    tensor = tensor.cpu()
    return (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).numpy()


def expected(y: np.ndarray, name: str, scaling: str, scale=None, power_of_two=False) -> fp8.Quantized:
    """By the reference, of a matrix; scale_inv as cupynorm returns it."""
    with np.errstate(all="ignore"):
        if scaling == "given":
            made = fp8.quantize(y, name, np.float32(1) if scale is None else scale)
        elif scaling == "tensor":
            made = fp8.quantize(y, name, fp8.scale_of(fp8.amax(y), name, power_of_two=power_of_two))
        elif scaling == "row":
            made = fp8.quantize_rows(y, name, power_of_two=power_of_two)
        elif scaling == "block":
            made = fp8.quantize_blocks(y, name, power_of_two=power_of_two)
        else:
            made = fp8.quantize_mxfp8(y, name)
    scale_inv = np.asarray(made.scale_inv).reshape((1,) if scaling in ("given", "tensor") else (len(y), -1))
    return made._replace(scale_inv=scale_inv)


def same_bytes(x, y):
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def assert_exact(norm, x, scaling, name="float8_e4m3fn", *, power_of_two=False, scale=None, **options):
    """The bytes of y, its scales and its amax against the reference's of y in the arithmetic's dtype, by the very same tile."""
    call = getattr(cupynorm, norm)
    num_rows, num_cols = x.shape
    dtype = arrays.dtype_name(x)
    amax = torch.zeros(1, device=x.device) if scaling == "given" else None
    given = scale if scaling == "given" else scaling
    made = call(x, num_cols, out_dtype=name, scale=given, amax=amax, power_of_two=power_of_two, **options)
    assert isinstance(made, QuantizedTensor) and made.format == name and tuple(made.shape) == (num_rows, num_cols)
    y = numpy(call(x, num_cols, out_dtype=compute_dtype(dtype).name, **same_tile(x, scaling, name, options), **options))
    truth = expected(y, name, scaling, None if scale is None else numpy(scale)[0], power_of_two)
    assert same_bytes(numpy(made.data), truth.data), where_off(numpy(made.data), truth.data)
    assert same_bytes(numpy(made.scale_inv), truth.scale_inv)
    if amax is not None:
        assert same_bytes(numpy(amax), np.asarray(truth.amax).reshape(1)) or np.isnan(truth.amax) and amax.isnan().all()


def where_off(got, want):
    off = np.argwhere(got != want)
    return f"{len(off)} of {got.size} bytes; the first at {off[0].tolist()}: {got[tuple(off[0])]:#x}, expected {want[tuple(off[0])]:#x}"


def same_tile(x, scaling, name, options):
    """strategy and tile of the call that quantises."""
    from cupynorm import norm as calls

    if "strategy" in options:
        return {}
    kept = next(reversed(calls.fused_forwards.values()))
    plan = kept.call.plan
    return {"strategy": plan.strategy, "tile": plan.tile, "statistics": plan.statistics}


@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize("name", FLOAT8S)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_bytes(norm, name, scaling, device):
    for num_cols, dtype in (
        (768, torch.bfloat16),
        (1000, torch.float16),
        (200, torch.float32),
        (33, torch.float64),
        (1, torch.float32),
    ):
        x = random(5, num_cols, dtype=dtype, device=device)
        weight = random(num_cols, dtype=dtype, seed=1, device=device)
        scale = torch.tensor([37.5], device=device)
        assert_exact(norm, x, scaling, name, weight=weight, scale=scale if scaling == "given" else None)


@pytest.mark.parametrize("shape", [(1, 1), (16, 128), (130, 257), (48, 200), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_matrix_and_its_transposed_copy(shape, dtype, device):
    x = random(*shape, dtype=dtype, device=device) * 3
    scale, amax = torch.tensor([21.0], device=device), torch.tensor([0.5], device=device)
    data, scale_inv, transposed = quantized.quantize(x, "float8_e5m2", scale, amax, transpose=True)
    truth = fp8.quantize(numpy(x.double() if dtype == torch.float64 else x.float()), "float8_e5m2", np.float32(21))
    assert same_bytes(numpy(data), truth.data) and same_bytes(numpy(transposed), truth.data.T)
    assert same_bytes(numpy(scale_inv), truth.scale_inv.reshape(1)) and numpy(amax)[0] == max(truth.amax, np.float32(0.5))
    data, _, transposed = quantized.quantize(data, "float8_e5m2", wants_data=False, transpose=True)
    assert data is None and same_bytes(numpy(transposed), truth.data.T)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_norm_whose_statistics_are_known(norm, device):
    """Nearly forward's bytes: what rounding took from the saved mean is not there to be added."""
    x = random(40, 136, dtype=torch.bfloat16, device=device)
    weight, bias = (random(136, dtype=torch.bfloat16, seed=seed, device=device) for seed in (1, 2))
    bias = bias if norm == "layer_norm" else None
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight, bias, zero_centered_weight=True)
    of_norm = quantized.OfNorm(norm == "layer_norm", weight, bias, True, forward.mean, forward.rstd)
    data, _, transposed = quantized.quantize(x, "float8_e4m3fn", transpose=True, of_norm=of_norm)
    assert same_bytes(numpy(transposed), numpy(data).T)
    y = numpy(x.float() if forward.mean is None else x.float() - forward.mean[:, None]) * numpy(forward.rstd)[:, None]
    y = y * (1 + numpy(weight.float())) + (0 if bias is None else numpy(bias.float()))
    got, want = fp8.decode(numpy(data), "float8_e4m3fn"), fp8.decode(fp8.encode(y, "float8_e4m3fn"), "float8_e4m3fn")
    assert (np.abs(got - want) <= np.abs(want) / 8 + 2**-9).all() and (got != want).mean() < 1e-3
