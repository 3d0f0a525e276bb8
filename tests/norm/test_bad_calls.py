"""A good call of every entry point, with one or two arguments spoilt: what is refused is refused by
a sentence of ours, before anything is changed. With
`--hypothesis-profile long` 5,000 calls."""

from __future__ import annotations

import ast
import traceback
import warnings
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cupynorm
from cupynorm import functors, recipes, types

torch = pytest.importorskip("torch")
HOMES = cupynorm, recipes, types
PACKAGE = Path(cupynorm.__file__).parent
REFUSALS = ValueError, TypeError, NotImplementedError, cupynorm.MissingLibraryError
SETTINGS = settings(
    max_examples=100 if settings.get_current_profile_name() == "long" else 12,
    derandomize=settings.get_current_profile_name() != "long",
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

# Each makes a value anew.
PLAIN = "row", "", b"abc", True, 0, -3, 2.5, float("nan"), float("inf"), 10**400, 2**70, -(10**400)
PLAIN += None, 1j, Fraction(10**400, 3), Decimal("sNaN"), (), range(3), Path("/no/such/file")
PLAIN += np.float32("nan"), np.int64(-7), np.bool_(True), np.float32, ValueError("x")
PLAIN += torch.int8, torch.float16, torch.device("meta")
BAD = [
    *(lambda value=value: value for value in PLAIN),
    object,
    lambda: {"a": 1},
    lambda: {1, 2},
    lambda: [1.5, "x"],
    lambda: [[1], [2, 3]],
    lambda: iter(["dx"]),
    lambda: cupynorm.Quantize("int8"),
    lambda: cupynorm.Launch("warp", {"pack_size": 8, "threads_per_row": 32}),
    lambda: cupynorm.Tile(8, 32),
    lambda: cupynorm.rms_norm(torch.ones(4, 8), 8, out_dtype="int8"),
    lambda: functors.silu_gate,
    lambda: functors.dropout(0.5, 3),
    lambda: np.array([None, object()]),
    lambda: np.array(["a", "b"]),
    lambda: np.array(["2026-01-01"], "datetime64[D]"),
    lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    lambda: np.matrix([[1.0, 2.0]]),
    lambda: np.ma.masked_array(np.ones((4, 8), np.float32), mask=True),
    lambda: torch.nested.nested_tensor([torch.ones(1, 8), torch.ones(3, 8)], layout=torch.jagged),
    lambda: torch.quantize_per_tensor(torch.ones(4, 8), 1.0, 0, torch.qint8),
    lambda: torch.eye(4, 8).to_sparse(),
    lambda: torch.eye(4, 8).to_sparse_csr(),
    lambda: torch.nn.Parameter(torch.ones(4, 8)),
    lambda: torch.nn.Linear(2, 2),
]
for shape in (4, 8), (3, 7), (8,), (0, 8), (1,), ():
    BAD += [lambda s=shape, d=d: np.ones(s, d) for d in ("f4", "f2", "i1", "?", "c8")]
    for dtype in torch.float32, torch.bool, torch.int32, torch.complex64, torch.float8_e4m3fn:
        BAD += [lambda s=shape, d=dtype: torch.ones(s).to(d)]
        BAD += [lambda s=shape, d=dtype: torch.empty(s, dtype=d, device="meta")]


def drawn(torchs: bool, *shape: int):
    values = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values) if torchs else values


def usual(function, **given) -> dict:
    """The defaults of a function's parameters, and what is given."""
    parameters = signature(function).parameters.items()
    return {
        name: each.default for name, each in parameters if each.default is not each.empty
    } | given


def norm(function, torchs: bool, **given) -> dict:
    arrays = {"input": drawn(torchs, 4, 8), "weight": drawn(torchs, 8), "bias": drawn(torchs, 8)}
    residual = drawn(torchs, 4, 8)
    return usual(function, normalized_shape=8, residual=residual, **arrays, **given)


def gradients(function, torchs: bool) -> dict:
    rows = {name: drawn(torchs, 4, 8) for name in ("dy", "x", "dsum")}
    statistics = {"mean": drawn(torchs, 4), "rstd": drawn(torchs, 4)}
    if function is cupynorm.rms_norm_backward:
        del statistics["mean"]
    return usual(function, normalized_shape=8, weight=drawn(torchs, 8), **rows, **statistics)


def linear(function) -> dict:
    vectors = {name: drawn(True, 8) for name in ("norm_weight", "norm_bias")}
    matrices = {"weight": drawn(True, 6, 8), "residual": drawn(True, 4, 8)}
    return usual(function, input=drawn(True, 4, 8), bias=drawn(True, 6), **vectors, **matrices)


def quantized(**options):
    return cupynorm.layer_norm(torch.ones(4, 8), 8, out_dtype=cupynorm.Quantize(**options))


def fused(make):
    return lambda **given: cupynorm.layer_norm(np.ones((4, 8)), 8, fuse=make(**given))


def autocast(**options):
    with cupynorm.fp8_autocast(**options):
        pass


def layer(name: str, *sizes: int, torchs: bool = True):
    """A call of a module, and its arguments."""
    module = getattr(cupynorm, name)(*sizes, device="cpu")
    first = next(iter(signature(module.forward).parameters))
    return module, lambda: usual(module.forward, **{first: drawn(True, 4, 8)})


