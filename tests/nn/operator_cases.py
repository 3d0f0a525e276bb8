"""The registered operators by name, and arguments that change a shape or dtype of a result."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cupynorm.nn import fused_operators, operators  # noqa: E402, F401  (registers them)

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
