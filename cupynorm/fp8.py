"""torch: 8-bit floats. Recipes, which say where scales come from; fp8_autocast, in which they hold;
quantised tensors and their product.

All of it is operations on the device, and nothing waits for a value: a step can be captured in a CUDA graph. To the bit what
cupynorm.reference.fp8 gives for float32 values (NaN may keep its sign).

    scale      multiplies in float32 before the one rounding, which saturates: data = float8(x * scale); x is data * scale_inv
    delayed    the scale that the former steps' amaxes gave, while this step's amax is recorded (DelayedScaling)
    current    largest / amax of this very tensor (CurrentScaling)
    blocks     the same for each 128 columns of a row, and for each 128 x 128 of a weight (BlockScaling)
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import math
import numbers
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arrays, quantized, survey
from .quantized import QuantizedTensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BLOCK_SIZE = 128
LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_MOST_MARGIN = 126


class Format(enum.Enum):
    """Which 8-bit float forward and backward use. E4M3: float8_e4m3fn in both. HYBRID: float8_e5m2 for gradients."""

    HYBRID = (E4M3, E5M2)  # first: the next line hides the name
    E4M3 = (E4M3, E4M3)


# Recipes.


def _check_format(recipe: Any) -> None:
    if not isinstance(recipe.fp8_format, Format):
        raise TypeError(f"fp8_format is {recipe.fp8_format!r}; expected Format.E4M3 or Format.HYBRID")


def _check_power_of_two(recipe: Any) -> None:
    if not isinstance(recipe.power_of_two, bool):
        raise TypeError(f"power_of_two is {recipe.power_of_two!r}; expected True or False")


@dataclass(frozen=True)
class DelayedScaling:
    """Scales from the amaxes of former steps: no tensor is read twice. TransformerEngine's arguments and formulas.

    margin: the largest value maps to largest / 2^margin. fp8_format: a Format. amax_history_len: steps that are remembered.
    amax_compute_algo: "max" of them, the "most_recent", or a callable of the history [len, num_tensors], whose first row is
    this step's, that returns [num_tensors]. scaling_factor_compute_algo: None, or a callable (amax, scale, fp8_max, recipe) ->
    scale of tensors [num_tensors]. reduce_amax: take the largest amax of all ranks of the group where torch.distributed runs.
    fp8_dpa, fp8_mha: of attention, which is not here: False.

    After each step scale = largest / 2^margin / amax. An amax of 0, infinity or NaN leaves it as it was; beyond float32 it is
    float32's largest. A tensor whose amax of this step is 0 was not used: neither its scale nor its history changes.
    Raises ValueError or TypeError for what does not fit.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, DelayedScaling], Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        _check_format(self)
        for name in ("fp8_dpa", "fp8_mha"):
            if getattr(self, name) is not False:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected False: there is no attention here")
        margin = self.margin
        if isinstance(margin, bool) or not isinstance(margin, numbers.Real) or not -math.inf < margin < math.inf:
            raise TypeError(f"margin is {margin!r}; expected a finite number")
        if not -_MOST_MARGIN <= margin <= _MOST_MARGIN:
            raise ValueError(f"margin is {margin!r}; expected -{_MOST_MARGIN} to {_MOST_MARGIN}, as scales are of float32")
        if not isinstance(self.reduce_amax, bool):
            raise TypeError(f"reduce_amax is {self.reduce_amax!r}; expected True or False")
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise TypeError(f"scaling_factor_compute_algo is {self.scaling_factor_compute_algo!r}; expected None or a callable")
        if isinstance(self.amax_history_len, bool) or not isinstance(self.amax_history_len, numbers.Integral):
            raise TypeError(f"amax_history_len is {self.amax_history_len!r}; expected an int, 1 or more")
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {self.amax_history_len}; expected 1 or more")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo is {self.amax_compute_algo!r}; expected 'max', 'most_recent' or a callable")


@dataclass(frozen=True)
class CurrentScaling:
    """The scale of each tensor from its own amax.

    fp8_format: a Format. amax_epsilon: what a smaller amax counts as. power_of_two: round scales down to powers of two.
    An amax of 0, infinity or NaN gives scale 1. Raises ValueError or TypeError for what does not fit.
    """

    fp8_format: Format = Format.HYBRID
    amax_epsilon: float = 0.0
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _check_format(self)
        _check_power_of_two(self)
        epsilon = self.amax_epsilon
        if isinstance(epsilon, bool) or not isinstance(epsilon, numbers.Real):
            raise TypeError(f"amax_epsilon is {epsilon!r}; expected a number that is 0 or more")
        if not 0 <= epsilon <= LARGEST_FLOAT32:
            raise ValueError(f"amax_epsilon is {epsilon}; expected 0 or more, and no more than float32 holds")


