"""layer_norm, rms_norm and their explicit forward: what users call. backward.py has the backward.

Each function passes its arguments to route.py. docs/design.md, "One call", lists the steps from
here to the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from ..plan.functor_text import Fuse
from .launch_choice import Launch
from .options import names_what_was_removed
from .request import Array
from .results import Forward
from .route import call

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .eight_bits import Quantize
    from .quantized_tensor import QuantizedTensor

    In8Bits = Quantize | Literal["float8_e4m3fn", "float8_e5m2", "int8"]

T = TypeVar("T")  # the input's type: results are of its library
Shape = int | Sequence[int]
Outs = tuple[Array | None, Array | None]


class NormOptions(TypedDict, total=False):
    """Keywords on which the type of what layer_norm and rms_norm return does not depend."""

    residual: Array | None
    zero_centered_weight: bool
    round_x_hat: bool
    out: Array | Outs | None
    fuse: Fuse
    launch: Launch | None


@overload
def layer_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    return_residual: Literal[False] = False,
    out_dtype: In8Bits,
    **options: Unpack[NormOptions],
) -> QuantizedTensor: ...
@overload
def layer_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    return_residual: Literal[True],
    out_dtype: In8Bits,
    **options: Unpack[NormOptions],
) -> tuple[QuantizedTensor, T]: ...
@overload
def layer_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    return_residual: Literal[False] = False,
    out_dtype: Any = None,
    **options: Unpack[NormOptions],
) -> T: ...
@overload
def layer_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    return_residual: Literal[True],
    out_dtype: Any = None,
    **options: Unpack[NormOptions],
) -> tuple[T, T]: ...
@overload
def layer_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    return_residual: bool,
    out_dtype: Any = None,
    **options: Unpack[NormOptions],
) -> Any: ...
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
        A CuPy array, a torch tensor, a NumPy array or any object with __dlpack__.
    normalized_shape: an int or the trailing shape to normalise over.
    weight, bias: shape normalized_shape, of any of the four dtypes; None: left out.
    eps: added to the variance.
    residual: of the input's shape and any of the four dtypes. What is normalised is input +
        residual, rounded once to the residual's dtype.
    return_residual: also return that sum.
    zero_centered_weight: multiply by 1 + weight.
    round_x_hat: round x_hat to a 16-bit input's dtype before the weight multiplies it, as Hugging
        Face's Llama does. Gradients are those without that rounding.
    out: an array for y, or (y, sum), of the input's shape with contiguous rows. y may be the input
        and sum the residual, in place. Else they share no memory with what is read.
    out_dtype: dtype of y, by default the input's. With a cupynorm.Quantize (or the name of its
        dtype) y is a cupynorm.QuantizedTensor, whose dequantize() gradients flow through.
    fuse: a functor, or a tuple of them in their order (cupynorm.functors, cupynorm.functor). Those
        on x apply before the residual is added, those on y before y is rounded.
    launch: a cupynorm.Launch. None: the width of a row decides.

    Returns y of the input's shape in the input's library (CuPy for __dlpack__), or (y, sum). A
    torch tensor is differentiable in input, weight, bias, residual and arrays of functors.
    Arithmetic is in float32 (float64 where the sum is) with one rounding. On the CPU it is the
    float64 reference. docs/calls.md has more on dtypes, autograd, DTensors and special values.

    Raises ValueError or TypeError, before anything is launched, for arguments that do not fit;
    cupynorm.MissingLibraryError for an input on a GPU without CuPy or NVRTC.
    """
    arrays = input, weight, bias, residual
    options = eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, False
    return call(True, normalized_shape, arrays, options, return_residual)


@overload
def rms_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    return_residual: Literal[False] = False,
    out_dtype: In8Bits,
    **options: Unpack[NormOptions],
) -> QuantizedTensor: ...
@overload
def rms_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    return_residual: Literal[True],
    out_dtype: In8Bits,
    **options: Unpack[NormOptions],
) -> tuple[QuantizedTensor, T]: ...
@overload
def rms_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    return_residual: Literal[False] = False,
    out_dtype: Any = None,
    **options: Unpack[NormOptions],
) -> T: ...
@overload
def rms_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    return_residual: Literal[True],
    out_dtype: Any = None,
    **options: Unpack[NormOptions],
) -> tuple[T, T]: ...
@overload
def rms_norm(
    input: T,
    normalized_shape: Shape,
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    return_residual: bool,
    out_dtype: Any = None,
    **options: Unpack[NormOptions],
) -> Any: ...
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
    arrays = input, weight, bias, residual
    options = eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, False
    return call(False, normalized_shape, arrays, options, return_residual)


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
    arrays = input, weight, bias, residual
    options = eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, False
    return call(True, normalized_shape, arrays, options, Forward)


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
    arrays = input, weight, bias, residual
    options = eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, False
    return call(False, normalized_shape, arrays, options, Forward)
