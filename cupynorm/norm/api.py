"""layer_norm, rms_norm and their explicit forward: what users call. backward.py has the backward.

Each function builds a request (request.py) and passes it to route.py. docs/design.md, "One call",
lists the steps from here to the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.functors import Fuse
from .functors import bind_functors
from .launch_choice import Launch, checked_launch
from .options import (
    extents_of,
    names_what_was_removed,
    pair_of,
    quantization,
    with_checked_options,
)
from .request import Array, ForwardOperands, ForwardOptions, ForwardRequest
from .results import Forward
from .route import call, explicit_forward


@names_what_was_removed
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
    out: Array | tuple[Array | None, Array | None] | None = None,
    round_x_hat: bool = False,
    scale: Array | str | None = None,
    amax: Array | None = None,
    power_of_two: bool = False,
    transpose: bool = False,
    fuse: Fuse = (),
    launch: Launch | None = None,
) -> Any:
    """Layer normalisation over the last dimensions (Ba, Kiros, Hinton 2016).

    y = (x - mean) / sqrt(var + eps) * weight + bias; cupynorm.reference.layer_norm has the formula
    and its gradients.

    Examples:
        >>> x = np.array([[1.0, 2.0, 3.0, 6.0]])
        >>> cupynorm.layer_norm(x, 4).round(3)
        array([[-1.069, -0.535,  0.   ,  1.604]])

    input: shape (..., *normalized_shape); float16, bfloat16, float32 or float64. A CuPy array, a
        torch tensor, a NumPy array or any object with __dlpack__. Any strides: contiguous rows are
        read in place, others are copied first.
    normalized_shape: an int or the trailing shape to normalise over.
    weight, bias: shape normalized_shape, each optional, of any of the four dtypes, on the input's
        device.
    eps: added to the variance. It may be 0 or negative; a row whose variance does not exceed -eps
        is then Inf or NaN, as in float64.

    Residual:

    residual: of the input's shape, of any of the four dtypes: a residual stream can stay in float32
        beside 16-bit inputs. input + residual is normalised, rounded once to the residual's dtype.
        Each gradient has its tensor's dtype.
    return_residual: also return that sum, for pre-norm blocks.

    Parameters and outputs:

    zero_centered_weight: multiply by 1 + weight.
    round_x_hat: round x_hat to the input's dtype before the weight multiplies it, where that dtype
        has 16 bits, as the norms of Hugging Face's Llama do. Gradients are those of the function
        without that rounding.
    out: an array for y: of the input's shape, with contiguous rows. Or (y, sum), two arrays, of
        which one may be None. y may be the input and sum the residual, in place; else they share no
        memory with what is read.
    out_dtype: dtype of the result (a name, NumPy or torch dtype), by default the input's. On a GPU
        float64 holds values of float32, unless the sum is float64 too. With
        "float8_e4m3fn" or "float8_e5m2" the result is a cupynorm.QuantizedTensor: data = y * scale,
        saturated and rounded once to 8 bits, and scale_inv = 1 / scale.

    Only for an 8-bit result:

    scale: what y is multiplied by. None: 1. An array of one float32 on the input's device, which
        the kernel reads there. Or the name of a granularity, whose scales are computed from the
        largest magnitude (amax) of each part of y: "tensor" (all of y), "row", "block" (128 columns
        of a row). Such a scale is largest / amax, where largest is 448 or 57344, the format's; it
        is 1 where amax is 0, infinite or NaN. "tensor" reads the input twice; so does "block" where
        a block is not held by neighbouring lanes.
    amax: with a given scale: an array of one float32, 0 (not -0) or more, on the input's device, in
        memory of its own. It becomes the maximum of itself and all |y| of the call, before scaling.
        The scale of a later call can be computed from it.
    power_of_two: round scales that are computed down to powers of two.
    transpose: with one scale for all of y: also return y.transposed, [num_cols, num_rows], the
        layout that the product for a weight's gradient takes on Hopper. On a GPU a second kernel
        transposes the 8-bit data.
    An 8-bit y is not a tensor that autograd knows: gradients flow through its dequantize(), as if
    nothing had been rounded. It works with all of the above but out.

    fuse: functors (cupynorm.functors, cupynorm.functor; docs/functors.md) in a tuple, or one alone.
        Those on x apply to the input in their order, before the residual is added. Their result is
        normalised as it is, in the compute type, unless a residual makes a sum, which is rounded.
        Those on y apply after weight and bias, before y is rounded. return_residual then needs a
        residual. They do not go with an 8-bit y, nor those on y with round_x_hat.

    How it is computed; none of these changes a result beyond rounding:

    launch: a cupynorm.Launch: strategy, tile, statistics, sm_margin. By default the width of a row
        decides. On the CPU it does not apply.

    Returns y of the input's shape in the input's library, or (y, sum) with return_residual. A CuPy
    array or DLPack exporter gives a CuPy array. A CUDA tensor gives a torch tensor, differentiable
    in input, weight, bias and residual. NumPy arrays and CPU tensors are computed by the float64
    reference and rounded once (differentiable for torch). What torch compiles, exports, transforms
    or differentiates twice is computed by its own operations, without out. Under
    CUDA's torch.autocast y is float32 unless out_dtype says otherwise, as torch's is.

    Arithmetic is in float32 (float64 for a float64 sum, which is the input without a residual) with
    one rounding at the end.
    Other operands are converted to that when they are read, also a float64 weight beside a 16-bit
    input. float32 values below 2^-126 may count as 0. A row's result does not depend on other rows
    and repeats to the bit. A row that holds NaN or Inf is NaN, and only that row. If the squared
    deviations of a float32 or bfloat16 row sum beyond 3.4e38 (values of about 1.8e19 and more), its
    variance is infinite in float32: rstd is 0 and y is bias. A row whose values themselves sum
    beyond 3.4e38 is NaN or bias.

    For a torch DTensor y is placed as the input; so is residual, also a DTensor. weight and bias
    are DTensors, or plain tensors that are the same on every rank. Rows that are split between
    ranks are gathered first, and y is whole on each rank. out, an 8-bit out_dtype and fuse take no
    DTensor.

    Raises ValueError or TypeError, before anything is launched, for shapes, dtypes, devices or
    options that do not fit; cupynorm.MissingLibraryError if the input is on a GPU and CuPy or NVRTC
    is not installed.
    """
    functors = None
    if fuse.__class__ is not tuple or fuse:
        functors = bind_functors(fuse, return_residual, residual)
    out, out_sum = (out, None) if out.__class__ is not tuple else pair_of(out)
    # The fields of ForwardOperands and ForwardOptions. A repeated call needs no more than tuples.
    operands = (
        input,
        weight,
        bias,
        residual,
        out,
        out_sum,
        scale,
        amax,
        functors,
    )
    options = (
        True,  # centered
        extents_of(normalized_shape),
        eps,
        zero_centered_weight,
        out_dtype,
        round_x_hat,
        quantization(out_dtype, scale, amax, power_of_two, transpose),
        checked_launch(launch),
        False,  # memory_efficient
    )
    return call(operands, options, return_residual)


@names_what_was_removed
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
    out: Array | tuple[Array | None, Array | None] | None = None,
    round_x_hat: bool = False,
    scale: Array | str | None = None,
    amax: Array | None = None,
    power_of_two: bool = False,
    transpose: bool = False,
    fuse: Fuse = (),
    launch: Launch | None = None,
) -> Any:
    """Root-mean-square normalisation (Zhang, Sennrich 2019): layer_norm without the mean.

    y = x / sqrt(mean(x^2) + eps) * weight + bias; see cupynorm.reference.rms_norm.

    Examples:
        >>> cupynorm.rms_norm(np.array([[3.0, 4.0]]), 2).round(3)
        array([[0.849, 1.131]])

    eps: by default the machine epsilon of the arithmetic, 2**-23 (2**-52 for float64), as
        torch.nn.functional.rms_norm.

    All other arguments, with their shapes and dtypes, as for layer_norm. Returns y, or a tuple that
    begins with it, as layer_norm, and raises as it.

    A row that holds NaN is NaN. A row that holds Inf is NaN there and 0 * weight elsewhere, as in
    float64; so is, elsewhere too, a row whose squares sum beyond 3.4e38.
    """
    functors = None
    if fuse.__class__ is not tuple or fuse:
        functors = bind_functors(fuse, return_residual, residual)
    out, out_sum = (out, None) if out.__class__ is not tuple else pair_of(out)
    # The fields of ForwardOperands and ForwardOptions. A repeated call needs no more than tuples.
    operands = (
        input,
        weight,
        bias,
        residual,
        out,
        out_sum,
        scale,
        amax,
        functors,
    )
    options = (
        False,  # centered
        extents_of(normalized_shape),
        eps,
        zero_centered_weight,
        out_dtype,
        round_x_hat,
        quantization(out_dtype, scale, amax, power_of_two, transpose),
        checked_launch(launch),
        False,  # memory_efficient
    )
    return call(operands, options, return_residual)


@names_what_was_removed
def layer_norm_forward(
    input: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | tuple[Array | None, Array | None] | None = None,
    round_x_hat: bool = False,
    scale: Array | str | None = None,
    amax: Array | None = None,
    power_of_two: bool = False,
    transpose: bool = False,
    fuse: Fuse = (),
    launch: Launch | None = None,
) -> Forward:
    """layer_norm that also returns what backward needs, outside any autograd.

    Examples:
        >>> result = cupynorm.layer_norm_forward(np.array([[1.0, 3.0]]), 2, eps=0.0)
        >>> result.y, result.mean, result.rstd
        (array([[-1.,  1.]]), array([2.]), array([1.]))

    All arguments, with their shapes and dtypes, as for layer_norm.

    fuse: as for layer_norm, with a seed for those that need one. With functors on x, sum is what
        they make, rounded to the input's dtype, also without a residual.

    Returns Forward(y, mean, rstd, sum), which says shapes and dtypes.
    Raises as layer_norm.
    """
    outs = pair_of(out) if isinstance(out, tuple) else (out, None)
    operands = ForwardOperands(
        *(input, weight, bias, residual, *outs, scale, amax),
        bind_functors(fuse),
    )
    options = ForwardOptions(
        True,  # centered
        extents_of(normalized_shape),
        eps,
        zero_centered_weight,
        out_dtype,
        round_x_hat,
        quantization(out_dtype, scale, amax, power_of_two, transpose),
        checked_launch(launch),
    )
    return explicit_forward(with_checked_options(ForwardRequest(operands, options)))


@names_what_was_removed
def rms_norm_forward(
    input: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | tuple[Array | None, Array | None] | None = None,
    round_x_hat: bool = False,
    scale: Array | str | None = None,
    amax: Array | None = None,
    power_of_two: bool = False,
    transpose: bool = False,
    fuse: Fuse = (),
    launch: Launch | None = None,
) -> Forward:
    """rms_norm that also returns what backward needs, outside any autograd.

    Examples:
        >>> cupynorm.rms_norm_forward(np.array([[3.0, 4.0]]), 2).rstd.round(3)
        array([0.283])

    eps: as for rms_norm; all other arguments as for layer_norm_forward.

    Returns Forward(y, None, rstd, sum), as layer_norm_forward, and raises as it.
    """
    outs = pair_of(out) if isinstance(out, tuple) else (out, None)
    operands = ForwardOperands(
        *(input, weight, bias, residual, *outs, scale, amax),
        bind_functors(fuse),
    )
    options = ForwardOptions(
        False,  # centered
        extents_of(normalized_shape),
        eps,
        zero_centered_weight,
        out_dtype,
        round_x_hat,
        quantization(out_dtype, scale, amax, power_of_two, transpose),
        checked_launch(launch),
    )
    return explicit_forward(with_checked_options(ForwardRequest(operands, options)))
