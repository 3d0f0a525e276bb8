"""torch's own cases of layer_norm and rms_norm: OpInfo of torch.testing.

They include inputs that torch refuses.
"""

from __future__ import annotations

import pytest

import cupynorm
from cupynorm.dtypes import DTYPES

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch.testing._internal needs it: pip install expecttest")

NORMS = {
    "nn.functional.layer_norm": cupynorm.layer_norm,
    "nn.functional.rms_norm": cupynorm.rms_norm,
}
BOTH = pytest.mark.parametrize("name", NORMS)


@pytest.fixture(scope="module")
def ops() -> dict:
    """OpInfos by name. The import takes seconds, so it is not done at collection."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.name: op for op in op_db if op.name in (*NORMS, "native_layer_norm")}


def results_of(call, input, normalized_shape, parameters, dtype, **options) -> list[torch.Tensor]:
    """y and the gradients of all tensors, in float64."""
    leaves = [each.detach().to(dtype).requires_grad_() for each in (input, *parameters)]
    y = call(leaves[0], normalized_shape, *leaves[1:], **options)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(input.dtype)
    gradients = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    return [each.detach().double() for each in (y, *gradients)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
def test_sample_inputs_of_torch_give_its_results(name, dtype, ops):
    """Each within a unit in its last place of torch's results in float64.

    Gradients are off by some roundings of mean and rstd too, which backward has in float32.
    """
    theirs, dtype = getattr(torch.nn.functional, name.rpartition(".")[2]), getattr(torch, dtype)
    samples = list(ops[name].sample_inputs("cpu", dtype))
    assert {(1,), (0, 1)} <= {tuple(sample.input.shape) for sample in samples}
    assert any(sample.kwargs.get("eps") == -0.5 for sample in samples)
    num_elements = 0
    for sample in samples:
        extents, *parameters = sample.args
        parameters += [sample.kwargs[key] for key in ("weight", "bias") if key in sample.kwargs]
        parameters = [each for each in parameters if each is not None]
        eps = sample.kwargs.get("eps")
        if eps is None:
            eps = 1e-5 if theirs is torch.nn.functional.layer_norm else None
        given = sample.input, extents, parameters
        found = results_of(NORMS[name], *given, dtype, eps=eps)
        if eps is None:
            eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        right = results_of(theirs, *given, torch.float64, eps=eps)
        x = sample.input.double()
        variance = x.var(-1, unbiased=False) if eps >= 0 else x.square().mean(-1)
        rstd = (variance + eps).abs().rsqrt().nan_to_num(0, 0, 0).max().item() if x.numel() else 1
        for at, (got, expected) in enumerate(zip(found, right, strict=True)):
            largest = expected.nan_to_num().abs().max().item() if expected.numel() else 0.0
            unit = 2.0**-52 if at == 0 or dtype == torch.float64 else 2.0**-23
            atol = 8 * unit * (largest + (rstd if at else 0.0))
            torch.testing.assert_close(
                got, expected, rtol=torch.finfo(dtype).eps, atol=atol, equal_nan=True
            )
            num_elements += got.numel()
    assert num_elements > 50


@BOTH
def test_inputs_that_torch_refuses_are_refused(name, ops):
    """The error says what was given and what is expected."""
    of_errors = "native_layer_norm" if name.endswith("layer_norm") else name
    errors = list(ops[of_errors].error_inputs("cpu"))
    assert len(errors) >= 3
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            ops[of_errors].op(sample.input, *sample.args, **sample.kwargs)
        with pytest.raises((ValueError, TypeError), match=r"^\w+ (is|has) .*; expected "):
            NORMS[name](sample.input, *sample.args, **sample.kwargs)
