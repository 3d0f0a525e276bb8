"""LayerNorm, RMSNorm, the linear layer after them, dropout, 8-bit floats and ranks in NumPy.

Every kernel is checked against these functions. They import only NumPy.

Examples:
    >>> cupynorm.reference.layer_norm(np.array([[1.0, 3.0]]), eps=0.0).y
    array([[-1.,  1.]])
"""

from . import fp8, parallel
from .dropout import dropout_mask
from .layer_norm import Gradients, Normalized, layer_norm, layer_norm_backward
from .layer_norm_linear import (
    Folded,
    Projected,
    ProjectedGradients,
    fold,
    norm_linear,
    norm_linear_backward,
)
from .rms_norm import rms_norm, rms_norm_backward

__all__ = [
    "Folded",
    "Gradients",
    "Normalized",
    "Projected",
    "ProjectedGradients",
    "dropout_mask",
    "fold",
    "fp8",
    "layer_norm",
    "layer_norm_backward",
    "norm_linear",
    "norm_linear_backward",
    "parallel",
    "rms_norm",
    "rms_norm_backward",
]
