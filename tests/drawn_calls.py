"""Whole calls, drawn by hypothesis: operands with layouts and dtypes of their own, and options.

A family has what decides which kernels are compiled; a drawn list of calls has one family, so that
a compilation is shared. check_call makes a call by the public functions with torch tensors and
holds it to this:

- Each element of each output is within the bound that cupynorm.verify.bounds derives.
- y in 8 bits, and its scales, are what a row within those bounds is quantised to.
- Inputs, and what surrounds operands and outputs, keep their bytes.
- The same call gives the same bits again, and so does a row alone if operands are contiguous.

An example that hypothesis prints is the replay: paste it as @example(calls=[Call(...)]) above a
test of test_drawn_calls.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from quantized_calls import GIVEN_SCALE, How, judge_values

import cupynorm
from cupynorm.dispatch.devices import DEVICES, Device
from cupynorm.dispatch.problem import SCALINGS
from cupynorm.dispatch.strategies import STATISTICS, STRATEGIES
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu import arrays
from cupynorm.verify.bounds import expect, half_ulp
from cupynorm.verify.cases import NORMS, Case, Problem, random_problem
from cupynorm.verify.check_functor import FunctorProblem, expect_with_functor
from cupynorm.verify.kernels import uses_welford
from cupynorm.verify.results import Finding, judge_against

GUARD = 128  # elements before and after a tensor: 256 bytes, the alignment of new tensors, or more
LAYOUTS = ("contiguous", "gap", "misaligned", "broadcast", "transposed", "negated")
BY = ("autograd", "explicit", "in place")
VALUES = (
    "normal", "constant rows", "huge means", "neighbours", "tiny spreads", "outliers",
    "subnormals", "zeros", "huge weights", "a NaN", "an infinity",
)  # fmt: skip
# Their float64 result is NaN or depends on the last bit when eps is tiny.
NEED_EPS = ("constant rows", "neighbours", "tiny spreads", "subnormals", "zeros")
_REFUSALS = ("too narrow", "too few for a cluster", "too wide", "expected 'welford' or None")
_OF_ROWS = ("y", "mean", "rstd", "sum", "dx", "dresidual")


@dataclass(frozen=True)
class Family:
    """Calls that share kernels. y: a dtype, or a How of 8 bits. fuse: of cupynorm.functors."""

    norm: str = "layer_norm"
    num_cols: int = 8
    x: str = "float32"
    y: str | How | None = None
    weight: str | None = "same"
    bias: str | None = "same"
    residual: str | None = None
    zero_centered_weight: bool = False
    round_x_hat: bool = False
    fuse: str | None = None
    strategy: str | None = None
    statistics: str | None = None
    by: str = "autograd"


@dataclass(frozen=True)
class Call:
    """layouts: of x, residual, dy, dsum and out. seed: of the values."""

    family: Family
    num_rows: int = 1
    values: str = "normal"
    layouts: tuple[str, str, str, str, str] = ("contiguous",) * 5
    eps: float = 1e-5
    dsum: bool = False
    sm_margin: int = 0
    seed: int = 0

    @property
    def case(self) -> Case:
        family, names = self.family, ("weight", "bias", "strategy", "statistics")
        names += ("zero_centered_weight", "round_x_hat")
        fields = {name: getattr(family, name) for name in names}
        fields |= {name: getattr(self, name) for name in ("eps", "sm_margin", "dsum")}
        fields["y"] = None if isinstance(family.y, How) else family.y
        shape = (family.norm, self.num_rows, family.num_cols, family.x)
        return Case(*shape, residual=family.residual or False, **fields)


# What is drawn. The first value of each is the simplest, to which a failing call is shrunk.


@st.composite
def families(draw: Any, most_cols: int) -> Family:
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    widths = st.integers(1, most_cols)
    num_cols = draw(st.one_of(widths, widths.map(lambda n: max(8, n // 8 * 8))))
    family = Family(
        draw(st.sampled_from(NORMS)),
        num_cols,
        draw(st.sampled_from(dtypes)),
        weight=draw(st.sampled_from(["same", None, *dtypes])),
        bias=draw(st.sampled_from(["same", None, *dtypes])),
        zero_centered_weight=draw(st.booleans()),
        by=draw(st.sampled_from(BY)),
    )
    kind = draw(st.sampled_from(["plain", "plain", "residual", "residual", "8 bits", "fuse"]))
    if kind == "fuse":
        fuse = draw(st.sampled_from(["silu_gate", "layer_scale"]))
        few = min(num_cols, 64)
        return replace(family, num_cols=few, fuse=fuse, bias="same", weight="same", by="autograd")
    if kind == "8 bits":
        scaling = draw(st.sampled_from(SCALINGS))
        names = ["float8_e4m3fn", "float8_e5m2", *["int8"] * (scaling in ("given", "row"))]
        power = scaling != "given" and draw(st.booleans())
        how = How(draw(st.sampled_from(names)), scaling, power_of_two=power)
        family = replace(family, y=how, by="explicit")
    else:
        strategies = [None, *STRATEGIES]
        family = replace(
            family,
            y=None if family.by == "in place" else draw(st.sampled_from([None, *dtypes])),
            round_x_hat=draw(st.booleans()),
            strategy=draw(st.sampled_from(strategies)),
            statistics=draw(st.sampled_from([None, *STATISTICS])),
        )
    if kind == "residual":
        own = family.x if family.by == "in place" else draw(st.sampled_from([family.x, *dtypes]))
        family = replace(family, residual=own)
    return family


@st.composite
def calls_of(draw: Any, family: Family, most_elements: int) -> Call:
    most_rows = max(1, min(2048 if family.fuse is None else 8, most_elements // family.num_cols))
    values = draw(st.sampled_from(VALUES if family.fuse is None else ("normal", "outliers")))
    tiny = values not in NEED_EPS and not family.round_x_hat
    layouts = st.one_of(st.just("contiguous"), st.sampled_from(LAYOUTS))
    out = st.sampled_from(["contiguous", "gap", "misaligned"])
    return Call(
        family,
        draw(st.integers(1, most_rows)),
        values,
        tuple(draw(layouts if family.fuse is None else st.just("contiguous")) for _ in range(4))
        + (draw(out),),
        draw(st.sampled_from([1e-5, 1e-3, *[1e-12] * tiny])),
        family.residual is not None and draw(st.booleans()),
        draw(st.sampled_from([0, 0, 0, 1, 40])) if family.fuse is None else 0,
        draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def drawn(draw: Any, most_cols: int, most_elements: int, most_calls: int) -> list[Call]:
    """Calls of one family: a kernel takes as long to compile as some twenty calls."""
    family = draw(families(most_cols))
    count = draw(st.integers(1, most_calls))  # a list of hypothesis has six elements in the mean
    return [draw(calls_of(family, most_elements)) for _ in range(count)]


# The values and the tensors.


def problem_of(call: Call) -> Problem:
    """The values of a call. Operands that are broadcast have equal rows."""
    case, generator = call.case, np.random.default_rng(call.seed)
    problem = random_problem(case, generator=generator)
    x, kind = problem.x, DTYPES[case.x]
    largest = min(kind.largest, 1e9)
    at = generator.integers(case.num_rows), generator.integers(case.num_cols)
    if call.values == "constant rows":
        x = np.broadcast_to(x[:, :1] * generator.choice([1.0, 1e5, 1e9]), x.shape)
        x = x if case.residual else np.clip(x, -largest, largest)
        x = np.clip(x, -1e3, 1e3) if case.residual else x
    elif call.values == "huge means":
        x = x + generator.choice([-1, 1]) * min(largest / 64, generator.choice([1e4, 1e6, 1e8]))
    elif call.values == "neighbours":  # two values of a row, one the next larger number
        mean = min(largest / 2, generator.choice([1.0, 1e3, 1e6, 1e9])) * (1 + generator.random())
        x = mean * (1 + 2 * kind.half_ulp * (generator.random(x.shape) < generator.random()))
    elif call.values in ("tiny spreads", "subnormals", "zeros"):
        sizes = {"tiny spreads": max(1e-6, kind.smallest), "subnormals": 64 * kind.smallest}
        x = x * sizes.get(call.values, 0.0)
    elif call.values in ("outliers", "a NaN", "an infinity"):
        x = x.copy()
        far = {"outliers": np.clip(1e3 * x[at], -largest, largest), "a NaN": np.nan}
        x[at] = far.get(call.values, np.inf)
    elif call.values == "huge weights" and problem.weight is not None:
        most = DTYPES[case.dtype("weight")].largest
        problem.weight = np.clip(problem.weight * 2.0**14, -most, most)
    problem.x = decode(encode(x, case.x), case.x)
    for name, layout in zip(("x", "residual", "dy", "dsum"), call.layouts):
        values = getattr(problem, name)
        if layout == "broadcast" and values is not None:
            values[...] = values[:1]
    return problem


class Placed:
    """A tensor between guards, and what its memory held before a call."""

    def __init__(self, values: np.ndarray, dtype: str, layout: str, device: str) -> None:
        num_rows, num_cols = values.shape if values.ndim == 2 else (1, len(values))
        strides = {"gap": (num_cols + 16, 1), "broadcast": (0, 1), "transposed": (1, num_rows)}
        strides = strides.get(layout, (num_cols, 1))[2 - values.ndim :]
        self.inside = (values.shape, strides, GUARD + (layout == "misaligned"))
        memory = np.full(2 * GUARD + 1 + num_rows * (num_cols + 16), np.nan)
        self.memory = arrays.from_float64(memory, dtype, torch.empty(0)).to(device)
        self.tensor = self.memory.as_strided(*self.inside)
        values = -values if layout == "negated" else values
        written = slice(1 if layout == "broadcast" else None)  # its rows are one
        self.tensor[written] = arrays.from_float64(values, dtype, self.memory)[written].to(device)
        if layout == "negated":
            self.tensor = torch._neg_view(self.tensor)
        self._before = self.memory.clone()

    def assert_untouched(self, name: str, *, is_output: bool = False) -> None:
        before = self._before.clone()
        if is_output:
            before.as_strided(*self.inside).copy_(self.tensor)
        same = torch.equal(before.view(torch.uint8), self.memory.view(torch.uint8))
        assert same, f"bytes around {name} were written to, or {name}"


Results = dict[str, np.ndarray]


def make(call: Call, problem: Problem, device: str) -> Results:
    """One call. The outputs as float64, those in 8 bits in their storage dtype."""
    family, case = call.family, call.case
    placed: dict[str, Placed] = {}
    layouts = dict(zip(("x", "residual", "dy", "dsum", "out"), call.layouts))
    dtypes = {"x": case.x, "residual": case.added, "dy": case.dtype("y"), "dsum": case.sum}
    dtypes |= {name: case.dtype(name) for name in ("weight", "bias")}
    for name, dtype in dtypes.items():
        values = getattr(problem, name)
        if values is not None and dtype is not None:
            layout = layouts.get(name, "contiguous")
            if family.by == "in place" and name in ("x", "residual"):
                layout = layouts["out"]
            placed[name] = Placed(values, dtype, layout, device)
    given = {name: placed[name].tensor if name in placed else None for name in dtypes}
    options = {
        "residual": given["residual"],
        "zero_centered_weight": case.zero_centered_weight,
        "round_x_hat": case.round_x_hat,
    }
    if case.strategy or case.statistics or case.sm_margin:
        options["launch"] = cupynorm.Launch(case.strategy, None, case.statistics, case.sm_margin)
    if case.y is not None:
        options["out_dtype"] = getattr(torch, case.y)
    written: tuple[str, ...] = ()
    if family.by == "in place":
        results, written = _in_place(case, given, options)
    elif family.by == "explicit":
        results = _explicit(call, given, options, placed, device)
        written = ("out",) if "out" in placed else ()
    else:
        results = _recorded(call, problem, given, options, device)
    found = {}
    for name, tensor in results.items():
        of_bytes = "y" if isinstance(family.y, How) else ""
        if name == of_bytes:
            found[name] = tensor.view(torch.uint8).cpu().numpy()
        elif name == "scale_inv":
            found[name] = tensor.cpu().numpy()
        else:
            found[name] = arrays.to_float64(tensor)
    for name, each in placed.items():
        each.assert_untouched(name, is_output=name in written)
    return found


def _norm(case: Case, given: dict[str, Any], options: dict[str, Any], suffix: str = "") -> Any:
    function = getattr(cupynorm, case.norm + suffix)
    keywords = {"weight": given["weight"], "bias": given["bias"], "eps": case.eps}
    return function(given["x"], case.num_cols, **keywords, **options)


def _in_place(case: Case, given: dict[str, Any], options: dict[str, Any]) -> tuple[Results, tuple]:
    out = given["x"] if case.residual is False else (given["x"], given["residual"])
    made = _norm(case, given, options | {"out": out, "return_residual": bool(case.residual)})
    if not case.residual:
        return {"y": made}, ("x",)
    return dict(zip(("y", "sum"), made)), ("x", "residual")


def _explicit(
    call: Call, given: dict[str, Any], options: dict[str, Any], placed: dict, device: str
) -> dict[str, Any]:
    case, how = call.case, call.family.y
    if isinstance(how, How):
        scale = {"block64": "block"}.get(how.scaling, how.scaling)
        if how.scaling == "given":
            scale = torch.tensor([GIVEN_SCALE], dtype=torch.float32, device=device)
        size = 64 if how.scaling == "block64" else 128
        quantize = {"group_size": size, "power_of_two": how.power_of_two}
        options = options | {"out_dtype": cupynorm.Quantize(how.dtype, scale, **quantize)}
    elif call.seed % 2:
        out = np.full((case.num_rows, case.num_cols), np.nan)
        placed["out"] = Placed(out, case.dtype("y"), call.layouts[4], device)
        options = options | {"out": placed["out"].tensor}
    made = _norm(case, given, options, "_forward")
    results = {"y": made.y, "rstd": made.rstd}
    if case.norm == "layer_norm":
        results["mean"] = made.mean
    if case.residual:
        results["sum"] = made.sum
    if isinstance(how, How):
        return results | {"y": made.y.data, "scale_inv": made.y.scale_inv}
    names = ["dx", *(f"d{name}" for name in ("weight", "bias") if given[name] is not None)]
    options = {"zero_centered_weight": case.zero_centered_weight, "dsum": given["dsum"]}
    if given["bias"] is not None:
        options["dbias_dtype"] = given["bias"].dtype
    if case.has_own_sum:
        names.append("dresidual")
        options |= {"dx_dtype": given["x"].dtype, "dresidual_dtype": given["residual"].dtype}
    statistics = [results[name] for name in ("mean", "rstd") if name in results]
    backward = getattr(cupynorm, f"{case.norm}_backward")
    x = made.sum if case.residual else given["x"]
    rows = (given["dy"], x, case.num_cols, *statistics, given["weight"])
    launch = cupynorm.Launch(case.strategy, sm_margin=case.sm_margin)
    found = backward(*rows, gradients=tuple(names), launch=launch, **options)
    return results | {name: getattr(found, name) for name in names}


def _recorded(
    call: Call, problem: Problem, given: dict[str, Any], options: dict[str, Any], device: str
) -> dict[str, Any]:
    """By layer_norm or rms_norm and torch's autograd."""
    case, fuse = call.case, call.family.fuse
    names = [name for name in ("x", "weight", "bias", "residual") if given[name] is not None]
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    given = given | leaves
    if case.residual:
        options = options | {"residual": leaves["residual"], "return_residual": True}
    if fuse is not None:
        name, values = _functor_array(call)
        leaves[name] = arrays.from_float64(values, case.x, torch.empty(0)).to(device)
        leaves[name].requires_grad_()
        options = options | {"fuse": getattr(cupynorm.functors, fuse)(**{name: leaves[name]})}
    made = _norm(case, given, options)
    results = {"y": made} if not case.residual else dict(zip(("y", "sum"), made))
    upstream = {
        name: given[f"d{name}"] for name in ("y", "sum") if given.get(f"d{name}") is not None
    }
    upstream = {name: each for name, each in upstream.items() if name in results}
    outputs = [results[name] for name in upstream]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), list(upstream.values()))
    results |= {f"d{name}": each for name, each in zip(leaves, gradients)}
    if not case.has_own_sum:
        results.pop("dresidual", None)  # it is dx
    return {name: each.detach() for name, each in results.items()}


