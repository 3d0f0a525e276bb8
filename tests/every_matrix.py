"""Kernels of 8-bit matrices and of scales, for every_kernel.py: problems, runs and findings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cupynorm.reference import fp8
from every_quantized import E4M3, E5M2, Kept
from quantized_calls import same_bytes

from cupynorm.dispatch.grids import update_scales_launch
from cupynorm.dtypes import DTYPES, FLOAT8S, compute_dtype, decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.quantized import QuantizeOptions, quantize_call, reduce_matrix_call
from cupynorm.verify.kernels import CpuMachine, GpuCheckMachine
from cupynorm.verify.results import Finding, judge


class Matrix(NamedTuple):
    """A matrix to quantize and transpose.

    x: its dtype, or that of y if it is only transposed. norm: the norm of x is quantized.
    scaling: given, or tensor for a scale from the amax of x.
    """

    num_rows: int
    num_cols: int
    x: str
    y: str
    norm: str | None = None
    scaling: str = "given"


def matrices() -> list[Matrix]:
    """Whole and partial squares of 128, columns written by 16 bytes and by 1, every pack size."""
    every = [
        *(Matrix(256, 128, dtype, E4M3) for dtype in DTYPES),
        *(Matrix(130, num_cols, "bfloat16", E5M2) for num_cols in (1, 257, 130, 132, 136)),
        *(Matrix(48, num_cols, "float32", E4M3) for num_cols in (33, 34, 140)),
        *(
            Matrix(150, num_cols, dtype, E4M3, None, "tensor")
            for num_cols, dtype in ((136, "bfloat16"), (35, "float64"))
        ),
        *(
            Matrix(num_rows, num_cols, E5M2, E5M2)
            for num_rows, num_cols in ((144, 272), (130, 129), (7, 40))
        ),
        *(Matrix(num_rows, num_cols, E4M3, E4M3) for num_rows, num_cols in ((16, 130), (33, 132))),
    ]
    for norm in ("layer_norm", "rms_norm"):
        every += [Matrix(144, 136, "bfloat16", E4M3, norm), Matrix(131, 257, "float32", E5M2, norm)]
        every.append(Matrix(20, 130, "float64", E4M3, norm))
    return every


def run_matrix(matrix: Matrix, where: CpuMachine | GpuCheckMachine) -> tuple[dict, dict]:
    """What the kernel makes, and what it is given: arrays by name."""
    num_rows, num_cols, x, y, norm, scaling = matrix
    generator = np.random.default_rng([num_rows, num_cols])
    is_scaled = x != y
    values = generator.standard_normal((num_rows, num_cols)) + 0.5
    given = {"x": encode(values, x) if is_scaled else fp8.encode(values, y)}
    if norm:
        weight, bias = generator.standard_normal((2, num_cols)) * 0.5 + 1
        taken, compute = decode(given["x"], x), compute_dtype(x).name
        mean = taken.mean(axis=1) if norm == "layer_norm" else np.zeros(num_rows)
        given |= {
            "weight": encode(weight, x),
            "rstd": (1 / np.sqrt(((taken - mean[:, None]) ** 2).mean(axis=1))).astype(compute),
        }
        given |= (
            {"bias": encode(bias, x), "mean": mean.astype(compute)} if norm == "layer_norm" else {}
        )
    if scaling == "tensor":
        given["amax"] = np.abs(decode(given["x"], x)).max().astype(np.float32).reshape(1)
    elif is_scaled:
        given["scale"] = np.full(1, 9.0, np.float32)
    kept = Kept(where)
    at = {name: kept.put(name, array) for name, array in given.items()}
    at["transposed"] = kept.poisoned("transposed", (num_cols, num_rows), "uint8")
    if is_scaled:
        at["data"] = kept.poisoned("data", (num_rows, num_cols), "uint8")
        at["scale_inv"] = kept.poisoned("scale_inv", (1,), "float32")
        if scaling == "given":
            at["amax"] = kept.put("amax", np.zeros(1, np.float32))
    tensors = {"x": Rows(at["x"], num_rows, num_cols, num_cols, x)}
    tensors |= {
        name: Rows(at[name], 1, num_cols, num_cols, x) for name in ("weight", "bias") if name in at
    }
    sums = None
    if is_scaled and not norm:
        sums, squares = compute_dtype(x).name, -(-num_rows // 128)
        at["sums"] = kept.poisoned("sums", (num_cols,), sums)
        at["partials"] = kept.poisoned("partials", (squares, num_cols), sums)
    centered = norm and norm == "layer_norm"
    rule = (0.0, False) if scaling == "tensor" else None
    call = quantize_call(tensors, QuantizeOptions(y, centered, sums=sums, rule=rule))
    for launch, each in zip(call.launches, call.fill(at), strict=True):
        where.launch(launch, each)
    return {name: kept.get(name) for name in kept.arrays if name not in (*given, "partials")}, given


def judge_matrix(matrix: Matrix, got: dict, given: dict) -> list[Finding]:
    """To the byte; of a norm, whose x_hat is rounded, within a step of 8 bits, and few of them."""
    label = " ".join(map(str, matrix))
    if matrix.x == matrix.y:
        return [
            same_bytes(label, "transposed", got["transposed"], np.ascontiguousarray(given["x"].T))
        ]
    findings = [
        same_bytes(label, "transposed", got["transposed"], np.ascontiguousarray(got["data"].T))
    ]
    values = decode(given["x"], matrix.x)
    if matrix.norm:
        values = (values - given.get("mean", np.zeros(1)).reshape(-1, 1)) * given["rstd"].reshape(
            -1, 1
        )
        values = values * decode(given["weight"], matrix.x)
        values = values + decode(given["bias"], matrix.x) if "bias" in given else values
    found = (
        given["scale"][0] if matrix.scaling == "given" else fp8.scale_of(fp8.amax(values), matrix.y)
    )
    truth = fp8.quantize(values, matrix.y, found)
    findings.append(
        same_bytes(label, "scale_inv", got["scale_inv"], np.float32(truth.scale_inv).reshape(1))
    )
    if not matrix.norm:
        if matrix.scaling == "given":
            findings.append(
                same_bytes(label, "amax", got["amax"], np.float32(truth.amax).reshape(1))
            )
        # Additions in sequence, each rounded: 128 in a square, and one for each square.
        additions = 128 + -(-matrix.num_rows // 128)
        rounding = additions * DTYPES[compute_dtype(matrix.x).name].half_ulp
        findings.append(
            judge(
                label,
                "sums",
                got["sums"],
                values.sum(axis=0),
                rounding * np.abs(values).sum(axis=0),
            )
        )
        return [*findings, same_bytes(label, "data", got["data"], truth.data)]
    made, wanted = (fp8.decode(each, matrix.y) for each in (got["data"], truth.data))
    allowed = 2 * FLOAT8S[matrix.y].half_ulp * np.abs(wanted) + FLOAT8S[matrix.y].smallest
    few = judge(
        label,
        "bytes of a norm's data that differ, as a share",
        np.mean(made != wanted),
        np.zeros(()),
        np.full((), 0.01),
    )
    return [*findings, judge(label, "data of a norm", made, wanted, allowed), few]


class Reduced(NamedTuple):
    """A matrix for reduce_matrix.cu: sums over rows, or the largest magnitude if sums is None."""

    num_rows: int
    num_cols: int
    x: str
    sums: str | None


def reductions() -> list[Reduced]:
    """Both kinds in every dtype, packs and single elements, several slabs and a part of one."""
    shapes = (
        (1, 1, "float32"),
        (3000, 8, "bfloat16"),
        (130, 257, "float16"),
        (300, 136, "float32"),
        (700, 66, "float64"),
    )
    return [Reduced(*shape, sums) for shape in shapes for sums in (None, shape[2])]


def run_reduction(reduction: Reduced, where: CpuMachine | GpuCheckMachine) -> tuple[dict, dict]:
    """What the kernels find, and what they are given: arrays by name."""
    num_rows, num_cols, x, sums = reduction
    values = (
        np.random.default_rng([num_rows, num_cols]).standard_normal((num_rows, num_cols)) + 0.25
    )
    given = {"x": encode(values, x)}
    kept = Kept(where)
    at = kept.put("x", given["x"])
    call = reduce_matrix_call(where.device, Rows(at, num_rows, num_cols, num_cols, x), sums)
    found = {}
    if sums:
        found["partials"] = kept.poisoned("partials", call.partials_shape, compute_dtype(x).name)
        found["sums"] = kept.poisoned("sums", (num_cols,), DTYPES[sums].storage)
    else:
        found["amax"] = kept.put("amax", np.zeros(1, np.float32))
    for launch, each in zip(call.launches, call.fill({"x": at, **found}), strict=True):
        where.launch(launch, each)
    return {name: kept.get(name) for name in found if name != "partials"}, given


def judge_reduction(reduction: Reduced, got: dict, given: dict) -> list[Finding]:
    """The largest to the byte; of sums each addition rounds, and the result once."""
    label, values = " ".join(map(str, reduction)), decode(given["x"], reduction.x)
    if reduction.sums is None:
        return [
            same_bytes(
                label, "amax", got["amax"], np.abs(values).max().astype(np.float32).reshape(1)
            )
        ]
    rounding = (
        reduction.num_rows
        * DTYPES[compute_dtype(reduction.x).name].half_ulp
        * np.abs(values).sum(axis=0)
    )
    rounding += DTYPES[reduction.sums].half_ulp * np.abs(values.sum(axis=0))
    return [
        judge(
            label, "sums", decode(got["sums"], reduction.sums), values.sum(axis=0), 1.01 * rounding
        )
    ]


def run_scales(num_steps: int, where: CpuMachine | GpuCheckMachine) -> tuple[dict, dict]:
    """Results and inputs of a step of delayed scaling for five tensors; the third is unused."""
    history = np.abs(np.random.default_rng(num_steps).standard_normal((num_steps, 5))).astype(
        np.float32
    )
    history[0] = (2.0, np.nan, 0.0, 1e-42, np.inf)
    largest = np.array([448, 57344, 448, 448, 57344], np.float32)
    given = {"scale": np.arange(1, 6, dtype=np.float32), "history": history, "largest": largest}
    kept = Kept(where)
    pointers = [kept.put(name, array.copy()) for name, array in given.items()]
    where.launch(update_scales_launch(5), (*pointers, 0.5, 0, num_steps, 5))
    return {name: kept.get(name) for name in ("scale", "history")}, given


def judge_scales(got: dict, given: dict) -> list[Finding]:
    """To the byte."""
    history, scale = given["history"], given["scale"].copy()
    amax = np.nan_to_num(history, nan=0.0, posinf=np.inf).max(axis=0)
    older = np.concatenate([np.zeros_like(history[:1]), history[2:], history[:1]])[: len(history)]
    used = history[0] != 0
    for at in np.flatnonzero(used & np.isfinite(amax) & (amax > 0)):
        with np.errstate(over="ignore"):
            scale[at] = min(
                given["largest"][at] * np.float32(0.5) / amax[at], np.finfo(np.float32).max
            )
    wanted = {
        "scale": scale,
        "history": np.where(used, older, history)
        if len(history) > 1
        else np.where(used, 0, history),
    }
    label = f"delayed scales of {len(history)} steps"
    return [
        same_bytes(label, name, got[name], each.astype(np.float32)) for name, each in wanted.items()
    ]


STEPS = (1, 2, 300)
