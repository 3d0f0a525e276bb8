"""torch tensors: derivatives of any order and mode, operators, the compiler, autocast and hooks."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.autograd.gradcheck import GradcheckError  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.nn import autograd, modes  # noqa: E402
from cupynorm.nn import operators as torch_ops  # noqa: E402
from cupynorm.norm import route  # noqa: E402
from cupynorm.norm.options import launch_options  # noqa: E402

NORMS = ("layer_norm", "rms_norm")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 0.1  # large enough to matter; rstd is 1 / sqrt(EPS) at most


def random(*shape: int, dtype=torch.float64, device="cpu", seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def leaves(*shapes: tuple[int, ...], dtype=torch.float64, device="cpu") -> list[torch.Tensor]:
    return [
        random(*shape, dtype=dtype, device=device, seed=seed).requires_grad_()
        for seed, shape in enumerate(shapes)
    ]


def ours(norm_name: str, extents=(5,), **options):
    def call(x, weight=None, bias=None):
        return getattr(cupynorm, norm_name)(x, extents, weight, bias=bias, eps=EPS, **options)

    return call


def theirs(norm_name: str, extents=(5,)):
    """torch's norm, with a bias for rms_norm too."""

    def call(x, weight=None, bias=None):
        if norm_name == "layer_norm":
            return functional.layer_norm(x, extents, weight, bias, EPS)
        y = functional.rms_norm(x, extents, weight, EPS)
        return y if bias is None else y + bias

    return call


def assert_close(got, expected) -> None:
    """Compares float64 results of one formula whose operations differ in order.

    Allows 2^10 roundings of terms of at most 2^4 times the largest result. That covers rows of 15
    columns or fewer, rstd of at most 1 / sqrt(EPS), and derivatives up to third order.
    """
    for one, other in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (got, expected)), strict=True
    ):
        assert one.dtype == other.dtype == torch.float64
        allowed = 2.0**-53 * 2**10 * 2**4 * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=0, atol=allowed)


# Derivatives.