def _functor_array(call: Call) -> tuple[str, np.ndarray]:
    """The array of the call's functor, exactly representable in the dtype of x."""
    functor = getattr(cupynorm.functors, call.family.fuse)
    shape = (call.num_rows if call.family.fuse == "silu_gate" else 1, call.family.num_cols)
    values = np.random.default_rng([call.seed, 1]).standard_normal(shape)
    return functor.arrays[0], decode(encode(values, call.family.x), call.family.x)


# What a call is held to.


def device_of(device: str) -> Device:
    """For which kernels are planned. Those that a CPU runs are planned for an H200."""
    return DEVICES["H200"] if device == "cpu" else cupynorm.gpu.launch.current_device()


def is_refused(call: Call, error: Exception) -> bool:
    """Whether the planner says that a strategy or a margin that is forced does not fit."""
    if not isinstance(error, ValueError):
        return False
    words = str(error)
    forced = call.family.strategy and any(each in words for each in _REFUSALS)
    return bool(forced or (call.sm_margin and words.startswith("sm_margin is ")))


def check_call(call: Call, device: str = "cuda") -> bool:
    """Raises AssertionError for what is wrong. Whether the call was made: it may be refused."""
    problem = problem_of(call)
    try:
        results = make(call, problem, device)
    except ValueError as error:
        if is_refused(call, error):
            return False
        raise
    off = [found for found in findings_of(call, problem, results, device) if not found.ok]
    assert not off, "\n".join(map(str, off))
    again = make(call, problem, device)
    for name, values in results.items():
        assert has_same_bits(values, again[name]), f"{name} differs when the call is repeated"
    how = call.family.y
    scales_rows = not isinstance(how, How) or how.scaling != "tensor"
    if call.num_rows > 1 and set(call.layouts) == {"contiguous"} and scales_rows:
        # A gate of one row is the first row of a longer one.
        row = 0 if call.family.fuse else call.seed % call.num_rows
        alone = make(replace(call, num_rows=1), row_of(problem, row), device)
        for name in set(_OF_ROWS) & results.keys():
            same = has_same_bits(results[name][row : row + 1], alone[name])
            assert same, f"row {row} of {name} differs alone"
    return True


