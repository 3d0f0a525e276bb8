"""Activations of a pretrained model, to check kernels on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..dtypes import decode, encode
from .cases import Case, Problem


class Activations(NamedTuple):
    """The float64 values of one norm. x, dy: [num_rows, num_cols]. weight, bias: [num_cols]."""

    name: str
    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    eps: float

    def problem(self, norm: str, dtype: str) -> Problem:
        """A problem of the gradient check for norm, "layer_norm" or "rms_norm".

        dtype: that all tensors are rounded to.
        """
        case = Case(norm, *self.x.shape, dtype, eps=self.eps)
        return Problem(case, *(decode(encode(values, dtype), dtype) for values in self[1:5]))


def shipped() -> list[Activations]:
    """One row of a LayerNorm of a pretrained sentence encoder, with its gradient and weights.

    384 columns, float32. Unlike random numbers it has an outlier of 16 standard deviations, a
    weight of 5e-33 and an eps of 1e-12.
    """
    loaded = np.load(Path(__file__).parents[1] / "data" / "minilm_layer_norms.npz")
    arrays = {name.partition("/")[2]: values.astype(np.float64) for name, values in loaded.items()}
    return [Activations("layer5_output", **arrays | {"eps": float(arrays["eps"])})]
