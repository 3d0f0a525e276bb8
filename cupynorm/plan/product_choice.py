"""What computes a norm and the linear layer after it by default, and why.
Pure Python, no GPU needed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from . import few_products, products
from .devices import Device
from .products import NormLinearProblem

# Of norm_linear.cu by default, with a fold in each call: docs/experiments.md, The norm inside the
# product. With fewer products the host, which enqueues more, could be slower than the GPU.
FEWEST_ROWS = 2**13
_ROWS_OF_OUTPUT, _FEWEST_OUTPUTS, _FEWEST_PRODUCTS, _MOST_COLS = 4, 2**10, 2**36, 4096
# LayerNorm's. Where means have 1000 standard deviations, sums of more columns add up to 10% error.
MOST_CENTERED_COLS = 2048


class Choice(NamedTuple):
    """takes_kernel: whether one kernel computes both. reason: a sentence."""

    takes_kernel: bool
    reason: str


def choose(
    device: Device,
    problem: NormLinearProblem,
    *,
    gradients: bool = False,
    residual: bool = False,
    sm_margin: int = 0,
) -> Choice:
    """The default of a call, fused=None. gradients, residual: whether the call has any.

    sm_margin: multiprocessors that it leaves free.
    """
    num_rows = problem.num_rows
    if num_rows > few_products.MOST_ROWS:
        reason = products.why_not(device, problem.dtype, problem.sizes)
        if reason is None and residual:
            reason = "the norm's kernel on the plain path also adds the residual"
        if reason is None and sm_margin:
            reason = "the call leaves some multiprocessors free, and the kernel needs all"
        reason = reason or _why_not_folded(problem)
        source = "norm_linear.cu, with a fold in each call,"
    else:
        reason = few_products.why_not(device, problem.dtype, problem.sizes)
        source = few_products.SOURCE
        if reason is None and gradients:
            reason = f"{source} is chosen for calls without gradients"
        elif reason is None and not few_products.is_faster(device, problem.sizes):
            reason = f"{source} is not measured to be faster for {_sizes_of(problem)}"
    if reason is not None:
        return Choice(False, reason)
    return Choice(True, f"{source} is measured to be faster for {_sizes_of(problem)}")


def _sizes_of(problem: NormLinearProblem) -> str:
    return " x ".join(map(str, problem.sizes))


def _why_not_folded(problem: NormLinearProblem) -> str | None:
    """Why norm_linear.cu is slower with a fold in each call, or less exact, or None."""
    num_rows, in_features, out_features = sizes = problem.sizes
    if problem.dtype != "bfloat16":
        return f"large means and small norm weights cost accuracy in {problem.dtype}"
    if problem.centered and in_features > MOST_CENTERED_COLS:
        return (
            f"large means cost accuracy with more than {MOST_CENTERED_COLS} columns; "
            f"in_features is {in_features}"
        )
    if not problem.centered and problem.norm_weight == problem.dtype:
        return (
            "in rows that are nearly constant the plain path rounds norm weights of "
            f"{problem.dtype} to themselves, so it is more exact"
        )
    if in_features > _MOST_COLS:
        return f"a fold in each call was measured up to {_MOST_COLS} columns, not {in_features}"
    if num_rows < max(FEWEST_ROWS, _ROWS_OF_OUTPUT * out_features):
        return (
            f"a fold in each call is slower with fewer than {FEWEST_ROWS} rows, or fewer than "
            f"{_ROWS_OF_OUTPUT} for each output; {num_rows} rows have {out_features}"
        )
    if out_features < _FEWEST_OUTPUTS or math.prod(sizes) < _FEWEST_PRODUCTS:
        return (
            f"a fold in each call is slower with fewer than {_FEWEST_OUTPUTS} outputs or "
            f"{_FEWEST_PRODUCTS} products, which {_sizes_of(problem)} has"
        )
    return None