def findings_of(call: Call, problem: Problem, results: Results, device: str) -> list[Finding]:
    """The worst element of each output. Raises AssertionError if one is absent, or too many."""
    case, family, of = call.case, call.family, device_of(device)
    welford = uses_welford(case, of)
    if isinstance(family.y, How):
        scale_inv = results["scale_inv"].reshape(
            (1,) if family.y.scaling in ("given", "tensor") else (case.num_rows, -1)
        )
        return judge_values(
            problem, family.y, results | {"scale_inv": scale_inv}, rounded_mean=welford
        )
    if family.fuse is not None:
        name, values = _functor_array(call)
        functor = getattr(cupynorm.functors, family.fuse)
        with_functor = FunctorProblem(problem, functor, {name: values}, {})
        expected = expect_with_functor(with_functor, welford)
        if values.shape != problem.x.shape:  # a sum in float32, which is rounded to values' dtype
            exact, allowed = expected[f"d{name}"]
            expected[f"d{name}"] = exact, allowed + half_ulp(exact, case.x)
    else:
        expected = expect(problem, rounded_mean=welford, added=results.get("sum"))
    unsaid = {"autograd": {"mean", "rstd"}, "explicit": set()}.get(family.by)
    if unsaid is None:  # in place
        unsaid = expected.keys() - {"y", "sum"}
    assert expected.keys() - unsaid == results.keys(), (set(expected) - unsaid, set(results))
    return judge_against(case, expected, results)


def row_of(problem: Problem, row: int) -> Problem:
    """The problem of one row."""
    there = {name: getattr(problem, name) for name in ("x", "dy", "residual", "dsum")}
    rows = {name: each[row : row + 1] for name, each in there.items() if each is not None}
    return replace(problem, case=replace(problem.case, num_rows=1), **rows)


def has_same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Also of zeros, which have a sign. The bits of a NaN do not matter."""
    if first.dtype.kind != "f":
        return np.array_equal(first, second)
    is_nan = np.isnan(first)
    return np.array_equal(first, second, equal_nan=True) and np.array_equal(
        np.signbit(first) | is_nan, np.signbit(second) | is_nan
    )
