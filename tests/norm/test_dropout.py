"""The functors dropout and row_scale: masks, seeds, modules, gradients, the compiler."""

from __future__ import annotations

import functools

import pytest

import cupynorm
from cupynorm import reference
from cupynorm.functors import dropout, row_scale
from cupynorm.verify.cases import NORMS

torch = pytest.importorskip("torch")
from float8_bytes import random  # noqa: E402


@pytest.fixture
def device(anywhere: str) -> str:
    """The device of the tensors, for each of three ways through the library."""
    return anywhere


@pytest.fixture
def compile_anew():
    torch.compiler.reset()
    yield functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()


def mask(*shape: int, p: float = 0.5, seed: int = 3, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(reference.dropout_mask(*shape, p, seed)).to(device)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients(norm, dtypes, device):
    """The sum is rounded once. dx is the gradient of the sum, scaled and dropped as x is."""
    given = (
        random(6, 5, 40, dtype=getattr(torch, each), seed=at) for at, each in enumerate(dtypes)
    )
    x, residual = (each.to(device).requires_grad_() for each in given)
    scale = random(6, 5, dtype=torch.float16, seed=7).to(device)
    y, added = getattr(cupynorm, norm)(
        x,
        40,
        residual=residual,
        return_residual=True,
        fuse=(row_scale(scale), dropout(0.25, seed=3)),
    )
    factor = mask(30, 40, p=0.25, device=device).reshape(x.shape) * scale.double()[..., None] / 0.75
    right = (x.double() * factor + residual.double()).float()
    torch.testing.assert_close(added, right, rtol=2.0**-21, atol=2.0**-21)
    assert torch.equal(y, getattr(cupynorm, norm)(added, 40, out_dtype=y.dtype))
    dx, dresidual = torch.autograd.grad((y.float() * right.detach().sin()).sum(), (x, residual))
    wide = 2.0**-8 if dtypes[0] == "bfloat16" else 2.0**-21
    torch.testing.assert_close(dx.double(), dresidual * factor, rtol=wide, atol=1e-6)
    assert torch.equal(dx == 0, factor == 0)


@pytest.mark.parametrize("num_cols", [198, 199, 200, 2052])
@pytest.mark.parametrize("strategy", [None, "uncached"])
def test_the_mask_depends_only_on_seed_row_and_column(strategy, num_cols, kernels):
    """Forward, backward and reference drop the same elements, for any strategy and pack size."""
    x, residual = torch.ones(5, num_cols, requires_grad=True), torch.zeros(5, num_cols)
    for seed in (0, -1, 2**62 + 12345):
        _, added = cupynorm.rms_norm(
            x,
            num_cols,
            residual=residual,
            return_residual=True,
            launch=cupynorm.Launch(strategy),
            fuse=dropout(0.4, seed),
        )
        kept = mask(5, num_cols, p=0.4, seed=seed)
        assert torch.equal(added != 0, kept)
        assert torch.equal(torch.autograd.grad(added.sum(), x)[0] != 0, kept)
    assert {each.kernel.source.split("_")[0] for each in kernels} == {"forward", "backward"}


@pytest.mark.parametrize("p, kept", [(1.0, 0), (1e-12, 400), (1 - 2.0**-33, 0), (2.0**-30, 400)])
def test_all_or_nearly_none_are_dropped(p, kept, device):
    """All dropped: zeros, also of what is not finite, as in torch. Almost none: x, scaled."""
    x = torch.full((4, 100), torch.inf if kept == 0 else 2.0, device=device)
    residual = torch.zeros_like(x)
    y, added = cupynorm.layer_norm(
        x, 100, residual=residual, return_residual=True, fuse=dropout(p, 3)
    )
    assert (added != 0).sum() == kept and added.isfinite().all() and y.isfinite().all()


def test_without_a_residual_nothing_is_rounded(device):
    """2^-9 survives beside 1.75 in float16, because 8 / 7 times x is normalised as it is."""
    x = torch.full((1, 64), 1.75, dtype=torch.float16, device=device)
    x[0, 0] = 1.75 + 2.0**-9
    y = cupynorm.layer_norm(x, 64, eps=0.0, fuse=row_scale(torch.full((1,), 3.1, device=device)))
    torch.testing.assert_close(y, cupynorm.layer_norm(x, 64, eps=0.0), rtol=2.0**-10, atol=0.0)


# Seeds.


def dropped(x, *seed):
    """x after dropout."""
    options = {"residual": 0 * x, "return_residual": True, "fuse": dropout(0.5, *seed)}
    return cupynorm.layer_norm(x, x.shape[-1], **options)[1]


def test_torch_seeds_repeat_and_are_drawn_once(device):
    x = torch.ones(8, 40, device=device)
    torch.manual_seed(5)
    first, second = dropped(x), dropped(x)
    torch.manual_seed(5)
    assert torch.equal(dropped(x), first) and torch.equal(dropped(x), second)
    assert not torch.equal(first, second)
    # Each call draws one number from torch's generator, or none where the seed is given.
    torch.manual_seed(5)
    seed = torch.randint(0, 2**62, (1,), device=device)
    for given in (seed, int(seed), seed.reshape(())):
        assert torch.equal(dropped(x, given), first)
    assert torch.equal(dropped(x), second)
    assert set(first.unique().tolist()) == {0.0, 2.0}


@pytest.mark.gpu
def test_cupy_seeds_repeat():
    cupy = pytest.importorskip("cupy")
    x = cupy.ones((8, 40), "float32")
    cupy.random.seed(5)
    first, second = dropped(x), dropped(x)
    cupy.random.seed(5)
    assert (dropped(x) == first).all() and (dropped(x) == second).all() and (first != second).any()
    for seed in (7, cupy.array([7])):
        assert ((dropped(x, seed).get() != 0) == reference.dropout_mask(8, 40, 0.5, 7)).all()


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_a_new_mask():
    """As in torch's dropout, forward and backward of one replay share a mask."""
    x = torch.ones(64, 256, device="cuda", requires_grad=True)

    def step():
        added = dropped(x)
        return added, torch.autograd.grad(added.sum(), x)[0]

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


@pytest.mark.parametrize("make", [cupynorm.LayerNorm, cupynorm.RMSNorm])
def test_a_module_drops_only_in_training(make, device):
    module, x = make(40, device=device), torch.ones(4, 40, device=device)
    halved = row_scale(torch.full((4,), 0.5, device=device))
    for fuse in ((halved, dropout(0.5, 3)), [halved, dropout(0.5, 3)]):
        options = {"return_residual": True, "fuse": fuse}
        _, added = module.train()(x, 0 * x, **options)
        assert torch.equal(added, mask(4, 40, device=device).float())
        assert torch.equal(module.eval()(x, 0 * x, **options)[1], x / 2)
    assert torch.equal(module(x, fuse=dropout(0.5)), module(x))


@pytest.mark.parametrize("p", [3, -0.5, float("nan"), True, "half", None])
def test_p_is_checked_when_the_functor_is_made(p):
    with pytest.raises(ValueError, match=f"p is {p!r}; expected a probability, from 0 to 1"):
        dropout(p)


# Autograd, transforms, the compiler.


@pytest.mark.slow
def test_a_compiled_call_draws_its_seed(compile_anew):
    compiled = compile_anew(dropped)
    x = torch.ones(8, 40, requires_grad=True)
    torch.manual_seed(5)
    first, second = (compiled(x) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(compiled(x), first) and not torch.equal(first, second)
    (dx,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(dx, first)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_checkpoint_that_keeps_the_random_state_runs_the_same_mask_again(seed, use_reentrant):
    x = random(64, 40).requires_grad_()
    run = functools.partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant, preserve_rng_state=True
    )

    def call(x):
        return cupynorm.layer_norm(x, 40, fuse=dropout(0.5, seed))

    gradients = []
    for f in (call, functools.partial(run, call)):
        torch.manual_seed(1)
        x.grad = None
        f(x).cos().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert 0.3 < (gradients[0] == 0).double().mean() < 0.7


def test_a_checkpoint_that_loses_the_random_state_needs_a_seed():
    """As it does with torch's dropout: its gradients are of another mask."""
    x = random(64, 40).requires_grad_()
    masks = {}
    for seed in (None, 3):
        y = torch.utils.checkpoint.checkpoint(
            lambda x, seed=seed: cupynorm.layer_norm(
                x, 40, residual=0 * x, return_residual=True, fuse=dropout(0.5, seed)
            )[1],
            x,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        (dx,) = torch.autograd.grad(y.sum(), x)
        masks[seed] = torch.equal(y == 0, dx == 0)
    assert masks == {None: False, 3: True}
