"""cupynorm.check_function: parameters, libraries, results and errors of a user's functions."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import cupynorm
from cupynorm.verify.check_function import LAYOUTS, Library, bind

torch = pytest.importorskip("torch")
SHAPE = [(16, 48)]
GPU = pytest.param("cupy", marks=pytest.mark.gpu)


def forward(x, weight, bias, eps):
    """Two passes, in the library of x, with one rounding of y."""
    wide = _wide(x)
    mean = wide.mean(1)
    centered = wide - mean[:, None]
    rstd = 1 / ((centered**2).mean(1) + eps) ** 0.5
    y = centered * rstd[:, None] * _wide(weight) + _wide(bias)
    return _as(y, x), mean, rstd


def backward(dy, x, mean, rstd, weight):
    x_hat = (_wide(x) - mean[:, None]) * rstd[:, None]
    wdy = _wide(dy) * _wide(weight)
    mean_wdy_x_hat = (wdy * x_hat).mean(1)[:, None]
    dx = rstd[:, None] * (wdy - wdy.mean(1)[:, None] - x_hat * mean_wdy_x_hat)
    return _as(dx, x), _as((_wide(dy) * x_hat).sum(0), weight), _as(_wide(dy).sum(0), weight)


def rms_forward(x, weight, eps):
    wide = _wide(x)
    rstd = 1 / ((wide**2).mean(1) + eps) ** 0.5
    return _as(wide * rstd[:, None] * _wide(weight), x), rstd


def rms_backward(dy, x, rstd, weight):
    x_hat = _wide(x) * rstd[:, None]
    wdy = _wide(dy) * _wide(weight)
    dx = rstd[:, None] * (wdy - x_hat * (wdy * x_hat).mean(1)[:, None])
    return _as(dx, x), _as((_wide(dy) * x_hat).sum(0), weight)


def _wide(array):
    """In the dtype of the arithmetic."""
    is_double = str(array.dtype).endswith("float64")
    if isinstance(array, torch.Tensor):
        return array if is_double else array.float()
    return array if is_double else array.astype("float32")


def _as(array, like):
    return array.to(like.dtype) if isinstance(array, torch.Tensor) else array.astype(like.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch", GPU])
def test_right_functions_of_any_library_pass(library, dtype):
    if dtype == "bfloat16" and library != "torch":
        pytest.importorskip("ml_dtypes")
    options = {"library": library, "shapes": SHAPE, "dtypes": [dtype]}
    result = cupynorm.check_function((forward, backward), **options)
    assert result.ok, result
    assert {found.tensor for found in result.findings} == {
        "y", "mean", "rstd", "dx", "dweight", "dbias",
    }  # fmt: skip
    result = cupynorm.check_function((rms_forward, rms_backward), norm="rms_norm", **options)
    assert result.ok, result
    assert {found.tensor for found in result.findings} == {"y", "rstd", "dx", "dweight"}


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_the_explicit_functions_of_this_library_pass(norm):
    pair = [getattr(cupynorm, f"{norm}_{way}") for way in ("forward", "backward")]
    made = cupynorm.check_function(pair, norm=norm, shapes=SHAPE, library="numpy")
    assert made.ok and len({found.tensor for found in made.findings}) == 5 + (norm == "layer_norm")


def test_results_that_negate_their_memory_have_their_values():
    def negated(x, weight, bias):
        return torch._neg_view(-torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias))

    assert cupynorm.check_function(negated, shapes=SHAPE, dtypes=["float64", "float32"]).ok


def test_functions_of_fewer_parameters_are_checked_without_weight_or_bias():
    functional = torch.nn.functional
    assert cupynorm.check_function(functional.rms_norm, norm="rms_norm", shapes=SHAPE).ok
    for function, tensors in (
        (lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-5), {"y", "dx"}),
        (lambda x, weight: functional.layer_norm(x, x.shape[-1:], weight), {"y", "dx", "dweight"}),
        (torch.layer_norm, {"y", "dx", "dweight", "dbias"}),  # built in, without a signature
        (lambda *all: functional.layer_norm(*all), {"y", "dx", "dweight", "dbias"}),
    ):
        result = cupynorm.check_function(function, shapes=SHAPE)
        assert result.ok and {found.tensor for found in result.findings} == tensors


def test_one_direction_alone_is_checked():
    one = cupynorm.check_function((forward, None), shapes=SHAPE)
    assert {found.tensor for found in one.findings} == {"y", "mean", "rstd"}
    assert one.not_covered[0] == "backward"
    only_dx = cupynorm.check_function((None, lambda *given: backward(*given[:5])[0]), shapes=SHAPE)
    assert only_dx.ok and {found.tensor for found in only_dx.findings} == {"dx"}


def test_names_of_parameters_decide_and_others_follow_in_order():
    order = ("x", "normalized_shape", "weight", "bias", "eps")
    by_name = lambda eps, gamma, input: None  # noqa: E731
    assert bind(by_name, order, "f") == ([], {"eps": "eps", "gamma": "weight", "input": "x"})
    in_order = lambda a, w, c, d=3: None  # noqa: E731
    assert bind(in_order, order, "f") == (
        [], {"a": "x", "w": "weight", "c": "normalized_shape"},
    )  # fmt: skip
    assert bind(lambda a, /, *rest, bias: None, order, "f") == (
        ["x", "normalized_shape", "weight", "eps"], {"bias": "bias"},
    )  # fmt: skip
    with pytest.raises(ValueError, match="f has a required parameter c, for which no operand is"):
        bind(lambda a, b, c: None, ("x",), "f")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("library", ["numpy", "torch", GPU])
def test_layouts_have_the_values_and_strides_that_they_name(library, layout):
    values = np.arange(12.0).reshape(3, 4)
    made = Library(library).put(values, "float32", layout)
    right = np.repeat(values[:1], 3, axis=0) if layout == "broadcast" else values
    assert (Library(library).get(made, "x").reshape(3, 4) == right).all()
    strides = made.stride() if library == "torch" else [each // 4 for each in made.strides]
    expected = {"gap": (20, 1), "broadcast": (0, 1), "transposed": (1, 3)}
    assert (*strides[:1], strides[-1]) == expected.get(layout, (4, 1))


# Errors.


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: None, "function returned None; expected y, a torch tensor"),
        (lambda x: x.detach(), "function returned a tensor that is detached"),
        (lambda x: "y", "function returned a str; expected y"),
        (lambda x, w, weight: x * 1, "function returned a y that does not depend on weight in"),
        (lambda x: sys.exit(), "function called sys.exit, so nothing is checked"),
        ((lambda x: sys.exit(0), None), "forward called sys.exit, so nothing is checked"),
        ((lambda x: None, None), r"forward returned None; expected y, or \(y, mean, rstd\)"),
        ((lambda x: "y", None), "forward returned no array: y is a str; expected a CuPy"),
        ((lambda x: (x, x), None), r"forward returned 2 values; expected y, or \(y, mean"),
        ((lambda x: {"out": x}, None), "forward returned no array: y is a dict; expected a CuPy"),
        ((lambda x: x[:, :5], None), r"forward returned y of shape \(16, 5\) for x of shape"),
        ((lambda x: x.T, None), "forward returned y of shape .* it is transposed"),
        ((None, lambda dy: None), r"backward returned None; expected dx, or \(dx, dweight"),
        ((None, lambda dy, x: (dy, x.sum(1))), r"dweight of shape \(16,\).* for each column"),
        ((None, lambda dy: (dy,) * 4), "backward returned 4 values; expected dx, or"),
        ((None, lambda dy: [None] * 3), "backward returned nothing but None, or no dx; expected"),
        ((3, None), "forward is of type int; expected a callable"),
        ((forward, None, None), r"function has 3 values; expected \(forward, backward\)"),
        (None, "function is None; expected a function, or a pair"),
    ],
)
def test_wrong_functions_are_one_sentence(function, message):
    with pytest.raises(ValueError, match=message):
        cupynorm.check_function(function, library="torch", shapes=SHAPE)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"library": "jax"}, "library is 'jax'; expected 'numpy', 'cupy'"),
        (
            {"inputs": (np.ones((2, 4)), None, np.ones(4))},
            "bias is given; expected None: your function has no parameter for it",
        ),
        ({"inputs": (np.ones((2, 4)),), "traps": True}, "traps is given together with inputs"),
        ({"norm": "batch_norm"}, "norm is 'batch_norm'; expected 'layer_norm' or"),
        ({"seed": -1}, "seed is -1; expected an int of 0 or more"),
    ],
)
def test_wrong_options_are_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        cupynorm.check_function((lambda x, weight: x, None), **options)


def test_your_own_arrays_decide_the_library():
    def named(x, weight):
        seen.append(type(x).__module__.partition(".")[0])
        return forward(x, weight, 0 * weight, 1e-5)[0]

    seen = []
    for inputs in ((np.ones((2, 4)), np.ones(4)), (torch.ones(2, 4), torch.ones(4))):
        result = cupynorm.check_function((named, None), inputs)
        assert result.ok and "2 x 4" in result.checked
    assert seen == ["numpy", "torch"]


def test_a_function_that_is_right_with_numpy_is_not_accused():
    """x.var is the biased variance of NumPy's arrays, and the unbiased one of torch's tensors."""

    def by_var(x, weight, bias, eps):
        x_hat = (x - x.mean(1, keepdims=True)) / (x.var(1, keepdims=True) + eps) ** 0.5
        return x_hat * weight + bias

    for given in (by_var, (by_var, None)):
        result = cupynorm.check_function(given, shapes=SHAPE)
        assert result.ok and "on NumPy arrays" in result.checked
        assert result.not_covered[0].startswith("torch tensors, with which it is off: y of ")
    wrong = cupynorm.check_function((by_var, None), shapes=SHAPE, library="torch")
    assert "the variance is divided by num_cols - 1" in wrong.diagnoses[0]
    assert "tensors of torch" in wrong.checked


def test_a_backward_of_autograd_that_ends_the_process_is_one_sentence():
    class Exits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            sys.exit(0)

    with pytest.raises(ValueError, match="function called sys.exit, so"):
        cupynorm.check_function(lambda x: Exits.apply(x), shapes=SHAPE)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_inputs_must_stay_as_they_are(library):
    def in_place(x, weight, bias, eps):
        y = forward(x, weight, bias, eps)[0]
        x[:] = y
        return x

    with pytest.raises(ValueError, match="forward has changed x; expected it to leave its inputs"):
        cupynorm.check_function((in_place, None), library=library, shapes=SHAPE)


def test_libraries_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(cupynorm.MissingLibraryError, match="pip install ml_dtypes"):
        cupynorm.check_function((forward, None), library="numpy", dtypes=["bfloat16"], shapes=SHAPE)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(cupynorm.MissingLibraryError, match="library is 'torch'"):
        cupynorm.check_function((forward, None), library="torch", shapes=SHAPE)
    assert cupynorm.check_function((lambda x: x, None), shapes=[(1, 1)], eps=0.0).findings  # NumPy
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(ValueError, match="CuPy finds no GPU"):
        cupynorm.check_function((forward, None), library="cupy", shapes=SHAPE)


# The default shapes have tails of rows and columns.


def wrong_last_columns(x, weight, bias, eps):
    y = forward(x, weight, bias, eps)[0]
    y[:, x.shape[1] // 4 * 4 :] = 0
    return y


def too_wide(x, weight, bias, eps):
    y = forward(x, weight, bias, eps)[0]
    y[:, 8192:] = 0
    return y


def wrong_tail(dy, x, mean, rstd, weight):
    dx = cupynorm.layer_norm_backward(dy, x, x.shape[1], mean, rstd, weight).dx
    whole = len(dx) // 4 * 4
    dx[whole:] = dx[whole - 1]
    return dx


@pytest.mark.parametrize(
    "pair, case",
    [
        ((None, wrong_tail), "61 x 769"),
        ((wrong_last_columns, None), "61 x 769"),
        ((too_wide, None), "7 x 8195"),
    ],
)
def test_tails_of_rows_and_columns_show_by_default(pair, case):
    result = cupynorm.check_function(pair, library="numpy")
    assert not result and f"of layer_norm {case} float32: " in str(result)
    assert cupynorm.check_function(pair, library="numpy", shapes=[(64, 768)])
