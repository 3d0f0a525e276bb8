"""y in 8-bit floats, byte for byte.

The expected bytes are those of the reference, from the y of the same call in the arithmetic's
dtype.
"""

from __future__ import annotations

import itertools

import pytest

import cupynorm
from cupynorm import Launch
from cupynorm.dispatch.devices import DEVICES as GPUS
from cupynorm.dispatch.dispatch import make_plan
from cupynorm.dispatch.problem import Layout, Problem
from cupynorm.dtypes import FLOAT8S

torch = pytest.importorskip("torch")
from float8_bytes import (  # noqa: E402  (imports torch)
    SCALES,
    assert_exact,
    how_of,
    numpy,
    random,
    same_bytes,
    same_tile,
)

E4M3, E5M2 = FLOAT8S


def planned(num_cols, num_rows, scale, **options):
    """The launches of a call on an H200."""
    given = {"device": "H200", "out_dtype": E4M3, "scale": scale}
    return cupynorm.plan(num_cols, num_rows, **given, **options).launches


# Columns for which an H200 has tiles of 8-bit outputs: many packs per lane or thread, and next rows
# fetched to registers or shared memory.
WIDTHS = (576, 704, 768, 1000, 1024, 2048, 2560, 3000, 5000, 7000, 7600, 9000, 11000, 13000, 14000)
WIDTHS += (15000, 17600)


@pytest.mark.slow
@pytest.mark.parametrize("at, num_cols", [*enumerate(WIDTHS)])
def test_bytes_of_widths_with_tiles_for_8_bit_outputs(at, num_cols, device):
    """One scaling, norm and dtype for each tile and number of launches, by turns."""
    calls = list(itertools.product(("layer_norm", "rms_norm"), ("bfloat16", "float16")))
    seen = set()
    for turn, scaling in enumerate(SCALES[at % 5 :] + SCALES[: at % 5]):
        first = (at + turn) % len(calls)
        for norm, dtype in calls[first:] + calls[:first]:
            own = {"weight": dtype} | ({"bias": dtype} if norm == "layer_norm" else {})
            y, layout = E4M3 if norm == "layer_norm" else E5M2, Layout.of_new_arrays(num_cols)
            options = {"y": y, "scaling": scaling, "amax": scaling == "given", **own}
            problem = Problem("forward", "bias" in own, num_cols, dtype, layout, **options)
            plan = make_plan(problem, GPUS["H200"], 3)
            kind = (plan.strategy, plan.tile, len(plan.launches))
            if kind not in seen:
                seen.add(kind)
                x, *parameters = (
                    random(*shape, dtype=getattr(torch, dtype), seed=seed, device=device)
                    for seed, shape in enumerate([(3, num_cols), (num_cols,), (num_cols,)])
                )
                assert_exact(norm, x, scaling, y, **dict(zip(own, parameters)))


