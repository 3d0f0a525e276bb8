"""layer_norm, rms_norm and their explicit forwards and backwards: what users call.

A tensor goes on in nn/autograd.py, any other array in norm/calls.py. docs/design.md, "One call",
lists the steps from here to the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from .dispatch.functor_text import Fuse
from .gpu import arrays
from .norm import calls
from .norm.checks import (
    bind_functors,
    check_differentiable,
    check_seeds_given,
    extents_of,
    fields_of_forward,
    gradient_names,
    names_what_was_removed,
)
from .norm.request import (
    Array,
    Backward,
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    Forward,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    FusedBackward,
    Launch,
    checked_launch,
    is_plain,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .norm.quantized import QuantizedTensor
    from .norm.request import Quantize

    In8Bits = Quantize | Literal["float8_e4m3fn", "float8_e5m2", "int8"]

T = TypeVar("T")  # the input's type: results are of its library
Shape = int | Sequence[int]
Outs = tuple[Array | None, Array | None]
Operand = Array | None


class NormOptions(TypedDict, total=False):
    """Keywords on which the type of what layer_norm and rms_norm return does not depend."""

    residual: Array | None
    zero_centered_weight: bool
    round_x_hat: bool
    out: Array | Outs | None
    fuse: Fuse
    launch: Launch | None


# fmt: off
@overload
def layer_norm(
    input: T, normalized_shape: Shape, weight: Operand = ..., bias: Operand = ...,
    eps: float = ..., *, return_residual: Literal[False] = ...,
    out_dtype: In8Bits, **options: Unpack[NormOptions],
) -> QuantizedTensor: ...
@overload
def layer_norm(
    input: T, normalized_shape: Shape, weight: Operand = ..., bias: Operand = ...,
    eps: float = ..., *, return_residual: Literal[True],
    out_dtype: In8Bits, **options: Unpack[NormOptions],
) -> tuple[QuantizedTensor, T]: ...
@overload
def layer_norm(
    input: T, normalized_shape: Shape, weight: Operand = ..., bias: Operand = ...,
    eps: float = ..., *, return_residual: Literal[False] = ...,
    out_dtype: Any = ..., **options: Unpack[NormOptions],
) -> T: ...
@overload
def layer_norm(
    input: T, normalized_shape: Shape, weight: Operand = ..., bias: Operand = ...,
    eps: float = ..., *, return_residual: Literal[True],
    out_dtype: Any = ..., **options: Unpack[NormOptions],
) -> tuple[T, T]: ...
@overload
def layer_norm(
    input: T, normalized_shape: Shape, weight: Operand = ..., bias: Operand = ...,
    eps: float = ..., *, return_residual: bool,
    out_dtype: Any = ..., **options: Unpack[NormOptions],
) -> Any: ...
# fmt: on
@names_what_was_removed
def layer_norm(
    input: Array,
    normalized_shape: Shape,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    round_x_hat: bool = False,
    out: Array | Outs | None = None,
    out_dtype: Any = None,
    fuse: Fuse = (),
    launch: Launch | None = None,
) -> Any:
    """Layer normalisation over the last dimensions (Ba, Kiros, Hinton 2016).

    y = (x - mean) / sqrt(var + eps) * weight + bias; gradients: cupynorm.reference.layer_norm.

    Examples:
        >>> x = np.array([[1.0, 2.0, 3.0, 6.0]])  # or a CuPy array
        >>> cupynorm.layer_norm(x, 4).round(3)
        array([[-1.069, -0.535,  0.   ,  1.604]])
        >>> t = torch.tensor([[1.0, 2.0, 3.0, 6.0]], requires_grad=True)
        >>> cupynorm.layer_norm(t, 4)[0, 3].backward()
        >>> t.grad.numpy().round(3)
        array([[ 0.095, -0.019, -0.134,  0.057]], dtype=float32)

    input: shape (..., *normalized_shape), of float16, bfloat16, float32 or float64, in any strides.
        A CuPy array, a torch tensor, a NumPy array or any object with `__dlpack__`.
    normalized_shape: an int or the trailing shape to normalise over.
    weight, bias: shape normalized_shape, of any of the four dtypes; None: left out.
    eps: added to the variance.
    residual: of the input's shape and any of the four dtypes. What is normalised is input +
        residual, rounded once to the residual's dtype.
    return_residual: also return that sum; without a residual it is the input itself.
    zero_centered_weight: multiply by 1 + weight.
    round_x_hat: round x_hat to a 16-bit input's dtype before the weight multiplies it, as Hugging
        Face's Llama does. Gradients are those without that rounding.
    out: an array for y, or (y, sum), of the input's shape with contiguous rows. y may be the input
        and sum the residual, in place. Else they share no memory with what is read.
    out_dtype: dtype of y, by default the input's. With a cupynorm.Quantize (or the name of its
        dtype) y is a cupynorm.types.QuantizedTensor, whose dequantize() gradients flow through.
    fuse: a functor, or a tuple of them in their order (cupynorm.functors, cupynorm.functor). Those
        on x apply before the residual is added, those on y before y is rounded.
    launch: a cupynorm.Launch. None: the width of a row decides.

    Returns y of the input's shape in the input's library (CuPy for `__dlpack__`), or (y, sum). A
    torch tensor is differentiable in input, weight, bias, residual and arrays of functors.
    Arithmetic is in float32 (float64 where the sum is) with one rounding. On the CPU it is the
    float64 reference. docs/calls.md has more on dtypes, autograd, DTensors and special values.

    Raises ValueError or TypeError, before anything is launched, for arguments that do not fit;
    cupynorm.MissingLibraryError for an input on a GPU without CuPy or NVRTC.
    """
    tensors = input, weight, bias, residual
    options = eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, False
    return _norm(True, normalized_shape, tensors, options, return_residual)


# fmt: off
@overload
def rms_norm(
    input: T, normalized_shape: Shape, weight: Operand = ...,
    eps: float | None = ..., *, bias: Operand = ..., return_residual: Literal[False] = ...,
    out_dtype: In8Bits, **options: Unpack[NormOptions],
) -> QuantizedTensor: ...
@overload
def rms_norm(
    input: T, normalized_shape: Shape, weight: Operand = ...,
    eps: float | None = ..., *, bias: Operand = ..., return_residual: Literal[True],
    out_dtype: In8Bits, **options: Unpack[NormOptions],
) -> tuple[QuantizedTensor, T]: ...
@overload
def rms_norm(
    input: T, normalized_shape: Shape, weight: Operand = ...,
    eps: float | None = ..., *, bias: Operand = ..., return_residual: Literal[False] = ...,
    out_dtype: Any = ..., **options: Unpack[NormOptions],
) -> T: ...
@overload
def rms_norm(
    input: T, normalized_shape: Shape, weight: Operand = ...,
    eps: float | None = ..., *, bias: Operand = ..., return_residual: Literal[True],
    out_dtype: Any = ..., **options: Unpack[NormOptions],
) -> tuple[T, T]: ...
@overload
def rms_norm(
    input: T, normalized_shape: Shape, weight: Operand = ...,
    eps: float | None = ..., *, bias: Operand = ..., return_residual: bool,
    out_dtype: Any = ..., **options: Unpack[NormOptions],
) -> Any: ...
# fmt: on
@names_what_was_removed
def rms_norm(
    input: Array,
    normalized_shape: Shape,
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    round_x_hat: bool = False,
    out: Array | Outs | None = None,
    out_dtype: Any = None,
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

    All other arguments, with their shapes and dtypes, as for layer_norm. Returns y, or (y, sum), as
    layer_norm, and raises as it.
    """
    tensors = input, weight, bias, residual
    options = eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, False
    return _norm(False, normalized_shape, tensors, options, return_residual)


