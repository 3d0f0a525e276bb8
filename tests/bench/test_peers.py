"""Peers: why one cannot run, problems that it does not support, and calls of its API.

The libraries are not here. Stand-ins with the signatures of the real functions compute with torch
on the CPU: an argument in the wrong place gives a wrong result.
"""

import importlib.metadata
import sys
from types import ModuleType

import pytest
from cupynorm.bench.runners import prepare_torch
from cupynorm.bench.tensors import Tensors

from cupynorm.bench import peers
from cupynorm.bench.cells import EPS, Cell
from cupynorm.bench.peers import PEERS, Peer, missing

torch = pytest.importorskip("torch")
functional = torch.nn.functional


# Libraries that can run.


@pytest.fixture(autouse=True)
def asked_afresh():
    missing.cache_clear()
    yield
    missing.cache_clear()


@pytest.mark.parametrize("name", PEERS)
def test_error_of_a_peer_without_its_library(monkeypatch, name):
    def absent(module):
        raise ImportError(f"No module named {module!r}\nand more")

    monkeypatch.setattr(importlib, "import_module", absent)
    expected = (
        None if name == "cupynorm" else "torch could not be imported (No module named 'torch')"
    )
    assert missing(name) == expected


def test_a_peer_that_is_not_here_names_its_module(monkeypatch):
    monkeypatch.setitem(PEERS, "nobody", Peer("no-such-package", None, ("no_such_module.ops",)))
    assert (
        missing("nobody")
        == "no_such_module.ops could not be imported (No module named 'no_such_module')"
    )
    assert peers.version("nobody") is None and peers.version("torch") == importlib.metadata.version(
        "torch"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_error_of_a_peer_without_a_gpu():
    assert missing("torch") == f"torch {torch.__version__} finds no GPU"


def test_reasons_of_peers_that_cannot_run():
    for name, cell, sentence in (
        ("tutorial", Cell("rms_norm", "forward", "float32", 1, 8), "it has no rms_norm"),
        ("flashinfer", Cell("rms_norm", "both", "float32", 1, 8), "it has no backward"),
        (
            "torch",
            Cell("rms_norm", "forward", "float32", 1, 8, zero_centered=True),
            "its rms_norm has no zero_centered",
        ),
        (
            "quack",
            Cell("layer_norm", "forward", "float32", 1, 8, residual=True),
            "its layer_norm has no residual",
        ),
        (
            "quack",
            Cell("rms_norm", "forward", "float32", 1, 8, out_dtype="float8_e5m2", scale="row"),
            "its rms_norm has no scale",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            prepare_torch(name, cell, None)
    with pytest.raises(ValueError, match="it has no backward"):
        prepare_torch("flashinfer", Cell("rms_norm", "forward", "float32", 1, 8), None, record=True)


def test_a_fault_is_one_line():
    assert peers.fault("liger", RuntimeError(" one\ntwo")) == "liger could not run: one"
    assert peers.fault("liger", ValueError()) == "liger could not run: ValueError"


# Calls.


def rms(x, weight, eps, offset=0.0):
    return functional.rms_norm(x, (x.shape[-1],), weight + offset, eps)


def _liger():
    class LigerLayerNormFunction:
        @staticmethod
        def apply(X, W, B, eps):
            return functional.layer_norm(X, W.shape, W, B, eps)

    class LigerRMSNormFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
            assert casting_mode == "gemma" and in_place
            ctx.save_for_backward(X, W)
            ctx.rest = (eps, offset)
            return rms(X, W, eps, offset)

        @staticmethod
        def backward(ctx, dY):
            X, W = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            with torch.enable_grad():
                dX, dW = torch.autograd.grad(rms(X, W, *ctx.rest), (X, W), dY)
            return dY.copy_(dX), dW, None, None, None, None, None

    return {
        "liger_kernel.ops": {
            "LigerLayerNormFunction": LigerLayerNormFunction,
            "LigerRMSNormFunction": LigerRMSNormFunction,
        }
    }


def _quack():
    def rmsnorm(
        x,
        weight=None,
        bias=None,
        residual=None,
        out_dtype=None,
        residual_dtype=None,
        eps=1e-6,
        prenorm=False,
        weight_offset=0.0,
    ):
        assert bias is None and residual_dtype is None and prenorm == (residual is not None)
        added = x if residual is None else x + residual
        y = rms(added, weight, eps, weight_offset).to(out_dtype or x.dtype)
        return (y, added) if prenorm else y

    def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
        assert weight.dtype == bias.dtype == torch.float32 and return_rstd == return_mean
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        return (y, rstd, mean) if return_rstd else y

    def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(dout, x, weight.shape, mean, rstd, weight, weight, [True, True, has_bias])

    return {
        "quack.rmsnorm": {
            "rmsnorm": rmsnorm,
            "layernorm_fwd": layernorm_fwd,
            "layernorm_bwd": layernorm_bwd,
        }
    }


def _cudnn():
    def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
        return functional.layer_norm(input, normalized_shape, weight, bias, eps)

    def rms_norm(input, weight, bias=None, eps=1e-5):
        assert bias is None
        return rms(input, weight, eps)

    return {"cudnn.ops.norm": {"layer_norm": layer_norm, "rms_norm": rms_norm}}


def _flash_attn():
    def layer_norm_fn(
        x,
        weight,
        bias,
        residual=None,
        x1=None,
        weight1=None,
        bias1=None,
        eps=1e-6,
        dropout_p=0.0,
        rowscale=None,
        prenorm=False,
    ):
        added = x if residual is None else x + residual
        y = (
            rms(added, weight, eps)
            if bias is None
            else functional.layer_norm(added, weight.shape, weight, bias, eps)
        )
        return (y, added) if prenorm else y

    return {
        "flash_attn.ops.triton.layer_norm": {
            "layer_norm_fn": layer_norm_fn,
            "rms_norm_fn": layer_norm_fn,
        }
    }


def _apex():
    def fused_layer_norm_affine(
        input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False
    ):
        return functional.layer_norm(input, normalized_shape, weight, bias, eps)

    def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        return functional.rms_norm(input, normalized_shape, weight, eps)

    class FastLayerNorm(torch.nn.Module):
        def __init__(self, hidden_size, eps=1e-5):
            super().__init__()
            self.eps = eps
            self.weight, self.bias = (
                torch.nn.Parameter(torch.zeros(hidden_size)) for _ in range(2)
            )

        def forward(self, x):
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    functions = {
        "fused_layer_norm_affine": fused_layer_norm_affine,
        "fused_rms_norm_affine": fused_rms_norm_affine,
    }
    return {
        "apex.normalization.fused_layer_norm": functions,
        "apex.contrib.layer_norm": {"FastLayerNorm": FastLayerNorm},
    }


def _transformer_engine():
    class LayerNorm(torch.nn.Module):
        def __init__(self, normalized_shape, *, eps=1e-5, dtype=None, zero_centered_gamma=False):
            super().__init__()
            self.eps, self.offset = eps, float(zero_centered_gamma)
            self.weight, self.bias = (
                torch.nn.Parameter(torch.zeros(normalized_shape, dtype=dtype)) for _ in range(2)
            )

        def forward(self, x):
            return functional.layer_norm(
                x, self.weight.shape, self.weight + self.offset, self.bias, self.eps
            )

    class RMSNorm(LayerNorm):
        def forward(self, x):
            return rms(x, self.weight, self.eps, self.offset)

    return {"transformer_engine.pytorch": {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}}


def _flashinfer():
    def layernorm(input, gemma, beta, eps=1e-6):
        return functional.layer_norm(input, gemma.shape, gemma, beta, eps)

    def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
        return rms(input, weight, eps)

    return {"flashinfer.norm": {"layernorm": layernorm, "rmsnorm": rmsnorm}}


STAND_INS = [_liger, _quack, _cudnn, _flash_attn, _apex, _transformer_engine, _flashinfer]


@pytest.fixture
def stand_ins(monkeypatch):
    for library in STAND_INS:
        for path, functions in library().items():
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules or not isinstance(
                    getattr(sys.modules[name], "stand_in", None), bool
                ):
                    module = ModuleType(name)
                    module.__path__, module.stand_in = [], True
                    monkeypatch.setitem(sys.modules, name, module)
                    if end > 1:
                        setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
            vars(sys.modules[path]).update(functions)


def tensors_of(cell):
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(*shape, generator=generator)

    shape = (cell.num_rows, cell.num_cols)
    bias = make(cell.num_cols) if cell.norm == "layer_norm" else None
    residual, dsum = (make(*shape) if cell.residual else None for _ in range(2))
    return Tensors(make(*shape), make(*shape), None, make(cell.num_cols), bias, residual, dsum)


def expected_of(cell, tensors):
    """In float64, by torch."""
    x, dy, _, weight, bias, residual, dsum, *_ = (
        each if each is None else each.double() for each in tensors
    )
    inputs = {"dx": x, "dweight": weight, "dbias": bias, "dresidual": residual}
    inputs = {name: each.requires_grad_() for name, each in inputs.items() if each is not None}
    added = x if residual is None else x + residual
    scale = weight + float(cell.zero_centered)
    y = (
        functional.layer_norm(added, scale.shape, scale, bias, EPS)
        if bias is not None
        else rms(added, scale, EPS)
    )
    outputs, gradients = ((y,), (dy,)) if residual is None else ((y, added), (dy, dsum))
    return {"y": y, "sum": added} | dict(
        zip(inputs, torch.autograd.grad(outputs, list(inputs.values()), gradients))
    )


CALLED = [
    (name, norm, extra)
    for name, peer in PEERS.items()
    if name
    not in (
        "torch.compile",
        "tutorial",
    )  # one compiles for minutes, the other has a test of its own
    for norm in peer.norms
    for extra in ("", *peer.extras.get(norm, ()))
    if extra not in ("out_dtype", "scale", "amax")  # below, and in test_bench.py
]


@pytest.mark.parametrize("name,norm,extra", CALLED, ids=lambda each: each or "plain")
def test_every_peer_is_called_by_its_api(stand_ins, name, norm, extra):
    for direction in ("forward", "backward", "both") if PEERS[name].has_backward else ("forward",):
        cell = Cell(norm, direction, "float32", 5, 24, **({extra: True} if extra else {}))
        tensors = tensors_of(cell)
        kept = [None if each is None else each.clone() for each in tensors]
        expected = expected_of(cell, tensors)
        runner = prepare_torch(name, cell, tensors)
        for _ in range(2):  # twice: nothing that a call destroys is missing in the next
            if runner.before:
                runner.before()
            outputs = runner.outputs(runner.call())
            assert set(outputs) >= ({"dx", "dweight"} if direction != "forward" else set()) | (
                {"y"} if direction != "backward" else set()
            )
            for key, got in outputs.items():
                torch.testing.assert_close(
                    got.double(), expected[key].detach(), atol=1e-4, rtol=1e-4
                )
                assert got.requires_grad == (direction == "both" and key in ("y", "sum")), key
        for before, after in zip(kept, tensors):
            assert before is None or torch.equal(before, after)  # other libraries use them too


def test_parameters_have_the_dtype_that_a_library_supports(stand_ins):
    cell = Cell("layer_norm", "both", "bfloat16", 3, 16)
    halves = Tensors(*(each if each is None else each.bfloat16() for each in tensors_of(cell)))
    outputs = prepare_torch("cudnn", cell, halves)
    outputs = outputs.outputs(outputs.call())
    assert (
        outputs["y"].dtype == outputs["dx"].dtype == torch.bfloat16
        and outputs["dweight"].dtype == torch.float32
    )
    mixed = Cell("rms_norm", "both", "bfloat16", 3, 16, weight_dtype="float32")
    tensors = Tensors(
        *(each if each is None else each.bfloat16() for each in tensors_of(mixed))
    )._replace(weight=torch.ones(16))
    outputs = prepare_torch("cupynorm", mixed, tensors)
    outputs = outputs.outputs(outputs.call())
    assert outputs["dweight"].dtype == torch.float32 and outputs["y"].dtype == torch.bfloat16


def test_rounding_once_and_offsets(stand_ins):
    cell = Cell("rms_norm", "forward", "float32", 5, 24, out_dtype="bfloat16")
    for name in ("quack", "cupynorm"):
        runner = prepare_torch(name, cell, tensors_of(cell))
        assert runner.outputs(runner.call())["y"].dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_the_real_libraries(name, norm):
    """Installed libraries run or name what they lack. Their results are not judged here."""
    from cupynorm.bench import measure

    if why := missing(name):
        pytest.skip(why)
    for direction in ("forward", "backward", "both"):
        cell = Cell(norm, direction, "bfloat16", 64, 1024)
        (measured,) = measure.bench([cell], runs=1, seed=0, peers=[name]).measurements
        if norm in PEERS[name].norms and (direction == "forward" or PEERS[name].has_backward):
            assert "could not run" not in measured.faults.get(name, "") and measured.samples[name]
        else:
            assert "it has no" in measured.faults[name]
