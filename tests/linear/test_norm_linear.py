"""layer_norm_linear of NumPy arrays, tensors and CuPy arrays: values, gradients and errors."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import numpy_as_cupy
import pytest
from linear_bounds import assert_right, draw

import cupynorm
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu import arrays, cublas, launch, nvrtc
from cupynorm.linear import api as norm_linear
from cupynorm.linear import call as linear_call
from cupynorm.norm import route

NORMS = ("layer_norm", "rms_norm")
OPTIONS = (
    {},
    {"without": ("norm_bias", "bias")},
    {"without": ("norm_weight", "norm_bias")},
    {"zero_centered_weight": True, "norm_dtype": "float32"},
    {"residual": True, "dnormalized": True, "dsum": True},
    {"num_rows": 1, "in_features": 7, "out_features": 3},
    {"num_rows": 3, "in_features": 1, "out_features": 1},
)
LIBRARIES = (
    "numpy",
    "torch",
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cupy", marks=pytest.mark.gpu),
)


def maker(library):
    """Two functions: make(values, dtype) for an array of a library, and its values in float64."""
    if library == "numpy":
        return lambda values, dtype: arrays.from_float64(
            values, dtype, np.empty(0)
        ), arrays.to_float64
    if library == "cupy":
        cupy = nvrtc.cupy()

        def on_gpu(values, dtype):
            made = cupy.ndarray(np.shape(values), arrays.CuPyLibrary.dtype(dtype))
            cublas.bits(made)[...] = cupy.asarray(encode(values, dtype))
            return made

        return on_gpu, lambda array: decode(cublas.bits(array).get(), arrays.dtype_name(array))
    torch = pytest.importorskip("torch")
    if library == "cuda":  # cuBLAS then adds the parts of a split sum in float32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    device = "cuda" if library == "cuda" else "cpu"
    return (
        lambda values, dtype: arrays.from_float64(values, dtype, torch.empty(0)).to(device),
        lambda tensor: tensor.detach().double().cpu().numpy(),
    )


def explicit(problem, library, keep=False, **options):
    """The results of the explicit forward and backward, in float64."""
    make, back = maker(library)
    own = problem.norm_dtype or problem.dtype
    given = {}
    for name in (
        "x",
        "norm_weight",
        "norm_bias",
        "weight",
        "bias",
        "dy",
        "residual",
        "dnormalized",
        "dsum",
    ):
        values = getattr(problem, name)
        dtype = own if name in ("norm_weight", "norm_bias") else problem.dtype
        given[name] = None if values is None else make(values, dtype)
    dy, weight = given.pop("dy"), given["weight"]
    of_norm = [given.pop("norm_weight"), given.pop("norm_bias")]
    options = {"zero_centered_weight": problem.zero_centered_weight} | options
    outside = {name: given.pop(name) for name in ("dnormalized", "dsum")}
    if problem.centered:
        made = cupynorm.layer_norm_linear_forward(
            given["x"],
            *of_norm,
            weight,
            given["bias"],
            problem.eps,
            residual=given["residual"],
            **options,
        )
        gradients = cupynorm.layer_norm_linear_backward(
            dy,
            made.sum,
            made.mean,
            made.rstd,
            *of_norm,
            weight,
            problem.eps,
            normalized=made.normalized if keep else None,
            **outside,
            **options,
        )
    else:
        assert set(options) == {"zero_centered_weight"}
        made = cupynorm.rms_norm_linear_forward(
            given["x"],
            of_norm[0],
            weight,
            given["bias"],
            problem.eps,
            norm_bias=of_norm[1],
            residual=given["residual"],
            **options,
        )
        gradients = cupynorm.rms_norm_linear_backward(
            dy,
            made.sum,
            made.rstd,
            of_norm[0],
            weight,
            problem.eps,
            norm_bias=of_norm[1],
            normalized=made.normalized if keep else None,
            **outside,
            **options,
        )
        assert made.mean is None
    assert type(made.y) is type(given["x"]) and arrays.dtype_name(made.y) == problem.dtype
    return {
        name: back(value)
        for name, value in (made._asdict() | gradients._asdict()).items()
        if value is not None
    }


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_results_and_gradients_are_within_bounds(library, norm_name, dtype, options):
    problem = draw(norm_name, dtype, **options)
    for keep in (False, True):
        assert_right(problem, explicit(problem, library, keep))


def test_an_error_of_5_percent_exceeds_the_bounds():
    problem = draw(dtype="bfloat16")
    results = explicit(problem, "numpy")
    assert_right(problem, results)
    for name in ("y", "dx", "dweight", "dbias", "dnorm_weight", "dnorm_bias", "normalized"):
        wrong = results[name].copy()
        wrong.flat[np.argmax(np.abs(wrong))] *= 1.05
        with pytest.raises(AssertionError, match="1 off"):
            assert_right(problem, results | {name: wrong})


@pytest.mark.parametrize("norm_name", NORMS)
def test_only_the_wanted_gradients_are_returned(norm_name):
    problem = draw(norm_name)
    for name in linear_call.GRADIENTS:
        given = (problem.x, problem.norm_weight, problem.norm_bias, problem.weight)
        made = cupynorm.layer_norm_linear_forward(*given, problem.bias)
        gradients = cupynorm.layer_norm_linear_backward(
            problem.dy, made.sum, made.mean, made.rstd, *given[1:], gradients=(name,)
        )
        assert [each for each, value in gradients._asdict().items() if value is not None] == [name]
    gradients = cupynorm.layer_norm_linear_backward(
        problem.dy,
        made.sum,
        made.mean,
        made.rstd,
        *given[1:],
        gradients=(name for name in ("dx", "dbias")),
    )
    assert gradients.dx is not None and gradients.dbias is not None and gradients.dweight is None
    with pytest.raises(TypeError, match="gradients is None; expected some of dx, dnorm_weight"):
        cupynorm.layer_norm_linear_backward(
            problem.dy, problem.x, made.mean, made.rstd, *given[1:], gradients=None
        )
    with pytest.raises(ValueError, match="gradients is 'dx'; expected some of dx, dnorm_weight"):
        cupynorm.layer_norm_linear_backward(
            problem.dy, problem.x, made.mean, made.rstd, *given[1:], gradients="dx"
        )


@pytest.mark.parametrize("library", ("numpy", "torch"))
def test_returned_arrays(library):
    make, back = maker(library)
    problem = draw(residual=True)
    x, norm_weight, norm_bias, weight, bias, residual = (
        make(getattr(problem, name), "float32")
        for name in ("x", "norm_weight", "norm_bias", "weight", "bias", "residual")
    )
    given = (x, norm_weight, norm_bias, weight, bias)
    made = cupynorm.layer_norm_linear_forward(*given, residual=residual)
    y, normalized, added = cupynorm.layer_norm_linear(
        *given, residual=residual, return_normalized=True, return_residual=True
    )
    for got, expected in ((y, made.y), (normalized, made.normalized), (added, made.sum)):
        np.testing.assert_array_equal(back(got), back(expected))
    assert cupynorm.layer_norm_linear(*given, return_residual=True)[1] is x
    shaped = cupynorm.layer_norm_linear(x.reshape(1, 5, 24), *given[1:])
    assert tuple(shaped.shape) == (1, 5, 16)
    np.testing.assert_array_equal(back(shaped)[0], back(cupynorm.layer_norm_linear(*given)))
    one = cupynorm.layer_norm_linear(x[0], *given[1:])
    assert tuple(one.shape) == (16,)


@pytest.mark.parametrize("library", ("numpy", "torch"))
def test_no_rows_give_empty_results_and_zero_gradients(library):
    make, back = maker(library)
    problem = draw(num_rows=0)
    results = explicit(problem, library)
    assert results["y"].shape == (0, 16) and results["dx"].shape == (0, 24)
    for name in ("dweight", "dbias", "dnorm_weight", "dnorm_bias"):
        assert results[name].shape == getattr(problem, name[1:]).shape and not results[name].any()


def test_fold_is_ignored_for_numpy_arrays():
    problem = draw()
    given = (problem.x, problem.norm_weight, problem.norm_bias, problem.weight, problem.bias)
    np.testing.assert_array_equal(
        cupynorm.layer_norm_linear(*given, fused="fold"), cupynorm.layer_norm_linear(*given)
    )


@pytest.mark.parametrize("library", ("numpy", "torch"))
def test_wrong_arguments_are_refused(library):
    make, _ = maker(library)
    problem = draw()
    names = ("x", "norm_weight", "norm_bias", "weight", "bias")
    right = {name: make(getattr(problem, name), "float32") for name in names}
    for wrong, error, sentence in (
        (
            {"weight": make(np.ones((16, 23)), "float32")},
            ValueError,
            r"weight has shape \(16, 23\), input \(5, 24\); expected \(out_features, 24\)",
        ),
        ({"weight": make(np.ones(24), "float32")}, ValueError, r"weight has shape \(24,\)"),
        (
            {"bias": make(np.ones(24), "float32")},
            ValueError,
            r"bias has shape \(24,\); expected \(16,\)",
        ),
        (
            {"norm_weight": make(np.ones(16), "float32")},
            ValueError,
            r"norm_weight has shape \(16,\); expected \(24,\)",
        ),
        (
            {"norm_bias": make(np.ones((1, 24)), "float32")},
            ValueError,
            r"norm_bias has shape \(1, 24\); expected \(24,\)",
        ),
        (
            {"weight": make(np.ones((16, 24)), "float16")},
            TypeError,
            "weight is of dtype float16, input of float32; expected both the same",
        ),
        ({"weight": None}, TypeError, "weight is None; expected a"),
        ({"bias": 1.0}, TypeError, "bias is a float; expected a"),
        (
            {"bias": make(np.ones(16), "bfloat16")},
            TypeError,
            "bias is of dtype bfloat16, input of float32",
        ),
        (
            {"x": make(np.ones(()), "float32")},
            ValueError,
            "input has no dimension to normalise over",
        ),
        ({"x": None}, TypeError, "input is None; expected a CuPy, torch or NumPy array"),
        (
            {"norm_weight": make(np.ones(24), "float32") == 1},
            TypeError,
            "norm_weight is of dtype bool; expected one of float16",
        ),
    ):
        given = right | wrong
        with pytest.raises(error, match=sentence):
            cupynorm.layer_norm_linear(*(given[name] for name in names))
    given = [right[name] for name in names]
    with pytest.raises(ValueError, match="fused is 'gemm'; expected None, 'plain', 'fold' or"):
        cupynorm.layer_norm_linear(*given, fused="gemm")
    with pytest.raises(ValueError, match="no normalised tensor exists"):
        cupynorm.layer_norm_linear(*given, fused="fold", return_normalized=True)
    with pytest.raises(ValueError, match="sm_margin is -1"):
        cupynorm.layer_norm_linear(*given, sm_margin=-1)
    made = cupynorm.layer_norm_linear_forward(*given)
    for dy, error, sentence in (
        (right["x"], ValueError, r"dy has shape \(5, 24\); expected that of y, \(5, 16\)"),
        (make(np.ones((5, 16)), "float16"), TypeError, "dy is of dtype float16, x of float32"),
    ):
        with pytest.raises(error, match=sentence):
            cupynorm.layer_norm_linear_backward(dy, made.sum, made.mean, made.rstd, *given[1:4])
    dy = make(problem.dy, "float32")
    for mean, rstd, error, sentence in (
        (None, made.rstd, TypeError, "mean is None; expected the statistic that the forward"),
        (made.mean, None, TypeError, "rstd is None; expected the statistic that the forward"),
        (made.mean[1:], made.rstd, ValueError, r"mean has shape \(4,\); expected \(5,\)"),
        (made.mean, made.rstd[1:], ValueError, r"rstd has shape \(4,\); expected \(5,\)"),
    ):
        with pytest.raises(error, match=sentence):
            cupynorm.layer_norm_linear_backward(dy, made.sum, mean, rstd, *given[1:4])
    with pytest.raises(TypeError, match="normalized is of dtype float16, x of float32"):
        cupynorm.layer_norm_linear_backward(
            dy, made.sum, made.mean, made.rstd, *given[1:4], normalized=make(problem.x, "float16")
        )
    elsewhere, _ = maker("torch" if library == "numpy" else "numpy")
    for name in names[1:]:
        wrong = right | {name: elsewhere(getattr(problem, name), "float32")}
        with pytest.raises(
            ValueError, match=f"{name} is a .*, input is a .*; expected the library and"
        ):
            cupynorm.layer_norm_linear(*(wrong[each] for each in names))


# CuPy arrays, with cuBLAS replaced by NumPy on the same memory.


def gemm_of_columns(
    handle,
    transpose_a,
    transpose_b,
    m,
    n,
    k,
    alpha,
    a,
    a_type,
    lda,
    b,
    b_type,
    ldb,
    beta,
    c,
    c_type,
    ldc,
    compute,
    algorithm,
):
    """cublasGemmEx of column-major matrices: C = alpha op(A) op(B) + beta C."""
    assert a_type == b_type == c_type and algorithm == -1 and handle == 7
    name = {value: key for key, value in cublas._CUDA_TYPES.items()}[a_type]
    kind = DTYPES[name]
    assert compute == {"float32": 68, "float64": 70}[kind.compute]

    def matrix(address, rows, cols, stride):
        assert stride >= max(1, rows)
        buffer = (ctypes.c_uint8 * (kind.itemsize * stride * cols)).from_address(address)
        return np.frombuffer(buffer, kind.storage).reshape(cols, stride)[:, :rows].T

    def factor(address):
        return np.frombuffer(
            (ctypes.c_uint8 * DTYPES[kind.compute].itemsize).from_address(address), kind.compute
        )[0]

    left, right = (
        matrix(a, *((k, m) if transpose_a else (m, k)), lda),
        matrix(b, *((n, k) if transpose_b else (k, n)), ldb),
    )
    left, right = (decode(np.ascontiguousarray(each), name) for each in (left, right))
    product = factor(alpha) * (
        (left.T if transpose_a else left) @ (right.T if transpose_b else right)
    )
    into = matrix(c, m, n, ldc)
    if factor(beta):
        product = product + factor(beta) * decode(np.ascontiguousarray(into), name)
    into[...] = encode(product, name)


@pytest.fixture
def cupy_on_host(monkeypatch):
    monkeypatch.setattr(nvrtc, "cupy", lambda: numpy_as_cupy)
    monkeypatch.setattr(launch, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(arrays, "is_cupy", lambda array: isinstance(array, numpy_as_cupy.ndarray))
    monkeypatch.setattr(
        numpy_as_cupy.cuda, "cublas", SimpleNamespace(gemmEx=gemm_of_columns), raising=False
    )
    monkeypatch.setattr(
        numpy_as_cupy.cuda, "device", SimpleNamespace(get_cublas_handle=lambda: 7), raising=False
    )

    def make(values, dtype):
        made = numpy_as_cupy.ndarray(np.shape(values), arrays.CuPyLibrary.dtype(dtype))
        cublas.bits(made)[...] = encode(values, dtype)
        return made

    return make


def host(array):
    return decode(np.array(cublas.bits(array)), arrays.dtype_name(array))


@pytest.mark.parametrize(
    "shapes",
    (((5, 3), (3, 4)), ((1, 1), (1, 1)), ((2, 7), (7, 1)), ((3, 0), (0, 2)), ((0, 3), (3, 2))),
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_cupy_arrays_are_those_of_numpy(cupy_on_host, dtype, shapes):
    random = np.random.default_rng(0)
    a, b = (decode(encode(random.standard_normal(shape), dtype), dtype) for shape in shapes)
    before = decode(encode(random.standard_normal((len(a), b.shape[1])), dtype), dtype)
    # The order of additions shows in float64 only, where nothing is rounded afterwards.
    bound = (len(b) + 1) * 2.0**-53 * (abs(a) @ abs(b) + abs(before)) if dtype == "float64" else 0

    def assert_product(made, expected):
        assert (abs(host(made) - decode(encode(expected, dtype), dtype)) <= bound).all()

    for transpose_a in (False, True):
        for transpose_b in (False, True):
            given = [
                cupy_on_host(each.T if turned else each, dtype)
                for each, turned in ((a, transpose_a), (b, transpose_b))
            ]
            turned = {"transpose_a": transpose_a, "transpose_b": transpose_b}
            assert_product(cublas.multiply(*given, **turned), a @ b)
            for accumulate in (False, True):
                out = cupy_on_host(before, dtype)
                assert cublas.multiply(*given, **turned, out=out, accumulate=accumulate) is out
                assert_product(out, a @ b + (before if accumulate else 0))
    np.testing.assert_array_equal(
        host(cublas.sum_rows(cupy_on_host(a, dtype))), decode(encode(a.sum(axis=0), dtype), dtype)
    )


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("norm_name", NORMS)
def test_results_of_cupy_arrays_by_cublas_are_within_bounds(
    cupy_on_host, monkeypatch, norm_name, dtype, options
):
    """The norm's kernels are replaced by the reference."""

    class Norm:
        def __init__(self, prepare, request, purpose):
            self.prepare, self.request, self.purpose = prepare, request, purpose

        def run(self, operands):
            operands = type(operands)(
                *(
                    np.array(each) if isinstance(each, numpy_as_cupy.ndarray) else each
                    for each in operands
                )
            )
            asked.append(getattr(self.request.options, "recompute", False))
            prepared, operands = self.prepare(
                self.request._replace(operands=operands), *self.purpose
            )
            made = prepared.run(operands)
            return type(made)(
                *(
                    each  # None, or no gradients of functors
                    if each is None or isinstance(each, tuple)
                    else cupy_on_host(arrays.to_float64(each), arrays.dtype_name(each))
                    for each in made
                )
            )

    asked = []

    def replacing(plain):
        return lambda request, *purpose: (Norm(plain, request, purpose), request.operands)

    for name in ("prepare_forward", "prepare_backward"):
        monkeypatch.setattr(route, name, replacing(getattr(route, name)))
    monkeypatch.setattr(arrays, "on_host", lambda array: isinstance(array, np.ndarray))
    problem = draw(norm_name, dtype, **options)
    monkeypatch.setattr("test_norm_linear.maker", lambda library: (cupy_on_host, host))
    monkeypatch.setattr(norm_linear, "np", SimpleNamespace(ndarray=()))  # no array here is NumPy's
    for keep in (False, True):
        assert_right(problem, explicit(problem, "cupy", keep))
        # A forward, and a backward that recomputes the normalised tensor where it was not kept.
        assert asked == [False, not keep]
        asked.clear()
