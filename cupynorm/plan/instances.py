"""Kernels as C++ names: which template instance, of which file, computes a problem.
Pure Python, no GPU needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import ELEMENTS
from .problem import Problem, Tile


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel template: the file that holds it and its C++ name expression."""

    source: str
    name_expression: str


@dataclass(frozen=True)
class Launch:
    """One launch: grid_size blocks of block_size threads, smem_bytes of dynamic shared memory each.

    overlaps: whether it may start before the previous launch has ended (programmatic dependent
    launch). The kernel itself waits for the end.
    num_first, rows_of_first: forward, the first num_first blocks take rows_of_first rows each, and
    the others share the rest (cuda_src/turns.cuh).
    """

    kernel: Kernel
    tile: Tile
    grid_size: int
    block_size: int
    smem_bytes: int
    cluster_size: int = 1
    overlaps: bool = False
    num_first: int = 0
    rows_of_first: int = 0


@dataclass(frozen=True)
class Choice:
    """The part of a plan that does not depend on num_rows.

    resident: a lower bound of the blocks of the kernel that are resident on one multiprocessor.
    parameters_tile, parameters_kernel: backward, the kernel that sums dweight and dbias.
    amax_kernel: runs before the kernel if one launch cannot find the scales and write y.
    by_dispatch: whether dispatch chose the tile. If so, few rows may get another one.
    """

    strategy: str
    tile: Tile
    statistics: str
    kernel: Kernel | None
    smem_bytes: int
    resident: int
    parameters_tile: Tile | None
    parameters_kernel: Kernel | None
    reason: str
    amax_kernel: Kernel | None = None
    by_dispatch: bool = False


def cpp_name(name: str | None) -> str:
    return ELEMENTS[name].cpp if name else "void"


def cpp_names(*names: str | None) -> str:
    return ", ".join(map(cpp_name, names))


def cpp_bool(value: object) -> str:
    return "true" if value else "false"


def load_x_name(problem: Problem) -> str:
    if problem.forward or problem.y is None:
        return f"Load<{cpp_name(problem.x)}>"
    types = ", ".join(cpp_name(name) for name in (problem.y, problem.y_weight, problem.y_bias))
    return f"LoadXHat<{types}, {cpp_bool(problem.zero_centered)}, {cpp_name(problem.compute)}>"


def row_instance(
    problem: Problem, strategy: str, tile: Tile, statistics: str, step: str = "all"
) -> Kernel:
    zero_centered = cpp_bool(problem.zero_centered)
    factor = f"{cpp_name(problem.row_scale)}, {cpp_bool(problem.dropout)}"
    load_x = load_x_name(problem)
    if problem.forward:
        if problem.residual:
            load_x = f"ResidualLoad<{cpp_name(problem.x)}>"
        if problem.input:
            types = cpp_names(problem.input, problem.residual_dtype)
            load_x = f"SumLoad<{types}, {cpp_name(problem.x)}, {factor}>"
        rounded = f", {cpp_name(problem.round_x_hat)}" if problem.round_x_hat else ""
        outputs = cpp_names(problem.y, problem.weight, problem.bias)
        store = f"Store<{outputs}, {zero_centered}{rounded}>"
        if problem.scaling:
            rounded_to = cpp_name(problem.round_x_hat)
            scaling = f"Scaling::{problem.scaling}, Step::{step}"
            store = f"QuantizeStore<{outputs}, {zero_centered}, {rounded_to}, {scaling}>"
        if problem.y1:
            second = cpp_names(problem.y1, problem.weight1, problem.bias1)
            second = f"Store<{second}, {zero_centered}{rounded}>"
            store = f"TwoStores<{store}, {second}>"
        arguments = f"{load_x}, {store}, {cpp_bool(problem.centered)}, Statistics::{statistics}"
    else:
        store = f"Store<{cpp_name(problem.dx or problem.x)}, void, void, false>"
        if problem.dsum:
            store = f"AddStore<{cpp_name(problem.dx or problem.x)}, {cpp_name(problem.dsum)}>"
        if problem.dresidual or problem.row_scale or problem.dropout:
            types = cpp_names(problem.dx, problem.dresidual, problem.dsum)
            store = f"SplitStore<{types}, {factor}>"
        if problem.recomputed:
            types = ", ".join(
                cpp_name(name) for name in (problem.recomputed, problem.weight, problem.bias)
            )
            store = f"RecomputingStore<{store}, {types}, {zero_centered}>"
        scale = f"Scale<{cpp_name(problem.weight)}, {zero_centered}>"
        sums = strategy != "uncached"
        gradients = (
            f"Gradients{{.dx = {cpp_bool(problem.dx)}, "
            f".dweight = {cpp_bool(problem.dweight and sums)}, "
            f".dbias = {cpp_bool(problem.dbias and sums)}}}"
        )
        loads = f"{load_x}, Load<{cpp_name(problem.dy)}>"
        arguments = f"{loads}, {scale}, {store}, {gradients}, {cpp_bool(problem.centered)}"
    name = f"{problem.direction}_{strategy}"
    return Kernel(f"{name}.cu", f"{name}<{arguments}, {tile.cpp}>")


def parameters_instance(problem: Problem, strategy: str) -> tuple[Tile | None, Kernel | None]:
    if not (problem.dweight or problem.dbias):
        return None, None
    pack_size = min(problem.widest_pack, 4)
    # Partial rows are few, so units of one cache line spread the columns over more multiprocessors.
    lanes = 32 if strategy == "uncached" or problem.num_cols >= 16384 else 8
    # With y, four float64 divisions at a time need more than the 64 registers of two blocks.
    blocks_per_sm = 1 if problem.y and strategy == "uncached" else 2
    tile = Tile(pack_size, lanes, rows_per_block=512 // lanes, blocks_per_sm=blocks_per_sm)
    compute = cpp_name(problem.compute)
    if strategy == "uncached":
        loads = f"{load_x_name(problem)}, Load<{cpp_name(problem.dy)}>"
        rows = f"RowProducts<{loads}, {cpp_bool(problem.centered)}>"
    else:
        rows = f"PartialSums<{compute}>"
    outputs = f"{cpp_name(problem.dweight)}, {cpp_name(problem.dbias)}"
    return tile, Kernel(
        "backward_parameters.cu", f"backward_parameters<{rows}, {outputs}, {tile.cpp}>"
    )
