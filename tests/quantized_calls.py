"""Forward calls whose y has 8 bits: held to float64, and byte by byte to the same kernel with y in
the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from cupynorm.reference import fp8

from cupynorm.dispatch.dispatch import Plan
from cupynorm.dispatch.problem import cols_of_scale
from cupynorm.dtypes import compute_dtype, decode
from cupynorm.norm.quantized import scale_memory, scale_shape, unpacked
from cupynorm.norm.request import Launch, Quantization
from cupynorm.verify.bounds import expect
from cupynorm.verify.cases import Case, Problem
from cupynorm.verify.kernels import Machine, Tensors, run_forward
from cupynorm.verify.results import Finding, judge_against

GIVEN_SCALE = 20.0
_SMALLEST = 2.0**-149  # of float32: what a scale_inv below 2^-126 is rounded to
_FEW = 8 * 2.0**-24  # the scale, its inverse and the product are each rounded to float32


class How(NamedTuple):
    """How y becomes 8 bits, as request.Quantization; amax: whether that of y is recorded beside a
    given scale. divides: that is given as its inverse."""

    dtype: str
    scaling: str
    amax: bool = False
    power_of_two: bool = False
    upper_bound: float | None = None
    divides: bool = False
    layout: str = "row"

    @property
    def given(self) -> np.float32:
        """A given scale, or its inverse."""
        return np.float32(1 / GIVEN_SCALE if self.divides else GIVEN_SCALE)

    @property
    def quantization(self) -> Quantization:
        return Quantization(
            self.dtype,
            self.scaling,
            self.power_of_two,
            upper_bound=self.upper_bound or np.inf,
            divides=self.divides,
            layout=self.layout,
        )

    def __str__(self) -> str:
        parts = [
            each for name, each in self._asdict().items() if each != self._field_defaults.get(name)
        ]
        return " ".join(map(str, parts))


def run_8_bits(
    problem: Problem,
    how: How,
    where: Machine,
    make_tensors: Callable[[Machine], Tensors] = Tensors,
) -> tuple[dict[str, np.ndarray], Plan]:
    """(outputs in their storage dtypes, what was launched)."""
    tensors, plan = launch_8_bits(problem, how, where, make_tensors)
    return tensors.raw(), plan


def launch_8_bits(
    problem: Problem,
    how: How,
    where: Machine,
    make_tensors: Callable[[Machine], Tensors] = Tensors,
) -> tuple[Tensors, Plan]:
    """As run_8_bits, without waiting for outputs."""
    case = problem.case
    tensors = make_tensors(where)
    leading = (case.num_rows,)
    shape, dtype = scale_memory(how.quantization, leading, case.num_cols)
    tensors.write("scale_inv", np.full(shape, 2**32 - 1, np.uint32).view(dtype))
    amaxes = scale_shape(how.scaling, leading, case.num_cols)
    tensors.write("amax", np.zeros(amaxes, np.float32))
    if how.scaling == "given":
        tensors.put("scale", np.full(1, how.given, np.float64), "float32")
    options = Launch(case.strategy, case.tile, case.statistics, case.sm_margin)
    plan = run_forward(problem, tensors, options, how.quantization, amax=how.amax)
    return tensors, plan


def run_quantized(
    problem: Problem,
    how: How,
    where: Machine,
    make_tensors: Callable[[Machine], Tensors] = Tensors,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs in their storage dtypes: with y in 8 bits, and with y in the compute dtype."""
    case = problem.case
    outputs, plan = run_8_bits(problem, how, where, make_tensors)
    plain = make_tensors(where)
    options = Launch(plan.strategy, plan.tile, plan.statistics, case.sm_margin)
    run_forward(problem, plain, options, y_dtype=compute_dtype(case.sum).name)
    return outputs, plain.raw()


def expected(y: np.ndarray, how: How, given: np.float32 | None) -> fp8.Quantized:
    """The reference's result for y in the compute dtype; scale_inv as cupynorm returns it in the
    layout "row".

    given: the scale, or what divides y; None: 1.
    """
    rule = {"power_of_two": how.power_of_two, "upper_bound": how.upper_bound or np.inf}
    rule |= {} if given is None else {"scale_inv" if how.divides else "scale": given}
    quantized = fp8.quantize_by(how.scaling, y, how.dtype, **rule)
    scale_inv = np.asarray(quantized.scale_inv).reshape(
        (1,) if how.scaling in ("given", "tensor") else (len(y), -1)
    )
    return quantized._replace(scale_inv=scale_inv)


def _scales_of(how: How, memory: np.ndarray, case: Case) -> np.ndarray:
    """The scales that were written, in the layout "row"."""
    if how.layout == "row":
        return memory
    scales = memory[:, : case.num_rows].T
    scales = unpacked(scales) if how.layout == "packed" else scales
    return scales[:, : scale_shape(how.scaling, (), case.num_cols)[0]].copy()


def judge_bytes(case: Case, how: How, got: dict, plain: dict) -> list[Finding]:
    """got has the bytes that the reference makes of plain["y"], and those of the rest of plain.

    So it is on a CPU. A GPU's compiler may fuse other operations in another kernel: judge_values.
    """
    truth = expected(plain["y"], how, how.given)
    wanted = {"y": truth.data, "scale_inv": truth.scale_inv}
    wanted |= {name: plain[name] for name in ("sum", "mean", "rstd") if name in plain}
    if how.amax:
        wanted["amax"] = np.asarray(truth.amax, np.float32).reshape(1)
    label = f"{case}, {how}"
    got = got | {"scale_inv": _scales_of(how, got["scale_inv"], case)}
    return [same_bytes(label, name, got[name], each) for name, each in wanted.items()]


