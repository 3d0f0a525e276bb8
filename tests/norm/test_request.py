"""Requests, what builds them, and the prepared calls they key."""

from __future__ import annotations

import pytest

from cupynorm.functors import dropout
from cupynorm.norm import prepared
from cupynorm.norm.calls import FOR_STATISTICS, FOR_Y, prepare_backward, prepare_forward
from cupynorm.norm.checks import bind_functors
from cupynorm.norm.request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Launch,
    Margins,
    Quantization,
    of_backward,
)

torch = pytest.importorskip("torch")

TILE = {"pack_size": 4, "threads_per_row": 32, "packs_per_thread": 1, "rows_per_block": 4}
PLAIN = ForwardOptions(True, (8,), 1e-5)


def forward_request(input=None, *, options=PLAIN, **operands) -> ForwardRequest:
    return ForwardRequest(ForwardOperands(input, **operands), options)


# Launch.


def test_a_backward_takes_the_strategy_and_not_the_tile():
    launch = Launch("warp", TILE, None, {"backward": 4})
    assert of_backward(launch) == Launch("warp", sm_margin={"backward": 4})


# Prepared calls. Tensors on the CPU are planned as on a GPU; nothing is launched.


def prepared_forward(purpose: str = FOR_STATISTICS, *, options=PLAIN, **operands) -> object:
    x = torch.zeros(3, options.extents[-1])
    return prepare_forward(forward_request(x, options=options, **operands), purpose)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"centered": False},
        {"eps": 1e-6},
        {"zero_centered_weight": True},
        {"out_dtype": "float16"},
        {"round_x_hat": True},
        {"quantization": Quantization("float8_e4m3fn")},
        {"quantization": Quantization("float8_e4m3fn", "row")},
        {"launch": Launch("uncached")},
        {"launch": Launch(statistics="welford")},
        {"launch": Launch(sm_margin=4)},
        {"launch": Launch(sm_margin=Margins(forward=4))},
    ],
    ids=str,
)
def test_requests_of_different_options_have_their_own_prepared_calls(kernels, change):
    first = prepared_forward(weight=torch.ones(8))
    options = PLAIN._replace(**change)
    other = prepared_forward(options=options, weight=torch.ones(8))
    assert other is not first and len(prepared.forwards) == 2
    assert prepared_forward(options=options._replace(), weight=torch.ones(8)) is other
    assert prepared_forward(weight=torch.ones(8)) is first
    assert prepared_forward(FOR_Y, weight=torch.ones(8)) is not first


@pytest.mark.parametrize(
    "operands",
    [
        {},
        {"weight": torch.ones(8, dtype=torch.float16)},
        {"weight": torch.ones(8), "bias": torch.ones(8)},
        {"weight": torch.ones(8), "residual": torch.ones(3, 8)},
        {"weight": torch.ones(8), "out": torch.empty(3, 8)},
    ],
    ids=["none", "dtype", "bias", "residual", "out"],
)
def test_requests_of_different_operands_have_their_own_prepared_calls(kernels, operands):
    first = prepared_forward(weight=torch.ones(8))
    assert prepared_forward(**operands) is not first


def test_seeds_of_any_value_share_a_prepared_call(kernels):
    def prepared(seed):
        functors = bind_functors(dropout(0.5, seed))
        return prepared_forward(functors=functors, residual=torch.zeros(3, 8))

    first = prepared(1)
    for seed in (2, None, torch.zeros(1, dtype=torch.int64)):
        assert prepared(seed) is first


def prepared_backward(*, dsum=None, **options) -> object:
    x, rstd = torch.zeros(3, 8), torch.ones(3)
    operands = BackwardOperands(x, x, rstd, rstd, torch.ones(8), dsum)
    options = BackwardOptions(True, (8,))._replace(**options)
    return prepare_backward(BackwardRequest(operands, options))[0]


@pytest.mark.parametrize(
    "change",
    [
        {"gradients": ("dx",)},
        {"gradients": ("dweight", "dbias")},
        {"zero_centered_weight": True},
        {"dweight_dtype": "float16"},
        {"dbias_dtype": "bfloat16"},
        {"overwrite_dy": True},
        {"launch": Launch("uncached")},
        {"launch": Launch(sm_margin=4)},
        {"dsum": torch.zeros(3, 8)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_backward_requests_of_different_options_have_their_own_prepared_calls(kernels, change):
    first = prepared_backward()
    other = prepared_backward(**change)
    assert other is not first and prepared_backward(**change) is other
    assert prepared_backward() is first and len(prepared.backwards) == 2
