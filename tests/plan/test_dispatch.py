"""dispatch.py on literals: which strategy, tile, grid, shared memory and bytes a problem gets, with no GPU present."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from cupynorm.dtypes import DTYPES
from cupynorm.norm.plans import plan
from cupynorm.plan.devices import DEVICES, Device, device_like
from cupynorm.plan.dispatch import choose, make_plan, widest
from cupynorm.plan.grids import queued_bundles
from cupynorm.plan.instances import Choice
from cupynorm.plan.problem import PATHS, PATHS_OF_STRATEGY, Layout, Problem, Tile, ceil_div
from cupynorm.plan.strategies import STATISTICS, STRATEGIES
from cupynorm.plan.tile_model import fetches_ahead, reduce_bytes

CUDA_SRC = Path(__file__).parents[2] / "cuda_src"
TABLE = tuple(STRATEGIES)
GPUS = ("A100", "RTX 4090", "H100", "H200", "B200")
DIRECTIONS = ("forward", "backward")


def problem_of(
    num_cols: int, dtype: str = "bfloat16", direction: str = "forward", **changes: object
) -> Problem:
    tensors: dict = {"y": dtype, "weight": dtype, "bias": dtype}
    if direction == "backward":
        tensors = {"weight": dtype, "dy": dtype, "dx": dtype, "dweight": dtype, "dbias": dtype}
    tensors["layout"] = Layout.of(num_cols, [])
    return Problem(
        direction, num_cols=num_cols, x=dtype, **({"centered": True} | tensors | changes)
    )


def without_file(name: str) -> Device:
    """The device by another name, which no data file is for: the model decides."""
    return replace(DEVICES[name], name=f"{name} by the model")


# Which strategy.

# Tuned numbers, dispatch.py's choice, held here so that no change of them goes unseen.


def problem_to_8_bits(num_cols: int, scaling: str, dtype: str = "bfloat16", **changes) -> Problem:
    return problem_of(num_cols, dtype, y="float8_e4m3fn", scaling=scaling, **changes)


def chosen_to_8_bits(num_cols: int, scaling: str, dtype: str = "bfloat16", **changes) -> Choice:
    return choose(problem_to_8_bits(num_cols, scaling, dtype, **changes), DEVICES["H200"])


@pytest.mark.parametrize("scaling", ["row", "block", "mx"])
def test_blocks_that_fetch_the_next_row_early_stay_for_it(scaling):
    """By hand: 64 elements of y, 32 registers of the next row and 32 others are 128, of 512 threads of a multiprocessor. Its
    several blocks take nine tenths of the rows, and those that start after them two each."""
    for num_cols, centered, blocks in (
        (8192, True, 4),
        (16384, True, 2),
        (16384, False, 2),
        (32768, False, 1),
    ):
        choice = chosen_to_8_bits(num_cols, scaling, centered=centered)
        if choice.tile.path == "staged":
            continue
        assert (
            choice.tile.blocks_per_sm == blocks
            and choice.tile.block_size * blocks == 512
            and not choice.tile.stages
        )
        assert fetches_ahead(problem_to_8_bits(num_cols, scaling, centered=centered), choice.tile)
        norm = "layer_norm" if centered else "rms_norm"
        (launch,) = plan(
            num_cols, 10**5, device="H200", norm=norm, out_dtype="float8_e4m3fn", scale=scaling
        ).launches
        rows = {4: 170, 2: 340, 1: 0}[blocks]  # 90,000 / 528 and / 264
        later = (10**5 - 132 * blocks * rows) // 2 if rows else 0
        assert launch.grid_size == 132 * blocks + later
        assert (launch.num_first, launch.rows_of_first) == (
            (132 * blocks, rows) if rows else (0, 0)
        )
    wide = chosen_to_8_bits(16384, scaling, weight="float32", bias="float32")
    assert not fetches_ahead(
        problem_to_8_bits(16384, scaling, weight="float32", bias="float32"), wide.tile
    )


def test_a_tile_is_what_its_words_say():
    for num_cols, direction in itertools.product(
        (3, 100, 1024, 4095, 12288, 40960, 300000), ("forward", "backward")
    ):
        for device in ("H200", "A100"):
            tile = plan(num_cols, direction=direction, device=device).tile
            assert Tile.of(str(tile)) == tile
    assert Tile.of("pack_size 8,threads_per_row  32, stages 2") == Tile(8, 32, stages=2)


# Of a problem to 8 bits: rows and blocks, in places that blocks have at once.
BLOCKS_TO_8_BITS = {
    (4096, "given"): {1.9: 1, 3: 3, 12: 12, 20: 12, 80: 20},
    (4096, "tensor"): {1.9: 1, 3: 1, 12: 1, 20: 5, 80: 20},
    (1280, "block"): {1.9: 1, 3: 3, 12: 4, 20: 5, 80: 20},
    (1280, "row"): {1.9: 1, 3: 3, 12: 4, 20: 5, 80: 20},
    # Those that fetch the next row early: the first have 36 of 40, and others two each.
    (4096, "row"): {1.9: 1, 3: 1, 40: 3},
    (4096, "mx"): {1.9: 1, 3: 1, 40: 3},
}


@pytest.mark.parametrize("num_cols, scaling", BLOCKS_TO_8_BITS)
def test_blocks_of_rows_to_8_bits_take_several_groups_of_rows(num_cols, scaling):
    """Few rows are spread over all places and the queue; of many each block takes four."""
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


def test_a_plan_of_backward_with_a_residual_adds_what_reaches_its_sum():
    alone, added = (
        plan(512, 64, direction="backward", device="H200", residual=residual)
        for residual in (False, True)
    )
    assert (alone.problem.dsum, added.problem.dsum) == (None, "bfloat16")
    assert added.bytes_needed == alone.bytes_needed + 64 * 512 * 2 and "dsum bfloat16" in str(added)


def slice_of(num_cols: int, tile: Tile) -> int:
    """Columns of the first, widest slice: steps of 8 packs, divided among the blocks of a cluster."""
    if tile.cluster_size == 1:
        return num_cols
    return -(-num_cols // (8 * tile.pack_size * tile.cluster_size)) * 8 * tile.pack_size


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", GPUS)
def test_a_strategy_takes_rows_up_to_its_widest(device, dtype, direction):
    """At widest - pack, widest and widest + pack columns of each strategy; also with packs of a single element. Up to there it
    may give way to a later one, which is faster; beyond, one of those is chosen."""
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
                    "the first strategy that is wide enough and gives way to none"
                )
            chosen = choose(replace(problem, num_cols=edge + step), gpu)
            assert present.index(chosen.strategy) >= present.index(following)
            with pytest.raises(ValueError, match=rf"{strategy}.*its widest row has {edge}$"):
                choose(replace(problem, num_cols=edge + step), gpu, strategy)
    # Any row at all.
    assert choose(problem_of(1 << 33, dtype, direction), gpu).strategy == "uncached"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", GPUS)
def test_the_table_is_monotone(device, dtype, direction):
    """A wider row never goes back to a narrower strategy. (Cluster size and threads do go up and down: most bytes in flight
    win.)"""
    gpu = without_file(device)
    for step in (1, 8):
        ranks = []
        for num_cols in np.unique(np.geomspace(step, 4e6, 400).astype(int) // step * step).tolist():
            problem = replace(
                problem_of(num_cols, dtype, direction), layout=Layout(step, contiguous=True)
            )
            choice = choose(problem, gpu)
            ranks.append(TABLE.index(choice.strategy))
            assert (choice.tile.cluster_size > 1) == (choice.strategy == "cluster")
        assert ranks == sorted(ranks)
        assert {TABLE[rank] for rank in ranks} == {
            name for name in TABLE if gpu.compute_capability >= STRATEGIES[name].first_capability
        }


@pytest.mark.parametrize("norm", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("device", GPUS)
def test_every_plan_covers_its_row_and_fits_its_device(device, direction, norm):
    gpu = DEVICES[device]
    for dtype, out, weight in (
        ("float16", None, "same"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "same"),
        ("float64", None, "float32"),
        ("float64", "bfloat16", None),
    ):
        widths = (
            1,
            2,
            3,
            7,
            31,
            33,
            512,
            768,
            1000,
            1023,
            1024,
            1025,
            4100,
            8191,
            8192,
            30001,
            65536,
            262144,
            3000000,
        )
        for num_cols, num_rows in itertools.product(widths, (1000, 2**30)):
            made = plan(
                num_cols, num_rows, dtype, out_dtype=out, weight_dtype=weight, bias_dtype=weight, norm=norm,
                direction=direction, device=device,
            )  # fmt: skip
            tile = made.tile
            assert (
                num_cols % tile.pack_size == 0 and tile.pack_size <= made.problem.layout.pack_limit
            )
            if (
                tile.packs_per_thread
            ):  # in registers: all columns have a place, and no pack is idle in every thread
                assert (
                    tile.cols
                    >= slice_of(num_cols, tile)
                    > tile.cols - tile.pack_size * tile.threads_per_row
                )
                assert tile.exact == (tile.cols * tile.cluster_size == num_cols)
                assert tile.stages != 1 or (direction, tile.cluster_size) == ("backward", 16)
                assert tile.stages == 0 or made.strategy in ("block", "cluster") or tile.bundle
            else:
                assert made.strategy in ("block", "cluster", "uncached") and (
                    tile.exact,
                    tile.stages,
                ) == (0, 0)
            for launch in made.launches:
                assert launch.block_size == launch.tile.threads_per_row * launch.tile.rows_per_block
                assert launch.block_size % 32 == 0 and 32 <= launch.block_size <= 1024
                assert (
                    0 < launch.smem_bytes <= gpu.smem_per_block
                    or launch.kernel.source == "forward_warp.cu"
                )
                assert launch.tile.blocks_per_sm * launch.block_size <= gpu.threads_per_sm
                assert 1 <= launch.grid_size < 2**31 and launch.grid_size % launch.cluster_size == 0
                assert launch.tile.cpp in launch.kernel.name_expression
            # A plan's own tile, given back, is accepted and makes the same kernels.
            again = make_plan(made.problem, gpu, num_rows, strategy=made.strategy, tile=tile)
            assert again.launches == made.launches and again.reason == "as asked for"


def test_cpp_of_a_tile_names_every_field_in_the_order_of_the_struct():
    """Designated initialisers must come in declaration order: Tile here and in tile.cuh are one list with the same defaults."""
    struct = re.search(r"struct Tile \{(.*?)\n\n", (CUDA_SRC / "tile.cuh").read_text(), re.S)[1]
    declared = re.findall(r"^\s*int (\w+)(?: = (\d+))?;", struct, re.M)
    *counts, path = fields(Tile)
    assert [name for name, _ in declared] == [field.name for field in counts]
    defaults = [int(default) for _, default in declared if default]
    assert defaults == [field.default for field in counts][-len(defaults) :]
    assert path.name == "path" and struct.split()[-4:] == ["Path", "path", "=", "Path::registers;"]
    tile = Tile(*range(1, len(counts) + 1), path="ring")
    initialisers = [f".{name} = {at}" for at, (name, _) in enumerate(declared, 1)]
    assert tile.cpp == "Tile{" + ", ".join([*initialisers, ".path = Path::ring"]) + "}"


def test_the_paths_are_those_of_the_struct():
    declared = re.search(
        r"enum class Path \{(.*?)\n\};", (CUDA_SRC / "tile.cuh").read_text(), re.S
    )[1]
    assert tuple(re.findall(r"^\s*(\w+),", declared, re.M)) == PATHS
    assert {path for paths in PATHS_OF_STRATEGY.values() for path in paths} == set(PATHS)
    assert tuple(PATHS_OF_STRATEGY) == TABLE


@pytest.mark.parametrize(
    ("strategy", "tile", "sentence"),
    [
        (
            "warp",
            Tile(8, 32, 4, path="ring"),
            "path 'ring'; a row of strategy 'warp' takes one of registers, bundle",
        ),
        (
            "block",
            Tile(8, 128, 4, path="bundle"),
            "path 'bundle'; a row of strategy 'block' takes one of registers, smem",
        ),
        (
            "uncached",
            Tile(8, 128, path="smem"),
            "path 'smem'; a row of strategy 'uncached' takes one of uncached",
        ),
        (
            "block",
            Tile(8, 128, 1, stages=2, path="registers"),
            "stages 2; path 'registers' has none",
        ),
        ("block", Tile(8, 128, 1, path="ring"), "path 'ring' and stages 0; .* 1 or more"),
    ],
)
def test_a_path_that_does_not_fit_is_refused(strategy, tile, sentence):
    make_plan(problem_of(1024), DEVICES["H200"], 8, strategy="uncached", tile=Tile(8, 128))
    with pytest.raises(ValueError, match=sentence):
        make_plan(problem_of(1024), DEVICES["H200"], 8, strategy=strategy, tile=tile)


def test_a_tile_is_its_words():
    for name, direction in itertools.product(("H200", "A100"), DIRECTIONS):
        for num_cols in (3, 64, 127, 1024, 4096, 16384, 65536, 1 << 20):
            made = plan(num_cols, device=name, direction=direction)
            assert str(Tile.of(str(made.tile))) == str(
                made.tile
            ) and f"path {made.tile.path}" in str(made.tile)
            assert Tile.from_ints(made.tile.as_ints()).path == made.tile.path
            assert made.tile.path in PATHS_OF_STRATEGY[made.strategy]
    with pytest.raises(
        ValueError,
        match="tile has path 'rings'; it is one of registers, smem, staged, ring, bundle, uncached",
    ):
        Tile.of("pack_size 8, threads_per_row 32, path rings")


# num_rows.


def test_a_plan_says_what_few_rows_get():
    few, many = (plan(128, num_rows, device="H200") for num_rows in (4096, 2**20))
    assert few.tile.threads_per_row > many.tile.threads_per_row
    lanes, rows = few.tile.threads_per_row, few.tile.rows_per_block
    assert (
        few.reason
        == f"{many.reason}; as rows are few, {lanes} lanes for each and {rows} in a block"
    )
    assert few.reason in str(few) and "few" not in many.reason
    # What is asked for stays as it is.
    assert plan(128, 4096, device="H200", strategy="warp", tile=many.tile).tile == many.tile


def test_num_rows_changes_the_grid_and_nothing_else():
    """A row's result must be the same bits alone or in any batch: 300 random problems, each with many num_rows."""
    generator = np.random.default_rng(0)

    def pick(values):
        return values[generator.integers(len(values))]

    for _ in range(300):
        device = pick(list(DEVICES.values()))
        num_cols = int(np.exp(generator.uniform(0, np.log(2e6))))
        names = list(DTYPES)
        problem = problem_of(
            num_cols, pick(names), pick(DIRECTIONS), weight=pick([*names, None]), centered=bool(pick([0, 1])),
            zero_centered=bool(pick([0, 1])),
            layout=Layout(min(pick([1, 2, 4, 8, 16]), pack_limit(num_cols, [])), contiguous=True),
        )  # fmt: skip
        made = [
            make_plan(problem, device, num_rows)
            for num_rows in (1, 2, 17, 1000, 131072, 2**31 + 5, 2**40)
        ]
        constant = {
            (
                one.strategy,
                one.tile,
                one.statistics,
                tuple(replace(launch, grid_size=0) for launch in one.launches),
            )
            for one in made
        }
        if made[0].strategy == "warp" and problem.forward:
            # Few rows may have more lanes and larger blocks, which gives the same bits (tests/kernels/test_kernels.py).
            constant = {
                (strategy, tile.pack_size, tile.cols, statistics)
                for strategy, tile, statistics, _ in constant
            }
        assert len(constant) == 1
        for earlier, later in zip(made, made[1:]):
            for first, second in zip(earlier.launches, later.launches):
                assert 1 <= first.grid_size <= second.grid_size < 2**31
        assert made[0].launches[0].grid_size == made[0].tile.cluster_size
        tile = made[0].tile
        stays = tile.cluster_size > (2 if tile.stages else 1 if not tile.packs_per_thread else 16)
        if problem.forward and tile.bundle:  # queued, some rows for each
            rows = tile.bundle * queued_bundles(tile) * tile.block_size // 32
            assert made[-1].launches[0].grid_size == min(2**31 - 1, ceil_div(2**40, rows))
        elif problem.forward and not stays:  # queued: as many as a grid may have
            assert (
                made[-1].launches[0].grid_size
                == (2**31 - 1) // tile.cluster_size * tile.cluster_size
            )
        else:  # all resident
            resident = (
                dict(device.clusters)[tile.cluster_size] * tile.cluster_size
                if tile.cluster_size > 1
                else device.num_sms
            )
            assert made[-1].launches[0].grid_size == resident * choose(problem, device).resident