@names_what_was_removed
def layer_norm_forward(
    input: Array,
    normalized_shape: Shape,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    round_x_hat: bool = False,
    out: Array | Outs | None = None,
    out_dtype: Any = None,
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
    tensors = input, weight, bias, residual
    options = eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, False
    return _norm_forward(True, normalized_shape, tensors, options)


@names_what_was_removed
def rms_norm_forward(
    input: Array,
    normalized_shape: Shape,
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    round_x_hat: bool = False,
    out: Array | Outs | None = None,
    out_dtype: Any = None,
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
    tensors = input, weight, bias, residual
    options = eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, False
    return _norm_forward(False, normalized_shape, tensors, options)


@names_what_was_removed
def layer_norm_backward(
    dy: Array,
    x: Array,
    normalized_shape: int | Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    zero_centered_weight: bool = False,
    dsum: Array | None = None,
    gradients: Sequence[str] = ("dx", "dweight", "dbias"),
    dx_dtype: Any = None,
    dweight_dtype: Any = None,
    dbias_dtype: Any = None,
    dresidual_dtype: Any = None,
    fuse: Fuse = (),
    input: Array | None = None,
    launch: Launch | None = None,
) -> Backward | FusedBackward:
    """Gradients of layer_norm at x (derivation: cupynorm.reference.layer_norm).

    Examples:
        >>> result = cupynorm.layer_norm_forward(x := np.array([[1.0, 2.0, 6.0]]), 3)
        >>> cupynorm.layer_norm_backward(x, x, 3, result.mean, result.rstd).dweight.round(3)
        array([-0.926, -0.926,  8.332])

    The order is that of torch.ops.aten.native_layer_norm_backward.

    dy: gradient of y, of x's shape, in any of the four dtypes.
    x: what was normalised (Forward.sum).
    normalized_shape, weight, zero_centered_weight, launch: as for layer_norm.
    mean, rstd: as layer_norm_forward returned them, of x's leading shape, in float32 (float64 for
        float64). x_hat is (x - mean) * rstd with these values.
    bias: that of the forward; functors on y need it.
    dsum: gradient that reaches the returned sum from elsewhere; it is added to dx.
    gradients: which to compute. The others are None and cost nothing.
    dx_dtype, dresidual_dtype: the dtypes of the forward's input and residual, by default x's.
    dweight_dtype, dbias_dtype: by default weight's dtype, or x's without a weight.
    fuse: as in the forward, with the same seeds.
    input: that of the forward; functors on x whose backward lines read x need it.

    Returns Backward(dx, dweight, dbias), the last two of normalized_shape. With fuse, dx_dtype,
    dresidual_dtype, or "dresidual" or "functors" among the gradients, returns FusedBackward, whose
    dx is that of the input; dsum is added to dx and dresidual before they are rounded. Sums over
    rows have a fixed order and repeat to the bit. Raises as layer_norm.
    """
    tensors = dy, x, mean, rstd, weight, dsum, bias, input
    dtypes = dx_dtype, dweight_dtype, dbias_dtype, dresidual_dtype
    options = zero_centered_weight, gradient_names(gradients), *dtypes
    return _norm_backward(True, normalized_shape, tensors, options, fuse, launch)


@names_what_was_removed
def rms_norm_backward(
    dy: Array,
    x: Array,
    normalized_shape: int | Sequence[int],
    rstd: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    zero_centered_weight: bool = False,
    dsum: Array | None = None,
    gradients: Sequence[str] = ("dx", "dweight", "dbias"),
    dx_dtype: Any = None,
    dweight_dtype: Any = None,
    dbias_dtype: Any = None,
    dresidual_dtype: Any = None,
    fuse: Fuse = (),
    input: Array | None = None,
    launch: Launch | None = None,
) -> Backward | FusedBackward:
    """Gradients of rms_norm at x, for the rstd that rms_norm_forward returned.

    Examples:
        >>> rstd = cupynorm.rms_norm_forward(x := np.array([[3.0, 4.0]]), 2).rstd
        >>> cupynorm.rms_norm_backward(np.array([[1.0, 0.0]]), x, 2, rstd).dx.round(3)
        array([[ 0.181, -0.136]])

    dy, x, normalized_shape, rstd: as for layer_norm_backward, like all other arguments.

    Returns Backward or FusedBackward, as layer_norm_backward, and raises as it.
    """
    tensors = dy, x, None, rstd, weight, dsum, bias, input
    dtypes = dx_dtype, dweight_dtype, dbias_dtype, dresidual_dtype
    options = zero_centered_weight, gradient_names(gradients), *dtypes
    return _norm_backward(False, normalized_shape, tensors, options, fuse, launch)


# The way to the launch.

_autograd: Any = None  # set at the first tensor: an import statement takes 0.4 us in each call


def _of_torch() -> Any:
    """The module cupynorm.nn.autograd."""
    global _autograd
    if _autograd is None:
        import cupynorm.nn.autograd as autograd

        _autograd = autograd
        return autograd  # torch.compile may not see yet what was just assigned
    return _autograd


def _norm(
    centered: bool, normalized_shape: object, tensors: tuple, options: tuple, return_residual: bool
) -> Any:
    """What layer_norm and rms_norm return. tensors, options: as fields_of_forward takes them."""
    if arrays.is_torch(tensors[0]):
        return _of_torch().norm(centered, normalized_shape, tensors, options, return_residual)
    operands, options = fields_of_forward(
        centered, normalized_shape, tensors, options, return_residual
    )
    request = ForwardRequest(ForwardOperands(*operands), ForwardOptions(*options))
    y, _, _, added = calls.forward(request, calls.FOR_Y)
    return (y, added) if return_residual else y


def _norm_forward(
    centered: bool, normalized_shape: object, tensors: tuple, options: tuple
) -> Forward:
    operands, options = fields_of_forward(centered, normalized_shape, tensors, options)
    request = ForwardRequest(ForwardOperands(*operands), ForwardOptions(*options))
    if arrays.is_torch(operands[0]):
        if operands[0].is_meta and is_plain(request):
            return Forward(*_of_torch().forward_of_meta(request))
        _refuse_jit_trace()
    functors = request.operands.functors
    if functors is not None:
        check_seeds_given(functors)
    return calls.forward(request)


_PLAIN_GRADIENTS = frozenset(Backward._fields)


def _norm_backward(
    centered: bool,
    normalized_shape: object,
    tensors: tuple,
    options: tuple,
    fuse: Fuse,
    launch: Launch | None,
) -> Backward | FusedBackward:
    """tensors, options: the first fields of BackwardOperands, and of BackwardOptions after two."""
    functors = bind_functors(fuse)
    extents, launch = extents_of(normalized_shape), checked_launch(launch)
    operands = BackwardOperands(*tensors, functors)
    options = BackwardOptions(centered, extents, *options, launch=launch)
    if arrays.is_torch(operands.x):
        _refuse_jit_trace()
    wanted = options.gradients
    is_fused = (
        options.dx_dtype is not None
        or options.dresidual_dtype is not None
        or not _PLAIN_GRADIENTS.issuperset(wanted)
    )
    if functors is None:
        prepared, operands = calls.prepare_backward(BackwardRequest(operands, options))
        made = prepared.run(operands)
        return FusedBackward(*made[:4]) if is_fused else Backward(*made[:3])
    check_differentiable(functors)
    check_seeds_given(functors)
    named = functors.named_arrays() if "functors" in wanted else ()
    options = options._replace(
        gradients=wanted if "dx" in wanted else ("dx", *wanted),
        functor_gradients=tuple(name for name, _, _ in named),
    )
    made = calls.backward(BackwardRequest(operands, options))
    dx = made.dx if "dx" in wanted else None
    return FusedBackward(dx, *made[1:4], made.functors)


def _refuse_jit_trace() -> None:
    """Raises NotImplementedError where torch.jit.trace would record the result as a constant."""
    if _of_torch().is_recorded_by_jit():
        raise NotImplementedError(
            "torch.jit.trace was asked to record an explicit forward or backward; expected "
            "layer_norm, rms_norm, layer_norm_linear or rms_norm_linear"
        )
