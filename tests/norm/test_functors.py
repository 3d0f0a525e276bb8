"""Functors in calls: what NumPy arrays give, how arrays are broadcast, and every refusal."""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm import functors
from cupynorm.dispatch.functor_text import MOST


def draw(*shape, dtype="float32"):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def normalized(x, weight=None):
    made = cupynorm.reference.layer_norm(
        np.float64(x).reshape(-1, x.shape[-1]), None if weight is None else np.float64(weight)
    )
    return made.y.reshape(x.shape)


# NumPy arrays: the reference, and the functor's own lines in double.


def test_a_gate():
    x, gate, weight = draw(2, 5, 12), draw(2, 1, 12), draw(12)
    y = cupynorm.layer_norm(x, 12, weight, fuse=functors.silu_gate(gate=gate))
    right = functors.silu_gate.reference(normalized(x, weight), np.float64(gate))
    assert y.dtype == np.float32
    assert (
        y == right.astype(np.float32)
    ).mean() > 0.99  # the same but where exp's last bit differs
    np.testing.assert_allclose(y, right, rtol=2.0**-23)


def test_functors_on_x_and_y_with_a_residual():
    x, residual, bias, scale = draw(6, 8), draw(6, 8), draw(8), draw(6, 1)
    y, added = cupynorm.layer_norm(
        x,
        8,
        residual=residual,
        return_residual=True,
        fuse=(functors.ada_ln(scale, scale), functors.bias_gelu(bias=bias)),
    )
    right = functors.bias_gelu.reference(np.float64(x), np.float64(bias)) + residual
    np.testing.assert_allclose(added, right, rtol=2.0**-23, atol=1e-7)
    wide = np.float64(scale)
    np.testing.assert_allclose(y, normalized(added) * (1 + wide) + wide, rtol=1e-6, atol=1e-6)


def test_lines_of_a_file_and_numbers(tmp_path):
    path = tmp_path / "scaled.cu"
    path.write_text("// y by a factor\ny = factor * y;\n")
    scaled = cupynorm.functor("scaled", path, numbers=("factor",))
    x = draw(3, 7)
    made = [cupynorm.rms_norm(x, 7, fuse=scaled(factor=factor)) for factor in (1.0, 2)]
    np.testing.assert_array_equal(2 * made[0], made[1])
    path.write_text("// y by a factor\ny = facto * y;\n")
    with pytest.raises(cupynorm.FunctorError, match=r"scaled\.cu:2:5: error.*facto") as error:
        cupynorm.rms_norm(x, 7, fuse=cupynorm.functor("wrong", path)())
    assert isinstance(error.value, ValueError)


def test_numbers_that_are_equal_and_differ(device):
    """1 / 0 and 1 / -0: the second call must not be that which was prepared for the first."""
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 8, device=device)
    inverse = cupynorm.functor("inverse", "y = C(1) / a;", numbers=("a",))
    for number in (0.0, -0.0, float("nan"), 0.0):
        y = cupynorm.layer_norm(x, 8, fuse=inverse(a=number))
        expected = torch.full_like(y, 1.0) / torch.tensor(number, device=device)
        assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0)), number


def test_rows_of_several_dimensions_and_no_rows():
    x, cos = draw(2, 3, 4, 6), np.tile(draw(1, 3, 1, 3), 2)
    y = cupynorm.rms_norm(x, 6, fuse=functors.rotary(cos=cos, sin=cos))
    plain = cupynorm.rms_norm(np.float64(x), 6, eps=2.0**-23)
    np.testing.assert_allclose(y, functors.rotary.reference(plain, cos, cos), rtol=1e-6, atol=1e-6)
    assert cupynorm.rms_norm(x[:0], 6, fuse=functors.rotary(cos=cos, sin=cos)).shape == (0, 3, 4, 6)
    flat = cupynorm.layer_norm(x, (4, 6), fuse=functors.silu_gate(gate=draw(4, 6)))
    assert flat.shape == x.shape


# Refusals.

X = np.ones((2, 5, 3, 8), "float32")
ODD = draw(2, 33)


def gate(array):
    return lambda: cupynorm.layer_norm(X, 8, fuse=functors.silu_gate(gate=array))