def judge_values(
    problem: Problem, how: How, got: dict, *, rounded_mean: bool = False
) -> list[Finding]:
    """got is what one of the rows that bounds.py allows is quantised to.

    Rounding is monotonic. So y lies between what the least and the largest allowed value are
    quantised to with the scale that the call returned, and so do the scales. rounded_mean: as for
    bounds.expect.
    """
    case = problem.case
    compute = compute_dtype(case.sum)
    wide = replace(problem, case=replace(case, y=compute.name))
    dtypes = {"sum": case.sum, "mean": compute.name, "rstd": compute.name}
    values = {name: decode(got[name], dtype) for name, dtype in dtypes.items() if name in got}
    expectations = expect(
        wide, rounded_mean=rounded_mean, added=values.get("sum"), forward_only=True
    )
    findings = judge_against(wide.case, expectations, values)
    y, allowed = expectations["y"]
    allowed = np.where(np.isfinite(y), allowed, 0.0)  # a NaN that is expected has no error
    label = f"{case}, {how}"
    got = got | {"scale_inv": _scales_of(how, got["scale_inv"], case)}
    with np.errstate(all="ignore"):
        least, most = (np.maximum(np.abs(y) + each, 0.0) for each in (-allowed, allowed))
        least, most = (_largest(each, how.scaling) for each in (least, most))
        least = expected(least * (1 - _FEW), how, how.given)
        most = expected(most * (1 + _FEW), how, how.given)
        findings.append(_judge_scales(label, how, got["scale_inv"], least, most))
        if how.amax:
            bounds = (np.reshape(each.amax, 1).astype(np.float64) for each in (least, most))
            findings.append(between(label, "amax", got["amax"].astype(np.float64), *bounds))
        factors = _factors(how, got["scale_inv"], case.num_cols)
        ends = [(y + each) / factors for each in (-allowed, allowed)]
        ends = [each * (1 + few) for each in ends for few in (-_FEW, _FEW)]
        ends = np.minimum.reduce(ends), np.maximum.reduce(ends)
        bounds = [fp8.decode(fp8.encode(each, how.dtype), how.dtype) * factors for each in ends]
        decoded = fp8.decode(got["y"], how.dtype)
        findings.append(between(label, "y", decoded * factors, *bounds))
    return findings


def _largest(sizes: np.ndarray, scaling: str) -> np.ndarray:
    """Fewer sizes that have the same scales: those of blocks need all."""
    if scaling in ("given", "tensor"):
        return sizes.max(initial=0.0).reshape(1, 1)
    return sizes.max(axis=1, keepdims=True) if scaling == "row" else sizes


def _judge_scales(
    label: str, how: How, got: np.ndarray, least: fp8.Quantized, most: fp8.Quantized
) -> Finding:
    """least, most: the quantised rows of the smallest and of the largest amax that is allowed."""
    low, high = (each.scale_inv.astype(np.float64) for each in (least, most))
    # The scale of an amax of 0 is 1, and near 0 an inverse may be anything down to 0.
    smallest = np.finfo(np.float32).tiny  # a smaller amax counts as 0
    none = np.reshape(least.amax, low.shape) < smallest
    none &= np.reshape(most.amax, low.shape) >= smallest
    low = np.where(none, 0.0, low * (1 - _FEW) - _SMALLEST)
    high = np.where(none & (got == 1), 1.0, high * (1 + _FEW) + _SMALLEST)
    return between(label, "scale_inv", got.astype(np.float64), low, high)


def _factors(how: How, scale_inv: np.ndarray, num_cols: int) -> np.ndarray:
    """What each element of y is multiplied by to get its value, [1 or num_rows, 1 or num_cols]."""
    factors = scale_inv.astype(np.float64)
    if how.scaling in ("given", "tensor"):
        return factors.reshape(1, 1)
    cols = cols_of_scale(how.scaling, num_cols)
    return np.repeat(factors.reshape(len(factors), -1), cols, axis=1)[:, :num_cols]


def between(case: str, tensor: str, got: np.ndarray, low: np.ndarray, high: np.ndarray) -> Finding:
    """Of values that lie from low to high, or are NaN where both are."""
    got, low, high = np.broadcast_arrays(got, low, high)
    is_right = (low <= got) & (got <= high) | (np.isnan(got) & np.isnan(low) & np.isnan(high))
    off = np.argwhere(~is_right)
    if not len(off):
        return Finding(case, tensor, 0.0, (), 0.0, 0.0, 0.0, 0)
    where = tuple(off[0].tolist())
    middle, reach = (low[where] + high[where]) / 2, (high[where] - low[where]) / 2
    numbers = (float(each) for each in (got[where], middle, reach))
    return Finding(case, tensor, float("inf"), where, *numbers, len(off))


def same_bytes(case: str, tensor: str, got: np.ndarray, wanted: np.ndarray) -> Finding:
    """Of elements of one dtype and shape."""
    off = np.argwhere(
        (got.view(np.uint8) != wanted.view(np.uint8)).reshape(*got.shape, -1).any(axis=-1)
    )
    where = tuple(off[0].tolist()) if len(off) else ()
    shown = (float(got[where]), float(wanted[where])) if len(off) else (0.0, 0.0)
    return Finding(case, tensor, float("inf") if len(off) else 0.0, where, *shown, 0.0, len(off))
