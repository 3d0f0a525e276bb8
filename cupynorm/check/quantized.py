"""Forward calls whose y has 8 bits, beside the same kernel with y in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, FLOAT8S, compute_dtype, decode
from ..norm.quantized_tensor import scale_shape
from ..norm.request import Options, Quantization
from ..reference import fp8
from .cases import Case, Problem
from .kernels import CpuMachine, GpuCheckMachine
from .results import Finding
from .run import run_forward, tensors_of

GIVEN_SCALE = 20.0


class How(NamedTuple):
    """How y becomes 8-bit floats; amax: whether that of y is recorded beside a given scale."""

    dtype: str
    scaling: str
    amax: bool = False
    power_of_two: bool = False


def run_quantized(
    problem: Problem,
    how: How,
    where: CpuMachine | GpuCheckMachine,
    layouts: Mapping[str, str] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs in their storage dtypes: with y in 8 bits, and with y in the compute dtype.

    layouts: as for run_kernels.
    """
    case = problem.case
    tensors = tensors_of(where, case, layouts)
    num_scales = scale_shape(how.scaling, (case.num_rows,), case.num_cols)
    scale_type = np.uint8 if how.scaling == "mx" else np.uint32
    poison = np.full(num_scales, np.iinfo(scale_type).max, scale_type)
    tensors.write("scale_inv", poison if how.scaling == "mx" else poison.view(np.float32))
    tensors.write("amax", np.zeros(num_scales, np.float32))
    if how.scaling == "given":
        tensors.put("scale", np.full(1, GIVEN_SCALE), "float32")
    quantization = Quantization(how.dtype, how.scaling, how.power_of_two)
    options = Options(case.strategy, case.tile, case.statistics, case.sm_margin)
    plan = run_forward(problem, tensors, options, quantization, amax=how.amax)
    plain = tensors_of(where, case, layouts)
    options = Options(plan.strategy, plan.tile, plan.statistics, case.sm_margin)
    run_forward(problem, plain, options, y_dtype=compute_dtype(case.sum).name)
    return tensors.raw(), plain.raw()


def expected(
    y: np.ndarray, name: str, scaling: str, scale=None, power_of_two=False
) -> fp8.Quantized:
    """The reference's result for y in the compute dtype; scale_inv as cupynorm returns it."""
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
    scale_inv = np.asarray(made.scale_inv).reshape(
        (1,) if scaling in ("given", "tensor") else (len(y), -1)
    )
    return made._replace(scale_inv=scale_inv)


def judge_quantized(
    case: Case, quantization: How, got: dict, plain: dict, exact: bool
) -> list[Finding]:
    """exact: y has the bytes of the reference, computed from y in the compute dtype.

    A GPU's compiler may fuse other operations in another kernel. Then values agree within half a
    step, and scales and the rest within a few roundings.
    """
    name, scaling, scale = quantization.dtype, quantization.scaling, np.float32(GIVEN_SCALE)
    truth = expected(plain["y"], name, scaling, scale, quantization.power_of_two)
    wanted = {"y": truth.data, "scale_inv": truth.scale_inv}
    wanted |= {name: plain[name] for name in ("sum", "mean", "rstd") if name in plain}
    if quantization.amax:
        wanted["amax"] = np.asarray(truth.amax, np.float32).reshape(1)
    label = f"{case}, {quantization.dtype} {quantization.scaling}"
    if exact:
        return [same_bytes(label, name, got[name], each) for name, each in wanted.items()]
    few = 2.0**-20
    y, format = plain["y"].astype(np.float64), FLOAT8S[quantization.dtype]
    values = {name: decode(got[name], case.sum if name == "sum" else "float64") for name in wanted}
    wanted = {
        name: decode(each, case.sum if name == "sum" else "float64")
        for name, each in wanted.items()
    }
    factors = (
        2.0 ** (values["scale_inv"] - 127) if quantization.scaling == "mx" else values["scale_inv"]
    )
    cols = {"block": 128, "mx": 32}.get(quantization.scaling, case.num_cols)
    spread = np.repeat(factors.reshape(-1, factors.shape[-1]), cols, axis=1)[:, : case.num_cols]
    values["y"], wanted["y"] = fp8.decode(got["y"], quantization.dtype) * spread, y
    allowed = {name: few * np.abs(each).max() for name, each in wanted.items()}
    allowed["y"] = (1 + few) * (np.abs(y) * format.half_ulp + spread * format.smallest / 2)
    if quantization.scaling == "mx":
        allowed["scale_inv"] = np.ones(1)  # the next power of two, where an amax is close to one
    allowed |= (
        {"sum": 2 * DTYPES[case.sum].half_ulp * np.abs(wanted["sum"])} if "sum" in wanted else {}
    )
    return [within(label, name, values[name], wanted[name], allowed[name]) for name in wanted]


def same_bytes(case: str, tensor: str, got: np.ndarray, wanted: np.ndarray) -> Finding:
    """Of elements of one dtype and shape."""
    off = np.argwhere(
        (got.view(np.uint8) != wanted.view(np.uint8)).reshape(*got.shape, -1).any(axis=-1)
    )
    where = tuple(off[0].tolist()) if len(off) else ()
    shown = (float(got[where]), float(wanted[where])) if len(off) else (0.0, 0.0)
    return Finding(case, tensor, float("inf") if len(off) else 0.0, where, *shown, 0.0, len(off))


def within(
    case: str, tensor: str, got: np.ndarray, wanted: np.ndarray, allowed: np.ndarray
) -> Finding:
    """Of values."""
    got, wanted, allowed = np.broadcast_arrays(got, wanted, allowed)
    with np.errstate(invalid="ignore"):
        errors = np.abs(got - wanted) / np.maximum(allowed, np.finfo(np.float64).tiny)
    at = np.unravel_index(np.argmax(np.where(np.isnan(errors), np.inf, errors)), errors.shape)
    numbers = (float(each[at]) for each in (errors, got, wanted, allowed))
    error, *shown = numbers
    return Finding(case, tensor, error, tuple(map(int, at)), *shown, int((~(errors <= 1)).sum()))
