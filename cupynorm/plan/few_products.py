"""Launches of norm_linear_few.cu: a norm and the linear layer after it, for one or two rows.
Pure Python, no GPU needed.
"""

from __future__ import annotations

from typing import NamedTuple

from .devices import Device
from .instances import Kernel, Launch, cpp_bool, cpp_names
from .problem import Tile, ceil_div
from .products import Limits, NormLinearProblem, rows_words

SOURCE = "norm_linear_few.cu"
# The integers of cuda_src/product/norm_linear_few.cu.
_NUM_WARPS, _PART_COLS = 16, 1024
_MOST_WEIGHTS = 2**26  # of the default
MOST_ROWS = 2
_LIMITS = Limits((1, MOST_ROWS), _NUM_WARPS * _PART_COLS, is_for_80=True)


class FewRowsPlan(NamedTuple):
    """The launch of norm_linear_few.cu, and one of its arguments."""

    launch: Launch
    outputs_of_block: int


def _outputs_of_block(device: Device, out_features: int) -> int:
    return ceil_div(out_features, device.num_sms)


def _smem_bytes(num_rows: int, in_features: int, outputs_of_block: int) -> int:
    num_parts = ceil_div(in_features, _PART_COLS)
    of_row = _NUM_WARPS * 12 + num_parts * _PART_COLS * 2
    return num_rows * (of_row + outputs_of_block * num_parts * 4)


def why_not(device: Device, dtype: str, sizes: tuple[int, int, int]) -> str | None:
    """Why norm_linear_few.cu does not fit a call, as a sentence, or None.

    sizes: num_rows, in_features, out_features.
    """
    reason, (num_rows, in_features, out_features) = _LIMITS.why_not(device, dtype, sizes), sizes
    outputs = _outputs_of_block(device, out_features)
    if reason is None and _smem_bytes(num_rows, in_features, outputs) > device.smem_per_block:
        return f"{out_features} outputs do not fit the shared memory of {device.name}"
    return reason


def is_faster(device: Device, sizes: tuple[int, int, int]) -> bool:
    """Whether norm_linear_few.cu is at least 2% faster than a norm and cuBLAS's product after it.

    sizes: num_rows, in_features, out_features. Measured on an H200, 2026-11-25: 4 to 28% faster up
    to 8192 x 8192. Larger weights: 3 to 6% in CUDA graphs, level in single calls (docs/linear.md).
    """
    return device.compute_capability == 90 and sizes[1] * sizes[2] <= _MOST_WEIGHTS


def few_launch(device: Device, problem: NormLinearProblem) -> FewRowsPlan:
    """A launch for a problem that why_not accepts."""
    num_rows, in_features, out_features = problem[:3]
    outputs = _outputs_of_block(device, out_features)
    types = cpp_names(problem.dtype, problem.norm_weight, problem.norm_bias)
    flags = f"{cpp_bool(problem.zero_centered)}, {cpp_bool(problem.centered)}"
    launch = Launch(
        Kernel(SOURCE, f"norm_linear_few<{types}, {flags}, {num_rows}>"),
        Tile(8, _NUM_WARPS * 32),
        ceil_div(out_features, outputs),
        _NUM_WARPS * 32,
        _smem_bytes(num_rows, in_features, outputs),
    )
    return FewRowsPlan(launch, outputs)


def few_words(
    weight: int,
    addresses: tuple[int, ...],
    problem: NormLinearProblem,
    plan: FewRowsPlan,
    eps: float,
) -> tuple[int | float, ...]:
    """The argument struct of norm_linear_few.cu. weight: its address. addresses: of rows_words."""
    return *rows_words(addresses, problem, eps), weight, plan.outputs_of_block
