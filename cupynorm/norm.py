"""layer_norm, rms_norm and their explicit forward and backward: check, plan, allocate, launch.

Reading order: `layer_norm` (what users call) -> `normalize` (autograd or not) -> `prepare_forward` -> `_PreparedForward.run`.
The first call of a kind is checked, planned and compiled; what that gave is kept under all that it depends on, and later calls
only find it, allocate, fill in the addresses and launch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import arrays, launch
from .arrays import CuPyLibrary, Rows, TorchLibrary, View
from .calls import DEFAULTS, BackwardCall, ForwardCall, FusedOptions, Margins, Options, Parameter
from .dispatch import choose, pack_limit
from .dtypes import DTYPES, compute_dtype
from .problem import Problem, Tile
from .strategies import STATISTICS, STRATEGIES

TILE_FIELDS = tuple(Tile.__annotations__)
Array = Any  # a CuPy array, torch tensor, NumPy array, or any object with __dlpack__


class Forward(NamedTuple):
    """What a forward returns. y as the input; mean, rstd of the leading shape, float32 (float64 for float64 input).

    mean is None for rms_norm. sum is input + residual in the input's dtype, or the input itself where there is no residual.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array


class FusedForward(NamedTuple):
    """What a forward with fused options returns: the fields of Forward, and what backward must be told of this call.

    sum is what was normalised, in residual_dtype or else the input's dtype; mean and rstd are float64 if it is float64.
    y1 is None without weight1 or bias1. dropout_seed is the seed as it was given or drawn, None without dropout.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array
    y1: Array | None
    dropout_seed: Array | int | None


class Backward(NamedTuple):
    """The gradients that were asked for, None for the others. dx is of the input and of the residual alike."""

    dx: Array | None
    dweight: Array | None
    dbias: Array | None


class FusedBackward(NamedTuple):
    """The gradients that were asked for of a forward with fused options, None for the others. dx is of the input alone."""

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dresidual: Array | None
    dweight1: Array | None
    dbias1: Array | None


# What users call.


def layer_norm(
    input: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
    residual_dtype: Any = None,
    row_scale: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    weight1: Array | None = None,
    bias1: Array | None = None,
    round_x_hat: bool = False,
    memory_efficient: bool = False,
    scale: Array | str | None = None,
    amax: Array | None = None,
    power_of_two: bool = False,
    transpose: bool = False,
    sm_margin: int | Mapping[str, int] = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: str | None = None,
) -> Array | tuple[Array, ...]:
    """Layer normalisation over the last dimensions (Ba, Kiros, Hinton 2016; formula in cupynorm.reference.layer_norm).

    input: shape (..., *normalized_shape), float16, bfloat16, float32 or float64; a CuPy array, a torch tensor, a NumPy array
        or any object with __dlpack__. Any strides; rows that are contiguous are read where they lie, others copied first.
    normalized_shape: an int or the trailing shape to normalise over.
    weight, bias: shape normalized_shape, each optional, of any of the four dtypes, on the input's device.
    eps: added to the variance; may be 0 or negative, then a row whose variance does not exceed -eps is Inf or NaN as in
        float64.
    residual: of input's shape and dtype; input + residual, rounded once to that dtype, is normalised in its place.
    return_residual: also return that sum, for pre-norm blocks.
    residual_dtype: the dtype of that sum, by default the input's: a residual stream can stay in float32 beside 16-bit inputs.
        The residual has it too, or the input's; without a residual the sum is the input in that dtype. Gradients: each of its
        tensor's.
    row_scale: of the leading shape, any of the four dtypes: each row of the input is multiplied by its element before the
        residual is added. A constant: it has no gradient.
    dropout_p, dropout_seed: after that, and before the residual is added, elements of the input become 0 with probability
        dropout_p and the others are multiplied by 1 / (1 - dropout_p); 1 drops all. The mask is a function of the seed and of
        an element's row and column (cupynorm.reference.dropout_mask), the same on every device; backward makes it again.
        dropout_seed: an int, or an int64 array of one element on the input's device, which the kernel reads there. By default
        one is drawn there by the input's library (torch.randint, cupy.random, np.random), so that torch.manual_seed and CUDA
        graphs work as with torch's dropout.
    zero_centered_weight: multiply by 1 + weight.
    out_dtype: dtype of the result (a name, NumPy or torch dtype), by default the input's. Or "float8_e4m3fn" or "float8_e5m2":
        the result is then a cupynorm.QuantizedTensor of data = y * scale, saturated and rounded once to 8 bits, and scale_inv =
        1 / scale. The next four options are for it alone.
    scale: what y is multiplied by. None: 1. An array of one float32 where the input is: its value, which the kernel reads
        there. Or a name, and each such part of y gets the scale that its own largest magnitude, amax, asks for: "tensor" (all
        of y), "row", "block" (128 columns of a row), "mx" (32 columns, MXFP8). That is largest / amax, largest being 448 or
        57344, the format's; 1 where amax is 0, infinite or NaN. Of "mx" scale_inv is a power of two, amax / largest rounded
        up, in one byte. "tensor" reads the input twice, and so do "block" and "mx" where a block does not lie in neighbouring
        lanes; "row" has its row on the chip, but for the strategy uncached.
    amax: with a scale that is given: one float32, 0 (not -0) or more, where the input is, in memory of its own; it becomes the
        largest of itself and all |y| of the call, before the scale: what the scale of a later call can be made of.
    power_of_two: round the scales of "tensor", "row" and "block" down to powers of two.
    transpose: with one scale for all of y: also y.transposed, [num_cols, num_rows], the layout that the product of a weight's
        gradient takes on Hopper. On a GPU by a second kernel, which reads the 8 bits again (in one pass the two took longer:
        notebooks/experiments.md).
    out: an array to write the result to, of the input's shape, its rows contiguous, sharing no memory with the inputs.
    sm_margin: multiprocessors to leave free for other kernels, forward and backward: it shrinks the grid. Or a dict that gives
        "forward", "backward" and "inference" (a forward that nothing is to differentiate) each its own, 0 where it has none.
    strategy, tile, statistics: force a row of cupynorm.STRATEGIES, its Tile, and "two_pass" or "welford"; by default the
        width of a row decides. Ignored where the reference computes.
    weight1, bias1: as weight and bias, of a second output y1 of the same x_hat, for parallel blocks that have a norm each.
    round_x_hat: round x_hat to the input's dtype before the weight multiplies it, where that is narrower than the arithmetic:
        as the norms of Hugging Face's Llama do. Gradients are those of the function without that rounding.
    memory_efficient: of torch tensors whose gradient is recorded, keep y for backward in place of what was normalised, as
        apex's norms do: less memory where nothing else keeps the input, as y is kept by what follows. Backward has x_hat from
        y, as (y - bias) / weight, where a weight (1 + weight) smaller than t counts as t with its sign; t is half a unit in the
        last place of 1 in y's dtype: 2^-8, 2^-11, 2^-24, 2^-53 for bfloat16, float16, float32, float64. Beside float arithmetic
        its x_hat is off by up to ulp(y) / (2 * max(|weight|, t)) + |x_hat| * max(0, 1 - |weight| / t). y must have the
        arithmetic of the sum.

    An 8-bit y is no tensor that autograd knows: gradients come through its dequantize(), as if nothing had been rounded. It
    comes with all of the above but out, weight1, bias1 and memory_efficient.

    Returns y of input's shape in the input's library; (y, sum) with return_residual; (y, y1) or (y, y1, sum) with weight1 or
    bias1. A CuPy array or DLPack exporter gives a CuPy array; a CUDA torch tensor a torch tensor, differentiable in input,
    weight, bias and residual; NumPy arrays and CPU tensors are computed by the float64 reference and rounded once
    (differentiable for torch). torch.compile, torch.func, forward mode and second derivatives work (with fused options, which
    are residual_dtype to memory_efficient, torch.compile alone); under CUDA's torch.autocast y is float32 unless out_dtype says
    otherwise, as torch's is.

    Arithmetic is in float32 (float64 for float64 input) with one rounding at the end; a row's result does not depend on the
    other rows and repeats to the bit. A row that holds NaN or Inf is NaN, and only that row. A row of float32 or bfloat16 whose
    squared deviations sum beyond 3.4e38 (values of about 1.8e19 and more) has infinite variance in float32, so rstd is 0 and y
    is bias.

    Of a torch DTensor, in shards of rows or whole on each rank, y lies as input; weight and bias are replicated DTensors or
    plain tensors, the same on every rank; input whose rows are split is put together first. Fused options take no DTensor.

    Raises ValueError or TypeError, before anything is launched, for shapes, dtypes, devices or options that do not fit;
    cupynorm.MissingLibraryError if the input is on a GPU and CuPy or NVRTC is not installed.
    """
    return normalize(
        True, input, _extents(normalized_shape), weight, bias, eps, residual, return_residual, zero_centered_weight, out_dtype,
        out, _options(strategy, tile, statistics, sm_margin),
        _fused_options(
            residual_dtype, row_scale, dropout_p, dropout_seed, weight1, bias1, round_x_hat, memory_efficient, out_dtype, scale,
            amax, power_of_two, transpose,
        ),
    )  # fmt: skip


def rms_norm(
    input: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
    residual_dtype: Any = None,
    row_scale: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    weight1: Array | None = None,
    bias1: Array | None = None,
    round_x_hat: bool = False,
    memory_efficient: bool = False,
    scale: Array | str | None = None,
    amax: Array | None = None,
    power_of_two: bool = False,
    transpose: bool = False,
    sm_margin: int | Mapping[str, int] = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: str | None = None,
) -> Array | tuple[Array, ...]:
    """Root-mean-square normalisation (Zhang, Sennrich 2019; formula in cupynorm.reference.rms_norm): layer_norm without the
    mean.

    eps: by default the machine epsilon of the arithmetic, 2**-23 (2**-52 for float64 input), as torch.nn.functional.rms_norm.
    All else, returns and errors too, as for layer_norm. A row that holds NaN is NaN; one that holds Inf is NaN there and 0 *
    weight elsewhere, as in float64. So is, elsewhere too, a row whose squares sum beyond 3.4e38.
    """
    return normalize(
        False, input, _extents(normalized_shape), weight, bias, eps, residual, return_residual, zero_centered_weight, out_dtype,
        out, _options(strategy, tile, statistics, sm_margin),
        _fused_options(
            residual_dtype, row_scale, dropout_p, dropout_seed, weight1, bias1, round_x_hat, memory_efficient, out_dtype, scale,
            amax, power_of_two, transpose,
        ),
    )  # fmt: skip


def layer_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
    residual_dtype: Any = None,
    row_scale: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    weight1: Array | None = None,
    bias1: Array | None = None,
    round_x_hat: bool = False,
    scale: Array | str | None = None,
    amax: Array | None = None,
    power_of_two: bool = False,
    transpose: bool = False,
    sm_margin: int | Mapping[str, int] = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: str | None = None,
) -> Forward | FusedForward:
    """layer_norm that also returns what backward needs, outside any autograd: Forward(y, mean, rstd, sum).

    With a fused option (residual_dtype to round_x_hat) it returns a FusedForward. normalized_shape is by default weight's or
    bias's shape, or else the last dimension of x. Arguments and errors as for layer_norm.
    """
    extents = _default_extents(x, weight, bias, normalized_shape)
    options = _options(strategy, tile, statistics, sm_margin)
    fused_options = _fused_options(
        residual_dtype, row_scale, dropout_p, dropout_seed, weight1, bias1, round_x_hat, False, out_dtype, scale, amax,
        power_of_two, transpose,
    )  # fmt: skip
    if fused_options is not None:
        return _fused().forward(
            True, x, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options, fused_options
        )
    prepared, given = prepare_forward(
        True, x, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options
    )  # fmt: skip
    return Forward(*prepared.run(*given))


def rms_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
    residual_dtype: Any = None,
    row_scale: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    weight1: Array | None = None,
    bias1: Array | None = None,
    round_x_hat: bool = False,
    scale: Array | str | None = None,
    amax: Array | None = None,
    power_of_two: bool = False,
    transpose: bool = False,
    sm_margin: int | Mapping[str, int] = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: str | None = None,
) -> Forward | FusedForward:
    """rms_norm that also returns what backward needs: Forward(y, None, rstd, sum). All else as for layer_norm_forward."""
    extents = _default_extents(x, weight, bias, normalized_shape)
    options = _options(strategy, tile, statistics, sm_margin)
    fused_options = _fused_options(
        residual_dtype, row_scale, dropout_p, dropout_seed, weight1, bias1, round_x_hat, False, out_dtype, scale, amax,
        power_of_two, transpose,
    )  # fmt: skip
    if fused_options is not None:
        return _fused().forward(
            False, x, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options, fused_options
        )
    prepared, given = prepare_forward(
        False, x, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options
    )  # fmt: skip
    return Forward(*prepared.run(*given))


def layer_norm_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    zero_centered_weight: bool = False,
    dsum: Array | None = None,
    gradients: Sequence[str] = ("dx", "dweight", "dbias"),
    dweight_dtype: Any = None,
    dbias_dtype: Any = None,
    dx_dtype: Any = None,
    dresidual_dtype: Any = None,
    row_scale: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    dy1: Array | None = None,
    weight1: Array | None = None,
    dbias1_dtype: Any = None,
    memory_efficient: bool = False,
    bias: Array | None = None,
    sm_margin: int | Mapping[str, int] = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
) -> Backward | FusedBackward:
    """Gradients of layer_norm at x, for the statistics that layer_norm_forward returned (derivation:
    cupynorm.reference.layer_norm).

    dy: gradient of y, of x's shape, in any of the four dtypes. x: what was normalised (Forward.sum).
    mean, rstd: x's leading shape.
    dsum: gradient that reaches the returned sum from elsewhere, added to dx. gradients: which to compute; the others are None
    and cost nothing. dweight_dtype, dbias_dtype: by default weight's dtype, or x's without a weight.

    Of a forward with fused options: row_scale, dropout_p as there and dropout_seed as FusedForward has it; dx_dtype,
    dresidual_dtype: those of the forward's input and residual, by default x's. dy1, weight1: of the second output, dbias1_dtype
    as dbias_dtype. With memory_efficient x is y as forward returned it, mean is not read, and bias is needed where forward had
    one. With any of them, or "dresidual", "dweight1" or "dbias1" among the gradients, it returns a FusedBackward. dx, of the
    input, and dresidual come from one kernel, dsum added to both before they are rounded; what dy1 brings comes from another
    before it, which hands on its part of both in the arithmetic's dtype.

    Returns Backward(dx in x's dtype, dweight and dbias of normalized_shape). The sums over rows are made in float32 (float64
    for float64), in a fixed order: they repeat to the bit. Raises as layer_norm.
    """
    extents = _default_extents(x, weight, None, normalized_shape)
    options = _options(strategy, tile, None, sm_margin)
    fused_options = _fused_options(None, row_scale, dropout_p, dropout_seed, weight1, dy1, False, memory_efficient)
    gradients = _names(gradients)
    if _is_fused(fused_options, dx_dtype, dresidual_dtype, gradients):
        return _fused().backward(
            True, dy, dy1, x, mean, rstd, extents, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype,
            options, dx_dtype, dresidual_dtype, fused_options, dbias1_dtype, (weight, bias) if memory_efficient else None,
        )  # fmt: skip
    prepared, given = prepare_backward(
        True, dy, x, mean, rstd, extents, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype, options
    )  # fmt: skip
    return Backward(*prepared.run(*given))


def rms_norm_backward(
    dy: Array,
    x: Array,
    rstd: Array,
    weight: Array | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    zero_centered_weight: bool = False,
    dsum: Array | None = None,
    gradients: Sequence[str] = ("dx", "dweight", "dbias"),
    dweight_dtype: Any = None,
    dbias_dtype: Any = None,
    dx_dtype: Any = None,
    dresidual_dtype: Any = None,
    row_scale: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    dy1: Array | None = None,
    weight1: Array | None = None,
    dbias1_dtype: Any = None,
    memory_efficient: bool = False,
    bias: Array | None = None,
    sm_margin: int | Mapping[str, int] = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
) -> Backward | FusedBackward:
    """Gradients of rms_norm at x, for the rstd that rms_norm_forward returned. All else as for layer_norm_backward."""
    extents = _default_extents(x, weight, None, normalized_shape)
    options = _options(strategy, tile, None, sm_margin)
    fused_options = _fused_options(None, row_scale, dropout_p, dropout_seed, weight1, dy1, False, memory_efficient)
    gradients = _names(gradients)
    if _is_fused(fused_options, dx_dtype, dresidual_dtype, gradients):
        return _fused().backward(
            False, dy, dy1, x, None, rstd, extents, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype,
            options, dx_dtype, dresidual_dtype, fused_options, dbias1_dtype, (weight, bias) if memory_efficient else None,
        )  # fmt: skip
    prepared, given = prepare_backward(
        False, dy, x, None, rstd, extents, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype, options
    )  # fmt: skip
    return Backward(*prepared.run(*given))


def _is_fused(fused_options: object, dx_dtype: object, dresidual_dtype: object, gradients: Sequence[str]) -> bool:
    """Whether a backward is asked for what only that of the fused options gives."""
    given = (fused_options, dx_dtype, dresidual_dtype)
    return any(each is not None for each in given) or not set(gradients) <= set(Backward._fields)


# Checks: each failure is a sentence that says what was given and what was expected.


def _options(strategy: str | None, tile: object, statistics: str | None, sm_margin: int) -> Options:
    if strategy is None and tile is None and statistics is None and sm_margin.__class__ is int and sm_margin == 0:
        return DEFAULTS
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it is one of {', '.join(STRATEGIES)}, or None to let the width decide")
    if statistics is not None and statistics not in STATISTICS:
        raise ValueError(f"statistics is {statistics!r}; it is one of {', '.join(STATISTICS)}, or None")
    if tile is not None and not isinstance(tile, Tile):
        if not isinstance(tile, Mapping):
            raise TypeError(f"tile is a {type(tile).__name__}; expected a cupynorm.Tile or a dict of its fields")
        try:
            tile = Tile(**tile)
        except TypeError as error:
            raise ValueError(f"tile has fields {', '.join(map(str, tile))}; a Tile takes {', '.join(TILE_FIELDS)}") from error
    for name in TILE_FIELDS if tile is not None else ():
        value = getattr(tile, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"tile has {name} {value!r}; expected an int")
    return Options(strategy, tile, statistics, _margins(sm_margin))


def _fused_options(
    residual_dtype: object, row_scale: object, dropout_p: object, dropout_seed: object, weight1: object, bias1: object,
    round_x_hat: object = False, memory_efficient: object = False, out_dtype: object = None, scale: object = None,
    amax: object = None, power_of_two: object = False, transpose: object = False,
) -> FusedOptions | None:  # fmt: skip
    """None where nothing is asked for: such a call goes the short way."""
    # type(): old compilers do not know the __class__ of a float.
    if (
        residual_dtype is None and row_scale is None and type(dropout_p) is float and dropout_p == 0.0
        and weight1 is None and bias1 is None and round_x_hat is False and memory_efficient is False
        and scale is None and amax is None and power_of_two is False and transpose is False
        and (out_dtype is None or out_dtype.__class__ is str and out_dtype in DTYPES or not _quantized().is_float8(out_dtype))
    ):  # fmt: skip
        return None
    quantization = None
    if scale is not None or amax is not None or power_of_two or transpose or _quantized().is_float8(out_dtype):
        quantization = _quantized().quantization_of(out_dtype, scale, amax, power_of_two, transpose)
    _check_dropout_p(dropout_p)
    if residual_dtype is not None:
        residual_dtype = check_dtype_name(residual_dtype, "residual_dtype")
    if not dropout_p:
        dropout_seed = None
    elif isinstance(dropout_seed, numbers.Integral) and not isinstance(dropout_seed, bool):
        if not -(2**63) <= dropout_seed < 2**64:
            raise ValueError(f"dropout_seed is {dropout_seed}; expected an int of 64 bits")
        dropout_seed = (int(dropout_seed) + 2**63) % 2**64 - 2**63  # as a signed one
    elif isinstance(dropout_seed, (str, numbers.Number, np.generic)):
        raise TypeError(f"dropout_seed is {dropout_seed!r}; expected an int or one element of int64")
    return FusedOptions(
        residual_dtype,
        row_scale,
        float(dropout_p),
        dropout_seed,
        weight1,
        bias1,
        bool(round_x_hat),
        bool(memory_efficient),
        quantization,
    )


def _check_dropout_p(dropout_p: object) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real) or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p!r}; expected a probability, from 0 to 1")


def _margins(sm_margin: object) -> int | Margins:
    if not isinstance(sm_margin, Mapping):
        return _margin(sm_margin)
    if not set(sm_margin) <= set(Margins._fields):
        raise ValueError(f"sm_margin has {', '.join(map(str, sm_margin))}; expected some of {', '.join(Margins._fields)}")
    return Margins(**{kind: _margin(margin) for kind, margin in sm_margin.items()})


def _margin(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 0:
        raise ValueError(f"sm_margin is {given!r}; expected a number of multiprocessors, 0 or more")
    return int(given)


def _extents(normalized_shape: object) -> tuple[int, ...]:
    """normalized_shape as a tuple of ints: what equals one, as (40.0,) equals (40,), is no key to what is kept for it."""
    kind = normalized_shape.__class__
    if kind is int:
        return (normalized_shape,)
    if kind is tuple:
        for extent in normalized_shape:
            if extent.__class__ is not int:
                break
        else:
            return normalized_shape
    try:
        extents = (normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else tuple(normalized_shape)
    except TypeError:
        extents = (None,)
    if any(isinstance(extent, bool) or not isinstance(extent, numbers.Integral) for extent in extents):
        raise TypeError(f"normalized_shape is {normalized_shape!r}; expected an int or a sequence of ints")
    return tuple(int(extent) for extent in extents)


def _default_extents(x: Array, weight: Array | None, bias: Array | None, normalized_shape: object) -> tuple[int, ...]:
    if normalized_shape is not None:
        return _extents(normalized_shape)
    for parameter in (weight, bias):
        if hasattr(parameter, "shape"):
            return tuple(parameter.shape)
    shape = arrays.take(x, "x").shape
    if not shape:
        raise ValueError("x has no dimension to normalise over; expected at least one, or normalized_shape")
    return tuple(shape)[-1:]


def _check_extents(shape: tuple[int, ...], extents: tuple[int, ...], name: str) -> None:
    if not extents:
        raise ValueError("normalized_shape is empty; expected at least one dimension")
    if len(extents) > len(shape) or shape[len(shape) - len(extents) :] != extents:
        raise ValueError(f"normalized_shape is {extents}, {name} has shape {shape}; expected its last dimensions")


def _check_dtype(array: Array, name: str) -> str:
    dtype = arrays.dtype_name(array)
    if dtype not in DTYPES:
        raise TypeError(f"{name} is of dtype {dtype}; expected one of {', '.join(DTYPES)}")
    return dtype


def check_dtype_name(dtype: object, name: str) -> str:
    text = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        try:
            text = np.dtype(dtype).name
        except TypeError:
            pass
    if text not in DTYPES:
        raise TypeError(f"{name} is {dtype!r}; expected one of {', '.join(DTYPES)}")
    return text


def _check_same_place(array: Array, x: Array, name: str, x_name: str) -> None:
    if arrays.where(array) != arrays.where(x):
        raise ValueError(f"{name} is {arrays.where(array)}, {x_name} is {arrays.where(x)}; expected both in one place")


def _take_like(array: Array | None, x: Array, shape: tuple[int, ...], name: str, x_name: str) -> Array | None:
    """An optional array that must have a shape, a supported dtype, and x's place."""
    if array is None:
        return None
    array = arrays.take(array, name)
    _check_dtype(array, name)
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {shape}")
    _check_same_place(array, x, name, x_name)
    return array


