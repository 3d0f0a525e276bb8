"""The registered operators: schemas, and shapes and dtypes of results without memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from operator_cases import (  # noqa: E402
    NAMES,
    OPS,
    ROWS,
    WEIGHT,
    backward_arguments,
    by_case,
    by_name,
    call,
    forward_arguments,
    random,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

from cupynorm.nn import schemas  # noqa: E402

# Schemas.


@by_name
def test_an_operator_is_marked_for_the_compiler(name):
    assert torch.Tag.pt2_compliant_tag in getattr(OPS, name).default.tags


@pytest.mark.parametrize(
    "name, returns",
    [
        ("norm_forward", "y mean rstd sum"),
        ("norm_backward", "dx dweight dbias"),
        ("recomputing_norm_backward", "dx dweight dbias y"),
        ("fused_norm_forward", "y mean rstd sum y1"),
        ("fused_norm_backward", "dx dweight dbias dresidual dweight1 dbias1"),
    ],
)
def test_results_are_named(name, returns):
    schema = getattr(OPS, name).default._schema
    assert [each.name for each in schema.returns] == returns.split()


def test_a_graph_of_an_older_version_needs_no_backward_sm_margin():
    """It was added last and has a default, so saved graphs without it still load."""
    for name in ("norm_forward", "fused_norm_forward"):
        last = getattr(OPS, name).default._schema.arguments[-1]
        assert last.name == "backward_sm_margin" and last.default_value == 0


@by_name
def test_arguments_of_has_the_names_and_defaults_of_the_schema(name):
    operator = getattr(OPS, name).default
    found = schemas.arguments_of(operator)
    assert found._fields == tuple(each.name for each in operator._schema.arguments)
    defaults = {
        each.name: each.default_value
        for each in operator._schema.arguments
        if each.has_default_value()
    }
    assert found._field_defaults == defaults


# Tensors without memory.


def call_with_fake_tensors(name: str, shape_env: ShapeEnv | None = None, **given) -> tuple:
    """The operator's results as fake tensors. With shape_env, all extents are symbols."""
    with FakeTensorMode(shape_env=shape_env) as mode:
        fake = {
            key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in given.items()
        }
        return call(name, **fake)


@by_case
def test_fake_results_have_the_layouts_of_real_ones(name, given):
    real = call(name, **given)
    made = call_with_fake_tensors(name, **given)
    for each, right in zip(made, real, strict=True):
        assert isinstance(each, FakeTensor) and not isinstance(right, FakeTensor)
        assert (each.shape, each.dtype) == (right.shape, right.dtype)
        assert each.stride() == right.stride()


@pytest.mark.parametrize(
    "name, given, num_rows_of",
    [
        ("norm_forward", forward_arguments(residual=ROWS), ("y", "mean", "rstd", "sum")),
        ("norm_backward", backward_arguments(), ("dx",)),
        ("recomputing_norm_backward", backward_arguments(), ("dx", "y")),
        (
            "fused_norm_forward",
            forward_arguments(residual=ROWS, weight1=WEIGHT),
            ("y", "mean", "rstd", "sum", "y1"),
        ),
        (
            "fused_norm_backward",
            backward_arguments(dy1=ROWS, wanted=[True] * 6, centered=True),
            ("dx", "dresidual"),
        ),
    ],
    ids=NAMES,
)
def test_fake_results_have_symbolic_numbers_of_rows(name, given, num_rows_of):
    """A number in place of the symbol would compile the call anew for each number of rows."""
    made = call_with_fake_tensors(name, ShapeEnv(), **given)
    names = [each.name for each in getattr(OPS, name).default._schema.returns]
    found = {key: each.shape[0] for key, each in zip(names, made) if each.dim() > 1}
    assert set(found) == set(num_rows_of)
    for num_rows in found.values():
        assert isinstance(num_rows, torch.SymInt) and not num_rows.node.expr.is_number


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"weight": random(4)}, ValueError, r"weight has shape \(4,\)"),
        ({"residual": random(3, 4)}, ValueError, r"residual has shape \(3, 4\)"),
        ({"residual": ROWS.double()}, TypeError, "residual is of dtype float64"),
        ({"normalized_shape": [4]}, ValueError, r"normalized_shape is \(4,\)"),
        ({"eps": None}, TypeError, "eps is None"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype is torch.int32"),
    ],
)
@pytest.mark.parametrize("name", ["norm_forward", "fused_norm_forward"])
def test_wrong_fake_tensors_are_refused_as_real_ones(name, given, error, words):
    given = forward_arguments() | given
    for each in (call, call_with_fake_tensors):
        with pytest.raises(error, match=words):
            each(name, **given)
