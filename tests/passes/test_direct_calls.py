"""Compiled code calls prepared norms directly, and gets what the operators give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", "2.11")

import sympy  # noqa: E402

from cupynorm.norm import cache  # noqa: E402
from cupynorm.passes import direct_calls, graph_operators  # noqa: E402
from cupynorm.passes.graph_operators import BACKWARD, FORWARD, FORWARD_RESULTS, text_of  # noqa: E402
from cupynorm.passes.known_calls import known_call  # noqa: E402
from cupynorm.plan.problem import Tile  # noqa: E402

ROWS, WIDTH = 4, 64


@pytest.fixture
def launched(record_launches):
    return record_launches(graph_operators)


def tensor(*shape, shift=0, dtype=torch.bfloat16):
    """Aligned to 64 bytes, and `shift` elements."""
    count = torch.Size(shape).numel()
    flat = torch.zeros(count + shift + 64, dtype=dtype)
    aligned = -(flat.data_ptr() // flat.itemsize) % (64 // flat.itemsize)
    return flat[aligned + shift :][:count].view(shape)


def forward(*results, bias=True, residual=True, shift=0, **options):
    """The arguments of norm_forward_in_graph."""
    x, added = tensor(ROWS, WIDTH, shift=shift), tensor(ROWS, WIDTH) if residual else None
    text = text_of(results, {"normalized_shape": (WIDTH,), "eps": 1e-5, "centered": True} | options)
    seed = torch.zeros(1, dtype=torch.int64) if options.get("dropout_p") else None
    return x, tensor(WIDTH), tensor(WIDTH) if bias else None, added, seed, [], text


def backward(*results, centered=True, dsum=True, dy1=False, shift=0, **options):
    x, added = (tensor(ROWS, WIDTH, shift=each) for each in (shift, 0))
    dy = tensor(ROWS, WIDTH, dtype=torch.float32 if dy1 else torch.bfloat16)
    rstd, mean = (tensor(ROWS, dtype=torch.float32) for _ in range(2))
    text = text_of(results, {"normalized_shape": (WIDTH,), "centered": centered} | options)
    mean, added = mean if centered else None, added if dsum else None
    return dy, x, mean, rstd, tensor(WIDTH), added, None, tensor(ROWS, WIDTH) if dy1 else None, text


CALLS = {
    "y": (FORWARD, lambda **given: forward("y", **given)),
    "all": (FORWARD, lambda **given: forward(*FORWARD_RESULTS, y1_dtype="float32", **given)),
    "the sum and y": (FORWARD, lambda **given: forward("sum", "y", **given)),
    "no sum": (FORWARD, lambda **given: forward("y", "rstd", residual=False, **given)),
    "no bias": (FORWARD, lambda **given: forward("y", "mean", bias=False, **given)),
    "dropout": (FORWARD, lambda **given: forward("y", "sum", dropout_p=0.5, **given)),
    "dx": (BACKWARD, lambda **given: backward("dx", **given)),
    "all gradients": (BACKWARD, lambda **given: backward("dx", "dweight", "dbias", **given)),
    "dweight first": (BACKWARD, lambda **given: backward("dweight", "dx", dsum=False, **given)),
    "two gradients of y": (
        BACKWARD,
        lambda **given: backward("dx", "dweight", dsum=False, dy1=True, **given),
    ),
    "no mean": (BACKWARD, lambda **given: backward("dx", "dweight", centered=False, **given)),
}


def seen(launched, arguments, made):
    """The launches; an address is the place of its argument or of its result."""
    tensors = [*(each for each in arguments if torch.is_tensor(each)), *made]
    places = {each.data_ptr(): f"tensor {at}" for at, each in enumerate(tensors)}
    found = [
        (planned, [places.get(word, "new" if abs(word) > 2**20 else word) for word in words])
        for planned, words in launched
    ]
    assert {*places.values()} <= {word for _, words in found for word in words}
    del launched[:]
    return found, [(each.shape, each.dtype) for each in made]


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_launches_what_the_operator_launches(launched, name):
    operator, make = CALLS[name]
    key = f"{'forward' if operator is FORWARD else 'backward'} {name}"
    arguments = make()
    expected = seen(launched, arguments, operator(*arguments))
    for turn in range(3):
        arguments = make()
        before = launched.prepared
        assert seen(launched, arguments, known_call(key)(*arguments)) == expected
        assert launched.prepared - before == (turn == 0)
    # Tensors that are not aligned take another kernel, which the operator finds.
    arguments = make(shift=1)
    before = launched.prepared
    found = seen(launched, arguments, known_call(key)(*arguments))
    assert found != expected and launched.prepared == before + 1
    assert found == seen(launched, arguments, operator(*arguments))
    arguments, before = make(), launched.prepared
    assert seen(launched, arguments, known_call(key)(*arguments)) == expected
    assert launched.prepared == before
    cache.forget()
    known_call(key)(*make())
    assert launched.prepared == before + 1


def test_a_known_call_sums_dx_in_a_ring(launched):
    options = {"dx_sum_dtype": "float32", "strategy": "block"}
    options["tile"] = Tile(2, 32, 1, 2, stages=2).as_ints()
    arguments = backward("dx", "dweight", "dx_sum", **options)
    expected = seen(launched, arguments, BACKWARD(*arguments))
    for turn in range(3):
        arguments, before = backward("dx", "dweight", "dx_sum", **options), launched.prepared
        made = known_call("backward and the sum of dx")(*arguments)
        assert seen(launched, arguments, made) == expected
        assert launched.prepared - before == (turn == 0)
    no_rows = [
        each[:0] if torch.is_tensor(each) and at < 6 else each
        for at, each in enumerate(backward("dx", "dx_sum", **options))
    ]
    no_rows[4] = arguments[4]  # the weight
    assert not BACKWARD(*no_rows)[1].any()
    # In registers there is no such sum, and torch adds up.
    arguments = backward("dx_sum", "dx", dx_sum_dtype="float32")
    total, dx = known_call("backward and a sum of torch")(*arguments)
    assert total.shape == (WIDTH,) and total.dtype == torch.float32 and dx.dtype == torch.bfloat16


def test_a_call_that_copies_is_not_kept(launched):
    """Rows that are not contiguous, and calls whose first tensors are not aligned."""
    x, *others = forward("y")
    for first in (tensor(WIDTH, ROWS).t(), tensor(ROWS, WIDTH, shift=1)):
        for _ in range(2):
            before = launched.prepared
            (y,) = known_call(f"forward {first.stride()} {first.data_ptr() & 15}")(first, *others)
            assert launched.prepared == before + 1 and y.shape == first.shape


def test_calls_on_the_host():
    arguments = forward("y", "rstd")
    for _ in range(2):
        made = known_call("forward on the host")(*arguments)
        assert all(map(torch.equal, made, FORWARD(*arguments)))


def test_sizes_that_inductor_does_not_know_are_no_key():
    def layout(*sizes):
        return direct_calls.layout_of(
            SimpleNamespace(
                get_size=lambda: sizes,
                get_stride=lambda: (sympy.Integer(64), 1),
                get_dtype=lambda: torch.float16,
                get_device=lambda: torch.device("cuda", 1),
            )
        )

    assert layout(sympy.Integer(4), 64) == "cuda:1 float16 (4, 64) (64, 1)"
    assert layout(sympy.Symbol("s0"), 64) is None
