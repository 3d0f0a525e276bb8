"""torch: products that overlap with the collective before or after them.

TransformerEngine's arguments choose them:

    ub_overlap_ag         gathering rows, and the product of them (mode "column")
    ub_overlap_rs         the product of mode "row", and the sum over ranks of this rank's rows
    ub_overlap_rs_dgrad   the gradient of normalized, and the same sum (mode "column")
    symmetric_ar_type     the sum over ranks of all rows in mode "row"

Where GPUs of one host reach each other's memory, torch's symmetric-memory operators do it.
Elsewhere rows are cut into chunks: the collective of one chunk runs beside the product of the next
one. ub_bulk_dgrad and ub_bulk_wgrad name what column.py does in any case.

Short products have one collective before or after them, whatever the arguments are: `cuts`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn.dtypes import name_of
from ..nn.products import Factor
from ..norm.quantized_tensor import QuantizedTensor
from .ranks import Pending, Ranks

ALL_REDUCES = ("one_shot", "two_shot", "multimem_all_reduce")
_NUM_CHUNKS = 4

# Multiplications and additions of a rank's product, from which on it is cut to overlap with a
# collective. Shorter ones took longer when cut: docs/experiments.md, "Products beside collectives".
LEAST_OPERATIONS = 2**39
LEAST_OPERATIONS_IN_8_BITS = 2**42


class Overlaps(NamedTuple):
    """What a layer was asked to overlap. all_reduce: one of ALL_REDUCES, or None."""

    gather: bool = False
    scatter: bool = False
    all_reduce: str | None = None


def overlaps(
    arguments: Mapping[str, Any], mode: str | None, *, sequence_parallel: bool, is_shared: bool
) -> Overlaps:
    """From the arguments of a layer. Warns where one has no effect.

    Raises ValueError for a symmetric_ar_type of another name.
    """
    kind = arguments["symmetric_ar_type"]
    if kind is not None and kind not in ALL_REDUCES:
        expected = ", ".join(map(repr, ALL_REDUCES))
        raise ValueError(f"symmetric_ar_type is {kind!r}; expected None, {expected}")
    if not is_shared:
        return Overlaps()
    column, row = (mode == each and sequence_parallel for each in ("column", "row"))
    has_effect = {
        "ub_overlap_ag": column,
        "ub_overlap_rs": row,
        "ub_overlap_rs_dgrad": column,
        "ub_bulk_dgrad": column,
        "ub_bulk_wgrad": column,
        "symmetric_ar_type": mode == "row" and not sequence_parallel,
    }
    effective = {name for name in has_effect if arguments[name] and has_effect[name]}
    idle = [name for name in has_effect if arguments[name] and name not in effective]
    if idle:
        warnings.warn(
            f"{', '.join(idle)} has no effect with parallel_mode={mode!r} and "
            f"sequence_parallel={sequence_parallel}",
            stacklevel=4,
        )
    return Overlaps(
        "ub_overlap_ag" in effective,
        not effective.isdisjoint(("ub_overlap_rs", "ub_overlap_rs_dgrad")),
        kind if "symmetric_ar_type" in effective else None,
    )


# Lengths of products.


def cuts(name: str, num_rows: int, weight: Tensor) -> bool:
    """Whether a product is cut as an argument asks. Warns once for each shape if it is not.

    name: of the argument. num_rows: of all ranks.
    """
    least = LEAST_OPERATIONS_IN_8_BITS if weight.element_size() == 1 else LEAST_OPERATIONS
    if 2 * num_rows * weight.numel() >= least:
        return True
    _warn_of_short(name, num_rows, tuple(weight.shape))
    return False


@lru_cache(maxsize=1024)
def _warn_of_short(name: str, num_rows: int, shape: tuple[int, int]) -> None:
    warnings.warn(
        f"{name} has no effect on a product of {num_rows} rows and a weight of shape {shape}, "
        "which is too short: it would take longer",
        stacklevel=2,
    )


# Chunks.


def chunks_of(matrix: Tensor, size: int) -> list[Tensor]:
    """Some rows of each of `size` equal parts of a matrix, in up to 4 chunks."""
    parts = matrix.unflatten(0, (size, -1)) if len(matrix) else matrix[None].expand(size, -1, -1)
    return [chunk.flatten(0, 1) for chunk in parts.chunk(_NUM_CHUNKS, 1)]


def gather_in_chunks(
    gathers: Sequence[Callable[[], Any]], project: Callable[[Any], Tensor], size: int
) -> Tensor:
    """The products of rows that are being gathered chunk by chunk, in the order of all rows.

    gathers: functions that wait for a chunk. project: makes the product of one.
    """
    made = [project(wait()).unflatten(0, (size, -1)) for wait in gathers]
    return torch.cat(made, 1).flatten(0, 1)


class PendingChunks(Pending):
    """Chunks of one result, each of a collective that may still run."""

    def __init__(self, chunks: Sequence[Pending]) -> None:
        self._chunks = chunks

    def wait(self) -> Tensor:
        return torch.cat([each.wait() for each in self._chunks])


def reduce_in_chunks(
    chunks: Sequence[Any], multiply: Callable[[Any], Tensor], ranks: Ranks
) -> PendingChunks:
    """This rank's rows of the sum over ranks of a product that is made chunk by chunk.

    chunks: of chunks_of. multiply: makes the product of one.
    """
    return PendingChunks([ranks.reduce_scatter(multiply(each)) for each in chunks])


# Symmetric memory of GPUs.


def gather_and_multiply(rows: Tensor, weight: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks times weight^T. With the gathered rows asked for, torch uses no
    multicast."""
    _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
        rows.contiguous(), [weight.t()], 0, ranks.group.group_name, return_A=True
    )
    return y


