"""Nested tensors: torch's own norms compute them, with the values of the rows of all sequences."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from norm_calls import assert_few_roundings  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm import functors  # noqa: E402

LENGTHS, COLS = (3, 0, 7), 16


def sequences(*extents):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, *extents, generator=generator) for length in LENGTHS]


def jagged(tensors):
    return torch.nested.nested_tensor(tensors, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("compiles", (False, pytest.param(True, marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", ("LayerNorm", "RMSNorm", "LayerNormLinear", "Linear"))
def test_modules_and_their_gradients(name, compiles):
    input = jagged(sequences(COLS))
    dense = input.detach().values().requires_grad_()
    extents = (COLS, 8) if name.endswith("Linear") else (COLS,)
    module = getattr(cupynorm, name)(*extents, device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-1, 2)
    run, results = torch.compile(module, backend="aot_eager") if compiles else module, []
    for x in (input, dense):
        y = (run if x.is_nested else module)(x)
        values = y.values() if x.is_nested else y
        values.square().sum().backward()
        dx = x.grad.values() if x.is_nested else x.grad
        results.append([values, dx, *(each.grad for each in module.parameters())])
        module.zero_grad(set_to_none=True)
        if x.is_nested:
            assert y.shape[0] == 3 and torch.equal(y.offsets(), x.offsets())
    assert_few_roundings(*results, 2**6)


def test_options():
    """Heads before the sequence, a residual, a zero-centered weight and another dtype."""
    input = jagged(sequences(4, COLS)).transpose(1, 2)
    residual = torch.nested.nested_tensor_from_jagged(
        torch.randn(sum(LENGTHS), 4, COLS), input.offsets()
    ).transpose(1, 2)
    weight = torch.randn(COLS)
    options = {"return_residual": True, "zero_centered_weight": True, "out_dtype": torch.float64}
    y, added = cupynorm.rms_norm(input, COLS, weight, residual=residual, **options)
    assert y.shape == added.shape == input.shape and y.dtype == torch.float64
    right = cupynorm.rms_norm(input.values(), COLS, weight, residual=residual.values(), **options)
    assert_few_roundings([y.values().float(), added.values()], [right[0].float(), right[1]])


def test_what_cannot_be_is_refused_in_a_sentence():
    input, layer = jagged(sequences(COLS)), cupynorm.LayerNormLinear(COLS, 8, device="cpu")
    strided = torch.nested.nested_tensor(sequences(COLS), layout=torch.strided)
    with pytest.raises(TypeError, match=r"layout torch\.strided; expected torch\.jagged"):
        cupynorm.layer_norm(strided, COLS)
    for options in ({"fuse": functors.layer_scale(torch.ones(COLS))}, {"out_dtype": "int8"}):
        with pytest.raises(
            NotImplementedError, match=r"input is nested; expected input.values\(\)"
        ):
            cupynorm.layer_norm(input, COLS, **options)
    with pytest.raises(TypeError, match="residual is a torch tensor of layout jagged"):
        cupynorm.rms_norm(input.detach().values(), COLS, residual=input)
    with (
        cupynorm.fp8_autocast(),
        pytest.raises(NotImplementedError, match="a nested tensor was given"),
    ):
        layer(input)
