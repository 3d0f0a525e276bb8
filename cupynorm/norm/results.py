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

    y: of the input's shape and dtype, or of out_dtype.
    mean, rstd: of the leading shape, float32, float64 for
        float64 input. mean is None for rms_norm.
    sum: input + residual in the input's dtype, or the input itself where there is no residual.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array


class FusedForward(NamedTuple):
    """What a forward with fused options returns: the fields of Forward and what backward needs.

    Examples:
        >>> x = np.ones((1, 4))
        >>> result = cupynorm.layer_norm_forward(x, 4, dropout_p=0.5, dropout_seed=7)
        >>> result.sum, result.dropout_seed
        (array([[2., 2., 0., 0.]]), 7)

    y: as in Forward; a QuantizedTensor for an out_dtype of 8 bits.
    sum: what was normalised, in residual_dtype or else the input's dtype.
    mean, rstd: as in Forward, but float64 only if sum is float64.
    dropout_seed: the seed as given or drawn, None without dropout.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array
    dropout_seed: Array | int | None


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
    """The gradients of a forward with fused options, None for those not requested.

    Examples:
        >>> x, twice = np.array([[3.0, 4.0]]), np.array([2.0])
        >>> saved = cupynorm.rms_norm_forward(x, 2, row_scale=twice, eps=0.0)
        >>> dy = np.array([[1.0, 0.0]])
        >>> result = cupynorm.rms_norm_backward(dy, saved.sum, 2, saved.rstd, row_scale=twice)
        >>> type(result).__name__, result.dx.round(3)
        ('FusedBackward', array([[ 0.181, -0.136]]))

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
