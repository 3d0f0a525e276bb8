"""Problem, all that decides a kernel, and Tile, its compile-time integers.
Pure Python, no GPU needed. tile.cuh has the same Tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from ..dtypes import DTYPES, ELEMENTS
from .functor_text import Fused

# How a row travels between its uses (Path in tile.cuh), by strategy.
PATHS_OF_STRATEGY = {
    "warp": ("registers", "bundle"),
    "block": ("registers", "smem", "ring"),
    "cluster": ("registers", "smem", "ring"),
    "uncached": ("uncached",),
}
PathName = Literal["registers", "smem", "ring", "bundle", "uncached"]
PATHS = get_args(PathName)


@dataclass(frozen=True)
class Tile:
    """The compile-time integers of one kernel, as in tile.cuh.

    Examples:
        >>> tile = cupynorm.Tile(pack_size=8, threads_per_row=32, packs_per_thread=4)
        >>> tile.cols
        1024
        >>> cupynorm.plan(1000, device="H200", strategy="warp", tile=tile).launches[0].block_size
        32

    pack_size: elements moved by one memory instruction.
    threads_per_row: threads of one block that share a row.
    packs_per_thread: packs of a row that one thread keeps in registers, else 0.
    rows_per_block: rows that a block works on at a time.
    cluster_size: blocks that share a row.
    blocks_per_sm: blocks that must fit on a multiprocessor, which bounds the registers of a thread.
    exact: 1 if the row fills the registers, so that no pack is beyond its end.
    stages: rows or bundles in shared memory that the copy engine fetches; 0 if threads load them.
    bundle: consecutive rows that make up one stage of a warp; 0 if a stage is one row.
    early: forward, 1 if weight and bias are loaded with the row, before its statistics; else 0.
    path: how a row travels, one of PATHS. None in a caller's tile means that of_strategy derives it
    from the counts and the strategy. Comparisons therefore ignore it.
    """

    pack_size: int
    threads_per_row: int
    packs_per_thread: int = 0
    rows_per_block: int = 1
    cluster_size: int = 1
    blocks_per_sm: int = 1
    exact: int = 0
    stages: int = 0
    bundle: int = 0
    early: int = 0
    path: PathName | None = field(default=None, compare=False)

    @property
    def block_size(self) -> int:
        return self.threads_per_row * self.rows_per_block

    @property
    def elements(self) -> int:
        """Elements of a row in the registers of one thread."""
        return self.pack_size * self.packs_per_thread

    @property
    def cols(self) -> int:
        """Columns that fit the registers of the threads of a block that share a row."""
        return self.pack_size * self.threads_per_row * self.packs_per_thread

    @property
    def cpp(self) -> str:
        words = {each.name: getattr(self, each.name) for each in fields(self)}
        path = words.pop("path")
        if path is not None:
            words["path"] = f"Path::{path}"
        return f"Tile{{{', '.join(f'.{name} = {value}' for name, value in words.items())}}}"

    @property
    def path_in_words(self) -> str:
        words = {
            "smem": "shared memory",
            "ring": f"ring of {self.stages} row{'s' * (self.stages > 1)}",
            "bundle": f"{self.stages} bundles of {self.bundle} rows for each warp",
            "uncached": "uncached, the row is read again",
        }
        return words.get(self.path, "registers")

    def of_strategy(self, strategy: str) -> Tile:
        """This tile; if its path is None, with the path that its counts imply for the strategy."""
        if self.path is not None:
            return self
        if strategy == "uncached":
            path = "uncached"
        elif self.bundle:
            path = "bundle"
        elif self.stages:
            path = "ring"
        else:
            path = "registers" if self.packs_per_thread > 0 else "smem"
        return replace(self, path=path)

    def __str__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        return ", ".join(
            f"{name} {value}" for name, value in shown.items() if value != getattr(Tile, name, None)
        )


# Fields of a Problem that fuse more with the norm than its own arithmetic.
_FUSED = ("residual", "dsum", "input", "dresidual", "round_x_hat")
_FUSED += ("recomputed", "amax", "load", "store")

Direction = Literal["forward", "backward"]
NormName = Literal["layer_norm", "rms_norm"]
DIRECTIONS, NORMS = get_args(Direction), get_args(NormName)
# Where the scales of an 8-bit y come from, as in scales.cuh.
SCALINGS = ("given", "tensor", "row", "block", "block64")


def cols_of_scale(scaling: str | None, num_cols: int) -> int | None:
    """Columns of a row that share a scale; None if the scale is that of the whole tensor."""
    return {"row": num_cols, "block": 128, "block64": 64}.get(scaling)


class OperandLayout(NamedTuple):
    """The layout of one operand: address, row stride in elements, itemsize and number of rows."""

    address: int
    row_stride: int
    itemsize: int
    num_rows: int = 1


@dataclass(frozen=True)
class Layout:
    """What a kernel may assume of every tensor that it reads or writes.

    pack_limit: the largest pack_size that num_cols, addresses and strides allow, a power of two.
    contiguous: whether the rows of every tensor follow one another without gaps or repeats.
    """

    pack_limit: int
    contiguous: bool

    @classmethod
    def of(cls, num_cols: int, operands: Iterable[tuple[int, int, int, int]]) -> Layout:
        """The layout of tensors described by one OperandLayout each.

        pack_limit is the largest power of two that divides num_cols and aligns all packs. A pack
        is aligned if its address is a multiple of its bytes, or of 16 if it is larger. Raises
        ValueError without operands: nothing is known of their layout.
        """
        limit, contiguous = cls.of_new_arrays(num_cols).pack_limit, True
        operands = list(operands)
        if not operands:
            raise ValueError("operands is empty; a layout needs the tensors that a kernel accesses")
        for address, row_stride, itemsize, num_rows in operands:
            stride_bytes = row_stride * itemsize if num_rows > 1 else 0
            contiguous = contiguous and (num_rows <= 1 or row_stride == num_cols)
            while limit > 1 and (
                address % min(16, limit * itemsize) or stride_bytes % min(16, limit * itemsize)
            ):
                limit //= 2
        return cls(limit, contiguous)

    @classmethod
    def of_new_arrays(cls, num_cols: int) -> Layout:
        """The layout of newly allocated arrays: aligned to 16 bytes and more, without gaps."""
        return cls(next(limit for limit in (16, 8, 4, 2, 1) if num_cols % limit == 0), True)


@dataclass(frozen=True)
class Problem:
    """All that decides a kernel: direction, norm, dtypes, which tensors there are, their layout.

    A tensor is described by its dtype, a name of cupynorm.dtypes.DTYPES, or None if it is absent.

    x: the row that is normalised; forward it may be a sum, of an input and a residual_dtype.
    layout: of all tensors together.
    residual: forward, whether a residual of x's dtype is added and the sum stored.
    dsum: backward, what is added to dx. dresidual: the gradient of the sum, if it is not dx.
    scaling: where the scales of an 8-bit y come from, one of SCALINGS; in_columns: those of blocks.
    recomputed: of a y that backward writes again from x; bias is then that of forward.
    load, store: the user's functors. What a load without a sum is applied to has the dtype of its
    source, and x is the dtype of the arithmetic. So is dy of a backward with a store, whose bias is
    that of forward. Backward, where a sum was stored after a load, input is what the load read.
    """

    direction: str
    centered: bool
    num_cols: int
    x: str
    layout: Layout
    y: str | None = None
    weight: str | None = None
    bias: str | None = None
    zero_centered: bool = False
    residual: bool = False
    dy: str | None = None
    dx: str | None = None
    dweight: str | None = None
    dbias: str | None = None
    dsum: str | None = None
    input: str | None = None
    residual_dtype: str | None = None
    dresidual: str | None = None
    round_x_hat: str | None = None
    scaling: str | None = None
    amax: bool = False
    in_columns: bool = False
    recomputed: str | None = None
    load: Fused | None = None
    store: Fused | None = None

    @property
    def compute(self) -> str:
        return DTYPES[self.x].compute

    @property
    def itemsize(self) -> int:
        """Bytes of an element of x."""
        return DTYPES[self.x].itemsize

    @property
    def num_sums(self) -> int:
        """How many of dweight and dbias are wanted."""
        return bool(self.dweight) + bool(self.dbias)

    @property
    def forward(self) -> bool:
        return self.direction == "forward"

    @property
    def widest_pack(self) -> int:
        """The most elements that a pack may have.

        16 bytes of the narrowest streamed tensor (8-bit ones aside), or what the layout allows.
        """
        streamed = {self.x, self.y, self.dy, self.dx, self.dresidual}
        streamed |= {self.input, self.residual_dtype, self.recomputed}
        streamed |= {each.source for each in (self.load, self.store) if each}
        narrowest = min(DTYPES[name].itemsize for name in streamed if name in DTYPES)
        return min(self.layout.pack_limit, 16 // narrowest)

    @property
    def has_wide_parameters(self) -> bool:
        """Whether weight or bias is of a wider type than x."""
        return any(
            name and DTYPES[name].itemsize > self.itemsize for name in (self.weight, self.bias)
        )

    @cached_property
    def extras(self) -> frozenset[str]:
        """Words for what is fused with the norm: names of fields, "wide" for
        parameters of a wider dtype than x, and the scaling, "block" for blocks of any width."""
        words = {name for name in _FUSED if getattr(self, name)}
        words |= {"wide"} if self.has_wide_parameters else set()
        return frozenset(words | ({self.scaling.removesuffix("64")} if self.scaling else set()))

    @property
    def cols_of_scale(self) -> int | None:
        return cols_of_scale(self.scaling, self.num_cols)

    @property
    def num_scales(self) -> int:
        """The number of scales of each row."""
        return ceil_div(self.num_cols, self.cols_of_scale) if self.cols_of_scale else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of each row."""
        return self.num_scales * 4

    @property
    def bytes_per_row(self) -> int:
        """Bytes that every implementation must move for a row: each streamed tensor once."""
        streamed = [self.x, self.y]
        if not self.forward:
            streamed = [self.x, self.dy, self.dx, self.dsum, self.dresidual]
        if self.load and self.load.source:
            streamed[0] = self.load.source
        if self.store and not self.forward:
            streamed[1] = self.store.source
        streamed += [self.input, self.residual_dtype, self.recomputed]
        if self.residual:
            streamed += [self.x, self.x]
        of_element = sum(ELEMENTS[name].itemsize for name in streamed if name)
        return self.num_cols * of_element + self.scale_bytes


def ceil_div(value: int, step: int) -> int:
    """value / step, rounded up."""
    return -(-value // step)


def cols_of_slice(problem: Problem, tile: Tile) -> int:
    """The most columns of a block of a cluster, as slice() in tile.cuh divides them."""
    step = 8 if tile.cluster_size > 1 else 1
    packs = ceil_div(problem.num_cols, tile.pack_size)
    return ceil_div(packs, tile.cluster_size * step) * step * tile.pack_size
