"""The public calls: what they take, what they return and where it lies, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from array_libraries import (
    LIBRARIES,
    TORCH,
    NumPy,
    Torch,
    api,
    api_results,
    library,
    loaded_torch,
)

import cupynorm
from cupynorm.check.allowed import expect
from cupynorm.check.cases import NORMS, Case, Problem, random_problem
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import arrays, launch
from cupynorm.norm import kept
from cupynorm.norm.options import extents_of
from cupynorm.plan.problem import Tile

ROOT = Path(__file__).parents[2]


def check(problem: Problem, lib) -> None:
    results = api_results(problem, lib)
    result = CheckResult(
        judge_all(problem, results, rounded_mean=problem.case.strategy == "uncached")
    )
    assert len(result.findings) == len(results) >= 3
    assert result.ok, f"\n{result}"


# -- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cols", [1, 40, 769, 9000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_values(norm_name, name, dtype, num_cols):
    check(random_problem(Case(norm_name, 5, num_cols, dtype)), library(name))


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("norm_name", NORMS)
def test_values_of_bfloat16(norm_name, name):
    check(random_problem(Case(norm_name, 5, 768, "bfloat16", weight="float32")), library(name))


def test_bfloat16_of_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    check(random_problem(Case("layer_norm", 5, 40, "bfloat16")), NumPy())
    y = cupynorm.layer_norm(np.ones((2, 4), ml_dtypes.bfloat16), 4)
    assert y.dtype == ml_dtypes.bfloat16 and (y == 0).all()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("zero_centered_weight", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
def test_values_with_options(name, zero_centered_weight, residual):
    for weight, bias in (("same", "same"), ("same", None), (None, "same")):
        options = {
            "weight": weight,
            "bias": bias,
            "zero_centered_weight": zero_centered_weight,
            "residual": residual,
        }
        check(random_problem(Case("layer_norm", 5, 40, "float32", **options)), library(name))


@pytest.mark.parametrize("strategy", ["block", "cluster", "uncached"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_values_of_a_strategy_that_is_asked_for(name, strategy):
    check(random_problem(Case("layer_norm", 5, 40, "float32", strategy=strategy)), library(name))


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("name", TORCH)
def test_out_dtype(name, out_dtype):
    torch, lib = loaded_torch(), library(name)
    problem = random_problem(Case("layer_norm", 5, 40, "float32", y=out_dtype))
    check(problem, lib)
    x = lib.put(problem.x, "float32")
    expected = cupynorm.layer_norm(x, 40, out_dtype=out_dtype)
    assert expected.dtype == getattr(torch, out_dtype)
    assert torch.equal(cupynorm.layer_norm(x, 40, out_dtype=getattr(torch, out_dtype)), expected)
    if out_dtype != "bfloat16":
        assert torch.equal(cupynorm.layer_norm(x, 40, out_dtype=np.dtype(out_dtype)), expected)


@pytest.mark.parametrize("name", LIBRARIES)
def test_types_shapes_and_dtypes_of_what_returns(name):
    lib = library(name)
    for dtype, compute in (("float16", "float32"), ("float32", "float32"), ("float64", "float64")):
        x = lib.put(np.random.default_rng(0).standard_normal((2, 3, 8)), dtype)
        forward = cupynorm.layer_norm_forward(x)
        backward = cupynorm.layer_norm_backward(x, x, forward.mean, forward.rstd)
        assert [type(value) for value in (*forward, *backward)] == [type(x)] * 7
        assert [tuple(value.shape) for value in (*forward, *backward)] == [
            (2, 3, 8),
            (2, 3),
            (2, 3),
        ] + [(2, 3, 8)] * 2 + [(8,)] * 2
        assert [arrays.dtype_name(value) for value in (*forward, *backward)] == [
            dtype,
            compute,
            compute,
        ] + [dtype] * 4
        assert forward.sum is x
        assert cupynorm.rms_norm_forward(x).mean is None


@pytest.mark.parametrize("name", TORCH)
def test_positional_arguments_are_those_of_torch(name):
    torch, lib = loaded_torch(), library(name)
    functional = torch.nn.functional
    generator = np.random.default_rng(0)
    x, weight, bias = (
        lib.put(generator.standard_normal(shape), "float64") for shape in ((3, 5, 40), 40, 40)
    )
    # Two float64 results of the same formula, in another order of additions.
    close = {"rtol": 1e-12, "atol": 1e-12}
    for arguments in (
        ((40,),),
        ([40],),
        ((40,), weight),
        ((40,), weight, bias),
        ((40,), weight, bias, 0.1),
        ((40,), None, bias),
    ):
        torch.testing.assert_close(
            cupynorm.layer_norm(x, *arguments), functional.layer_norm(x, *arguments), **close
        )
    for arguments in (
        ((40,),),
        ([40],),
        ((40,), weight),
        ((40,), weight, 0.1),
        ((40,), None, 0.1),
        ((40,), weight, None),
    ):
        torch.testing.assert_close(
            cupynorm.rms_norm(x, *arguments), functional.rms_norm(x, *arguments), **close
        )
    named = {"input": x, "normalized_shape": (40,), "weight": weight, "eps": 0.1}
    torch.testing.assert_close(
        cupynorm.layer_norm(**named, bias=bias), functional.layer_norm(**named, bias=bias), **close
    )
    torch.testing.assert_close(cupynorm.rms_norm(**named), functional.rms_norm(**named), **close)
    torch.testing.assert_close(cupynorm.layer_norm(x, 40), functional.layer_norm(x, (40,)), **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TORCH)
def test_the_default_eps_of_rms_norm_is_that_of_torch(name, dtype):
    torch, lib = loaded_torch(), library(name)
    # Squares of the size of eps: another eps is another result.
    eps = 2.0**-52 if dtype == "float64" else 2.0**-23
    x = lib.put(np.random.default_rng(0).standard_normal((5, 64)) * np.sqrt(eps), dtype)
    expected = torch.nn.functional.rms_norm(x.double(), (64,), eps=eps)
    allowed = 4 * DTYPES[dtype].half_ulp
    torch.testing.assert_close(
        cupynorm.rms_norm(x, 64).double(), expected, rtol=allowed, atol=allowed
    )
    # torch 2.4 took the epsilon of the input's dtype, which differs where the arithmetic is wider.
    if DTYPES[dtype].compute == dtype or tuple(map(int, torch.__version__.split(".")[:2])) >= (
        2,
        11,
    ):
        theirs = torch.nn.functional.rms_norm(x, (64,)).double()
        torch.testing.assert_close(theirs, expected, rtol=2 * allowed, atol=2 * allowed)
    other = torch.nn.functional.rms_norm(x.double(), (64,), eps=2 * eps)
    assert (other - expected).abs().max() > 8 * allowed


@pytest.mark.parametrize(
    "shape, normalized_shape",
    [
        ((8,), 8),
        ((3, 8), (8,)),
        ((2, 3, 8), [3, 8]),
        ((2, 3, 2, 4), (2, 4)),
        ((2, 1, 3, 2, 4), (3, 2, 4)),
        ((2, 4), (2, 4)),
    ],
)
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_ranks_and_normalized_shapes(norm_name, name, shape, normalized_shape):
    lib = library(name)
    normalized = (
        (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    )
    num_cols = int(np.prod(normalized))
    problem = random_problem(Case(norm_name, int(np.prod(shape)) // num_cols, num_cols, "float32"))
    expected = api_results(problem, lib)
    x, dy = (lib.put(values.reshape(shape), "float32") for values in (problem.x, problem.dy))
    weight, bias = (
        lib.put(values.reshape(normalized), "float32") for values in (problem.weight, problem.bias)
    )
    forward = api(norm_name, "forward")(x, weight, bias, 1e-5)
    statistics = (forward.mean, forward.rstd) if norm_name == "layer_norm" else (forward.rstd,)
    backward = api(norm_name, "backward")(dy, x, *statistics, weight)
    leading = shape[: len(shape) - len(normalized)]
    for tensor, got, extent in (
        ("y", forward.y, shape), ("rstd", forward.rstd, leading), ("dx", backward.dx, shape),
        ("dweight", backward.dweight, normalized), ("dbias", backward.dbias, normalized),
    ):  # fmt: skip
        assert tuple(got.shape) == extent
        assert lib.get(got).tobytes() == expected[tensor].tobytes(), tensor
    y = getattr(cupynorm, norm_name)(x, normalized_shape, weight, bias=bias, eps=1e-5)
    assert lib.get(y).tobytes() == expected["y"].tobytes()


@pytest.mark.parametrize("name", LIBRARIES)
def test_gradients_that_are_asked_for(name):
    lib = library(name)
    problem = random_problem(Case("layer_norm", 5, 40, "float32"))
    x, dy, weight = (lib.put(getattr(problem, key), "float32") for key in ("x", "dy", "weight"))
    forward = cupynorm.layer_norm_forward(x, weight)
    everything = cupynorm.layer_norm_backward(dy, x, forward.mean, forward.rstd, weight)
    names = cupynorm.Backward._fields
    for number in range(8):
        wanted = [key for bit, key in enumerate(names) if number >> bit & 1]
        for given in (wanted, tuple(wanted), iter(wanted)):
            found = cupynorm.layer_norm_backward(
                dy, x, forward.mean, forward.rstd, weight, gradients=given
            )
            for key in names:
                if key in wanted:
                    assert (
                        lib.get(getattr(found, key)).tobytes()
                        == lib.get(getattr(everything, key)).tobytes()
                    )
                else:
                    assert getattr(found, key) is None


@pytest.mark.parametrize("name", LIBRARIES)
def test_dtypes_of_parameter_gradients(name):
    lib = library(name)
    problem = random_problem(Case("layer_norm", 5, 40, "float16", weight="float32"))
    x, dy = (lib.put(getattr(problem, key), "float16") for key in ("x", "dy"))
    weight = lib.put(problem.weight, "float32")
    forward = cupynorm.layer_norm_forward(x, weight)
    statistics = (forward.mean, forward.rstd)
    for given, options, expected in (
        (weight, {}, ("float32", "float32")),
        (None, {}, ("float16", "float16")),
        (weight, {"dweight_dtype": "float16", "dbias_dtype": "float64"}, ("float16", "float64")),
        (None, {"dweight_dtype": "float32", "dbias_dtype": "float32"}, ("float32", "float32")),
    ):
        found = cupynorm.layer_norm_backward(dy, x, *statistics, given, **options)
        assert (arrays.dtype_name(found.dweight), arrays.dtype_name(found.dbias)) == expected
        np.testing.assert_allclose(lib.get(found.dbias), problem.dy.sum(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_return_residual(norm_name, name):
    lib = library(name)
    problem = random_problem(Case(norm_name, 5, 40, "float16", residual=True))
    x, residual = (lib.put(getattr(problem, key), "float16") for key in ("x", "residual"))
    call = getattr(cupynorm, norm_name)
    y, added = call(x, 40, residual=residual, return_residual=True)
    assert (
        lib.get(added)
        == (problem.x.astype(np.float16) + problem.residual.astype(np.float16)).astype(np.float64)
    ).all()
    assert (lib.get(y) == lib.get(call(added, 40))).all()
    assert (lib.get(call(x, 40, residual=residual)) == lib.get(y)).all()
    y, same = call(x, 40, return_residual=True)
    assert same is x and (lib.get(y) == lib.get(call(x, 40))).all()


@pytest.mark.parametrize("name", LIBRARIES)
def test_out(name):
    lib = library(name)
    problem = random_problem(Case("layer_norm", 5, 40, "float32"))
    x, weight = lib.put(problem.x, "float32"), lib.put(problem.weight, "float32")
    expected = lib.get(cupynorm.layer_norm(x, 40, weight))
    out = lib.put(np.full((5, 40), np.nan), "float32")
    assert cupynorm.layer_norm(x, 40, weight, out=out) is out
    assert (lib.get(out) == expected).all()
    # Rows that are a part of wider rows, and a dtype of its own.
    wide = lib.put(np.full((5, 96), 7.0), "float64")
    out = wide[:, 24:64]
    assert cupynorm.layer_norm(x, 40, weight, out=out, out_dtype="float64") is out
    np.testing.assert_allclose(lib.get(wide)[:, 24:64], expected, rtol=2e-6, atol=2e-6)
    assert (lib.get(wide)[:, :24] == 7).all() and (lib.get(wide)[:, 64:] == 7).all()
    forward = cupynorm.layer_norm_forward(x, weight, out=out, out_dtype="float64")
    assert forward.y is out


# -- torch.autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_centered_weight", [False, True])
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("norm_name", NORMS)
def test_gradcheck(norm_name, name, zero_centered_weight):
    torch, lib = loaded_torch(), library(name)
    generator = np.random.default_rng(0)
    inputs = [
        lib.put(generator.standard_normal(shape), "float64").requires_grad_()
        for shape in ((2, 3, 8), (2, 3, 8), 8, 8)
    ]

    def both(x, residual, weight, bias):
        return getattr(cupynorm, norm_name)(
            x,
            8,
            weight,
            bias=bias,
            residual=residual,
            return_residual=True,
            zero_centered_weight=zero_centered_weight,
        )

    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradcheck(lambda x: getattr(cupynorm, norm_name)(x, (3, 8)), inputs[:1])


@pytest.mark.parametrize("needs", ["x", "weight", "bias", "residual"])
@pytest.mark.parametrize("name", TORCH)
def test_only_one_input_requires_a_gradient(name, needs):
    torch, lib = loaded_torch(), library(name)
    problem = random_problem(Case("layer_norm", 5, 40, "float32", residual=True))
    given = {
        key: lib.put(getattr(problem, key), "float32")
        for key in ("x", "weight", "bias", "residual")
    }
    given[needs].requires_grad_()
    y = cupynorm.layer_norm(
        given["x"], 40, given["weight"], given["bias"], residual=given["residual"]
    )
    y.backward(lib.put(problem.dy, "float32"))
    results = api_results(problem, lib)
    expected = results["dx" if needs in ("x", "residual") else f"d{needs}"]
    assert (lib.get(given[needs].grad) == expected).all()
    assert all(tensor.grad is None for key, tensor in given.items() if key != needs)
    with torch.no_grad():
        assert not cupynorm.layer_norm(given["x"], 40, given["weight"], given["bias"]).requires_grad


@pytest.mark.parametrize("name", TORCH)
def test_gradients_have_the_dtypes_of_their_inputs(name):
    torch, lib = loaded_torch(), library(name)
    x = lib.put(np.random.default_rng(0).standard_normal((5, 40)), "bfloat16").requires_grad_()
    weight, bias = (
        lib.put(np.ones(40), "float32").requires_grad_(),
        lib.put(np.zeros(40), "float16").requires_grad_(),
    )
    y = cupynorm.layer_norm(x, 40, weight, bias, out_dtype=torch.float32)
    y.backward(torch.ones_like(y))
    assert (y.dtype, x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (
        torch.float32, torch.bfloat16, torch.float32, torch.float16,
    )  # fmt: skip
    assert (bias.grad == 5).all()


@pytest.mark.parametrize("name", TORCH)
def test_only_the_sum_is_used(name):
    lib = library(name)
    x, residual = (
        lib.put(np.random.default_rng(seed).standard_normal((5, 40)), "float32").requires_grad_()
        for seed in (0, 1)
    )
    weight = lib.put(np.ones(40), "float32").requires_grad_()
    _, added = cupynorm.layer_norm(x, 40, weight, residual=residual, return_residual=True)
    (2 * added).sum().backward()
    assert (x.grad == 2).all() and (residual.grad == 2).all()
    assert weight.grad is None or (weight.grad == 0).all()


@pytest.mark.parametrize("name", TORCH)
def test_what_is_saved_may_come_back_elsewhere(name):
    torch, lib = loaded_torch(), library(name)
    problem = random_problem(Case("layer_norm", 6, 40, "float32"))
    expected = api_results(problem, lib)

    def misaligned(tensor):
        return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)

    def apart(tensor):
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]

    def gradients(unpack):
        seen = []

        def counted(tensor):
            seen.append(tensor)
            return unpack(tensor)

        leaves = [
            lib.put(getattr(problem, key), "float32").requires_grad_()
            for key in ("x", "weight", "bias")
        ]
        with torch.autograd.graph.saved_tensors_hooks(torch.detach, counted):
            y = cupynorm.layer_norm(leaves[0], 40, *leaves[1:])
        found = torch.autograd.grad(y, leaves, lib.put(problem.dy, "float32"))
        assert len(seen) == 4
        return dict(zip(("dx", "dweight", "dbias"), map(lib.get, found)))

    # Twice: each also after another has prepared the backward that it must not take.
    for unpack in (torch.clone, misaligned, apart) * 2:
        results = gradients(unpack)
        findings = judge_all(problem, results)
        assert len(findings) == 3 and CheckResult(findings).ok
        if lib.on_host:
            assert all((results[key] == expected[key]).all() for key in results)


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [40, (40,), [40], np.int64(40), (np.int32(40),), np.array([40])])
def test_normalized_shape_becomes_a_tuple_of_ints(given):
    # A key to prepared calls: 40.0 equals 40 and True equals 1, so neither may become one.
    found = extents_of(given)
    assert found == (40,) and type(found) is tuple and type(found[0]) is int
    for wrong in (
        40.0,
        (40.0,),
        [True],
        True,
        (2, True),
        "40",
        None,
        ((40,),),
        1j,
        np.float64(40),
        np.array([40.0]),
    ):
        with pytest.raises(TypeError, match="expected an int or a sequence of ints"):
            extents_of(wrong)


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


X = ones(4, 40)
OVERLAPPED = ones(8, 40)


def torch_ones(*shape: int):
    return loaded_torch().ones(*shape)


REFUSED = {
    "input is a list": (TypeError, "input is a list; expected a CuPy, torch or NumPy array", lambda: ([1.0], 1)),
    "input of ints": (
        TypeError, "input is of dtype int64; expected one of float16, bfloat16", lambda: (ones(4, 40, dtype="int64"), 40),
    ),
    "input of bools": (TypeError, "input is of dtype bool", lambda: (ones(4, 40, dtype="bool"), 40)),
    "input of complex": (TypeError, "input is of dtype complex64", lambda: (ones(4, 40, dtype="complex64"), 40)),
    "input without dimensions": (ValueError, r"normalized_shape is \(40,\), input has shape \(\)", lambda: (ones(), 40)),
    "other normalized_shape": (ValueError, r"normalized_shape is \(41,\), input has shape \(4, 40\)", lambda: (X, 41)),
    "too long normalized_shape": (ValueError, r"normalized_shape is \(1, 4, 40\), input has shape", lambda: (X, (1, 4, 40))),
    "first dimension": (ValueError, r"normalized_shape is \(4,\), input has shape", lambda: (X, 4)),
    "negative normalized_shape": (ValueError, r"normalized_shape is \(-1,\)", lambda: (X, -1)),
    "empty normalized_shape": (ValueError, "normalized_shape is empty", lambda: (X, ())),
    "fractional normalized_shape": (TypeError, r"normalized_shape is 40\.0; expected an int", lambda: (X, 40.0)),
    "normalized_shape of fractions": (TypeError, r"normalized_shape is \(40\.0,\); expected an int", lambda: (X, (40.0,))),
    "normalized_shape in words": (TypeError, "normalized_shape is '40'; expected an int", lambda: (X, "40")),
    "no normalized_shape": (TypeError, "normalized_shape is None; expected an int", lambda: (X, None)),
    "true normalized_shape": (TypeError, "normalized_shape is True; expected an int", lambda: (ones(4, 1), True)),
    "normalized_shape of truths": (TypeError, r"normalized_shape is \(True,\); expected an int", lambda: (ones(4, 1), (True,))),
    "other weight": (ValueError, r"weight has shape \(41,\); expected \(40,\)", lambda: (X, 40, ones(41))),
    "weight of two dimensions": (ValueError, r"weight has shape \(1, 40\); expected \(40,\)", lambda: (X, 40, ones(1, 40))),
    "other bias": (ValueError, r"bias has shape \(39,\); expected \(40,\)", lambda: (X, 40, None, ones(39))),
    "weight of ints": (TypeError, "weight is of dtype int32", lambda: (X, 40, ones(40, dtype="int32"))),
    "weight of bools": (TypeError, "weight is of dtype bool", lambda: (X, 40, ones(40, dtype="bool"))),
    "bias of complex": (TypeError, "bias is of dtype complex128", lambda: (X, 40, None, ones(40, dtype="complex128"))),
    "weight is a list": (TypeError, "weight is a list; expected a CuPy, torch or NumPy array", lambda: (X, 40, [1.0] * 40)),
    "weight of torch": (ValueError, "weight is a torch tensor on cpu, input is a NumPy array", lambda: (X, 40, torch_ones(40))),
    "input of torch": (
        ValueError, "weight is a NumPy array, input is a torch tensor on cpu", lambda: (torch_ones(4, 40), 40, ones(40)),
    ),
    "eps in words": (TypeError, "eps is '1e-5'; expected a real number", lambda: (X, 40, None, None, "1e-5")),
    "eps is not a number": (TypeError, "eps is nan; expected a real number", lambda: (X, 40, None, None, float("nan"))),
    "eps is a bool": (TypeError, "eps is True; expected a real number", lambda: (X, 40, None, None, True)),
    "eps is complex": (TypeError, r"eps is 1j; expected a real number", lambda: (X, 40, None, None, 1j)),
    "no eps": (TypeError, "eps is None; expected a real number", lambda: (X, 40, None, None, None)),
}  # fmt: skip

OPTIONS = {
    "strategy": (ValueError, "strategy is 'wrap'; it is one of warp, block, cluster, uncached", {"strategy": "wrap"}),
    "statistics": (ValueError, "statistics is 'one_pass'; it is one of two_pass, welford", {"statistics": "one_pass"}),
    "tile in words": (TypeError, "tile is a str; expected a cupynorm.Tile or a dict", {"strategy": "warp", "tile": "8x32"}),
    "tile with an unknown field": (
        ValueError, "tile has fields packs; a Tile takes pack_size", {"strategy": "warp", "tile": {"packs": 8}},
    ),
    "tile of fractions": (
        ValueError, r"tile has pack_size 8\.0; expected an int", {"strategy": "warp", "tile": Tile(8.0, 32, 1, 4)},
    ),
    "tile of truths": (
        ValueError, "tile has exact True; expected an int",
        {"strategy": "warp", "tile": {"pack_size": 8, "threads_per_row": 32, "exact": True}},
    ),
    "negative margin": (ValueError, "sm_margin is -1; expected a number of multiprocessors", {"sm_margin": -1}),
    "fractional margin": (ValueError, r"sm_margin is 1\.5; expected a number of multiprocessors", {"sm_margin": 1.5}),
    "false margin": (ValueError, "sm_margin is False; expected a number of multiprocessors", {"sm_margin": False}),
    "zero as a float": (ValueError, r"sm_margin is 0\.0; expected a number of multiprocessors", {"sm_margin": 0.0}),
    "true margin": (ValueError, "sm_margin is True; expected a number of multiprocessors", {"sm_margin": True}),
    "out_dtype of ints": (TypeError, "out_dtype is 'int32'; expected one of float16", {"out_dtype": "int32"}),
    "out_dtype unknown": (TypeError, "out_dtype is 'float17'; expected one of float16", {"out_dtype": "float17"}),
    "other residual": (ValueError, r"residual has shape \(4, 41\); expected \(4, 40\)", {"residual": ones(4, 41)}),
    "residual of one row": (ValueError, r"residual has shape \(40,\); expected \(4, 40\)", {"residual": ones(40)}),
    "residual of another dtype": (
        TypeError, "residual is of dtype float16; expected the input's, float32", {"residual": ones(4, 40, dtype="float16")},
    ),
    "residual of ints": (TypeError, "residual is of dtype int64", {"residual": ones(4, 40, dtype="int64")}),
}  # fmt: skip

OUTS = {
    "other shape": (ValueError, r"out has shape \(40, 4\); expected the input's, \(4, 40\)", lambda: ones(40, 4)),
    "other dtype": (TypeError, "out is of dtype float64; expected float32", lambda: ones(4, 40, dtype="float64")),
    "other library": (ValueError, "out is a torch tensor on cpu, input is a NumPy array", lambda: torch_ones(4, 40)),
    "a list": (TypeError, "out is a list; expected an array of the input's library", lambda: [[1.0] * 40] * 4),
    "columns apart": (ValueError, r"out has strides \(80, 2\); expected rows that are contiguous", lambda: ones(4, 80)[:, ::2]),
    "transposed": (ValueError, r"out has strides \(1, 4\); expected rows that are contiguous", lambda: ones(40, 4).T),
    "rows that overlap": (
        ValueError, r"out has strides \(20, 1\); expected rows that are contiguous and do not overlap",
        lambda: np.lib.stride_tricks.as_strided(ones(200), (4, 40), (80, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_arguments(what):
    error, sentence, arguments = REFUSED[what]
    out = ones(4, 40)
    with pytest.raises(error, match=sentence):
        cupynorm.layer_norm(*arguments(), out=out)
    assert (out == 1).all()


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("norm_name", NORMS)
def test_refused_options(norm_name, what):
    error, sentence, options = OPTIONS[what]
    out = ones(4, 40)
    for call in (
        getattr(cupynorm, norm_name),
        lambda x, shape, **given: api(norm_name, "forward")(x, normalized_shape=shape, **given),
    ):
        with pytest.raises(error, match=sentence):
            call(X, 40, out=out, **options)
        assert (out == 1).all()


@pytest.mark.parametrize("what", OUTS)
def test_refused_out(what):
    error, sentence, make = OUTS[what]
    out = make()
    with pytest.raises(error, match=sentence):
        cupynorm.layer_norm(X, 40, out=out)
    assert (np.asarray(out) == 1).all()


@pytest.mark.parametrize("shared", ["input", "weight", "bias", "residual"])
def test_out_that_shares_memory(shared):
    memory = ones(8, 40)
    given = {"input": ones(4, 40), "weight": ones(40), "bias": ones(40), "residual": ones(4, 40)}
    given[shared] = memory[3] if shared in ("weight", "bias") else memory[2:6]
    with pytest.raises(
        ValueError, match=f"out shares memory with {shared}; expected memory of its own"
    ):
        cupynorm.layer_norm(**given, normalized_shape=40, out=memory[:4])
    assert (memory == 1).all()
    # Neighbours in one buffer share nothing.
    given[shared] = memory[4] if shared in ("weight", "bias") else memory[4:]
    assert cupynorm.layer_norm(**given, normalized_shape=40, out=memory[:4]).base is not None


BACKWARD = {
    "no dy": (TypeError, "dy is None; expected the gradient of y", {"dy": None}),
    "other dy": (ValueError, r"dy has shape \(4, 39\); expected \(4, 40\)", {"dy": ones(4, 39)}),
    "dy of ints": (TypeError, "dy is of dtype int64", {"dy": ones(4, 40, dtype="int64")}),
    "no mean": (TypeError, "mean is None; expected the statistic", {"mean": None}),
    "no rstd": (TypeError, "rstd is None; expected the statistic", {"rstd": None}),
    "other mean": (ValueError, r"mean has shape \(5,\); expected \(4,\)", {"mean": ones(5)}),
    "mean of another dtype": (
        TypeError, "mean is of dtype float64; expected float32 for x of float32", {"mean": ones(4, dtype="float64")},
    ),
    "rstd of another dtype": (
        TypeError, "rstd is of dtype float16; expected float32 for x of float32", {"rstd": ones(4, dtype="float16")},
    ),
    "mean is a list": (TypeError, "mean is a list", {"mean": [1.0] * 4}),
    "other weight": (ValueError, r"normalized_shape is \(41,\), x has shape \(4, 40\)", {"weight": ones(41)}),
    "other dsum": (ValueError, r"dsum has shape \(40,\); expected \(4, 40\)", {"dsum": ones(40)}),
    "unknown gradient": (
        ValueError, r"gradients is \('dx', 'dgamma'\); expected some of dx, dweight, dbias", {"gradients": ("dx", "dgamma")},
    ),
    "gradients in words": (ValueError, "gradients is 'dx'; expected some of dx, dweight, dbias", {"gradients": "dx"}),
    "no gradients": (TypeError, "gradients is None; expected some of dx, dweight, dbias", {"gradients": None}),
    "a number of gradients": (TypeError, "gradients is 3; expected some of dx, dweight, dbias", {"gradients": 3}),
    "gradients in lists": (
        TypeError, r"gradients is \[\['dx'\]\]; expected some of dx, dweight, dbias", {"gradients": [["dx"]]},
    ),
    "dweight_dtype": (TypeError, "dweight_dtype is 'int8'; expected one of float16", {"dweight_dtype": "int8"}),
    "x is a list": (TypeError, "x is a list", {"x": [[1.0] * 40] * 4}),
    "strategy": (ValueError, "strategy is 'wrap'; it is one of", {"strategy": "wrap"}),
}  # fmt: skip


@pytest.mark.parametrize("what", BACKWARD)
def test_refused_arguments_of_backward(what):
    error, sentence, changes = BACKWARD[what]
    given = {"dy": X, "x": X, "mean": ones(4), "rstd": ones(4), "normalized_shape": None} | changes
    with pytest.raises(error, match=sentence):
        cupynorm.layer_norm_backward(**given)
    if "gradients" in changes:
        for options in ({}, {"row_scale": ones(4)}):
            with pytest.raises(error, match=sentence):
                cupynorm.rms_norm_backward(X, X, ones(4), **changes, **options)


def test_tensors_of_other_devices_and_out_with_gradients():
    torch = loaded_torch()
    with pytest.raises(
        TypeError,
        match="input is a torch tensor on meta; expected one on the CPU or on a CUDA device",
    ):
        cupynorm.layer_norm(torch.empty(4, 40, device="meta"), 40)
    x, out = torch.ones(4, 40, requires_grad=True), torch.ones(4, 40)
    with pytest.raises(
        ValueError,
        match=r"out was given for tensors that require gradients; expected out=None, or torch.no_grad",
    ):
        cupynorm.layer_norm(x, 40, out=out)
    assert (out == 1).all()


@pytest.mark.parametrize("options", [{}, {"residual_dtype": "float64"}], ids=["plain", "fused"])
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "_mkldnn"])
@pytest.mark.parametrize("name", ["torch-cpu", pytest.param("torch-cuda", marks=pytest.mark.gpu)])
def test_sparse_tensors_are_refused(name, layout, options):
    torch = loaded_torch()
    if layout == "_mkldnn" and (name == "torch-cuda" or not torch.backends.mkldnn.is_available()):
        pytest.skip("no tensors of this layout here")
    x, of_row = (
        torch.ones(*shape, device=name.removeprefix("torch-")) for shape in ((4, 40), (4,))
    )
    sparse = x.to_mkldnn() if layout == "_mkldnn" else x.to_sparse(layout=getattr(torch, layout))
    row_scale = {"row_scale": of_row} if options else {}
    for argument, call in (
        ("input", lambda: cupynorm.layer_norm(sparse, 40, **options)),
        ("input", lambda: cupynorm.rms_norm(sparse.detach().requires_grad_(), 40, **options)),
        ("residual", lambda: cupynorm.rms_norm(x, 40, residual=sparse, **options)),
        ("out", lambda: cupynorm.layer_norm(x, 40, out=sparse, **options)),
        ("x", lambda: cupynorm.layer_norm_forward(sparse, **options)),
        ("dy", lambda: cupynorm.rms_norm_backward(sparse, x, of_row, **row_scale)),
    ):
        with pytest.raises(
            TypeError, match=f"{argument} is a torch tensor of layout {layout}; expected a dense"
        ):
            call()


@pytest.mark.parametrize("options", [{}, {"residual_dtype": "float64"}], ids=["plain", "fused"])
@pytest.mark.parametrize("name", ["torch-cpu", pytest.param("torch-cuda", marks=pytest.mark.gpu)])
def test_a_sparse_gradient_is_refused(name, options):
    torch = loaded_torch()
    weight = torch.ones(5, 40, device=name.removeprefix("torch-"), requires_grad=True)
    y = cupynorm.layer_norm(weight, 40, **options)
    found = torch.nn.functional.embedding(
        torch.tensor([1, 2], device=weight.device), y, sparse=True
    )
    with pytest.raises(
        TypeError, match="dy is a torch tensor of layout sparse_coo; expected a dense"
    ):
        found.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_refused_on_a_gpu(name):
    lib = library(name)
    x, out = lib.put(np.ones((4, 40)), "float32"), lib.put(np.ones((4, 40)), "float32")
    refused = [
        (ValueError, "tile is given without strategy", {"tile": Tile(1, 32, 2, 4)}),
        (ValueError, "tile holds 32 columns", {"strategy": "warp", "tile": Tile(1, 32, 1, 4)}),
        (ValueError, "tile has pack_size 3", {"strategy": "warp", "tile": Tile(3, 32, 1, 4)}),
        (ValueError, "sm_margin is 100000", {"sm_margin": 100000}),
        (ValueError, "weight is a NumPy array, input is a", {"weight": ones(40)}),
        (ValueError, "out shares memory with input", {"out": x}),
    ]
    for error, sentence, options in refused:
        with pytest.raises(error, match=sentence):
            cupynorm.layer_norm(x, 40, **{"out": out, **options})
        assert (lib.get(out) == 1).all() and (lib.get(x) == 1).all()
    with pytest.raises(ValueError, match="out is a NumPy array, input is a"):
        cupynorm.layer_norm(x, 40, out=ones(4, 40))
    wide = lib.put(np.ones((2, 100000)), "float32")
    with pytest.raises(ValueError, match="strategy 'warp' is too narrow for 100000 columns"):
        cupynorm.layer_norm(wide, 100000, strategy="warp")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_what_equals_a_good_argument_is_refused_after_it_too(name):
    # Python finds 40.0 under a key of 40 and True under one of 1: prepared calls must not be found like that.
    lib = library(name)
    x, one = lib.put(np.ones((4, 40)), "float32"), lib.put(np.ones((4, 1)), "float32")
    tile = {"pack_size": 1, "threads_per_row": 32, "packs_per_thread": 2, "rows_per_block": 4}
    pairs = [
        (x, {"normalized_shape": 40}, {"normalized_shape": 40.0}),
        (x, {"normalized_shape": (40,)}, {"normalized_shape": (40.0,)}),
        (x, {"normalized_shape": (4, 40)}, {"normalized_shape": (4, 40.0)}),
        (one, {"normalized_shape": (1,)}, {"normalized_shape": (True,)}),
        (one, {"normalized_shape": 1}, {"normalized_shape": True}),
        (x, {"normalized_shape": 40, "eps": 1}, {"normalized_shape": 40, "eps": True}),
        (x, {"normalized_shape": 40, "eps": 0}, {"normalized_shape": 40, "eps": False}),
        (x, {"normalized_shape": 40, "sm_margin": 1}, {"normalized_shape": 40, "sm_margin": True}),
        (x, {"normalized_shape": 40, "sm_margin": 1}, {"normalized_shape": 40, "sm_margin": 1.0}),
        (
            x,
            {"normalized_shape": 40, "strategy": "warp", "tile": tile},
            {"normalized_shape": 40, "strategy": "warp", "tile": tile | {"pack_size": True}},
        ),
    ]
    for array, good, bad in pairs:
        cupynorm.layer_norm(array, **good)
        with pytest.raises((TypeError, ValueError), match="expected"):
            cupynorm.layer_norm(array, **bad)
    # What equals and means the same is found.
    before = len(kept.forwards)
    for shape in ((40,), [40], 40, np.int64(40)):
        cupynorm.layer_norm(x, shape)
    assert len(kept.forwards) <= before + 1


@pytest.mark.gpu
def test_mixed_libraries_on_a_gpu_are_refused():
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    x, weight = cupy.ones((4, 40), "float32"), torch.ones(40, device="cuda")
    with pytest.raises(
        ValueError, match="weight is a torch tensor on cuda:0, input is a CuPy array on cuda:0"
    ):
        cupynorm.layer_norm(x, 40, weight)
    with pytest.raises(
        ValueError, match="weight is a torch tensor on cpu, input is a torch tensor on cuda:0"
    ):
        cupynorm.layer_norm(torch.ones(4, 40, device="cuda"), 40, torch.ones(40))


@pytest.mark.multi_gpu
def test_mixed_devices_are_refused():
    torch = loaded_torch()
    with pytest.raises(
        ValueError, match="weight is a torch tensor on cuda:1, input is a torch tensor on cuda:0"
    ):
        cupynorm.layer_norm(torch.ones(4, 40, device="cuda:0"), 40, torch.ones(40, device="cuda:1"))


# -- processes -------------------------------------------------------------------------------------------


def run_script(script: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )


FORK = """
import os, sys
import numpy as np
import cupynorm
assert not {"torch", "cupy"} & set(sys.modules), "cupynorm imports them by itself"
{imports}
x = np.random.default_rng(0).standard_normal((4, 40)).astype("float32")
child = os.fork()
if child == 0:
    y = {call}
    os._exit(0 if abs(y.std() - 1) < 1e-3 and abs(y.mean()) < 1e-3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
y = {call}
assert abs(y.std() - 1) < 1e-3
print("both")
"""


def test_fork_after_import():
    result = run_script(
        FORK.replace("{imports}", "").replace("{call}", "cupynorm.layer_norm(x, 40)")
    )
    assert (result.returncode, result.stdout) == (0, "both\n"), result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    "imports, call",
    [
        ("import cupy", "cupynorm.layer_norm(cupy.asarray(x), 40).get()"),
        ("import torch", "cupynorm.layer_norm(torch.from_numpy(x).cuda(), 40).cpu().numpy()"),
    ],
)
def test_fork_after_import_without_a_cuda_call(imports, call):
    result = run_script(
        FORK.replace("{imports}", f"{imports}\ncupynorm.layer_norm, cupynorm.plan").replace(
            "{call}", call
        )
    )
    assert (result.returncode, result.stdout) == (0, "both\n"), result.stderr


# -- arrays on a GPU -------------------------------------------------------------------------------------


class Exporter:
    """Nothing but the two methods of DLPack."""

    def __init__(self, array) -> None:
        self.array = array

    def __dlpack__(self, *arguments, **options):
        return self.array.__dlpack__(*arguments, **options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.gpu
def test_any_exporter_comes_in_and_cupy_goes_out():
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    x, weight, dy = (
        torch.randn(4, 40, device="cuda"),
        torch.randn(40, device="cuda"),
        torch.randn(4, 40, device="cuda"),
    )
    forward = cupynorm.layer_norm_forward(x, weight)
    found = cupynorm.layer_norm_forward(Exporter(x), Exporter(weight), normalized_shape=40)
    assert isinstance(found.y, cupy.ndarray)
    assert (found.y.get() == forward.y.cpu().numpy()).all()
    backward = cupynorm.layer_norm_backward(dy, x, forward.mean, forward.rstd, weight)
    statistics = (Exporter(forward.mean), Exporter(forward.rstd))
    gradients = cupynorm.layer_norm_backward(
        Exporter(dy), Exporter(x), *statistics, Exporter(weight), normalized_shape=40
    )
    for got, right in zip(gradients, backward):
        assert isinstance(got, cupy.ndarray) and (got.get() == right.cpu().numpy()).all()


def cupy_of(dtype: str):
    cupy = pytest.importorskip("cupy")
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
        try:
            cupy.empty(1, arrays._numpy_dtype(dtype))
        except (TypeError, ValueError) as error:
            pytest.skip(f"this CuPy has no bfloat16: {error}")
    return cupy


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_torch_gets_is_seen_by_cupy_without_a_copy(dtype):
    cupy, torch = cupy_of(dtype), loaded_torch()
    x = torch.randn(4, 40, device="cuda").to(getattr(torch, dtype))
    forward = cupynorm.layer_norm_forward(x)
    backward = cupynorm.layer_norm_backward(x, x, forward.mean, forward.rstd)
    for tensor in (x, *forward, *backward):
        view = cupy.from_dlpack(tensor)
        assert view.data.ptr == tensor.data_ptr() == arrays.TorchLibrary.view(tensor).pointer
        assert view.shape == tuple(tensor.shape) and view.dtype.name == arrays.dtype_name(tensor)
        assert arrays.CuPyLibrary.view(view) == arrays.TorchLibrary.view(tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_cupy_gets_is_seen_by_torch_without_a_copy(dtype):
    cupy, torch = cupy_of(dtype), loaded_torch()
    x = cupy.from_dlpack(torch.randn(4, 40, device="cuda").to(getattr(torch, dtype)))
    forward = cupynorm.layer_norm_forward(x)
    backward = cupynorm.layer_norm_backward(x, x, forward.mean, forward.rstd)
    for array in (x, *forward, *backward):
        assert isinstance(array, cupy.ndarray)
        view = torch.from_dlpack(array)
        assert view.data_ptr() == array.data.ptr == arrays.CuPyLibrary.view(array).pointer
        assert arrays.TorchLibrary.view(view) == arrays.CuPyLibrary.view(array)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_rows_apart_are_read_where_they_lie(name, monkeypatch):
    lib = library(name)
    problem = random_problem(Case("layer_norm", 6, 40, "float32"))
    weight = lib.put(problem.weight, "float32")

    def results(x, dy):
        forward = cupynorm.layer_norm_forward(x, weight)
        return [forward.y, *cupynorm.layer_norm_backward(dy, x, forward.mean, forward.rstd, weight)]

    expected = [
        lib.get(each)
        for each in results(lib.put(problem.x, "float32"), lib.put(problem.dy, "float32"))
    ]
    owner = arrays.TorchLibrary if lib.is_torch else arrays.CuPyLibrary
    contiguous = owner.contiguous

    def refuse_matrices(array):
        assert array.ndim == 1, "a matrix was copied"
        return contiguous(array)

    monkeypatch.setattr(owner, "contiguous", staticmethod(refuse_matrices))
    wide = np.full((6, 96), np.nan)
    wide[:, 24:64] = problem.x
    x = lib.put(wide, "float32")[:, 24:64]
    wide[:, 24:64] = problem.dy
    for got, right in zip(results(x, lib.put(wide, "float32")[:, 24:64]), expected):
        assert (lib.get(got) == right).all()
    if name == "cupy":
        reverse = [
            lib.put(values[::-1].copy(), "float32")[::-1] for values in (problem.x, problem.dy)
        ]
        for got, right in zip(results(*reverse), expected):
            assert (lib.get(got) == right).all()
    # This test can fail: columns that lie apart do need a copy.
    with pytest.raises(AssertionError, match="a matrix was copied"):
        cupynorm.layer_norm(lib.put(np.ones((6, 80)), "float32")[:, ::2], 40)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_one_row_repeated_by_a_stride_of_zero(name):
    lib = library(name)
    row = lib.put(np.random.default_rng(0).standard_normal((1, 40)), "float32")
    if lib.is_torch:
        x = row.expand(6, 40)
    else:
        x = pytest.importorskip("cupy").broadcast_to(row, (6, 40))
    y = lib.get(cupynorm.layer_norm(x, 40))
    assert (y == lib.get(cupynorm.layer_norm(row, 40))).all() and np.abs(y).max() > 1


@pytest.mark.gpu
@pytest.mark.parametrize("tensor", ["x", "out", "weight", "bias", "residual", "dy"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_a_base_address_off_by_some_elements(name, dtype, tensor):
    lib = library(name)
    problem = random_problem(Case("layer_norm", 5, 1024, dtype, residual=True))
    for offset in (1, 2, 3, 4, 8):
        values = {
            key: getattr(problem, key) for key in ("x", "weight", "bias", "residual", "dy")
        } | {"out": np.zeros((5, 1024))}
        given = {}
        for key, value in values.items():
            shift = offset if key == tensor else 0
            given[key] = lib.put(np.concatenate([np.full(shift, 777.0), value.reshape(-1)]), dtype)[
                shift:
            ].reshape(value.shape)
        assert (
            arrays.library(given[tensor]).view(given[tensor]).pointer % 256
            == offset * DTYPES[dtype].itemsize
        )
        x, weight, bias, residual, dy, out = given.values()
        forward = cupynorm.layer_norm_forward(x, weight, bias, residual=residual, out=out)
        backward = cupynorm.layer_norm_backward(dy, forward.sum, forward.mean, forward.rstd, weight)
        results = forward._asdict() | backward._asdict()
        result = CheckResult(
            judge_all(problem, {key: lib.get(value) for key, value in results.items()})
        )
        assert len(result.findings) == 7 and result.ok, f"offset {offset}\n{result}"


@pytest.mark.gpu
def test_results_are_allocated_by_the_library_of_the_input():
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    pool = cupy.get_default_memory_pool()
    x = torch.randn(1024, 1024, device="cuda")
    cupynorm.layer_norm(x, 1024)
    allocated, used = torch.cuda.memory_allocated(), pool.used_bytes()
    forward = cupynorm.layer_norm_forward(x)
    assert torch.cuda.memory_allocated() - allocated >= x.nbytes + 2 * 4096
    assert pool.used_bytes() == used
    backward = cupynorm.layer_norm_backward(x, x, forward.mean, forward.rstd)
    assert torch.cuda.memory_allocated() - allocated >= 2 * x.nbytes + 4 * 4096
    assert pool.used_bytes() == used
    del forward, backward
    assert torch.cuda.memory_allocated() == allocated

    there = cupy.asarray(np.ones((1024, 1024), "float32"))
    allocated, used = torch.cuda.memory_allocated(), pool.used_bytes()
    kept = cupynorm.layer_norm_forward(there)
    assert kept.y.nbytes == there.nbytes
    assert pool.used_bytes() - used >= there.nbytes + 2 * 4096
    assert torch.cuda.memory_allocated() == allocated


# -- streams, threads, graphs ----------------------------------------------------------------------------

SPIN = 'extern "C" __global__ void spin(long long cycles) { long long start = clock64(); while (clock64() - start < cycles); }'
CYCLES = 200_000_000  # a tenth of a second: long after a launch on another stream has ended


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_torch_tensors_use_the_current_stream_of_torch(side):
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    x, later, weight = (
        torch.zeros(8, 1000, device="cuda"),
        torch.randn(8, 1000, device="cuda"),
        torch.ones(1000, device="cuda"),
    )
    expected = cupynorm.layer_norm(later, 1000, weight)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    # CuPy's stream is another one, and must not be taken.
    with torch.cuda.stream(stream), cupy.cuda.Stream(non_blocking=True):
        torch.cuda._sleep(CYCLES)
        x.copy_(later, non_blocking=True)
        y = cupynorm.layer_norm(x, 1000, weight)
        assert not stream.query(), "the test ended before its stream: it shows nothing"
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_cupy_arrays_use_the_current_stream_of_cupy(side):
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (1,))
    x, later = (
        cupy.zeros((8, 1000), "float32"),
        cupy.asarray(np.random.default_rng(0).standard_normal((8, 1000)).astype("float32")),
    )
    expected = cupynorm.layer_norm(later, 1000).get()
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True) if side else cupy.cuda.Stream.null
    with stream, torch.cuda.stream(torch.cuda.Stream()):
        spin((1,), (1,), (CYCLES,))
        cupy.copyto(x, later)
        y = cupynorm.layer_norm(x, 1000)
        assert not stream.done, "the test ended before its stream: it shows nothing"
    stream.synchronize()
    assert (y.get() == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [40, 100_004])
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_the_first_cuda_call_of_a_thread(name, num_cols):
    # A new thread has no context yet. The kernel is loaded already, but this number of rows was not seen: it is planned anew.
    lib = library(name)
    x = lib.put(np.random.default_rng(0).standard_normal((3, num_cols)), "float32")
    expected = lib.get(cupynorm.layer_norm(x, num_cols))
    first = x[:2]
    found = []

    def work() -> None:
        try:
            found.append(cupynorm.layer_norm(first, num_cols))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not isinstance(found[0], BaseException), found[0]
    assert (lib.get(found[0]) == expected[:2]).all() and np.abs(expected).max() > 1


@pytest.mark.gpu
def test_two_threads_at_once():
    torch, lib = loaded_torch(), library("torch-cuda")
    wrong = []
    barrier = threading.Barrier(2)

    def work(seed: int) -> None:
        try:
            # Widths that nothing before had: both threads compile and load at once.
            problem = random_problem(
                Case("layer_norm", 257, 1300 + seed, "float32", bias=None), seed
            )
            with torch.cuda.stream(torch.cuda.Stream()):
                x, weight = lib.put(problem.x, "float32"), lib.put(problem.weight, "float32")
                expected, allowed = (
                    torch.from_numpy(values).cuda() for values in expect(problem)["y"]
                )
                barrier.wait()
                for _ in range(200):
                    y = cupynorm.layer_norm(x, 1300 + seed, weight)
                    if not ((y.double() - expected).abs() <= allowed).all():
                        wrong.append(seed)
        except BaseException as error:
            wrong.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_cols", [1001, 100_003])
@pytest.mark.parametrize("warm", [False, True])
def test_a_torch_graph_with_gradients(warm, num_cols):
    torch = loaded_torch()
    # Not warm: this shape is first seen inside the capture, so kernels are compiled and loaded there;
    # the wide one sets attributes.
    num_cols += warm
    x = torch.randn(5, num_cols, device="cuda", dtype=torch.float16, requires_grad=True)
    weight = torch.randn(num_cols, device="cuda", dtype=torch.float16, requires_grad=True)
    dy = torch.randn_like(x)

    def step():
        y = cupynorm.layer_norm(x, num_cols, weight)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            dy.copy_(torch.randn_like(dy))
        graph.replay()
        for got, right in zip(captured, step()):
            assert torch.equal(got, right) and right.isfinite().all() and right.abs().max() > 1


@pytest.mark.gpu
def test_temporaries_belong_to_the_stream_of_the_call():
    """What a call allocates and frees while its kernels wait is not given to another stream meanwhile: copies, partial sums."""
    torch = loaded_torch()
    x = torch.randn(
        1000, 600, device="cuda"
    ).t()  # rows that are not contiguous: forward and backward make copies
    dy, weight = torch.randn(1000, 600, device="cuda").t(), torch.randn(1000, device="cuda")

    def gradients():
        forward = cupynorm.layer_norm_forward(x, weight)
        return forward.y, *cupynorm.layer_norm_backward(dy, x, forward.mean, forward.rstd, weight)

    def others_of(shapes):
        return [torch.full(shape, torch.nan, device="cuda") for shape in shapes]

    shapes = [(600, 1000)] * 8 + [(num_rows, 1000) for num_rows in (1, 2, 132, 264, 528)]
    expected, _ = gradients(), others_of(shapes)  # both loaded: loading may wait for all streams
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(2):  # in the second round the stream has memory of its own to reuse
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4 * CYCLES)  # memory is allocated meanwhile
            got = gradients()
        others = others_of(shapes)
        torch.cuda.current_stream().synchronize()
        assert not stream.query(), "the test ended before its stream: it shows nothing"
        stream.synchronize()
        assert all(map(torch.equal, got, expected)) and expected[0].isfinite().all()
        assert all(other.isnan().all() for other in others)
        del got, others


@pytest.mark.gpu
def test_a_recorded_input_outlives_its_last_reference():
    """Made on one stream, read on another that waits, freed: with record_stream its memory is no one else's until it was
    read."""
    torch = loaded_torch()
    values, weight = (
        torch.randn(600, 1000, device="cuda"),
        torch.randn(1000, device="cuda", requires_grad=True),
    )
    dy = torch.randn_like(values)
    expected = cupynorm.layer_norm(values, 1000, weight)
    (dweight,) = torch.autograd.grad(expected, weight, dy)
    maker, reader = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(maker):
        x = values.clone()
        address = x.data_ptr()
    reader.wait_stream(maker)
    with torch.cuda.stream(reader):
        torch.cuda._sleep(4 * CYCLES)  # memory is allocated meanwhile
        y = cupynorm.layer_norm(x, 1000, weight)
        (got,) = torch.autograd.grad(y, weight, dy)
    x.record_stream(reader)
    del x
    with torch.cuda.stream(maker):
        others = [torch.full_like(values, torch.nan) for _ in range(4)]
    assert not reader.query(), "the test ended before its stream: it shows nothing"
    assert address not in [other.data_ptr() for other in others]
    torch.cuda.synchronize()
    assert torch.equal(y, expected) and torch.equal(got, dweight)


@pytest.mark.gpu
def test_calls_that_wait_on_several_streams_do_not_mix():
    """All are enqueued before the first runs: each has its own addresses,
    although they share a plan and a buffer of arguments."""
    torch = loaded_torch()
    inputs = [torch.randn(64, 1000, device="cuda", requires_grad=True) for _ in range(6)]
    weight, dy = torch.randn(1000, device="cuda"), torch.randn(64, 1000, device="cuda")

    def call(x):
        y = cupynorm.rms_norm(x, 1000, weight)
        return y, *torch.autograd.grad(y, x, dy)

    expected = [call(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found = []
    for stream, x in zip(streams, inputs):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4 * CYCLES)  # memory is allocated meanwhile
            found.append(call(x))
    assert not any(stream.query() for stream in streams), (
        "a stream ended too early: the test shows nothing"
    )
    torch.cuda.synchronize()
    for got, right in zip(found, expected):
        assert all(map(torch.equal, got, right))


@pytest.mark.gpu
def test_backward_runs_on_the_stream_of_forward():
    """Called from another stream: torch has it wait for what forward wrote, and the caller for the gradients."""
    torch = loaded_torch()
    values, dy = torch.randn(64, 1000, device="cuda"), torch.randn(64, 1000, device="cuda")
    leaf = values.clone().requires_grad_()
    (expected,) = torch.autograd.grad(cupynorm.layer_norm(2 * leaf, 1000), leaf, dy)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(values).requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(4 * CYCLES)  # memory is allocated meanwhile
        with torch.no_grad():
            late.copy_(values)
        y = cupynorm.layer_norm(2 * late, 1000)
    assert not stream.query(), "the test ended before its stream: it shows nothing"
    torch.cuda.current_stream().wait_stream(stream)
    y.backward(dy)
    assert torch.equal(late.grad, expected)


@pytest.mark.gpu
def test_a_cupy_graph():
    cupy = pytest.importorskip("cupy")
    generator = np.random.default_rng(0)
    x = cupy.asarray(generator.standard_normal((5, 1003)).astype("float32"))
    out = cupy.zeros_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        # Only CuPy's pool is warmed, which could not call cudaMalloc while capturing; the kernel is not.
        kept = [cupy.empty(5, "float32") for _ in range(2)]
        del kept
        stream.begin_capture()
        forward = cupynorm.layer_norm_forward(x, out=out)
        graph = stream.end_capture()
    for _ in range(2):
        x[...] = cupy.asarray(generator.standard_normal((5, 1003)).astype("float32"))
        out.fill(0)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = cupynorm.layer_norm_forward(x)
        assert (out.get() == expected.y.get()).all() and (
            forward.rstd.get() == expected.rstd.get()
        ).all()
        assert np.abs(out.get()).max() > 1


# -- several GPUs ----------------------------------------------------------------------------------------


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_the_device_of_the_input_not_the_current_one(name):
    cupy = pytest.importorskip("cupy")
    lib = library(name)
    # 100 000 columns need more shared memory than a kernel has by itself: an attribute, on each device of its own.
    for num_cols in (40, 100_000):
        problem = random_problem(Case("layer_norm", 3, num_cols, "float32"))
        results = []
        for device in (0, 1):
            with cupy.cuda.Device(device):
                if lib.is_torch:
                    lib = Torch(f"cuda:{device}")
                x, weight = lib.put(problem.x, "float32"), lib.put(problem.weight, "float32")
            with cupy.cuda.Device(1 - device):
                current = cupy.cuda.runtime.getDevice()
                y = cupynorm.layer_norm(x, num_cols, weight)
                assert cupy.cuda.runtime.getDevice() == current
            assert arrays.library(y).view(y).device == device
            with cupy.cuda.Device(device):
                results.append(lib.get(y))
        assert (results[0] == results[1]).all() and np.abs(results[0]).max() > 1


@pytest.mark.multi_gpu
def test_kernels_are_loaded_once_for_each_device():
    torch = loaded_torch()
    before = set(launch._functions)
    for device in (0, 1, 0, 1):
        cupynorm.layer_norm(torch.randn(3, 100_001, device=f"cuda:{device}"), 100_001)
    added = set(launch._functions) - before
    assert {device for _, device in added} == {0, 1}
    assert len(added) == 2 * len({kernel for kernel, _ in added})