def _check_eps(eps: object, dtype: str, has_default: bool) -> float:
    if eps is None and has_default:
        return 2.0 ** (1 - compute_dtype(dtype).digits)
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real) or math.isnan(eps):
        raise TypeError(f"eps is {eps!r}; expected a real number")
    return float(eps)


def _check_out(out: Array | None, x: Array, dtype: str, num_dims: int) -> None:
    if out is None:
        return
    if not (arrays.is_torch(out) or arrays.is_cupy(out) or isinstance(out, np.ndarray)):
        raise TypeError(f"out is a {type(out).__name__}; expected an array of the input's library")
    _check_same_place(out, x, "out", "input")
    if tuple(out.shape) != tuple(x.shape):
        raise ValueError(f"out has shape {tuple(out.shape)}; expected the input's, {tuple(x.shape)}")
    if arrays.dtype_name(out) != dtype:
        raise TypeError(f"out is of dtype {arrays.dtype_name(out)}; expected {dtype}")
    view = _view(out)
    rows = arrays.rows(view, num_dims)
    if rows is None or (rows.num_rows > 1 and abs(rows.row_stride) < rows.num_cols):
        raise ValueError(f"out has strides {view.strides}; expected rows that are contiguous and do not overlap")


def _check_overlap(out: Array | None, others: Mapping[str, Array | None]) -> None:
    if out is None:
        return
    low, high = arrays.extent(_view(out))
    for name, other in others.items():
        if other is not None:
            other_low, other_high = arrays.extent(_view(other))
            if low < other_high and other_low < high:
                raise ValueError(f"out shares memory with {name}; expected memory of its own")