@dataclass(frozen=True)
class BlockScaling:
    """A scale for each 128 elements along what a product sums over, and for each 128 x 128 of a weight.

    fp8_format: a Format. power_of_two: round scales down to powers of two. The layer's products are of the 8-bit values times
    their scales, on a GPU in bfloat16, which holds them where scales are powers of two, else in float32: what this recipe gives
    is its numbers, not the speed of 8-bit products. Raises TypeError for what does not fit.
    """

    fp8_format: Format = Format.E4M3
    power_of_two: bool = True

    def __post_init__(self) -> None:
        _check_format(self)
        _check_power_of_two(self)


Recipe = DelayedScaling | CurrentScaling | BlockScaling


# Scales and quantised tensors.


def amax_of(x: Tensor, *dims: int) -> Tensor:
    """max |x| in float32, over dims or over all; 0 of nothing, NaN if there is one."""
    if not dims and x.ndim == 2 and not arrays.on_host(x):
        return survey.amax(x).reshape(())
    if not x.numel():
        kept = [extent for at, extent in enumerate(x.shape) if dims and at not in dims]
        return x.new_zeros(kept, dtype=torch.float32)
    return torch.linalg.vector_norm(x, float("inf"), dims or None).float()


def scale_of(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool = False, smallest_amax: float = 0.0) -> Tensor:
    """Current scales, float32, from amaxes: largest / amax, and 1 where amax is 0, infinite or NaN."""
    if smallest_amax:
        amax = torch.where(amax < smallest_amax, smallest_amax, amax)
    # One division: a number over a tensor would be its reciprocal, rounded, times the number.
    scale = (torch.full_like(amax, LARGEST[dtype]) / amax).clamp(max=LARGEST_FLOAT32)
    scale = torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return scale


