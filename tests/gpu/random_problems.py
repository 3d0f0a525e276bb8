"""Random problems, whose kernels test_random_spills.py compiles. A seed always draws the same."""

from __future__ import annotations

import random

from cupynorm.dispatch.problem import SCALINGS, Layout, Problem
from cupynorm.dtypes import FLOAT8S

E4M3, E5M2 = FLOAT8S
_DTYPES = ("bfloat16", "float16", "float32")
# Widths of 4 to 262,144 columns, as many in each octave. A third of them is odd.
_OCTAVES, _STEPS = (2, 18), (1, 1, 2, 8, 8, 64)


def random_problem(generator: random.Random) -> Problem:
    """A problem with nothing fused, or with one option that takes registers."""
    step, num_cols = generator.choice(_STEPS), int(2 ** generator.uniform(*_OCTAVES))
    num_cols = num_cols | 1 if step == 1 else max(step, num_cols // step * step)
    dtype, centered = generator.choice(_DTYPES), generator.random() < 0.5
    weight = generator.choice([dtype, dtype, "float32", None])
    fields = {"x": dtype, "weight": weight, "bias": weight if centered else None}
    is_forward = generator.random() < 0.6
    fields |= (_forward if is_forward else _backward)(generator, fields)
    return Problem(
        direction="forward" if is_forward else "backward",
        centered=centered,
        num_cols=num_cols,
        layout=Layout.of_new_arrays(num_cols),
        zero_centered=weight is not None and generator.random() < 0.2,
        **fields,
    )


def _forward(generator: random.Random, fields: dict) -> dict:
    dtype = fields["x"]
    options = [
        {},
        {"residual": True},
        {"residual": True},
        {"input": dtype, "residual_dtype": generator.choice([dtype, "float32"])},
        {"y": generator.choice([E4M3, E5M2]), "scaling": generator.choice(SCALINGS)},
        {"y": E4M3, "scaling": generator.choice(SCALINGS), "residual": True},
    ]
    chosen = generator.choice(options)
    return {"y": dtype, "x": chosen.get("residual_dtype", dtype)} | chosen


def _backward(generator: random.Random, fields: dict) -> dict:
    dtype, weight, bias = fields["x"], fields["weight"], fields["bias"]
    named = {"dy": dtype, "dx": dtype, "dweight": weight, "dbias": bias, "bias": None}
    options = [{}, {"dsum": dtype}, {"dsum": dtype}, {"recomputed": dtype, "bias": bias}]
    return named | generator.choice(options)