def _check_backward(centered, x, extents, weight, bias, y_dtype, options) -> None:
    """Raises ValueError now if a strategy forced on a differentiable forward does not fit its backward."""
    if options.strategy is None or arrays.on_host(x):
        return
    num_cols = arrays.product(extents)
    dtype, weight_dtype, bias_dtype = (None if array is None else arrays.dtype_name(array) for array in (x, weight, bias))
    problem = Problem(
        "backward", centered, num_cols, dtype, dy=y_dtype, dx=dtype, weight=weight_dtype, dweight=weight_dtype,
        dbias=bias_dtype, pack_limit=pack_limit(num_cols, ()),
    )  # fmt: skip
    choose(problem, launch.device(_view(x).device), options.strategy)


def _view(array: Array) -> View:
    if isinstance(array, np.ndarray):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return View(array.ctypes.data, array.shape, strides, array.dtype.name, None)
    return arrays.library(array).view(array)


# Calls whose arrays lie alike and whose other arguments are equal share their checks and their plan.

fused_forwards: dict[tuple, Any] = {}  # of cupynorm.fused
fused_backwards: dict[tuple, Any] = {}
quantizations: dict[tuple, Any] = {}  # of cupynorm.quantized and cupynorm.survey
_MOST_PREPARED = 4096  # then all are dropped: shapes without end must not fill the memory


