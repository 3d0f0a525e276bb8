"""Every kernel path with one operand in another layout: right values, and no stray writes.

A kernel may read several rows as one piece of memory only if all of its tensors allow it. So each
operand has a layout that does not depend on the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from laid_out import LAYOUTS, as_numpy, lay_out
from turns import by_turns

import cupynorm
from cupynorm.check.cases import Case, Problem, random_problem
from cupynorm.check.kernels import uses_welford
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.dtypes import FLOAT8S, decode, encode
from cupynorm.plan.devices import DEVICES

OPERANDS = ("x", "residual", "dy", "dsum")
NUM_ROWS = 70


class Path(NamedTuple):
    """A width and dtype whose rows take one path through a kernel, forward or backward."""

    num_cols: int
    dtype: str
    strategy: str | None = None


PATHS = {
    "bundle of one lane a row": Path(3, "float16"),
    "bundle of wide packs": Path(8, "float16"),
    "bundle of two lanes a row": Path(65, "float32"),
    "bundle of eight lanes a row": Path(127, "float16"),
    "bundle of a warp a row": Path(641, "float16"),
    "registers": Path(512, "float16"),
    "ring of packs": Path(4096, "float16"),
    "ring of single elements": Path(2049, "float32"),
    "block": Path(1000, "float32", "block"),
    "cluster": Path(4001, "float16", "cluster"),
    "uncached": Path(515, "float16", "uncached"),
}


def run(library, path: Path, layouts: dict[str, str]) -> None:
    case = Case(
        "layer_norm",
        NUM_ROWS,
        path.num_cols,
        path.dtype,
        strategy=path.strategy,
        residual=True,
        dsum=True,
    )
    problem = random_problem(case)
    for name, layout in layouts.items():
        if layout == "broadcast":
            getattr(problem, name)[...] = getattr(problem, name)[:1]
    storage = np.dtype(path.dtype)
    given = {
        name: lay_out(
            library, getattr(problem, name).astype(storage), layouts.get(name, "contiguous")
        )
        for name in OPERANDS
    }
    weight, bias = (
        library.asarray(values.astype(storage)) for values in (problem.weight, problem.bias)
    )
    options = {"launch": cupynorm.Launch(path.strategy)}
    forward = cupynorm.layer_norm_forward(
        given["x"], path.num_cols, weight, bias, residual=given["residual"], **options
    )
    options["dsum"] = given["dsum"]
    saved = path.num_cols, forward.mean, forward.rstd, weight
    backward = cupynorm.layer_norm_backward(given["dy"], forward.sum, *saved, **options)
    assert_right(library, problem, {**forward._asdict(), **backward._asdict()})
    # Of the sum as another call may give it.
    case = replace(case, residual=False)
    alone = Problem(case, problem.x, problem.dy, problem.weight, problem.bias, dsum=problem.dsum)
    launch = {"launch": options["launch"]}
    forward = cupynorm.layer_norm_forward(given["x"], path.num_cols, weight, bias, **launch)
    saved = path.num_cols, forward.mean, forward.rstd, weight
    backward = cupynorm.layer_norm_backward(given["dy"], given["x"], *saved, **options)
    assert_right(
        library,
        alone,
        {"y": forward.y, "mean": forward.mean, "rstd": forward.rstd, **backward._asdict()},
    )
    for name, array in given.items():
        assert (np.float64(as_numpy(array)) == getattr(problem, name)).all(), (
            f"{name} was written to"
        )


def assert_right(library, problem: Problem, results: dict) -> None:
    results = {name: np.float64(as_numpy(array)) for name, array in results.items()}
    result = CheckResult(
        judge_all(problem, results, rounded_mean=uses_welford(problem.case, DEVICES["H200"]))
    )
    assert len(result.findings) == len(results)
    assert result.ok, f"\n{result}"


ONE_OPERAND = by_turns(PATHS, OPERANDS, LAYOUTS[1:])


@pytest.mark.slow
@pytest.mark.parametrize("path, operand, layout", ONE_OPERAND)
def test_one_operand_in_another_layout(path, operand, layout, library):
    run(library, PATHS[path], {operand: layout})


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_each_operand_in_a_layout_of_its_own(path, library):
    drawn = np.random.default_rng([*path.encode()]).choice(LAYOUTS, len(OPERANDS))
    run(library, PATHS[path], dict(zip(OPERANDS, drawn)))


@pytest.mark.parametrize("layout", ["gap", "misaligned", "reversed"])
@pytest.mark.parametrize("path", PATHS)
def test_out_in_another_layout(path, layout, library):
    path = PATHS[path]
    problem = random_problem(
        Case("layer_norm", NUM_ROWS, path.num_cols, path.dtype, strategy=path.strategy)
    )
    storage = np.dtype(path.dtype)
    x, weight, bias = (
        library.asarray(values.astype(storage))
        for values in (problem.x, problem.weight, problem.bias)
    )
    out = lay_out(library, np.full(problem.x.shape, np.nan, storage), layout)
    launch = cupynorm.Launch(path.strategy)
    y = cupynorm.layer_norm(x, path.num_cols, weight, bias, out=out, launch=launch)
    assert y is out
    assert_right(library, problem, {"y": out})
    memory = out if out.base is None else out.base
    while getattr(memory, "base", None) is not None:
        memory = memory.base
    num_written = int((~np.isnan(np.float64(as_numpy(memory)))).sum())
    assert num_written == out.size, "what lies between the rows was written to"


@pytest.mark.parametrize("dtype", FLOAT8S)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_residual_of_an_8_bit_output(layout, dtype, library):
    generator = np.random.default_rng(0)
    x, residual = (
        decode(encode(generator.standard_normal((NUM_ROWS, 641)), "float16"), "float16")
        for _ in range(2)
    )
    if layout == "broadcast":
        residual[...] = residual[:1]
    given = [
        lay_out(library, x.astype("float16"), "contiguous"),
        lay_out(library, residual.astype("float16"), layout),
    ]
    right = cupynorm.layer_norm(
        given[0],
        641,
        residual=library.ascontiguousarray(given[1]),
        out_dtype=dtype,
        return_residual=True,
    )
    got = cupynorm.layer_norm(
        given[0], 641, residual=given[1], out_dtype=dtype, return_residual=True
    )
    assert (as_numpy(got[1]) == as_numpy(right[1])).all() and (
        as_numpy(got[0].data) == as_numpy(right[0].data)
    ).all()


def drawn(num_cols: int, library, layouts: dict[str, str], **dtypes: str) -> dict:
    """Tensors in these layouts, float16 unless another dtype is named.

    One that is broadcast repeats its first row.
    """
    generator = np.random.default_rng(num_cols)
    tensors = {}
    for name, layout in layouts.items():
        values = generator.standard_normal((NUM_ROWS, num_cols))
        values[...] = values[:1] if layout == "broadcast" else values
        tensors[name] = lay_out(library, values.astype(dtypes.get(name, "float16")), layout)
    return tensors


def same_as_contiguous(library, call, tensors: dict) -> None:
    """A call on other layouts has the bits of the same call on contiguous copies."""
    copies = {name: library.ascontiguousarray(array) for name, array in tensors.items()}
    for got, expected in zip(call(**tensors), call(**copies)):
        assert as_numpy(got).tobytes() == as_numpy(expected).tobytes()


@pytest.mark.parametrize("layout", ["gap", "misaligned", "broadcast", "reversed"])
def test_x_in_another_layout_on_a_path_that_dispatch_rarely_takes(layout, library):
    """smem: one pack_size for all layouts."""
    launch = cupynorm.Launch("block", cupynorm.Tile(1, 512))

    def call(x):
        return (cupynorm.layer_norm(x, 1000, launch=launch),)

    same_as_contiguous(library, call, drawn(1000, library, {"x": layout}))


@pytest.mark.parametrize("scale", ["row", "block"])
@pytest.mark.parametrize("layout", ["gap", "misaligned", "broadcast", "reversed"])
def test_x_of_an_8_bit_output_in_another_layout(layout, scale, library):
    def call(x):
        y = cupynorm.layer_norm(x, 640, out_dtype=cupynorm.Quantize("float8_e4m3fn", scale))
        return y.data, y.scale_inv

    same_as_contiguous(library, call, drawn(640, library, {"x": layout}))


@pytest.mark.parametrize("x,residual", [("gap", "broadcast"), ("misaligned", "reversed")])
def test_a_scaled_input_and_a_wider_residual_in_other_layouts(x, residual, library):
    """SumLoad, which reads one tensor for each operand of the sum."""
    own = cupynorm.functors.row_scale(library.linspace(0.5, 2, NUM_ROWS, dtype="float32"))

    def call(x, residual):
        options = {"return_residual": True, "fuse": own}
        return cupynorm.layer_norm(x, 640, residual=residual, **options)

    tensors = drawn(640, library, {"x": x, "residual": residual}, residual="float32")
    same_as_contiguous(library, call, tensors)
