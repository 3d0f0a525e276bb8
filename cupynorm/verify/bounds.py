"""What the gradient check allows: the float64 result of each tensor, and the error of each element.

u is the rounding error of the arithmetic: 2^-24, and 2^-53 for float64. h(v) is half a unit in the
last place of the output's dtype at v; of a gradient v is as large as the other terms allow. n is
num_cols. g = u * (4 + sqrt(n)): the errors of a sum of n rounded terms add up like a random walk.
All is per element.

    x_hat    e = (g * a * (1 + |x_hat|) + g * c) * (1 + q) + q * |x_hat| + m + m^2 * |x_hat|
             a = max(1, var / |var + eps|): a negative eps makes rstd more sensitive.
             m: rounding of the mean. Backward: u * |mean| * rstd. Forward: 0.
             c, q: of a mean far above the spread, see below.
             Welford's mean has a larger error: g * |mean| * rstd in both directions. The
             running means, off by u * |mean| each, enter its variance: v * |x_hat| more, with
             v = g * |mean| * rstd / sqrt(n) (Chan, Golub, LeVeque 1983: the condition number of
             the variance is about |mean| * rstd). Otherwise v is 0.
    y        |w| * e + 2u * (|x_hat * w| + |bias|) + h(y)
             round_x_hat adds |w| * h(x_hat), in the dtype of the input.
    mean     u * |mean| + g * mean(|x - mean|) + t
             Welford: g * (|mean| + 2 * sqrt(var)) + t. A thread adds the differences from its first
             value, which may be far from the mean.
    rstd     rstd * (g * a + u + m^2 + v + q), m of forward
             The errors of equal squares do not cancel while a thread adds them up, half of which
             reaches rstd. A thread adds up to 128, so a row of two values has at least
             u * (4 + min(n, 128) / 4) for g.
    dx       rstd * (4u * |wdy| + g * mean(|wdy|)
                     + |x_hat| * (g * mean(|wdy * x_hat|) + mean(|wdy| * e))
                     + e * (|mean(wdy * x_hat)| + mean(|wdy| * e)))
             + (g * a + m^2 + v + q) * |dx| + h(dx), with this m of Welford's mean alone
    dweight  2 * sqrt(sum (dy * (e - m))^2) + min(6 * sqrt(sum (dy * m)^2), sum |dy * m|)
             + s(dy * x_hat) + h(dweight)
             The rounding of a mean moves the x_hat of its row as one, by up to m whole: 2 standard
             deviations would not be enough. Welford's m is a sum of errors and belongs to e. If all
             dy are equal, and all rows within two units in the last place, nothing cancels:
             sum |dy * e|.
    dbias    s(dy) + h(dbias)
             s(t) = u * (4 + 2 * sqrt(num_rows)) * max(|sum t|, sqrt(num_rows) * rms(t)): sums over
             rows. Each addition is off by u / sqrt(3) of a partial sum in the mean, so this is
             above five standard deviations for 20 rows in a row, and more for sums of partial sums.
             The errors of terms within 16u of each other do not cancel: u * num_rows * |sum t| for
             those.

    sum         exact. If it has a dtype of its own: u * |sum| + h(sum) + 2t, less what does not
                apply. All other tensors are then judged by the sum that the kernel returned.
    dresidual   as dx. dsum adds u * |dresidual|.
    recomputed  y written again by backward: as y, with e of backward

c and q. Two passes subtract d, the mean before it is corrected, which is off by at most
u * (2 + log2(n)) * |mean|: a sum in pairs and a division (Higham 1993). c is that times rstd. var
is mean((x - d)^2) - mean(x - d)^2, off by at most 2 * g * var + 4 * g * (c / rstd)^2. So rstd is
off by g, and by q = 1 / sqrt(1 - 4 * g * c^2) - 1, at most 1 / (rstd * sqrt(eps)) - 1. In constant
rows, in RMSNorm and with Welford's statistics both are 0.

For float64 everything is allowed twice: the reference has the same rounding error as the kernels.

NaN must be NaN, and infinity the same infinity. The mean of a row that holds an infinity may be
either: Welford's depends on where in the row it is.

What underflows. Below 2^-126, the smallest normal float32, an operand, a product and a sum may
count as 0 in float32 arithmetic: t = f = 2^-126. float64 arithmetic keeps operands and sums, and
rounds a product to a multiple of t = 2^-1074: f = 0. It adds to what is above:

    y        t + f * |w|
    mean     Welford: 3f * log2(n). The difference of two means, its share, and their sum
    wdy      b = t + f * |w|
    means    of wdy: mean(b) + f + t; of wdy * x_hat: c = mean(t + b * |x_hat|) + f + t
    dx       rstd * (b + mean(b) + 3f + 2t + |x_hat| * c) + t
    dweight  sum (t + f * (1 + |x_hat|))
    dbias    sum 2f
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .. import reference
from ..dtypes import DTYPES, compute_dtype, decode, encode
from ..reference.layer_norm import Gradients, scale
from .cases import Case, Problem

Expected = dict[str, tuple[np.ndarray, np.ndarray]]

_FLUSHED = 2.0**-126  # smaller float32 operands and results may count as 0
_LAST = 2.0**-1074  # all float64 are multiples of it


def half_ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """Half a unit in the last place of a dtype at each value: the error of one rounding."""
    kind = DTYPES[dtype]
    # float32 arithmetic may flush subnormals to zero, bfloat16 is computed in float32.
    floor = kind.smallest / 2 if dtype in ("float16", "float64") else _FLUSHED
    return np.maximum(np.abs(values) * kind.half_ulp, floor)


def _rounded(values: np.ndarray, allowed: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """values, and what is allowed once the result is rounded, at the largest that it may be."""
    return values, allowed + half_ulp(np.abs(values) + allowed, dtype)


def expect(
    problem: Problem,
    *,
    rounded_mean: bool = False,
    added: np.ndarray | None = None,
    e_backward: np.ndarray | None = None,
    forward_only: bool = False,
) -> Expected:
    """name -> (float64 result, allowed error) of every tensor that the case has.

    rounded_mean: whether forward subtracts the mean as it is rounded, as Welford's statistics and
    other libraries do. added: the sum that the kernel returned, which decides all else where it has
    its own dtype. e_backward: the error of x_hat in backward, if something else than the usual.
    forward_only: leaves out gradients and what is beside them.
    """
    case = problem.case
    exact_sum = problem.x if problem.residual is None else problem.x + problem.residual
    is_own = added is not None and case.has_own_sum
    x = added if is_own else decode(encode(exact_sum, case.sum), case.sum)
    with np.errstate(all="ignore"):
        rows = _Rows(problem, x, rounded_mean, e_backward)
        expected = rows.outputs()
        if not forward_only:
            expected |= _gradients(problem, rows)
        if case.has_own_sum:
            expected["sum"] = (exact_sum, _allowed_of_sum(case, exact_sum) + 2 * _FLUSHED)
        elif problem.residual is not None:
            expected["sum"] = (x, np.zeros_like(x) + np.finfo(np.float64).tiny)
    if compute_dtype(case.sum).name == "float64":
        expected = {name: (values, 2 * allowed) for name, (values, allowed) in expected.items()}
    return expected


def _gradients(problem: Problem, rows: _Rows) -> Expected:
    """All of backward."""
    case = problem.case
    dsum, dsum_allowed = rows.gradient_of_sum()
    expected = {"dx": _rounded(dsum, dsum_allowed, case.x)}
    if case.recompute:
        expected["recomputed"] = rows.recomputed()
    expected |= rows.gradients_of_parameters()
    if case.has_own_sum and problem.residual is not None:
        expected["dresidual"] = _rounded(dsum, dsum_allowed, case.added)
    return expected


class _Rows:
    """The rows of a problem in float64, and the error that is allowed of their x_hat.

    Attributes as in the docstring of this module: u, g, w, x_hat, e (of forward), e_backward.
    """

    def __init__(
        self, problem: Problem, x: np.ndarray, rounded_mean: bool, e_backward: np.ndarray | None
    ) -> None:
        """x: the rows that are normalised. e_backward: None for the usual."""
        case = problem.case
        self.problem, self.x, self.rounded_mean = problem, x, rounded_mean
        self.centered = case.norm == "layer_norm"
        self.options = {"zero_centered_weight": case.zero_centered_weight}
        norm = reference.layer_norm if self.centered else reference.rms_norm
        result = norm(x, problem.weight, problem.bias, case.eps, **self.options)
        self.mean = result.mean if self.centered else np.zeros(case.num_rows)
        self.centered_x = _centered(x) if self.centered else x
        self.y, self.rstd = result.y, result.rstd
        self.u = compute_dtype(case.sum).half_ulp
        self.g = self.u * (4 + np.sqrt(case.num_cols))
        is_wide = compute_dtype(case.sum).name == "float64"
        self.t, self.f = (_LAST, 0.0) if is_wide else (_FLUSHED, _FLUSHED)
        self._bound_x_hat(e_backward)

    @cached_property
    def gradients(self) -> Gradients:
        problem, given = self.problem, (self.problem.dy, self.centered_x)
        if self.centered:
            no_mean = np.zeros_like(self.mean)
            return reference.layer_norm_backward(
                *given, no_mean, self.rstd, problem.weight, **self.options
            )
        return reference.rms_norm_backward(*given, self.rstd, problem.weight, **self.options)

    def _bound_x_hat(self, e_backward: np.ndarray | None) -> None:
        case, u, g = self.problem.case, self.u, self.g
        columns = self.rstd[:, None]
        self.x_hat = self.centered_x * columns
        size = self.size = np.abs(self.x_hat)
        variance = (self.centered_x**2).mean(axis=1)
        self.amplified = np.fmax(1.0, np.abs(variance * self.rstd**2))[:, None]
        # What the rounding of the mean does to x_hat, and its square to rstd.
        self.of_mean = (g if self.rounded_mean else u) * np.abs(self.mean)[:, None] * columns
        self.of_distance = np.zeros_like(columns)
        of_sums = g * self.amplified * (1 + size)
        if self.centered and not self.rounded_mean:
            distance = self._distance_of_mean()
            self.of_distance = self._of_distance(distance)
            of_sums = (of_sums + g * distance) * (1 + self.of_distance)
            of_sums = of_sums + self.of_distance * size
        self.of_variance = np.zeros_like(columns)
        if self.rounded_mean:
            self.of_variance = self.of_mean / np.sqrt(case.num_cols)
            of_sums = of_sums + self.of_variance * size
        self.e_usual = of_sums + self.of_mean + self.of_mean**2 * size
        self.e = self.e_usual if self.rounded_mean else of_sums
        if case.round_x_hat:
            self.e = self.e + half_ulp(self.x_hat, case.x)
        weight = scale(self.problem.weight, case.zero_centered_weight)
        self.w = np.broadcast_to(weight, (case.num_cols,))
        # Errors of x_hat that come from a rounding do not add up like a random walk.
        self.errors_add_up = e_backward is not None
        self.e_backward = self.e_usual if e_backward is None else e_backward

    def _distance_of_mean(self) -> np.ndarray:
        """c: how far the mean before correction may be from the mean, times rstd."""
        of_sum = self.u * (2 + np.log2(self.problem.case.num_cols))
        is_constant = (self.x == self.x[:, :1]).all(axis=1)
        return np.where(is_constant, 0.0, of_sum * np.abs(self.mean) * self.rstd)[:, None]

    def _of_distance(self, distance: np.ndarray) -> np.ndarray:
        """q: what that does to rstd."""
        eps, rstd = self.problem.case.eps, self.rstd[:, None]
        most = 1 / (rstd * np.sqrt(eps)) if eps > 0 else np.full_like(rstd, np.inf)
        factor = 1 / np.sqrt(np.maximum(0.0, 1 - 4 * self.g * distance**2))
        return np.maximum(0.0, np.minimum(factor, most) - 1)

    def gradient_of_sum(self) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of the normalised rows before it is rounded."""
        u, g, e, x_hat = self.u, self.g, self.e_backward, self.size
        wdy = self.problem.dy * self.w
        wdy_x_hat, size = wdy * self.x_hat, np.abs(wdy)
        mean_wdy_x_hat = wdy_x_hat.mean(axis=1, keepdims=True)
        of_e = (size * e).mean(axis=1, keepdims=True)
        of_wdy = 4 * u * size + g * size.mean(axis=1, keepdims=True)
        of_wdy_x_hat = g * np.abs(wdy_x_hat).mean(axis=1, keepdims=True) + of_e
        allowed = self.rstd[:, None] * (
            of_wdy + x_hat * of_wdy_x_hat + e * (np.abs(mean_wdy_x_hat) + of_e)
        )
        allowed = allowed + self._underflow_of_gradient()
        dx = self.gradients.dx
        of_rstd = g * self.amplified + self.of_variance + self.of_distance
        if self.rounded_mean:
            of_rstd = of_rstd + self.of_mean**2
        allowed = allowed + of_rstd * np.abs(dx)
        if self.problem.dsum is not None:
            dx = dx + self.problem.dsum
            allowed = allowed + u * np.abs(dx)
        return dx, allowed

    def _underflow_of_gradient(self) -> np.ndarray:
        t, f, x_hat = self.t, self.f, self.size
        of_wdy = t + f * np.abs(self.w)
        of_mean_wdy_x_hat = (t + of_wdy * x_hat).mean(axis=1, keepdims=True) + f + t
        of_sum = of_wdy + of_wdy.mean() + 3 * f + 2 * t + x_hat * of_mean_wdy_x_hat
        return self.rstd[:, None] * of_sum + t

    def _allowed_of_affine(self) -> np.ndarray:
        """What weight, bias and the rounding of y add to the error of x_hat times weight."""
        case, bias = self.problem.case, self.problem.bias
        b = np.zeros(case.num_cols) if bias is None else bias
        of_products = 2 * self.u * (np.abs(self.x_hat * self.w) + np.abs(b))
        of_products = of_products + self.t + self.f * np.abs(self.w)
        return of_products + half_ulp(self.y, case.dtype("y"))

    def outputs(self) -> Expected:
        """y, rstd, and mean in LayerNorm."""
        of_mean = self.of_mean[:, 0] ** 2 if self.rounded_mean else 0.0
        of_mean = of_mean + self.of_variance[:, 0] + self.of_distance[:, 0]
        of_rstd = self.rstd * (self._g_of_squares() * self.amplified[:, 0] + self.u + of_mean)
        of_y = np.abs(self.w) * self.e + self._allowed_of_affine()
        expected = {"y": (self.y, of_y), "rstd": (self.rstd, of_rstd)}
        if self.centered:
            size = np.abs(self.mean)
            if self.rounded_mean:
                of_sum = self.g * (size + 2 * np.sqrt((self.centered_x**2).mean(axis=1)))
                of_sum = of_sum + 3 * self.f * np.log2(max(2, self.problem.case.num_cols))
            else:
                of_sum = self.u * size + self.g * np.abs(self.centered_x).mean(axis=1)
            stored = half_ulp(self.mean, compute_dtype(self.problem.case.sum).name)
            expected["mean"] = self.mean, of_sum + stored + _FLUSHED
        return expected

    def _g_of_squares(self) -> np.ndarray:
        """g of each row, more where squares are equal."""
        least = self.x.min(axis=1, initial=np.inf, keepdims=True)
        most = self.x.max(axis=1, initial=-np.inf, keepdims=True)
        has_two_values = ((self.x == least) | (self.x == most)).all(axis=1)
        of_equal = self.u * (4 + min(self.problem.case.num_cols, 128) / 4)
        return np.where(has_two_values, max(self.g, of_equal), self.g)

    def recomputed(self) -> tuple[np.ndarray, np.ndarray]:
        """y as backward writes it again."""
        return self.y, np.abs(self.w) * self.e_usual + self._allowed_of_affine()

    def gradients_of_parameters(self) -> Expected:
        """dweight and dbias, those that there are."""
        case, expected = self.problem.case, {}
        if self.problem.weight is not None:
            dy = self.problem.dy
            if self.errors_add_up:
                allowed = np.abs(dy * self.e_backward).sum(axis=0)
            else:
                allowed = self._allowed_of_x_hat_in_sums(dy)
            allowed = allowed + self._allowed_of_sum_over_rows(dy * self.x_hat)
            allowed = allowed + (self.t + self.f * (1 + self.size)).sum(axis=0)
            weight = case.dtype("weight")
            expected["dweight"] = _rounded(self.gradients.dweight, allowed, weight)
        if self.problem.bias is not None:
            allowed = self._allowed_of_sum_over_rows(self.problem.dy) + 2 * self.f * case.num_rows
            expected["dbias"] = _rounded(self.gradients.dbias, allowed, case.dtype("bias"))
        return expected

    def _allowed_of_x_hat_in_sums(self, dy: np.ndarray) -> np.ndarray:
        of_mean = 0.0 if self.rounded_mean else self.of_mean
        allowed = 2 * _length(dy * (self.e_backward - of_mean))
        off = np.abs(dy * of_mean)
        allowed = allowed + np.minimum(6 * _length(off), off.sum(axis=0))
        units = 4 * half_ulp(self.x[:1], self.problem.case.sum)
        are_alike = (np.abs(self.x - self.x[:1]) <= units).all() & (dy == dy[:1]).all(axis=0)
        return np.where(are_alike, np.abs(dy * self.e_backward).sum(axis=0), allowed)

    def _allowed_of_sum_over_rows(self, terms: np.ndarray) -> np.ndarray:
        num_rows = max(1, self.problem.case.num_rows)
        total = np.abs(terms.sum(axis=0))
        size = np.maximum(total, _length(terms))
        allowed = self.u * (4 + 2 * np.sqrt(num_rows)) * size
        are_alike = (np.abs(terms - terms[:1]) <= 16 * self.u * np.abs(terms[:1])).all(axis=0)
        return np.where(are_alike, np.maximum(allowed, self.u * num_rows * total), allowed)