def test_problems_of_nothing_launch_nothing():
    for num_cols, num_rows in ((0, 8), (768, 0), (0, 0)):
        for direction in DIRECTIONS:
            made = plan(num_cols, num_rows, device="H200", direction=direction)
            assert made.launches == () and made.num_partials == 0
            assert "none: there is nothing to compute" in str(made)


# sm_margin.


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("device", GPUS)
def test_sm_margin_shrinks_the_grid(device, direction):
    """Forward and backward, and two margins one after the other: the cached choice must not keep the first one's grid."""
    gpu = DEVICES[device]
    for num_cols in (768, 4096, 20000, 262144):
        full = plan(num_cols, 100000, device=device, direction=direction)
        grids = []
        for margin in (16, 64, 16, gpu.num_sms - 20):
            made = plan(num_cols, 100000, device=device, direction=direction, sm_margin=margin)
            grids.append(made.launches[0].grid_size)
            launch, cluster_size = made.launches[0], made.tile.cluster_size
            assert replace(launch, grid_size=0) == replace(full.launches[0], grid_size=0)
            if cluster_size == 1:
                per_sm = choose(made.problem, gpu).resident
                assert per_sm <= made.tile.blocks_per_sm
                assert grids[-1] == (gpu.num_sms - margin) * per_sm
            else:
                # The share of clusters that the share of multiprocessors left has room for, rounded down.
                clusters = dict(gpu.clusters)[cluster_size]
                left = clusters * (gpu.num_sms - margin) // gpu.num_sms
                assert 1 <= left * cluster_size <= gpu.num_sms - margin
                assert grids[-1] == left * choose(made.problem, gpu).resident * cluster_size
            if full.num_partials:
                assert made.num_partials == grids[-1] // cluster_size
        assert full.launches[0].grid_size > grids[0] > grids[1] > 0 and grids[0] == grids[2]
        assert grids[1] >= grids[3] > 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sm_margin_that_leaves_no_cluster(direction):
    """66 clusters of 2 and 7 of 16 are resident on an H200: one of 2 needs 2 multiprocessors of 132,
    one of 16 needs 132 / 7."""
    for packs_per_thread in (3, 0):  # in registers and in shared memory
        # 3 packs of 8 columns for each thread of the cluster: 2 x 128 threads, 16 x 32.
        for cluster_size, num_cols, threads, margin in ((2, 6144, 128, 130), (16, 12288, 32, 113)):
            tile = Tile(8, threads, packs_per_thread, cluster_size=cluster_size)
            options = {
                "device": "H200",
                "direction": direction,
                "strategy": "cluster",
                "tile": tile,
            }
            assert plan(num_cols, sm_margin=margin, **options).launches[0].grid_size == cluster_size
            leaves = f"sm_margin is {margin + 1}; it leaves {131 - margin} multiprocessors of H200"
            with pytest.raises(
                ValueError, match=f"{leaves}, too few for a cluster of {cluster_size}$"
            ):
                plan(num_cols, sm_margin=margin + 1, **options)


