"""The registered operators: schemas, shapes without memory, torch's rules, and gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from torch.library import opcheck  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.nn import fused_operators, operators, schemas  # noqa: E402
from cupynorm.norm import route  # noqa: E402
from cupynorm.norm.request import (  # noqa: E402
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Margins,
    Options,
    SecondGradient,
)

OPS = torch.ops.cupynorm
NAMES = (
    "norm_forward",
    "norm_backward",
    "recomputing_norm_backward",
    "fused_norm_forward",
    "fused_norm_backward",
)
EPS = 0.1

by_name = pytest.mark.parametrize("name", NAMES)
by_norm = pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])


def random(*shape: int, dtype=torch.float32, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# Arguments by name; those that a test leaves out are None, False or 0.


def arguments(name: str, **given: object) -> tuple:
    """All arguments of an operator in the order of its schema."""
    blank = {"bool": False, "int": 0, "float": 0.0}
    values = []
    for each in getattr(OPS, name).default._schema.arguments:
        values.append(given.pop(each.name, blank.get(str(each.type))))
    assert not given, f"{name} takes no {', '.join(given)}"
    return tuple(values)


def call(name: str, **given: object) -> tuple:
    return getattr(OPS, name)(*arguments(name, **given))


def forward_arguments(centered=True, dtype=torch.float32, **given: object) -> dict:
    return {
        "input": random(3, 4, 5, dtype=dtype),
        "normalized_shape": [5],
        "eps": EPS,
        "centered": centered,
        **given,
    }


def backward_arguments(centered=True, dtype=torch.float32, num_gradients=3, **given) -> dict:
    forward = forward_arguments(centered, dtype)
    _, mean, rstd, _ = call("norm_forward", **forward)
    return {
        "dy": random(3, 4, 5, dtype=dtype, seed=1),
        "x": forward["input"],
        "mean": mean if centered else None,
        "rstd": rstd,
        "normalized_shape": [5],
        "wanted": [True] * num_gradients,
        **given,
    }


WEIGHT, BIAS = random(5, seed=2), random(5, seed=3)
ROWS = random(3, 4, 5, seed=4)
HALF = {"dtype": torch.bfloat16}

# (operator, arguments): each option that changes a shape or a dtype of a result.
CASES = [
    ("norm_forward", forward_arguments()),
    ("norm_forward", forward_arguments(False, weight=WEIGHT)),
    ("norm_forward", forward_arguments(weight=WEIGHT, bias=BIAS, residual=ROWS)),
    ("norm_forward", forward_arguments(**HALF, weight=WEIGHT)),
    ("norm_forward", forward_arguments(**HALF, residual=ROWS.bfloat16())),
    ("norm_forward", forward_arguments(out_dtype=torch.float16)),
    ("norm_forward", forward_arguments(dtype=torch.float64)),
    ("norm_forward", forward_arguments() | {"normalized_shape": [4, 5]}),
    ("norm_backward", backward_arguments()),
    ("norm_backward", backward_arguments(False, weight=WEIGHT, zero_centered_weight=True)),
    ("norm_backward", backward_arguments(**HALF, weight=WEIGHT, dbias_dtype=torch.float16)),
    ("norm_backward", backward_arguments(dsum=ROWS, wanted=[True, False, False])),
    ("norm_backward", backward_arguments(weight=WEIGHT, wanted=[False, True, False])),
    ("norm_backward", backward_arguments(weight=WEIGHT, wanted=[False, False, True])),
    ("norm_backward", backward_arguments(dtype=torch.float64)),
    ("recomputing_norm_backward", backward_arguments(weight=WEIGHT, bias=BIAS)),
    ("recomputing_norm_backward", backward_arguments(False, bias=BIAS.half(), **HALF)),
    ("recomputing_norm_backward", backward_arguments(wanted=[False, True, False])),
    ("fused_norm_forward", forward_arguments()),
    ("fused_norm_forward", forward_arguments(False, residual=ROWS, weight1=WEIGHT)),
    ("fused_norm_forward", forward_arguments(**HALF, residual_dtype=torch.float32)),
    ("fused_norm_forward", forward_arguments(bias1=BIAS, out_dtype=torch.float16)),
    ("fused_norm_forward", forward_arguments(row_scale=random(3, 4))),
    ("fused_norm_forward", forward_arguments(dropout_p=0.5, dropout_seed=torch.tensor([3]))),
    ("fused_norm_forward", forward_arguments(**HALF, round_x_hat=True, memory_efficient=True)),
    ("fused_norm_forward", forward_arguments(residual_dtype=torch.float64)),
    ("fused_norm_backward", backward_arguments(centered=True, num_gradients=6)),
    (
        "fused_norm_backward",
        backward_arguments(
            **HALF,
            num_gradients=6,
            dy1=random(3, 4, 5, seed=5).bfloat16(),
            weight=WEIGHT,
            weight1=WEIGHT.half(),
            dbias_dtype=torch.float64,
            dbias1_dtype=torch.float32,
            dx_dtype=torch.float16,
            dresidual_dtype=torch.float32,
        ),
    ),
    (
        "fused_norm_backward",
        backward_arguments(
            False,
            row_scale=random(3, 4),
            dropout_p=0.5,
            dropout_seed=torch.tensor([3]),
            wanted=[True, False, False, True, False, False],
        ),
    ),
    (
        "fused_norm_backward",
        backward_arguments(
            mean=None, memory_efficient=True, weight=WEIGHT, wanted=[True, True] + [False] * 4
        ),
    ),
]
for _name, _given in CASES:
    if _name == "fused_norm_backward":
        _given.setdefault("centered", _given["mean"] is not None or _given.get("memory_efficient"))
        _given.setdefault("dy1", random(3, 4, 5, seed=5))
by_case = pytest.mark.parametrize(
    "name, given", CASES, ids=[f"{name}-{place}" for place, (name, _) in enumerate(CASES)]
)


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


# What the operators return.


@by_case
def test_no_result_shares_memory_with_an_argument_or_another_result(name, given):
    made = [each for each in call(name, **given) if each.numel()]
    tensors = made + [each for each in given.values() if isinstance(each, torch.Tensor)]
    addresses = [each.untyped_storage().data_ptr() for each in made]
    assert len(set(addresses)) == len(made)
    others = {each.untyped_storage().data_ptr() for each in tensors[len(made) :]}
    assert not others & set(addresses)


def test_dx_and_dresidual_of_the_kernels_are_two_tensors(kernels):
    """The kernel writes them once where they are equal. An operator returns no tensor twice."""
    given = backward_arguments(wanted=[True, False, False, True, False, False], centered=True)
    dx, _, _, dresidual, _, _ = call("fused_norm_backward", **given)
    assert torch.equal(dx, dresidual)
    assert dx.data_ptr() != dresidual.data_ptr()


def test_absent_results_are_empty():
    y, mean, rstd, added = call("norm_forward", **forward_arguments(False))
    assert y.shape == (3, 4, 5) and rstd.shape == (3, 4)
    assert mean.numel() == added.numel() == 0
    y, mean, rstd, added, y1 = call("fused_norm_forward", **forward_arguments(False))
    assert mean.numel() == added.numel() == y1.numel() == 0


@pytest.mark.parametrize("wanted", range(6))
def test_the_fused_backward_returns_the_wanted_gradients(wanted):
    given = backward_arguments(dy1=ROWS, weight=WEIGHT, weight1=BIAS, centered=True)
    everything = call("fused_norm_backward", **given | {"wanted": [True] * 6})
    asked = [place == wanted for place in range(6)]
    made = call("fused_norm_backward", **given | {"wanted": asked})
    for place, each in enumerate(made):
        if place == wanted:
            assert torch.equal(each, everything[place])
        else:
            assert each.numel() == 0


@by_norm
def test_the_recomputing_backward_recomputes_y(centered):
    forward = forward_arguments(centered, weight=WEIGHT, bias=BIAS)
    given = backward_arguments(centered, weight=WEIGHT, bias=BIAS)
    *made, y = call("recomputing_norm_backward", **given)
    torch.testing.assert_close(y, call("norm_forward", **forward)[0], rtol=0, atol=2.0**-20)
    del given["bias"]
    for each, right in zip(made, call("norm_backward", **given), strict=True):
        assert torch.equal(each, right)


# torch's own checks of operators.


@by_case
def test_operators_pass_opcheck(name, given):
    utils = ["test_schema", "test_faketensor", "test_autograd_registration"]
    opcheck(getattr(OPS, name).default, arguments(name, **given), test_utils=utils)


# Requests through the operators.

LAUNCH = Options("block", cupynorm.Tile(4, 32, path="registers"), "welford", Margins(1, 2, 3))


def implementation_request(monkeypatch, name: str, run) -> object:
    """The request that the implementation of an operator makes of its arguments."""
    seen = []
    plain = getattr(route, name)

    def record(request, *rest):
        seen.append(request)
        return plain(request, *rest)

    monkeypatch.setattr(route, name, record)
    run()
    (request,) = seen
    return request


def assert_same_operands(got, given) -> None:
    for name in given._fields:
        one, right = getattr(got, name), getattr(given, name)
        if isinstance(right, torch.Tensor):
            assert torch.equal(one, right), name
        else:
            assert one is right, name


@by_norm
def test_the_operator_passes_on_the_request_of_a_forward(monkeypatch, centered):
    options = ForwardOptions(centered, (5,), EPS, True, torch.float16, launch=LAUNCH)
    given = ForwardRequest(ForwardOperands(ROWS, WEIGHT, BIAS, ROWS + 1), options)
    got = implementation_request(monkeypatch, "forward", lambda: operators.norm_forward(given))
    assert_same_operands(got.operands, given.operands)
    assert got.options == options._replace(launch=LAUNCH._replace(sm_margin=1))
    assert got.options.launch.tile.path == "registers"


def test_a_forward_without_gradients_takes_the_margin_of_inference(monkeypatch):
    options = ForwardOptions(True, (5,), EPS, launch=LAUNCH)
    given = ForwardRequest(ForwardOperands(ROWS), options)
    with torch.no_grad():
        got = implementation_request(monkeypatch, "forward", lambda: operators.norm_forward(given))
    assert got.options.launch.sm_margin == 3


def test_the_operator_passes_on_the_request_of_a_fused_forward(monkeypatch):
    options = ForwardOptions(True, (5,), EPS, True, torch.float32, "float32", 0.5, True, True)
    seed = torch.tensor([7])
    operands = ForwardOperands(
        ROWS.bfloat16(), WEIGHT, BIAS, ROWS, None, random(3, 4), seed, BIAS, WEIGHT
    )
    given = ForwardRequest(operands, options._replace(launch=LAUNCH))
    got = implementation_request(
        monkeypatch, "forward", lambda: fused_operators.fused_norm_forward(given)
    )
    assert_same_operands(got.operands, operands)
    assert got.options == options._replace(launch=LAUNCH._replace(sm_margin=1))


@pytest.mark.parametrize("names", [("dx",), ("dweight", "dbias"), ("dx", "dweight", "dbias")])
def test_the_operator_passes_on_the_request_of_a_backward(monkeypatch, names):
    made = backward_arguments()
    operands = BackwardOperands(made["dy"], made["x"], made["mean"], made["rstd"], WEIGHT, ROWS)
    options = BackwardOptions(True, (5,), True, names, dbias_dtype=torch.float16)
    given = BackwardRequest(operands, options._replace(launch=Options("block", None, None, 2)))
    got = implementation_request(monkeypatch, "backward", lambda: operators.norm_backward(given))
    assert_same_operands(got.operands, operands)
    assert got.options == given.options


def test_the_operator_passes_on_the_request_of_a_fused_backward(monkeypatch):
    made = backward_arguments()
    operands = BackwardOperands(made["dy"], made["x"], made["mean"], made["rstd"], WEIGHT, ROWS)
    operands = operands._replace(row_scale=random(3, 4), dropout_seed=torch.tensor([7]))
    names = ("dx", "dbias", "dresidual", "dweight1")
    options = BackwardOptions(True, (5,), True, names, torch.float16, None, torch.float64)
    options = options._replace(dresidual_dtype=torch.bfloat16, dropout_p=0.5)
    given = BackwardRequest(operands, options._replace(launch=Options("block", None, None, 2)))
    second = SecondGradient(ROWS, BIAS, torch.float16)
    got = implementation_request(
        monkeypatch, "backward_of_two", lambda: fused_operators.fused_norm_backward(given, second)
    )
    assert_same_operands(got.operands, operands)
    assert got.options == given.options


def test_unwanted_gradients_are_none():
    made = backward_arguments()
    operands = BackwardOperands(made["dy"], made["x"], made["mean"], made["rstd"], WEIGHT)
    options = BackwardOptions(True, (5,), gradients=("dweight",))
    dx, dweight, dbias, *_ = operators.norm_backward(BackwardRequest(operands, options))
    assert dx is None and dbias is None and dweight.shape == (5,)
    fused = fused_operators.fused_norm_backward(
        BackwardRequest(operands, options), SecondGradient(None)
    )
    assert [each is not None for each in fused] == [False, True, False, False, False, False]


def test_a_fused_forward_without_a_sum_returns_the_input():
    options = ForwardOptions(True, (5,), EPS, round_x_hat=True)
    x = random(3, 4, 5)
    y, y1, added = fused_operators.fused_norm_forward(ForwardRequest(ForwardOperands(x), options))
    assert y1 is None and added is x and y.shape == x.shape


def test_an_int_seed_is_that_seed_in_a_tensor():
    def run(seed):
        options = ForwardOptions(True, (5,), EPS, dropout_p=0.5)
        operands = ForwardOperands(ROWS, dropout_seed=seed)
        return fused_operators.fused_norm_forward(ForwardRequest(operands, options))[2]

    assert torch.equal(run(7), run(torch.tensor([7])))
    assert not torch.equal(run(7), run(8))
    torch.manual_seed(0)
    drawn = run(None)
    torch.manual_seed(0)
    assert torch.equal(run(None), drawn)


# Gradients through the operators and of the eager path.


def gradients_of(function, tensors: dict, **options) -> list[torch.Tensor]:
    leaves = {name: each.detach().clone().requires_grad_() for name, each in tensors.items()}
    outputs = [each for each in function(**leaves, **options) if each is not None]
    upstream = [random(*each.shape, dtype=each.dtype, seed=9 + n) for n, each in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, tuple(leaves.values()), upstream)]


def assert_equal(got: list, expected: list) -> None:
    for one, right in zip(got, expected, strict=True):
        assert one.dtype == right.dtype and torch.equal(one, right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", ["input", "input weight", "input weight bias residual"])
@by_norm
def test_gradients_through_the_operator_are_the_eager_ones(centered, names, dtype):
    values = {"input": random(3, 4, 5, dtype=dtype), "weight": WEIGHT, "bias": BIAS}
    values["residual"] = ROWS.to(dtype)
    tensors = {name: values[name] for name in names.split()}
    eager = cupynorm.layer_norm if centered else cupynorm.rms_norm

    def by_operator(**given):
        options = ForwardOptions(centered, (5,), EPS)
        y, _, _, added = operators.norm_forward(ForwardRequest(ForwardOperands(**given), options))
        return (y, added) if "residual" in given else (y,)

    def by_eager(input, **given):
        made = eager(input, 5, eps=EPS, return_residual="residual" in given, **given)
        return made if isinstance(made, tuple) else (made,)

    assert_equal(gradients_of(by_operator, tensors), gradients_of(by_eager, tensors))


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.5, "dropout_seed": 3},
        {"residual_dtype": "float32"},
        {"round_x_hat": True},
        {"row_scale": random(3, 4, seed=6)},
    ],
    ids=lambda options: next(iter(options)),
)
@by_norm
def test_gradients_through_the_fused_operator_are_the_eager_ones(centered, options):
    tensors = {
        "input": random(3, 4, 5, dtype=torch.bfloat16),
        "weight": WEIGHT,
        "bias": BIAS,
        "residual": ROWS.bfloat16(),
        "weight1": BIAS,
        "bias1": WEIGHT,
    }
    eager = cupynorm.layer_norm if centered else cupynorm.rms_norm

    def by_operator(**given):
        constants = {name: options[name] for name in options if name in ForwardOperands._fields}
        rest = {name: options[name] for name in options if name not in constants}
        request = ForwardRequest(
            ForwardOperands(**given, **constants), ForwardOptions(centered, (5,), EPS, **rest)
        )
        return fused_operators.fused_norm_forward(request)

    def by_eager(input, **given):
        return eager(input, 5, eps=EPS, return_residual=True, **given, **options)

    assert_equal(gradients_of(by_operator, tensors), gradients_of(by_eager, tensors))


@by_norm
def test_a_memory_efficient_call_saves_y_and_not_the_input(centered):
    x = random(3, 4, 5).requires_grad_()
    saved = []
    given = forward_arguments(centered, memory_efficient=True, weight=WEIGHT) | {"input": x}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: saved.append(each) or each, lambda each: each
    ):
        y = call("fused_norm_forward", **given)[0]
    rows = [each for each in saved if each.shape == x.shape]
    assert len(rows) == 1 and rows[0].data_ptr() == y.data_ptr()


@by_norm
def test_second_derivatives_through_the_operator_are_numerical_ones(centered):
    leaves = [random(2, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in (0, 1)]
    leaves.append(random(5, dtype=torch.float64).requires_grad_())

    def function(x, residual, weight):
        request = ForwardOperands(x, weight, None, residual)
        options = ForwardOptions(centered, (5,), EPS)
        y, _, _, added = operators.norm_forward(ForwardRequest(request, options))
        return y, added

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_statistics_take_no_gradient():
    given = forward_arguments(residual=ROWS) | {"input": random(3, 4, 5).requires_grad_()}
    y, mean, rstd, added = call("norm_forward", **given)
    assert y.requires_grad and added.requires_grad
    assert not mean.requires_grad and not rstd.requires_grad


@pytest.mark.parametrize("name", ["fused_norm_backward", "recomputing_norm_backward"])
def test_second_derivatives_of_other_operators_are_refused(name):
    given = backward_arguments(weight=WEIGHT, wanted=[True] * (6 if name[0] == "f" else 3))
    if name == "fused_norm_backward":
        given |= {"centered": True, "wanted": [True] * 4 + [False] * 2}
    given["dy"] = given["dy"].requires_grad_()
    dx = call(name, **given)[0]
    with pytest.raises(NotImplementedError, match="it has first derivatives only"):
        dx.sum().backward()
