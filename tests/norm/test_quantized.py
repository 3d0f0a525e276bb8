"""y in 8-bit floats, byte for byte.

The expected bytes are those of the reference, from the y of the same call in the arithmetic's
dtype.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from cupynorm.reference import fp8
from every_kernel import expected

import cupynorm
from cupynorm.dtypes import DTYPES, FLOAT8S, compute_dtype
from cupynorm.norm import kept
from cupynorm.norm import quantize as quantized
from cupynorm.plan.devices import DEVICES as GPUS
from cupynorm.plan.dispatch import make_plan
from cupynorm.plan.problem import Layout, Problem
from cupynorm.plan.tile_model import fetches_ahead

torch = pytest.importorskip("torch")
from float8_bytes import (  # noqa: E402  (imports torch)
    SCALES,
    assert_exact,
    numpy,
    random,
    same_bytes,
    same_tile,
    where_off,
)

E4M3, E5M2 = FLOAT8S


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALES)
def test_bytes_of_each_scaling(scaling, device):
    for norm, name, num_cols, dtype in (
        ("layer_norm", E4M3, 768, torch.bfloat16),
        ("rms_norm", E5M2, 1000, torch.float16),
        ("layer_norm", E5M2, 200, torch.float32),
        ("rms_norm", E4M3, 33, torch.float64),
        ("layer_norm", E4M3, 1, torch.float32),
    ):
        x = random(5, num_cols, dtype=dtype, device=device)
        weight = random(num_cols, dtype=dtype, seed=1, device=device)
        scale = torch.tensor([37.5], device=device)
        assert_exact(
            norm, x, scaling, name, weight=weight, scale=scale if scaling == "given" else None
        )


# Columns for which an H200 has tiles of 8-bit outputs: many packs per lane or thread, and next rows
# fetched to registers or shared memory.
WIDTHS = (
    576,
    704,
    768,
    1000,
    1024,
    2048,
    2560,
    3000,
    5000,
    7000,
    7600,
    9000,
    11000,
    13000,
    14000,
    15000,
    17600,
)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize("num_cols", WIDTHS)
def test_bytes_of_widths_with_tiles_for_8_bit_outputs(num_cols, scaling, device):
    for dtype in (torch.bfloat16, torch.float16):
        x = random(3, num_cols, dtype=dtype, device=device)
        weight, bias = (random(num_cols, dtype=dtype, seed=seed, device=device) for seed in (1, 2))
        assert_exact("layer_norm", x, scaling, weight=weight, bias=bias)
        assert_exact("rms_norm", x, scaling, E5M2, weight=weight)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize("strategy", ["warp", "block", "cluster", "uncached"])
def test_bytes_of_every_strategy(strategy, scaling, device):
    """With saved statistics, a last scale block that is not full, and too few rows for a block."""
    num_cols = {"warp": 328, "block": 1352, "cluster": 4232, "uncached": 1352}[strategy]
    x = random(3, num_cols, dtype=torch.bfloat16, device=device)
    weight, bias = (
        random(num_cols, dtype=torch.bfloat16, seed=seed, device=device) for seed in (1, 2)
    )
    options = {"weight": weight, "bias": bias, "strategy": strategy}
    made = cupynorm.layer_norm(
        x, num_cols, out_dtype=E4M3, scale=None if scaling == "given" else scaling, **options
    )
    plan = next(reversed(kept.forwards.values())).plan
    y = cupynorm.layer_norm_forward(
        x,
        weight,
        bias,
        out_dtype="float32",
        strategy=strategy,
        tile=plan.tile,
        statistics=plan.statistics,
    )
    truth = expected(numpy(y.y), E4M3, scaling)
    assert same_bytes(numpy(made.data), truth.data), where_off(numpy(made.data), truth.data)
    assert same_bytes(numpy(made.scale_inv), truth.scale_inv)


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
    """With a residual, and with more rows than stages on few blocks."""
    for num_rows, margin in (
        (3, 0),
        (11, GPUS["H200"].num_sms - tile.cluster_size - tile.cluster_size // 4),
    ):
        x = random(num_rows, num_cols, dtype=torch.bfloat16, device=device)
        residual = random(num_rows, num_cols, dtype=torch.bfloat16, seed=1, device=device)
        weight, bias = (
            random(num_cols, dtype=torch.bfloat16, seed=seed, device=device) for seed in (2, 3)
        )
        options = {"strategy": strategy, "tile": tile, "sm_margin": margin}
        assert_exact(
            "layer_norm", x, scaling, residual=residual, weight=weight, bias=bias, **options
        )
        assert_exact("rms_norm", x, scaling, weight=weight, **options)


@pytest.mark.parametrize("scaling", ["row", "block", "mx"])
def test_bytes_of_a_cluster_that_keeps_rows_in_registers(scaling, device):
    """One launch is enough where no slice ends inside a scale block."""
    tile = cupynorm.Tile(8, 64, 2, cluster_size=2, exact=1)
    x, weight = (
        random(5, 2048, dtype=torch.bfloat16, device=device),
        random(2048, dtype=torch.bfloat16, seed=1, device=device),
    )
    assert_exact("layer_norm", x, scaling, weight=weight, strategy="cluster", tile=tile)
    for num_cols, exact in ((2048, 1), (1992, 0)):
        problem = Problem(
            "forward",
            True,
            num_cols,
            "bfloat16",
            Layout(8, contiguous=True),
            y=E4M3,
            scaling=scaling,
        )
        cut = cupynorm.Tile(8, 64, 2, cluster_size=2, exact=exact)
        launches = make_plan(problem, GPUS["H200"], 5, strategy="cluster", tile=cut).launches
        assert len(launches) == (1 if exact or scaling == "row" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize("num_cols, exact", [(1024, 1), (1000, 0)])
@pytest.mark.parametrize("stages", [0, 1], ids=["by their threads", "staged"])
def test_bytes_of_rows_fetched_while_others_are_written(stages, num_cols, exact, scaling, device):
    """Several rows per block, whose number differs between blocks."""
    tile = cupynorm.Tile(8, 64, 2, blocks_per_sm=2, exact=exact, stages=stages)
    problem = Problem(
        "forward",
        True,
        num_cols,
        "bfloat16",
        Layout(16, True),
        y=E4M3,
        weight="bfloat16",
        scaling=scaling,
    )
    assert fetches_ahead(problem, tile) == (scaling in ("row", "block", "mx"))
    x, weight = (
        random(*shape, num_cols, dtype=torch.bfloat16, seed=at, device=device)
        for at, shape in enumerate([(7,), ()])
    )
    options = {"strategy": "block", "tile": tile, "sm_margin": GPUS["H200"].num_sms - 1}
    assert make_plan(problem, GPUS["H200"], 7, **options).launches[0].grid_size == 2
    for norm in ("layer_norm", "rms_norm"):
        assert_exact(norm, x, scaling, weight=weight, **options)


# norm, tile, num_rows, and computed by hand for an H200: grid size, blocks or clusters that start
# first, and rows of each of them (nine tenths of all rows).
SHARED_OUT = {
    "ahead": (
        "layer_norm",
        cupynorm.Tile(8, 32, 2, blocks_per_sm=2, exact=1),
        1200,
        (264 + 72, 264, 4),
    ),
    "staged": (
        "layer_norm",
        cupynorm.Tile(8, 32, 2, blocks_per_sm=2, exact=1, stages=1),
        1201,
        (264 + 73, 264, 4),
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
    problem = Problem(
        "forward",
        norm == "layer_norm",
        512,
        "bfloat16",
        Layout(16, True),
        y=E4M3,
        weight="bfloat16",
        scaling="row",
    )
    options = {"strategy": "cluster" if tile.cluster_size > 1 else "block", "tile": tile}
    (launch,) = make_plan(problem, GPUS["H200"], num_rows, **options).launches
    assert (launch.grid_size, launch.num_first, launch.rows_of_first) == shares
    x, weight = (
        random(num_rows, 512, dtype=torch.bfloat16, device=device),
        random(512, dtype=torch.bfloat16, device=device),
    )
    assert_exact(norm, x, "row", weight=weight, **options)


def test_a_ring_takes_one_launch_where_no_warp_has_part_of_a_scale_block():
    for num_cols, strategy, tile in RINGS:
        for scaling, cols in (("block", 128), ("mx", 32)):
            problem = Problem(
                "forward",
                True,
                num_cols,
                "bfloat16",
                Layout(tile.pack_size, True),
                y=E4M3,
                scaling=scaling,
            )
            at_once = tile.exact and 32 * tile.pack_size % cols == 0
            launches = make_plan(problem, GPUS["H200"], 5, strategy=strategy, tile=tile).launches
            assert len(launches) == (1 if at_once else 2), (tile, scaling)


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
@pytest.mark.parametrize("scaling", ["block", "mx"])
def test_bytes_of_scales_shared_by_lanes(scaling, device):
    """For rows that fill the tile and rows that end within the packs of the last lanes.

    One launch, or two where single elements of two warps make up a scale block.
    """
    for pack_size, threads, packs in SHARED:
        tile = cupynorm.Tile(pack_size, threads, packs, rows_per_block=max(1, 64 // threads))
        strategy = "warp" if threads <= 32 else "block"
        num_launches = 2 if scaling == "block" and (pack_size, threads) == (1, 64) else 1
        for num_cols in (tile.cols, tile.cols - pack_size * (threads // 2)):
            exact = cupynorm.Tile(**vars(tile) | {"exact": int(num_cols == tile.cols)})
            x = random(5, num_cols, dtype=torch.bfloat16, seed=packs, device=device)
            assert_exact("rms_norm", x, scaling, strategy=strategy, tile=exact)
            problem = Problem(
                "forward",
                False,
                num_cols,
                "bfloat16",
                Layout.of_new_arrays(num_cols),
                y=E4M3,
                scaling=scaling,
            )
            assert (
                len(make_plan(problem, GPUS["H200"], 5, strategy=strategy, tile=exact).launches)
                == num_launches
            )


SPECIAL = {
    "saturates": ([3e4, -3e4, 1.0, 5.0], 300.0),
    "nothing but zeros": ([0.0, -0.0, 0.0, 0.0], 1.0),
    "a NaN": ([1.0, float("nan"), 2.0, 3.0], 2.0),
    "an infinity": ([1.0, float("inf"), 2.0, 3.0], 2.0),
    "8-bit denormals": ([2.0**-7, -(2.0**-9), 2.0**-10, 1.0], 0.37),
    "scales whose inverse is no normal float": ([2e-36, -4e-36, 3e-36, 1e-36], 2e38),
    "MXFP8's smallest scales": (
        [2.0**-118 * 1.75, 2.0**-118 * 1.7500001, -(2.0**-117) * 1.75, 2.0**-117],
        1.0,
    ),
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
    plain = cupynorm.layer_norm(x, 512, out_dtype=E4M3, scale="row")
    x[1, 7], x[2, 300] = float("nan"), float("inf")
    made = cupynorm.layer_norm(x, 512, out_dtype=E4M3, scale="row")
    for row in (0, 3):
        assert same_bytes(numpy(made.data)[row], numpy(plain.data)[row])
    assert (numpy(made.data)[1:3] == 0x7F).all() and made.dequantize()[1:3].isnan().all()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_bytes_with_power_of_two(scaling, device):
    x = random(5, 768, dtype=torch.bfloat16, device=device)
    assert_exact("layer_norm", x, scaling, power_of_two=True)


def test_amax_is_updated_and_scale_is_read_on_the_device(device):
    x = random(5, 768, device=device)
    amax, scale = torch.tensor([100.0], device=device), torch.tensor([2.0], device=device)
    first = cupynorm.rms_norm(x, 768, out_dtype=E4M3, scale=scale, amax=amax)
    assert amax.item() == 100  # larger than any y
    scale.fill_(4.0)
    second = cupynorm.rms_norm(x, 768, out_dtype=E4M3, scale=scale, amax=amax)
    assert first.scale_inv.item() == 0.5 and second.scale_inv.item() == 0.25
    amax.zero_()
    cupynorm.rms_norm(x, 768, out_dtype=E4M3, scale=scale, amax=amax)
    y = cupynorm.rms_norm(x, 768)
    assert amax.item() == pytest.approx(y.abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("scaling", SCALES)
def test_dequantize_gives_y_within_half_a_step(scaling, anywhere):
    """A step of the 8-bit format, at the scale, by each way through the library."""
    x = random(6, 200, dtype=torch.bfloat16, device=anywhere)
    made = cupynorm.layer_norm(
        x,
        200,
        out_dtype=E4M3,
        scale=None if scaling == "given" else scaling,
        transpose=scaling in ("given", "tensor"),
    )
    y = cupynorm.layer_norm(x, 200, out_dtype="float32")
    got = made.dequantize("float32")
    assert made.dequantize().dtype == torch.bfloat16 and got.dtype == torch.float32
    step = (
        made.scale_inv.float() * 2**-9
        if scaling != "mx"
        else torch.ones(1, device=anywhere) * 2**-9
    )
    spread = (
        step
        if scaling in ("given", "tensor", "mx")
        else step.repeat_interleave(made.block_cols, -1)[:, :200]
    )
    assert ((got - y).abs() <= (y.abs() / 16).clamp(min=spread / 2) * (1 + 2**-20)).all()
    if made.transposed is not None:
        assert same_bytes(numpy(made.transposed), numpy(made.data).T)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize(
    "shape, num_dims",
    [((4, 4, 32), 2), ((3, 2, 150), 2), ((2, 3, 128), 1), ((2, 5, 4, 10), 3), ((40,), 1)],
)
def test_dequantize_of_rows_of_several_dimensions(shape, num_dims, scaling, anywhere):
    """Scale blocks span all normalised dimensions. float32 rounds the one product."""
    weight = random(*shape[-num_dims:], seed=1, device=anywhere) * 10
    made = cupynorm.layer_norm(
        random(*shape, device=anywhere),
        shape[-num_dims:],
        weight,
        out_dtype=E4M3,
        scale=None if scaling == "given" else scaling,
    )
    rows = numpy(made.data).reshape(-1, weight.numel())
    lies = {"given": (), "tensor": (), "row": len(rows)}.get(scaling, (len(rows), -1))
    scale_inv = numpy(made.scale_inv).reshape(lies)
    truth = fp8.dequantize(fp8.Quantized(rows, scale_inv, None), E4M3).reshape(shape)
    np.testing.assert_allclose(numpy(made.dequantize("float64")), truth, rtol=2.0**-24)
    assert len(np.unique(scale_inv)) > 1 or scaling in ("given", "tensor", "mx") or len(shape) == 1


@pytest.mark.parametrize("scaling", ["given", "row"])
def test_gradients_flow_as_if_nothing_was_rounded(scaling, anywhere):
    x, residual = (random(6, 40, seed=seed, device=anywhere).requires_grad_() for seed in (0, 1))
    weight = random(40, seed=2, device=anywhere).requires_grad_()
    dy, dsum = (random(6, 40, seed=seed, device=anywhere) for seed in (3, 4))
    made, added = cupynorm.rms_norm(
        x,
        40,
        weight,
        residual=residual,
        return_residual=True,
        out_dtype=E5M2,
        scale=None if scaling == "given" else scaling,
    )
    torch.autograd.backward((made.dequantize(), added), (dy, dsum))
    got = [each.grad for each in (x, weight, residual)]
    for each in (x, weight, residual):
        each.grad = None
    y, added = cupynorm.rms_norm(x, 40, weight, residual=residual, return_residual=True)
    torch.autograd.backward((y, added), (dy, dsum))
    for one, other in zip(got, (x, weight, residual)):
        assert torch.equal(one, other.grad)


def test_an_input_without_rows_has_empty_results(anywhere):
    for scaling in SCALES:
        made = cupynorm.layer_norm(
            torch.empty(0, 40, device=anywhere),
            40,
            out_dtype=E4M3,
            scale=None if scaling == "given" else scaling,
        )
        assert made.shape == (0, 40) and made.dequantize().shape == (0, 40)


def test_rows_without_columns_have_empty_results(anywhere):
    for scaling in SCALES:
        transpose = scaling in ("given", "tensor")
        made = cupynorm.layer_norm(
            torch.empty(3, 0, device=anywhere),
            0,
            out_dtype=E4M3,
            scale=None if scaling == "given" else scaling,
            transpose=transpose,
        )
        assert made.shape == made.dequantize().shape == (3, 0)
        assert tuple(made.transposed.shape) == (0, 3) if transpose else made.transposed is None


def test_leading_dimensions_and_strides_do_not_change_the_bytes(device):
    x = random(2, 3, 304, dtype=torch.bfloat16, device=device)[..., 3:259]
    made = cupynorm.layer_norm(x, 256, out_dtype=E4M3, scale="block")
    assert made.shape == (2, 3, 256) and made.scale_inv.shape == (2, 3, 2)
    again = cupynorm.layer_norm(
        x.contiguous(), 256, out_dtype=E4M3, scale="block", **same_tile(x, "block", E4M3, {})
    )
    assert same_bytes(numpy(made.data), numpy(again.data))


def test_a_transform_of_torch_func_is_refused():
    with pytest.raises(
        NotImplementedError,
        match="out_dtype float8_e4m3fn was given to a call that torch.func or forward mode",
    ):
        torch.func.vmap(lambda x: cupynorm.layer_norm(x, 40, out_dtype=E4M3).dequantize())(
            random(3, 4, 40)
        )


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize("first_col, num_cols", [(1, 256), (4, 260), (3, 129)])
def test_misaligned_rows_have_the_same_bytes(first_col, num_cols, scaling, device):
    """Rows and addresses that no whole pack fits, and rows not a multiple of 16 to transpose."""
    x = random(35, num_cols + 5, dtype=torch.bfloat16, device=device)[
        :, first_col : first_col + num_cols
    ]
    weight = random(num_cols + 1, dtype=torch.bfloat16, seed=1, device=device)[1:]
    transpose = scaling in ("given", "tensor")
    assert_exact("layer_norm", x, scaling, weight=weight)
    made = cupynorm.layer_norm(
        x,
        num_cols,
        weight,
        out_dtype=E4M3,
        scale=None if scaling == "given" else scaling,
        transpose=transpose,
    )
    assert not transpose or same_bytes(numpy(made.transposed), numpy(made.data).T)


def test_a_scale_and_an_amax_may_be_inside_larger_tensors(device):
    """Also strided ones. Their neighbours are not written."""
    x = random(5, 200, device=device)
    scales, amaxes = torch.arange(1.0, 9.0, device=device), torch.zeros(4, 6, device=device)
    made = cupynorm.rms_norm(x, 200, out_dtype=E4M3, scale=scales[4:5], amax=amaxes[1:3, 2::9][1:])
    plain, amax = torch.tensor(5.0, device=device), torch.zeros((), device=device)
    same = cupynorm.rms_norm(x, 200, out_dtype=E4M3, scale=plain, amax=amax)
    assert same_bytes(numpy(made.data), numpy(same.data)) and made.scale_inv.item() == np.float32(
        0.2
    )
    assert amaxes[2, 2] == amax > 0 and amaxes.count_nonzero() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALES)
def test_cupy_arrays_have_the_bytes_of_torch_tensors(scaling):
    """The bytes are those of torch tensors, as uint8."""
    cupy = pytest.importorskip("cupy")
    x = random(6, 4, 100, device="cuda")
    options = {
        "scale": None if scaling == "given" else scaling,
        "transpose": scaling in ("given", "tensor"),
    }
    expected = cupynorm.layer_norm(x, (4, 100), out_dtype=E4M3, **options)
    amax = cupy.zeros(1, np.float32) if scaling == "given" else None
    made = cupynorm.layer_norm(cupy.from_dlpack(x), (4, 100), out_dtype=E4M3, amax=amax, **options)
    for got, want in (
        (made.data, expected.data),
        (made.scale_inv, expected.scale_inv),
        (made.transposed, expected.transposed),
        (made.dequantize(), expected.dequantize()),
    ):
        assert want is None and got is None or same_bytes(got.get(), numpy(want))
    assert amax is None or amax[0].item() == pytest.approx(
        cupynorm.layer_norm(x, (4, 100)).abs().max().item(), rel=1e-6
    )


def test_numpy_arrays_are_quantised_from_float64():
    """By the reference, from float64. data is uint8."""
    x = numpy(random(6, 200))
    for scaling in SCALES:
        made = cupynorm.layer_norm(
            x, 200, out_dtype=E4M3, scale=None if scaling == "given" else scaling
        )
        truth = expected(cupynorm.layer_norm(x.astype(np.float64), 200), E4M3, scaling)
        assert same_bytes(made.data, truth.data) and same_bytes(made.scale_inv, truth.scale_inv)
        y = cupynorm.layer_norm(x, 200)
        assert (
            made.dequantize().dtype == np.float32
            and (abs(made.dequantize() - y) <= abs(y) / 16 + 2**-5).all()
        )
    amax = np.zeros(1, np.float32)
    cupynorm.layer_norm(x, 200, out_dtype=E4M3, amax=amax)
    assert amax[0] == np.float32(abs(cupynorm.layer_norm(x.astype(np.float64), 200)).max())


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    (
        (
            {"scale": "row"},
            TypeError,
            "scale given with out_dtype None; "
            "expected an out_dtype of float8_e4m3fn or float8_e5m2",
        ),
        (
            {"out_dtype": E4M3, "scale": "column"},
            ValueError,
            "scale is 'column'; expected 'tensor', 'row', 'block', 'mx'",
        ),
        (
            {"out_dtype": E4M3, "scale": 2.0},
            TypeError,
            "scale is 2.0; expected an array of one float32",
        ),
        (
            {"out_dtype": E4M3, "scale": torch.ones(2)},
            TypeError,
            r"scale has shape \(2,\) and dtype float32; expected one element",
        ),
        (
            {"out_dtype": E4M3, "amax": torch.ones(1).double()},
            TypeError,
            r"amax has shape \(1,\) and dtype float64; expected one",
        ),
        (
            {"out_dtype": E4M3, "scale": np.ones(1, np.float32)},
            ValueError,
            "scale is a NumPy array, input is a torch tensor on cpu",
        ),
        (
            {"out_dtype": E4M3, "scale": torch.ones(1, requires_grad=True)},
            ValueError,
            r"scale requires a gradient; it is a constant here, so expected scale.detach\(\)",
        ),
        (
            {"out_dtype": E4M3, "amax": torch.ones(1, requires_grad=True)},
            ValueError,
            "amax requires a gradient",
        ),
        (
            {"out_dtype": E4M3, "scale": ONE, "amax": ONE[:]},
            ValueError,
            "amax is scale's own memory",
        ),
        (
            {"out_dtype": E4M3, "scale": "row", "amax": torch.ones(1)},
            ValueError,
            "amax was given with scale 'row'",
        ),
        (
            {"out_dtype": E4M3, "scale": "mx", "transpose": True},
            ValueError,
            "transpose was given with scale 'mx'",
        ),
        (
            {"out_dtype": E4M3, "power_of_two": True},
            ValueError,
            "power_of_two was given with a scale",
        ),
        ({"out_dtype": E4M3, "transpose": 1}, TypeError, "transpose is 1; expected True or False"),
        (
            {"out_dtype": E4M3, "out": torch.ones(2, 8)},
            ValueError,
            "out was given with out_dtype float8_e4m3fn; expected out=None",
        ),
        (
            {"out_dtype": E4M3, "weight1": torch.ones(8)},
            ValueError,
            "a second weight or bias was given with out_dtype float8_e4m3fn",
        ),
        (
            {"out_dtype": E4M3, "memory_efficient": True},
            ValueError,
            "memory_efficient was given with out_dtype float8_e4m3fn",
        ),
        (
            {"out_dtype": "float8_e4m3fnuz"},
            TypeError,
            "out_dtype is 'float8_e4m3fnuz'; expected one of float16",
        ),
    ),
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        cupynorm.layer_norm(torch.ones(2, 8), 8, **options)


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
    cupynorm.layer_norm(x, 64, row_scale=torch.ones(2))
    with pytest.raises(ValueError, match="row_scale requires a gradient"):
        cupynorm.layer_norm(x, 64, row_scale=torch.ones(2, requires_grad=True))
    scale = torch.ones(1)
    cupynorm.layer_norm(x, 64, out_dtype=E4M3, scale=scale, amax=torch.zeros(1))
    with pytest.raises(ValueError, match="amax is scale's own memory"):
        cupynorm.layer_norm(x, 64, out_dtype=E4M3, scale=scale, amax=scale)


def test_the_compiler_breaks_the_graph():
    x = random(4, 40)

    @torch.compile(backend="eager")
    def quantise(x):
        return cupynorm.layer_norm(x * 2, 40, out_dtype=E4M3, scale="row").dequantize() + 1

    assert torch.equal(
        quantise(x), cupynorm.layer_norm(x * 2, 40, out_dtype=E4M3, scale="row").dequantize() + 1
    )


@pytest.mark.parametrize("shape", [(1, 1), (16, 128), (130, 257), (132, 40), (48, 200), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bytes_of_a_matrix_and_its_transposed_copy(shape, dtype, device):
    x = random(*shape, dtype=dtype, device=device) * 3
    scale, amax = torch.tensor([21.0], device=device), torch.tensor([0.5], device=device)
    data, scale_inv, transposed, _ = quantized.quantize(
        x, "float8_e5m2", scale, amax, transpose=True
    )
    truth = fp8.quantize(
        numpy(x.double() if dtype == torch.float64 else x.float()), "float8_e5m2", np.float32(21)
    )
    assert same_bytes(numpy(data), truth.data) and same_bytes(numpy(transposed), truth.data.T)
    assert same_bytes(numpy(scale_inv), truth.scale_inv.reshape(1)) and numpy(amax)[0] == max(
        truth.amax, np.float32(0.5)
    )
    data, _, transposed, _ = quantized.quantize(
        data, "float8_e5m2", wants_data=False, transpose=True
    )
    assert data is None and same_bytes(numpy(transposed), truth.data.T)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 128), (130, 257), (1000, 72), (300, 34), (0, 8), (5, 0)]
)
@pytest.mark.parametrize(
    "dtype, sums",
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_sums_over_rows_are_within_bounds_and_leave_the_bytes(dtype, sums, shape, device):
    """The bytes are those without sums. Sums repeat and err by additions and one rounding."""
    x = random(*shape, dtype=getattr(torch, dtype), device=device) + 0.25
    scale = torch.tensor([21.0], device=device)
    plain = quantized.quantize(x, "float8_e5m2", scale, transpose=True)
    made = quantized.quantize(x, "float8_e5m2", scale, transpose=True, sums=sums)
    again = quantized.quantize(x, "float8_e5m2", scale, transpose=True, sums=sums)
    for each in ("data", "scale_inv", "transposed"):
        assert same_bytes(numpy(getattr(made, each)), numpy(getattr(plain, each)))
    assert (
        plain.sums is None
        and made.sums.dtype == getattr(torch, sums)
        and tuple(made.sums.shape) == shape[1:]
    )
    assert torch.equal(made.sums, again.sums)
    wide = x.double()
    additions = 128 + -(-shape[0] // 128)
    allowed = (
        additions
        * DTYPES[compute_dtype(dtype).name].half_ulp
        * wide.abs().sum(0)
        * (1 + DTYPES[sums].half_ulp)
    )
    allowed += DTYPES[sums].half_ulp * wide.sum(0).abs()
    assert ((made.sums.double() - wide.sum(0)).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_a_matrix_of_denormal_numbers(dtype, device):
    """The kernels flush denormals where they compare or multiply floats."""
    x = (random(40, 136, dtype=torch.float64) * 2e-39).to(dtype)
    scale, amax = torch.tensor([3e38], device=device), torch.zeros(1, device=device)
    data, _, transposed, _ = quantized.quantize(
        x.to(device), "float8_e4m3fn", scale, amax, transpose=True
    )
    truth = fp8.quantize(numpy(x.float()), "float8_e4m3fn", np.float32(3e38))
    assert 0 < truth.amax < 2.0**-126 and len(np.unique(truth.data)) > 50
    assert same_bytes(numpy(data), truth.data), where_off(numpy(data), truth.data)
    assert same_bytes(numpy(transposed), truth.data.T) and numpy(amax)[0] == truth.amax


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_bytes_of_a_norm_with_given_statistics(norm, device):
    """Nearly forward's bytes: forward's mean is more accurate than the saved, rounded one."""
    x = random(40, 136, dtype=torch.bfloat16, device=device)
    weight, bias = (random(136, dtype=torch.bfloat16, seed=seed, device=device) for seed in (1, 2))
    bias = bias if norm == "layer_norm" else None
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight, bias, zero_centered_weight=True)
    of_norm = quantized.OfNorm(norm == "layer_norm", weight, bias, True, forward.mean, forward.rstd)
    data, _, transposed, _ = quantized.quantize(x, "float8_e4m3fn", transpose=True, of_norm=of_norm)
    assert same_bytes(numpy(transposed), numpy(data).T)
    y = (
        numpy(x.float() if forward.mean is None else x.float() - forward.mean[:, None])
        * numpy(forward.rstd)[:, None]
    )
    y = y * (1 + numpy(weight.float())) + (0 if bias is None else numpy(bias.float()))
    got, want = (
        fp8.decode(numpy(data), "float8_e4m3fn"),
        fp8.decode(fp8.encode(y, "float8_e4m3fn"), "float8_e4m3fn"),
    )
    assert (np.abs(got - want) <= np.abs(want) / 8 + 2**-9).all() and (got != want).mean() < 1e-3
