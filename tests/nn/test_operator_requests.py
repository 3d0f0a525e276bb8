"""Requests that pass through the registered operators, to the kernels and back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from operator_cases import BIAS, EPS, ROWS, WEIGHT, backward_arguments, by_norm, random  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.nn import fused_operators, operators  # noqa: E402
from cupynorm.norm import route  # noqa: E402
from cupynorm.norm.request import (  # noqa: E402
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Margins,
    Options,
    SecondGradient,
)

LAUNCH = Options("block", cupynorm.Tile(4, 32, path="registers"), "welford", Margins(1, 2, 3))


def implementation_request(monkeypatch, name: str, run) -> object:
    """The request that the implementation of an operator makes of its arguments."""
    seen = []
    plain = getattr(route, name)

    def record(request, *rest):
        seen.append(request)
        return plain(request, *rest)

    monkeypatch.setattr(route, name, record)
    run()
    (request,) = seen
    return request


def assert_same_operands(got, given) -> None:
    for name in given._fields:
        one, right = getattr(got, name), getattr(given, name)
        if isinstance(right, torch.Tensor):
            assert torch.equal(one, right), name
        else:
            assert one is right, name


@by_norm
def test_the_operator_passes_on_the_request_of_a_forward(monkeypatch, centered):
    options = ForwardOptions(centered, (5,), EPS, True, torch.float16, launch=LAUNCH)
    given = ForwardRequest(ForwardOperands(ROWS, WEIGHT, BIAS, ROWS + 1), options)
    got = implementation_request(monkeypatch, "forward", lambda: operators.norm_forward(given))
    assert_same_operands(got.operands, given.operands)
    assert got.options == options._replace(launch=LAUNCH._replace(sm_margin=1))
    assert got.options.launch.tile.path == "registers"


def test_a_forward_without_gradients_takes_the_margin_of_inference(monkeypatch):
    options = ForwardOptions(True, (5,), EPS, launch=LAUNCH)
    given = ForwardRequest(ForwardOperands(ROWS), options)
    with torch.no_grad():
        got = implementation_request(monkeypatch, "forward", lambda: operators.norm_forward(given))
    assert got.options.launch.sm_margin == 3


def test_the_operator_passes_on_the_request_of_a_fused_forward(monkeypatch):
    options = ForwardOptions(True, (5,), EPS, True, torch.float32, "float32", 0.5, True, True)
    seed = torch.tensor([7])
    operands = ForwardOperands(
        ROWS.bfloat16(), WEIGHT, BIAS, ROWS, None, random(3, 4), seed, BIAS, WEIGHT
    )
    given = ForwardRequest(operands, options._replace(launch=LAUNCH))
    got = implementation_request(
        monkeypatch, "forward", lambda: fused_operators.fused_norm_forward(given)
    )
    assert_same_operands(got.operands, operands)
    assert got.options == options._replace(launch=LAUNCH._replace(sm_margin=1))


@pytest.mark.parametrize("names", [("dx",), ("dweight", "dbias"), ("dx", "dweight", "dbias")])
def test_the_operator_passes_on_the_request_of_a_backward(monkeypatch, names):
    made = backward_arguments()
    operands = BackwardOperands(made["dy"], made["x"], made["mean"], made["rstd"], WEIGHT, ROWS)
    options = BackwardOptions(True, (5,), True, names, dbias_dtype=torch.float16)
    given = BackwardRequest(operands, options._replace(launch=Options("block", None, None, 2)))
    got = implementation_request(monkeypatch, "backward", lambda: operators.norm_backward(given))
    assert_same_operands(got.operands, operands)
    assert got.options == given.options


def test_the_operator_passes_on_the_request_of_a_fused_backward(monkeypatch):
    made = backward_arguments()
    operands = BackwardOperands(made["dy"], made["x"], made["mean"], made["rstd"], WEIGHT, ROWS)
    operands = operands._replace(row_scale=random(3, 4), dropout_seed=torch.tensor([7]))
    names = ("dx", "dbias", "dresidual", "dweight1")
    options = BackwardOptions(True, (5,), True, names, torch.float16, None, torch.float64)
    options = options._replace(dresidual_dtype=torch.bfloat16, dropout_p=0.5)
    given = BackwardRequest(operands, options._replace(launch=Options("block", None, None, 2)))
    second = SecondGradient(ROWS, BIAS, torch.float16)
    got = implementation_request(
        monkeypatch, "backward_of_two", lambda: fused_operators.fused_norm_backward(given, second)
    )
    assert_same_operands(got.operands, operands)
    assert got.options == given.options


def test_unwanted_gradients_are_none():
    made = backward_arguments()
    operands = BackwardOperands(made["dy"], made["x"], made["mean"], made["rstd"], WEIGHT)
    options = BackwardOptions(True, (5,), gradients=("dweight",))
    dx, dweight, dbias, *_ = operators.norm_backward(BackwardRequest(operands, options))
    assert dx is None and dbias is None and dweight.shape == (5,)
    fused = fused_operators.fused_norm_backward(
        BackwardRequest(operands, options), SecondGradient(None)
    )
    assert [each is not None for each in fused] == [False, True, False, False, False, False]


def test_a_fused_forward_without_a_sum_returns_the_input():
    options = ForwardOptions(True, (5,), EPS, round_x_hat=True)
    x = random(3, 4, 5)
    made = fused_operators.fused_norm_forward(ForwardRequest(ForwardOperands(x), options))
    assert made.y1 is None and made.sum is x and made.y.shape == x.shape


def test_an_int_seed_is_that_seed_in_a_tensor():
    def run(seed):
        options = ForwardOptions(True, (5,), EPS, dropout_p=0.5)
        operands = ForwardOperands(ROWS, dropout_seed=seed)
        return fused_operators.fused_norm_forward(ForwardRequest(operands, options)).sum

    assert torch.equal(run(7), run(torch.tensor([7])))
    assert not torch.equal(run(7), run(8))
    torch.manual_seed(0)
    drawn = run(None)
    torch.manual_seed(0)
    assert torch.equal(run(None), drawn)
