"""Kernels as C++ names: which template instance, of which file, computes a problem.
Pure Python, no GPU needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import DTYPES, ELEMENTS
from .model import keeps_sums
from .problem import Problem, Tile


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel template: the file that holds it and its C++ name expression.

    functors: the structs of a user's functors (dispatch/functor_text.py).
    architecture: "" if any will do, or the only one it is compiled for, with features of its own.
    """

    source: str
    name_expression: str
    functors: str = ""
    architecture: str = ""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: grid_size blocks of block_size threads, smem_bytes of dynamic shared memory each.

    overlaps: whether it may start before the previous launch has ended (programmatic dependent
    launch). The kernel itself waits for the end.
    cluster_size: blocks that share a row.
    num_first, rows_of_first: forward, the first num_first blocks take rows_of_first rows each, and
    the others share the rest (tile.cuh).
    num_row_blocks: of backward_few.cu, the blocks that have rows. The others have columns.
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
    num_row_blocks: int = 0


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
    """The element type of a dtype in C++; void for None."""
    return ELEMENTS[name].cpp if name else "void"


def cpp_names(*names: str | None) -> str:
    """The same of several, separated by commas."""
    return ", ".join(map(cpp_name, names))


def cpp_bool(value: object) -> str:
    """true or false, as C++ spells it."""
    return "true" if value else "false"


def load_x_name(problem: Problem) -> str:
    """The struct through which backward reads x."""
    if problem.load and problem.load.source:
        struct = problem.load.struct(problem.compute)
        return f"FunctorLoad<{cpp_name(problem.load.source)}, {struct}>"
    return f"Load<{cpp_name(problem.x)}>"


def load_dy_name(problem: Problem) -> str:
    """The struct through which backward reads dy."""
    if problem.store is None:
        return f"Load<{cpp_name(problem.dy)}>"
    types = cpp_names(problem.store.source, problem.weight, problem.bias)
    flags = f"{cpp_bool(problem.zero_centered)}, {cpp_bool(problem.centered)}"
    struct = problem.store.struct(problem.compute, backward=True)
    return f"DyThroughStore<{load_x_name(problem)}, {types}, {flags}, {struct}>"


def functor_structs(problem: Problem) -> str:
    """The structs that a kernel of the problem needs besides those of cuda_src."""
    texts = {}  # as keys: backward, some of a load's are needed twice
    for each in (problem.load, problem.store):
        if each is None:
            continue
        if problem.forward or (each is problem.load and each.source):
            texts |= dict.fromkeys(each.texts(backward=False))
        if not problem.forward:
            texts |= dict.fromkeys(each.texts(backward=True))
    return "".join(texts)


def row_instance(
    problem: Problem, strategy: str, tile: Tile, statistics: str, step: str = "all"
) -> Kernel:
    """The instance of the strategy's kernel for a problem."""
    zero_centered = cpp_bool(problem.zero_centered)
    load_x = load_x_name(problem)
    if problem.forward:
        if problem.residual:
            load_x = f"ResidualLoad<{cpp_name(problem.x)}>"
        if problem.input:
            parts = (problem.input, problem.residual_dtype, problem.x)
            types = cpp_names(*parts)
            if problem.load:  # it computes in the widest arithmetic of the parts of the sum
                wide = any(name and DTYPES[name].compute == "float64" for name in parts)
                types += f", {problem.load.struct('float64' if wide else 'float32')}"
            load_x = f"SumLoad<{types}>"
        rounded = f", {cpp_name(problem.round_x_hat)}" if problem.round_x_hat else ""
        outputs = cpp_names(problem.y, problem.weight, problem.bias)
        store = f"Store<{outputs}, {zero_centered}{rounded}>"
        if problem.scaling:
            rounded_to = cpp_name(problem.round_x_hat)
            scaling = f"Scaling::{problem.scaling}, Step::{step}" + ", true" * problem.in_columns
            store = f"QuantizeStore<{outputs}, {zero_centered}, {rounded_to}, {scaling}>"
        if problem.store:
            store = f"FunctorStore<{store}, {problem.store.struct(problem.compute)}>"
        arguments = f"{load_x}, {store}, {cpp_bool(problem.centered)}, Statistics::{statistics}"
    else:
        sums = keeps_sums(tile)
        gradients = (
            f"Gradients{{.dx = {cpp_bool(problem.dx)}, "
            f".dweight = {cpp_bool(problem.dweight and sums)}, "
            f".dbias = {cpp_bool(problem.dbias and sums)}}}"
        )
        arguments = f"{row_arguments(problem)}, {gradients}, {cpp_bool(problem.centered)}"
    name = f"{problem.direction}_{strategy}"
    arguments += f", {tile.cpp}"
    return Kernel(f"{name}.cu", f"{name}<{arguments}>", functor_structs(problem))


def row_arguments(problem: Problem) -> str:
    """Backward: the loads, the scale and the store."""
    store = f"DxStore<{cpp_names(problem.dx or problem.x, problem.dsum)}>"
    if problem.dresidual or problem.load:
        types = cpp_names(problem.dx, problem.dresidual, problem.dsum)
        through = ""
        if problem.load:
            struct = problem.load.struct(problem.compute, backward=True)
            source = problem.input or problem.load.source
            source = cpp_name(source if problem.load.reads_argument else None)
            through = f", DxThroughLoad<{source}, {struct}>"
        store = f"SplitStore<{types}{through}>"
    if problem.recomputed:
        types = cpp_names(problem.recomputed, problem.weight, problem.bias)
        store = f"RecomputingStore<{store}, {types}, {cpp_bool(problem.zero_centered)}>"
    weight = f"LoadParameter<{cpp_name(problem.weight)}, {cpp_bool(problem.zero_centered)}>"
    return f"{load_x_name(problem)}, {load_dy_name(problem)}, {weight}, {store}"


def parameters_instance(problem: Problem, has_partials: bool) -> tuple[Tile | None, Kernel | None]:
    """The kernel that sums dweight and dbias, from partial rows or from x and dy."""
    if not (problem.dweight or problem.dbias):
        return None, None
    pack_size = min(problem.widest_pack, 4)
    # Partial rows are few, so units of one cache line spread the columns over more multiprocessors.
    is_wide = problem.num_cols >= 16384
    lanes = 32 if not has_partials or is_wide else 8
    # Functors need more than the 64 registers of two blocks.
    is_tight = problem.load or problem.store
    blocks_per_sm = 1 if is_tight and not has_partials else 2
    tile = Tile(pack_size, lanes, rows_per_block=512 // lanes, blocks_per_sm=blocks_per_sm)
    compute = cpp_name(problem.compute)
    if not has_partials:
        loads = f"{load_x_name(problem)}, {load_dy_name(problem)}"
        rows = f"RowProducts<{loads}, {cpp_bool(problem.centered)}>"
    else:
        rows = f"PartialSums<{compute}>"
    outputs = f"{cpp_name(problem.dweight)}, {cpp_name(problem.dbias)}"
    instance = f"backward_parameters<{rows}, {outputs}, {tile.cpp}>"
    functors = "" if has_partials else functor_structs(problem)
    return tile, Kernel("backward_parameters.cu", instance, functors)
