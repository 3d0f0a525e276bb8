"""Fixtures of the tests of linear layers."""

from __future__ import annotations

import pytest


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
