"""What the explicit forwards and backwards return."""

from __future__ import annotations

from typing import NamedTuple

from .request import Array


class Forward(NamedTuple):
    """What layer_norm_forward and rms_norm_forward return.

    Examples:
        >>> x = np.array([[1.0, 3.0]])
        >>> result = cupynorm.layer_norm_forward(x, 2, residual=x)
        >>> result.sum, result.mean
        (array([[2., 6.]]), array([4.]))

    y: of the input's shape and dtype, or of out_dtype; a QuantizedTensor for one of 8 bits.
    mean, rstd: of the leading shape, float32, float64 for a float64 sum. mean is None for rms_norm.
    sum: what was normalised: input + residual in the residual's dtype. Without a residual the input
        itself; with functors on x, what they make, rounded to the input's dtype.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array


class Backward(NamedTuple):
    """The gradients that were requested, None for the others.

    Examples:
        >>> x = np.array([[1.0, 3.0]])
        >>> saved = cupynorm.layer_norm_forward(x, 2, eps=0.0)
        >>> wanted = ("dweight", "dbias")
        >>> cupynorm.layer_norm_backward(x, x, 2, saved.mean, saved.rstd, gradients=wanted)
        Backward(dx=None, dweight=array([-1.,  3.]), dbias=array([1., 3.]))

    dx: of the shape and dtype of x. It is also the gradient of the residual.
    dweight, dbias: of normalized_shape, summed over rows, in the dtype of the weight (of x without
        one) unless dweight_dtype or dbias_dtype says otherwise.
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None


class FusedBackward(NamedTuple):
    """The gradients of a forward with functors or mixed dtypes, None for those not requested.

    Examples:
        >>> x, residual = np.array([[3.0, 4.0]], np.float32), np.array([[0.0, 0.0]])
        >>> saved = cupynorm.rms_norm_forward(x, 2, residual=residual, eps=0.0)
        >>> dy = np.array([[1.0, 0.0]])
        >>> result = cupynorm.rms_norm_backward(dy, saved.sum, 2, saved.rstd, dx_dtype="float32")
        >>> type(result).__name__, result.dx.round(3)
        ('FusedBackward', array([[ 0.181, -0.136]], dtype=float32))

    dx: that of the input alone, of the shape of x, in dx_dtype or else the dtype of x.
    dweight, dbias: as in Backward.
    dresidual: that of the residual, of the shape of x, in dresidual_dtype or else the dtype of x.
    functors: those of the functors' arrays, in their shapes and dtypes, if "functors" was among the
        gradients: of functors on x, then of those on y.
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dresidual: Array | None
    functors: tuple[Array, ...] = ()


class Gradients(NamedTuple):
    """What one backward kernel gives. y is None unless it was recomputed.

    functors: the gradients of the functors' arrays that are wanted, in their order.
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dresidual: Array | None = None
    y: Array | None = None
    functors: tuple[Array, ...] = ()


GRADIENTS = FusedBackward._fields
