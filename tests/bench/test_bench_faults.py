"""Wrong outputs that the benchmark finds: of values, scales, bytes and amaxes."""

import numpy as np
import numpy_as_cupy
import pytest
from bench_cases import CAUGHT, SCALES, check_that_wrong_outputs_are_found
from cupynorm.bench.tensors import bits, tensors_of

from cupynorm.bench import runners
from cupynorm.bench.cells import Cell
from cupynorm.bench.truth import Truth, verify


@pytest.mark.parametrize("library", ["cupynorm", "torch.compile"])
def test_a_wrong_amax_is_found(with_torch_compile, library):
    """Twice the scale, half of it, that of an earlier call, and none."""
    cell = Cell(
        "layer_norm",
        "forward",
        "float32",
        8,
        320,
        out_dtype="float8_e5m2",
        scale="given",
        amax=True,
    )
    tensors, _ = tensors_of(cell, 3)
    truth = Truth(cell, tensors, 0)
    right = runners.prepare(library, cell, tensors)
    assert verify(right, truth, rounded_mean=False)[1] is None
    tensors.amax[...] = 1e6
    assert (
        verify(right, truth, rounded_mean=False)[1] is None
    )  # what was there before a call is gone

    def spoilt(factor):
        def outputs(result):
            made = {
                name: numpy_as_cupy.asarray(bits(each))
                for name, each in right.outputs(result).items()
            }
            return made | {"amax": made["amax"] * np.float32(factor)}

        return verify(right._replace(outputs=outputs), truth, rounded_mean=False)[1]

    assert spoilt(1) is None
    assert all(spoilt(factor).startswith("amax is") for factor in (2, 0.5, 0))


@pytest.mark.parametrize("library", ["cupynorm", "torch.compile"])
@pytest.mark.parametrize("scale", SCALES)
def test_wrong_8_bit_outputs_are_found(with_torch_compile, scale, library):
    """Wrong scales, wrong values, values that are not written, and missing scales are found."""
    cell = Cell("rms_norm", "forward", "float32", 8, 320, out_dtype="float8_e4m3fn", scale=scale)
    tensors, _ = tensors_of(cell, 3)
    truth = Truth(cell, tensors, 0)
    right = runners.prepare(library, cell, tensors)
    error, wrong = verify(right, truth, rounded_mean=False)
    assert wrong is None and 0.5 < error <= 1

    def spoilt(spoil):
        def outputs(result):
            made = {
                name: numpy_as_cupy.asarray(bits(each))
                for name, each in right.outputs(result).items()
            }
            spoil(made)
            return made

        return verify(right._replace(outputs=outputs), truth, rounded_mean=False)

    def halved(made):
        """The product of values and scale is right, but the range of the format is not used."""
        made["y"][...] -= np.uint8(8) * (
            (made["y"] & 0x7F) > 15
        )  # an exponent less, where there is one
        made["scale_inv"] *= 2

    def other_scale(made):
        made["scale_inv"][-1] *= 1.25

    def other_byte(made):
        """The largest of each row."""
        for row in made["y"]:
            row[np.argmax(row & 0x7F)] -= 8

    assert "scale_inv is" in spoilt(halved)[1]
    assert spoilt(other_scale)[1] is not None
    assert spoilt(other_byte)[1] is not None
    assert "y holds NaN" in spoilt(lambda made: made["y"][3, 7:8].fill(0xFF))[1]
    assert (
        "scale_inv holds NaN" in spoilt(lambda made: made["scale_inv"].view(np.uint8).fill(0xFF))[1]
    )
    if scale not in ("given", "tensor", "row"):

        def fewer(made):
            made["scale_inv"] = numpy_as_cupy.asarray(
                np.ascontiguousarray(made["scale_inv"][:, :-1])
            )

        assert "scales of a row; expected" in spoilt(fewer)[1]


@pytest.mark.parametrize("direction,name,extra", CAUGHT)
def test_a_wrong_output_is_found(on_numpy, direction, name, extra):
    check_that_wrong_outputs_are_found(
        Cell("layer_norm", direction, "float32", 64, 512, residual=extra is not None), name
    )
