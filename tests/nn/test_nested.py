"""Nested tensors: the rows of all sequences have the bits of the same rows in a dense tensor."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from norm_calls import assert_few_roundings  # noqa: E402

import cupynorm  # noqa: E402

LENGTHS, COLS = (3, 0, 7), 16


@pytest.fixture
def where(anywhere):
    return "cuda" if anywhere == "gpu" else "cpu"


def sequences(where, *extents, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, *extents, generator=generator).to(where) for length in LENGTHS]


def jagged(tensors):
    return torch.nested.nested_tensor(tensors, layout=torch.jagged, requires_grad=True)


def like(nested, values):
    """values with the offsets of a jagged tensor."""
    return torch.nested.nested_tensor_from_jagged(values, nested.offsets())


def assert_same(results, expected):
    assert results.shape == expected.shape
    assert torch.equal(results, expected)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "LayerNormLinear", "Linear"])
def test_modules_and_their_gradients(name, where):
    input = jagged(sequences(where, COLS))
    dense = input.detach().values().requires_grad_()
    extents = (COLS, 8) if name.endswith("Linear") else (COLS,)
    module = getattr(cupynorm, name)(*extents, device=where)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-1, 2)
    gradients = []
    for x in (input, dense):
        y = module(x)
        values = y.values() if x.is_nested else y
        (values * values).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
        module.zero_grad(set_to_none=True)
        if x.is_nested:
            assert y.shape == (*input.shape[:2], extents[-1])
            nested_values = values
    assert_same(nested_values, values)
    assert input.grad.shape == input.shape
    assert_same(input.grad.values(), dense.grad)
    for of_nested, of_dense in zip(*gradients):
        assert_same(of_nested, of_dense)


@pytest.mark.parametrize("name", ["LayerNormLinear", "Linear"])
def test_products_in_8_bits(name):
    input = jagged([torch.randn(16, 32), torch.randn(32, 32)])
    layer = getattr(cupynorm, name)(32, 16, device="cpu")
    with cupynorm.fp8_autocast(recipe=cupynorm.recipes.CurrentScaling()):
        y, expected = layer(input), layer(input.values())
        with pytest.raises(NotImplementedError, match="fp8_output is True and input is nested"):
            layer(input, fp8_output=True)
    assert y.shape == (*input.shape[:2], 16)
    assert_same(y.values(), expected)


def test_options_have_their_sequences_too(where):
    input = jagged(sequences(where, COLS))
    residual = like(input, torch.randn(sum(LENGTHS), COLS, device=where))
    y, added = cupynorm.layer_norm(input, COLS, residual=residual, return_residual=True)
    expected = cupynorm.layer_norm(
        input.values(), COLS, residual=residual.values(), return_residual=True
    )
    assert y.shape == added.shape == input.shape
    assert_same(y.values(), expected[0])
    assert_same(added.values(), expected[1])


def test_arrays_of_functors_have_their_sequences_too(where):
    input = jagged(sequences(where, COLS))
    gate = like(input, torch.randn(sum(LENGTHS), COLS, device=where)).requires_grad_()
    scale = torch.rand(COLS, device=where)
    silu, by_cols = cupynorm.functors.silu_gate, cupynorm.functors.layer_scale(scale)
    y = cupynorm.layer_norm(input, COLS, fuse=(silu(gate), by_cols))
    assert_same(
        y.values(), cupynorm.layer_norm(input.values(), COLS, fuse=(silu(gate.values()), by_cols))
    )
    (of_gate,) = torch.autograd.grad(y.values().sum(), gate)
    assert of_gate.shape == gate.shape
    with pytest.raises(ValueError, match=r"silu_gate\.gate has offsets of its own"):
        cupynorm.layer_norm(input, COLS, fuse=silu(jagged(sequences(where, COLS))))


def test_heads_may_come_before_the_sequence(where):
    input = jagged(sequences(where, 4, COLS)).transpose(1, 2)
    y = cupynorm.layer_norm(input, COLS)
    assert y.shape == input.shape
    assert_same(y.values(), cupynorm.layer_norm(input.values(), COLS))


@pytest.mark.slow
def test_a_compiled_norm_keeps_the_sequences():
    input = jagged(sequences("cpu", COLS))
    norm = cupynorm.LayerNorm(COLS)
    y = torch.compile(norm, backend="aot_eager", fullgraph=True)(input)
    assert y.shape[0] == input.shape[0] and (y.offsets() == input.offsets()).all()
    assert_few_roundings([y.values()], [norm(input).values()])


def test_what_cannot_be_is_refused_in_a_sentence():
    input = jagged(sequences("cpu", COLS))
    strided = torch.nested.nested_tensor(sequences("cpu", COLS), layout=torch.strided)
    layer = cupynorm.LayerNormLinear(COLS, 8, device="cpu")
    for call in (lambda: cupynorm.layer_norm(strided, COLS), lambda: layer(strided)):
        with pytest.raises(TypeError, match=r"layout torch\.strided; expected torch\.jagged"):
            call()
    with pytest.raises(TypeError, match="input is nested and residual is dense"):
        cupynorm.rms_norm(input, COLS, residual=input.detach().values())
    with pytest.raises(TypeError, match="input is dense and another argument is nested"):
        cupynorm.rms_norm(input.detach().values(), COLS, residual=input)
    with pytest.raises(ValueError, match="residual has offsets of its own"):
        cupynorm.rms_norm(input, COLS, residual=jagged(sequences("cpu", COLS)))
    with pytest.raises(ValueError, match="dimension 1 of input differs between sequences"):
        cupynorm.layer_norm(input, (10, COLS))
    with pytest.raises(NotImplementedError, match="8-bit out_dtype was given"):
        cupynorm.layer_norm(input, COLS, out_dtype="float8_e4m3fn")
