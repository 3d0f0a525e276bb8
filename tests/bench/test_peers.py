"""Peers: what each lacks, and calls of cupynorm and torch. Other libraries need a GPU."""

import importlib
import importlib.metadata

import pytest

pytest.importorskip("torch")
import torch

from cupynorm.bench import peers
from cupynorm.bench.cells import EPS, FORMATS, Cell, LinearCell
from cupynorm.bench.peers import PEERS, Peer, missing, prepare, tensors_of

functional = torch.nn.functional
NORMS = ("layer_norm", "rms_norm")


def test_a_peer_that_is_not_here_names_its_module(monkeypatch):
    monkeypatch.setitem(PEERS, "nobody", Peer("no-such-package", needs=("no_such_module.ops",)))
    missing.cache_clear()
    sentence = "no_such_module.ops could not be imported (No module named 'no_such_module')"
    assert missing("nobody") == sentence and missing("cupynorm") is None
    if not torch.cuda.is_available():
        assert missing("torch") == f"torch {torch.__version__} finds no GPU"
    assert peers.version("nobody") is None
    assert peers.version("torch") == importlib.metadata.version("torch")
    missing.cache_clear()


@pytest.mark.parametrize(
    "name, norm, options, sentence",
    [
        ("torch", "rms_norm", {"out_dtype": "float16"}, "its rms_norm has no out_dtype"),
        ("quack", "layer_norm", {"residual": True}, "its layer_norm has no residual"),
        ("quack", "rms_norm", {"out_dtype": "int8", "scale": "row"}, "its rms_norm has no scale"),
    ],
)
def test_what_a_library_lacks_is_not_emulated(name, norm, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        prepare(name, Cell(norm, "forward", "float32", 1, 8, **options), None)


# Calls.


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)


def expected_of(cell, tensors):
    """In float64, by torch."""
    doubles = {
        name: each.double().detach() for name, each in tensors._asdict().items() if each is not None
    }
    names = [name for name in ("x", "weight", "bias", "residual") if name in doubles]
    for name in names:
        doubles[name].requires_grad_()
    added = doubles["x"] + doubles.get("residual", 0)
    scale = doubles["weight"]
    y = functional.layer_norm(added, scale.shape, scale, doubles.get("bias"), EPS)
    if cell.norm == "rms_norm":
        y = functional.rms_norm(added, scale.shape, scale, EPS)
    expected = {"y": y, "sum": added}
    if cell.direction == "backward":
        outputs = (y, added) if cell.residual else (y,)
        dys = (doubles["dy"], doubles["dsum"]) if cell.residual else (doubles["dy"],)
        found = torch.autograd.grad(outputs, [doubles[name] for name in names], dys)
        expected |= {f"d{name}": each for name, each in zip(names, found)}
    return expected


CALLED = [
    (name, norm, extra)
    for name, peer in PEERS.items()
    if peer.norm and peer.package in ("cupynorm", "torch")
    for norm in NORMS
    for extra in ("", "residual")
    if not extra or {extra, f"{norm} {extra}"} & set(peer.extras)
]


@pytest.mark.parametrize("name,norm,extra", CALLED, ids=lambda each: each or "plain")
def test_every_peer_is_called_by_its_api(uncompiled, name, norm, extra):
    for direction in ("forward", "backward"):
        cell = Cell(norm, direction, "float32", 5, 24, **({extra: True} if extra else {}))
        tensors = tensors_of(cell, 0, "cpu")
        kept = [None if each is None else each.clone() for each in tensors]
        expected = expected_of(cell, tensors)
        runner = prepare(name, cell, tensors)
        for _ in range(2):  # twice: nothing that a call destroys is missing in the next
            if runner.before:
                runner.before()
            outputs = runner.outputs(runner.call())
            assert set(outputs) >= ({"y"} if direction == "forward" else {"dx", "dweight"})
            for key, got in outputs.items():
                right = expected[key].detach()
                torch.testing.assert_close(got.double(), right, atol=1e-4, rtol=1e-4)
                assert not got.requires_grad
        for before, after in zip(kept, tensors):
            assert before is None or torch.equal(before, after)  # other libraries use them too
    cell = Cell(norm, "forward", "float32", 5, 24)
    assert prepare(name, cell, tensors_of(cell, 0, "cpu"), record=True).call().requires_grad


LAYERS = [name for name, peer in PEERS.items() if peer.linear]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_every_layer_is_right(uncompiled, name, direction):
    """On a CPU in bfloat16; 8 bits need a GPU for the product alone."""
    for format in PEERS[name].formats:
        if format == "fp8" and name == "gemm":
            continue
        cell = LinearCell(12, 64, 32, format, direction)
        inputs = peers.inputs_of(cell, 1, "cpu")
        runner = peers.prepare_linear(name, cell, inputs)
        error, wrong = peers.verify_linear(cell, inputs, runner.call())
        assert 0 < error <= 1 and wrong is None, wrong
        error, wrong = peers.verify_linear(cell, inputs, 1.2 * runner.call())
        assert error > 1 and wrong.startswith("y is off by")
    assert set(PEERS[name].formats) <= set(FORMATS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PEERS)
def test_the_real_libraries(name):
    """Installed libraries run, or name what they lack. Their results are not judged here."""
    from cupynorm.bench import measure
    from cupynorm.bench.cells import cells, linear_cells

    if why := missing(name):
        pytest.skip(why)
    peer = PEERS[name]
    todo = cells(NORMS, cols=[1024], rows=[64]) if peer.norm else []
    todo += linear_cells([(512, 256, 512)], peer.formats) if peer.linear else []
    for measured in measure.bench(todo, runs=1, seed=0, peers=[name]).measurements:
        assert measured.samples[name] and "could not run" not in measured.faults.get(name, "")
