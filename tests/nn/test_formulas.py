"""cupynorm.nn.formulas against the float64 reference and against numerical derivatives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cupynorm.nn.formulas import Normalized, Saved  # noqa: E402
from torch.func import vmap  # noqa: E402

from cupynorm import reference  # noqa: E402
from cupynorm.nn import formulas  # noqa: E402

EPS = 0.1  # large enough to matter; rstd is 1 / sqrt(EPS) at most
# Shape of x, and how many of its last dimensions are normalised.
SHAPES = [((4, 5), 1), ((2, 3, 5), 1), ((2, 3, 5), 2), ((5,), 1), ((3, 1), 1)]

by_shape = pytest.mark.parametrize("shape, num_dims", SHAPES)
by_norm = pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
by_weight = pytest.mark.parametrize("given", ["no weight", "weight", "1 + weight"])


def random(*shape: int, dtype=torch.float64, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(got: torch.Tensor, expected: object, unit: float = 2.0**-53) -> None:
    """Allows 2^10 roundings of 2^4 times the largest element, for rows of 15 columns or fewer."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert got.shape == expected.shape
    allowed = unit * 2**10 * 2**4 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(got.detach().double(), expected, rtol=0, atol=allowed)


def matrix(tensor: torch.Tensor, num_dims: int) -> np.ndarray:
    """The tensor as the reference takes it: [num_rows, num_cols] in float64."""
    return tensor.detach().double().flatten(-num_dims).reshape(-1, _cols(tensor, num_dims)).numpy()


def _cols(tensor: torch.Tensor, num_dims: int) -> int:
    return tensor.shape[-num_dims:].numel()


def of_reference(x: torch.Tensor, num_dims: int, centered: bool) -> tuple:
    """x_hat, mean (None for RMSNorm) and rstd of x by the reference, in x's shapes."""
    norm = reference.layer_norm if centered else reference.rms_norm
    made = norm(matrix(x, num_dims), eps=EPS)
    leading = x.shape[: x.dim() - num_dims]
    mean = torch.from_numpy(made.mean).reshape(leading) if centered else None
    return (
        torch.from_numpy(made.y).reshape(x.shape),
        mean,
        torch.from_numpy(made.rstd).reshape(leading),
    )


def saved_of(x, weight, num_dims: int, centered: bool, zero_centered_weight=False) -> Saved:
    """What a forward saves of x. The statistics are constants to autograd."""
    with torch.no_grad():
        mean = x.mean(tuple(range(-num_dims, 0))) if centered else None
        difference = x - mean[(..., *(None,) * num_dims)] if centered else x
        rstd = torch.rsqrt((difference**2).mean(tuple(range(-num_dims, 0))) + EPS)
    return Saved(x, mean, rstd, weight, tuple(x.shape[-num_dims:]), zero_centered_weight)


def compute_of(num_dims: int, centered: bool):
    """A `compute` of Normalized, by torch operations."""

    def compute(x):
        saved = saved_of(x.to(formulas.arithmetic(x)), None, num_dims, centered)
        return formulas.x_hat(x, num_dims, centered, EPS), saved.rstd

    return compute


# arithmetic and scale.


@pytest.mark.parametrize(
    "dtype, expected",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_arithmetic_is_float32_and_float64_for_float64(dtype, expected):
    x = random(3, 5, dtype=dtype)
    assert formulas.arithmetic(x) == expected
    assert formulas.x_hat(x, 1, True, EPS).dtype == expected


@pytest.mark.parametrize("zero_centered_weight", [False, True])
def test_scale_is_weight_or_1_plus_weight_or_1(zero_centered_weight):
    assert formulas.scale(None, zero_centered_weight, torch.float32) == 1.0
    weight = random(5, dtype=torch.float32)
    got = formulas.scale(weight, zero_centered_weight, torch.float64)
    assert got.dtype == torch.float64
    expected = weight.double() + zero_centered_weight
    assert torch.equal(got, torch.as_tensor(expected))


def test_scale_adds_1_in_the_given_dtype_and_not_in_the_weight_s():
    weight = torch.full((3,), 2.0**-12, dtype=torch.bfloat16)  # 1 + 2^-12 is 1 in bfloat16
    got = formulas.scale(weight, True, torch.float32)
    assert torch.equal(got, torch.full((3,), 1 + 2.0**-12))


# x_hat.


@by_norm
@by_shape
def test_x_hat_is_that_of_the_reference(shape, num_dims, centered):
    x = 3 * random(*shape) + 2
    expected, _, _ = of_reference(x, num_dims, centered)
    assert_close(formulas.x_hat(x, num_dims, centered, EPS), expected)


@by_norm
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_x_hat_of_narrow_inputs_is_rounded_to_float32_only(dtype, centered):
    x = random(4, 15, dtype=dtype)
    expected, _, _ = of_reference(x, 1, centered)
    got = formulas.x_hat(x, 1, centered, EPS)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2.0**-24 * 32 * 4)


def test_x_hat_of_a_constant_row_is_zero_and_only_of_that_row():
    x = random(3, 8)
    x[1] = 2.0
    got = formulas.x_hat(x, 1, True, EPS)
    assert torch.equal(got[1], torch.zeros(8, dtype=torch.float64))
    assert got[0].all() and got[2].all()


# Normalized.