def keep(prepared: dict, key: tuple | None, value: object) -> None:
    """key is None where a call is not to be kept."""
    if key is not None:
        if len(prepared) >= _MOST_PREPARED:
            prepared.clear()
        prepared[key] = value


def forget() -> None:
    """Drops every prepared call, so that the next of each kind is planned anew."""
    for prepared in (_forwards, _backwards, fused_forwards, fused_backwards, quantizations):
        prepared.clear()


def _rows(array: Array | None, num_dims: int) -> tuple[Rows | None, bool]:
    """An array's rows, and whether they are those of a contiguous copy, whose address is aligned whatever it will be."""
    if array is None:
        return None, False
    view = _view(array)
    found = arrays.rows(view, num_dims)
    if found is not None:
        return found, False
    return arrays.contiguous_rows(view.shape, num_dims, view.dtype), True


def _parameter(array: Array | None) -> tuple[Parameter | None, bool]:
    """Address and dtype of a weight, bias or statistic, and whether they are those of a contiguous copy."""
    if array is None:
        return None, False
    view = _view(array)
    copied = arrays.rows(view, len(view.shape)) is None
    return (0 if copied else view.pointer, view.dtype), copied


# Forward.


def normalize(
    centered, input, extents, weight, bias, eps, residual, return_residual, zero_centered_weight, out_dtype, out, options,
    fused_options=None,
):  # fmt: skip
    """layer_norm and rms_norm: of torch tensors as autograd, the compiler and the transforms of torch ask for it."""
    if fused_options is not None:
        return _fused().normalize(
            centered, input, extents, weight, bias, eps, residual, return_residual, zero_centered_weight, out_dtype, out,
            options, fused_options,
        )  # fmt: skip
    if is_tensor(input):
        y, added = _torch_part().normalize(
            centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options
        )
    else:
        prepared, given = prepare_forward(
            centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options, FOR_Y
        )  # fmt: skip
        y, _, _, added = prepared.run(*given)
    return (y, added) if return_residual else y