def multiply_and_scatter(a: Tensor, b: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of the sum over ranks of a b."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(
        a.contiguous(), b, "sum", 0, ranks.group.group_name
    )


def multiplies_scaled(
    a: QuantizedTensor | Factor, b: QuantizedTensor | Factor, ranks: Ranks
) -> bool:
    """Whether torch's scaled operators take a b^T: one scale each, and extents of 16.

    The same on all ranks.
    """
    if not ranks.shares_memory or not a.data.numel() or a.block_rows is not None:
        return False
    return all(extent % 16 == 0 for extent in b.data.shape)


def gather_and_multiply_scaled(
    rows: QuantizedTensor, weight: QuantizedTensor, dtype: torch.dtype, ranks: Ranks
) -> Tensor:
    """gather_and_multiply of 8-bit floats, in dtype."""
    _, (y,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        rows.data.contiguous(),
        [weight.data.t()],
        rows.scale_inv,
        [weight.scale_inv],
        0,
        ranks.group.group_name,
        [None],
        [None],
        [dtype],
        [True],
    )
    return y


def multiply_scaled_and_scatter(
    a: QuantizedTensor | Factor,
    b: QuantizedTensor | Factor,
    dtype: torch.dtype,
    ranks: Ranks,
    *,
    fast: bool,
) -> Tensor:
    """multiply_and_scatter of a b^T of 8-bit floats, in dtype. fast: as nn.products.multiply."""
    return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        a.data.contiguous(),
        b.data.t(),
        a.scale_inv,
        b.scale_inv,
        "sum",
        0,
        0,
        ranks.group.group_name,
        [len(a.data), len(b.data)],
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class SymmetricSum:
    """The sum over ranks by a symmetric_ar_type, in a buffer that the ranks share."""

    def __init__(self, kind: str) -> None:
        self.kind, self._buffer = kind, None

    def __call__(self, part: Tensor, ranks: Ranks) -> Pending:
        obstacle = self._obstacle(part, ranks)
        if obstacle is not None:
            warnings.warn(
                f"symmetric_ar_type is {self.kind!r}, and {obstacle}: "
                "all_reduce of the group is used",
                stacklevel=2,
            )
        if obstacle is not None or not part.numel():
            return ranks.all_reduce(part)
        shared, name = self._shared(part, ranks), ranks.group.group_name
        shared[: part.numel()].copy_(part.reshape(-1))
        operators = torch.ops.symm_mem
        if self.kind == "one_shot":
            total = operators.one_shot_all_reduce(shared, "sum", name)
        elif self.kind == "two_shot":
            total = operators.two_shot_all_reduce_(shared, "sum", name).clone()
        else:
            total = operators.multimem_all_reduce_(shared, "sum", name).clone()
        return Pending(total[: part.numel()].view(part.shape))

    def _obstacle(self, part: Tensor, ranks: Ranks) -> str | None:
        """Why torch's operators cannot make the sum; None if they can. The same on all ranks."""
        if not ranks.shares_memory:
            return "the ranks share no GPU memory"
        if part.dtype not in (torch.float32, torch.bfloat16):
            return f"the sum is of {name_of(part.dtype)}, not float32 or bfloat16"
        if self.kind == "multimem_all_reduce" and not ranks.has_multicast:
            return "the GPUs have no NVLink multicast, or it is turned off"
        return None

    def _shared(self, part: Tensor, ranks: Ranks) -> Tensor:
        """A shared vector of part's elements, and up to 15 bytes more, which makes packs of 16.

        Made anew where the present one is too small.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory

        kept, pack = self._buffer, 16 // part.element_size()
        length = -(-part.numel() // pack) * pack
        if kept is None or kept.dtype != part.dtype or kept.numel() < length:
            kept = symmetric_memory.empty(length, dtype=part.dtype, device=part.device)
            symmetric_memory.rendezvous(kept, ranks.group)
            self._buffer = kept
        return kept[:length]

    def __deepcopy__(self, memo: dict) -> SymmetricSum:
        return SymmetricSum(self.kind)

    def __reduce__(self) -> Any:
        return SymmetricSum, (self.kind,)
