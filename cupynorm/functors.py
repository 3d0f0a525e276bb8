"""Functors that ship: for `fuse=` of layer_norm and rms_norm, and as examples.

Examples:
    >>> x, gate = np.array([[1.0, 3.0]]), np.array([[0.0, 1.0]])
    >>> cupynorm.layer_norm(x, 2, fuse=cupynorm.functors.silu_gate(gate)).round(3)
    array([[-0.   ,  0.731]])

Each has a derivative and says the same in float64 NumPy (`reference`) and in torch (`torch`).
docs/functors.md has a table of them; cupynorm.functor says what the lines see. Importing this
module compiles nothing.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from .dispatch.functor_text import BoundFunctor, functor
from .options import shown

# y * silu(gate), the gated norm of Mamba 2. gate: as the input.
silu_gate = functor(
    "silu_gate",
    "y = y * gate / (C(1) + exp(-gate));",
    arrays=("gate",),
    backward="""
        const C sigmoid = C(1) / (C(1) + exp(-gate));
        dgate = dy * y * sigmoid * (C(1) + gate * (C(1) - sigmoid));
        dy = dy * gate * sigmoid;
    """,
    reference=lambda y, gate: y * gate / (1 + np.exp(-gate)),
    torch=lambda y, gate: y * gate * gate.sigmoid(),
)


def _bias_gelu(x: Any, bias: Any) -> Any:
    u = x + bias
    return u * (0.5 + 0.5 * np.vectorize(math.erf)(u / math.sqrt(2)))


def _torch_bias_gelu(x: Any, bias: Any) -> Any:
    u = x + bias
    return u * (0.5 + 0.5 * (u * math.sqrt(0.5)).erf())


# GELU(x + bias) with the exact erf, of the layer before. bias: of normalized_shape.
bias_gelu = functor(
    "bias_gelu",
    """
    const C u = x + bias;
    x = u * (C(0.5) + C(0.5) * erf(u * C(0.70710678118654752)));
    """,
    arrays=("bias",),
    backward="""
        const C u = x + bias;
        const C density = C(0.39894228040143268) * exp(C(-0.5) * u * u);
        dx = dx * (C(0.5) + C(0.5) * erf(u * C(0.70710678118654752)) + u * density);
        dbias = dx;
    """,
    reference=_bias_gelu,
    torch=_torch_bias_gelu,
)

# y * (1 + scale) + shift, adaptive LayerNorm (Peebles, Xie 2023). scale, shift: [batch, 1,
# N] for an input [batch, seq, N].
ada_ln = functor(
    "ada_ln",
    "y = y * (C(1) + scale) + shift;",
    arrays=("scale", "shift"),
    backward="""
        dscale = dy * y;
        dshift = dy;
        dy = dy * (C(1) + scale);
    """,
    reference=lambda y, scale, shift: y * (1 + scale) + shift,
    torch=lambda y, scale, shift: y * (1 + scale) + shift,
)


def _rotary(y: Any, cos: Any, sin: Any) -> Any:
    first, second = np.split(y, 2, axis=-1)
    return y * cos + np.concatenate([-second, first], axis=-1) * sin


def _torch_rotary(y: Any, cos: Any, sin: Any) -> Any:
    import torch

    first, second = y.chunk(2, -1)
    return y * cos + torch.cat((-second, first), -1) * sin


# Rotary position embedding (Su et al. 2021) of each head of a query or key that is
# normalised per head, [batch, seq, heads, N]. Column c turns with column c + N/2, as in Llama.
# cos, sin: [1, seq, 1, N], whose two halves are equal.
rotary = functor(
    "rotary",
    """
    const long long half = num_cols / 2;
    const C turned = col < half ? -y_at(col + half) : y_at(col - half);
    y = y * cos + turned * sin;
    """,
    arrays=("cos", "sin"),
    backward="""
        const long long half = num_cols / 2, other = col < half ? col + half : col - half;
        const C sign = col < half ? C(1) : C(-1);
        dcos = dy * y;
        dsin = -sign * dy * y_at(other);
        dy = dy * cos + sign * dy_at(other) * sin;
    """,
    reference=_rotary,
    torch=_torch_rotary,
    multiple_of=2,
)


def _rotary_interleaved(y: Any, cos: Any, sin: Any) -> Any:
    turned = np.empty_like(y)
    turned[..., ::2], turned[..., 1::2] = -y[..., 1::2], y[..., ::2]
    return y * cos + turned * sin


def _torch_rotary_interleaved(y: Any, cos: Any, sin: Any) -> Any:
    import torch

    turned = torch.stack((-y[..., 1::2], y[..., ::2]), -1)
    return y * cos + turned.flatten(-2) * sin


# The same for columns in pairs, 2i and 2i + 1, as in GPT-J. The two of a pair have equal cos
# and sin.
rotary_interleaved = functor(
    "rotary_interleaved",
    """
    const C turned = col % 2 == 0 ? -y_at(col + 1) : y_at(col - 1);
    y = y * cos + turned * sin;
    """,
    arrays=("cos", "sin"),
    backward="""
        const long long other = col % 2 == 0 ? col + 1 : col - 1;
        const C sign = col % 2 == 0 ? C(1) : C(-1);
        dcos = dy * y;
        dsin = -sign * dy * y_at(other);
        dy = dy * cos + sign * dy_at(other) * sin;
    """,
    reference=_rotary_interleaved,
    torch=_torch_rotary_interleaved,
    multiple_of=2,
)

# x * scale, LayerScale (Touvron et al. 2021), before a residual is added. scale: of
# normalized_shape.
layer_scale = functor(
    "layer_scale",
    "x = x * scale;",
    arrays=("scale",),
    backward="""
        dscale = dx * x;
        dx = dx * scale;
    """,
    reference=lambda x, scale: x * scale,
    torch=lambda x, scale: x * scale,
)


# y, from low to high; NaN stays NaN. The gradient is 0 outside.
clamp = functor(
    "clamp",
    "y = y < low ? low : y > high ? high : y;",
    numbers=("low", "high"),
    backward="dy = y >= low && y <= high ? dy : C(0);",
    reference=lambda y, low, high: np.clip(y, low, high),
    torch=lambda y, low, high: y.clamp(low, high),
)

# x * scale, one factor for each row, as in stochastic depth (Huang et al. 2016). scale: of the
# leading shape, the input's without normalized_shape.
row_scale = functor(
    "row_scale",
    "x = x * scale;",
    arrays=("scale",),
    per_row=("scale",),
    backward="""
        dscale = dx * x;
        dx = dx * scale;
    """,
    reference=lambda x, scale: x * scale,
    torch=lambda x, scale: x * scale,
)


# Dropout.


def _dropout(x: Any, high: float, low: float, kept: float, seed: int) -> Any:
    from .reference import dropout_mask

    p = (high * 2**16 + low) / 2**32
    return np.where(dropout_mask(*x.shape, p, int(seed)), x * kept, 0.0)


def _torch_dropout(x: Any, high: float, low: float, kept: float, seed: Any) -> Any:
    """The mask of cupynorm.reference.dropout_mask: Philox in int64, whose products wrap."""
    import torch

    below, low = int(high) * 2**16 + int(low), 0xFFFFFFFF
    num_rows, num_cols = x.unsqueeze(0).flatten(0, -2).shape
    rows = torch.arange(num_rows, device=x.device)[:, None]
    cols = torch.arange((num_cols + 3) // 4, device=x.device)
    counter, keys = [cols & low, cols >> 32, rows & low, rows >> 32], [seed & low, seed >> 32 & low]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        high = second >> 32 & low ^ counter[1] ^ keys[0], first >> 32 & low ^ counter[3] ^ keys[1]
        counter = [high[0], second & low, high[1], first & low]
        keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
    words = torch.stack(torch.broadcast_tensors(*counter), -1).flatten(1)[:, :num_cols]
    return torch.where((words >= below).reshape(x.shape), x * kept, 0.0)


# The threshold of 33 bits is high * 2**16 + low: a float holds each part.
_drop = functor(
    "dropout",
    """
    const long long below = static_cast<long long>(high) * 65536 + static_cast<long long>(low);
    x = random_word(seed, row, col) < below ? C(0) : x * kept;
    """,
    numbers=("high", "low", "kept"),
    seeds=("seed",),
    backward="""
        const long long below = static_cast<long long>(high) * 65536 + static_cast<long long>(low);
        dx = random_word(seed, row, col) < below ? C(0) : dx * kept;
    """,
    reference=_dropout,
    torch=_torch_dropout,
)


def dropout(p: float, seed: Any = None) -> BoundFunctor:
    """Elements of x become 0 with probability p; the others are multiplied by 1 / (1 - p).

    Examples:
        >>> x = np.ones((1, 4))
        >>> drop = cupynorm.functors.dropout(0.5, seed=7)
        >>> _, added = cupynorm.layer_norm(x, 4, residual=0 * x, return_residual=True, fuse=drop)
        >>> added
        array([[2., 2., 0., 0.]])

    p: from 0 to 1; 1 drops all.
    seed: an int, or an int64 array of one element on the input's device, which the kernel reads
        there. None: the input's library draws one on that device in each call (torch.randint,
        cupy.random, np.random), so torch.manual_seed and CUDA graphs work as with torch's dropout.
        So torch.utils.checkpoint without preserve_rng_state draws another mask when it runs again.

    The mask is cupynorm.reference.dropout_mask, a function of the seed and of an element's row and
    column. It is the same on every device and is not stored: backward computes it again. A module
    drops only in training mode.
    Returns a functor for `fuse=`. Raises ValueError unless p is a number from 0 to 1.
    """
    if not isinstance(p, numbers.Real) or isinstance(p, bool) or not 0 <= p <= 1:
        raise ValueError(f"p is {shown(p)}; expected a probability, from 0 to 1")
    high, low = divmod(round(p * 2**32), 2**16)
    return _drop(high, low, 1 / (1 - p) if p < 1 else 0.0, seed)