def _length(terms: np.ndarray) -> np.ndarray:
    """sqrt(sum terms^2) over rows, of terms of any size: the squares of tiny ones are 0."""
    largest = np.abs(terms).max(initial=0.0)
    if not (0 < largest < 2.0**-500 or 2.0**500 < largest < np.inf):
        return np.sqrt((terms**2).sum(axis=0))
    unit = 2.0 ** np.floor(np.log2(largest))
    return unit * np.sqrt(((terms / unit) ** 2).sum(axis=0))


def _centered(x: np.ndarray) -> np.ndarray:
    """x minus the mean of each row, each element within a few units in its own last place.

    A mean in float64 is itself off by 2^-53 of its size, more than float64 x_hat may be off where
    the mean is large. So the mean of the differences, which are exact there, is subtracted too.
    """
    with np.errstate(all="ignore"):
        differences = x - x.mean(axis=1, keepdims=True)
        return differences - differences.mean(axis=1, keepdims=True)


def _allowed_of_sum(case: Case, exact_sum: np.ndarray) -> np.ndarray:
    """Of x plus a residual of another dtype."""
    wide = max(map(compute_dtype, (case.x, case.sum)), key=lambda kind: kind.digits)
    allowed = half_ulp(exact_sum, case.sum)
    return allowed if case.sum == wide.name else allowed + wide.half_ulp * np.abs(exact_sum)
