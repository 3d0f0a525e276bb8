"""Arguments of a wrong type are refused where users enter, by a sentence that names them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import cupynorm
from cupynorm.dtypes import DTYPES

torch = pytest.importorskip("torch")


def plan(**options):
    return cupynorm.plan(1024, **{"device": "H200"} | options)


def quantized(**arrays):
    data, scale_inv = torch.zeros((4, 128), dtype=torch.uint8), torch.ones((4, 1))
    return cupynorm.types.QuantizedTensor(
        **{"data": data, "scale_inv": scale_inv, "dtype": "float32"} | arrays
    )


def autocast(**options):
    with cupynorm.fp8_autocast(**options):
        pass


def check(**options):
    return cupynorm.check(shapes=[(2, 8)], **options)


def device(**fields):
    return replace(cupynorm.DEVICES["A100"], **fields)


layer = partial(cupynorm.LayerNormLinear, 8, 8, device="cpu")
functor = partial(cupynorm.functor, "Twice", "y = 2 * y;")


@pytest.mark.parametrize(
    ("function", "name", "values"),
    (
        (autocast, "group", (3, "world", torch.ones(3))),
        (plan, "strategy", (["warp"], 3)),
        (plan, "statistics", (["welford"],)),
        (plan, "dtype", (["float32"], 3, None)),
        (plan, "weight_dtype", (["float32"],)),
        (plan, "out_dtype", (["float32"],)),
        (plan, "device", (["H200"], 3)),
        (plan, "residual", ("no", [1.5], 2.5)),
        (plan, "zero_centered_weight", ([1.5], "no")),
        (device, "num_sms", ("many", 2.5, 0, True)),
        (device, "registers_per_sm", (None, -1)),
        (device, "clusters", (3, ((2.5, 1),))),
        (quantized, "data", (3, [1.5])),
        (quantized, "scale_inv", (3, "one")),
        (functor, "arrays", (3, object())),
        (functor, "numbers", (2.5, True)),
        (functor, "reference", (3, "y")),
        (layer, "init_method", (3, "normal")),
        (layer, "get_rng_state_tracker", (3, object())),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_of_a_wrong_type_are_refused(function, name, values):
    for value in values:
        with pytest.raises((TypeError, ValueError), match=rf"^{name} is .*; expected ") as caught:
            function(**{name: value})
        assert "cupynorm" in str(caught.traceback[-1].path), value


def test_the_functions_above_accept_their_defaults():
    for function in (autocast, plan, device, quantized, functor, check, layer):
        function()
    autocast(group=torch.distributed.GroupMember.NON_GROUP_MEMBER)  # of a rank outside of it
    plan(residual=True, zero_centered_weight=False, dtype="float16")
    assert set(DTYPES) == {"float16", "bfloat16", "float32", "float64"}
