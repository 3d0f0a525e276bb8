"""What decides a kernel, and the tile that it becomes. Pure Python, no GPU needed. cuda_src/tile.cuh has the same Tile."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .dtypes import DTYPES, ELEMENTS, FLOAT8S


@dataclass(frozen=True)
class Tile:
    """The compile-time integers of one kernel, as in cuda_src/tile.cuh.

    pack_size: elements moved by one memory instruction. threads_per_row: threads of one block that share a row.
    packs_per_thread: packs of a row in one thread's registers, 0 where the row waits elsewhere. rows_per_block: rows that
    a block works on at a time. cluster_size: blocks that share a row. blocks_per_sm: blocks that must fit on a
    multiprocessor, which bounds the registers of a thread. exact: 1 if the row fills the registers, so that no pack lies beyond
    it. stages: rows that pass through a block's shared memory at once, fetched by the copy engine; 0 where threads fetch them.
    Forward, 1 is the next row, on its way to registers; more are a ring.
    bundle: rows, one after the other in memory, that make up a stage of each warp; 0 where a stage is one row.
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

    @property
    def block_size(self) -> int:
        return self.threads_per_row * self.rows_per_block

    @property
    def cols(self) -> int:
        """Columns that fit the registers of the threads of a block that share a row."""
        return self.pack_size * self.threads_per_row * self.packs_per_thread

    @property
    def cpp(self) -> str:
        return "Tile{" + ", ".join(f".{field.name} = {getattr(self, field.name)}" for field in fields(self)) + "}"

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name} {value}" for name, value in shown.items() if value != getattr(Tile, name, None))

    @classmethod
    def of(cls, words: str) -> Tile:
        """The tile that prints as these words: "pack_size 8, threads_per_row 128, packs_per_thread 8". What a problem allows of
        it is for dispatch to say. Raises ValueError for other words."""
        try:
            return cls(**{name: int(value) for name, value in (each.split() for each in words.split(","))})
        except (TypeError, ValueError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(
                f"tile is {words!r}; expected pairs as 'pack_size 8, threads_per_row 128', these two and others of {names}"
            ) from error


# Where the scales of a y of 8 bits come from, as in cuda_src/fp8.cuh.
SCALINGS = ("given", "tensor", "row", "block", "mx")


def cols_of_scale(scaling: str | None, num_cols: int) -> int | None:
    """Columns of a row of num_cols that share a scale, None where it belongs to no part of a row."""
    return {"row": num_cols, "block": 128, "mx": 32}.get(scaling)


@dataclass(frozen=True)
class Problem:
    """What decides the kernel: one direction, one norm, the dtypes, which tensors are there, and how they lie.

    dtypes are names of cupynorm.dtypes.DTYPES, None for a tensor that is absent. dy, dx, dweight, dbias are of the
    backward direction alone (None: not wanted). pack_limit: the largest pack_size that num_cols, addresses and row
    strides allow, a power of two. pitched: whether anything lies between the rows of a streamed tensor.

    x is the row that is normalised. Forward without a y gives its statistics alone. Forward it may be a sum of its own dtype:
    `input` is then the dtype of what is read, residual_dtype that of what is added to it (None: nothing), and row_scale and
    dropout are what multiplies the input first. Backward these two belong to dx, where dresidual (None: not wanted, or the same
    tensor as dx) is the gradient of the sum itself. y1, weight1 and bias1 are of a second output of forward; round_x_hat is the
    dtype that x_hat is rounded to (None: it is not). scaling is where the scales of a y of 8 bits come from, as in
    cuda_src/fp8.cuh: given, tensor, row, block or mx; amax: whether that of y is recorded beside a given one.
    Backward with a y knows x by it alone: x is then the arithmetic's dtype, y_weight and y_bias those of forward. recomputed
    (None: not wanted) is the dtype of a y that backward writes again from x; bias is then forward's.
    """

    direction: str
    centered: bool
    num_cols: int
    x: str
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
    pack_limit: int = 16
    pitched: bool = False
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
        streamed = [self.x, self.y, self.dy, self.dx, self.input, self.residual_dtype, self.dresidual, self.recomputed]
        return min(self.pack_limit, 16 // min(DTYPES[name].itemsize for name in streamed if name and name not in FLOAT8S))

    @property
    def has_wide_parameters(self) -> bool:
        """Whether weight or bias is of a wider type than x."""
        return any(name and DTYPES[name].itemsize > DTYPES[self.x].itemsize for name in (self.weight, self.bias))

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
            [self.x, self.y, self.y1] if self.forward else [self.y or self.x, self.dy, self.dx, self.dsum, self.dresidual]
        )
        streamed += [self.input, self.residual_dtype, self.recomputed]
        if self.residual:
            streamed += [self.x, self.x]
        return self.num_cols * sum(ELEMENTS[name].itemsize for name in streamed if name) + self.scale_bytes


def is_ring(problem: Problem, tile: Tile) -> bool:
    """Whether rows pass through a ring (cuda_src/ring.cuh)."""
    return tile.stages > problem.forward and not tile.bundle


def is_staged(problem: Problem, tile: Tile) -> bool:
    """Whether rows come to registers through shared memory (StagedRow in cuda_src/row.cuh)."""
    return problem.forward and tile.stages == 1 and not tile.bundle


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)


def cols_of_slice(problem: Problem, pack_size: int, cluster_size: int) -> int:
    """The most columns that one block of a cluster owns, as slice() in cuda_src/row.cuh divides them."""
    step = 8 if cluster_size > 1 else 1
    return ceil_div(ceil_div(problem.num_cols, pack_size), cluster_size * step) * step * pack_size
