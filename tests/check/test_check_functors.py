"""The check of a functor against its float64 reference: the shipped ones, and wrong ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupynorm import functors
from cupynorm.check.functors import check_functor


def in_halves(num_rows, num_cols):
    return np.tile(np.linspace(-1, 1, num_rows * num_cols // 2).reshape(num_rows, -1), 2)


def in_pairs(num_rows, num_cols):
    angles = np.linspace(-1, 1, num_rows * num_cols // 2).reshape(num_rows, -1)
    return np.repeat(angles, 2, axis=1)


SHIPPED = {
    "silu_gate": ("store", {}),
    "bias_gelu": ("load", {"bias": "cols"}),
    "ada_ln": ("store", {"scale": "rows", "shift": "cols"}),
    "rotary": ("store", {"cos": in_halves, "sin": in_halves}),
    "rotary_interleaved": ("store", {"cos": in_pairs, "sin": in_pairs}),
    "layer_scale": ("load", {"scale": "cols"}),
}


def test_every_shipped_functor_is_checked():
    found = {
        name
        for name in vars(functors)
        if isinstance(getattr(functors, name), type(functors.ada_ln))
    }
    assert found == set(SHIPPED)
    assert all(getattr(functors, name).reference for name in found)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_shipped_functors(name, on):
    role, arrays = SHIPPED[name]
    norm = "layer_norm" if len(name) % 2 else "rms_norm"
    result = check_functor(
        getattr(functors, name),
        role,
        arrays=arrays,
        norm=norm,
        shapes=[(3, 40)],
        dtypes=("float32",),
        on=on,
    )
    assert result.ok, f"\n{result}"
    tensors = {found.tensor for found in result.findings}
    assert {"y", "dx", *(f"d{array}" for array in getattr(functors, name).arrays)} <= tensors


def off(functor, **options):
    result = check_functor(functor, dtypes=("float32",), shapes=[(3, 8)], on="cpu", **options)
    return {found.tensor for found in result.findings if not found.ok}


def test_wrong_lines_are_found():
    gate = functors.silu_gate
    assert off(gate) == set()
    assert off(replace(gate, lines="y = y * gate / (C(1.0001) + exp(-gate));")) == {"y"}
    assert off(
        replace(gate, backward=gate.backward.replace("gate * (C", "C(1.001) * gate * (C"))
    ) == {"dgate"}
    assert "dx" in off(replace(gate, backward=gate.backward.replace("gate * sigmoid;", "gate;")))


def test_refusals():
    with pytest.raises(ValueError, match="silu_gate has no reference; expected a Python function"):
        check_functor(replace(functors.silu_gate, reference=None))
    with pytest.raises(ValueError, match="got role 'store', arrays gates and numbers none"):
        check_functor(functors.silu_gate, arrays={"gates": "full"})
    with pytest.raises(ValueError, match="of kind 'columns'; expected one of full, cols"):
        check_functor(functors.silu_gate, arrays={"gate": "columns"}, on="cpu")
