"""Options of 8-bit outputs that a call refuses, and transforms and graphs that it does not join."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"dtype": "float8_e4m3fnuz"}, "dtype is 'float8_e4m3fnuz'; expected one of"),
        ({"dtype": "float16"}, "dtype is 'float16'; expected one of"),
        ({"scale": "column"}, "scale is 'column'; expected 'tensor', 'row', 'block'"),
        ({"scale": 2.0}, "scale is 2.0; expected an array of one float32"),
        ({"scale_inv": "row"}, "scale_inv is 'row'; expected an array of one float32"),
        ({"scale": "row", "scale_inv": ONE}, "scale and scale_inv were given"),
        ({"scale": "row", "amax": ONE}, "amax was given with a scale 'row'"),
        ({"scale": "row", "transpose": True}, "transpose was given with a scale 'row'"),
        ({"power_of_two": True}, "power_of_two was given with a scale that is given"),
        ({"upper_bound": 2.0}, "upper_bound was given with a scale that is given"),
        ({"scale": "row", "upper_bound": 0}, "upper_bound is 0; expected a positive"),
        ({"transpose": 2}, "transpose is 2; expected True or False"),
        ({"scale": "block", "group_size": 32}, "group_size is 32; expected 128 or 64"),
        ({"scale": "row", "group_size": 64}, "group_size was given with a scale 'row'"),
        ({"scale": "block", "layout": "col"}, "layout is 'col'; expected 'row', "),
        ({"layout": "column"}, "layout 'column' was given with a scale that is given"),
        ({"scale": "block", "layout": "packed"}, "expected power_of_two=True"),
        ({"dtype": "int8", "scale": "block"}, "int8 was given with a scale 'block'"),
    ),
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_when_they_are_made(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        cupynorm.Quantize(**{"dtype": E4M3, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"scale": torch.ones(2)}, r"scale has shape \(2,\) and dtype float32; expected"),
        ({"amax": OF_FLOAT64}, r"amax has shape \(1,\) and dtype float64; expected one"),
        ({"scale": OF_NUMPY}, "scale is a NumPy array, input is a torch tensor on cpu"),
        ({"scale_inv": OF_NUMPY}, "scale_inv is a NumPy array, input is a torch"),
        ({"scale": GRADIENT}, r"scale requires a gradient; .* scale.detach\(\)"),
        ({"amax": GRADIENT}, "amax requires a gradient"),
        ({"scale": ONE, "amax": ONE[:]}, "amax is scale's own memory"),
    ),
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_arrays_that_do_not_fit_are_refused(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        cupynorm.layer_norm(torch.ones(2, 8), 8, out_dtype=cupynorm.Quantize(E4M3, **options))


def test_a_constant_that_requires_a_gradient_is_refused_in_each_call(kernels):
    """Also after a call with a constant of the same layout that was taken."""
    x, constant = torch.ones(2, 64), torch.ones(1, requires_grad=True)

    def call(**constants):
        return cupynorm.layer_norm(x, 64, out_dtype=cupynorm.Quantize(E4M3, **constants))

    for name in ("scale", "amax"):
        for value in (constant.detach(), constant, constant.detach()):
            if value is constant:
                with pytest.raises(ValueError, match=f"{name} requires a gradient"):
                    call(**{name: value})
            else:
                assert call(**{name: value}).shape == (2, 64)
    scale = torch.ones(1)
    call(scale=scale, amax=torch.zeros(1))
    with pytest.raises(ValueError, match="amax is scale's own memory"):
        call(scale=scale, amax=scale)


OPTIONS = (
    {"scale": "row"},
    {"scale": "tensor", "upper_bound": 2.0},
    {"scale": "block", "group_size": 64, "layout": "column"},
    {"scale": "block", "power_of_two": True, "layout": "packed"},
    {"scale_inv": torch.tensor([0.013])},
    {"dtype": "int8", "scale": "row"},
    {},
)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
def test_compiled_bytes_are_the_eager_ones(options):
    x, how = random(4, 160), cupynorm.Quantize(**{"dtype": E4M3, **options})

    @torch.compile(backend="eager", fullgraph=True)
    def quantise(x):
        y = cupynorm.layer_norm(x * 2, 160, out_dtype=how)
        return y.data, y.scale_inv, y.dequantize() + 1

    made = quantise(x)
    eager = cupynorm.layer_norm(x * 2, 160, out_dtype=how)
    differ = (made[0].view(torch.uint8) != eager.data.view(torch.uint8)).sum()
    assert differ <= 2  # a value half way between two may be rounded either way
    torch.testing.assert_close(made[1], eager.scale_inv, rtol=2**-20, atol=0, check_stride=True)
    torch.testing.assert_close(made[2], eager.dequantize() + 1, rtol=2**-3, atol=2**-7)