# Rings, by columns, strategy and tile: of one block and of a cluster, filled or not, of packs and
# of single elements, with several rows per block.
RINGS = (
    (16384, "block", cupynorm.Tile(8, 256, 8, exact=1, stages=3)),
    (4096, "block", cupynorm.Tile(8, 64, 8, exact=1, stages=2)),
    (1000, "block", cupynorm.Tile(8, 64, 2, rows_per_block=2, stages=2)),
    (1023, "block", cupynorm.Tile(1, 64, 16, stages=2)),
    (2048, "cluster", cupynorm.Tile(8, 64, 2, cluster_size=2, exact=1, stages=3)),
    (9000, "cluster", cupynorm.Tile(8, 128, 5, cluster_size=2, stages=2)),
    (1024, "cluster", cupynorm.Tile(4, 32, 2, cluster_size=4, exact=1, stages=2)),
)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize("num_cols, strategy, tile", RINGS)
def test_bytes_of_a_ring(num_cols, strategy, tile, scaling, device):
    """LayerNorm with a residual or RMSNorm by turns, and more rows than stages on few blocks."""
    turn = [each[2] for each in RINGS].index(tile) + SCALES.index(scaling)
    for num_rows, margin in (
        (3, 0),
        (11, GPUS["H200"].num_sms - tile.cluster_size - tile.cluster_size // 4),
    ):
        x = random(num_rows, num_cols, dtype=torch.bfloat16, device=device)
        residual = random(num_rows, num_cols, dtype=torch.bfloat16, seed=1, device=device)
        weight, bias = (
            random(num_cols, dtype=torch.bfloat16, seed=seed, device=device) for seed in (2, 3)
        )
        options = {"launch": Launch(strategy, tile, sm_margin=margin)}
        if turn % 2:
            options |= {"residual": residual, "bias": bias}
        assert_exact(("rms_norm", "layer_norm")[turn % 2], x, scaling, weight=weight, **options)


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_bytes_of_a_cluster_that_keeps_rows_in_registers(scaling, device):
    """One launch is enough where no slice ends inside a scale block."""
    tile = cupynorm.Tile(8, 64, 2, cluster_size=2, exact=1)
    x, weight = (
        random(5, 2048, dtype=torch.bfloat16, device=device),
        random(2048, dtype=torch.bfloat16, seed=1, device=device),
    )
    launch = Launch("cluster", tile)
    assert_exact("layer_norm", x, scaling, weight=weight, launch=launch)
    for num_cols, exact in ((2048, 1), (1992, 0)):
        cut = cupynorm.Tile(8, 64, 2, cluster_size=2, exact=exact)
        launches = planned(num_cols, 5, scaling, strategy="cluster", tile=cut)
        assert len(launches) == (1 if exact or scaling == "row" else 2)


# norm, tile, num_rows, and computed by hand for an H200: grid size, blocks or clusters that start
# first, and rows of each of them (nine tenths of all rows).
SHARED_OUT = {
    "ahead": (
        "layer_norm",
        cupynorm.Tile(8, 32, 2, blocks_per_sm=2, exact=1),
        1200,
        (264 + 72, 264, 4),
    ),
    "ring": ("rms_norm", cupynorm.Tile(8, 64, 1, exact=1, stages=2), 700, (132 + 86, 132, 4)),
    "ring of a cluster": (
        "rms_norm",
        cupynorm.Tile(8, 32, 1, cluster_size=2, exact=1, stages=2),
        345,
        (2 * (66 + 41), 66, 4),
    ),
}


@pytest.mark.parametrize("norm, tile, num_rows, shares", SHARED_OUT.values(), ids=SHARED_OUT)
def test_bytes_of_rows_left_to_later_blocks(norm, tile, num_rows, shares, device):
    """Blocks that start after the first ones have ended take two rows each."""
    options = {"strategy": "cluster" if tile.cluster_size > 1 else "block", "tile": tile}
    (launch,) = planned(512, num_rows, "row", norm=norm, **options)
    assert (launch.grid_size, launch.num_first, launch.rows_of_first) == shares
    x, weight = (
        random(num_rows, 512, dtype=torch.bfloat16, device=device),
        random(512, dtype=torch.bfloat16, device=device),
    )
    assert_exact(norm, x, "row", weight=weight, launch=Launch(**options))


# pack_size, threads_per_row and packs_per_thread. 2 to 32 lanes share the scales of a scale block
# of one or several packs, with fewer or more scales than lanes, also not a power of two.
SHARED = (
    (8, 2, 2),
    (8, 4, 1),
    (8, 4, 4),
    (8, 4, 5),
    (8, 8, 3),
    (8, 16, 1),
    (8, 16, 3),
    (8, 16, 8),
    (8, 32, 7),
    (4, 8, 16),
    (4, 16, 3),
    (4, 32, 1),
    (4, 32, 5),
    (2, 8, 8),
    (2, 16, 6),
    (1, 32, 5),
    (1, 32, 16),
    (8, 96, 3),
    (4, 64, 3),
    (1, 64, 3),
)


@pytest.mark.slow
def test_bytes_of_scales_shared_by_lanes(device):
    """For rows that fill the tile and rows that end within the packs of the last lanes.

    One launch, or two where single elements of two warps make up a scale block.
    """
    for pack_size, threads, packs in SHARED:
        tile = cupynorm.Tile(pack_size, threads, packs, rows_per_block=max(1, 64 // threads))
        strategy = "warp" if threads <= 32 else "block"
        num_launches = 2 if (pack_size, threads) == (1, 64) else 1
        for num_cols in (tile.cols, tile.cols - pack_size * (threads // 2)):
            exact = cupynorm.Tile(**vars(tile) | {"exact": int(num_cols == tile.cols)})
            x = random(5, num_cols, dtype=torch.bfloat16, seed=packs, device=device)
            assert_exact("rms_norm", x, "block", launch=Launch(strategy, exact))
            options = {"norm": "rms_norm", "strategy": strategy, "tile": exact}
            assert len(planned(num_cols, 5, "block", **options)) == num_launches


SPECIAL = {
    "saturates": ([3e4, -3e4, 1.0, 5.0], 300.0),
    "nothing but zeros": ([0.0, -0.0, 0.0, 0.0], 1.0),
    "a NaN": ([1.0, float("nan"), 2.0, 3.0], 2.0),
    "an infinity": ([1.0, float("inf"), 2.0, 3.0], 2.0),
    "8-bit denormals": ([2.0**-7, -(2.0**-9), 2.0**-10, 1.0], 0.37),
    "scales whose inverse is no normal float": ([2e-36, -4e-36, 3e-36, 1e-36], 2e38),
    "scales beyond float32": ([1e-38, -2e-38, 3e-38, 1.2e-38], 3e38),
    "values near float32's largest": ([3e38, -1e38, 1.0, 0.0], 1.5e-36),
    "a scale that is NaN": ([1.0, -2.0, 0.5, 0.0], float("nan")),
    "a negative scale": ([1.0, -2.0, 0.5, 0.0], -3.0),
    "an infinite scale": ([1.0, -2.0, 0.5, 0.25], float("inf")),
}


@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize("what", SPECIAL)
def test_bytes_of_special_values(what, scaling, device):
    """By RMSNorm of elements of 1 and -1: y is the weight, with the sign of x."""
    values, scale = SPECIAL[what]
    num_cols = 264
    x = torch.ones(4, num_cols, device=device)
    x[:, 1::2] = -1
    weight = torch.tensor(values, device=device).repeat(num_cols // 4)
    given = torch.tensor([scale], device=device) if scaling == "given" else None
    assert_exact("rms_norm", x, scaling, weight=weight, eps=0.0, scale=given)


def test_a_row_of_nan_or_infinity_changes_no_other_row(device):
    x = random(4, 512, dtype=torch.bfloat16, device=device)
    plain = cupynorm.layer_norm(x, 512, out_dtype=how_of("row"))
    x[1, 7], x[2, 300] = float("nan"), float("inf")
    made = cupynorm.layer_norm(x, 512, out_dtype=how_of("row"))
    for row in (0, 3):
        assert same_bytes(numpy(made.data)[row], numpy(plain.data)[row])
    assert (numpy(made.data)[1:3] == 0x7F).all() and made.dequantize()[1:3].isnan().all()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_bytes_with_power_of_two(scaling, device):
    x = random(5, 768, dtype=torch.bfloat16, device=device)
    assert_exact("layer_norm", x, scaling, power_of_two=True)


def test_leading_dimensions_and_strides_do_not_change_the_bytes(device):
    x = random(2, 3, 304, dtype=torch.bfloat16, device=device)[..., 3:259]
    made = cupynorm.layer_norm(x, 256, out_dtype=how_of("block"))
    assert made.shape == (2, 3, 256) and made.scale_inv.shape == (2, 3, 2)
    again = cupynorm.layer_norm(
        x.contiguous(), 256, out_dtype=how_of("block"), **same_tile(x, "block", E4M3, {})
    )
    assert same_bytes(numpy(made.data), numpy(again.data))