def is_tensor(array: object) -> bool:
    """arrays.is_torch that asks sys.modules, all of which torch.compile would look through, for the first tensor alone."""
    if _autograd is None and not arrays.is_torch(array):
        return False
    return isinstance(array, _torch_part().torch.Tensor)


_autograd = None  # from the first torch tensor on: an import statement takes a microsecond even where nothing is left to import


def _torch_part():
    global _autograd
    if _autograd is None:
        from . import autograd

        _autograd = autograd
        return autograd  # old compilers do not see yet what was just kept
    return _autograd


def _fused():
    from . import fused

    return fused


def _quantized():
    from . import quantized

    return quantized


# What a forward is for: y; y and statistics; both, where gradients are recorded; statistics and no y.
FOR_Y, FOR_STATISTICS, FOR_GRADIENTS, FOR_STATISTICS_ALONE = "y", "statistics", "gradients", "statistics alone"
_forwards: dict[tuple, _PreparedForward] = {}


def prepare_forward(
    centered, x, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options, purpose=FOR_STATISTICS
) -> tuple[_PreparedForward | _ReferenceForward, tuple]:  # fmt: skip
    """Checks everything: an object whose `run` takes the arrays that are returned beside it.
    Nothing is allocated or launched."""
    lie = arrays.library(x).lie
    try:
        # An eps of True equals one of 1. Whatever else is equal means the same.
        key = (
            lie(x), lie(weight), lie(bias), lie(residual), lie(out), centered, extents, eps, eps.__class__,
            zero_centered_weight, out_dtype, options, purpose,
        )  # fmt: skip
        prepared = _forwards.get(key)
    except (AttributeError, TypeError, RuntimeError):  # arrays of several libraries, none, sparse: the checks find words for it
        key = prepared = None
    if prepared is None:
        x, weight, bias, residual, eps, y_dtype = check_forward(centered, x, extents, weight, bias, eps, residual, out_dtype)
        arrays.check_addresses(input=x, weight=weight, bias=bias, residual=residual, out=out)
        _check_out(out, x, y_dtype, len(extents))
        if purpose is FOR_GRADIENTS:
            if out is not None:
                raise ValueError("out was given for tensors that require gradients; expected out=None, or torch.no_grad()")
            _check_backward(centered, x, extents, weight, bias, y_dtype, options)
        arguments = (centered, x, extents, weight, bias, eps, residual, zero_centered_weight, y_dtype, out, options)
        if arrays.on_host(x):
            prepared = _ReferenceForward(*arguments)
        else:
            prepared = _PreparedForward(
                *arguments, wants_statistics=purpose is not FOR_Y, wants_y=purpose is not FOR_STATISTICS_ALONE
            )
            keep(_forwards, key, prepared)
    if out is not None:
        _check_overlap(out, {"input": x, "weight": weight, "bias": bias, "residual": residual})
    return prepared, (x, weight, bias, residual, out)


