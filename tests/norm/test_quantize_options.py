"""Options of Quantize: given inverses, bounds, layouts, int8, and y after functors."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.reference import fp8
from quantized_calls import How, expected

import cupynorm
from cupynorm import Launch, Quantize, functors
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
STRATEGIES = {"warp": 328, "block": 1352, "cluster": 4232, "uncached": 200}


def test_scale_inv_divides_y_and_is_returned_to_the_bit(device):
    x, given = random(5, 768, device=device), torch.tensor([0.013], device=device)
    amax = torch.zeros(1, device=device)
    how = Quantize(E4M3, scale_inv=given, amax=amax, transpose=True)
    made = cupynorm.rms_norm(x, 768, out_dtype=how)
    y = cupynorm.rms_norm(x, 768)
    truth = fp8.quantize(numpy(y), E4M3, scale_inv=np.float32(0.013))
    assert made.scale_inv.item() == given.item() and made.scale_inv is not given
    assert same_bytes(numpy(made.data), truth.data) and amax.item() == y.abs().max().item()
    assert same_bytes(numpy(made.transposed), truth.data.T)


@pytest.mark.parametrize("given", [0.0, -2.0, 2.0**127, float("inf"), float("nan"), 2.0**-126])
def test_a_strange_scale_inv_has_one_rule(given, device):
    x, inverse = random(3, 64, device=device), torch.tensor([given], device=device)
    made = cupynorm.rms_norm(x, 64, out_dtype=Quantize(E5M2, scale_inv=inverse))
    truth = fp8.quantize(numpy(cupynorm.rms_norm(x, 64)), E5M2, scale_inv=np.float32(given))
    assert same_bytes(numpy(made.data), truth.data)
    assert same_bytes(numpy(made.scale_inv), truth.scale_inv.reshape(1))


@pytest.mark.parametrize("scaling", SCALES[1:])
def test_a_bound_clamps_the_amax(scaling, device):
    x = random(5, 768, device=device)
    made = cupynorm.layer_norm(x, 768, out_dtype=how_of(scaling, upper_bound=1.5))
    y = numpy(cupynorm.layer_norm(x, 768, **same_tile(x, scaling, E4M3, {})))
    truth = expected(y, How(E4M3, scaling, upper_bound=1.5), None)
    assert same_bytes(numpy(made.scale_inv), truth.scale_inv)
    assert made.scale_inv.max().item() == np.float32(1) / np.float32(448 / 1.5)
    assert same_bytes(numpy(made.data), truth.data) and (numpy(made.data) & 0x7F == 0x7E).sum() > 9


def test_int8_rounds_half_to_even_and_saturates(anywhere):
    values = [0.5, 1.5, 2.5, 126.5, 127.5, 3e38, float("nan"), 0.25]
    weight = torch.tensor(values, device=anywhere)
    x = torch.tensor([[1.0] * 8, [-1.0] * 8], device=anywhere)
    made = cupynorm.rms_norm(x, 8, weight, eps=0.0, out_dtype="int8")
    assert made.data.dtype == torch.int8 and made.format == "int8"
    assert made.data[0].tolist() == [0, 2, 2, 126, 127, 127, 0, 0]
    assert made.data[1].tolist() == [0, -2, -2, -126, -128, -128, 0, 0]
    assert torch.equal(made.dequantize(), made.data.float())
    made = cupynorm.rms_norm(x, 8, weight, eps=0.0, out_dtype=Quantize("int8", transpose=True))
    assert made.transposed.dtype == torch.int8 and torch.equal(made.transposed, made.data.T)
    how = Quantize("int8", "row")
    made = cupynorm.rms_norm(x[:, :4], 4, weight[:4], eps=0.0, out_dtype=how)
    assert made.data[0, 3] == 127 and made.scale_inv[0].item() == pytest.approx(126.5 / 127)


@pytest.mark.parametrize("group_size", [128, 64])
@pytest.mark.parametrize("strategy", ["warp", "block", "uncached"])
@pytest.mark.parametrize("leading", [(6,), (2, 3), (1,)], ids=str)
def test_layouts_hold_the_same_scales(leading, strategy, group_size, device):
    """Rows are padded to a multiple of 4; exponents of blocks beyond the last one are 0."""
    x = random(*leading, 328, dtype=torch.bfloat16, device=device)

    def call(layout):
        how = {"group_size": group_size, "power_of_two": True, "layout": layout}
        how = Quantize(E4M3, "block", **how)
        return cupynorm.layer_norm(x, 328, out_dtype=how, launch=Launch(strategy))

    row, column, packed = map(call, ("row", "column", "packed"))
    num_rows, num_blocks = x[..., 0].numel(), -(-328 // group_size)
    padded = -(-num_rows // 4) * 4
    within = torch.empty(*leading, device="meta").stride()
    assert row.scale_inv.is_contiguous() and column.scale_inv.stride() == (*within, padded)
    assert torch.equal(column.scale_inv, row.scale_inv)
    assert packed.scale_inv.dtype == torch.int32 and packed.scale_inv.stride() == (*within, padded)
    exponents = np.ascontiguousarray(numpy(packed.scale_inv)).view(np.uint8)
    assert exponents.shape == (*leading, -(-num_blocks // 4) * 4)
    assert not exponents[..., num_blocks:].any()
    scales = np.ldexp(1.0, exponents[..., :num_blocks].astype(int) - 127)
    assert np.array_equal(scales, numpy(row.scale_inv))
    for each in (column, packed):
        assert same_bytes(numpy(each.data), numpy(row.data))
        assert torch.equal(each.dequantize(), row.dequantize())


def test_packed_exponents_of_extreme_scales(anywhere):
    """0 stands for 2^-127."""
    x = torch.ones(2, 256, device=anywhere)
    weight = torch.cat([torch.full((128,), 2.0**-120), torch.full((128,), 2.0**100)]).to(anywhere)
    how = Quantize(E4M3, "block", power_of_two=True, layout="packed")
    made = cupynorm.rms_norm(x, 256, weight, eps=0.0, out_dtype=how)
    assert made.scale_inv.tolist() == [[(100 - 8 + 127) << 8]] * 2
    assert torch.equal(made.dequantize()[:, 128:], weight[128:].expand(2, 128))
    assert (made.dequantize()[:, :128] == 2.0**-120).all()


# Subnormal in float32; a scale of largest / amax beyond float32; the smallest that is not.
@pytest.mark.parametrize("size", [1e-40, 2.0**-127, 2.0**-126, 1e-37, 2e-36])
@pytest.mark.parametrize("scaling", SCALES[1:])
def test_a_small_amax_has_one_rule_on_every_device(scaling, size, anywhere):
    """The scale of an amax below 2^-126 is 1; another is at most the largest float32."""
    x = torch.ones(2, 128, device=anywhere)
    x[:, 1::2] = -1
    weight = torch.full((128,), size, device=anywhere)
    made = cupynorm.rms_norm(x, 128, weight, eps=0.0, out_dtype=how_of(scaling))
    scale = 1.0 if size < 2.0**-126 else min(448 / size, float(np.finfo(np.float32).max))
    np.testing.assert_allclose(numpy(made.scale_inv), 1 / scale, rtol=2**-20)
    byte = fp8.encode(np.array([size * scale]), E4M3)[0]
    signs = numpy(torch.signbit(x)).astype(np.uint8) << 7
    assert np.array_equal(
        numpy(made.data) & (0x7F if byte == 0 else 0xFF), byte | signs * (byte > 0)
    )


# y after functors.

OTHER = cupynorm.functor(  # reads another column
    "other", "y = y * gate + y_at(num_cols - 1 - col) * C(row + 1);", arrays=("gate",)
)


@pytest.mark.parametrize("scaling", SCALES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scales_are_those_of_what_functors_make(strategy, scaling, device):
    num_cols = STRATEGIES[strategy]
    x, gate = (random(5, num_cols, dtype=torch.bfloat16, seed=s, device=device) for s in (0, 1))
    bias = random(num_cols, dtype=torch.bfloat16, seed=2, device=device)
    own = functors.silu_gate(gate=gate) if strategy in ("warp", "cluster") else OTHER(gate=gate)
    assert_exact("layer_norm", x, scaling, bias=bias, fuse=own, launch=Launch(strategy))


RINGS = (
    ("block", 1000, cupynorm.Tile(8, 64, 2, rows_per_block=2, stages=2)),
    ("block", 1024, cupynorm.Tile(8, 64, 2, exact=1, stages=2)),
    ("cluster", 2048, cupynorm.Tile(8, 64, 2, cluster_size=2, exact=1, stages=3)),
)


@pytest.mark.parametrize("scaling", ["given", "row", "block"])
@pytest.mark.parametrize("strategy, num_cols, tile", RINGS)
def test_functors_of_rings_to_8_bits(strategy, num_cols, tile, scaling, device):
    x, gate = (random(11, num_cols, dtype=torch.bfloat16, seed=s, device=device) for s in (0, 1))
    launch = Launch(strategy, tile)
    assert_exact("rms_norm", x, scaling, fuse=functors.silu_gate(gate=gate), launch=launch)


def test_functors_on_x_and_y_go_with_8_bits(device):
    x, s = random(5, 256, device=device), random(256, seed=1, device=device)
    own = (functors.layer_scale(scale=s), functors.silu_gate(gate=x))
    assert_exact("layer_norm", x, "tensor", fuse=own)


@pytest.mark.parametrize("scaling", ["given", "block"])
def test_gradients_pass_through_functors_and_8_bits(scaling, anywhere):
    x, gate = (random(6, 160, seed=s, device=anywhere).requires_grad_() for s in (0, 1))
    dy = random(6, 160, seed=2, device=anywhere)

    def gradients(**options):
        y = cupynorm.rms_norm(x, 160, fuse=functors.silu_gate(gate=gate), **options)
        y = y.dequantize() if options else y
        return torch.autograd.grad(y, (x, gate), dy)

    for got, wanted in zip(gradients(out_dtype=how_of(scaling)), gradients()):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_cupy_arrays_take_every_option():
    cupy = pytest.importorskip("cupy")
    x = random(6, 320, device="cuda")
    for how in (
        Quantize("int8", "row"),
        Quantize(E4M3, "block", group_size=64, layout="column"),
        Quantize(E4M3, "block", power_of_two=True, layout="packed"),
    ):
        wanted = cupynorm.layer_norm(x, 320, out_dtype=how)
        made = cupynorm.layer_norm(cupy.from_dlpack(x), 320, out_dtype=how)
        assert same_bytes(made.data.get(), numpy(wanted.data))
        assert same_bytes(made.scale_inv.get(), numpy(wanted.scale_inv))
        assert [each // 4 for each in made.scale_inv.strides] == [*wanted.scale_inv.stride()]
        assert same_bytes(made.dequantize().get(), numpy(wanted.dequantize()))
