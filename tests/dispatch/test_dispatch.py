"""dispatch.py: which strategy and tile a problem gets; needs no GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from plan_problems import CUDA_SRC, DIRECTIONS, GPUS, TABLE, problem_of, slice_of, without_file

from cupynorm.dispatch.devices import DEVICES, Device, device_like
from cupynorm.dispatch.dispatch import choose, make_plan, widest
from cupynorm.dispatch.instances import Choice
from cupynorm.dispatch.problem import Layout, Problem
from cupynorm.dispatch.strategies import STATISTICS, STRATEGIES
from cupynorm.dtypes import DTYPES
from cupynorm.plans import plan


def problem_to_8_bits(num_cols: int, scaling: str, dtype: str = "bfloat16", **changes) -> Problem:
    return problem_of(num_cols, dtype, y="float8_e4m3fn", scaling=scaling, **changes)


def chosen_to_8_bits(num_cols: int, scaling: str, dtype: str = "bfloat16", **changes) -> Choice:
    return choose(problem_to_8_bits(num_cols, scaling, dtype, **changes), DEVICES["H200"])


# Rows and the blocks that they get, both as multiples of the resident blocks.
BLOCKS_TO_8_BITS = {
    (4096, "given"): {1.9: 1, 3: 3, 12: 12, 20: 12, 80: 20},
    (4096, "tensor"): {1.9: 1, 3: 1, 12: 1, 20: 5, 80: 20},
    (1536, "row"): {1.9: 1, 3: 3, 12: 4, 20: 5, 80: 20},
    (1536, "block"): {1.9: 1, 3: 3, 12: 4, 20: 5, 80: 20},
    # Blocks that fetch the next row early: the first get 36 of 40 rows, others two each.
    (4096, "row"): {1.9: 1, 3: 1, 40: 3},
    (4096, "block"): {1.9: 1, 3: 1, 40: 3},
}


@pytest.mark.parametrize("num_cols, scaling", BLOCKS_TO_8_BITS)
def test_blocks_to_8_bits_work_on_several_groups_of_rows(num_cols, scaling):
    """Few rows get a block each; of many rows each block works on four."""
    resident = 132 * chosen_to_8_bits(num_cols, scaling).resident
    places = {1 / resident: 1 / resident, **BLOCKS_TO_8_BITS[num_cols, scaling]}
    for rows, blocks in places.items():
        launches = plan(
            num_cols,
            round(rows * resident),
            device="H200",
            out_dtype="float8_e4m3fn",
            scale=scaling,
        ).launches
        assert {launch.grid_size for launch in launches} == {round(blocks * resident)}, rows
    plain = plan(num_cols, 40 * resident, device="H200").launches[0]
    assert plain.grid_size * plain.tile.rows_per_block == 40 * resident


def test_blocks_that_fetch_the_next_row_early_stay_for_nine_tenths_of_the_rows():
    """Not with wide parameters."""
    for dtype, shares in (("bfloat16", (264, 340)), ("float32", (0, 0))):
        own = {"weight_dtype": dtype, "bias_dtype": dtype, "out_dtype": "float8_e4m3fn"}
        (launch,) = plan(16384, 10**5, device="H200", scale="row", **own).launches
        assert (launch.num_first, launch.rows_of_first) == shares


def test_backward_plan_with_a_residual_has_dsum():
    alone, added = (
        plan(512, 64, direction="backward", device="H200", residual=residual)
        for residual in (False, True)
    )
    assert (alone.problem.dsum, added.problem.dsum) == (None, "bfloat16")
    assert added.bytes_needed == alone.bytes_needed + 64 * 512 * 2 and "dsum bfloat16" in str(added)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", GPUS)
def test_widest_row_of_a_strategy(device, dtype, direction):
    """At widest - pack, widest and widest + pack columns, in whole packs and single elements.

    Up to its widest row a strategy is chosen, or a later one that is faster; beyond, a later one.
    """
    gpu = without_file(device)
    present = [
        name for name in TABLE if gpu.compute_capability >= STRATEGIES[name].first_capability
    ]
    for limit in (16, 1):
        for strategy, following in zip(present, present[1:]):
            problem = replace(
                problem_of(1 << 16, dtype, direction), layout=Layout(limit, contiguous=True)
            )
            step = problem.widest_pack
            edge = widest(strategy, problem, gpu)
            assert edge > step and edge % step == 0
            for num_cols in (edge - step, edge):
                assert (
                    choose(replace(problem, num_cols=num_cols), gpu, strategy).strategy == strategy
                )
                chosen = choose(replace(problem, num_cols=num_cols), gpu)
                earlier = present[: present.index(chosen.strategy)]
                assert chosen.strategy == strategy or (
                    chosen.tile.stages and strategy in earlier
                ), (num_cols, limit)
                assert chosen.reason.startswith(
                    "the first strategy that is wide enough, and no later one is faster"
                )
            chosen = choose(replace(problem, num_cols=edge + step), gpu)
            assert present.index(chosen.strategy) >= present.index(following)
            with pytest.raises(ValueError, match=rf"{strategy}.*its widest row has {edge}$"):
                choose(replace(problem, num_cols=edge + step), gpu, strategy)
    # Any row at all.
    assert choose(problem_of(1 << 33, dtype, direction), gpu).strategy == "uncached"


@pytest.mark.slow
@pytest.mark.parametrize("norm", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("device", GPUS)
def test_every_plan_covers_its_row_and_fits_its_device(device, direction, norm):
    gpu = DEVICES[device]
    widths = (1, 2, 3, 7, 31, 33, 512, 768, 1000, 1023, 1024, 1025, 4100, 8191, 8192, 30001)
    widths += (65536, 262144, 3000000)
    dtypes = (("float16", None, "same"), ("bfloat16", "float32", "float32"))
    dtypes += (("float32", "bfloat16", "same"), ("float64", "bfloat16", None))
    options = {"norm": norm, "direction": direction, "device": device}
    for (dtype, out, weight), num_cols, num_rows in itertools.product(
        dtypes, widths, (2000, 2**30)
    ):
        named = {"out_dtype": out, "weight_dtype": weight, "bias_dtype": weight}
        made = plan(num_cols, num_rows, dtype, **named, **options)
        tile, in_registers = made.tile, made.tile.packs_per_thread > 0
        assert num_cols % tile.pack_size == 0 and tile.pack_size <= made.problem.layout.pack_limit
        if in_registers:  # all columns have a place, and no pack is idle in every thread
            least = tile.cols - tile.pack_size * tile.threads_per_row
            assert tile.cols >= slice_of(num_cols, tile) > least
            assert tile.exact == (tile.cols * tile.cluster_size == num_cols)
            assert tile.stages != 1 or (direction, tile.cluster_size) == ("backward", 16)
            assert tile.stages == 0 or made.strategy in ("block", "cluster") or tile.bundle
        else:
            assert made.strategy in ("block", "cluster", "uncached")
            assert (tile.exact, tile.stages) == (0, 0)
        for launch in made.launches:
            assert launch.block_size == launch.tile.threads_per_row * launch.tile.rows_per_block
            assert launch.block_size % 32 == 0 and 32 <= launch.block_size <= 1024
            is_warp = launch.kernel.source == "forward_warp.cu"
            assert is_warp or 0 < launch.smem_bytes <= gpu.smem_per_block
            assert launch.tile.blocks_per_sm * launch.block_size <= gpu.threads_per_sm
            assert 1 <= launch.grid_size < 2**31 and launch.grid_size % launch.cluster_size == 0
            assert launch.tile.cpp in launch.kernel.name_expression
        # Asking for the tile that was chosen makes the same kernels.
        again = make_plan(made.problem, gpu, num_rows, strategy=made.strategy, tile=tile)
        assert again.launches == made.launches and again.reason == "as asked for"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_lanes_of_a_row_of_96_bytes(direction, dtype):
    """Six packs of 16 bytes: the lanes of a row load at least half of it together."""
    device = without_file("H200")
    made = plan(96 // DTYPES[dtype].itemsize, 2**20, dtype, direction=direction, device=device)
    assert (made.strategy, made.tile.threads_per_row) == ("warp", 4)
    assert made.tile.pack_size * DTYPES[dtype].itemsize == 16


def test_plan_takes_a_device_object():
    small = Device("small", 75, 10, 65536, 65536, 1024)
    assert plan(768, 100000, device=small).device is small
    assert plan(40000, 100000, "float32", device=small).strategy == "uncached"
    listed = replace(
        DEVICES["H200"], clusters=[[size, count] for size, count in ((2, 66), (4, 30))]
    )
    assert plan(8, device=listed).device == replace(listed, clusters=((2, 66), (4, 30)))
    lacking = replace(DEVICES["H200"], clusters=())
    assert plan(1 << 20, 8, device=lacking).strategy == "uncached"


def test_statistics_do_not_change_a_backward():
    """It is given those of forward."""
    options = {"device": "H200", "direction": "backward"}
    expected = plan(1 << 21, 8, **options)
    assert expected.strategy == "uncached"
    assert plan(1 << 21, 8, statistics="two_pass", **options).launches == expected.launches


def test_device_like_finds_known_devices_by_name():
    """A known GPU has measured figures. A part of one, with fewer multiprocessors, has not."""
    whole = device_like("NVIDIA H200", 90, 132, 232448, 233472, 2048)
    assert whole is DEVICES["H200"]
    part = device_like("NVIDIA H200 MIG 1g.18gb", 90, 16, 232448, 233472, 2048)
    assert part.num_sms == 16 and max(count * size for size, count in part.clusters) <= 16
    unknown = device_like("NVIDIA T4", 75, 40, 65536, 65536, 1024)
    assert (unknown.compute_capability, unknown.smem_per_block, unknown.clusters) == (75, 65536, ())
    future = device_like("NVIDIA X", 130, 200, 300000, 300001, 2048)
    assert (future.compute_capability, future.smem_per_block, future.num_sms) == (130, 300000, 200)
    assert all(
        count * size <= device.num_sms
        for device in DEVICES.values()
        for size, count in device.clusters
    )


def test_each_strategy_has_two_files_with_one_kernel_each():
    """Strategy <name> has forward_<name>.cu and backward_<name>.cu, each with one kernel."""
    assert TABLE == ("warp", "block", "cluster", "uncached")
    assert [strategy.name for strategy in STRATEGIES.values()] == list(TABLE)
    files = {path.stem for path in CUDA_SRC.glob("*.cu")}
    of_none = {"apply_functor", "backward_few", "backward_parameters", "fold_weight"}
    of_none |= {"norm_linear", "norm_linear_few", "quantize", "reduce_matrix", "update_scales"}
    assert files == {f"{direction}_{name}" for direction in DIRECTIONS for name in TABLE} | of_none
    for path in CUDA_SRC.glob("*.cu"):
        text = path.read_text()
        kernels = re.findall(r"__global__ void\s[^{;]*?\b(\w+)\(\s*const ", text)
        assert kernels == [path.stem] and text.count("__global__") == 1
    for direction in DIRECTIONS:
        for name in TABLE:
            launch = plan(512, 8, direction=direction, device="H200", strategy=name).launches[0]
            assert launch.kernel.source == f"{direction}_{name}.cu"
            assert launch.kernel.name_expression.startswith(f"{direction}_{name}<")
    declared = re.search(
        r"enum class Statistics \{ (.*) \}", next(CUDA_SRC.rglob("tile.cuh")).read_text()
    )[1]
    assert tuple(declared.split(", ")) == STATISTICS