def check_forward(centered, x, extents, weight, bias, eps, residual, out_dtype) -> tuple:
    """The arrays as they are taken, eps as a float and y's dtype by name.
    Reads no address: x may be a tensor without memory."""
    x = arrays.take(x, "input")
    dtype = _check_dtype(x, "input")
    shape = tuple(x.shape)
    _check_extents(shape, extents, "input")
    weight = _take_like(weight, x, extents, "weight", "input")
    bias = _take_like(bias, x, extents, "bias", "input")
    residual = _take_like(residual, x, shape, "residual", "input")
    if residual is not None and arrays.dtype_name(residual) != dtype:
        raise TypeError(f"residual is of dtype {arrays.dtype_name(residual)}; expected the input's, {dtype}")
    eps = _check_eps(eps, dtype, has_default=not centered)
    return x, weight, bias, residual, eps, dtype if out_dtype is None else check_dtype_name(out_dtype, "out_dtype")


class _Forward:
    """A forward that is checked, and what its gradients depend on besides arrays; backwards: those that autograd prepared."""

    def __init__(self, centered, extents, bias, zero_centered_weight, options) -> None:
        self.centered, self.extents = centered, extents
        self.zero_centered_weight = bool(zero_centered_weight)
        self.bias_dtype = None if bias is None else arrays.dtype_name(bias)
        self.backward_options = options._replace(tile=None)  # a tile belongs to one kernel; a strategy is meant for both
        self.backwards: dict[tuple, _PreparedBackward | _ReferenceBackward] = {}


class _PreparedForward(_Forward):
    """A forward that is planned and compiled: `run` takes any arrays that lie as those it was made from."""

    def __init__(
        self, centered, x, extents, weight, bias, eps, residual, zero_centered_weight, y_dtype, out, options, wants_statistics,
        wants_y=True,
    ) -> None:  # fmt: skip
        super().__init__(centered, extents, bias, zero_centered_weight, options)
        num_dims = len(extents)
        view = _view(x)
        self.device_index = view.device
        self.library = library = arrays.library(x)(view.device)
        leading = view.shape[: len(view.shape) - num_dims]
        x_rows, copy_x = _rows(x, num_dims)
        residual_rows, copy_residual = _rows(residual, num_dims)
        weight_parameter, copy_weight = _parameter(weight)
        bias_parameter, copy_bias = _parameter(bias)
        self.copies = _copies(copy_x, copy_weight, copy_bias, copy_residual)  # in the order of run's arguments
        y_rows = arrays.contiguous_rows(view.shape, num_dims, y_dtype) if out is None else _rows(out, num_dims)[0]
        y_rows = y_rows if wants_y else None
        sum_rows = arrays.contiguous_rows(view.shape, num_dims, view.dtype) if residual is not None else None
        self.call = call = ForwardCall(
            launch.device(view.device), centered, x_rows, y_rows, weight_parameter, bias_parameter, eps, zero_centered_weight,
            residual_rows, sum_rows, options.of("forward" if wants_statistics else "inference"),
        )  # fmt: skip
        self.kernels = [launch.load(each, view.device) for each in call.plan.launches]
        compute = compute_dtype(view.dtype).name
        self.new_y = _new(library, view.shape, y_dtype if wants_y else None)
        self.new_mean = _new(library, leading, compute if centered and wants_statistics else None)
        self.new_rstd = _new(library, leading, compute if wants_statistics else None)
        self.new_sum = _new(library, view.shape, view.dtype)

    def run(self, x: Array, weight: Array | None, bias: Array | None, residual: Array | None, out: Array | None) -> tuple:
        """The fields of Forward; y is None if it is for the statistics alone."""
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            added = x if residual is None else self.new_sum()
            if self.copies:
                x, weight, bias, residual = _contiguous(library, self.copies, (x, weight, bias, residual))
            y = self.new_y() if out is None else out
            mean, rstd = self.new_mean(), self.new_rstd()
            if not self.kernels:  # no rows, or rows of no columns, which have no statistics
                _fill((mean, rstd), math.nan)
                return y, mean, rstd, added
            address = library.address
            words = self.call.words(
                address(x),
                0 if y is None else address(y),
                0 if weight is None else address(weight),
                0 if bias is None else address(bias),
                0 if mean is None else address(mean),
                0 if rstd is None else address(rstd),
                0 if residual is None else address(residual),
                0 if residual is None else address(added),
            )
            self.kernels[0].enqueue(library.stream(), words)
            return y, mean, rstd, added
        finally:
            if former != self.device_index:
                library.exchange_device(former)


