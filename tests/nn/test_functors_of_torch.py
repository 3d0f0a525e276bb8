"""Functors in torch: gradients, torch.compile, modules, and what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import cupynorm  # noqa: E402
from cupynorm import functors  # noqa: E402

DOUBLED = cupynorm.functor("doubled", "y = C(2) * y;")
POWER = cupynorm.functor(
    "power",
    "y = y * pow(gate, p);",
    arrays=("gate",),
    numbers=("p",),
    backward="dgate = dy * y * p * pow(gate, p - C(1)); dy = dy * pow(gate, p);",
)


def draw(*shape, dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(sum(shape))
    made = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    return made.requires_grad_(requires_grad)


def sums(x, weight, bias, scale, gate, residual):
    return cupynorm.layer_norm(
        x,
        8,
        weight,
        bias,
        residual=residual,
        return_residual=True,
        fuse=(functors.layer_scale(scale), functors.silu_gate(gate)),
    )


def alone(x, weight, bias, scale, shift):
    return cupynorm.rms_norm(
        x, 8, weight, fuse=[functors.bias_gelu(bias), functors.ada_ln(scale, shift)]
    )


def rotated(x, weight, angle):
    turns = torch.cat([angle, angle], -1)
    fuse = functors.rotary(cos=turns.cos(), sin=turns.sin())
    return cupynorm.layer_norm(x, 8, weight, fuse=fuse)


def raised(x, gate):
    return cupynorm.rms_norm(x, 8, fuse=POWER(gate=gate.exp(), p=1.5))


CALLS = {
    sums: ((2, 3, 8), (8,), (8,), (8,), (2, 1, 8), (2, 3, 8)),
    alone: ((2, 3, 8), (8,), (8,), (2, 1, 1), (1, 3, 8)),
    rotated: ((2, 3, 8), (8,), (1, 3, 4)),
    raised: ((2, 3, 8), (2, 3, 8)),
}


@pytest.mark.parametrize("call", CALLS)
def test_gradients(call):
    """Of every tensor, broadcast ones too, by central differences in float64."""
    assert torch.autograd.gradcheck(call, [draw(*shape) for shape in CALLS[call]])


def test_some_gradients_of_low_precision():
    """A tensor that wants none gets none; dtypes are those of the tensors."""
    x = draw(4, 8, dtype=torch.bfloat16, requires_grad=False)
    gate = draw(8, dtype=torch.float16)
    y = cupynorm.layer_norm(x, 8, fuse=functors.silu_gate(gate=gate))
    assert y.dtype == torch.bfloat16 and x.grad is None
    y.sum().backward()
    wide = gate.detach().double().requires_grad_()
    plain = torch.nn.functional.layer_norm(x.double(), (8,))
    (right,) = torch.autograd.grad((plain * torch.nn.functional.silu(wide)).sum(), wide)
    assert gate.grad.dtype == torch.float16
    torch.testing.assert_close(gate.grad.double(), right, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("call", [sums, rotated])
def test_second_derivatives(call):
    """By the functors' texts of torch."""
    given = [draw(*shape) for shape in CALLS[call]]
    assert torch.autograd.gradgradcheck(lambda *tensors: first(call(*tensors)), given)


def test_a_gradient_to_differentiate_of_a_tensor_that_comes_twice():
    """It is that of the kernels."""
    x, gate = draw(2, 8), draw(2, 8)
    silu = functors.silu_gate
    y = cupynorm.layer_norm(x, 8, residual=x, fuse=(silu(gate), silu(gate), silu(x)))
    y = y + cupynorm.rms_norm(x, 8, fuse=silu(x))
    expected = torch.autograd.grad(y.sum(), (x, gate), retain_graph=True)
    found = torch.autograd.grad(y.sum(), (x, gate), create_graph=True)
    for got, right in zip(found, expected):
        torch.testing.assert_close(got, right)


@pytest.mark.slow
@pytest.mark.parametrize("call", [sums, alone, rotated])
def test_compiled(call):
    """One graph, of the functors' texts of torch, for any number of rows."""
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for num_samples in (2, 5):
        shapes = [(num_samples, *shape[1:]) if shape[0] == 2 else shape for shape in CALLS[call]]
        given = [draw(*shape) for shape in shapes]
        results = []
        for each in (call, compiled):
            made = each(*given)
            made = made if isinstance(made, tuple) else (made,)
            gradients = torch.autograd.grad(sum(part.sin().sum() for part in made), given)
            results.append((*made, *gradients))
        for right, got in zip(*results):
            torch.testing.assert_close(right, got)


def test_a_functor_without_a_text_of_torch_breaks_the_graph():
    """The results have the bits of eager calls."""
    x, gate = (draw(3, 8, requires_grad=False).exp() for _ in range(2))
    compiled = torch.compile(lambda *given: raised(*given) + 1, backend="eager")
    assert torch.equal(compiled(x, gate), raised(x, gate) + 1)


def test_transformed_and_exported():
    x, gate, scale = draw(3, 8), draw(3, 8), draw(8)

    def call(x, gate):
        return cupynorm.rms_norm(x, 8, fuse=(functors.layer_scale(scale), functors.silu_gate(gate)))

    right = call(x, gate)
    torch.testing.assert_close(torch.func.vmap(call)(x, gate), right)
    torch.testing.assert_close(torch.func.vmap(lambda gate: call(x[0], gate))(gate)[0], right[0])
    _, tangent = torch.func.jvp(call, (x, gate), (x, gate))
    assert torch.isfinite(tangent).all()

    class Module(torch.nn.Module):
        def forward(self, x, gate):
            return call(x, gate)

    exported = torch.export.export(Module(), (x, gate)).module()
    torch.testing.assert_close(exported(x, gate), right)