def encode(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x * scale in float32, saturated and rounded once to an 8-bit float."""
    largest = LARGEST[dtype]
    x = x.float() if x.dtype == torch.float64 else x
    if isinstance(scale, Tensor) and not scale.ndim:
        # Of one dimension it makes a float32 product of 16-bit x in one pass, of none it does not.
        scale = scale.reshape(1)
    product = x * scale if isinstance(scale, Tensor) else x.float() * scale
    return product.clamp_(-largest, largest).to(dtype)


def _values(data: Tensor, scale_inv: Tensor, block_rows: int | None) -> Tensor:
    return QuantizedTensor(data, scale_inv, torch.float32, block_rows=block_rows).dequantize()


class Rule(NamedTuple):
    """How a current scale follows from an amax: see `scale_of`."""

    smallest_amax: float = 0.0
    power_of_two: bool = False


def quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None, transpose: bool = False
) -> QuantizedTensor:
    """A matrix by one given scale. amax: float32 of one element, raised to the largest |x|. On a GPU by one kernel."""
    if not arrays.on_host(x):
        return _of_matrix(quantized.quantize(x, _name(dtype), scale, amax, transpose=transpose), x)
    if amax is not None:
        torch.maximum(amax, amax_of(x).reshape(1), out=amax)
    data = encode(x, scale, dtype).contiguous()
    return QuantizedTensor(data, 1.0 / scale, x.dtype, transposed=_transposed(data) if transpose else None)


def quantize_current(
    x: Tensor, dtype: torch.dtype, rule: Rule | None = None, *, transpose: bool = False
) -> QuantizedTensor:  # fmt: skip
    """A matrix by the scale of its own amax. rule: by default neither of its fields. On a GPU by two kernels."""
    rule = rule or Rule()
    if not arrays.on_host(x):
        return _of_matrix(quantized.quantize(x, _name(dtype), None, survey.amax(x), transpose=transpose, rule=rule), x)
    return quantize(x, _current_scale(x, dtype, rule), dtype, transpose=transpose)


def quantize_and_sum(
    x: Tensor, dtype: torch.dtype, sum_dtype: torch.dtype, *, scale: Tensor | None = None, amax: Tensor | None = None,
    rule: Rule | None = None,
) -> tuple[QuantizedTensor, Tensor]:  # fmt: skip
    """As `quantize`, or with a rule as `quantize_current`, with the transposed copy; and sums of x over rows [num_cols], in
    sum_dtype. On a GPU one reading makes all of it, of a scale that is known."""
    if not arrays.on_host(x):
        amax = amax if rule is None else survey.amax(x)
        made = quantized.quantize(x, _name(dtype), scale, amax, transpose=True, sums=_name(sum_dtype), rule=rule)
        return _of_matrix(made, x), made.sums
    scale = scale if rule is None else _current_scale(x, dtype, rule)
    return quantize(x, scale, dtype, amax=amax, transpose=True), x.sum(0, dtype=sum_dtype)


def _current_scale(x: Tensor, dtype: torch.dtype, rule: Rule) -> Tensor:
    amax = amax_of(x).reshape(1)
    return scale_of(amax, dtype, power_of_two=rule.power_of_two, smallest_amax=rule.smallest_amax)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_matrix(made: quantized.QuantizedMatrix, x: Tensor) -> QuantizedTensor:
    return QuantizedTensor(made.data, made.scale_inv, x.dtype, transposed=made.transposed)


def _transposed(data: Tensor) -> Tensor:
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """data, scale_inv [num_rows]: a matrix by a scale for each row, from its own amax."""
    scale = scale_of(amax_of(x, 1), dtype, power_of_two=power_of_two)
    return encode(x, scale[:, None], dtype), 1.0 / scale


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, *, block_rows: int = 1, power_of_two: bool = True, transpose: bool = False
) -> QuantizedTensor:
    """A matrix by a scale for each block of block_rows x 128.
    transpose: also along its columns (the same blocks, if they are square)."""
    data, scale_inv = _quantize_blocks(x, dtype, block_rows, power_of_two)
    transposed = of_transposed = None
    if transpose and block_rows == BLOCK_SIZE:
        transposed, of_transposed = _transposed(data), scale_inv.t().contiguous()
    elif transpose:
        transposed, of_transposed = _quantize_blocks(x.t(), dtype, block_rows, power_of_two)
    return QuantizedTensor(
        data, scale_inv, x.dtype, transposed=transposed, transposed_scale_inv=of_transposed, block_rows=block_rows
    )


def _quantize_blocks(x, dtype, block_rows, power_of_two) -> tuple[Tensor, Tensor]:
    num_rows, num_cols = x.shape
    padded = _pad(x.float(), block_rows, BLOCK_SIZE)
    blocks = padded.unflatten(1, (padded.shape[1] // BLOCK_SIZE, BLOCK_SIZE)).unflatten(
        0, (len(padded) // block_rows, block_rows)
    )
    scale = scale_of(amax_of(blocks, 1, 3), dtype, power_of_two=power_of_two)
    data = encode(blocks, scale[:, None, :, None], dtype).reshape(padded.shape)
    return data[:num_rows, :num_cols].contiguous(), 1.0 / scale


def quantize_mxfp8(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """data, scale bytes (E8M0) [num_rows, num_cols / 32], rounded up: MXFP8 of a matrix, on any device."""
    num_rows, num_cols = x.shape
    padded = _pad(x.float(), 1, 32)
    blocks = padded.unflatten(1, (padded.shape[1] // 32, 32))
    amax = amax_of(blocks, 2) * (1 / LARGEST[dtype])
    bits = amax.view(torch.int32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    up = torch.where(exponent == 0, fraction > 0x400000, fraction > 0).int()
    scale = torch.where(torch.isnan(amax), 255, (exponent + up).clamp(max=254))
    # 2^(127 - e) is no float32 for every e: two factors that are, whose product with x is exact or beyond the largest anyway.
    shift = 127 - scale
    half = torch.div(shift, 2, rounding_mode="floor")
    product = torch.ldexp(torch.ldexp(blocks, half[..., None]), (shift - half)[..., None])
    product = torch.where(scale[..., None] == 255, float("nan"), product)
    data = encode(product, 1.0, dtype).reshape(padded.shape)[:, :num_cols].contiguous()
    return data, scale.to(torch.uint8)


# Products.


def outside_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Inside, torch.autocast rounds no factor of a product: dtypes are as they are written."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _pad(data: Tensor, num_rows: int, num_cols: int) -> Tensor:
    """With zeros at the ends, up to multiples of these."""
    below, behind = -data.shape[0] % num_rows, -data.shape[1] % num_cols
    if not below and not behind:
        return data
    bits = data.view(torch.uint8) if data.element_size() == 1 else data
    padded = bits.new_zeros((data.shape[0] + below, data.shape[1] + behind))
    padded[: data.shape[0], : data.shape[1]] = bits
    return padded.view(data.dtype)


def multiply(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, *, bias: Tensor | None = None,
    a_block_rows: int | None = None, b_block_rows: int | None = None, fast: bool = False, is_exact: bool = True,
) -> Tensor:  # fmt: skip
    """a b^T + bias of float8 a [num_rows, depth] and b [num_cols, depth], in out_dtype, added in float32. Any extents.

    On a GPU by torch._scaled_mm, which takes multiples of 16: zeros are added. fast: let it add up in the tensor cores' own
    precision. On the CPU, and for blocks, the values are multiplied in float32: those of blocks on a GPU as bfloat16, which
    holds an 8-bit float times a power of two exactly. is_exact: whether their scales are such.
    """
    if a.is_cuda and a_block_rows is None and a.numel() and b.numel():
        return _by_scaled_mm(a, a_scale_inv, b, b_scale_inv, out_dtype, bias, fast)
    with outside_autocast(a):
        if a_block_rows is None:
            y = (a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv)
        else:
            y = _multiply_values(_values(a, a_scale_inv, a_block_rows), _values(b, b_scale_inv, b_block_rows), is_exact)
    return (y if bias is None else y + bias).to(out_dtype)


def _multiply_values(a: Tensor, b: Tensor, is_exact: bool) -> Tensor:
    """a b^T in float32. is_exact: whether bfloat16 holds the values."""
    if is_exact and a.is_cuda and _HAS_WIDE_PRODUCTS:
        return torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()


_HAS_WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()  # since torch 2.8


def _by_scaled_mm(a, a_scale_inv, b, b_scale_inv, out_dtype, bias, fast) -> Tensor:
    num_cols = len(b)
    a, b = _pad(a, 1, 16), _pad(b, 16, 16)
    # Its bias is of 16 bits, as its result. Any other is added before the rounding.
    inside = bias is not None and bias.dtype == out_dtype != torch.float32 and len(b) == num_cols
    made = out_dtype if bias is None or inside else torch.float32
    scales = {"scale_a": a_scale_inv, "scale_b": b_scale_inv}
    y = torch._scaled_mm(a, b.t(), **scales, bias=bias if inside else None, out_dtype=made, use_fast_accum=fast)
    y = (y[0] if isinstance(y, tuple) else y)[:, :num_cols].contiguous()  # torch 2.4 gives an amax beside it
    return y if bias is None or inside else (y + bias).to(out_dtype)


# What a module keeps.


class Scales:
    """Delayed scaling's state for some tensors: scale [num_tensors], amax_history [len, num_tensors], float32."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], length: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # what is made inside of it could not be written to outside
            self.scale = torch.ones(len(dtypes), device=device)
            self.amax_history = torch.zeros(length, len(dtypes), device=device)
            self.largest = torch.tensor([LARGEST[dtype] for dtype in dtypes], device=device)
        self.dtypes = dtypes

    def amax(self, at: int) -> Tensor:
        """Where this step's amax of tensor `at` is, one element: the largest, if it is used more than once."""
        return self.amax_history[0, at : at + 1]

    def update(self, recipe: DelayedScaling, group: Any = None) -> None:
        """The end of a step: new scales, and the history a step older."""
        history = self.amax_history
        if recipe.reduce_amax and torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_world_size(group) > 1:
                torch.distributed.all_reduce(history[0], torch.distributed.ReduceOp.MAX, group)
        is_usual = recipe.scaling_factor_compute_algo is None and not callable(recipe.amax_compute_algo)
        if is_usual and not arrays.on_host(history) and history.is_contiguous():
            most_recent = recipe.amax_compute_algo == "most_recent"
            factor = 2.0**-recipe.margin
            return quantized.update_scales(self.scale, history, self.largest, factor, most_recent=most_recent)
        scale, history = updated(history, self.scale, self.largest, recipe)
        self.scale.copy_(scale)
        self.amax_history.copy_(history)

    def forget(self) -> None:
        """No end of a step: as if it had not begun."""
        self.amax_history[0].zero_()

    def resize(self, length: int) -> None:
        """Another number of steps: the latest of them stay."""
        history = self.amax_history
        with torch.inference_mode(False):
            if length < len(history):
                # Rows after the first are from the oldest to the latest.
                self.amax_history = torch.cat([history[:1], history[len(history) - length + 1 :]])
            elif length > len(history):
                older = history.new_zeros(length - len(history), history.shape[1])
                self.amax_history = torch.cat([history[:1], older, history[1:]])

    def to(self, device: torch.device) -> Scales:
        if self.scale.device != device:
            with torch.inference_mode(False):
                for name in ("scale", "amax_history", "largest"):
                    setattr(self, name, getattr(self, name).to(device))
        return self

    def load(self, scale: Tensor, amax_history: Tensor) -> None:
        """What `unpack` gave: in place where it fits, since a CUDA graph may hold the addresses."""
        device = self.scale.device
        if amax_history.shape == self.amax_history.shape:
            self.scale.copy_(scale)
            self.amax_history.copy_(amax_history)
        else:
            self.scale.copy_(scale)
            with torch.inference_mode(False):
                self.amax_history = amax_history.to(device, copy=True)


def moved(scales: Scales, function: Callable[[Tensor], Tensor]) -> Scales | None:
    """Of torch.nn.Module._apply: they go where the parameters do, and stay float32. None on "meta", where nothing is."""
    device = function(scales.scale).device
    return None if device.type == "meta" else scales.to(device)


def scales_for(
    kept: Scales | None, dtypes: tuple[torch.dtype, ...], recipe: DelayedScaling, device: torch.device, records: bool
) -> Scales:  # fmt: skip
    """What a module has kept, or new ones: on a device, and, where a step is recorded, of these dtypes and as long as the
    recipe says."""
    length = recipe.amax_history_len
    fits = kept is not None and kept.scale.device == device and (not records or len(kept.amax_history) == length)
    if not fits and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "scales of DelayedScaling were to be made while a CUDA graph is captured, each replay of which would make them "
            "anew; expected one call with this recipe on this device before"
        )
    scales = Scales(dtypes, length, device) if kept is None else kept.to(device)
    if not records:
        return scales
    if len(scales.amax_history) != length:
        scales.resize(length)
    if scales.dtypes != dtypes:
        scales.dtypes = dtypes
        for at, dtype in enumerate(dtypes):
            scales.largest[at].fill_(LARGEST[dtype])
    return scales