def test_normalized_returns_what_compute_returns():
    made = random(4, 5, seed=1), random(4, seed=2)
    x_hat, rstd = Normalized.apply(random(4, 5), 1, True, lambda x: made)
    assert torch.equal(x_hat, made[0]) and torch.equal(rstd, made[1])


def test_the_gradient_of_normalized_has_the_dtype_of_x():
    x = random(4, 5, dtype=torch.bfloat16).requires_grad_()
    x_hat, rstd = Normalized.apply(x, 1, True, compute_of(1, True))
    assert x_hat.dtype == rstd.dtype == torch.float32
    assert torch.autograd.grad(x_hat.sum(), x)[0].dtype == torch.bfloat16


@by_norm
@pytest.mark.parametrize("in_dim", [0, 1, 2])
def test_vmap_of_normalized_computes_all_rows_at_once(in_dim, centered):
    calls = []

    def compute(x):
        calls.append(x.shape)
        return compute_of(1, centered)(x)

    x = random(2, 3, 4, 5)
    got = vmap(lambda x: Normalized.apply(x, 1, centered, compute), in_dims=in_dim)(x)
    moved = x.movedim(in_dim, 0)
    assert calls == [moved.shape]
    expected, _, rstd = of_reference(moved, 1, centered)
    assert_close(got[0], expected)
    assert_close(got[1], rstd)


def test_rows_without_columns_have_gradients_without_elements():
    x = torch.empty(3, 0, dtype=torch.float64, requires_grad=True)
    made = torch.empty(3, 0, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    x_hat, rstd = Normalized.apply(x, 1, True, lambda x: made)
    (dx,) = torch.autograd.grad((x_hat.sum() + rstd.sum()), x)
    assert dx.shape == (3, 0)


# gradients.


def _reference_gradients(dy, dsum, saved: Saved) -> reference.Gradients:
    num_dims = len(saved.normalized_shape)
    rows = [matrix(dy, num_dims), matrix(saved.x, num_dims)]
    statistics = [saved.mean, saved.rstd] if saved.centered else [saved.rstd]
    rows += [each.double().reshape(-1).numpy() for each in statistics]
    backward = reference.layer_norm_backward if saved.centered else reference.rms_norm_backward
    weight = None if saved.weight is None else saved.weight.detach().double().reshape(-1).numpy()
    made = backward(
        *rows,
        weight,
        zero_centered_weight=saved.zero_centered_weight,
        dsum=None if dsum is None else matrix(dsum, num_dims),
    )
    shapes = (saved.x.shape, saved.normalized_shape, saved.normalized_shape)
    return reference.Gradients(*(each.reshape(shape) for each, shape in zip(made, shapes)))


def problem(shape, num_dims, centered, given: str, dtype=torch.float64) -> tuple:
    """dy, dsum and Saved, of leaves."""
    x = random(*shape, dtype=dtype)
    weight = None if given == "no weight" else random(*shape[-num_dims:], dtype=dtype, seed=1)
    saved = saved_of(x.to(formulas.arithmetic(x)), weight, num_dims, centered, given[0] == "1")
    dy, dsum = (random(*shape, dtype=dtype, seed=seed) for seed in (2, 3))
    return dy, dsum, saved._replace(x=x)


@by_weight
@by_norm
@by_shape
def test_gradients_are_those_of_the_reference(shape, num_dims, centered, given):
    dy, dsum, saved = problem(shape, num_dims, centered, given)
    for added in (None, dsum):
        expected = _reference_gradients(dy, added, saved)
        for got, right in zip(formulas.gradients(dy, added, saved), expected, strict=True):
            assert_close(got, right)


@by_norm
def test_gradients_of_narrow_tensors_are_float32(centered):
    dy, dsum, saved = problem((4, 5), 1, centered, "1 + weight", torch.bfloat16)
    expected = _reference_gradients(dy, dsum, saved)
    for got, right in zip(formulas.gradients(dy, dsum, saved), expected, strict=True):
        assert got.dtype == torch.float32
        assert_close(got, right, unit=2.0**-24)


# second_derivatives.

UPSTREAM = [names for count in (1, 2, 3) for names in itertools.combinations("abc", count)]


@pytest.mark.parametrize("upstream", UPSTREAM, ids="".join)
@by_weight
@by_norm
@pytest.mark.parametrize("shape, num_dims", [((4, 5), 1), ((2, 3, 4), 2)])
def test_second_derivatives_are_those_of_gradients(shape, num_dims, centered, given, upstream):
    """a, b, c: the gradients of dx, dweight and dbias; those left out are None."""
    dy, _, saved = problem(shape, num_dims, centered, given)
    shapes = {"a": shape, "b": saved.normalized_shape, "c": saved.normalized_shape}
    tensors = {name: random(*shapes[name], seed=8) if name in upstream else None for name in shapes}
    leaves = [each for each in (dy, saved.x, saved.weight) if each is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    made = formulas.gradients(dy, None, saved)
    product = sum(
        (each * one).sum() for each, one in zip(made, tensors.values()) if one is not None
    )
    expected = torch.autograd.grad(product, leaves, allow_unused=True, materialize_grads=True)
    got = formulas.second_derivatives(*tensors.values(), dy.detach(), saved)
    for one, right in zip(got, expected):  # without a weight, its gradient is not compared
        assert_close(one, right)