def test_sm_margin_does_not_make_a_small_grid_larger():
    for direction in DIRECTIONS:
        assert (
            plan(8192, 3, device="H200", direction=direction, sm_margin=1).launches[0].grid_size
            == 3
        )


@pytest.mark.parametrize("margin", (-1, 132, 1000))
def test_sm_margin_that_leaves_nothing(margin):
    for direction in DIRECTIONS:
        with pytest.raises(
            ValueError, match=f"sm_margin is {margin}; H200 has 132 multiprocessors, so 0 to 131"
        ):
            plan(768, device="H200", direction=direction, sm_margin=margin)


# Layout.


def pack_limit(num_cols: int, operands: list[tuple[int, int, int]]) -> int:
    """Of tensors of several rows: address, row stride, itemsize."""
    return Layout.of(num_cols, [(*each, 9) for each in operands]).pack_limit


def test_pack_limit():
    """The largest power of two that divides num_cols and keeps every pack on a multiple of min(16, its bytes)."""
    for num_cols, expected in (
        (1, 1),
        (7, 1),
        (6, 2),
        (12, 4),
        (768, 16),
        (1000, 8),
        (1023, 1),
        (1 << 20, 16),
    ):
        assert pack_limit(num_cols, []) == expected
        assert pack_limit(num_cols, [(256, num_cols, 2), (512, 0, 4)]) == expected or num_cols in (
            1000,
        )
    # An address: 2-byte elements on 2, 4, 8, 16 bytes; a pack of 8 or more bytes of 4 needs no more than 16.
    for address, itemsize, expected in (
        (1 << 20, 2, 16), (16, 2, 16), (8, 2, 4), (4, 2, 2), (2, 2, 1), (1, 2, 1),
        (16, 4, 16), (8, 4, 2), (4, 4, 1), (16, 8, 16), (8, 8, 1), (0, 2, 16), (48, 8, 16),
    ):  # fmt: skip
        assert pack_limit(768, [(address, 0, itemsize)]) == expected, (address, itemsize)
    # A row stride: a view of every other column block, one padded by an element, one that goes backwards.
    for stride, itemsize, expected in (
        (768, 2, 16),
        (769, 2, 1),
        (770, 2, 2),
        (772, 2, 4),
        (769, 4, 1),
        (770, 4, 2),
        (-769, 2, 1),
        (-768, 2, 16),
    ):
        assert pack_limit(768, [(256, stride, itemsize)]) == expected, (stride, itemsize)
    # The worst of all tensors counts, whichever it is.
    for layouts in ([(2, 0, 2), (256, 0, 2)], [(256, 0, 2), (2, 0, 2)], [(256, 0, 4), (256, 3, 2)]):
        assert pack_limit(768, layouts) == 1
    # 40 bytes of 1000 columns' rows: 8 elements of 2 bytes divide both.
    assert pack_limit(1000, [(256, 1000, 2)]) == 8


