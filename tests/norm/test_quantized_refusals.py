"""Options of 8-bit outputs that a call refuses, and transforms and graphs that it does not join."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import cupynorm
from cupynorm.dtypes import FLOAT8S

torch = pytest.importorskip("torch")
from float8_bytes import random  # noqa: E402  (imports torch)

E4M3, _ = FLOAT8S


def test_a_transform_of_torch_func_is_refused():
    with pytest.raises(
        NotImplementedError,
        match="an 8-bit out_dtype was given to a call that torch traces or transforms",
    ):
        torch.func.vmap(lambda x: cupynorm.layer_norm(x, 40, out_dtype=E4M3).dequantize())(
            random(3, 4, 40)
        )


ONE, GRADIENT = torch.ones(1), torch.ones(1, requires_grad=True)
OF_NUMPY, OF_FLOAT64 = np.ones(1, np.float32), torch.ones(1).double()
OTHERS = "expected an out_dtype of float8_e4m3fn or float8_e5m2"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    (
        (
            {"scale": "row", "out_dtype": None},
            TypeError,
            f"scale given with out_dtype None; {OTHERS}",
        ),
        (
            {"out_dtype": "float8_e4m3fnuz"},
            TypeError,
            "out_dtype is 'float8_e4m3fnuz'; expected one",
        ),
        (
            {"scale": "column"},
            ValueError,
            "scale is 'column'; expected 'tensor', 'row', 'block'",
        ),
        ({"scale": 2.0}, TypeError, "scale is 2.0; expected an array of one float32"),
        (
            {"scale": torch.ones(2)},
            TypeError,
            r"scale has shape \(2,\) and dtype float32; expected one",
        ),
        ({"amax": OF_FLOAT64}, TypeError, r"amax has shape \(1,\) and dtype float64; expected one"),
        ({"scale": OF_NUMPY}, ValueError, "scale is a NumPy array, input is a torch tensor on cpu"),
        (
            {"scale": GRADIENT},
            ValueError,
            r"scale requires a gradient; .* expected scale.detach\(\)",
        ),
        ({"amax": GRADIENT}, ValueError, "amax requires a gradient"),
        ({"scale": ONE, "amax": ONE[:]}, ValueError, "amax is scale's own memory"),
        ({"scale": "row", "amax": ONE}, ValueError, "amax was given with scale 'row'"),
        ({"scale": "mx"}, ValueError, "scale='mx' was removed: write scale='block'"),
        ({"scale": "row", "transpose": True}, ValueError, "transpose was given with scale 'row'"),
        ({"power_of_two": True}, ValueError, "power_of_two was given with a scale"),
        ({"transpose": 1}, TypeError, "transpose is 1; expected True or False"),
        (
            {"out": torch.ones(2, 8)},
            ValueError,
            f"out was given with out_dtype {E4M3}; expected out",
        ),
    ),
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        cupynorm.layer_norm(torch.ones(2, 8), 8, **{"out_dtype": E4M3, **options})


def test_a_constant_that_requires_a_gradient_is_refused_in_each_call(kernels):
    """Also after a call with a constant of the same layout that was taken."""
    x, constant = torch.ones(2, 64), torch.ones(1, requires_grad=True)
    for name in ("scale", "amax"):
        for value in (constant.detach(), constant, constant.detach()):
            call = functools.partial(cupynorm.layer_norm, x, 64, out_dtype=E4M3, **{name: value})
            if value is constant:
                with pytest.raises(ValueError, match=f"{name} requires a gradient"):
                    call()
            else:
                assert call().shape == (2, 64)
    scale = torch.ones(1)
    cupynorm.layer_norm(x, 64, out_dtype=E4M3, scale=scale, amax=torch.zeros(1))
    with pytest.raises(ValueError, match="amax is scale's own memory"):
        cupynorm.layer_norm(x, 64, out_dtype=E4M3, scale=scale, amax=scale)


@pytest.mark.parametrize("options", [{"scale": "row"}, {"scale": "tensor"}, {"scale": "block"}, {}])
def test_compiled_bytes_are_the_eager_ones(options):
    x = random(4, 160)

    @torch.compile(backend="eager", fullgraph=True)
    def quantise(x):
        y = cupynorm.layer_norm(x * 2, 160, out_dtype=E4M3, **options)
        return y.data, y.scale_inv, y.dequantize() + 1

    made = quantise(x)
    eager = cupynorm.layer_norm(x * 2, 160, out_dtype=E4M3, **options)
    differ = (made[0].view(torch.uint8) != eager.data.view(torch.uint8)).sum()
    assert differ <= 2  # a value half way between two may be rounded either way
    torch.testing.assert_close(made[1], eager.scale_inv, rtol=2**-20, atol=0)
    torch.testing.assert_close(made[2], eager.dequantize() + 1, rtol=2**-3, atol=2**-9)
