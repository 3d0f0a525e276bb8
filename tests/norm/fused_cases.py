"""Cases of fused options, their operands as arrays, and the check of their results."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.gpu import arrays
from cupynorm.verify.cases import Case, Problem
from cupynorm.verify.results import CheckResult, judge_all

torch = pytest.importorskip("torch")

DEVICES_HERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensor(values: np.ndarray, dtype: str, device: str = "cpu") -> torch.Tensor:
    return arrays.from_float64(values, dtype, torch.empty(0)).to(device)


def numbers(tensor) -> np.ndarray:
    return (
        tensor.detach().double().cpu().numpy()
        if arrays.is_torch(tensor)
        else arrays.to_float64(tensor)
    )


def random(*shape: int, dtype=torch.float64, seed=0) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).to(dtype)


def options_of(problem: Problem, put) -> dict:
    """Keywords of the public calls."""
    case = problem.case
    names = ("round_x_hat", "zero_centered_weight")
    options = {name: getattr(case, name) for name in names} | {"out_dtype": case.y}
    if problem.residual is not None:
        options["residual"] = put(problem.residual, case.added)
    return options


def assert_right(problem: Problem, results: dict) -> None:
    result = CheckResult(
        judge_all(problem, {name: numbers(value) for name, value in results.items()})
    )
    assert len(result.findings) == len(results)
    assert result.ok, f"\n{result}"


CASES = {
    "a stream of float32": Case("layer_norm", 6, 40, "bfloat16", residual="float32", dsum=True),
    "a stream of the input's dtype": Case("layer_norm", 6, 40, "float32", residual=True, dsum=True),
    "a narrower stream": Case("layer_norm", 6, 33, "float64", residual="float16"),
    "a stream of float64": Case("rms_norm", 6, 40, "bfloat16", residual="float64", dsum=True),
    "x_hat rounded": Case("rms_norm", 6, 40, "bfloat16", weight="float32", round_x_hat=True),
    "nothing to round": Case("layer_norm", 6, 40, "float32", round_x_hat=True),
    "all": Case(
        "layer_norm",
        6,
        40,
        "bfloat16",
        y="float32",
        weight="float32",
        residual="float32",
        dsum=True,
        zero_centered_weight=True,
        round_x_hat=True,
    ),
}
