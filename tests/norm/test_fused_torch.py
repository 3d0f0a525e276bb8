"""Fused options through torch: seeds, autograd, transforms and the compiler."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import cupynorm
from cupynorm import reference
from cupynorm.check.cases import NORMS
from cupynorm.norm import cache

torch = pytest.importorskip("torch")
from fused_cases import random  # noqa: E402
from torch.func import vmap  # noqa: E402


@pytest.fixture
def device(anywhere: str) -> str:
    """The device of the tensors, for each of three ways through the library."""
    return anywhere


@pytest.fixture
def compile_anew():
    torch.compiler.reset()
    yield functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()


# Plain calls beside fused ones.


def test_a_seed_without_dropout_changes_nothing():
    x = random(4, 8).requires_grad_()
    for options in ({}, {"dropout_p": 0.0, "dropout_seed": 3}):
        cupynorm.layer_norm(x, 8, **options).sum().backward()
        cupynorm.rms_norm(x.detach().numpy(), 8, **options)
        assert type(cupynorm.layer_norm_forward(x.detach(), 8, **options)) is cupynorm.Forward
    module = cupynorm.LayerNorm(8).double().eval()
    module(x, dropout_p=0.5)


def test_forget_drops_fused_calls(kernels):
    cupynorm.layer_norm(random(4, 8, dtype=torch.float32), 8, dropout_p=0.5)
    assert cache.forwards
    cache.forget()
    assert not cache.forwards and not cache.backwards


# Seeds.


def dropped(x, **options):
    """x after dropout."""
    return cupynorm.layer_norm(x, x.shape[-1], dropout_p=0.5, return_residual=True, **options)[1]


def test_torch_seeds_repeat_and_are_drawn_once(device):
    x = torch.ones(8, 40, device=device)
    torch.manual_seed(5)
    first, second = dropped(x), dropped(x)
    torch.manual_seed(5)
    assert (
        torch.equal(dropped(x), first)
        and torch.equal(dropped(x), second)
        and not torch.equal(first, second)
    )
    # Each call draws one number from torch's generator, or none where the seed is given.
    torch.manual_seed(5)
    seed = torch.randint(0, 2**62, (1,), device=device)
    assert torch.equal(dropped(x, dropout_seed=seed), first)
    assert torch.equal(dropped(x, dropout_seed=int(seed)), first)
    assert torch.equal(dropped(x, dropout_seed=seed.reshape(())), first)
    assert torch.equal(dropped(x), second)
    assert set(first.unique().tolist()) == {0.0, 2.0}


def test_numpy_seeds_repeat():
    x = np.ones((8, 40), np.float32)
    np.random.seed(5)
    first, second = dropped(x), dropped(x)
    np.random.seed(5)
    assert (dropped(x) == first).all() and (dropped(x) == second).all() and (first != second).any()
    for seed in (7, np.int64(7), np.array([7]), 7 - 2**64 + 2**64):
        assert ((dropped(x, dropout_seed=seed) != 0) == reference.dropout_mask(8, 40, 0.5, 7)).all()
    assert (dropped(x, dropout_seed=2**64 - 1) == dropped(x, dropout_seed=-1)).all()


@pytest.mark.gpu
def test_cupy_seeds_repeat():
    cupy = pytest.importorskip("cupy")
    x = cupy.ones((8, 40), "float32")
    cupy.random.seed(5)
    first, second = dropped(x), dropped(x)
    cupy.random.seed(5)
    assert (dropped(x) == first).all() and (dropped(x) == second).all() and (first != second).any()
    for seed in (7, cupy.array([7])):
        assert (
            (dropped(x, dropout_seed=seed).get() != 0) == reference.dropout_mask(8, 40, 0.5, 7)
        ).all()


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_a_new_mask():
    """As in torch's dropout, forward and backward of one replay share a mask."""
    x = torch.ones(64, 256, device="cuda", requires_grad=True)

    def step():
        y, added = cupynorm.layer_norm(
            x, 256, residual=torch.zeros_like(x), dropout_p=0.5, return_residual=True
        )
        return added, torch.autograd.grad(added.sum() + 0 * y.sum(), x)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        added, dx = step()
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(added != 0, dx != 0)
        masks.append((added != 0).clone())
    assert 0.45 < masks[0].double().mean() < 0.55
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_a_module_drops_only_in_training(device):
    for make in (cupynorm.LayerNorm, cupynorm.RMSNorm):
        module = make(40, device=device)
        x, residual = (
            torch.ones(4, 40, dtype=torch.bfloat16, device=device),
            torch.zeros(4, 40, device=device),
        )
        options = {
            "return_residual": True,
            "residual_dtype": torch.float32,
            "dropout_p": 0.5,
            "dropout_seed": 3,
        }
        _, added = module(x, residual, **options, row_scale=torch.full((4,), 0.5, device=device))
        kept = torch.from_numpy(reference.dropout_mask(4, 40, 0.5, 3)).to(device)
        assert added.dtype == torch.float32 and torch.equal(added, kept.float())
        y, added = module.eval()(x, residual, **options)
        assert torch.equal(added, x.float()) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("dropout_p", [3, -0.5, float("nan"), True, "half", None])
@pytest.mark.parametrize("make", [cupynorm.LayerNorm, cupynorm.RMSNorm])
def test_a_module_checks_dropout_p_in_training_and_evaluation(make, dropout_p):
    for module in (make(40), make(40).eval()):
        with pytest.raises(
            ValueError, match=f"dropout_p is {dropout_p!r}; expected a probability, from 0 to 1"
        ):
            module(torch.ones(4, 40), dropout_p=dropout_p)


# Autograd, transforms, the compiler.


