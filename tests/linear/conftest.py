"""Fixtures of the tests of linear layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def folds() -> Iterator[list]:
    """One kernel on a CPU, by default too. The list has the weight of each fold."""
    pytest.importorskip("torch")
    import linear_cases

    with linear_cases.kernel_on_cpu() as made:
        yield made


@pytest.fixture
def sums_in_float32():
    """cuBLAS adds the parts of a split sum in float32, as the bounds assume."""
    torch = pytest.importorskip("torch")
    switches = torch.backends.cuda.matmul
    before = (
        switches.allow_bf16_reduced_precision_reduction,
        switches.allow_fp16_reduced_precision_reduction,
    )
    switches.allow_bf16_reduced_precision_reduction = (
        switches.allow_fp16_reduced_precision_reduction
    ) = False
    yield
    (
        switches.allow_bf16_reduced_precision_reduction,
        switches.allow_fp16_reduced_precision_reduction,
    ) = before
