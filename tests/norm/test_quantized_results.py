"""What a call with 8-bit outputs returns: scales, dequantised values, gradients, every library."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.reference import fp8
from quantized_calls import How, expected

import cupynorm
from cupynorm.dtypes import FLOAT8S

torch = pytest.importorskip("torch")
from float8_bytes import SCALES, how_of, numpy, random, same_bytes  # noqa: E402  (imports torch)

E4M3, E5M2 = FLOAT8S


def test_amax_is_updated_and_scale_is_read_on_the_device(device):
    x = random(5, 768, device=device)
    amax, scale = torch.tensor([100.0], device=device), torch.tensor([2.0], device=device)
    how = cupynorm.Quantize(E4M3, scale, amax=amax)
    first = cupynorm.rms_norm(x, 768, out_dtype=how)
    assert amax.item() == 100  # larger than any y
    scale.fill_(4.0)
    second = cupynorm.rms_norm(x, 768, out_dtype=how)
    assert first.scale_inv.item() == 0.5 and second.scale_inv.item() == 0.25
    amax.zero_()
    cupynorm.rms_norm(x, 768, out_dtype=how)
    y = cupynorm.rms_norm(x, 768)
    assert amax.item() == pytest.approx(y.abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("scaling", SCALES)
def test_dequantize_gives_y_within_half_a_step(scaling, anywhere):
    """A step of the 8-bit format, at the scale, by each way through the library."""
    x = random(6, 200, dtype=torch.bfloat16, device=anywhere)
    made = cupynorm.layer_norm(
        x, 200, out_dtype=how_of(scaling, transpose=scaling in ("given", "tensor"))
    )
    y = cupynorm.layer_norm(x, 200, out_dtype="float32")
    got = made.dequantize("float32")
    assert made.dequantize().dtype == torch.bfloat16 and got.dtype == torch.float32
    step = made.scale_inv * 2**-9
    spread = (
        step
        if scaling in ("given", "tensor")
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
        random(*shape, device=anywhere), shape[-num_dims:], weight, out_dtype=how_of(scaling)
    )
    rows = numpy(made.data).reshape(-1, weight.numel())
    lies = {"given": (), "tensor": (), "row": len(rows)}.get(scaling, (len(rows), -1))
    scale_inv = numpy(made.scale_inv).reshape(lies)
    block_size = 64 if scaling == "block64" else 128
    truth = fp8.dequantize(fp8.Quantized(rows, scale_inv, None), E4M3, block_size).reshape(shape)
    np.testing.assert_allclose(numpy(made.dequantize("float64")), truth, rtol=2.0**-24)
    assert len(np.unique(scale_inv)) > 1 or scaling in ("given", "tensor") or len(shape) == 1


@pytest.mark.parametrize("scaling", ["given", "row"])
def test_gradients_flow_as_if_nothing_was_rounded(scaling, anywhere):
    x, residual = (random(6, 40, seed=seed, device=anywhere).requires_grad_() for seed in (0, 1))
    weight = random(40, seed=2, device=anywhere).requires_grad_()
    dy, dsum = (random(6, 40, seed=seed, device=anywhere) for seed in (3, 4))
    made, added = cupynorm.rms_norm(
        x, 40, weight, residual=residual, return_residual=True, out_dtype=how_of(scaling, E5M2)
    )
    torch.autograd.backward((made.dequantize(), added), (dy, dsum))
    got = [each.grad for each in (x, weight, residual)]
    for each in (x, weight, residual):
        each.grad = None
    y, added = cupynorm.rms_norm(x, 40, weight, residual=residual, return_residual=True)
    torch.autograd.backward((y, added), (dy, dsum))
    for one, other in zip(got, (x, weight, residual)):
        assert torch.equal(one, other.grad)


def test_a_scale_and_an_amax_may_be_inside_larger_tensors(device):
    """Also strided ones. Their neighbours are not written."""
    x = random(5, 200, device=device)
    scales, amaxes = torch.arange(1.0, 9.0, device=device), torch.zeros(4, 6, device=device)
    made = cupynorm.rms_norm(
        x, 200, out_dtype=how_of("given", E4M3, scales[4:5], amax=amaxes[1:3, 2::9][1:])
    )
    plain, amax = torch.tensor(5.0, device=device), torch.zeros((), device=device)
    same = cupynorm.rms_norm(x, 200, out_dtype=how_of("given", E4M3, plain, amax=amax))
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
    options = {"transpose": scaling in ("given", "tensor")}
    expected = cupynorm.layer_norm(x, (4, 100), out_dtype=how_of(scaling, **options))
    amax = cupy.zeros(1, np.float32) if scaling == "given" else None
    how = how_of(scaling, amax=amax, **options)
    made = cupynorm.layer_norm(cupy.from_dlpack(x), (4, 100), out_dtype=how)
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
        made = cupynorm.layer_norm(x, 200, out_dtype=how_of(scaling))
        truth = expected(cupynorm.layer_norm(x.astype(np.float64), 200), How(E4M3, scaling), None)
        assert same_bytes(made.data, truth.data) and same_bytes(made.scale_inv, truth.scale_inv)
        y = cupynorm.layer_norm(x, 200)
        assert (
            made.dequantize().dtype == np.float32
            and (abs(made.dequantize() - y) <= abs(y) / 16 + 2**-5).all()
        )
    amax = np.zeros(1, np.float32)
    cupynorm.layer_norm(x, 200, out_dtype=how_of("given", amax=amax))
    assert amax[0] == np.float32(abs(cupynorm.layer_norm(x.astype(np.float64), 200)).max())
