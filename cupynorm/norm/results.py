"""What the explicit forwards and backwards return."""

from __future__ import annotations

from typing import NamedTuple

from .request import Array


class Forward(NamedTuple):
    """What a forward returns. y has the input's shape; mean and rstd have the leading shape.

    mean and rstd are float32, float64 for float64 input; mean is None for rms_norm. sum is input +
    residual in the input's dtype, or the input itself where there is no residual.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array


class FusedForward(NamedTuple):
    """What a forward with fused options returns: the fields of Forward and what backward needs.

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
    """The gradients that were requested, None for the others. dx is also that of the residual."""

    dx: Array | None
    dweight: Array | None
    dbias: Array | None


class FusedBackward(NamedTuple):
    """The gradients of a forward with fused options, None for those not requested.

    dx is that of the input alone.
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dresidual: Array | None
    dweight1: Array | None
    dbias1: Array | None


class Gradients(NamedTuple):
    """What one backward kernel gives. y is None unless it was recomputed."""

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dresidual: Array | None = None
    y: Array | None = None


GRADIENTS = Gradients._fields[:4]