NOISY = cupynorm.functor(
    "noisy",
    "x = x * s + C(seed % 5);",
    arrays=("s",),
    per_row=("s",),
    seeds=("seed",),
    backward="dx = dx * s;",
    torch=lambda x, s, seed: x * s + (seed % 5).to(x.dtype),
)


@pytest.mark.slow
def test_seeds_and_an_input_that_backward_does_not_read():
    """A drawn seed is that of backward, and of rows the sum alone is kept."""
    x, residual, scale = draw(3, 2, 8), draw(3, 2, 8), draw(3, 2, requires_grad=False)
    torch.manual_seed(1)
    y = cupynorm.layer_norm(x, 8, residual=residual, fuse=NOISY(scale))
    torch.manual_seed(1)
    again = cupynorm.layer_norm(x, 8, residual=residual, fuse=NOISY(scale, seed=None))
    assert torch.equal(y, again)
    saved = [each for each in y.grad_fn.saved_tensors if each is not None]
    assert [tuple(each.shape) for each in saved if each.ndim == 3] == [(3, 2, 8)]
    seed = saved[-1]
    assert seed.dtype == torch.int64 and seed.shape == (1,)
    other = NOISY(scale, seed.item())
    assert torch.equal(cupynorm.layer_norm(x, 8, residual=residual, fuse=other), y)
    given = x, residual

    def call(x, residual, seed=seed):
        return cupynorm.layer_norm(x, 8, residual=residual, fuse=NOISY(scale, seed))

    assert torch.autograd.gradcheck(call, given) and torch.autograd.gradgradcheck(call, given)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, residual, 7), call(x, residual, 7))
    assert torch.isfinite(compiled(x, residual, None)).all()


def test_the_gradient_of_an_array_per_row():
    times = cupynorm.functor(
        "times", "x = x * s;", arrays=("s",), per_row=("s",), backward="ds = dx * x; dx = dx * s;"
    )
    given = draw(3, 2, 8), draw(3, 2), draw(3, 2, 8)

    def call(x, scale, residual):
        return cupynorm.layer_norm(x, 8, residual=residual, fuse=times(scale))

    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradcheck(lambda x, s: cupynorm.rms_norm(x, 8, fuse=times(s)), given[:2])


def first(made):
    return made[0] if isinstance(made, tuple) else made


def test_without_a_derivative():
    x = draw(3, 8)
    words = r"fuse has doubled, which has no derivative.*cupynorm.functor\('doubled', \.\.\., backw"
    with pytest.raises(ValueError, match=words):
        cupynorm.layer_norm(x, 8, fuse=DOUBLED)
    with torch.no_grad():
        y = cupynorm.layer_norm(x, 8, fuse=DOUBLED)
    torch.testing.assert_close(y, 2 * cupynorm.layer_norm(x.detach(), 8))
    torch.testing.assert_close(y, cupynorm.layer_norm(x.detach(), 8, fuse=DOUBLED))


def test_refusals():
    x, gate = draw(3, 8), draw(3, 8)
    store = functors.silu_gate(gate=gate)
    with pytest.raises(ValueError, match="out was given for tensors that require"):
        cupynorm.layer_norm(x, 8, fuse=store, out=torch.empty_like(x))
    with pytest.raises(NotImplementedError, match="a functor without torch= was given to a"):
        torch.func.vmap(lambda each: cupynorm.layer_norm(each, 8, fuse=POWER(gate[0], 2)))(x)
    with pytest.raises(
        ValueError, match="silu_gate.gate is a NumPy array, input is a torch tensor"
    ):
        cupynorm.layer_norm(x, 8, fuse=functors.silu_gate(gate=gate.detach().numpy()))
    y = cupynorm.layer_norm(x, 8, fuse=POWER(gate, 2))
    with pytest.raises(NotImplementedError, match="of a norm with a functor without torch= was"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(call, dtype):
    """y and all gradients near those of the CPU in float64, eager and compiled."""
    given = [draw(*shape) for shape in CALLS[call]]
    on_gpu = [each.detach().to("cuda", dtype).requires_grad_() for each in given]
    wide = [each.detach().double().cpu().requires_grad_() for each in on_gpu]
    right = first(call(*wide))
    dy = torch.randn_like(right).to(dtype)  # the same in both, whatever y is rounded to
    gradients = torch.autograd.grad(right, wide, dy.double())
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
    for each in (call, torch.compile(call)):
        y = first(each(*on_gpu))
        torch.testing.assert_close(y.double().cpu(), right, rtol=tolerance, atol=tolerance)
        made = torch.autograd.grad(y, on_gpu, dy.cuda())
        for got, expected in zip(made, gradients):
            size = expected.abs().max() + 1
            assert (got.double().cpu() - expected).abs().max() <= tolerance * size


@pytest.mark.gpu
def test_cupy_arrays_and_wrong_lines_on_a_gpu():
    cupy = pytest.importorskip("cupy")
    x, gate = cupy.random.randn(64, 768).astype("float32"), cupy.random.randn(1, 768)
    gate = gate.astype("float32")
    y = cupynorm.layer_norm(x, 768, fuse=functors.silu_gate(gate=gate))
    right = cupynorm.layer_norm(x.get(), 768, fuse=functors.silu_gate(gate=gate.get()))
    assert abs(y.get() - right).max() < 1e-5
    with pytest.raises(cupynorm.FunctorError, match="wrong"):
        cupynorm.layer_norm(x, 768, fuse=cupynorm.functor("wrong", "y = z;"))