def _new(library: CuPyLibrary | TorchLibrary, shape: tuple[int, ...], dtype: str | None) -> Callable[[], Array | None]:
    """Makes new arrays on the current device, or None where there is no dtype."""
    return library.allocator(shape, library.dtype(dtype)) if dtype else lambda: None


def _copies(*copied: bool) -> tuple[bool, ...]:
    """Which of some arrays `_contiguous` must copy; empty if none."""
    return copied if any(copied) else ()


def _contiguous(
    library: CuPyLibrary | TorchLibrary, copies: tuple[bool, ...], given: tuple[Array | None, ...]
) -> Iterator[Array]:
    return (library.contiguous(array) if copied else array for array, copied in zip(given, copies))


def _fill(some: tuple[Array | None, ...], value: float) -> None:
    for array in some:
        if array is not None:
            array[...] = value


class _ReferenceForward(_Forward):
    """A forward of arrays on the host: the reference, rounded once."""

    def __init__(
        self, centered, x, extents, weight, bias, eps, residual, zero_centered_weight, y_dtype, out, options
    ) -> None:  # fmt: skip
        super().__init__(centered, extents, bias, zero_centered_weight, options)
        self.eps = eps
        self.shape = tuple(x.shape)
        self.leading = self.shape[: len(self.shape) - len(extents)]
        self.matrix_shape = arrays.product(self.leading), arrays.product(extents)
        self.dtype, self.y_dtype = arrays.dtype_name(x), y_dtype
        self.compute = compute_dtype(self.dtype).name
        self.round_x_hat = None

    def run(self, x, weight, bias, residual, out) -> tuple:
        from . import reference

        matrix = arrays.to_float64(x).reshape(self.matrix_shape)
        added = x
        if residual is not None:
            added = arrays.from_float64(matrix.reshape(self.shape) + arrays.to_float64(residual), self.dtype, x)
            matrix = arrays.to_float64(added).reshape(self.matrix_shape)
        weight64, bias64 = (None if array is None else arrays.to_float64(array).reshape(-1) for array in (weight, bias))
        if matrix.shape[1] == 0:
            y = out if out is not None else arrays.from_float64(np.empty(self.shape), self.y_dtype, x)
            mean, rstd = (arrays.from_float64(np.full(self.leading, np.nan), self.compute, x) for _ in range(2))
            return y, mean if self.centered else None, rstd, added
        norm = reference.layer_norm if self.centered else reference.rms_norm
        result = norm(
            matrix, weight64, bias64, self.eps, zero_centered_weight=self.zero_centered_weight, round_x_hat=self.round_x_hat
        )
        y = arrays.from_float64(result.y.reshape(self.shape), self.y_dtype, x)
        if out is not None:
            out[...] = y
            y = out
        mean = arrays.from_float64(result.mean.reshape(self.leading), self.compute, x) if self.centered else None
        return y, mean, arrays.from_float64(result.rstd.reshape(self.leading), self.compute, x), added


# Backward.


_backwards: dict[tuple, _PreparedBackward] = {}


def prepare_backward(
    centered, dy, x, mean, rstd, extents, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype, options,
    spends_dy=False,
) -> tuple[_PreparedBackward | _ReferenceBackward, tuple]:  # fmt: skip
    """Checks everything: an object whose `run` takes the arrays that are returned beside it.
    Nothing is allocated or launched. spends_dy: nobody else needs dy, so dx may be written in its place."""
    gradients = _names(gradients)
    lie = arrays.library(x).lie
    try:
        key = (
            lie(dy), lie(x), lie(mean), lie(rstd), lie(weight), lie(dsum), centered, extents, zero_centered_weight, gradients,
            dweight_dtype, dbias_dtype, options, spends_dy,
        )  # fmt: skip
        prepared = _backwards.get(key)
    except (AttributeError, TypeError, RuntimeError):  # arrays of several libraries, none, sparse: the checks find words for it
        key = prepared = None
    if prepared is None:
        dy, x, mean, rstd, weight, dsum, wanted = check_backward(
            centered, dy, x, mean, rstd, extents, weight, dsum, gradients, dweight_dtype, dbias_dtype
        )
        arrays.check_addresses(dy=dy, x=x, mean=mean, rstd=rstd, weight=weight, dsum=dsum)
        if arrays.on_host(x):
            prepared = _ReferenceBackward(centered, tuple(x.shape), extents, zero_centered_weight, wanted)
        else:
            prepared = _PreparedBackward(
                centered, dy, x, mean, rstd, extents, weight, zero_centered_weight, dsum, wanted, options, spends_dy
            )
            keep(_backwards, key, prepared)
    return prepared, (dy, x, mean, rstd, weight, dsum)


def check_backward(
    centered, dy, x, mean, rstd, extents, weight, dsum, gradients, dweight_dtype, dbias_dtype, names=Backward._fields
) -> tuple:  # fmt: skip
    """The arrays as they are taken, and the dtypes of dx, dweight and dbias, None where not wanted.
    names: of gradients there are."""
    x = arrays.take(x, "x")
    dtype = _check_dtype(x, "x")
    shape = tuple(x.shape)
    _check_extents(shape, extents, "x")
    leading = shape[: len(shape) - len(extents)]
    dy = _take_like(dy, x, shape, "dy", "x")
    if dy is None:
        raise TypeError("dy is None; expected the gradient of y")
    dsum = _take_like(dsum, x, shape, "dsum", "x")
    weight = _take_like(weight, x, extents, "weight", "x")
    mean = _take_statistic(mean, x, leading, "mean") if centered else None
    rstd = _take_statistic(rstd, x, leading, "rstd")
    _check_gradients(gradients, names)
    own = arrays.dtype_name(weight) if weight is not None else dtype
    dtypes = (
        dtype,
        own if dweight_dtype is None else check_dtype_name(dweight_dtype, "dweight_dtype"),
        own if dbias_dtype is None else check_dtype_name(dbias_dtype, "dbias_dtype"),
    )
    wanted = tuple(each if name in gradients else None for name, each in zip(Backward._fields, dtypes))
    return dy, x, mean, rstd, weight, dsum, wanted


