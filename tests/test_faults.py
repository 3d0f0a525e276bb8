"""Small inputs that failed once, each for its kind."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

import cupynorm
from cupynorm.verify.cases import NORMS

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional


class Wrapper(nn.Module):
    """As an adapter library's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def test_undo_finds_a_norm_that_was_wrapped_since():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    swapped = cupynorm.swap_norms(model)
    model[1] = Wrapper(model[1])
    try:
        swapped.undo()
    except RuntimeError as error:
        assert "1" in str(error) and type(model[1].inner) is cupynorm.LayerNorm
    else:
        assert type(model[1].inner) is nn.LayerNorm


class RoundsTheProduct(nn.Module):
    """Rounds x_hat * weight before the bias, as Chameleon and DeBERTa do."""

    def __init__(self, num_cols):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(num_cols)) for _ in range(2))
        self.eps = 1e-5

    def forward(self, x):
        x_hat = functional.layer_norm(x.float(), x.shape[-1:], None, None, self.eps).to(x.dtype)
        return x_hat * self.weight + self.bias


def test_keep_rounding_keeps_that_of_a_product():
    model, x = nn.Sequential(RoundsTheProduct(256)).bfloat16(), torch.randn(400, 256).bfloat16()
    before = model(x)
    report = str(cupynorm.swap_norms(model, keep_rounding=True))
    assert torch.equal(model(x), before) or "round" in report


def weight_twice(dy, x, rstd, weight):
    x_hat = x * rstd[:, None]
    mean = (dy * weight * x_hat).mean(-1, keepdim=True)
    return rstd[:, None] * (dy * weight - weight * x_hat * mean), (dy * x_hat).sum(0)


def test_a_weight_that_stands_twice_is_named():
    result = cupynorm.check_function((None, weight_twice), norm="rms_norm", shapes=[(64, 768)])
    assert not result and any("twice" in each for each in result.diagnoses)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("shape", "num_cols"), [((0, 64), 64), ((4, 0, 64), 64), ((3, 0), 0)])
def test_empty_results_have_the_strides_of_new_arrays(shape, num_cols, norm, anywhere, request):
    def check(array):
        if isinstance(array, torch.Tensor):
            assert array.stride() == torch.empty(array.shape, device="meta").stride()
        else:
            assert array.strides == np.empty(array.shape, array.dtype).strides

    given = [torch.zeros(shape, dtype=torch.bfloat16, device=anywhere)]
    given += [np.zeros(shape, np.float32)] * request.node.callspec.id.count("reference")
    for x in given:
        result = getattr(cupynorm, f"{norm}_forward")(x, num_cols, residual=x)
        statistics = [each for each in (result.mean, result.rstd) if each is not None]
        made = getattr(cupynorm, f"{norm}_backward")(x, x, num_cols, *statistics)
        for array in (result.y, result.sum, *statistics, made.dx):
            check(array)
        for scale in (None, "row", "block"):
            how = cupynorm.Quantize("float8_e5m2", scale, transpose=scale is None)
            quantized = getattr(cupynorm, norm)(x, num_cols, out_dtype=how)
            assert quantized.dequantize().shape == quantized.shape == shape
            for array in (quantized.data, quantized.scale_inv, quantized.transposed):
                if array is not None:
                    check(array)
    x = given[0].requires_grad_()
    options = {"residual": x.detach().float(), "fuse": cupynorm.functors.dropout(0.5)}
    y, added = getattr(cupynorm, norm)(x, num_cols, return_residual=True, **options)
    assert y.shape == added.shape == shape and added.dtype == torch.float32
    y.sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("kind", ["large", "small", "NaN", "constant"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_no_warning_of_numpy_reaches_the_user(dtype, kind):
    values = np.random.default_rng(1).standard_normal((4, 128))
    values *= {"large": 6e4 if dtype == "float16" else 2.5e38, "small": 1e-44}.get(kind, 1)
    values[0, 0] = np.nan if kind == "NaN" else values[0, 0]
    values[1:] = 5 if kind == "constant" else values[1:]
    tensor = torch.from_numpy(values).to(getattr(torch, dtype))
    given = [tensor] if dtype == "bfloat16" else [tensor, tensor.numpy()]
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for x, norm in ((x, norm) for x in given for norm in NORMS):
            forward = getattr(cupynorm, f"{norm}_forward")
            for options in ({}, {"residual": x}, {"fuse": cupynorm.functors.silu_gate(x)}):
                result = forward(x, 128, x[0], eps=0.0, **options)
            statistics = [each for each in (result.mean, result.rstd) if each is not None]
            getattr(cupynorm, f"{norm}_backward")(
                x, x, 128, *statistics, x[0], dx_dtype="float16", dweight_dtype="bfloat16"
            )
            for scale in (None, "row", "tensor", "block"):
                how = cupynorm.Quantize("float8_e4m3fn", scale)
                assert forward(x, 128, x[0], out_dtype=how).y.dequantize().shape == (4, 128)
        if dtype == "float32":
            assert str(cupynorm.check(tensor, norm=NORMS, on="cpu"))


def test_a_wrong_tail_is_seen_by_default():
    def tail(x, weight, bias, eps):
        y = functional.layer_norm(x, x.shape[1:], weight, bias, eps)
        whole = len(x) // 4 * 4
        return torch.cat([y[:whole], y[whole - 1 : whole].expand(len(x) - whole, -1)])

    assert not cupynorm.check_function((tail, None))


def test_a_numpy_function_is_not_accused_of_torchs_tensors():
    def right(x, weight, bias, eps):
        variance = x.var(1, keepdims=True)
        return (x - x.mean(1, keepdims=True)) / np.sqrt(variance + eps) * weight + bias

    result = cupynorm.check_function((right, None), shapes=[(8, 64)])
    assert result and "torch tensors, with which it is off" in str(result)


def test_a_launch_on_the_cpu_is_warned_of():
    source = (
        "import cupynorm, numpy as np\n"
        "cupynorm.layer_norm(np.ones((2, 65536)), 65536, launch=cupynorm.Launch('warp'))"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.returncode == 0 and "launch was given for arrays on the CPU" in run.stderr


def test_a_check_counts_a_call_that_raises_as_no_tensor():
    def fails(x, weight, bias, eps):
        if not len(x):
            raise ValueError("no rows")
        return functional.layer_norm(x, x.shape[1:], weight, bias, eps)

    result = cupynorm.check_function((fails, None), shapes=[(8, 64)], traps=True)
    assert not result and result.verdict == "OFF: 1 call raised an error"
    assert "0 of" not in str(result) and "OFF: an error" in str(result)


@pytest.mark.parametrize("what", ["file", "folder", 3, None.__class__])
def test_what_is_no_file_of_tiles_is_a_sentence(what, tmp_path):
    path = {"file": tmp_path / "none.csv", "folder": tmp_path}.get(what, what)
    with pytest.raises((TypeError, ValueError), match="^path is .*; expected "):
        cupynorm.use_tiles(path)
