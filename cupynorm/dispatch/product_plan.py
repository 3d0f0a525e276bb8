"""Launches of a norm and the linear layer after it in one kernel, and when it is the default.
Pure Python, no GPU needed.

norm_linear.cu, fold_weight.cu   many rows
norm_linear_few.cu               one or two rows
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .devices import Device
from .instances import Kernel, KernelLaunch, cpp_bool, cpp_name, cpp_names
from .problem import Tile, ceil_div

# The integers of cuda_src/product/product_tiles.cuh.
BLOCK_ROWS, BLOCK_COLS, STEP_COLS = 128, 256, 64
_THREADS, _NUM_STAGES = 3 * 128, 4
_STAGE_BYTES = (BLOCK_ROWS + BLOCK_COLS) * STEP_COLS * 2
SMEM_BYTES = _NUM_STAGES * _STAGE_BYTES + 2 * _NUM_STAGES * 8
TERM_COLS = 16  # of cuda_src/product/column_terms.cuh
# Rows and columns of what one instruction loads of x or of weight, and of the terms.
LOADED, LOADED_TERMS = (128, STEP_COLS), (128, TERM_COLS)

# Two blocks share what they load of the weight.
_CLUSTER_SIZE = 2
# Columns of tiles that are computed at a time, by 11 clusters each on an H200. A wave then reads
# about as many rows of x as of the weight.
_COLUMNS_AT_A_TIME = 6

DTYPES = ("bfloat16", "float16")
# Of y. Below, clusters get less than two tiles of 256 x 256 each, and cuBLAS's product has smaller
# ones: measured on an H100, 2026-11-25 (docs/experiments.md, The norm inside the product).
LEAST_RESULTS = 2**23

# fold_weight.cu: its threads, what it needs to sum over them (reduce.cuh), and the most packs that
# a thread keeps in registers.
_FOLD_THREADS, _FOLD_SMEM_BYTES, _MOST_FOLD_PACKS = 128, 2 * 3 * 4 * 4, 8


Sizes = tuple[int, int, int]  # num_rows, in_features, out_features


class NormLinearProblem(NamedTuple):
    """dtype: of x, of the weight and of y. norm_weight, norm_bias: dtypes, or None."""

    num_rows: int
    in_features: int
    out_features: int
    dtype: str
    norm_weight: str | None
    norm_bias: str | None
    centered: bool
    zero_centered: bool

    @property
    def sizes(self) -> Sizes:
        return self[:3]


class Limits(NamedTuple):
    """What a kernel of a norm and a product takes.

    rows: the fewest and the most. most_cols: of x; in_features is a multiple of 8. outputs:
    out_features is a multiple of it. is_for_80: compute capability 8.0 or later, not 9.0 alone.
    """

    rows: tuple[int, int]
    most_cols: int
    outputs: int = 1
    is_for_80: bool = False

    def why_not(self, device: Device, dtype: str, sizes: Sizes) -> str | None:
        """Why the kernel does not fit a call, as a sentence, or None."""
        num_rows, in_features, out_features = sizes
        capability, (fewest, most) = device.compute_capability, self.rows
        if not (capability >= 80 if self.is_for_80 else capability == 90):
            expected = "8.0 or later" if self.is_for_80 else "9.0"
            return f"the kernel is for compute capability {expected}; {device.name} has another"
        if dtype not in DTYPES:
            return f"the kernel multiplies {' and '.join(DTYPES)}; the input has {dtype}"
        if in_features % 8 or not 0 < in_features <= self.most_cols:
            return (
                f"the kernel needs multiples of 8 up to {self.most_cols}; "
                f"in_features is {in_features}"
            )
        if out_features % self.outputs or out_features < 1:
            expected = f"a multiple of {self.outputs}" if self.outputs > 1 else "1 or more"
            return f"the kernel needs {expected} outputs; out_features is {out_features}"
        if not fewest <= num_rows <= most:
            return f"the kernel is for {fewest} to {most} rows; the input has {num_rows}"
        return None


# Coordinates of the copy engine have 32 bits.
_LIMITS = Limits((1, 2**31 - 1), 2**31 - 1, outputs=8)


class ProductPlan(NamedTuple):
    """The launch of norm_linear.cu. strips_at_a_time: an argument of the kernel."""

    launch: KernelLaunch
    strips_at_a_time: int


def why_not(device: Device, dtype: str, sizes: Sizes) -> str | None:
    """Why norm_linear.cu does not fit a call, as a sentence, or None."""
    reason, (num_rows, _, out_features) = _LIMITS.why_not(device, dtype, sizes), sizes
    if reason is None and num_rows * out_features < LEAST_RESULTS:
        return (
            f"the kernel is slower for less than {LEAST_RESULTS} results; "
            f"{num_rows} x {out_features} are fewer"
        )
    return reason


def product_launch(
    device: Device,
    num_rows: int,
    out_features: int,
    dtype: str,
    *,
    centered: bool,
    cluster_size: int = _CLUSTER_SIZE,
    strips_at_a_time: int | None = None,
) -> ProductPlan:
    """A launch of norm_linear.cu for a problem that why_not accepts, with 1 row or more.

    strips_at_a_time: tiles along the rows that are computed at a time; None for the best number.
    """
    strips = ceil_div(num_rows, BLOCK_ROWS * cluster_size)
    num_clusters = device.num_sms // cluster_size
    half_tiles = 2 * strips * ceil_div(out_features, BLOCK_COLS)
    arguments = f"{cpp_name(dtype)}, {cpp_bool(centered)}, {cluster_size}"
    kernel = Kernel("norm_linear.cu", f"norm_linear<{arguments}>", architecture="sm_90a")
    launch = KernelLaunch(
        kernel,
        Tile(8, _THREADS, cluster_size=cluster_size),
        min(num_clusters, half_tiles) * cluster_size,
        _THREADS,
        SMEM_BYTES,
        cluster_size,
        overlaps=True,
    )
    return ProductPlan(launch, strips_at_a_time or max(num_clusters // _COLUMNS_AT_A_TIME, 1))


def product_words(
    maps: tuple[tuple[int, ...], ...],
    addresses: tuple[int, ...],
    sizes: Sizes,
    strips_at_a_time: int,
    eps: float,
) -> tuple[int | float, ...]:
    """The argument struct of norm_linear.cu.

    maps: tensor maps of x, the folded weight, the terms of columns. addresses: of x, y, mean, rstd,
    and of num_rows + 1 words of 0.
    """
    maps_words = (word for each in maps for word in each)
    words = (*maps_words, *addresses, addresses[-1] + 8, *sizes, strips_at_a_time, float(eps))
    return *words, *[0] * (-len(words) % 8)  # the struct is aligned to 64 bytes


def folded_rows(out_features: int) -> int:
    """Rows of the folded weight: fold_weight.cu reorders each 32. Those beyond are not written."""
    return ceil_div(out_features, 32) * 32


def fold_launch(
    sizes: tuple[int, int],
    dtype: str,
    norm_weight: str | None,
    norm_bias: str | None,
    *,
    centered: bool,
    zero_centered: bool,
) -> KernelLaunch:
    """The kernel that folds a norm's parameters into a weight.

    sizes: out_features, in_features. dtype: of the weight and of the result. norm_weight,
    norm_bias: dtypes, or None.
    """
    out_features, in_features = sizes
    packs = min(ceil_div(in_features, 8 * _FOLD_THREADS), _MOST_FOLD_PACKS)
    tile = Tile(8, _FOLD_THREADS, packs, blocks_per_sm=7 if packs <= 4 else 5)
    types = cpp_names(dtype, norm_weight, norm_bias)
    flags = f"{cpp_bool(zero_centered)}, {cpp_bool(centered)}"
    kernel = Kernel("fold_weight.cu", f"fold_weight<{types}, {flags}, {tile.cpp}>")
    return KernelLaunch(kernel, tile, out_features, tile.block_size, _FOLD_SMEM_BYTES)


# norm_linear_few.cu: one or two rows.

FEW_SOURCE = "norm_linear_few.cu"
# The integers of cuda_src/product/norm_linear_few.cu.
_NUM_WARPS, _PART_COLS = 16, 1024
_MOST_WEIGHTS = 2**26  # of the default
MOST_ROWS = 2
_FEW_LIMITS = Limits((1, MOST_ROWS), _NUM_WARPS * _PART_COLS, is_for_80=True)


class FewRowsPlan(NamedTuple):
    """The launch of norm_linear_few.cu. outputs_of_block: an argument of the kernel."""

    launch: KernelLaunch
    outputs_of_block: int


def _smem_bytes(num_rows: int, in_features: int, outputs_of_block: int) -> int:
    num_parts = ceil_div(in_features, _PART_COLS)
    of_row = _NUM_WARPS * 12 + num_parts * _PART_COLS * 2
    return num_rows * (of_row + outputs_of_block * num_parts * 4)


def why_not_few(device: Device, dtype: str, sizes: Sizes) -> str | None:
    """Why norm_linear_few.cu does not fit a call, as a sentence, or None."""
    reason, (num_rows, in_features, out_features) = _FEW_LIMITS.why_not(device, dtype, sizes), sizes
    outputs = ceil_div(out_features, device.num_sms)
    if reason is None and _smem_bytes(num_rows, in_features, outputs) > device.smem_per_block:
        return f"{out_features} outputs do not fit the shared memory of {device.name}"
    return reason


def is_faster(device: Device, sizes: Sizes) -> bool:
    """Whether norm_linear_few.cu is at least 2% faster than a norm and cuBLAS's product after it.

    Measured on an H200, 2026-11-25: 4 to 28% faster up
    to 8192 x 8192. Larger weights: 3 to 6% in CUDA graphs, level in single calls (docs/linear.md).
    """
    return device.compute_capability == 90 and sizes[1] * sizes[2] <= _MOST_WEIGHTS


def few_launch(device: Device, problem: NormLinearProblem) -> FewRowsPlan:
    """A launch for a problem that why_not_few accepts."""
    num_rows, in_features, out_features = problem[:3]
    outputs = ceil_div(out_features, device.num_sms)
    types = cpp_names(problem.dtype, problem.norm_weight, problem.norm_bias)
    flags = f"{cpp_bool(problem.zero_centered)}, {cpp_bool(problem.centered)}"
    launch = KernelLaunch(
        Kernel(FEW_SOURCE, f"norm_linear_few<{types}, {flags}, {num_rows}>"),
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
    """The argument struct of norm_linear_few.cu. weight: its address.

    addresses: of x, residual, sum, bias, norm_weight, norm_bias, y, mean and rstd; 0 for those
    absent.
    """
    return *addresses, *problem.sizes, float(eps), weight, plan.outputs_of_block


# The default.

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
    device: Device, problem: NormLinearProblem, *, residual: bool = False, sm_margin: int = 0
) -> Choice:
    """The default of a call, fused=None. For few rows: of one without gradients.

    residual: whether it has one. sm_margin: multiprocessors that it leaves free.
    """
    num_rows = problem.num_rows
    if num_rows > MOST_ROWS:
        reason = why_not(device, problem.dtype, problem.sizes)
        if reason is None and residual:
            reason = "the norm's kernel on the plain path also adds the residual"
        if reason is None and sm_margin:
            reason = "the call leaves some multiprocessors free, and the kernel needs all"
        reason = reason or _why_not_folded(problem)
        source = "norm_linear.cu, with a fold in each call,"
    else:
        reason, source = why_not_few(device, problem.dtype, problem.sizes), FEW_SOURCE
        if reason is None and not is_faster(device, problem.sizes):
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
