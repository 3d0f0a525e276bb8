"""Compares the bytes of an 8-bit call with the reference's."""

from __future__ import annotations

import numpy as np
import pytest
from quantized_calls import How, expected

import cupynorm
from cupynorm.dtypes import DTYPES, compute_dtype
from cupynorm.gpu import arrays
from cupynorm.norm import prepared
from cupynorm.norm.quantized import QuantizedTensor

torch = pytest.importorskip("torch")

SCALES = ("given", "tensor", "row", "block", "block64")


def how_of(scaling, name="float8_e4m3fn", scale=None, **options):
    """That of one of SCALES. scale: a given one."""
    if scaling == "given":
        return cupynorm.Quantize(name, scale, **options)
    group_size = 64 if scaling == "block64" else 128
    return cupynorm.Quantize(name, scaling.removesuffix("64"), group_size=group_size, **options)


def random(*shape, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def numpy(tensor):
    tensor = tensor.cpu()
    return (
        tensor.view(torch.uint8)
        if tensor.dtype.itemsize == 1 and tensor.is_floating_point()
        else tensor
    ).numpy()


def same_bytes(x, y):
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def same_floats(x, y):
    """Whether the bytes are equal. All NaNs count as equal: a GPU's and a CPU's differ in bits."""
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype == np.uint8:
        return same_bytes(x, y)
    return np.array_equal(np.isnan(x), np.isnan(y)) and same_bytes(
        np.where(np.isnan(x), 0, x), np.where(np.isnan(y), 0, y)
    )


def assert_exact(
    norm, x, scaling, name="float8_e4m3fn", *, power_of_two=False, scale=None, **options
):
    """Compares the bytes of y, its scales and its amax with the reference's.

    The reference takes the y of a call with the same tile in the arithmetic's dtype.
    """
    call = getattr(cupynorm, norm)
    num_rows, num_cols = x.shape
    dtype = arrays.dtype_name(x)
    amax = torch.zeros(1, device=x.device) if scaling == "given" else None
    how = how_of(scaling, name, scale, amax=amax, power_of_two=power_of_two)
    made = call(x, num_cols, out_dtype=how, **options)
    assert (
        isinstance(made, QuantizedTensor)
        and made.format == name
        and tuple(made.shape) == (num_rows, num_cols)
    )
    y = numpy(
        call(
            x,
            num_cols,
            out_dtype=compute_dtype(dtype).name,
            **same_tile(x, scaling, name, options),
            **options,
        )
    )
    given = None if scale is None else numpy(scale)[0]
    truth = expected(y, How(name, scaling, power_of_two=power_of_two), given)
    assert same_bytes(numpy(made.data), truth.data), where_off(numpy(made.data), truth.data)
    assert same_floats(numpy(made.scale_inv), truth.scale_inv)
    if amax is not None:
        assert same_floats(numpy(amax), np.asarray(truth.amax).reshape(1))


def assert_sums(x, made, additions):
    """Sums over the rows of x err by so many additions and one rounding."""
    exact, sizes = x.double().sum(0), x.double().abs().sum(0)
    of_made = DTYPES[arrays.dtype_name(made)].half_ulp
    of_additions = additions * compute_dtype(arrays.dtype_name(x)).half_ulp
    allowed = of_additions * sizes * (1 + of_made) + of_made * exact.abs()
    assert ((made.double() - exact).abs() <= allowed).all()


def where_off(got, want):
    off = np.argwhere(got != want)
    first = tuple(off[0].tolist())
    return (
        f"{len(off)} of {got.size} bytes; the first at {first}: "
        f"{got[first]:#x}, expected {want[first]:#x}"
    )


def same_tile(x, scaling, name, options):
    """The strategy, tile and statistics of the call before, which quantised."""
    if "launch" in options:
        return {}
    plan = next(reversed(prepared.forwards.values())).plan
    return {"launch": cupynorm.Launch(plan.strategy, plan.tile, plan.statistics)}
