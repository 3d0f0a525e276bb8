"""What decides a kernel, and the tile that it becomes. Pure Python, no GPU needed. cuda_src/tile.cuh has the same Tile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from ..dtypes import DTYPES, ELEMENTS, FLOAT8S

# How a row travels between its uses, as in cuda_src/tile.cuh, by strategy.
PATHS_OF_STRATEGY = {
    "warp": ("registers", "bundle"),
    "block": ("registers", "smem", "staged", "ring"),
    "cluster": ("registers", "smem", "ring"),
    "uncached": ("uncached",),
}
PATHS = ("registers", "smem", "staged", "ring", "bundle", "uncached")


@dataclass(frozen=True)
class Tile:
    """The compile-time integers of one kernel, as in cuda_src/tile.cuh.

    pack_size: elements moved by one memory instruction. threads_per_row: threads of one block that share a row.
    packs_per_thread: packs of a row that one thread keeps in registers, else 0. rows_per_block: rows that a block works
    on at a time. cluster_size: blocks that share a row. blocks_per_sm: blocks that must fit on a multiprocessor, which
    bounds the registers of a thread. exact: 1 if the row fills the registers, so that no pack lies beyond it.
    stages: rows, or bundles of rows, in shared memory at once that the copy engine fetches; 0 where threads load them.
    bundle: rows, consecutive in memory, that make up one stage of a warp; 0 where a stage is one row.
    path: how a row travels, one of PATHS. None in a tile that a caller gives: what the counts say. It follows from the
    counts, the strategy and the direction, so tiles are compared without it.
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
    path: str | None = field(default=None, compare=False)

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
        pairs = [
            f".{at.name} = {getattr(self, at.name)}" for at in fields(self) if at.name != "path"
        ]
        return (
            "Tile{"
            + ", ".join(pairs + [f".path = Path::{self.path}"] * (self.path is not None))
            + "}"
        )

    @property
    def path_in_words(self) -> str:
        words = {
            "smem": "shared memory",
            "staged": "registers, the next row staged in shared memory",
            "ring": f"ring of {self.stages} row{'s' * (self.stages > 1)}",
            "bundle": f"{self.stages} bundles of {self.bundle} rows for each warp",
            "uncached": "uncached, the row is read again",
        }
        return words.get(self.path, "registers")

    def of_strategy(self, strategy: str, forward: bool) -> Tile:
        """This tile; where it names no path, with the one that its counts mean for a strategy."""
        if self.path is not None:
            return self
        if strategy == "uncached":
            path = "uncached"
        elif self.bundle:
            path = "bundle"
        elif self.stages:
            path = "staged" if forward and self.stages == 1 else "ring"
        else:
            path = "registers" if self.packs_per_thread > 0 else "smem"
        return replace(self, path=path)

    def as_ints(self) -> list[int]:
        """The counts in their order, then the place of the path in PATHS if it is named."""
        *counts, path = (getattr(self, each.name) for each in fields(self))
        return [*counts, *([] if path is None else [PATHS.index(path)])]

    @classmethod
    def from_ints(cls, ints: Sequence[int]) -> Tile:
        """The tile whose as_ints() these are; the last ones may be left out."""
        num_counts = len(fields(cls)) - 1
        return cls(*ints[:num_counts], *(PATHS[at] for at in ints[num_counts:]))

    def __str__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        return ", ".join(
            f"{name} {value}" for name, value in shown.items() if value != getattr(Tile, name, None)
        )

    @classmethod
    def of(cls, words: str) -> Tile:
        """The tile that prints as these words: "pack_size 8, threads_per_row 128, packs_per_thread 8". What a problem allows of
        it is for dispatch to say. Raises ValueError for other words."""
        try:
            pairs = dict(each.split() for each in words.split(","))
            path = pairs.pop("path", None)
            tile = cls(**{name: int(value) for name, value in pairs.items()}, path=path)
        except (TypeError, ValueError) as error:
            names = ", ".join(each.name for each in fields(cls))
            raise ValueError(
                f"tile is {words!r}; expected pairs as 'pack_size 8, threads_per_row 128', these two and others of {names}"
            ) from error
        if path is not None and path not in PATHS:
            raise ValueError(f"tile has path {path!r}; it is one of {', '.join(PATHS)}")
        return tile


# Where the scales of a y of 8 bits come from, as in cuda_src/scales.cuh.
SCALINGS = ("given", "tensor", "row", "block", "mx")


def cols_of_scale(scaling: str | None, num_cols: int) -> int | None:
    """Columns of a row of num_cols that share a scale, None where it belongs to no part of a row."""
    return {"row": num_cols, "block": 128, "mx": 32}.get(scaling)


class OperandLayout(NamedTuple):
    """Where a tensor of rows lies: its address, its row stride in elements, bytes of an element, and how many rows it has."""

    address: int
    row_stride: int
    itemsize: int
    num_rows: int = 1


