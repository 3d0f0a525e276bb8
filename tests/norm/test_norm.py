"""The results of the public calls and their gradients through torch.autograd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from array_libraries import LIBRARIES, TORCH, NumPy, api, api_results, library, loaded_torch

import cupynorm
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import arrays
from cupynorm.verify.cases import NORMS, Case, Problem, random_problem
from cupynorm.verify.results import CheckResult, judge_all


def check(problem: Problem, lib) -> None:
    results = api_results(problem, lib)
    result = CheckResult(
        judge_all(problem, results, rounded_mean=problem.case.strategy == "uncached")
    )
    assert len(result.findings) == len(results) >= 3
    assert result.ok, f"\n{result}"


# Results.


@pytest.mark.parametrize("num_cols", [1, 40, 769, 9000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_results_and_gradients_are_within_bounds(norm_name, name, dtype, num_cols):
    check(random_problem(Case(norm_name, 5, num_cols, dtype)), library(name))


FUSED = {
    "a stream of float32": Case("layer_norm", 6, 40, "bfloat16", residual="float32", dsum=True),
    "a stream of the input's dtype": Case("layer_norm", 6, 40, "float32", residual=True, dsum=True),
    "a narrower stream": Case("layer_norm", 6, 33, "float64", residual="float16"),
    "a stream of float64": Case("rms_norm", 6, 40, "bfloat16", residual="float64", dsum=True),
    "x_hat rounded": Case("rms_norm", 6, 40, "bfloat16", weight="float32", round_x_hat=True),
    "nothing to round": Case("layer_norm", 6, 40, "float32", round_x_hat=True),
}
ALL = {"y": "float32", "weight": "float32", "zero_centered_weight": True, "round_x_hat": True}
FUSED["all"] = replace(FUSED["a stream of float32"], **ALL)


@pytest.mark.parametrize("what", FUSED)
@pytest.mark.parametrize("name", LIBRARIES)
def test_fused_results_and_gradients_are_within_bounds(name, what):
    if name in ("numpy", "cupy"):
        pytest.importorskip("ml_dtypes")
    check(random_problem(FUSED[what]), library(name))


def test_bfloat16_arrays_of_numpy_are_taken():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    check(random_problem(Case("layer_norm", 5, 40, "bfloat16")), NumPy())
    y = cupynorm.layer_norm(np.ones((2, 4), ml_dtypes.bfloat16), 4)
    assert y.dtype == ml_dtypes.bfloat16 and (y == 0).all()


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("name", TORCH)
def test_out_dtype_is_the_dtype_of_y(name, out_dtype):
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
def test_types_shapes_and_dtypes_of_results(name):
    lib = library(name)
    for dtype, compute in (("float16", "float32"), ("float32", "float32"), ("float64", "float64")):
        x = lib.put(np.random.default_rng(0).standard_normal((2, 3, 8)), dtype)
        forward = cupynorm.layer_norm_forward(x, x.shape[-1])
        backward = cupynorm.layer_norm_backward(x, x, x.shape[-1], forward.mean, forward.rstd)
        results, shapes = (*forward, *backward), [(2, 3, 8), (2, 3), (2, 3), (2, 3, 8), (2, 3, 8)]
        assert [type(each) for each in results] == [type(x)] * 7
        assert [tuple(each.shape) for each in results] == [*shapes, (8,), (8,)]
        dtypes = [dtype, compute, compute] + [dtype] * 4
        assert [arrays.dtype_name(each) for each in results] == dtypes
        assert forward.sum is x
        assert cupynorm.rms_norm_forward(x, 8).mean is None


@pytest.mark.parametrize("name", TORCH)
def test_positional_arguments_have_the_order_of_torch(name):
    torch, lib = loaded_torch(), library(name)
    functional = torch.nn.functional
    generator = np.random.default_rng(0)
    x, weight, bias = (
        lib.put(generator.standard_normal(shape), "float64") for shape in ((3, 5, 40), 40, 40)
    )
    # Two float64 results of one formula, whose additions differ in order.
    close = {"rtol": 1e-12, "atol": 1e-12}
    for call, theirs, others in (
        (cupynorm.layer_norm, functional.layer_norm, [(weight, bias, 0.1), (None, bias)]),
        (cupynorm.rms_norm, functional.rms_norm, [(weight, 0.1), (None, 0.1), (weight, None)]),
    ):
        for arguments in (((40,),), ([40],), ((40,), weight), *(((40,), *each) for each in others)):
            torch.testing.assert_close(call(x, *arguments), theirs(x, *arguments), **close)
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
    # The squares are about as large as eps, so another eps gives another result.
    eps = 2.0**-52 if dtype == "float64" else 2.0**-23
    x = lib.put(np.random.default_rng(0).standard_normal((5, 64)) * np.sqrt(eps), dtype)
    expected = torch.nn.functional.rms_norm(x.double(), (64,), eps=eps)
    allowed = 4 * DTYPES[dtype].half_ulp
    torch.testing.assert_close(
        cupynorm.rms_norm(x, 64).double(), expected, rtol=allowed, atol=allowed
    )
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
def test_other_ranks_give_the_results_of_a_matrix(norm_name, name, shape, normalized_shape):
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
    forward = api(norm_name, "forward")(x, normalized, weight, bias=bias, eps=1e-5)
    statistics = (forward.mean, forward.rstd) if norm_name == "layer_norm" else (forward.rstd,)
    backward = api(norm_name, "backward")(dy, x, normalized, *statistics, weight)
    leading = shape[: len(shape) - len(normalized)]
    for tensor, got, extent in (
        ("y", forward.y, shape),
        ("rstd", forward.rstd, leading),
        ("dx", backward.dx, shape),
        ("dweight", backward.dweight, normalized),
        ("dbias", backward.dbias, normalized),
    ):
        assert tuple(got.shape) == extent
        assert lib.get(got).tobytes() == expected[tensor].tobytes(), tensor
    y = getattr(cupynorm, norm_name)(x, normalized_shape, weight, bias=bias, eps=1e-5)
    assert lib.get(y).tobytes() == expected["y"].tobytes()


@pytest.mark.parametrize("name", LIBRARIES)
def test_parameter_gradients_have_the_dtype_of_the_weight_or_the_given_one(name):
    lib = library(name)
    problem = random_problem(Case("layer_norm", 5, 40, "float16", weight="float32"))
    x, dy = (lib.put(getattr(problem, key), "float16") for key in ("x", "dy"))
    weight = lib.put(problem.weight, "float32")
    forward = cupynorm.layer_norm_forward(x, 40, weight)
    statistics = (forward.mean, forward.rstd)
    for given, options, expected in (
        (weight, {}, ("float32", "float32")),
        (None, {}, ("float16", "float16")),
        (weight, {"dweight_dtype": "float16", "dbias_dtype": "float64"}, ("float16", "float64")),
        (None, {"dweight_dtype": "float32", "dbias_dtype": "float32"}, ("float32", "float32")),
    ):
        found = cupynorm.layer_norm_backward(dy, x, 40, *statistics, given, **options)
        assert (arrays.dtype_name(found.dweight), arrays.dtype_name(found.dbias)) == expected
        np.testing.assert_allclose(lib.get(found.dbias), problem.dy.sum(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LIBRARIES)
def test_out_is_written_and_returned(name):
    lib = library(name)
    problem = random_problem(Case("layer_norm", 5, 40, "float32"))
    x, weight = lib.put(problem.x, "float32"), lib.put(problem.weight, "float32")
    expected = lib.get(cupynorm.layer_norm(x, 40, weight))
    out = lib.put(np.full((5, 40), np.nan), "float32")
    assert cupynorm.layer_norm(x, 40, weight, out=out) is out
    assert (lib.get(out) == expected).all()
    # Rows inside wider rows, in another dtype than the input's.
    wide = lib.put(np.full((5, 96), 7.0), "float64")
    out = wide[:, 24:64]
    assert cupynorm.layer_norm(x, 40, weight, out=out, out_dtype="float64") is out
    np.testing.assert_allclose(lib.get(wide)[:, 24:64], expected, rtol=2e-6, atol=2e-6)
    assert (lib.get(wide)[:, :24] == 7).all() and (lib.get(wide)[:, 64:] == 7).all()
    forward = cupynorm.layer_norm_forward(x, 40, weight, out=out, out_dtype="float64")
    assert forward.y is out


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_the_sum_and_calls_in_place(norm_name, name):
    """One plain call, as serving engines make it, also of rows inside wider rows."""
    lib = library(name)
    problem = random_problem(Case(norm_name, 5, 40, "float16", residual=True))
    x, residual, weight = (
        lib.put(getattr(problem, key), "float16") for key in ("x", "residual", "weight")
    )
    norm, forward = getattr(cupynorm, norm_name), api(norm_name, "forward")
    results = norm(x, 40, weight, residual=residual, return_residual=True)
    right = [lib.get(each) for each in results]
    halves = problem.x.astype(np.float16) + problem.residual.astype(np.float16)
    assert (right[1] == halves).all()
    assert (right[0] == lib.get(norm(results[1], 40, weight))).all()
    y, same = norm(x, 40, weight, return_residual=True)
    assert same is x and (lib.get(y) == lib.get(norm(x, 40, weight))).all()
    for call in (norm, forward):
        wide = [lib.put(np.full((5, 96), 7.0), "float16") for _ in range(2)]
        own, added = (each[:, 24:64] for each in wide)
        own[...], added[...] = x, residual
        made = call(own, 40, weight, residual=added, out=(own, added))
        assert made is own if call is norm else (made.y is own and made.sum is added)
        for each, values in zip(map(lib.get, wide), right):
            assert (each[:, 24:64] == values).all()
            assert (each[:, :24] == 7).all() and (each[:, 64:] == 7).all()


@pytest.mark.parametrize("name", TORCH)
def test_autograd_refuses_what_was_saved_of_a_tensor_that_changed_in_place(name):
    torch, lib = loaded_torch(), library(name)
    x = lib.put(np.ones((2, 8)), "float32")
    weight = lib.put(np.ones(8), "float32").requires_grad_()
    product = x * weight
    with torch.no_grad():
        cupynorm.rms_norm(x, 8, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# torch.autograd.


@pytest.mark.parametrize("name", TORCH)
def test_gradients_of_the_sum_alone_skip_the_norm(name):
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


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_of_the_statistics_as_they_are_stored(name, dtype):
    """Means of 5e7 + 25 and so on, which float32 rounds to multiples of 4, and float64 does not."""
    lib = library(name)
    differences = np.array([[0.0, 8.0, 32.0, 60.0]]) + np.arange(3)[:, None] * 4
    values, dy_values = 5e7 + differences, differences - 7
    x, dy = lib.put(values, dtype), lib.put(dy_values, dtype)
    forward = cupynorm.layer_norm_forward(x, x.shape[-1])
    found = cupynorm.layer_norm_backward(dy, x, 4, forward.mean, forward.rstd)
    mean, rstd = lib.get(forward.mean), lib.get(forward.rstd)
    off = np.abs(mean - values.mean(axis=1))
    assert (off == 0).all() if dtype == "float64" else (off == 1).all()
    terms = dy_values * (values - mean[:, None]) * rstd[:, None]
    allowed = 16 * DTYPES[dtype].half_ulp * np.abs(terms).sum(axis=0)
    assert (np.abs(lib.get(found.dweight) - terms.sum(axis=0)) <= allowed).all()