def packs_fit(num_cols, layouts, pack_size):
    """Whether whole packs make up a row and the first packs of 16 rows start aligned."""
    for address, stride, itemsize in layouts:
        if any(
            (address + row * stride * itemsize) % min(16, pack_size * itemsize) for row in range(16)
        ):
            return False
    return num_cols % pack_size == 0


def test_pack_limit_is_what_packs_need():
    """Property: with the limit every pack of every row is aligned; with twice the limit some is not, or the row has a rest."""
    generator = np.random.default_rng(1)
    doubled = 0
    for _ in range(2000):
        num_cols = int(generator.integers(1, 2000)) * int(generator.choice([1, 2, 4, 8]))
        layouts = [
            (int(generator.integers(0, 64)) * size, int(generator.integers(-4000, 4000)), size)
            for size in generator.choice([2, 4, 8], 3).tolist()
        ]
        limit = pack_limit(num_cols, layouts)

        assert limit in (1, 2, 4, 8, 16) and packs_fit(num_cols, layouts, limit)
        assert limit == 16 or not packs_fit(num_cols, layouts, 2 * limit)
        doubled += limit < 16
    assert doubled > 1000


def test_alignment_and_width_reach_the_tile():
    for alignment, num_cols, expected in (
        (256, 768, 8),
        (16, 768, 8),
        (8, 768, 4),
        (2, 768, 1),
        (256, 767, 1),
        (256, 766, 2),
    ):
        assert plan(num_cols, device="H200", alignment=alignment).tile.pack_size == expected
    assert plan(768, dtype="float32", device="H200").tile.pack_size == 4
    assert plan(768, dtype="float64", device="H200").tile.pack_size == 2
    # 16 bytes of the narrowest streamed tensor: a wide x is then moved as two instructions a pack.
    assert plan(768, dtype="float32", out_dtype="bfloat16", device="H200").tile.pack_size == 8


# Bytes.


def test_bytes_moved():
    """Counted by hand: rows x (streamed tensors) + statistics + parameters, and partial sums written and read."""
    made = plan(1000, 10, "bfloat16", device="H200")
    assert (
        made.bytes_moved == made.bytes_needed == 10 * 1000 * (2 + 2) + 10 * 2 * 4 + 1000 * (2 + 2)
    )
    made = plan(
        1000,
        10,
        "float64",
        norm="rms_norm",
        weight_dtype="float32",
        bias_dtype=None,
        out_dtype="float16",
        device="A100",
    )
    assert made.bytes_moved == made.bytes_needed == 10 * 1000 * (8 + 2) + 10 * 1 * 8 + 1000 * 4
    made = plan(
        1000, 10, "float16", weight_dtype=None, bias_dtype=None, residual=True, device="A100"
    )
    assert made.bytes_moved == made.bytes_needed == 10 * 1000 * (2 + 2 + 2 + 2) + 10 * 2 * 4

    tile = Tile(pack_size=4, threads_per_row=32, packs_per_thread=4, rows_per_block=4)
    made = plan(500, 10, "float32", direction="backward", device="H200", strategy="warp", tile=tile)
    needed = 10 * 500 * 4 * 3 + 10 * 2 * 4 + 500 * 4 * 3
    assert (
        made.num_partials == 3
    )  # ten rows, four a block; each a row of dweight and of dbias, written and read
    assert (made.bytes_needed, made.bytes_moved) == (needed, needed + 2 * 2 * 3 * 500 * 4)


