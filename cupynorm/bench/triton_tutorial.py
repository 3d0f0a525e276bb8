"""Layer normalisation as Triton's tutorial teaches it, written anew, as a peer to measure.

forward    one program a row reads the row three times: for its mean, its variance and the result
backward   one program a row writes dx. It adds its dweight and dbias to one of num_parts rows of
           sums, each behind a lock. A second kernel adds those rows. The order of rows depends on
           the locks, so sums are not reproducible to the bit.
limits     a row has at most 64 KiB; rows are contiguous
"""

import torch
import triton
import triton.language as tl

_WIDEST_ROW_BYTES = 65536


@triton.jit
def _forward(x, y, weight, bias, mean, rstd, num_cols, eps, block_size: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * num_cols
    y += row * num_cols
    sums = tl.zeros([block_size], tl.float32)
    for first in range(0, num_cols, block_size):
        cols = first + tl.arange(0, block_size)
        sums += tl.load(x + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
    row_mean = tl.sum(sums, axis=0) / num_cols
    sums = tl.zeros([block_size], tl.float32)
    for first in range(0, num_cols, block_size):
        cols = first + tl.arange(0, block_size)
        values = tl.load(x + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        centered = tl.where(cols < num_cols, values - row_mean, 0.0)
        sums += centered * centered
    row_rstd = 1 / tl.sqrt(tl.sum(sums, axis=0) / num_cols + eps)
    tl.store(mean + row, row_mean)
    tl.store(rstd + row, row_rstd)
    for first in range(0, num_cols, block_size):
        cols = first + tl.arange(0, block_size)
        inside = cols < num_cols
        x_hat = (tl.load(x + cols, mask=inside, other=0.0).to(tl.float32) - row_mean) * row_rstd
        scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + cols, x_hat * scale + shift, mask=inside)


@triton.jit
def _backward_rows(
    x,
    dy,
    dx,
    weight,
    mean,
    rstd,
    dweight_parts,
    dbias_parts,
    locks,
    num_cols,
    num_parts: tl.constexpr,
    block_size: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, block_size)
    inside = cols < num_cols
    at = row.to(tl.int64) * num_cols + cols
    row_rstd = tl.load(rstd + row)
    x_hat = (
        tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + row)
    ) * row_rstd
    x_hat = tl.where(inside, x_hat, 0.0)
    row_dy = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    wdy = row_dy * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    mean_wdy = tl.sum(wdy, axis=0) / num_cols
    mean_wdy_x_hat = tl.sum(wdy * x_hat, axis=0) / num_cols
    tl.store(dx + at, (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * row_rstd, mask=inside)

    part = row % num_parts
    mine = part * num_cols + cols
    while tl.atomic_cas(locks + part, 0, 1) == 1:
        pass
    tl.store(
        dweight_parts + mine,
        tl.load(dweight_parts + mine, mask=inside) + row_dy * x_hat,
        mask=inside,
    )
    tl.store(dbias_parts + mine, tl.load(dbias_parts + mine, mask=inside) + row_dy, mask=inside)
    tl.debug_barrier()  # all threads have stored before one of them opens the lock
    tl.atomic_xchg(locks + part, 0)


@triton.jit
def _backward_columns(
    dweight_parts,
    dbias_parts,
    dweight,
    dbias,
    num_cols,
    num_parts: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    cols = tl.program_id(0) * block_cols + tl.arange(0, block_cols)
    dweight_sums = tl.zeros([block_rows, block_cols], tl.float32)
    dbias_sums = tl.zeros([block_rows, block_cols], tl.float32)
    for first in range(0, num_parts, block_rows):
        parts = first + tl.arange(0, block_rows)
        inside = (parts[:, None] < num_parts) & (cols[None, :] < num_cols)
        at = parts[:, None] * num_cols + cols[None, :]
        dweight_sums += tl.load(dweight_parts + at, mask=inside, other=0.0)
        dbias_sums += tl.load(dbias_parts + at, mask=inside, other=0.0)
    tl.store(dweight + cols, tl.sum(dweight_sums, axis=0), mask=cols < num_cols)
    tl.store(dbias + cols, tl.sum(dbias_sums, axis=0), mask=cols < num_cols)


def _tile(x: torch.Tensor) -> dict[str, int]:
    """block_size and num_warps for a row of x: the whole row in one block."""
    num_cols = x.shape[-1]
    widest = _WIDEST_ROW_BYTES // x.element_size()
    if num_cols > widest:
        raise ValueError(
            f"x has {num_cols} columns; a row of {x.dtype} has at most {widest} (64 KiB)"
        )
    block_size = triton.next_power_of_2(num_cols)
    return {"block_size": block_size, "num_warps": min(max(block_size // 256, 1), 8)}


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        num_rows, num_cols = x.shape
        y = torch.empty_like(x)
        mean, rstd = (torch.empty(num_rows, dtype=torch.float32, device=x.device) for _ in range(2))
        _forward[(num_rows,)](x, y, weight, bias, mean, rstd, num_cols, eps, **_tile(x))
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        num_rows, num_cols = x.shape
        # Narrow rows finish sooner and meet at the locks more often.
        most_cols = {1024: 256, 4096: 128, 8192: 96}
        num_parts = next((parts for most, parts in most_cols.items() if num_cols <= most), 64)
        parts = torch.zeros(2, num_parts, num_cols, dtype=torch.float32, device=x.device)
        locks = torch.zeros(num_parts, dtype=torch.int32, device=x.device)
        dx = torch.empty_like(x)
        dweight = torch.empty_like(weight)
        dbias = torch.empty(num_cols, dtype=ctx.bias_dtype, device=x.device)
        read = (x, dy, dx, weight, mean, rstd)
        _backward_rows[(num_rows,)](*read, *parts, locks, num_cols, num_parts, **_tile(x))
        columns = _backward_columns[(triton.cdiv(num_cols, 128),)]
        columns(*parts, dweight, dbias, num_cols, num_parts, block_rows=32, block_cols=128)
        return dx, dweight, dbias, None


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """y of x's shape and dtype, differentiable in x, weight and bias.

    x: [num_rows, num_cols], contiguous, float16, bfloat16 or float32 on CUDA. weight, bias:
    [num_cols], any of the three.
    Raises ValueError for a row of more than 64 KiB.
    """
    return _LayerNorm.apply(x, weight, bias, eps)
