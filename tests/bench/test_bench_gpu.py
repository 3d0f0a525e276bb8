"""bench: small runs on a GPU."""

import numpy as np
import pytest
from bench_cases import CAUGHT, OPTIONS, SCALES, check_that_wrong_outputs_are_found
from cupynorm.bench.tensors import bits, tensors_of

from cupynorm.bench import measure
from cupynorm.bench.cells import Cell, cells
from cupynorm.bench.report import BenchResult
from cupynorm.check.cases import NORMS
from cupynorm.dtypes import decode


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_small_run(norm, dtype):
    todo = cells([norm], [dtype], ["forward", "backward", "both"], [64, 4096], 2**20)
    measured = measure.bench(todo, runs=3, seed=5, peers=["torch", "tutorial"])
    assert measured.ok, str(measured)
    assert len(measured.measurements) == 6 and measured.environment["gpu"]
    for each in measured.measurements:
        assert set(each.samples) >= {"copy", "cupynorm"} and "cupynorm" not in each.faults, (
            each.faults
        )
        assert "torch" not in each.faults or "torch is off" in each.faults["torch"], each.faults
        assert all(len(samples) == 3 and min(samples) > 0 for samples in each.samples.values())
        assert all(0 < error <= 1 for name, error in each.errors.items() if name == "cupynorm")
        # A kernel that is several times faster than a copy was not measured right.
        assert each.share("cupynorm") < 5
    assert BenchResult.from_json(measured.to_json()).measurements == measured.measurements


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: next(iter(options)))
def test_a_small_run_with_other_tensors(options):
    options = {name: "float32" if value == "float64" else value for name, value in options.items()}
    todo = cells(NORMS, ["bfloat16"], ["forward", "backward", "both"], [96], 2**14, **options)
    measured = measure.bench(todo, runs=1, seed=5, peers=[])
    assert measured.ok and len(measured.measurements) == 6, str(measured)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_small_run_of_8_bit_outputs(dtype, out_dtype):
    todo = cells(NORMS, [dtype], ["forward"], [96, 4096], 2**18, scales=SCALES, out_dtype=out_dtype)
    measured = measure.bench(todo, runs=1, seed=5, peers=["torch.compile"])
    assert measured.ok and len(measured.measurements) == 16, str(measured)
    for each in measured.measurements:
        assert 0.5 < each.errors["cupynorm"] <= 1 and not each.faults, each.faults
        assert each.share("cupynorm") < 5


@pytest.mark.gpu
def test_a_small_run_of_tiles():
    """Both compile in other processes first; a tile that dispatch does not choose is right."""
    tile = "block: pack_size 8, threads_per_row 128, packs_per_thread 4, exact 1"
    todo = cells(["layer_norm"], ["bfloat16"], ["forward", "backward"], [4096], 2**18)
    todo += cells(
        ["layer_norm"],
        ["bfloat16"],
        ["forward"],
        [4096],
        2**18,
        scales=SCALES,
        out_dtype="float8_e4m3fn",
    )
    measured = measure.bench(todo, runs=2, seed=5, peers=[], tiles=[tile], jobs=2)
    assert measured.ok and len(measured.measurements) == 6, str(measured)
    for each in measured.measurements:
        assert 0 < each.errors[tile] <= 1 and not each.faults and each.share(tile) < 5, str(
            measured
        )


@pytest.mark.gpu
def test_compiling_ahead():
    measured = measure.bench(cells(cols=[72], elements=2**14), runs=1, peers=[], jobs=2)
    assert measured.ok and len(measured.measurements) == 2


@pytest.mark.gpu
def test_random_data_is_normal_and_fresh():
    cell = Cell("layer_norm", "forward", "bfloat16", 1024, 1024)
    x, again, other = (
        decode(bits(tensors_of(cell, seed)[0].x).get(), "bfloat16") for seed in (1, 1, 5)
    )
    assert np.array_equal(x, again) and not np.array_equal(x, other)
    assert abs(x.mean() - 0.5) < 0.02 and abs(x.std() - 2) < 0.02 and np.abs(x).max() > 8
    assert abs(((x - 0.5) ** 3).mean()) < 0.2 and abs(((x - 0.5) ** 4).mean() / 16 - 3) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("direction,name,extra", CAUGHT)
def test_a_wrong_or_unwritten_output_is_found(direction, name, extra):
    check_that_wrong_outputs_are_found(
        Cell("layer_norm", direction, "float32", 64, 512, residual=extra is not None), name
    )