def updated(history: Tensor, scale: Tensor, largest: Tensor, recipe: DelayedScaling) -> tuple[Tensor, Tensor]:
    """(new scale, new history) of a step that has written its amaxes to history[0]: DelayedScaling's formulas."""
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(history)
    elif recipe.amax_compute_algo == "max":
        amax = history.nan_to_num(nan=0.0, posinf=float("inf")).amax(0)  # a NaN is no maximum
    else:
        amax = history[0]
    if recipe.scaling_factor_compute_algo is not None:
        new = recipe.scaling_factor_compute_algo(amax, scale, largest, recipe)
    else:
        new = (largest * 2.0**-recipe.margin / amax).clamp(max=LARGEST_FLOAT32)
        new = torch.where(torch.isfinite(amax) & (amax > 0), new, scale)
    rolled = (
        torch.cat([torch.zeros_like(history[:1]), history[2:], history[:1]]) if len(history) > 1 else torch.zeros_like(history)
    )
    unused = history[0] == 0
    return torch.where(unused, scale, new), torch.where(unused, history, rolled)


_MAGIC = b"cupynorm fp8 state 1\n"


def pack(states: dict[str, Scales]) -> Tensor:
    """States as bytes, in a uint8 tensor on the CPU: a line of JSON, then float32 numbers. Empty if there are none."""
    if not states:
        return torch.empty(0, dtype=torch.uint8)
    header = {name: list(state.amax_history.shape) for name, state in states.items()}
    numbers = [each.cpu().reshape(-1) for state in states.values() for each in (state.scale, state.amax_history)]
    raw = torch.cat(numbers).contiguous().view(torch.uint8)
    text = _MAGIC + json.dumps(header).encode() + b"\n"
    return torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), raw])


