"""What the explicit forwards and backwards return."""

from __future__ import annotations

from typing import NamedTuple

from .request import Array


class Forward(NamedTuple):
    """What a forward returns. y has the input's shape; mean and rstd have the leading shape.

    mean and rstd are float32, float64 for float64 input; mean is None for rms_norm. sum is input +
    residual in the input's dtype, or the input itself where there is no residual.

    Examples:
        >>> x = np.array([[1.0, 3.0]])
        >>> made = cupynorm.layer_norm_forward(x, residual=x)
        >>> made.sum, made.mean
        (array([[2., 6.]]), array([4.]))
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array


class FusedForward(NamedTuple):
    """What a forward with fused options returns: the fields of Forward and what backward needs.

    Examples:
        >>> x = np.ones((1, 4))
        >>> made = cupynorm.layer_norm_forward(x, dropout_p=0.5, dropout_seed=7)
        >>> made.sum, made.dropout_seed
        (array([[2., 2., 0., 0.]]), 7)

    sum is what was normalised, in residual_dtype or else the input's dtype; mean and rstd are
    float64 if it is float64. y1 is None without weight1 or bias1. dropout_seed is the seed as given
    or drawn, None without dropout.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array
    y1: Array | None
    dropout_seed: Array | int | None


class Backward(NamedTuple):
    """The gradients that were requested, None for the others. dx is also that of the residual.

    Examples:
        >>> x = np.array([[1.0, 3.0]])
        >>> made = cupynorm.layer_norm_forward(x, eps=0.0)
        >>> cupynorm.layer_norm_backward(x, x, made.mean, made.rstd, gradients=("dweight", "dbias"))
        Backward(dx=None, dweight=array([-1.,  3.]), dbias=array([1., 3.]))
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None


class FusedBackward(NamedTuple):
    """The gradients of a forward with fused options, None for those not requested.

    dx is that of the input alone.

    Examples:
        >>> x, twice = np.array([[3.0, 4.0]]), np.array([2.0])
        >>> made = cupynorm.rms_norm_forward(x, row_scale=twice, eps=0.0)
        >>> dy = np.array([[1.0, 0.0]])
        >>> got = cupynorm.rms_norm_backward(dy, made.sum, made.rstd, row_scale=twice)
        >>> type(got).__name__, got.dx.round(3)
        ('FusedBackward', array([[ 0.181, -0.136]]))
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dresidual: Array | None
    dweight1: Array | None
    dbias1: Array | None


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


GRADIENTS = Gradients._fields[:4]
