"""Calls like the last one of their kind. What kernels would be launched with is recorded."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import pytest

import cupynorm
from cupynorm.norm import prepared

torch = pytest.importorskip("torch")
from cupynorm.nn import autograd  # noqa: E402


@pytest.fixture
def launched(record_launches):
    return record_launches(autograd)


def tensor(*shape, dtype=torch.bfloat16, shift=0, **options):
    """shift: of the address, in elements."""
    count = torch.Size(shape).numel()
    flat = torch.empty(count + shift + 64, dtype=dtype)
    aligned = -(flat.data_ptr() // flat.itemsize) % (64 // flat.itemsize)
    found = flat[aligned + shift :][:count].view(shape)
    return found.requires_grad_() if options.get("grad") else found


def norm(x=None, weight=None, bias=None, **options):
    """The tensors of a call, and the call."""
    x = tensor(4, 64) if x is None else x
    weight = tensor(64) if weight is None else weight
    given = [x, weight, *(each for each in (bias, *options.values()) if torch.is_tensor(each))]
    return given, partial(cupynorm.layer_norm, x, x.shape[-1], weight, bias, **options)


def outside_of_autograd():
    given, call = norm(tensor(4, 64, grad=True))
    return given, torch.no_grad()(call)


FORWARDS = {
    "plain": norm,
    "other tensors": norm,
    "more rows": lambda: norm(tensor(5, 64)),
    "three dimensions": lambda: norm(tensor(2, 2, 64)),
    "gaps": lambda: norm(tensor(4, 128)[:, :64]),
    "transposed": lambda: norm(tensor(64, 4).t()),
    "misaligned x": lambda: norm(tensor(4, 64, shift=1)),
    "misaligned weight": lambda: norm(weight=tensor(64, shift=1)),
    "aligned to 8 bytes": lambda: norm(tensor(4, 64, shift=4)),
    "float16": lambda: norm(tensor(4, 64, dtype=torch.float16)),
    "float32 weight": lambda: norm(weight=tensor(64, dtype=torch.float32)),
    "parameter": lambda: norm(weight=torch.nn.Parameter(tensor(64))),
    "bias": lambda: norm(bias=tensor(64)),
    "recorded": lambda: norm(tensor(4, 64, grad=True)),
    "weight recorded": lambda: norm(weight=tensor(64, grad=True)),
    "no_grad": outside_of_autograd,
    "residual": lambda: norm(residual=tensor(4, 64)),
    "out": lambda: norm(out=tensor(4, 64)),
    "eps": lambda: norm(eps=1e-6),
    "zero-centered": lambda: norm(zero_centered_weight=True),
}


def recorded(launched, name):
    """What a call launches: kernels, and words, of which addresses of operands are their places.

    Addresses of new tensors are only known to be there.
    """
    given, call = FORWARDS[name]()
    addresses = {each.data_ptr(): f"operand {at}" for at, each in enumerate(given)}
    del launched[:]
    made = call()
    made = made if isinstance(made, tuple) else (made,)
    assert launched
    shown = []
    for planned, words in launched:
        seen = [addresses.get(word, "new" if abs(word) > 2**20 else word) for word in words]
        assert name == "transposed" or {*addresses.values()} <= {*seen}  # each operand is read
        shown.append((planned, seen))
    return shown, [(each.requires_grad, each.shape, each.dtype) for each in made]


def test_a_forward_launches_the_same_after_any_other(launched):
    alone = {}
    for name in FORWARDS:
        prepared.forget()
        alone[name] = recorded(launched, name)
    assert "operand 0" not in alone["transposed"][0][0][1]  # a copy is read
    for first, second in permutations(alone, 2):
        prepared.forget()
        assert recorded(launched, first) == alone[first], first
        assert recorded(launched, second) == alone[second], (first, second)


def test_a_repeated_forward_is_not_checked_again(launched):
    for name in ("plain", "recorded", "bias", "residual"):
        prepared.forget()
        recorded(launched, name)
        before = launched.prepared
        recorded(launched, name)
        assert launched.prepared == before, name
    recorded(launched, "plain")
    before = launched.prepared
    for name in ("more rows", "plain", "more rows"):  # they do not displace each other
        recorded(launched, name)
    assert launched.prepared == before + 1
    cupynorm.layer_norm(tensor(4, 64), 64, tensor(64), eps=1.0)
    with pytest.raises(TypeError, match="eps is True"):
        cupynorm.layer_norm(tensor(4, 64), 64, tensor(64), eps=True)


def upstream(*shape, **options):
    return lambda: tensor(*shape, **options)


BACKWARDS = {
    "plain": (("x", "weight", "bias"), upstream(4, 64), None),
    "x alone": (("x",), upstream(4, 64), None),
    "parameters": (("weight", "bias"), upstream(4, 64), None),
    "gaps": (("x", "weight", "bias"), lambda: tensor(4, 128)[:, :64], None),
    "expanded": (("x", "weight", "bias"), lambda: tensor(64).expand(4, 64), None),
    "misaligned": (("x", "weight", "bias"), upstream(4, 64, shift=1), None),
    "dsum": (("x", "weight", "bias"), upstream(4, 64), upstream(4, 64)),
    "misaligned dsum": (("x", "weight", "bias"), upstream(4, 64), upstream(4, 64, shift=1)),
}


def recorded_backward(launched, name, tensors):
    wanted, make_dy, make_dsum = BACKWARDS[name]
    given = {name: tensors[name].requires_grad_(name in wanted) for name in ("x", "weight", "bias")}
    x, weight, bias = given.values()
    residual = tensors["residual"]
    y, added = cupynorm.layer_norm(x, 64, weight, bias, residual=residual, return_residual=True)
    upstream = [make_dy()] + ([make_dsum()] if make_dsum else [])
    inputs = [given[each] for each in wanted]
    del launched[:]
    made = torch.autograd.grad([y, added][: len(upstream)], inputs, upstream)
    assert launched and [each.shape for each in made] == [each.shape for each in inputs]
    addresses = {each.data_ptr(): f"upstream {at}" for at, each in enumerate(upstream)}
    addresses |= {added.data_ptr(): "sum", weight.data_ptr(): "weight"}
    shown = []
    for planned, words in launched:
        seen = [addresses.get(word, "new" if abs(word) > 2**20 else word) for word in words]
        shown.append((planned, seen))
    first = shown[0][1]
    assert {"sum"} | {f"upstream {at}" for at in range(len(upstream))} <= {*first}
    return shown


def test_a_backward_launches_the_same_after_any_other(launched):
    tensors = {"x": tensor(4, 64), "weight": tensor(64), "bias": tensor(64)}
    tensors["residual"] = tensor(4, 64)
    alone = {}
    for name in BACKWARDS:
        prepared.forget()
        alone[name] = recorded_backward(launched, name, tensors)
    assert len({str(each) for each in alone.values()}) == len(alone)
    for first, second in permutations(alone, 2):
        prepared.forget()
        assert recorded_backward(launched, first, tensors) == alone[first], first
        assert recorded_backward(launched, second, tensors) == alone[second], (first, second)
    prepared.forget()
    recorded_backward(launched, "plain", tensors)
    before = launched.prepared
    recorded_backward(launched, "plain", tensors)
    assert launched.prepared == before


def test_what_a_hook_unpacks_may_have_another_layout(launched):
    """It is read where it is, and its layout decides anew."""
    x, weight = tensor(4, 64, grad=True), tensor(64, grad=True)
    unpacked = [x.detach(), tensor(4, 64, shift=1), tensor(4, 128)[:, :64]]
    plans = []
    for other in unpacked:

        def unpack(packed, other=other):
            return other if packed.shape == other.shape else packed

        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            y = cupynorm.layer_norm(x, 64, weight)
        del launched[:]
        torch.autograd.grad(y, (x, weight), tensor(4, 64))
        planned, words = launched[0]
        assert other.data_ptr() in words and (x.data_ptr() in words) == (other is unpacked[0])
        assert words[words.index(other.data_ptr()) + 1] == other.stride(0)
        plans.append(planned)
    assert plans[1] != plans[0]


@pytest.mark.parametrize("name", ["plain", "recorded", "bias", "residual", "eps", "rms_norm"])
def test_a_repeated_forward_makes_no_request(launched, monkeypatch, name):
    made, plain = [], autograd.ForwardRequest
    monkeypatch.setattr(
        autograd, "ForwardRequest", lambda *fields: made.append(fields) or plain(*fields)
    )
    for _ in range(2):
        if name == "rms_norm":
            cupynorm.rms_norm(tensor(4, 64), 64, tensor(64))
        else:
            recorded(launched, name)
        assert len(made) == 1
