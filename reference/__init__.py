"""LayerNorm and RMSNorm in NumPy float64: the truth that every kernel is held to. Imports nothing but NumPy."""

from .dropout import dropout_mask, scaled
from .layer_norm import Gradients, Normalized, layer_norm, layer_norm_backward, x_hat_of
from .rms_norm import rms_norm, rms_norm_backward

__all__ = [
    "Gradients",
    "Normalized",
    "dropout_mask",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "scaled",
    "x_hat_of",
]