@pytest.mark.parametrize("norm_name", NORMS)
def test_gradients_are_numerical_ones(norm_name):
    """By gradcheck, on the CPU in float64, with a fixed mask."""
    x, residual, weight, bias = (
        random(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate(((3, 5), (3, 5), (5,), (5,)))
    )
    row_scale = random(3, seed=9)

    def call(x, residual, weight, bias):
        return getattr(cupynorm, norm_name)(
            x,
            5,
            weight,
            bias=bias,
            eps=0.1,
            residual=residual,
            return_residual=True,
            row_scale=row_scale,
            dropout_p=0.4,
            dropout_seed=2,
        )

    assert torch.autograd.gradcheck(call, (x, residual, weight, bias))
    assert torch.autograd.gradcheck(lambda *given: call(*given)[1], (x, residual, weight, bias))
    assert torch.autograd.gradcheck(
        lambda x, weight: call(x, residual.detach(), weight, None)[0], (x, weight)
    )


@pytest.mark.parametrize("norm_name", NORMS)
def test_second_derivatives_are_numerical_ones(norm_name):
    x, residual, weight = (random(3, 5, seed=0), random(3, 5, seed=1), random(5, seed=2))
    given = [each.requires_grad_() for each in (x, residual, weight)]
    row_scale = random(3, seed=9)

    def call(x, residual, weight):
        return getattr(cupynorm, norm_name)(
            x,
            5,
            weight,
            residual=residual,
            eps=0.1,
            row_scale=row_scale,
            dropout_p=0.4,
            dropout_seed=2,
        )

    assert torch.autograd.gradgradcheck(call, given)


def test_transforms_take_options():
    x, row_scale = random(2, 3, 5), random(2, 3, seed=1)
    call = functools.partial(cupynorm.layer_norm, normalized_shape=5)
    mapped = vmap(lambda x, row_scale: call(x, row_scale=row_scale))(x, row_scale)
    torch.testing.assert_close(mapped, call(x, row_scale=row_scale))
    dropped = vmap(lambda x: call(x, dropout_p=0.5), randomness="different")(x)
    assert dropped.shape == x.shape and not torch.equal(dropped, call(x))
    x.requires_grad_()
    y, dy = call(x, row_scale=row_scale), random(4, *x.shape, seed=2)
    (batch,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    for at in range(4):
        torch.testing.assert_close(
            batch[at], torch.autograd.grad(y, x, dy[at], retain_graph=True)[0]
        )


def compiled_call(x, residual, weight, row_scale, seed):
    y, added = cupynorm.rms_norm(
        2 * x,
        40,
        weight,
        residual=residual,
        return_residual=True,
        residual_dtype=torch.float32,
        row_scale=row_scale,
        dropout_p=0.5,
        dropout_seed=seed,
        round_x_hat=True,
    )
    return y + 1, added


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, torch.tensor([7])], ids=["int", "tensor"])
def test_compiled_results_are_near_the_eager_ones(compile_anew, seed, device):
    """Both round once: to bfloat16, where they may differ by an ulp of the largest value."""
    seed = seed if isinstance(seed, int) else seed.to(device)
    compiled = compile_anew(compiled_call, dynamic=True)
    for num_rows in (4, 9):
        x, residual = (
            random(num_rows, 40, dtype=torch.bfloat16).to(device),
            random(num_rows, 40, dtype=torch.float32).to(device),
        )
        weight, row_scale = (
            random(40, dtype=torch.float32).to(device),
            random(num_rows, dtype=torch.float32).to(device),
        )
        leaves = [each.requires_grad_() for each in (x, residual, weight)]
        made = []
        for call in (compiled_call, compiled):
            outputs = call(x, residual, weight, row_scale, seed)
            gradients = [torch.ones_like(each) for each in outputs]
            made.append([*outputs, *torch.autograd.grad(outputs, leaves, gradients)])
        for got, expected in zip(*made):
            atol = 2.0**-7 * expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=atol)
            assert torch.equal(got == 0, expected == 0) or got.ndim == 1


def test_a_compiled_call_draws_its_seed(compile_anew):
    compiled = compile_anew(
        lambda x: cupynorm.layer_norm(x, 40, dropout_p=0.5, return_residual=True)
    )
    x = torch.ones(8, 40, requires_grad=True)
    torch.manual_seed(5)
    first, second = (compiled(x)[1] for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(compiled(x)[1], first) and not torch.equal(first, second)
    (dx,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(dx, first)
    # Without a residual, the sum is the input.
    same = compile_anew(
        lambda x: cupynorm.layer_norm(x, 40, residual_dtype=torch.float32, return_residual=True)
    )(x)
    assert torch.equal(same[1], x)
    torch.testing.assert_close(same[0], cupynorm.layer_norm(x, 40))


def test_saved_tensors_may_be_packed():
    x, residual = random(4, 40).requires_grad_(), random(4, 40, seed=1).requires_grad_()

    def gradients():
        y = cupynorm.layer_norm(
            x,
            40,
            residual=residual,
            dropout_p=0.5,
            dropout_seed=torch.tensor([3]),
            row_scale=torch.ones(4),
        )
        return torch.autograd.grad(y.pow(2).sum(), (x, residual))

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy
    ):
        assert all(map(torch.equal, gradients(), expected))


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["3", True, 1.5])
def test_the_compiler_refuses_the_seeds_that_eager_mode_does(compile_anew, seed):
    call = compile_anew(
        lambda x: cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=seed), fullgraph=False
    )
    with pytest.raises(
        (TypeError, RuntimeError),
        match=f"dropout_seed is {seed!r}; expected an int or one element of int64",
    ):
        call(torch.ones(3, 8))
