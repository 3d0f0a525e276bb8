"""Inputs of modules, and the devices and margins of their tests."""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm.gpu import arrays

torch = pytest.importorskip("torch")

PAIRS = [(cupynorm.LayerNorm, torch.nn.LayerNorm), (cupynorm.RMSNorm, torch.nn.RMSNorm)]
BOTH = pytest.mark.parametrize("ours, theirs", PAIRS, ids=["LayerNorm", "RMSNorm"])
MARGINS = {"forward": 32, "backward": 64, "inference": 96}
DEVICES_HERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensor(values: np.ndarray, dtype: str, device: str = "cpu") -> torch.Tensor:
    return arrays.from_float64(values, dtype, torch.empty(0)).to(device)


def random_input(*shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    return tensor(np.random.default_rng(seed).standard_normal(shape) + 0.5, dtype)
