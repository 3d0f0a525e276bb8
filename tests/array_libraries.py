"""NumPy, torch and CuPy behind one interface, and the public calls run through each of them."""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm.dtypes import compute_dtype
from cupynorm.gpu import arrays
from cupynorm.verify.cases import Problem


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


def loaded_torch():
    return pytest.importorskip("torch")


class NumPy:
    is_torch, on_host = False, True

    def put(self, values: np.ndarray, dtype: str):
        return arrays.from_float64(np.asarray(values, np.float64), dtype, np.empty(0))

    def get(self, array) -> np.ndarray:
        return arrays.to_float64(array)


class Torch:
    is_torch = True

    def __init__(self, device: str) -> None:
        self.torch = loaded_torch()
        self.device = device
        self.on_host = device == "cpu"

    def put(self, values: np.ndarray, dtype: str):
        return arrays.from_float64(np.asarray(values, np.float64), dtype, self.torch.empty(0)).to(
            self.device
        )

    def get(self, array) -> np.ndarray:
        return array.detach().double().cpu().numpy()


class CuPy:
    is_torch, on_host = False, False

    def put(self, values: np.ndarray, dtype: str):
        import cupy

        return cupy.asarray(NumPy().put(values, dtype))

    def get(self, array) -> np.ndarray:
        return NumPy().get(array.get())


def library(name: str) -> NumPy | Torch | CuPy:
    return {
        "numpy": NumPy,
        "torch": lambda: Torch("cpu"),
        "cupy": CuPy,
        "torch-cuda": lambda: Torch("cuda"),
    }[name]()


GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", "torch-cuda")]
LIBRARIES = [pytest.param("numpy"), pytest.param("torch"), *GPU]
TORCH = [pytest.param("torch"), GPU[1]]


def api(norm_name: str, direction: str):
    return getattr(cupynorm, f"{norm_name}_{direction}")


def api_results(problem: Problem, lib) -> dict[str, np.ndarray]:
    """What the public forward and backward return for a problem, as float64."""
    case = problem.case
    centered = case.norm == "layer_norm"

    def put(name: str, dtype: str | None):
        values = getattr(problem, name)
        return None if values is None else lib.put(values, dtype)

    x, dy, residual = put("x", case.x), put("dy", case.dtype("y")), put("residual", case.added)
    weight, bias = put("weight", case.dtype("weight")), put("bias", case.dtype("bias"))
    forward = api(case.norm, "forward")(
        x,
        case.num_cols,
        weight,
        bias=bias,
        eps=case.eps,
        residual=residual,
        zero_centered_weight=case.zero_centered_weight,
        round_x_hat=case.round_x_hat,
        out_dtype=case.y,
        launch=cupynorm.Launch(case.strategy, statistics=case.statistics),
    )
    statistics = (forward.mean, forward.rstd) if centered else (forward.rstd,)
    own = {}
    if case.has_own_sum:
        own = {"gradients": ("dx", "dweight", "dbias", "dresidual"), "dx_dtype": case.x}
        own["dresidual_dtype"] = case.added
    backward = api(case.norm, "backward")(
        dy,
        forward.sum,
        case.num_cols,
        *statistics,
        weight,
        zero_centered_weight=case.zero_centered_weight,
        launch=cupynorm.Launch(case.strategy),
        dbias_dtype=case.dtype("bias"),
        dsum=put("dsum", case.sum),
        **own,
    )
    assert arrays.dtype_name(forward.rstd) == compute_dtype(case.sum).name
    results = {"y": forward.y, "rstd": forward.rstd, "dx": backward.dx}
    results |= {"mean": forward.mean} if centered else {}
    results |= {"dweight": backward.dweight} if weight is not None else {}
    results |= {"dbias": backward.dbias} if bias is not None else {}
    results |= {"sum": forward.sum} if residual is not None else {}
    results |= {"dresidual": backward.dresidual} if own else {}
    return {name: lib.get(value) for name, value in results.items()}