def test_bytes_moved_where_rows_are_read_again():
    """uncached forward: welford reads x twice, two_pass three times (twice without a mean); backward reads x and dy for
    the sums, for dx and for dweight and dbias."""
    once = 10 * 1000
    for norm, statistics, passes in (
        ("layer_norm", "welford", 2), ("layer_norm", "two_pass", 3), ("rms_norm", "welford", 2), ("rms_norm", "two_pass", 2),
    ):  # fmt: skip
        made = plan(
            1000,
            10,
            "float32",
            norm=norm,
            strategy="uncached",
            statistics=statistics,
            device="H200",
        )
        assert made.bytes_moved - made.bytes_needed == (passes - 1) * once * 4
    made = plan(
        1000, 10, "float32", strategy="uncached", statistics="welford", residual=True, device="H200"
    )
    assert made.bytes_moved - made.bytes_needed == once * (4 + 4), "reload reads x and residual"

    made = plan(1000, 10, "float32", direction="backward", strategy="uncached", device="H200")
    assert made.bytes_moved - made.bytes_needed == 2 * once * (4 + 4)
    assert made.num_partials == 0


# Shared memory.


def constant(pattern: str, file: str = "reduce.cuh") -> str:
    found = re.findall(pattern, (CUDA_SRC / file).read_text())
    assert len(found) == 1, f"{pattern} is found {len(found)} times in {file}"
    return found[0]


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_reduce_bytes_are_those_of_reduce_cuh(dtype):
    """The formulas of reduce.cuh, read from its text and evaluated here, against reduce_bytes."""
    block = constant(r"static constexpr int smem_bytes = (\(2 \* max_parts \* num_warps .*);")
    assert constant(r"smem_bytes = (Block::smem_bytes .*);") == "Block::smem_bytes + buffer_bytes"
    cluster = "Block::smem_bytes + " + constant(r"buffer_bytes =\s+(.*);")
    max_parts = int(constant(r"static constexpr int max_parts = (\d+);"))
    assert constant(r"static constexpr int num_warps = (.*);") == "threads / 32"
    block, cluster = (text.replace("/", "//") for text in (block, cluster))
    problem = problem_of(1024, dtype)
    itemsize = DTYPES[dtype].itemsize
    for threads in (32, 64, 128, 512, 1024):
        names = {"max_parts": max_parts, "num_warps": threads // 32, "item": itemsize}
        block_bytes = eval(block.replace("sizeof(Compute)", "item"), {}, names)
        assert reduce_bytes(problem, threads) == block_bytes > 0
        for cluster_size in (2, 4, 8, 16):
            names |= {"block_bytes": block_bytes, "cluster_size": cluster_size}
            text = (
                cluster.replace("Block::smem_bytes", "block_bytes")
                .replace("Block::", "")
                .replace("sizeof(Compute)", "item")
            )
            assert reduce_bytes(problem, threads, cluster_size) == eval(text, {}, names)


def aligned(value: int) -> int:
    return (value + 15) // 16 * 16


def test_smem_bytes_are_what_the_kernels_lay_out():
    """The layout of each kernel, as its .cu file has it, written out by hand."""
    for file in ("forward_block.cu", "forward_cluster.cu"):
        assert "dynamic_smem() + Reduce::smem_bytes" in (CUDA_SRC / file).read_text()

    def smem(num_cols, dtype, direction="forward", at=0, device="H200", **options):
        made = plan(num_cols, 1000, dtype, direction=direction, device=device, **options)
        return made.launches[at].smem_bytes, made

    assert smem(128, "float32", strategy="warp")[0] == 0  # forward_warp reduces by shuffles
    # Two rows of sums, of dweight and dbias, for each of 4 warps.
    for dtype, itemsize in (("float32", 4), ("float64", 8)):
        got, made = smem(128, dtype, "backward", strategy="warp")
        assert made.tile.block_size == 128 and got == 2 * 4 * 128 * itemsize
        # backward_parameters, 512 threads: sums of dweight and dbias, of each pack of a row and each warp.
        parameters = smem(1024, dtype, "backward", at=1)[1].launches[1]
        assert (
            parameters.smem_bytes
            == 2 * parameters.tile.pack_size * parameters.tile.threads_per_row * 16 * itemsize
        )
    for num_cols in (1536, 4096, 8192):
        got, made = smem(num_cols, "bfloat16", strategy="block")
        assert got == aligned(24 * made.tile.threads_per_row // 32) and made.tile.packs_per_thread
    got, made = smem(256, "float32", "backward", strategy="block")
    assert got == aligned(24 * made.tile.threads_per_row // 32)
    # Without clusters, block keeps what is too wide for registers in shared memory: 512 threads, 16 warps.
    got, made = smem(80000, "bfloat16", device="A100")
    assert got == aligned(24 * 16) + aligned(80000 * 2) and made.strategy == "block"
    got, made = smem(33331, "float32", device="A100")
    assert got == aligned(24 * 16) + aligned(33331 * 4) and made.strategy == "block"
    assert (
        smem(1 << 22, "float32")[0] == smem(1 << 22, "float32", "backward")[0] == 24 * 16
    )  # uncached
    # A cluster whose rows wait in registers: the sums of its warps and of its blocks, forward and backward, and no row.
    for direction in DIRECTIONS:
        got, made = smem(30000, "float64", direction)
        assert made.strategy == "cluster" and made.tile.packs_per_thread
        assert got == aligned(48 * made.tile.threads_per_row // 32) + aligned(
            48 * made.tile.cluster_size
        )
    got, made = smem(200000, "bfloat16", strategy="cluster", tile=Tile(8, 512, cluster_size=2))
    assert got == aligned(24 * 16) + aligned(24 * 2) + aligned(
        100032 * 2
    )  # 1563 steps of 64 columns
    got, made = smem(1 << 20, "bfloat16")
    assert made.tile.cluster_size == 16
    assert got == 2 * aligned(24 * 16) + (1 << 20) // 16 * 2
    # 70001 single columns over 4 blocks: slices of 17504. x, dy, and two rows of float sums.
    got, made = smem(
        70001, "bfloat16", "backward", strategy="cluster", tile=Tile(1, 512, cluster_size=4)
    )
    slice_cols = slice_of(70001, made.tile)
    assert got == aligned(24 * 16) + aligned(24 * made.tile.cluster_size) + 2 * aligned(
        slice_cols * 2
    ) + 2 * aligned(slice_cols * 4)
    without = plan(
        70001,
        1000,
        "bfloat16",
        direction="backward",
        device="H200",
        strategy="cluster",
        bias_dtype=None,
        tile=made.tile,
    )
    assert got - without.launches[0].smem_bytes == aligned(slice_cols * 4)


@pytest.mark.parametrize(
    "dtype, lanes", [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 4)]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_lanes_of_a_row_of_96_bytes(direction, dtype, lanes):
    """Six packs of 16 bytes: on two lanes where that was measured to be faster, for 16-bit types."""
    made = plan(96 // DTYPES[dtype].itemsize, 2**20, dtype, direction=direction, device="H200")
    assert (made.strategy, made.tile.threads_per_row) == ("warp", lanes)
    assert made.tile.pack_size * DTYPES[dtype].itemsize == 16


@pytest.mark.parametrize("weight", ["bfloat16", "float32", None])
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_smem_bytes_of_a_ring(direction, x, weight):
    """Rings of all warps, a barrier a slot; four buffers of sums, a barrier each; forward, two of four floats that all read, a
    barrier each; backward, weights beyond 16 elements a thread."""
    item = DTYPES[x].itemsize
    for tile in (
        Tile(8, 96, 2, stages=3),
        Tile(8, 64, 3, rows_per_block=2, stages=2),
        Tile(8, 64, 3, cluster_size=16, stages=4),
    ):
        num_cols = (tile.cols - 8) * tile.cluster_size
        strategy = "cluster" if tile.cluster_size > 1 else "block"
        made = plan(
            num_cols,
            8,
            x,
            direction=direction,
            weight_dtype=weight,
            device="H200",
            strategy=strategy,
            tile=tile,
        )
        rows, warps = tile.rows_per_block, tile.threads_per_row // 32
        ring = tile.cols * item * (1 if direction == "forward" else 2)
        # Forward also sends what rounding takes from the means.
        values = 3 if direction == "forward" else 2
        got = rows * tile.stages * (ring + 8 * warps)
        if direction == "forward":
            got = aligned(got) + rows * 2 * (16 + 8)
        got += rows * 4 * (8 + 4 * values * warps * tile.cluster_size)
        if weight and direction == "backward" and tile.packs_per_thread > 2:
            # One pack of 16-bit weights stays in registers.
            packs = tile.packs_per_thread - (weight == "bfloat16")
            got = (
                aligned(got)
                + packs * tile.pack_size * tile.threads_per_row * DTYPES[weight].itemsize
            )
        assert made.launches[0].smem_bytes == aligned(got)
        if direction == "forward":  # the largest of a row are sent, too
            to_8_bits = {
                "weight_dtype": weight,
                "device": "H200",
                "strategy": strategy,
                "tile": tile,
                "out_dtype": "float8_e4m3fn",
            }
            row, given = (
                plan(num_cols, 8, x, scale=scale, **to_8_bits).launches[0]
                for scale in ("row", "given")
            )
            sent = rows * 4 * (8 + 4 * warps * tile.cluster_size)
            assert (row.smem_bytes, given.smem_bytes) == (aligned(got + sent), aligned(got))
    assert "num_buffers = 4;" in (CUDA_SRC / "exchange.cuh").read_text()


def test_smem_counts_against_a_multiprocessor():
    """resident blocks x (their shared memory + 1 KiB that the driver keeps) fit a multiprocessor."""
    for device in DEVICES.values():
        for direction in DIRECTIONS:
            for num_cols in (768, 4096, 8192, 20000, 40000, 65536):
                problem = problem_of(num_cols, "float16", direction)
                choice = choose(problem, device)
                assert 1 <= choice.resident <= choice.tile.blocks_per_sm
                assert (
                    choice.resident * (choice.smem_bytes + 1024) <= device.smem_per_sm
                    or choice.resident == 1
                )
    # Either side of the border on an H200 (233472 bytes): two blocks of 116000 fit without the driver's share, not with it.
    tile = Tile(pack_size=8, threads_per_row=512, blocks_per_sm=2)
    for num_cols, smem_bytes, resident in ((57008, 114400, 2), (57808, 116000, 1)):
        choice = choose(problem_of(num_cols, "float16"), DEVICES["H200"], "block", tile)
        assert (choice.smem_bytes, choice.resident) == (smem_bytes, resident)


# What is refused.

WARP = Tile(pack_size=8, threads_per_row=32, packs_per_thread=4, rows_per_block=4)
BLOCK = Tile(pack_size=8, threads_per_row=128, packs_per_thread=1)
UNCACHED = Tile(pack_size=8, threads_per_row=512)
CLUSTER = Tile(pack_size=8, threads_per_row=512, cluster_size=2)
RING = replace(BLOCK, stages=2)
CLUSTER_RING = Tile(pack_size=8, threads_per_row=64, packs_per_thread=1, cluster_size=2, stages=2)


@pytest.mark.parametrize(
    ("message", "strategy", "tile", "changes"),
    (
        (r"pack_size 3; num_cols 1024 and the alignment .* power of two up to 16", "warp", replace(WARP, pack_size=3), {}),
        (r"pack_size 0;", "warp", replace(WARP, pack_size=0), {}),
        (r"pack_size 8; num_cols 1024 .* up to 4", "warp", WARP, {"layout": Layout(4, contiguous=True)}),
        (r"pack_size 8; num_cols 1023 .* up to 1", "warp", WARP, {"num_cols": 1023, "layout": Layout(1, contiguous=True)}),
        (r"threads_per_row 32 and rows_per_block 64; .*multiple of 32 up", "warp", replace(WARP, rows_per_block=64), {}),
        (r"threads_per_row 8 and rows_per_block 3;", "warp", replace(WARP, threads_per_row=8, rows_per_block=3), {}),
        (r"threads_per_row 0 and", "warp", replace(WARP, threads_per_row=0), {}),
        (r"threads_per_row 32 and rows_per_block -1", "warp", replace(WARP, rows_per_block=-1), {}),
        (r"threads_per_row 64; strategy 'warp' takes a power of two", "warp", replace(WARP, threads_per_row=64), {}),
        (r"threads_per_row 24; strategy 'warp'", "warp", replace(WARP, threads_per_row=24), {}),
        (r"rows_per_block 2; without stages strategy 'block' works on one row", "block", replace(BLOCK, rows_per_block=2), {}),
        (r"rows_per_block 2; without stages strategy 'uncached'", "uncached", replace(UNCACHED, rows_per_block=2), {}),
        (r"cluster_size 3; H200 runs clusters of 2, 4, 8, 16", "cluster", replace(CLUSTER, cluster_size=3), {}),
        (r"cluster_size 1; H200 runs clusters", "cluster", replace(CLUSTER, cluster_size=1), {}),
        (r"cluster_size 2; strategy 'block' has no clusters, use 1", "block", replace(BLOCK, cluster_size=2), {}),
        (r"holds 512 columns \(pack_size 8 x threads_per_row 32 x packs_per_thread 2\), the row has 1024", "warp",
         replace(WARP, packs_per_thread=2), {}),
        (r"holds 512 columns", "block", replace(BLOCK, threads_per_row=64), {}),
        (r"holds 0 columns", "warp", replace(WARP, packs_per_thread=0), {}),
        (r"holds -1024 columns", "warp", replace(WARP, packs_per_thread=-4), {}),
        (r"packs_per_thread -1; here the row is not kept", "block", replace(BLOCK, packs_per_thread=-1), {}),
        (r"holds 512 columns \(.* x packs_per_thread 2\), the row has 1024 for each block$", "cluster",
         Tile(8, 32, packs_per_thread=2, cluster_size=2), {"num_cols": 2048}),
        (r"packs_per_thread 2; the last pack of every thread is beyond", "cluster",
         replace(CLUSTER, threads_per_row=64, packs_per_thread=2), {}),
        (r"exact 1; 1 is for a row that fills the 512 columns", "cluster",
         replace(CLUSTER, threads_per_row=64, packs_per_thread=1, exact=1), {"num_cols": 1008}),
        (r"keeps 512 elements in each thread, more than its 255 registers", "block",
         replace(BLOCK, threads_per_row=32, packs_per_thread=64), {"num_cols": 16384}),
        (r"packs_per_thread 5; the last pack of every thread is beyond the 1024 columns", "warp",
         replace(WARP, packs_per_thread=5), {}),
        (r"packs_per_thread 1; here the row is not kept in registers", "uncached", replace(UNCACHED, packs_per_thread=1), {}),
        (r"packs_per_thread -1; here", "cluster", replace(CLUSTER, packs_per_thread=-1), {}),
        (r"exact 1; 1 is for a row that fills the 1024 columns", "warp", replace(WARP, exact=1), {"num_cols": 1000}),
        (r"exact 2;", "warp", replace(WARP, exact=2), {}),
        (r"exact 1;", "uncached", replace(UNCACHED, exact=1), {}),
        (r"blocks_per_sm 0 and blocks of 128 threads", "warp", replace(WARP, blocks_per_sm=0), {}),
        (
            r"blocks_per_sm 17 and blocks of 128 threads; a multiprocessor of H200 holds 2048", "warp",
            replace(WARP, blocks_per_sm=17), {},
        ),
        (
            r"stages 2; a ring needs float32 arithmetic", "block", replace(RING, pack_size=2, packs_per_thread=4),
            {"dtype": "float64"},
        ),
        (
            r"stages 1, rows_per_block 1, packs_per_thread 1; a ring has 2 or more stages, .* 1 stage belongs to 'block'",
            "cluster", replace(CLUSTER_RING, stages=1), {},
        ),
        (
            r"stages 1, rows_per_block 2, packs_per_thread 1; .* and one row a block", "block",
            replace(RING, stages=1, rows_per_block=2), {},
        ),
        (r"stages 1 and pack_size 8; .* no residual", "block", replace(RING, stages=1), {"residual": True}),
        (r"stages 1 and pack_size 4; .* packs of 16 bytes", "block", Tile(4, 128, 2, stages=1), {}),
        (
            r"stages 1, rows_per_block 2, packs_per_thread 1; .* backward 1 for one row a block", "block",
            replace(RING, stages=1, rows_per_block=2), {"direction": "backward"},
        ),
        (r"stages -1, ", "block", replace(RING, stages=-1), {}),
        (r"stages 2, .*packs_per_thread 0; .* 1 or more packs", "cluster", replace(CLUSTER, stages=2, path="smem"), {}),
        (r"stages 2, .*packs_per_thread 4; .* belongs to strategy 'block' or 'cluster'", "warp", replace(WARP, stages=2), {}),
        (r"needs 262400 bytes of shared memory a block, H200", "block", UNCACHED, {"num_cols": 131008}),
        (
            r"needs 267856 bytes of shared memory a block, H200", "block", replace(RING, threads_per_row=1024, stages=16),
            {"num_cols": 8192},
        ),
    ),
    ids=lambda value: value.split(";")[0].split(" \\(")[0] if isinstance(value, str) and " " in value else None,
)  # fmt: skip
def test_a_tile_that_does_not_fit_is_refused(message, strategy, tile, changes):
    problem = problem_of(
        changes.get("num_cols", 1024),
        **{key: value for key, value in changes.items() if key != "num_cols"},
    )
    with pytest.raises(ValueError, match="tile .*" + message):
        choose(problem, DEVICES["H200"], strategy, tile)


def test_tiles_beside_the_refused_ones_are_taken():
    """The refusals above are not of everything: each base tile is accepted as it is."""
    problem = problem_of(1024)
    for strategy, tile in (
        ("warp", WARP),
        ("block", BLOCK),
        ("uncached", UNCACHED),
        ("cluster", CLUSTER),
        ("block", UNCACHED),
        ("block", RING),
        ("block", replace(RING, rows_per_block=2)),
        ("block", replace(RING, stages=1)),
        ("cluster", CLUSTER_RING),
    ):
        choice = choose(problem, DEVICES["H200"], strategy, tile)
        assert (choice.strategy, choice.tile, choice.reason) == (strategy, tile, "as asked for")
    assert choose(problem, DEVICES["H200"], "warp", replace(WARP, exact=1)).tile.exact == 1
    in_registers = replace(
        CLUSTER, threads_per_row=64, packs_per_thread=1, exact=1
    )  # 2 x 64 threads x 8 = 1024
    assert choose(problem, DEVICES["H200"], "cluster", in_registers).tile == in_registers
    with pytest.raises(ValueError, match=r"stages 2; .* sm_90 or later"):
        choose(problem, DEVICES["A100"], "block", RING)


def test_backward_block_has_no_row_in_shared_memory():
    with pytest.raises(ValueError, match="holds 0 columns"):
        choose(problem_of(1024, direction="backward"), DEVICES["H200"], "block", UNCACHED)


def test_unknown_and_missing_choices():
    problem = problem_of(1024)
    with pytest.raises(
        ValueError,
        match="strategy is 'tensor_core'; it is one of warp, block, cluster, uncached, or None",
    ):
        choose(problem, DEVICES["H200"], "tensor_core")
    with pytest.raises(
        ValueError, match="statistics is 'naive'; it is one of two_pass, welford, or None"
    ):
        choose(problem, DEVICES["H200"], statistics="naive")
    with pytest.raises(ValueError, match="tile is given without strategy"):
        choose(problem, DEVICES["H200"], tile=WARP)
    for device, has in (("A100", "8.0"), ("RTX 4090", "8.9")):
        with pytest.raises(
            ValueError,
            match=rf"strategy 'cluster' needs compute capability 9\.0 or later; {device} has {has}",
        ):
            choose(problem, DEVICES[device], "cluster")
    for strategy, direction in (("warp", "forward"), ("block", "backward")):
        edge = widest(strategy, problem_of(1 << 20, "float32", direction), DEVICES["H200"])
        message = (
            rf"'{strategy}' is too narrow for 200000 columns of float32 on H200 \({direction}\); "
            rf"its widest row has {edge}$"
        )
        with pytest.raises(ValueError, match=message):
            plan(200000, 8, "float32", direction=direction, device="H200", strategy=strategy)


@pytest.mark.parametrize(
    ("message", "options"),
    (
        (r"norm is 'batch_norm'; expected 'layer_norm' or 'rms_norm'", {"norm": "batch_norm"}),
        (r"direction is 'sideways'; expected 'forward' or 'backward'", {"direction": "sideways"}),
        (r"num_cols is -1; expected 0 or more", {"num_cols": -1}),
        (r"num_rows is -5; expected 0 or more", {"num_rows": -5}),
        (r"dtype is 'int8'; expected one of float16, bfloat16, float32, float64", {"dtype": "int8"}),
        (r"dtype is 'int8'; expected one of", {"weight_dtype": "int8"}),
        (r"dtype is 'fp16'; expected one of", {"bias_dtype": "fp16"}),
        (r"dtype is 'half'; expected one of", {"out_dtype": "half"}),
        (r"device is 'Voodoo2'; expected one of A100, .*B200.*, a Device, or None", {"device": "Voodoo2"}),
    ),
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_plan_refuses(message, options):
    with pytest.raises(ValueError, match=message):
        plan(**({"num_cols": 768, "device": "H200"} | options))


# Devices, names, text.


def test_a_device_may_be_given_as_a_literal():
    small = Device("small", 75, 10, 65536, 65536, 1024)
    assert plan(768, 100000, device=small).device is small
    assert plan(40000, 100000, "float32", device=small).strategy == "uncached"
    lacking = replace(DEVICES["H200"], clusters=())
    assert plan(1 << 20, 8, device=lacking).strategy == "uncached"


def test_device_like_knows_its_namesakes():
    """Measured figures come from the table; a part of a GPU, with fewer multiprocessors, is a device of its own."""
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


def test_strategies_are_the_files_and_the_kernels():
    """A strategy is one name: key of the table, forward_<name>.cu and backward_<name>.cu, the one kernel in each."""
    assert TABLE == ("warp", "block", "cluster", "uncached")
    assert [strategy.name for strategy in STRATEGIES.values()] == list(TABLE)
    files = {path.stem for path in CUDA_SRC.glob("*.cu")}
    of_none = {"backward_parameters", "quantize", "survey", "update_scales"}
    assert files == {f"{direction}_{name}" for direction in DIRECTIONS for name in TABLE} | of_none
    for path in CUDA_SRC.glob("*.cu"):
        text = path.read_text()
        kernels = re.findall(r"__global__ void\s[^{;]*?\b(\w+)\(const ", text)
        assert kernels == [path.stem] and text.count("__global__") == 1
    for direction in DIRECTIONS:
        for name in TABLE:
            launch = plan(512, 8, direction=direction, device="H200", strategy=name).launches[0]
            assert launch.kernel.source == f"{direction}_{name}.cu"
            assert launch.kernel.name_expression.startswith(f"{direction}_{name}<")
    declared = re.search(r"enum class Statistics \{ (.*) \}", (CUDA_SRC / "tile.cuh").read_text())[
        1
    ]
    assert tuple(declared.split(", ")) == STATISTICS


def test_str_of_a_plan_is_a_short_table():
    for num_cols in (768, 8192, 65536, 1 << 20):
        for direction in DIRECTIONS:
            made = plan(num_cols, 4096, device="H200", direction=direction)
            lines = str(made).splitlines()
            assert len(lines) <= 10
            left = max(len(line.split("  ")[0]) for line in lines) + 2
            assert all(line[left - 2 : left] == "  " and line[left] != " " for line in lines), (
                "two columns, one edge"
            )
            table = {line[:left].strip(): line[left:] for line in lines}
            assert table["problem"] == f"layer_norm {direction}, 4096 rows x {num_cols} columns"
            assert table["device"] == "H200, 132 multiprocessors, sm_90"
            assert table["strategy"].startswith(made.strategy + ": ")
            assert (
                table["tile"] == str(made.tile)
                and f"threads_per_row {made.tile.threads_per_row}" in table["tile"]
            )
            assert table["bytes moved"].startswith(f"{made.bytes_moved:,}")
            for launch in made.launches:
                assert (
                    f"grid {launch.grid_size} x block {launch.block_size}"
                    in table[launch.kernel.source]
                )
                assert f"{launch.smem_bytes} bytes of shared memory" in table[launch.kernel.source]