def _names(gradients: object) -> str | tuple[str, ...]:
    """gradients as a tuple, which keys hold. A str, of which the checks below find words, stays one."""
    if isinstance(gradients, str):
        return gradients
    try:
        names = tuple(gradients)
        hash(names)
    except TypeError:
        expected = ", ".join(FusedBackward._fields)
        raise TypeError(f"gradients is {gradients!r}; expected some of {expected}") from None
    return names


def _check_gradients(gradients: object, names: Sequence[str]) -> None:
    if isinstance(gradients, str) or any(name not in names for name in gradients):
        raise ValueError(f"gradients is {gradients!r}; expected some of {', '.join(names)}")


def _take_statistic(array: Array | None, x: Array, leading: tuple[int, ...], name: str) -> Array:
    if array is None:
        raise TypeError(f"{name} is None; expected the statistic that the forward returned")
    array = _take_like(array, x, leading, name, "x")
    expected = compute_dtype(arrays.dtype_name(x)).name
    if arrays.dtype_name(array) != expected:
        raise TypeError(f"{name} is of dtype {arrays.dtype_name(array)}; expected {expected} for x of {arrays.dtype_name(x)}")
    return array


class _PreparedBackward:
    """A backward that is checked, planned and compiled: `run` takes any arrays that lie as those it was made from."""

    def __init__(
        self, centered, dy, x, mean, rstd, extents, weight, zero_centered_weight, dsum, wanted, options, spends_dy
    ) -> None:  # fmt: skip
        view = _view(x)
        num_dims = len(extents)
        self.device_index = view.device
        self.library = library = arrays.library(x)(view.device)
        dy_rows, copy_dy = _rows(dy, num_dims)
        x_rows, copy_x = _rows(x, num_dims)
        dsum_rows, copy_dsum = _rows(dsum if wanted[0] else None, num_dims)
        weight_parameter, copy_weight = _parameter(weight)
        # In the order of run's arguments.
        self.copies = _copies(copy_dy, copy_x, _parameter(mean)[1], _parameter(rstd)[1], copy_weight, copy_dsum)
        dx_rows = arrays.contiguous_rows(view.shape, num_dims, view.dtype) if wanted[0] else None
        dweight, dbias = ((0, dtype) if dtype else None for dtype in wanted[1:])  # fresh arrays are aligned
        self.call = call = BackwardCall(
            launch.device(view.device), centered, x_rows, dy_rows, weight_parameter, zero_centered_weight, dx_rows, dweight,
            dbias, dsum_rows, options.of("backward"),
        )  # fmt: skip
        self.kernels = [launch.load(each, view.device) for each in call.plan.launches] if any(wanted) else []
        shapes = (view.shape, extents, extents)
        self.new_dx, self.new_dweight, self.new_dbias = (_new(library, shape, dtype) for shape, dtype in zip(shapes, wanted))
        self.in_place = spends_dy and call.can_write_over_dy
        self.new_partials = _new(library, call.partials_shape, call.plan.problem.compute if call.partials_shape else None)

    def run(self, dy: Array, x: Array, mean: Array | None, rstd: Array, weight: Array | None, dsum: Array | None) -> tuple:
        """The fields of Backward."""
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            if self.copies:
                dy, x, mean, rstd, weight, dsum = _contiguous(library, self.copies, (dy, x, mean, rstd, weight, dsum))
            dx, dweight, dbias = dy if self.in_place else self.new_dx(), self.new_dweight(), self.new_dbias()
            if not self.kernels:  # no rows, or no columns: sums of nothing
                _fill((dweight, dbias), 0.0)
                return dx, dweight, dbias
            partials = self.new_partials()
            address = library.address
            words = self.call.words(
                address(x),
                address(dy),
                0 if weight is None else address(weight),
                0 if dx is None else address(dx),
                0 if mean is None else address(mean),
                address(rstd),
                0 if dweight is None else address(dweight),
                0 if dbias is None else address(dbias),
                0 if dsum is None else address(dsum),
                0 if partials is None else address(partials),
            )
            stream = library.stream()
            for kernel, argument in zip(self.kernels, words):
                kernel.enqueue(stream, argument)
            return dx, dweight, dbias
        finally:
            if former != self.device_index:
                library.exchange_device(former)


class _ReferenceBackward:
    """A backward of arrays on the host: the reference, rounded once."""

    def __init__(self, centered, shape, extents, zero_centered_weight, wanted) -> None:
        self.centered, self.zero_centered_weight = centered, bool(zero_centered_weight)
        self.shapes, self.dtypes = (shape, extents, extents), wanted
        self.matrix_shape = arrays.product(shape[: len(shape) - len(extents)]), arrays.product(extents)

    def run(self, dy, x, mean, rstd, weight, dsum) -> tuple:
        from . import reference

        if self.matrix_shape[1] == 0:
            gradients = [np.empty(shape) for shape in self.shapes]
        else:

            def matrix(array: Array) -> np.ndarray:
                return arrays.to_float64(array).reshape(self.matrix_shape)

            rows = [matrix(dy), matrix(x), arrays.to_float64(rstd).reshape(-1)]
            if self.centered:
                rows.insert(2, arrays.to_float64(mean).reshape(-1))
            norm_backward = reference.layer_norm_backward if self.centered else reference.rms_norm_backward
            gradients = norm_backward(
                *rows,
                None if weight is None else arrays.to_float64(weight).reshape(-1),
                zero_centered_weight=self.zero_centered_weight,
                dsum=None if dsum is None else matrix(dsum),
            )
        return tuple(
            arrays.from_float64(values.reshape(shape), dtype, x) if dtype else None
            for values, shape, dtype in zip(gradients, self.shapes, self.dtypes)
        )
