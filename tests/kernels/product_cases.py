"""Problems of norm_linear.cu and fold_weight.cu, their runs on a machine, and what is allowed.

The allowed errors of norm_linear.cu, element by element, beside float64 with the same folded weight
F and terms. u = 2^-24, n = in_features, f the mean of a row's first eight elements, and
d = |mean - f| rstd (0 for RMSNorm):

    rstd   g rstd, g = u (4 + sqrt(n)) (1 + d^2): the variance is the mean square of x - f, less d^2
    mean   m = 2 u |mean| + u (4 + sqrt(n)) mean |x - f|
    y      rstd ((n + 2) u |x| |F|^T + m |s|) + g |y - bias| + 4 u (rstd |mean s| + |bias|) + h(y)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupynorm import reference
from cupynorm.dispatch import product_plan as products
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu.launch import tensor_map
from cupynorm.verify.bounds import half_ulp
from cupynorm.verify.kernels import CpuMachine

U, EPS = 2.0**-24, 1e-5


@dataclass
class ProductProblem:
    """float64 values that the dtype holds exactly. norm_weight, norm_bias: of norm_dtype."""

    dtype: str
    centered: bool
    x: np.ndarray
    norm_weight: np.ndarray | None
    norm_bias: np.ndarray | None
    weight: np.ndarray
    bias: np.ndarray | None
    norm_dtype: str = "float32"
    zero_centered: bool = False


class Folded(NamedTuple):
    """float64 values. weight: [out_features, in_features]; sums, bias: [out_features].

    terms: [out_features, TERM_COLS], of which sums and bias are sums.
    """

    weight: np.ndarray
    sums: np.ndarray
    bias: np.ndarray
    terms: np.ndarray


class Found(NamedTuple):
    """float64 values."""

    y: np.ndarray
    mean: np.ndarray
    rstd: np.ndarray


def draw(
    sizes: tuple[int, int, int], dtype: str, *, centered: bool = True, mean: float = 0.0, seed=0
) -> ProductProblem:
    """Random values. sizes: num_rows, in_features, out_features.

    mean: of x, whose standard deviation is 1.
    """
    rng = np.random.default_rng(seed)
    num_rows, in_features, out_features = sizes
    exact = lambda values: decode(encode(values, dtype), dtype)  # noqa: E731
    in_float = lambda values: np.float64(np.float32(values))  # noqa: E731
    return ProductProblem(
        dtype,
        centered,
        exact(rng.standard_normal((num_rows, in_features)) + mean),
        in_float(1 + rng.standard_normal(in_features) / 2),
        in_float(rng.standard_normal(in_features) / 2) if centered else None,
        exact(rng.standard_normal((out_features, in_features)) * in_features**-0.5),
        exact(rng.standard_normal(out_features)),
    )


def put(machine: Any, values: np.ndarray | None, dtype: str) -> tuple[Any, int]:
    """On the machine, at a multiple of 128 bytes."""
    if values is None:
        return None, 0
    raw = encode(values, dtype)
    if not isinstance(machine, CpuMachine):
        return machine.put(raw)
    around = np.empty(raw.nbytes + 128, np.uint8)
    start = -around.ctypes.data % 128
    array = around[start : start + raw.nbytes].view(raw.dtype).reshape(raw.shape)
    array[...] = raw
    return array, array.ctypes.data


def in_order(out_features: int) -> np.ndarray:
    """Where fold_weight.cu puts each row: bits 3 and 4 of a row trade places with bits 1 and 2."""
    row = np.arange(out_features)
    return (row & ~30) | (row & 6) << 2 | (row & 24) >> 2


def as_folded(values: np.ndarray) -> np.ndarray:
    """Rows in the order of fold_weight.cu, and NaN in rows that are not there."""
    made = np.full((products.folded_rows(len(values)), values.shape[1]), np.nan)
    made[in_order(len(values))] = values
    return made


def fold(problem: ProductProblem, machine: Any) -> Folded:
    """What fold_weight.cu makes."""
    out_features, in_features = problem.weight.shape
    of_norm = [
        None if each is None else problem.norm_dtype
        for each in (problem.norm_weight, problem.norm_bias)
    ]
    launch = products.fold_launch(
        problem.weight.shape,
        problem.dtype,
        *of_norm,
        centered=problem.centered,
        zero_centered=problem.zero_centered,
    )
    num_rows = products.folded_rows(out_features)
    given = [
        put(machine, problem.weight, problem.dtype),
        put(machine, problem.bias, problem.dtype),
        put(machine, problem.norm_weight, problem.norm_dtype),
        put(machine, problem.norm_bias, problem.norm_dtype),
        put(machine, np.full((num_rows, in_features), np.nan), problem.dtype),
        machine.empty((num_rows, products.TERM_COLS), "bfloat16"),
    ]
    words = (*(address for _, address in given), in_features)
    machine.launch(launch, words)
    order = in_order(out_features)
    terms = decode(machine.get(given[5][0]), "bfloat16")[order]
    folded = decode(machine.get(given[4][0]), problem.dtype)[order]
    return Folded(folded, terms[:, [0, 1, 4]].sum(1), terms[:, [8, 9, 12]].sum(1), terms)


def multiply(
    problem: ProductProblem,
    folded: Folded,
    machine: Any,
    *,
    cluster_size: int = 2,
    strips_at_a_time: int = 1,
    grid_size: int | None = None,
) -> Found:
    """What norm_linear.cu makes."""
    (num_rows, in_features), out_features = problem.x.shape, len(folded.weight)
    plan = products.product_launch(
        machine.device,
        num_rows,
        out_features,
        problem.dtype,
        centered=problem.centered,
        cluster_size=cluster_size,
        strips_at_a_time=strips_at_a_time,
    )
    launch = plan.launch
    if grid_size is not None:
        launch = type(launch)(**{**vars(launch), "grid_size": grid_size})
    given, maps = [], []
    for values, dtype, tile in (
        (problem.x, problem.dtype, products.LOADED),
        (as_folded(folded.weight), problem.dtype, products.LOADED),
        (as_folded(folded.terms), "bfloat16", products.LOADED_TERMS),
    ):
        given.append(put(machine, values, dtype))
        sizes = (given[-1][1], *values.shape, values.shape[1] * 2)
        if isinstance(machine, CpuMachine):
            address, rows, cols, row_bytes = sizes  # as in cuda_src/on_cpu/product_calls.h
            maps.append((address, cols, rows, row_bytes, tile[1], tile[0], *[0] * 10))
        else:
            maps.append(tensor_map(*sizes, dtype, tile))
    made = [
        put(machine, np.full((num_rows, out_features), np.nan), problem.dtype),
        machine.empty((num_rows,), "float32"),
        machine.empty((num_rows,), "float32"),
        machine.put(np.zeros(num_rows + 1, np.int64)),
    ]
    addresses = (given[0][1], *(address for _, address in made))
    sizes = (num_rows, in_features, out_features)
    machine.launch(
        launch, products.product_words(maps, addresses, sizes, plan.strips_at_a_time, EPS)
    )
    y, mean, rstd = (machine.get(each) for each, _ in made[:3])
    return Found(decode(y, problem.dtype), np.float64(mean), np.float64(rstd))


def truth(problem: ProductProblem) -> reference.layer_norm_linear.Projected:
    """Of the problem itself, in float64."""
    return reference.norm_linear(
        problem.x,
        problem.norm_weight,
        problem.norm_bias,
        problem.weight,
        problem.bias,
        EPS,
        centered=problem.centered,
        zero_centered_weight=problem.zero_centered,
    )


def excess(problem: ProductProblem, folded: Folded, found: Found) -> dict[str, float]:
    """The largest error of y, mean and rstd, over what is allowed: at most 1."""
    x, n = problem.x, problem.x.shape[1]
    first = x[:, :8].mean(1, keepdims=True) if problem.centered else np.zeros((len(x), 1))
    mean = x.mean(1) if problem.centered else np.zeros(len(x))
    rstd = 1 / np.sqrt(((x - mean[:, None]) ** 2).mean(1) + EPS)
    at_once = rstd[:, None] * (x @ folded.weight.T - np.outer(mean, folded.sums))
    y = at_once + folded.bias
    size = U * (4 + np.sqrt(n))
    of_rstd = size * (1 + (mean - first[:, 0]) ** 2 * rstd**2)
    of_mean = 2 * U * np.abs(mean) + size * np.abs(x - first).mean(1)
    products_of = np.abs(x) @ np.abs(folded.weight).T
    sums = np.abs(folded.sums)
    allowed = (
        rstd[:, None] * ((n + 2) * U * products_of + np.outer(of_mean, sums))
        + of_rstd[:, None] * np.abs(at_once)
        + 4 * U * (np.outer(rstd * np.abs(mean), sums) + np.abs(folded.bias))
    )
    allowed += half_ulp(np.abs(y) + allowed, problem.dtype)
    ratio = lambda got, want, most: float(np.max(np.abs(got - want) / most))  # noqa: E731
    made = {"y": ratio(found.y, y, allowed), "rstd": ratio(found.rstd, rstd, of_rstd * rstd)}
    if problem.centered:
        made["mean"] = ratio(found.mean, mean, of_mean + DTYPES["float32"].smallest)
    return made


def rms_errors(problem: ProductProblem, y: np.ndarray) -> tuple[float, float]:
    """The error of y, and that of a norm rounded to the dtype and a product after it.

    Both are relative to the norm of y.
    """
    exact = truth(problem)
    normalized = decode(encode(exact.normalized, problem.dtype), problem.dtype)
    plain = normalized @ problem.weight.T + (0 if problem.bias is None else problem.bias)
    plain = decode(encode(plain, problem.dtype), problem.dtype)
    off = [np.linalg.norm(each - exact.y) / np.linalg.norm(exact.y) for each in (y, plain)]
    return float(off[0]), float(off[1])
