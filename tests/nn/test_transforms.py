"""torch.func and forward mode: derivatives, vmap and their dtypes agree with torch's own."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from norm_calls import EPS, NORMS, assert_close, ours, random, theirs  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402

import cupynorm  # noqa: E402

SCALARS = {
    "grad": grad,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "jacrev of jacrev": lambda function: jacrev(jacrev(function)),
    "jacrev of grad": lambda function: jacrev(grad(function)),
    "grad, eager": lambda function: lambda at: torch.autograd.functional.jacobian(function, at),
    "hessian, eager": lambda function: lambda at: torch.autograd.functional.hessian(function, at),
    "hessian, vectorized": lambda function: (
        lambda at: torch.autograd.functional.hessian(function, at, vectorize=True)
    ),
}


@pytest.mark.parametrize("of", ["x", "weight", "bias"])
@pytest.mark.parametrize("transform", SCALARS)
@pytest.mark.parametrize("norm_name", NORMS)
def test_derivatives_agree_with_those_of_torch(norm_name, transform, of):
    at = {"x": random(2, 3, 5), "weight": random(3, 5, seed=1), "bias": random(3, 5, seed=2)}

    def scalar(call):
        return lambda value: (call((3, 5))(**(at | {of: value})) ** 3).sum()

    calls = (functools.partial(ours, norm_name), functools.partial(theirs, norm_name))
    assert_close(*(SCALARS[transform](scalar(call))(at[of]) for call in calls))


@pytest.mark.parametrize("norm_name", NORMS)
def test_forward_over_forward_is_forward_over_reverse(norm_name):
    """Against torch's hessian: torch treats layer_norm's own forward derivative as a constant."""

    def scalar(x):
        return (ours(norm_name)(x) ** 3).sum()

    x = random(3, 5)
    expected = hessian(lambda x: (theirs(norm_name)(x) ** 3).sum())(x)
    assert_close(jacfwd(jacfwd(scalar))(x), expected)
    assert_close(jacrev(jacfwd(scalar))(x), expected)


@pytest.mark.parametrize("norm_name", NORMS)
def test_jvp_and_vjp_agree_with_those_of_torch(norm_name):
    primals, tangents = (
        tuple(random(*shape, seed=seed) for shape in ((3, 5), (5,), (5,))) for seed in (0, 7)
    )
    calls = ours(norm_name), theirs(norm_name)
    assert_close(*(jvp(call, primals, tangents) for call in calls))
    dy = random(3, 5, seed=9)
    assert_close(*(vjp(call, *primals)[1](dy) for call in calls))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*each) for each in zip(primals, tangents)]
        assert_close(*(tuple(forward_ad.unpack_dual(call(*duals))) for call in calls))


@pytest.mark.parametrize("norm_name", NORMS)
def test_a_tangent_of_the_gradient_of_y(norm_name):
    """The forward was recorded before the tangent was made."""
    x = random(3, 5).requires_grad_()
    y = ours(norm_name)(x)
    dy, tangent = random(3, 5, seed=1), random(3, 5, seed=2)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, tangent), retain_graph=True)
        got = tuple(forward_ad.unpack_dual(dx))
    assert_close(
        got, tuple(torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in (dy, tangent))
    )


@pytest.mark.parametrize(
    "shapes, dims",
    [
        (((4, 3, 5), (5,), (5,)), (0, None, None)),
        (((3, 4, 5), (5,), (5,)), (1, None, None)),
        (((3, 5, 4), (5,), (5,)), (2, None, None)),
        (((3, 5), (4, 5), (5,)), (None, 0, None)),
        (((3, 5), (5,), (5, 4)), (None, None, 1)),
        (((4, 3, 5), (4, 5), (4, 5)), (0, 0, 0)),
        (((4, 5), (5,), (5,)), (0, None, None)),
    ],
)
@pytest.mark.parametrize("norm_name", NORMS)
def test_vmap_agrees_with_that_of_torch(norm_name, shapes, dims):
    tensors = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    calls = ours(norm_name), theirs(norm_name)
    assert_close(*(vmap(call, dims)(*tensors) for call in calls))
    assert_close(
        *(
            vmap(grad(lambda *given, c=call: (c(*given) ** 3).sum(), (0, 1, 2)), dims)(*tensors)
            for call in calls
        )
    )
    outer = [None if dim is None else 0 for dim in dims]
    nested = [
        tensor if dim is None else torch.stack([tensor, 2 * tensor])
        for tensor, dim in zip(tensors, dims)
    ]
    assert_close(*(vmap(vmap(call, dims), tuple(outer))(*nested) for call in calls))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm_name", NORMS)
def test_transformed_results_have_the_dtypes_of_eager_ones(norm_name, dtype):
    """Their values differ by the float32 roundings of x_hat, the product and the sum."""
    x, residual, weight = (
        random(4, 40, dtype=dtype),
        random(4, 40, dtype=dtype, seed=1),
        random(40, dtype=torch.float32),
    )
    bias = random(40, dtype=torch.float32, seed=1)

    def call(x, residual):
        return getattr(cupynorm, norm_name)(
            x, 40, weight, bias=bias, residual=residual, return_residual=True, eps=EPS
        )

    y, added = call(x, residual)
    mapped_y, mapped_added = vmap(call)(x, residual)
    assert mapped_y.dtype == y.dtype == dtype and torch.equal(mapped_added, added)
    product = (y.double() - bias).abs()
    allowed = torch.finfo(dtype).eps * y.double().abs() + 2.0**-24 * (4 * product + 2 * bias.abs())
    assert ((mapped_y.double() - y.double()).abs() <= allowed).all()
    x.requires_grad_()
    eager = torch.autograd.grad(call(x, residual)[0].float().sum(), x)[0]
    assert grad(lambda x: call(x, residual)[0].float().sum())(x).dtype == eager.dtype == dtype
