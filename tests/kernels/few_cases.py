"""Problems of norm_linear_few.cu: runs, and what is allowed.

The allowed errors, element by element, beside float64. u = 2^-24, n = in_features, h(v) half a unit
in the last place of v, z = (x - mean) rstd weight, s = z + bias the normalised value:

    mean   m = 2 u |mean| + g mean |x - mean|, g = u (4 + sqrt(n))
    rstd   g rstd
    s      e = (g + 4 u) |z| + rstd |weight| m + u |bias|, and h(|s| + e)
    y      (e + h) |W|^T + (n + 2) u |s| |W|^T + u |linear bias| + h(y)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from cupynorm.reference.layer_norm import scale
from product_cases import EPS, Found, ProductProblem, U, put, truth

from cupynorm.dispatch.product_plan import NormLinearProblem, few_launch, few_words
from cupynorm.dtypes import decode, encode
from cupynorm.verify.bounds import half_ulp

Parts = tuple[np.ndarray, np.ndarray]


def split(problem: ProductProblem) -> tuple[ProductProblem, Parts]:
    """The problem of the rounded sum of its x and a random residual, and these two."""
    shift = np.random.default_rng(1).standard_normal(problem.x.shape)
    parts = problem.x, decode(encode(shift, problem.dtype), problem.dtype)
    added = decode(encode(sum(parts), problem.dtype), problem.dtype)
    return replace(problem, x=added), parts


def planned(problem: ProductProblem) -> NormLinearProblem:
    of_norm = [
        None if each is None else problem.norm_dtype
        for each in (problem.norm_weight, problem.norm_bias)
    ]
    sizes = (*problem.x.shape, len(problem.weight))
    return NormLinearProblem(
        *sizes, problem.dtype, *of_norm, problem.centered, problem.zero_centered
    )


def run(
    problem: ProductProblem,
    machine: Any,
    *,
    num_sms: int = 2,
    parts: Parts | None = None,
) -> Found:
    """What the kernel makes. num_sms: multiprocessors, so blocks, that it is planned for.

    parts: x and a residual, whose rounded sum is x of the problem.
    """
    asked = planned(problem)
    device = replace(machine.device, num_sms=num_sms)
    num_rows = len(problem.x)
    x, residual = parts or (problem.x, None)
    added = None if residual is None else np.full(problem.x.shape, np.nan)
    made = [
        put(machine, np.full((num_rows, asked.out_features), np.nan), problem.dtype),
        machine.empty((num_rows,), "float32"),
        machine.empty((num_rows,), "float32"),
    ]
    given = [
        put(machine, x, problem.dtype),
        put(machine, residual, problem.dtype),
        put(machine, added, problem.dtype),
        put(machine, problem.bias, problem.dtype),
        put(machine, problem.norm_weight, problem.norm_dtype),
        put(machine, problem.norm_bias, problem.norm_dtype),
        *made,
    ]
    addresses = tuple(address for _, address in given)
    held, weight = put(machine, problem.weight, problem.dtype)
    plan = few_launch(device, asked)
    machine.launch(plan.launch, few_words(weight, addresses, asked, plan, EPS))
    y, mean, rstd = (machine.get(each) for each, _ in made)
    if residual is not None:
        np.testing.assert_array_equal(decode(machine.get(given[2][0]), problem.dtype), problem.x)
    return Found(decode(y, problem.dtype), np.float64(mean), np.float64(rstd))


def excess(problem: ProductProblem, found: Found) -> dict[str, float]:
    """The largest error of y, mean and rstd, over what is allowed: at most 1."""
    x, n, exact = problem.x, problem.x.shape[1], truth(problem)
    mean = x.mean(1, keepdims=True) if problem.centered else np.zeros((len(x), 1))
    rstd = exact.rstd.reshape(-1, 1)
    factor = scale(problem.norm_weight, problem.zero_centered)
    z = (x - mean) * rstd * factor
    size = U * (4 + np.sqrt(n))
    of_mean = 2 * U * np.abs(mean) + size * np.abs(x - mean).mean(1, keepdims=True)
    of_mean = of_mean * problem.centered
    bias = 0.0 if problem.norm_bias is None else problem.norm_bias
    off = (size + 4 * U) * np.abs(z) + rstd * np.abs(factor) * of_mean + U * np.abs(bias)
    normalized = np.abs(z + bias)
    off += half_ulp(normalized + off, problem.dtype)
    weight = np.abs(problem.weight)
    allowed = off @ weight.T + (n + 2) * U * ((normalized + off) @ weight.T)
    if problem.bias is not None:
        allowed += U * np.abs(problem.bias)
    allowed += half_ulp(np.abs(exact.y) + allowed, problem.dtype)
    ratio = lambda got, want, most: float(np.max(np.abs(got - want) / most))  # noqa: E731
    made = {"y": ratio(found.y, exact.y, allowed)}
    made["rstd"] = ratio(found.rstd, rstd[:, 0], size * rstd[:, 0])
    if problem.centered:
        made["mean"] = ratio(found.mean, mean[:, 0], of_mean[:, 0] + 2.0**-149)
    return made


def assert_right(problem: ProductProblem, machine: Any, **options) -> Found:
    found = run(problem, machine, **options)
    over = excess(problem, found)
    assert max(over.values()) <= 1, over
    return found
