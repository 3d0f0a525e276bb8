"""Error bounds of a norm followed by a linear layer, element by element, in any dtype.

u is the rounding error of the arithmetic (2^-24; 2^-53 for float64), h(v) half a unit in the last
place of the dtype at v. A sum of n products in any order errs by no more than (n + 2) u times the
sum of their magnitudes. "The norm's" bound is that of cupynorm.verify.check.

    normalized     e_n, the norm's
    y              e_n |weight|^T + (in_features + 2) u (|normalized| |weight|^T + |bias|) + h(y)
    d normalized   e_r = (out_features + 2) u (|dy| |weight| + |dnormalized|) + h(d normalized)
    dweight        |dy|^T e_n + (num_rows + 2) u |dy|^T |normalized| + h(dweight)
    dbias          (num_rows + 2) u sum |dy| + h(dbias)
    dx             the norm's + rstd (|w| e_r + mean(|w| e_r) + |x_hat| mean(|w x_hat| e_r))
    dnorm_weight   the norm's + sum e_r |x_hat|
    dnorm_bias     the norm's + sum e_r

For float64 twice that, because the reference errs as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cupynorm.reference.layer_norm import scale

from cupynorm import reference
from cupynorm.dtypes import DTYPES, compute_dtype, decode, encode
from cupynorm.verify.bounds import expect
from cupynorm.verify.cases import Case, Problem
from cupynorm.verify.results import CheckResult, judge


@dataclass
class LinearProblem:
    """float64 values that the dtype holds exactly, by the names of cupynorm.layer_norm_linear.

    None: absent.
    """

    norm: str
    dtype: str
    x: np.ndarray
    norm_weight: np.ndarray | None
    norm_bias: np.ndarray | None
    weight: np.ndarray
    bias: np.ndarray | None
    dy: np.ndarray
    residual: np.ndarray | None = None
    dnormalized: np.ndarray | None = None
    dsum: np.ndarray | None = None
    eps: float = 1e-5
    zero_centered_weight: bool = False
    norm_dtype: str | None = None  # of norm_weight and norm_bias

    @property
    def centered(self) -> bool:
        return self.norm == "layer_norm"


def draw(
    norm="layer_norm",
    dtype="float32",
    num_rows=5,
    in_features=24,
    out_features=16,
    seed=0,
    **options,
) -> LinearProblem:
    """Normal values. x has a mean of 0.5. residual, dnormalized and dsum: True to draw them."""
    generator = np.random.default_rng([seed, num_rows, in_features, out_features])

    def normal(*shape, dtype=dtype, center=0.0):
        return decode(encode(generator.standard_normal(shape) + center, dtype), dtype)

    norm_dtype = options.get("norm_dtype") or dtype
    shape = (num_rows, in_features)
    made = {
        "x": normal(*shape, center=0.5),
        "norm_weight": normal(in_features, dtype=norm_dtype, center=1.0),
        "norm_bias": normal(in_features, dtype=norm_dtype),
        "weight": normal(out_features, in_features),
        "bias": normal(out_features),
        "dy": normal(num_rows, out_features),
    }
    for name in ("residual", "dnormalized", "dsum"):
        if options.pop(name, False):
            made[name] = normal(*shape)
    for name in options.pop("without", ()):
        made[name] = None
    return LinearProblem(norm, dtype, **made, **options)


def half_ulp(values, name):
    floor = DTYPES[name].smallest / 2 if name in ("float16", "float64") else 2.0**-126
    return np.maximum(np.abs(values) * DTYPES[name].half_ulp, floor)


def exact(problem: LinearProblem, x: np.ndarray | None = None) -> tuple:
    """norm_linear and its gradients in float64. x: the normalised rows, by default problem.x."""
    x = problem.x if x is None else x
    made = reference.norm_linear(
        x,
        problem.norm_weight,
        problem.norm_bias,
        problem.weight,
        problem.bias,
        problem.eps,
        centered=problem.centered,
        zero_centered_weight=problem.zero_centered_weight,
    )
    gradients = reference.norm_linear_backward(
        problem.dy,
        x,
        made.mean,
        made.rstd,
        problem.norm_weight,
        problem.norm_bias,
        weight=problem.weight,
        zero_centered_weight=problem.zero_centered_weight,
        dnormalized=problem.dnormalized,
        dsum=problem.dsum,
    )
    return made, gradients


def expected(
    problem: LinearProblem, y_error: np.ndarray | float = 0.0, reach_error: np.ndarray | float = 0.0
) -> dict[str, tuple[np.ndarray, np.ndarray, str]]:
    """name -> (float64 truth, allowed error, dtype).

    y_error, reach_error: what is allowed besides of y and of d normalized.
    """
    dtype = problem.dtype
    kind = DTYPES[dtype]
    own = problem.norm_dtype or dtype
    added = (
        problem.x
        if problem.residual is None
        else decode(encode(problem.x + problem.residual, dtype), dtype)
    )
    made, gradients = exact(problem, added)
    u = compute_dtype(dtype).half_ulp

    def h(values, name=dtype):
        return half_ulp(values, name)

    reaches = problem.dy @ problem.weight + (
        0.0 if problem.dnormalized is None else problem.dnormalized
    )
    case = Case(
        problem.norm,
        *added.shape,
        dtype,
        weight=None if problem.norm_weight is None else own,
        bias=None if problem.norm_bias is None else own,
        zero_centered_weight=problem.zero_centered_weight,
        eps=problem.eps,
    )
    of_norm = expect(Problem(case, added, reaches, problem.norm_weight, problem.norm_bias))
    e_n = of_norm["y"][1]
    num_rows, in_features = added.shape
    out_features = len(problem.weight)
    weight, dy, normalized = np.abs(problem.weight), np.abs(problem.dy), np.abs(made.normalized)
    bias = 0.0 if problem.bias is None else np.abs(problem.bias)
    e_r = (
        (out_features + 2)
        * u
        * (dy @ weight + (0.0 if problem.dnormalized is None else np.abs(problem.dnormalized)))
    )
    e_r = e_r + h(reaches) + reach_error
    x_hat = np.abs(added - (0.0 if made.mean is None else made.mean[:, None])) * made.rstd[:, None]
    w = np.abs(scale(problem.norm_weight, problem.zero_centered_weight))
    dx_allowed = of_norm["dx"][1] + made.rstd[:, None] * (
        w * e_r
        + (w * e_r).mean(axis=1, keepdims=True)
        + x_hat * (w * x_hat * e_r).mean(axis=1, keepdims=True)
    )
    if problem.dsum is not None:
        dx_allowed = dx_allowed + h(gradients.dx) + 2 * u * np.abs(problem.dsum)
    found = {
        "y": (
            made.y,
            e_n @ weight.T
            + (in_features + 2) * u * (normalized @ weight.T + bias)
            + h(made.y)
            + y_error,
            dtype,
        ),
        "normalized": (made.normalized, e_n, dtype),
        "sum": (added, np.full_like(added, np.finfo(np.float64).tiny), dtype),
        "dx": (gradients.dx, dx_allowed, dtype),
        "dweight": (
            gradients.dweight,
            dy.T @ e_n + (num_rows + 2) * u * (dy.T @ normalized) + h(gradients.dweight),
            dtype,
        ),
    }
    if problem.norm_weight is not None:
        allowed = of_norm["dweight"][1] + (e_r * x_hat).sum(axis=0)
        found["dnorm_weight"] = (gradients.dnorm_weight, allowed, own)
    if problem.norm_bias is not None:
        found["dnorm_bias"] = (gradients.dnorm_bias, of_norm["dbias"][1] + e_r.sum(axis=0), own)
    if problem.bias is not None:
        found["dbias"] = (
            gradients.dbias,
            (num_rows + 2) * u * dy.sum(axis=0) + h(gradients.dbias),
            dtype,
        )
    if kind.compute == "float64":
        found = {name: (values, 2 * allowed, own) for name, (values, allowed, own) in found.items()}
    return found


def assert_right(
    problem: LinearProblem,
    results: dict[str, np.ndarray],
    without: tuple[str, ...] = (),
    **errors: np.ndarray | float,
) -> None:
    """Checks that each result is within its bound. without: names that the results may lack.

    errors: y_error and reach_error of `expected`.
    """
    truth = expected(problem, **errors)
    truth = {name: each for name, each in truth.items() if name not in without}
    assert set(truth) <= set(results), set(truth) - set(results)
    findings = [
        judge(f"{problem.norm} {problem.dtype}", name, results[name], values, allowed, dtype)
        for name, (values, allowed, dtype) in truth.items()
    ]
    assert all(each.ok for each in findings), f"\n{CheckResult(findings)}"
