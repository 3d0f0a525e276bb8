"""torch's own cases of layer_norm and rms_norm: OpInfo and ModuleInfo of torch.testing.

They include inputs that torch refuses.
"""

from __future__ import annotations

import numpy as np
import pytest

import cupynorm
from cupynorm.dtypes import DTYPES
from cupynorm.verify.bounds import expect
from cupynorm.verify.cases import Case, Problem
from cupynorm.verify.results import judge

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


def assert_right(call, theirs, input, normalized_shape, weight=None, bias=None, *, eps=None) -> int:
    """Compares y with torch's float64 result to one ulp, and gradients to the bounds of the dtype.

    Returns the number of elements compared.
    """
    dtype = str(input.dtype).removeprefix("torch.")
    centered = theirs is torch.nn.functional.layer_norm
    given = {"x": input, "weight": weight, "bias": bias}
    given = {key: value.detach() for key, value in given.items() if value is not None}

    def run(call, tensors, eps):
        leaves = {key: value.clone().requires_grad_() for key, value in tensors.items()}
        x, *parameters = (leaves.get(key) for key in ("x", "weight", "bias"))
        y = call(
            x, normalized_shape, *parameters[: 1 + centered], **{} if eps is None else {"eps": eps}
        )
        dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(input.dtype)
        gradients = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
        named = {"y": y, **{f"d{key}": gradient for key, gradient in zip(leaves, gradients)}}
        return dy, {key: value.detach().double().numpy() for key, value in named.items()}

    dy, got = run(call, given, eps)
    used_eps = (
        eps
        if eps is not None
        else 1e-5
        if centered
        else 2.0 ** (-52 if dtype == "float64" else -23)
    )
    _, right = run(theirs, {key: value.double() for key, value in given.items()}, used_eps)

    num_cols = int(np.prod(normalized_shape))
    kinds = {key: "same" if key in given else None for key in ("weight", "bias")}
    case = Case(
        "layer_norm" if centered else "rms_norm",
        input.numel() // num_cols,
        num_cols,
        dtype,
        **kinds,
        eps=used_eps,
    )
    flat = {key: value.double().numpy().reshape(-1) for key, value in given.items()}
    rows = (case.num_rows, num_cols)
    values = (
        flat["x"].reshape(rows),
        dy.double().numpy().reshape(rows),
        flat.get("weight"),
        flat.get("bias"),
    )
    allowed = {key: limit for key, (_, limit) in expect(Problem(case, *values)).items()}
    # The reference errs by roundings of float64 and is rounded once, as is torch's float64 result.
    exact = expect(Problem(Case(**vars(case) | {"x": "float64"}), *values))["y"][1]
    y = right["y"].reshape(rows)
    allowed["y"] = exact + np.maximum(
        2 * DTYPES[dtype].half_ulp * np.abs(y), DTYPES[dtype].smallest
    )
    for key, value in got.items():
        finding = judge(
            case,
            key,
            value.reshape(allowed[key].shape),
            right[key].reshape(allowed[key].shape),
            allowed[key],
        )
        assert finding.ok, finding
    return sum(value.size for value in got.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
def test_sample_inputs_of_torch_give_its_results(name, dtype, ops):
    theirs = getattr(torch.nn.functional, name.rpartition(".")[2])
    samples = list(ops[name].sample_inputs("cpu", getattr(torch, dtype)))
    assert {(1,), (0, 1)} <= {tuple(sample.input.shape) for sample in samples}
    assert any(sample.kwargs.get("eps") == -0.5 for sample in samples)
    sizes = [
        assert_right(NORMS[name], theirs, sample.input, *sample.args, **sample.kwargs)
        for sample in samples
    ]
    assert sum(sizes) > 50


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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
@BOTH
def test_dtypes_beyond_the_four_are_refused(name, dtype):
    with pytest.raises(
        TypeError,
        match=f"input is of dtype {str(dtype).removeprefix('torch.')}; expected one of float16",
    ):
        NORMS[name](torch.ones(2, 3, dtype=dtype), (3,))