def is_packed(state: Any) -> bool:
    """Whether it is of `pack`, and not empty."""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
        return False
    return bytes(state[: len(_MAGIC)].cpu().numpy()) == _MAGIC


def unpack(packed: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (scale, amax_history) of what `pack` made. Nothing is unpickled: what is not of `pack` is left out,
    with a warning."""
    if packed is None or (isinstance(packed, Tensor) and not packed.numel()):
        return {}
    if not is_packed(packed):
        warnings.warn(
            "the fp8 state in a state dict is not cupynorm's (a pickle of another library, which is not opened): scales start "
            "at 1",
            stacklevel=2,
        )
        return {}
    text, _, numbers = bytes(packed.cpu().numpy())[len(_MAGIC) :].partition(b"\n")
    shapes = json.loads(text) if numbers else {}
    expected = 4 * sum((1 + length) * num_tensors for length, num_tensors in shapes.values())
    if not shapes or len(numbers) != expected:
        raise ValueError(f"the fp8 state in a state dict has {len(numbers)} bytes of numbers; expected {expected or 'some'}")
    numbers, found, at = torch.frombuffer(bytearray(numbers), dtype=torch.float32), {}, 0
    for name, (length, num_tensors) in shapes.items():
        scale, at = numbers[at : at + num_tensors].clone(), at + num_tensors
        history, at = numbers[at : at + length * num_tensors].clone().reshape(length, num_tensors), at + length * num_tensors
        found[name] = (scale, history)
    return found


# fp8_autocast.


class UsedScales(NamedTuple):
    """Scales that a region has used, and how they are updated."""

    scales: Scales
    recipe: DelayedScaling
    group: Any


@dataclass
class Region:
    """The inside of a fp8_autocast. ended: of each layer, whose step ends when the outermost one is left."""

    recipe: Recipe | None
    group: Any
    ended: dict[int, UsedScales]
    text: str  # of the recipe, for what torch.compile traces; empty: none


_recipes: dict[str, Recipe] = {}  # of their texts; as many as a program writes down


def _text_of(recipe: Recipe | None) -> str:
    """All of a recipe: torch keeps what it has compiled for other processes, in which a number might be another recipe's.

    None of a recipe with callables, of which there may be ever new ones: torch.compile runs its calls as they are."""
    if recipe is None:
        return ""
    if isinstance(recipe, DelayedScaling) and (callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo):
        return ""
    return _written(recipe)


@functools.cache
def _written(recipe: Recipe) -> str:
    text = repr(recipe)
    _recipes[text] = recipe
    return text


def recipe_of(text: str) -> Recipe:
    """The recipe of a Region's text."""
    return _recipes[text]


_regions: list[Region] = []  # of the process: what runs in a thread of its own sees them too


def active() -> Region | None:
    """The innermost region, None where there is none or it is disabled."""
    return _regions[-1] if _regions and _regions[-1].recipe is not None else None


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, recipe: Recipe | None = None, group: Any = None) -> Iterator[None]:
    """Inside, LayerNormLinear multiplies in 8-bit floats, and LayerNorm and RMSNorm write them where they are called with
    fp8_output=True. A context manager, or a decorator.

    enabled: False switches an outer region off. recipe: DelayedScaling (by default), CurrentScaling or BlockScaling. group: the
    torch.distributed group over which DelayedScaling takes the largest amax.

    When the outermost region is left and gradients are recorded, the delayed scales of the layers that ran in it are updated
    for the next step; those of gradients are, after each backward of a layer. A forward that is not recorded changes no state,
    nor does a region that an exception leaves.
    A layer that is checkpointed enters the region inside of what is run again, and then CurrentScaling or BlockScaling make the
    same numbers again. torch.compile compiles what is called inside; a function that enters a region is not one graph.
    Regions are the process's: those of several threads count as nested in the order in which they began.
    Raises TypeError for a recipe of another kind, or an enabled that is no bool.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()  # the region must be there when a graph runs, not when it has run
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled is a {type(enabled).__name__}; expected True or False, and a recipe as recipe=")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}; expected DelayedScaling, CurrentScaling or BlockScaling")
    ended = _regions[0].ended if _regions else {}
    recipe = (recipe or DelayedScaling()) if enabled else None
    region = Region(recipe, group, ended, _text_of(recipe))
    _regions.append(region)
    is_whole = False
    try:
        yield
        is_whole = True
    finally:
        _regions[:] = [each for each in _regions if each is not region]  # another thread's may have begun after it
        if not _regions and torch.is_grad_enabled():
            for used in ended.values():
                if is_whole:
                    used.scales.update(used.recipe, used.group)
                else:
                    used.scales.forget()
