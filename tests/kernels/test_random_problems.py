"""Random problems with every option of a call. A seed always draws the same problems."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cupynorm.check.cases import NORMS, Case, random_problem
from cupynorm.check.kernels import machine, uses_welford
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES
from cupynorm.plan.strategies import STATISTICS, STRATEGIES


def draw(generator: random.Random, max_elements: int, max_cols: int) -> Case:
    num_cols = int(max_cols ** generator.random())
    if generator.random() < 0.5:
        num_cols = max(8, num_cols // 8 * 8)
    dtypes = list(DTYPES)
    return Case(
        generator.choice(NORMS),
        max(1, min(int(4096 ** generator.random()), max_elements // num_cols)),
        num_cols,
        generator.choice(dtypes),
        y=generator.choice([None, *dtypes]),
        weight=generator.choice(["same", "same", None, *dtypes]),
        bias=generator.choice(["same", "same", None, *dtypes]),
        strategy=generator.choice([None, None, *STRATEGIES]),
        statistics=generator.choice([None, *STATISTICS]),
        zero_centered_weight=generator.random() < 0.2,
        residual=generator.random() < 0.2,
        eps=generator.choice([1e-5, 1e-12, 0.0, 1e-3]),
        sm_margin=generator.choice([0, 0, 0, 60]),
    )


def draw_fused(generator: random.Random, max_elements: int, max_cols: int) -> Case:
    """Adds a residual of another dtype, and what goes with it."""
    case = draw(generator, max_elements, max_cols)
    return replace(
        case,
        residual=generator.choice([False, True, "float32", *DTYPES]),
        dsum=generator.random() < 0.5,
        round_x_hat=generator.random() < 0.3,
        # With eps 0 a rounding would decide the variance of a row that is mostly dropped.
        eps=generator.choice([1e-5, 1e-3]),
        recompute=generator.random() < 0.5,
    )


def check(on: str, seed: int, num_cases: int, max_elements: int, max_cols: int, draw=draw) -> None:
    generator = random.Random(seed)
    where = machine(on)
    result = CheckResult()
    judged = 0
    while judged < num_cases:
        case = draw(generator, max_elements, max_cols)
        problem = random_problem(case, seed)
        try:
            welford = uses_welford(case, where.device)
            results = run_kernels(problem, where)
        except ValueError as refusal:
            # Only a strategy that is too narrow or has no cluster may be refused.
            assert case.strategy and (
                "too narrow" in str(refusal) or "too few for a cluster" in str(refusal)
            ), refusal
            continue
        judged += 1
        result.findings += judge_all(problem, results, rounded_mean=welford)
    assert result.ok, result


@pytest.mark.parametrize("drawn", [draw, draw_fused])
@pytest.mark.parametrize(
    "on, seed",
    [
        *(pytest.param("cpu", seed, marks=pytest.mark.slow) for seed in range(6)),
        *(pytest.param("gpu", seed, marks=pytest.mark.gpu) for seed in range(8)),
    ],
)
def test_random_problems(on, seed, drawn):
    if on == "cpu":
        check(on, seed, num_cases=6, max_elements=1 << 13, max_cols=1 << 13, draw=drawn)
    else:
        check(on, seed, num_cases=15, max_elements=1 << 21, max_cols=1 << 18, draw=drawn)