@dataclass(frozen=True)
class Layout:
    """What a kernel may assume of every tensor that it reads or writes.

    pack_limit: the largest pack_size that num_cols, addresses and row strides allow, a power of two.
    contiguous: whether no tensor has a gap between its rows, nor the same row twice.
    """

    pack_limit: int
    contiguous: bool

    @classmethod
    def of(cls, num_cols: int, operands: Iterable[tuple[int, int, int, int]]) -> Layout:
        """From an OperandLayout of each tensor.

        pack_limit is the largest power of two that divides num_cols and keeps the packs of every tensor aligned: a pack's
        address is a multiple of its bytes, or of 16 if it has more.
        """
        limit, contiguous = 16, True
        while limit > 1 and num_cols % limit:
            limit //= 2
        for address, row_stride, itemsize, num_rows in operands:
            stride_bytes = row_stride * itemsize if num_rows > 1 else 0
            contiguous = contiguous and (num_rows <= 1 or row_stride == num_cols)
            while limit > 1 and (
                address % min(16, limit * itemsize) or stride_bytes % min(16, limit * itemsize)
            ):
                limit //= 2
        return cls(limit, contiguous)


@dataclass(frozen=True)
class Problem:
    """What decides the kernel: one direction, one norm, the dtypes, which tensors are there, and how they lie.

    dtypes are names of cupynorm.dtypes.DTYPES, None for a tensor that is absent. dy, dx, dweight, dbias are of the
    backward direction alone (None: not wanted). layout: of all tensors together.

    x is the row that is normalised. Forward without a y gives its statistics alone. Forward it may be a sum of its own dtype:
    `input` is then the dtype of what is read, residual_dtype that of what is added to it (None: nothing), and row_scale and
    dropout are what multiplies the input first. Backward these two belong to dx, where dresidual (None: not wanted, or the same
    tensor as dx) is the gradient of the sum itself. y1, weight1 and bias1 are of a second output of forward; round_x_hat is the
    dtype that x_hat is rounded to (None: it is not). scaling is where the scales of a y of 8 bits come from, as in
    cuda_src/scales.cuh: given, tensor, row, block or mx; amax: whether that of y is recorded beside a given one.
    Backward with a y knows x by it alone: x is then the arithmetic's dtype, y_weight and y_bias those of forward. recomputed
    (None: not wanted) is the dtype of a y that backward writes again from x; bias is then forward's.
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
    row_scale: str | None = None
    dropout: bool = False
    dresidual: str | None = None
    y1: str | None = None
    weight1: str | None = None
    bias1: str | None = None
    round_x_hat: str | None = None
    y_weight: str | None = None
    y_bias: str | None = None
    scaling: str | None = None
    amax: bool = False
    recomputed: str | None = None

    @property
    def compute(self) -> str:
        return DTYPES[self.x].compute

    @property
    def forward(self) -> bool:
        return self.direction == "forward"

    @property
    def widest_pack(self) -> int:
        """16 bytes of the narrowest of the streamed tensors, 8 bits not counted, or what their layout allows."""
        streamed = [
            self.x,
            self.y,
            self.dy,
            self.dx,
            self.input,
            self.residual_dtype,
            self.dresidual,
            self.recomputed,
        ]
        return min(
            self.layout.pack_limit,
            16 // min(DTYPES[name].itemsize for name in streamed if name and name not in FLOAT8S),
        )

    @property
    def has_wide_parameters(self) -> bool:
        """Whether weight or bias is of a wider type than x."""
        return any(
            name and DTYPES[name].itemsize > DTYPES[self.x].itemsize
            for name in (self.weight, self.bias)
        )

    @property
    def cols_of_scale(self) -> int | None:
        return cols_of_scale(self.scaling, self.num_cols)

    @property
    def num_scales(self) -> int:
        """Scales of each row."""
        return ceil_div(self.num_cols, self.cols_of_scale) if self.cols_of_scale else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of each row."""
        return self.num_scales * (1 if self.scaling == "mx" else 4)

    @property
    def bytes_per_row(self) -> int:
        """Bytes that any implementation must move for a row: each streamed tensor once."""
        streamed = (
            [self.x, self.y, self.y1]
            if self.forward
            else [self.y or self.x, self.dy, self.dx, self.dsum, self.dresidual]
        )
        streamed += [self.input, self.residual_dtype, self.recomputed]
        if self.residual:
            streamed += [self.x, self.x]
        return (
            self.num_cols * sum(ELEMENTS[name].itemsize for name in streamed if name)
            + self.scale_bytes
        )


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)


def cols_of_slice(problem: Problem, pack_size: int, cluster_size: int) -> int:
    """The most columns that one block of a cluster owns, as slice() in cuda_src/slice.cuh divides them."""
    step = 8 if cluster_size > 1 else 1
    return ceil_div(ceil_div(problem.num_cols, pack_size), cluster_size * step) * step * pack_size