@pytest.mark.slow
@pytest.mark.parametrize("zero_centered_weight", [False, True])
@pytest.mark.parametrize(
    "given", ["", "weight", "bias", "weight bias", "residual", "weight bias residual"]
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_first_and_second_derivatives_are_numerical_ones(
    norm_name, device, given, zero_centered_weight
):
    shapes = {"x": (2, 3, 5), "weight": (5,), "bias": (5,), "residual": (2, 3, 5)}
    names = ["x", *given.split()]
    options = {
        "eps": EPS,
        "zero_centered_weight": zero_centered_weight,
        "return_residual": "residual" in names,
    }

    def call(*tensors):
        named = dict(zip(names, tensors))
        return getattr(cupynorm, norm_name)(named.pop("x"), 5, **named, **options)

    tensors = leaves(*(shapes[name] for name in names), device=device)
    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("norm_name", NORMS)
def test_derivatives_over_several_dimensions_and_of_one_row(norm_name):
    for shape, extents in (((2, 3, 5), (3, 5)), ((5,), (5,)), ((3, 5), (3, 5)), ((4, 1), (1,))):
        tensors = leaves(shape, extents, extents)
        assert torch.autograd.gradgradcheck(ours(norm_name, extents), tensors)


@pytest.mark.parametrize("norm_name", NORMS)
def test_derivatives_in_batches_and_in_forward_mode(norm_name):
    call, tensors = ours(norm_name), leaves((2, 3, 5), (5,), (5,))
    assert torch.autograd.gradcheck(call, tensors, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradcheck(
        call, tensors, check_batched_forward_grad=True, check_forward_ad=True
    )
    assert torch.autograd.gradgradcheck(
        call, tensors, check_batched_grad=True, check_fwd_over_rev=True
    )


@pytest.mark.parametrize("norm_name", NORMS)
def test_third_derivatives_are_numerical_ones(norm_name):
    call, tensors = ours(norm_name), leaves((2, 5), (5,))

    def gradients(x, weight):
        return torch.autograd.grad((call(x, weight) ** 3).sum(), (x, weight), create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, tensors)


def test_gradgradcheck_fails_for_a_wrong_second_derivative(monkeypatch):
    right = torch_ops.formulas.second_derivatives

    def wrong(*arguments):
        of_dy, of_x, of_weight = right(*arguments)
        return of_dy, 1.01 * of_x, of_weight

    monkeypatch.setattr(torch_ops.formulas, "second_derivatives", wrong)
    with pytest.raises(GradcheckError):
        torch.autograd.gradgradcheck(ours("layer_norm"), leaves((2, 3, 5), (5,)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_gradients_of_a_graph_are_those_of_the_kernels(norm_name, device):
    """create_graph=True gives the first derivatives to the bit."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x, residual = leaves((4, 40), (4, 40), dtype=dtype, device=device)
        weight, bias = leaves((40,), (40,), dtype=torch.float32, device=device)
        y, added = getattr(cupynorm, norm_name)(
            x, 40, weight, bias=bias, residual=residual, return_residual=True
        )
        for of in (y.sum(), (y * added).sum()):
            made = [
                torch.autograd.grad(
                    of, (x, weight, bias, residual), retain_graph=True, create_graph=create_graph
                )
                for create_graph in (False, True)
            ]
            for plain, differentiable in zip(*made):
                assert torch.equal(plain, differentiable) and plain.dtype == differentiable.dtype


@pytest.mark.parametrize("norm_name", NORMS)
def test_second_derivatives_of_a_weight_of_another_dtype(norm_name):
    def second(weight):
        x = random(3, 5).requires_grad_()
        first = torch.autograd.grad(
            (ours(norm_name)(x, weight) ** 3).sum(), (x, weight), create_graph=True
        )
        return torch.autograd.grad(sum((each.double() ** 2).sum() for each in first), (x, weight))

    # The first gradient of the weight is rounded to float32 and squared, which doubles its error.
    # The second one is rounded again.
    narrow = random(5, dtype=torch.float32).requires_grad_()
    for got, expected in zip(second(narrow), second(narrow.detach().double().requires_grad_())):
        largest = expected.abs().max().item()
        torch.testing.assert_close(
            got.double(), expected, rtol=0, atol=4 * 2.0**-24 * 2**4 * largest
        )
    assert second(narrow)[1].dtype == torch.float32


# torch.func and forward mode.

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


def test_vmap_adds_rows_to_one_call(monkeypatch):
    shapes = []
    plain = route.prepare_forward

    def counted(request, purpose):
        shapes.append(tuple(request.operands.input.shape))
        return plain(request, purpose)

    monkeypatch.setattr(route, "prepare_forward", counted)
    vmap(ours("layer_norm"), (1, None))(random(3, 4, 5), random(5))
    assert shapes == [(4, 3, 5)]


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


# Operators.


def operands(
    norm_name: str, device: str, residual: bool, affine: bool, dtype
) -> tuple[tuple, tuple]:
    """The arguments of norm_forward, and those of norm_backward from its results."""
    centered = norm_name == "layer_norm"
    x, other = leaves((3, 4, 5), (3, 4, 5), dtype=dtype, device=device)
    weight, bias = (
        leaves((5,), (5,), dtype=torch.float32, device=device) if affine else (None, None)
    )
    forward = (
        x,
        weight,
        bias,
        other if residual else None,
        [5],
        EPS,
        centered,
        affine,
        None,
        0,
        None,
        None,
        None,
    )
    _, mean, rstd, added = (made.detach() for made in torch.ops.cupynorm.norm_forward(*forward))
    added = added.requires_grad_() if residual else x
    dy, dsum = leaves((3, 4, 5), (3, 4, 5), dtype=dtype, device=device)
    backward = (
        dy,
        added,
        mean if centered else None,
        rstd,
        weight,
        dsum if residual else None,
        [5],
        (True, affine, affine),
        affine,
        torch.float32 if affine else None,
        0,
        None,
    )
    return forward, backward


@pytest.mark.slow
@pytest.mark.parametrize("residual, affine", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_operators_pass_opcheck(norm_name, device, residual, affine):
    for dtype in (torch.float32, torch.bfloat16):
        forward, backward = operands(norm_name, device, residual, affine, dtype)
        opcheck(torch.ops.cupynorm.norm_forward.default, forward)
        opcheck(torch.ops.cupynorm.norm_backward.default, backward)


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3)))
def test_the_backward_operator_returns_the_wanted_gradients(wanted):
    _, backward = operands("layer_norm", "cpu", True, True, torch.float32)
    everything = torch.ops.cupynorm.norm_backward(*backward)
    made = torch.ops.cupynorm.norm_backward(*backward[:7], wanted, *backward[8:])
    for is_wanted, got, right in zip(wanted, made, everything):
        assert torch.equal(got, right) if is_wanted else got.numel() == 0


def test_a_compiled_call_passes_on_its_launch_options():
    x = random(3, 40, dtype=torch.float32)
    options = {
        "sm_margin": 2,
        "strategy": "block",
        "statistics": "welford",
        "tile": {"pack_size": 4, "threads_per_row": 32},
    }
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        plain = route.prepare_forward
        patch.setattr(
            route,
            "prepare_forward",
            lambda *given: seen.append(given[0].options.launch) or plain(*given),
        )
        torch.compile(
            lambda x: cupynorm.layer_norm(x, 40, **options), fullgraph=True, backend="aot_eager"
        )(x)
    assert seen[-1] == launch_options("block", options["tile"], "welford", 2)


# The compiler.


def block(x, weight, bias, residual):
    """A pre-norm block of both norms, a residual, its sum, and torch operations between them."""
    y, added = cupynorm.layer_norm(2 * x, 40, weight, bias, residual=residual, return_residual=True)
    return (
        cupynorm.rms_norm(y + 1, (40,), weight, zero_centered_weight=True, out_dtype=torch.float32)
        + added
    )


def block_tensors(num_rows: int, dtype=torch.float32, device="cpu") -> list[torch.Tensor]:
    rows = leaves((num_rows, 3, 40), (num_rows, 3, 40), dtype=dtype, device=device)
    return [rows[0], *leaves((40,), (40,), device=device, dtype=torch.float32), rows[1]]


def check_compiled(compiled, tensors) -> None:
    """Checks that outputs and gradients of a compiled block are the eager ones, to the bit."""
    expected, got = (function(*tensors) for function in (block, compiled))
    assert torch.equal(got, expected)
    dy = torch.ones_like(expected)
    for one, other in zip(*(torch.autograd.grad(y, tensors, dy) for y in (got, expected))):
        assert torch.equal(one, other) and one.dtype == other.dtype
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), block(*tensors))


@pytest.fixture
def compile_anew():
    torch.compiler.reset()
    counters.clear()
    yield functools.partial(torch.compile, fullgraph=True)
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_for_any_number_of_rows_without_a_graph_break(compile_anew, backend):
    compiled = compile_anew(block, dynamic=True, backend=backend)
    for num_rows in (
        4,
        5,
        17,
        2,
    ):  # not the 3 of the second dimension: torch would take equal extents for one
        tensors = block_tensors(num_rows)
        results = [
            (y := function(*tensors), *torch.autograd.grad(y.sum(), tensors))
            for function in (block, compiled)
        ]
        assert results[0][0].shape == (num_rows, 3, 40)
        assert all(map(torch.equal, *results))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_compiled_results_are_the_eager_ones(compile_anew, dtype):
    compiled = compile_anew(block, backend="aot_eager")
    check_compiled(compiled, block_tensors(4, dtype))


@pytest.mark.slow
def test_the_first_call_of_a_process_can_be_compiled():
    """Modules are then imported while torch traces."""
    script = """
import torch, cupynorm  # noqa: E402
x = torch.ones(3, 40)
call = lambda x: cupynorm.layer_norm(x, x.shape[-1])
compiled = torch.compile(call, fullgraph=True, backend="eager")
assert torch.equal(compiled(x), cupynorm.layer_norm(x, 40))
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], check=True)


def test_inductor_gives_the_eager_results(compile_anew):
    tensors = [tensor.detach() for tensor in block_tensors(4)]
    compiled = compile_anew(lambda *given: cupynorm.rms_norm(cupynorm.layer_norm(*given), 40))
    given = (tensors[0], 40, *tensors[1:3])
    assert torch.equal(compiled(*given), cupynorm.rms_norm(cupynorm.layer_norm(*given), 40))


OLD_COMPILER = pytest.mark.skipif(
    not modes.compiler_sees_transforms,
    reason="this torch's compiler refuses transforms, and puts its own words for an exception's",
)


@OLD_COMPILER
def test_compiled_transforms_agree_with_those_of_torch(compile_anew):
    weight, x, tangent = random(5), random(3, 5), random(3, 5, seed=1)
    for transform in (
        lambda call: grad(lambda x: (call(x, weight) ** 3).sum()),
        lambda call: vmap(lambda x: call(x, weight)),
        lambda call: lambda x: jvp(lambda x: call(x, weight), (x,), (tangent,)),
    ):
        compiled = compile_anew(transform(ours("layer_norm")), backend="aot_eager")
        assert_close(compiled(x), transform(theirs("layer_norm"))(x))


@OLD_COMPILER
def test_compiled_calls_raise_the_errors_of_eager_ones(compile_anew):
    x = torch.ones(3, 40)
    compiled = compile_anew(lambda x, weight: cupynorm.layer_norm(x, 40, weight), backend="eager")
    with pytest.raises(Exception, match=r"weight has shape \(41,\); expected \(40,\)"):
        compiled(x, torch.ones(41))
    compiled = compile_anew(lambda x, out: cupynorm.layer_norm(x, 40, out=out), backend="eager")
    with pytest.raises(Exception, match="out was given to a call that torch traces or transforms"):
        compiled(x, torch.ones(3, 40))


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(random(40, dtype=torch.float32))

    def forward(self, x):
        return cupynorm.layer_norm(x, x.shape[-1], self.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_module_gives_the_eager_results(strict):
    module, rows = Norm(), {0: torch.export.Dim("num_rows")}
    exported = torch.export.export(
        module, (torch.ones(4, 40),), dynamic_shapes={"x": rows}, strict=strict
    )
    assert (
        sum(node.target == torch.ops.cupynorm.norm_forward.default for node in exported.graph.nodes)
        == 1
    )
    for num_rows in (4, 9, 2):
        x = random(num_rows, 40, dtype=torch.float32)
        assert torch.equal(exported.module()(x), module(x))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_the_operators(tracing_mode):
    def gradients(x, weight):
        return torch.autograd.grad(cupynorm.layer_norm(x, 40, weight).sum(), (x, weight))

    given = leaves((3, 40), (40,), dtype=torch.float32)
    graph = make_fx(gradients, tracing_mode=tracing_mode)(*given)
    names = {str(node.target) for node in graph.graph.nodes}
    assert {"cupynorm.norm_forward.default", "cupynorm.norm_backward.default"} <= names
    for got, expected in zip(graph(*given), gradients(*given)):
        assert torch.equal(got, expected)


class Meters(torch.Tensor):
    """A subclass of torch.Tensor."""


def test_results_of_a_tensor_subclass_are_of_that_subclass():
    x = random(3, 40, dtype=torch.float32)
    y = cupynorm.layer_norm(x.as_subclass(Meters), 40)
    assert type(y) is Meters and torch.equal(
        y.as_subclass(torch.Tensor), cupynorm.layer_norm(x, 40)
    )
    assert type(cupynorm.layer_norm(torch.nn.Parameter(x), 40)) is torch.Tensor
    with pytest.raises(ValueError, match="weight is a NumPy array"):
        cupynorm.layer_norm(x.as_subclass(Meters), 40, torch.ones(40).numpy())


# Autocast.


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_autocast_gives_the_dtype_that_torch_gives(norm_name, device, dtype, autocast):
    x, weight = leaves((4, 40), (40,), dtype=dtype, device=device)
    wide = random(40, dtype=torch.float32, device=device).requires_grad_()
    with torch.autocast(device, autocast):
        expected = functional.layer_norm(x, (40,), weight).dtype
        for each in (weight, wide):
            y = getattr(cupynorm, norm_name)(x, 40, each)
            assert y.dtype == expected
            gradients = torch.autograd.grad(y.sum(), (x, each))
            assert [gradient.dtype for gradient in gradients] == [x.dtype, each.dtype]
        assert getattr(cupynorm, norm_name)(x, 40, out_dtype=dtype).dtype == dtype
        _, added = getattr(cupynorm, norm_name)(x, 40, residual=x, return_residual=True)
        assert added.dtype == (x + x).dtype
        out = torch.empty(4, 40, dtype=dtype, device=device)
        with torch.no_grad():
            assert getattr(cupynorm, norm_name)(x, 40, out=out) is out
    assert getattr(cupynorm, norm_name)(x, 40, wide).dtype == dtype


def test_autocast_of_cuda_does_not_change_calls_on_the_cpu():
    x = random(3, 40, dtype=torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert cupynorm.layer_norm(x, 40).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", False)


# Autograd's hooks.


def recorded(dtype=torch.float32, **options):
    x, weight, bias = leaves((6, 40), (40,), (40,), dtype=dtype)
    return (x, weight, bias), cupynorm.layer_norm(x, 40, weight, bias, **options)


def test_a_retained_graph_gives_the_same_gradients_twice():
    tensors, y = recorded()
    first, second = (torch.autograd.grad(y.sum(), tensors, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    torch.autograd.grad(y.sum(), tensors)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), tensors)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(use_reentrant):
    tensors, y = recorded()
    expected = torch.autograd.grad(y.sum(), tensors)
    again = checkpoint(
        cupynorm.layer_norm, tensors[0], 40, *tensors[1:], use_reentrant=use_reentrant
    )
    again.sum().backward()
    assert torch.equal(again, y)
    assert all(torch.equal(tensor.grad, right) for tensor, right in zip(tensors, expected))


@pytest.mark.skipif(
    not hasattr(torch.utils.checkpoint, "CheckpointPolicy"),
    reason="torch 2.4 has no selective checkpoint",
)
def test_selective_checkpoint_sees_one_operator():
    seen = []

    def policy(_, operator, *arguments, **options):
        seen.append(operator)
        return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

    tensors, y = recorded()
    expected = torch.autograd.grad(y.sum(), tensors)
    again = checkpoint(
        cupynorm.layer_norm,
        tensors[0],
        40,
        *tensors[1:],
        use_reentrant=False,
        context_fn=functools.partial(
            torch.utils.checkpoint.create_selective_checkpoint_contexts, policy
        ),
    )
    for got, right in zip(torch.autograd.grad(again.sum(), tensors), expected):
        assert torch.equal(got, right)
    assert torch.ops.cupynorm.norm_forward.default in seen


@pytest.mark.parametrize("create_graph", [False, True])
def test_saved_tensors_may_be_packed(create_graph):
    tensors, y = recorded()
    expected = torch.autograd.grad(y.sum(), tensors, create_graph=create_graph)
    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy
        ),
        torch.autograd.graph.save_on_cpu(),
    ):
        with hooks:
            others, packed = recorded()
        got = torch.autograd.grad(packed.sum(), others, create_graph=create_graph)
        assert all(map(torch.equal, got, expected))


def test_only_the_wanted_gradients_are_computed(monkeypatch):
    asked = []
    plain = autograd.prepare_backward

    def prepare_backward(request):
        asked.append(list(request.options.gradients))
        return plain(request)

    monkeypatch.setattr(autograd, "prepare_backward", prepare_backward)
    for wanted in itertools.product((False, True), repeat=3):
        tensors = [
            tensor.requires_grad_(is_wanted)
            for tensor, is_wanted in zip(leaves((6, 40), (40,), (40,)), wanted)
        ]
        if any(wanted):
            cupynorm.layer_norm(tensors[0], 40, *tensors[1:]).sum().backward()
            assert asked.pop() == [
                name for name, each in zip(("dx", "dweight", "dbias"), wanted) if each
            ]
        assert [tensor.grad is not None for tensor in tensors] == list(wanted)
    assert not asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_inputs_are_not_written(dtype):
    tensors = [
        tensor.requires_grad_()
        for tensor in (random(6, 40, dtype=dtype), random(40, dtype=dtype), random(40, dtype=dtype))
    ]
    residual, dy = random(6, 40, dtype=dtype, seed=1), random(6, 40, dtype=dtype, seed=2)
    held = [*tensors, residual, dy]
    before = [tensor.detach().clone().view(torch.uint8) for tensor in held]
    y = cupynorm.layer_norm(tensors[0], 40, *tensors[1:], residual=residual)
    first = torch.autograd.grad(y, tensors, dy, create_graph=True)
    torch.autograd.grad(sum(gradient.sum() for gradient in first), tensors[:2])
    for tensor, bits in zip(held, before):
        assert torch.equal(tensor.detach().view(torch.uint8), bits)
        assert tensor.untyped_storage().resizable()  # fully_shard frees weights that way


def test_a_hook_on_the_weight_fires_once():
    fired = []
    (x, weight, bias), y = recorded()
    weight.register_post_accumulate_grad_hook(
        lambda parameter: fired.append(parameter.grad.clone())
    )
    y.sum().backward()
    assert len(fired) == 1 and torch.equal(fired[0], weight.grad) and (bias.grad == 6).all()


# GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_by_inductor_on_a_gpu(compile_anew, dtype, dynamic):
    """Results and gradients are the eager ones to the bit.

    torch fuses only products with powers of two and one sum of two, whose roundings do not depend
    on the fusion.
    """

    def scaled(x, weight, bias, residual):
        y, added = cupynorm.layer_norm(
            2 * x, 40, weight, bias, residual=residual, return_residual=True
        )
        return cupynorm.rms_norm(4 * y, 40, weight), 0.5 * added

    compiled = compile_anew(scaled, dynamic=dynamic)
    for num_rows in (4, 4096) if dynamic else (4,):
        tensors = block_tensors(num_rows, dtype, "cuda")
        results = []
        for function in (scaled, compiled):
            y, added = function(*tensors)
            results.append(
                (
                    y,
                    added,
                    *torch.autograd.grad(
                        (y, added), tensors, (torch.ones_like(y), torch.ones_like(added))
                    ),
                )
            )
        for name, one, other in zip(("y", "sum", "dx", "dweight", "dbias", "dresidual"), *results):
            assert torch.equal(one, other), name


@pytest.mark.gpu
def test_a_compiled_module_is_captured_in_a_graph(compile_anew):
    module = Norm().cuda()
    compiled = compile_anew(module, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):  # warm-up, capture, replay
            x = random(8, 40, dtype=torch.float32, device="cuda", seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x), module(x))