def defined(name="f", lines="y = y;", **options):
    return lambda: cupynorm.functor(name, lines, **options)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (r"silu_gate.gate has shape \(4,\), the input \(2, 5, 3, 8\); exp", gate(np.ones(4, "f4"))),
        ("repeated over the rows as in", gate(np.ones((2, 1, 3, 8), "f4"))),
        ("broadcast to it", gate(np.ones((1, 2, 5, 3, 8), "f4"))),
        ("all or one of the normalised columns", gate(np.ones((2, 5, 3, 4), "f4"))),
        ("silu_gate.gate is of dtype int64; expected one of float16", gate(np.ones(8, int))),
        ("silu_gate.gate is a list; expected a CuPy, torch or NumPy", gate([1.0] * 8)),
        ("fuse has a str; expected functors", lambda: cupynorm.layer_norm(X, 8, fuse="x = x;")),
        ("silu_gate was given no gate; expected gate", functors.silu_gate),
        ("silu_gate got gat; expected gate", lambda: functors.silu_gate(gate=X, gat=X)),
        ("silu_gate got gat; expected gate", lambda: functors.silu_gate(gat=X)),
        ("arrays is 'gate'; expected a sequence of names", defined(arrays="gate")),
        ("numbers is 'gate'; expected a sequence of names", defined(numbers="gate")),
        ("a of f is '2'; expected a number", lambda: defined(numbers=("a",))()(a="2")),
        ("'1st' names a functor, array or number; expected an ident", defined("1st")),
        ("expected each once, and none of C, col", defined(arrays=("y",))),
        ("has names a, a, da, da; expected each once", defined(arrays=("a", "a"))),
        ("expected each once", defined(arrays=("a", "da"))),
        ("has lines of type int; expected a str or a pathlib.Path", defined(lines=3)),
        ("has no lines", defined(lines=None)),
        (
            r"functors on y \(f\) have 9 arrays together; expected at most 8",
            defined(arrays=[f"a{at}" for at in range(MOST + 1)]),
        ),
        ("functor f mention both x and y; expected x or", defined(lines="y = x;")),
        ("functor f mention neither; expected x or", defined(lines="C z = 1;")),
        ("functor f has per_row .* expected some of arrays", defined(per_row=("f",))),
        (  # the last column would read beyond its row
            r"normalized_shape is \(33,\), and functor rotary .*expected a multiple of 2 columns",
            lambda: cupynorm.rms_norm(ODD, 33, fuse=functors.rotary(ODD, ODD)),
        ),
        (
            "functor rotary_interleaved .*expected a multiple of 2 columns",
            lambda: cupynorm.rms_norm(ODD, 33, fuse=functors.rotary_interleaved(ODD, ODD)),
        ),
        (
            "round_x_hat was given with a functor on y; expected",
            lambda: cupynorm.layer_norm(X, 8, fuse=functors.silu_gate(X), round_x_hat=True),
        ),
        (
            "return_residual was given without a residual and with",
            lambda: cupynorm.layer_norm(X, 8, fuse=functors.layer_scale(X), return_residual=True),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(words, call):
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        call()
    assert isinstance(caught.value, cupynorm.FunctorError) == ("mention" in words)


# Which role, and in which order.


@pytest.mark.parametrize(
    ("lines", "role"),
    [
        ("y = -y;", "store"),
        ("x = -x; // not y", "load"),
        ("/* y */ x += x_at(0);", "load"),
        ("float2 pair; pair.x = float(y); y = C(pair.x);", "store"),
    ],
)
def test_what_a_functor_acts_on(lines, role):
    assert cupynorm.functor("own", lines).role == role


def test_the_order_of_functors():
    add = cupynorm.functor("add", "y = y + a;", numbers=("a",))
    double = cupynorm.functor("double", "y = C(2) * y;")
    x = draw(3, 8)
    plain = cupynorm.layer_norm(x, 8)
    y = cupynorm.layer_norm(x, 8, fuse=(add(1), double, add(a=0.5)))
    np.testing.assert_allclose(y, (plain + 1) * 2 + 0.5, rtol=1e-6, atol=1e-6)
    reverse = cupynorm.functor("reverse", "y = y_at(num_cols - 1 - col);")
    y = cupynorm.layer_norm(x, 8, fuse=[reverse, add(1)])
    np.testing.assert_allclose(y, plain[:, ::-1] + 1, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="reverse reads other columns and comes after add; expec"):
        cupynorm.layer_norm(x, 8, fuse=[add(1), reverse])
    with pytest.raises(
        ValueError, match=r"functors on y \(add, .* have 9 functors together; expected at"
    ):
        cupynorm.layer_norm(x, 8, fuse=[add(1)] * 9)


# Seeds, and one element per row.

DROPPED = cupynorm.functor(
    "dropped",
    "y = seed >> col & 1 ? y : C(0);",
    seeds=("seed",),
    backward="dy = seed >> col & 1 ? dy : C(0);",
)


def test_seeds():
    x, kept = draw(4, 32), (0xA5A5A5A5 >> np.arange(32)) & 1
    plain = cupynorm.layer_norm(x, 32)
    for seed in (0xA5A5A5A5, np.array([0xA5A5A5A5]), np.array(0xA5A5A5A5)):
        np.testing.assert_array_equal(cupynorm.layer_norm(x, 32, fuse=DROPPED(seed)), plain * kept)
    np.random.seed(3)
    first, second = (cupynorm.layer_norm(x, 32, fuse=DROPPED) for _ in range(2))
    np.random.seed(3)
    assert (first != second).any()
    np.testing.assert_array_equal(cupynorm.layer_norm(x, 32, fuse=DROPPED(seed=None)), first)
    for seed, error, words in (
        (2**64, ValueError, "seed of dropped is 18446744073709551616; expected an int of 64 bits"),
        (True, TypeError, "seed of dropped is True; expected an int, one element of int64, or"),
        (np.ones(1), ValueError, "dropped.seed has shape .* and dtype float64; expected one el"),
        (np.ones(2, int), ValueError, r"dropped.seed has shape \(2,\) and dtype int64; expected"),
    ):
        with pytest.raises(error, match=words):
            cupynorm.layer_norm(x, 32, fuse=DROPPED(seed))


def test_an_explicit_forward_is_given_its_seeds():
    x = draw(4, 32)
    with pytest.raises(ValueError, match="dropped.seed is None in an explicit forward or backward"):
        cupynorm.layer_norm_forward(x, 32, fuse=DROPPED)
    made = cupynorm.layer_norm_forward(x, 32, fuse=DROPPED(7))
    back = cupynorm.layer_norm_backward(x, x, 32, made.mean, made.rstd, fuse=DROPPED(seed=7))
    kept = 7 >> np.arange(32) & 1
    right = cupynorm.layer_norm_backward(x * kept.astype("float32"), x, 32, made.mean, made.rstd)
    np.testing.assert_allclose(back.dx, right.dx, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(back.dbias, right.dbias, rtol=1e-6, atol=1e-6)


def test_an_array_per_row():
    times = cupynorm.functor("times", "y = y * f;", arrays=("f",), per_row=("f",))
    x, factor = draw(2, 3, 8), draw(2, 3)
    y = cupynorm.layer_norm(x, 8, fuse=times(factor))
    np.testing.assert_allclose(y, cupynorm.layer_norm(x, 8) * factor[..., None], rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"times.f has shape \(8,\); expected \(2, 3\), one for each"
    ):
        cupynorm.layer_norm(x, 8, fuse=times(draw(8)))


def test_explicit_backward_reads_the_input():
    x, scale = draw(3, 8), draw(8)
    fuse = functors.layer_scale(scale)
    made = cupynorm.rms_norm_forward(x, 8, fuse=fuse)
    np.testing.assert_array_equal(made.sum, x * scale)
    with pytest.raises(
        TypeError, match="input is None; expected the input of the forward, because"
    ):
        cupynorm.rms_norm_backward(x, made.sum, 8, made.rstd, fuse=fuse)
    options = {"fuse": fuse, "input": x, "gradients": ("dweight", "functors")}
    back = cupynorm.rms_norm_backward(x, made.sum, 8, made.rstd, **options)
    assert back.dx is None and back.dbias is None
    plain = cupynorm.rms_norm_backward(x, made.sum, 8, made.rstd)
    np.testing.assert_allclose(back.functors[0], (plain.dx * x).sum(0), rtol=1e-5, atol=1e-6)
