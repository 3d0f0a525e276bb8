"""y in 8-bit floats: to the byte what the reference makes of the y that the same call gives in the arithmetic's dtype."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.reference import fp8

import cupynorm
from cupynorm import arrays
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
    first = tuple(off[0].tolist())
    return f"{len(off)} of {got.size} bytes; the first at {first}: {got[first]:#x}, expected {want[first]:#x}"


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
