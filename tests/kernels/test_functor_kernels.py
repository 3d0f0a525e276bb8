"""A user's functor in every path of every strategy, forward and backward, against its reference."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from kernel_paths import SMALL
from laid_out import as_numpy, lay_out

import cupynorm
from cupynorm import functors
from cupynorm.dispatch.devices import Device
from cupynorm.dispatch.problem import Tile
from cupynorm.dtypes import decode, encode
from cupynorm.verify.cases import Case, random_problem
from cupynorm.verify.check_functor import FunctorProblem, judge_functor, run_with_functor
from cupynorm.verify.kernels import CpuMachine
from cupynorm.verify.results import CheckResult

MIXED = cupynorm.functor(  # reads its own and another column, an array and a number
    "mixed",
    "y = y * gate + alpha * y_at(num_cols - 1 - col) * C(row + 1);",
    arrays=("gate",),
    numbers=("alpha",),
    backward="""
        dgate = dy * y;
        dy = dy * gate + alpha * dy_at(num_cols - 1 - col) * C(row + 1);
    """,
    reference=lambda y, gate, alpha: (
        y * gate + alpha * y[:, ::-1] * (1 + np.arange(len(y)))[:, None]
    ),
)
SOFT = cupynorm.functor(
    "soft",
    "x = bias + tanh(alpha * x);",
    arrays=("bias",),
    numbers=("alpha",),
    backward="""
        const C t = tanh(alpha * x);
        dbias = dx;
        dx = dx * alpha * (C(1) - t * t);
    """,
    reference=lambda x, bias, alpha: bias + np.tanh(alpha * x),
)
ROLES = {"load": SOFT, "store": MIXED}


class Path_(NamedTuple):
    """A problem that takes one path, and the paths that the plans then have."""

    num_cols: int
    dtype: str
    strategy: str | None
    tile: dict | None = None
    device: Device = SMALL


# No row fits its registers, so clusters keep rows in shared memory.
NO_REGISTERS = replace(SMALL, name="no registers", registers_per_sm=1)
FOUR = {"pack_size": 4, "threads_per_row": 32, "packs_per_thread": 1}
PATHS = {
    "warp": Path_(96, "float16", None),
    "bundle": Path_(65, "float32", None),
    "block": Path_(128, "float32", "block"),
    "block of single elements": Path_(67, "float16", "block"),
    "ring": Path_(128, "float32", "block", {**FOUR, "stages": 2}),
    "smem": Path_(128, "float32", "block", {**FOUR, "packs_per_thread": 0}),
    "cluster": Path_(136, "float16", "cluster"),
    "cluster in smem": Path_(136, "float16", "cluster", device=NO_REGISTERS),
    "uncached": Path_(72, "float16", "uncached"),
    "double": Path_(33, "float64", None),
}


def given_of(role: str, path: Path_, norm: str, shape: str) -> FunctorProblem:
    tile = None if path.tile is None else Tile(**path.tile)
    case = Case(norm, 9, path.num_cols, path.dtype, strategy=path.strategy, tile=tile)
    rows, cols = (9 if shape != "cols" else 1), (path.num_cols if shape != "rows" else 1)
    drawn = np.random.default_rng(3).standard_normal((rows, cols))
    own = ROLES[role]
    values = {own.arrays[0]: decode(encode(drawn, path.dtype), path.dtype)}
    return FunctorProblem(random_problem(case), own, values, {"alpha": 0.75})


CASES = [
    (role, name, ("layer_norm", "rms_norm")[at % 2], ("full", "cols", "rows")[at % 3])
    for role in ROLES
    for at, name in enumerate(PATHS)
    if role == "store" or name != "ring"  # a load leaves the copy engine nothing to fetch
]


@pytest.mark.parametrize(("role", "name", "norm", "shape"), CASES)
def test_every_path(role, name, norm, shape):
    path = PATHS[name]
    given = given_of(role, path, norm, shape)
    where = CpuMachine(path.device)
    made = run_with_functor(given, where)
    result = CheckResult(judge_functor(given, made.results, where))
    assert result.ok, f"\n{result}"
    array = ROLES[role].arrays[0]
    wanted = {"y", "rstd", "dx", "dweight", "dbias", f"d{array}"}
    assert {found.tensor for found in result.findings} - {"mean"} == wanted
    forward, backward = made.plans["forward"], made.plans["backward"]
    expected = name.split(" ")[0] if name in ("ring", "smem") else None
    if name == "bundle" and role == "store":
        expected = "bundle"
    assert expected is None or forward.tile.path == expected
    if name == "cluster in smem":
        assert forward.tile.path == backward.tile.path == "smem"
    if path.strategy is not None:
        assert forward.strategy == backward.strategy == path.strategy
    assert all(
        f"{ROLES[role].name}_of_{role}" in plan.launches[0].kernel.functors
        for plan in (forward, backward)
    )


# Layouts of the arrays.

NUM_ROWS, NUM_COLS = 14, 64


def through_the_api(library, x, fuse, dtype):
    """y and all gradients of a call with functors, of the kernels."""
    num_cols = x.shape[-1]
    weight = library.asarray(np.linspace(0.5, 1.5, num_cols).astype(dtype))
    made = cupynorm.layer_norm_forward(x, num_cols, weight, fuse=fuse)
    given = made.y, made.sum, num_cols, made.mean, made.rstd, weight
    wanted = ("dx", "dweight", "functors")
    back = cupynorm.layer_norm_backward(*given, fuse=fuse, input=x, gradients=wanted)
    return [as_numpy(each) for each in (made.y, back.dx, back.dweight, *back.functors)]


@pytest.mark.parametrize("layout", ["gap", "misaligned", "broadcast", "transposed", "reversed"])
def test_layouts_of_an_array(layout, library):
    """The same bits as with a contiguous array."""
    generator = np.random.default_rng(5)
    x, gate, bias = (
        generator.standard_normal((NUM_ROWS, NUM_COLS)).astype("float16") for _ in range(3)
    )
    if layout == "broadcast":
        gate[...] = gate[:1]
        bias[...] = bias[:1]
    results = []
    for form in ("contiguous", layout):
        gate_, bias_ = (lay_out(library, each, form) for each in (gate, bias))
        own = functors.bias_gelu(bias_), functors.silu_gate(gate_)
        results.append(through_the_api(library, library.asarray(x), own, "float16"))
    for right, got in zip(*results):
        assert np.isfinite(np.float64(right)).all()
        assert right.tobytes() == got.tobytes()


SHAPES = [
    (2, 1, 1, NUM_COLS),  # adaLN
    (1, 7, 1, NUM_COLS),  # rotary
    (2, 7, 3, 1),
    (3, 1),
    (NUM_COLS,),
    (1,),
    (7, 1, 1),
    (2, 7, 1, NUM_COLS),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_broadcast_arrays(shape, library):
    """The bits of y, dx and dweight as with the array written out, and the gradient summed."""
    generator = np.random.default_rng(7)
    x = library.asarray(generator.standard_normal((2, 7, 3, NUM_COLS)).astype("float32"))
    gate = generator.standard_normal(shape).astype("float32")
    given = (
        library.asarray(gate),
        library.asarray(np.ascontiguousarray(np.broadcast_to(gate, x.shape))),
    )
    alone, full = (
        through_the_api(library, x, functors.silu_gate(each), "float32") for each in given
    )
    for right, got in zip(full[:3], alone[:3]):
        assert right.tobytes() == got.tobytes()
    of_gate, terms = alone[3], np.float64(full[3])
    assert of_gate.shape == shape and of_gate.dtype == np.float32
    axes = tuple(range(4 - len(shape)))
    axes += tuple(at for at in range(4) if at >= 4 - len(shape) and shape[at - 4] == 1)
    right = terms.sum(axis=axes, keepdims=True).reshape(shape)
    size = np.abs(terms).sum(axis=axes, keepdims=True).reshape(shape)
    assert (np.abs(of_gate - right) <= 2.0**-24 * terms.size / right.size * size).all()


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_leading_dimensions_of_any_strides(layout, library):
    """The same bits as with a contiguous array."""
    generator = np.random.default_rng(8)
    x, gate = (generator.standard_normal((2, 7, 3, NUM_COLS)).astype("float32") for _ in range(2))
    gate = library.asarray(gate)
    if layout == "transposed":
        gate = library.ascontiguousarray(gate.swapaxes(0, 1)).swapaxes(0, 1)
    else:
        gate = library.broadcast_to(gate[:1, :, :1], x.shape)
    given = gate, library.ascontiguousarray(gate)
    results = (
        through_the_api(library, library.asarray(x), functors.silu_gate(each), "float32")
        for each in given
    )
    for got, right in zip(*results):
        assert got.tobytes() == right.tobytes()


# Several functors.

SHIFTED = cupynorm.functor(  # its backward reads no x
    "shifted",
    "x = x * scale + C(seed % 7) * C(row);",
    arrays=("scale",),
    per_row=("scale",),
    seeds=("seed",),
    backward="dx = dx * scale;",
)
STRATEGIES = {33: None, 65: None, 66: "uncached"}


@pytest.mark.parametrize("num_cols", STRATEGIES)
@pytest.mark.parametrize("adds", [False, True])
def test_several_functors(num_cols, adds, library):
    """y and every gradient of two chains, as torch has them for the formulas; in any order between
    x and y. The first one on y reads other columns."""
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(num_cols)
    shapes = {"bias": (num_cols,), "gate": (5, num_cols), "scale": (num_cols,), "gate2": (5, 1)}
    shapes |= {name: (5, num_cols) for name in ("x", "residual", "dy")}
    drawn = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    x, residual, dy, bias, gate, scale, gate2 = (
        library.asarray(drawn[name])
        for name in ("x", "residual", "dy", "bias", "gate", "scale", "gate2")
    )
    residual = residual if adds else None
    fuse = (
        *(MIXED(gate, 0.5), SOFT(bias, 0.25), functors.silu_gate(gate2)),
        *(functors.layer_scale(scale), functors.silu_gate(gate)),
    )
    options = {"launch": cupynorm.Launch(STRATEGIES[num_cols])}
    made = cupynorm.layer_norm_forward(x, num_cols, residual=residual, fuse=fuse, **options)
    wanted = ("dx", "dresidual", "functors")
    back = cupynorm.layer_norm_backward(
        *(dy, made.sum, num_cols, made.mean, made.rstd),
        fuse=fuse,
        input=x,
        gradients=wanted,
        **options,
    )
    given = {name: torch.tensor(each).requires_grad_() for name, each in drawn.items()}
    row = (given["bias"] + torch.tanh(0.25 * given["x"])) * given["scale"]
    row = row + given["residual"] if adds else row
    y = torch.nn.functional.layer_norm(row, (num_cols,))
    y = y * given["gate"] + 0.5 * y.flip(1) * torch.arange(1, 6)[:, None]
    y = y * torch.nn.functional.silu(given["gate2"]) * torch.nn.functional.silu(given["gate"])
    np.testing.assert_allclose(as_numpy(made.y), y.detach(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(as_numpy(made.sum), row.detach(), rtol=1e-12)
    names = ["x", "bias", "scale", "gate", "gate2"]
    dx, *others, of_gate2 = torch.autograd.grad(
        y, [row if name == "sum" else given[name] for name in names], torch.tensor(drawn["dy"])
    )
    of_bias, of_scale, of_mixed, of_silu2, of_silu = back.functors
    right = {"dx": dx, "bias": others[0], "scale": others[1], "gate2": of_gate2, "gate": others[2]}
    got = {"dx": back.dx, "bias": of_bias, "scale": of_scale, "gate2": of_silu2}
    got["gate"] = of_mixed + of_silu
    for name, each in got.items():
        np.testing.assert_allclose(as_numpy(each), right[name], rtol=1e-8, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("num_cols", STRATEGIES)
def test_a_gradient_that_needs_no_input(num_cols, library):
    """Seeds and arrays of one element per row, in a kernel that reads no input in backward."""
    generator = np.random.default_rng(num_cols)
    x, residual = (
        library.asarray(generator.standard_normal((3, 2, num_cols)).astype("float32"))
        for _ in range(2)
    )
    scale = library.asarray(np.exp2(np.arange(6.0)).astype("float32").reshape(3, 2))
    options = {"launch": cupynorm.Launch(STRATEGIES[num_cols])}
    fuse = SHIFTED(scale, 2**40 + 3)
    made = cupynorm.rms_norm_forward(x, num_cols, residual=residual, fuse=fuse, **options)
    shifts = (2**40 + 3) % 7 * np.arange(6.0).reshape(3, 2, 1)
    right = as_numpy(x) * as_numpy(scale)[..., None] + shifts + as_numpy(residual)
    np.testing.assert_allclose(as_numpy(made.sum), right, rtol=1e-6, atol=1e-6)
    wanted = ("dx", "dresidual")
    seed = library.asarray(np.array([2**40 + 3]))
    back = cupynorm.rms_norm_backward(
        *(made.y, made.sum, num_cols, made.rstd),
        fuse=SHIFTED(scale, seed),
        gradients=wanted,
        **options,
    )
    right = as_numpy(back.dresidual) * as_numpy(scale)[..., None]
    np.testing.assert_array_equal(as_numpy(back.dx), right)
