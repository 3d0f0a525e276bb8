"""Launches of norm_linear_several.cu: a norm and the linear layer after it, for 3 to 16 rows.
Pure Python, no GPU needed.
"""

from __future__ import annotations

from typing import NamedTuple

from .devices import Device
from .few_products import MOST_ROWS as ROWS_OF_FEW
from .instances import Kernel, Launch, cpp_bool, cpp_names
from .problem import Tile, ceil_div
from .products import STEP_COLS, Limits, NormLinearProblem, aligned, rows_words

SOURCE = "norm_linear_several.cu"
# The integers of cuda_src/product/several_memory.cuh.
_NUM_WARPS, _GROUP_OUTPUTS, _MOST_STAGES, _CLUSTER_SIZE, MOST_ROWS = 16, 64, 40, 2, 16
_THREADS = (_NUM_WARPS + 1) * 32
_HEAD_BYTES, _LINE_BYTES = 8192, STEP_COLS * 2
# A warp normalises 256 columns.
MOST_COLS = _NUM_WARPS * 256 * _CLUSTER_SIZE
_MOST_OUTPUTS = 2 * _GROUP_OUTPUTS  # of a tile
_LIMITS = Limits((ROWS_OF_FEW + 1, MOST_ROWS), MOST_COLS)

# Of the default.
_FEWEST_COLS, _MOST_ELEMENTS, _MOST_WEIGHTS = 4096, 2**16, 2**26


class SeveralRowsPlan(NamedTuple):
    """The launch of norm_linear_several.cu, and the arguments that depend on it."""

    launch: Launch
    tile_outputs: int
    num_tiles: int
    most_steps: int
    num_stages: int

    @property
    def loaded(self) -> tuple[int, int]:
        """Rows and columns of the weight that one instruction loads."""
        return self.tile_outputs, STEP_COLS


def why_not(device: Device, dtype: str, sizes: tuple[int, int, int]) -> str | None:
    """Why norm_linear_several.cu does not fit a call, as a sentence, or None.

    sizes: num_rows, in_features, out_features.
    """
    return _LIMITS.why_not(device, dtype, sizes)


def is_faster(device: Device, sizes: tuple[int, int, int]) -> bool:
    """Whether norm_linear_several.cu is at least 2% faster than a norm and cuBLAS's product.

    sizes: num_rows, in_features, out_features. Measured on an H200, 2026-11-25, in CUDA graphs: 3
    to 16% faster (docs/linear.md). Others were mostly slower (docs/experiments.md).
    """
    num_rows, in_features, out_features = sizes
    has_few_elements = ceil_div(num_rows, 8) * 8 * in_features <= _MOST_ELEMENTS
    has_few_weights = in_features * out_features <= _MOST_WEIGHTS
    return in_features >= _FEWEST_COLS and has_few_elements and has_few_weights


def several_launch(
    device: Device,
    problem: NormLinearProblem,
    *,
    most_outputs: int = _MOST_OUTPUTS,
    most_stages: int = _MOST_STAGES,
) -> SeveralRowsPlan:
    """A launch for a problem that why_not accepts: tiles of equal size, as many for each cluster.

    most_outputs, most_stages: of a tile, and of the ring of tiles.
    """
    num_rows, in_features, out_features = problem[:3]
    num_clusters = dict(device.clusters)[_CLUSTER_SIZE]
    turns = ceil_div(out_features, num_clusters * most_outputs)
    tile_outputs = ceil_div(ceil_div(out_features, num_clusters * turns), 8) * 8
    num_tiles = ceil_div(out_features, tile_outputs)
    most_steps = ceil_div(in_features, STEP_COLS * _CLUSTER_SIZE)
    groups = ceil_div(tile_outputs, _GROUP_OUTPUTS)
    # A warpgroup reads 64 outputs of the last stage, where fewer may be: the sums have that size.
    fixed = _HEAD_BYTES + groups * 2 * _GROUP_OUTPUTS * MOST_ROWS * 4
    fixed += most_steps * ceil_div(num_rows, 8) * 8 * _LINE_BYTES
    stage_bytes = tile_outputs * _LINE_BYTES
    num_stages = min((device.smem_per_block - fixed) // stage_bytes, most_stages)
    types = cpp_names(problem.dtype, problem.norm_weight, problem.norm_bias)
    flags = f"{cpp_bool(problem.zero_centered)}, {cpp_bool(problem.centered)}"
    name = f"norm_linear_several<{types}, {flags}>"
    launch = Launch(
        Kernel(SOURCE, name, architecture="sm_90a"),
        Tile(8, _THREADS, cluster_size=_CLUSTER_SIZE),
        min(num_clusters, num_tiles) * _CLUSTER_SIZE,
        _THREADS,
        fixed + num_stages * stage_bytes,
        _CLUSTER_SIZE,
    )
    return SeveralRowsPlan(launch, tile_outputs, num_tiles, most_steps, num_stages)


def several_words(
    weight: tuple[int, ...],
    addresses: tuple[int, ...],
    problem: NormLinearProblem,
    plan: SeveralRowsPlan,
    eps: float,
) -> tuple[int | float, ...]:
    """The argument struct of norm_linear_several.cu.

    weight: its tensor map. addresses: of rows_words.
    """
    return aligned((*aligned(rows_words(addresses, problem, eps)), *weight, *plan[1:]))
