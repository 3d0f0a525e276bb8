"""A good call of every entry point, with one or two arguments spoilt: what is refused is refused by
a sentence of ours, before anything is changed. `--hypothesis-profile long` draws 5,200 calls."""

from __future__ import annotations

import ast
import traceback
import warnings
from decimal import Decimal  # noqa: F401  (of BAD)
from fractions import Fraction  # noqa: F401
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

# Expressions, so that each value is made anew.
BAD = """None; "row"; ""; b"abc"; True; 0; -3; 2.5; float("nan"); float("inf"); 10**400; 2**70
-(10**400); 1j; Fraction(10**400, 3); Decimal("sNaN"); (); range(3); Path("/no/such/file"); object()
np.float32("nan"); np.int64(-7); np.bool_(True); np.float32; ValueError("x"); {"a": 1}; {1, 2}
torch.int8; torch.float16; torch.device("meta"); [1.5, "x"]; [[1], [2, 3]]; iter(["dx"])
cupynorm.Quantize("int8"); cupynorm.Launch("warp"); cupynorm.Tile(8, 32); functors.silu_gate
cupynorm.rms_norm(torch.ones(4, 8), 8, out_dtype="int8"); functors.dropout(0.5, 3)
np.array([None, object()]); np.array(["a", "b"]); np.zeros(2, [("a", "f4"), ("b", "i4")])
np.array(["2026-01-01"], "datetime64[D]"); np.matrix([[1.0, 2.0]]); np.ma.masked_array(np.ones(8))
torch.nested.nested_tensor([torch.ones(1, 8), torch.ones(3, 8)], layout=torch.jagged)
torch.quantize_per_tensor(torch.ones(4, 8), 1.0, 0, torch.qint8); torch.eye(4, 8).to_sparse()
torch.eye(4, 8).to_sparse_csr(); torch.nn.Parameter(torch.ones(4, 8)); torch.nn.Linear(2, 2)"""
BAD = BAD.replace("\n", "; ").split("; ")
for shape in (4, 8), (3, 7), (8,), (0, 8), (1,), ():
    BAD += [f"np.ones({shape}, {dtype!r})" for dtype in ("f4", "f2", "i1", "?", "c8")]
    for dtype in ("float32", "bool", "int32", "complex64", "float8_e4m3fn"):
        BAD += [f"torch.ones({shape}).to(torch.{dtype})"]
        BAD += [f"torch.empty({shape}, dtype=torch.{dtype}, device='meta')"]


def drawn(torchs: bool, *shape: int):
    values = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values) if torchs else values


def usual(function, /, **given) -> dict:
    """The defaults of a function's parameters, and what is given."""
    parameters = signature(function).parameters.items()
    return {key: each.default for key, each in parameters if each.default is not each.empty} | given


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


CHANGES = {"statistics.cuh": [("= values[at] - first;", "= values[at];")]}
SIZES = {"LayerNorm": (8,), "RMSNorm": (8,), "Linear": (8, 6), "LayerNormLinear": (8, 6)}


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
    for name, sizes in SIZES.items():
        made = getattr(cupynorm, name)
        given = dict(zip(signature(made).parameters, sizes), device="cpu")
        found[name] = made, partial(usual, made, **given)
        layer = made(*sizes, device="cpu")
        first = {next(iter(signature(layer.forward).parameters)): drawn(True, 4, 8)}
        found[f"a call of {name}"] = layer, partial(usual, layer.forward, **first)
    blocks = {"scale": "block", "upper_bound": 3.0, "power_of_two": True, "layout": "packed"}
    one = {"scale": torch.ones(1), "amax": torch.zeros(1)}
    column, function = {"shapes": [(2, 8)], "on": "cpu"}, torch.nn.functional.layer_norm
    text = {"name": "own", "lines": "y = y * a * b;", "arrays": ("a",), "numbers": ("b",)}
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
        "check": own,
        "check_function": {"function": function, "shapes": [(2, 8)]},
        "check_functor": {"functor": functors.layer_scale, **column},
        "functor": text,
        **dict.fromkeys(("DelayedScaling", "CurrentScaling", "BlockScaling"), {}),
        "Tile": {"pack_size": 8, "threads_per_row": 32},
        "Device": vars(cupynorm.DEVICES["A100"]),
    }.items():
        made = next(getattr(each, name) for each in HOMES if hasattr(each, name))
        found[name] = made, partial(usual, made, **given)
    swap = cupynorm.swap_norms
    return found | {
        "fp8_autocast": (autocast, lambda: {"enabled": True, "recipe": None, "group": None}),
        "Quantize blocks": (quantized, lambda: {"dtype": "float8_e4m3fn", **blocks}),
        "Quantize by one scale": (quantized, lambda: {"dtype": "float8_e5m2", **one}),
        "check of shapes": (cupynorm.check, lambda: usual(cupynorm.check, **column)),
        "swap_norms": (swap, lambda: usual(swap, model=torch.nn.Sequential(torch.nn.LayerNorm(8)))),
        "experiment": (
            partial(cupynorm.experiment, CHANGES, strategy="uncached", on="cpu"),
            lambda: {"num_cols": 8, "num_rows": 2, "input": np.ones((2, 8))},
        ),
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "experiment")) for name in ENTRIES],
)
@SETTINGS
@given(data=st.data())
def test_a_spoilt_call_is_refused_by_a_sentence_or_taken(name, data):
    function, make = ENTRIES[name]
    arguments = make()
    names = [each for each in arguments if each not in OWN]
    for each in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        arguments[each] = eval(data.draw(st.sampled_from(BAD)))
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