def entries() -> dict:
    """By name: a function, and what makes the arguments of a good call."""
    found = {}
    for name in ("layer_norm", "rms_norm"):
        for torchs in (False, True):
            plain, forward, backward = (
                getattr(cupynorm, f"{name}{end}") for end in ("", "_forward", "_backward")
            )
            of = f"{name} of {'torch' if torchs else 'NumPy'}"
            found[of] = plain, partial(norm, plain, torchs)
            found[f"{of}, out"] = plain, lambda f=plain, t=torchs: norm(f, t, out=drawn(t, 4, 8))
            found[f"{of}, forward"] = forward, partial(norm, forward, torchs)
            found[f"{of}, backward"] = backward, partial(gradients, backward, torchs)
        together = getattr(cupynorm, f"{name}_linear")
        found[f"{name}_linear"] = together, partial(linear, together)
    for name, *sizes in (
        ("LayerNorm", 8),
        ("RMSNorm", 8),
        ("Linear", 8, 6),
        ("LayerNormLinear", 8, 6),
    ):
        made = getattr(cupynorm, name)
        given = dict(zip(signature(made).parameters, sizes), device="cpu")
        found[name] = made, partial(usual, made, **given)
        found[f"a call of {name}"] = layer(name, *sizes)
    blocks = {"scale": "block", "upper_bound": 3.0, "power_of_two": True, "layout": "packed"}
    one = {"scale": torch.ones(1), "amax": torch.zeros(1)}
    column = {"shapes": [(2, 8)], "on": "cpu"}
    of_functor = {"functor": functors.layer_scale}
    text = {"name": "own", "lines": "y = y * a * b;", "arrays": ("a",), "numbers": ("b",)}
    model = {"model": torch.nn.Sequential(torch.nn.LayerNorm(8))}
    own = {"input": np.ones((2, 8)), "weight": np.ones(8), "on": "cpu"}
    data = {"data": torch.zeros((4, 128), dtype=torch.uint8), "scale_inv": torch.ones(4, 1)}
    for name, given in {
        "Launch": {"strategy": "warp"},
        "Quantize": {"dtype": "int8"},
        "QuantizedTensor": data | {"dtype": "float32"},
        "plan": {"num_cols": 1024, "device": "H200"},
        "explain": {"num_cols": 64, "device": "H200"},
        "trace": {"num_cols": 64},
        "use_tiles": {"path": None},
        "swap_norms": model,
        "check": own,
        "check_functor": of_functor | column,
        "functor": text,
        "DelayedScaling": {},
        "CurrentScaling": {},
        "BlockScaling": {},
        "Tile": {"pack_size": 8, "threads_per_row": 32},
        "Device": vars(cupynorm.DEVICES["A100"]),
    }.items():
        made = next(getattr(each, name) for each in HOMES if hasattr(each, name))
        found[name] = made, partial(usual, made, **given)
    return found | {
        "fp8_autocast": (autocast, lambda: {"enabled": True, "recipe": None, "group": None}),
        "Quantize blocks": (quantized, lambda: {"dtype": "float8_e4m3fn", **blocks}),
        "Quantize by one scale": (quantized, lambda: {"dtype": "float8_e5m2", **one}),
        "check of shapes": (cupynorm.check, lambda: usual(cupynorm.check, **column)),
        "dropout": (fused(functors.dropout), lambda: {"p": 0.5, "seed": 3}),
        "silu_gate": (fused(functors.silu_gate), lambda: {"gate": np.ones((4, 8))}),
        "clamp": (fused(functors.clamp), lambda: {"low": 0, "high": 1.5}),
        "row_scale": (fused(functors.row_scale), lambda: {"scale": np.ones(4)}),
    }


ENTRIES = entries()
# Functions of a user raise what they raise.
OWN = {"init_method", "get_rng_state_tracker", "reference", "torch", "amax_compute_algo"}


def seen(value: object) -> object:
    """What a refused call must leave as it was, of an argument."""
    if isinstance(value, torch.nn.Module):
        return [type(each) for each in value.modules()], str(value.state_dict())
    return repr(value) if isinstance(value, (torch.Tensor, np.ndarray)) else None


@cache
def lines_that_raise(path: str) -> set[int]:
    nodes = ast.walk(ast.parse(Path(path).read_text()))
    spans = (range(each.lineno, each.end_lineno + 1) for each in nodes if type(each) is ast.Raise)
    return {line for span in spans for line in span}


def is_ours(error: Exception) -> bool:
    """Whether a line of cupynorm raised it, which says what was given."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_sentence = PACKAGE in Path(last.filename).parents and str(error)
    return bool(is_sentence) and last.lineno in lines_that_raise(last.filename)


@pytest.mark.parametrize("name", ENTRIES)
@SETTINGS
@given(data=st.data())
def test_a_spoilt_call_is_refused_by_a_sentence_or_taken(name, data):
    function, make = ENTRIES[name]
    arguments = make()
    names = [each for each in arguments if each not in OWN]
    for each in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        arguments[each] = data.draw(st.sampled_from(BAD))()
    before = {each: seen(value) for each, value in arguments.items()}
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("ignore")
        try:
            function(**arguments)
        except Exception as error:
            assert isinstance(error, REFUSALS) and is_ours(error), arguments
            assert before == {each: seen(value) for each, value in arguments.items()}
    assert torch.is_grad_enabled()


def test_the_calls_are_good():
    for function, make in ENTRIES.values():
        function(**make())


def test_a_sentence_of_another_library_is_none_of_ours():
    for wrong in (
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: cupynorm.layer_norm(),
        lambda: 1 / 0,
    ):
        with pytest.raises(Exception) as caught:
            wrong()
        assert not is_ours(caught.value)
