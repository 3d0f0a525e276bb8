"""bench: whole runs on torch tensors of a CPU, wrong outputs that it finds, and on a GPU."""

import pytest

pytest.importorskip("torch")
import torch

from cupynorm.bench import measure, peers, report
from cupynorm.bench.cells import COLS, MODELS, Cell, LinearCell, cells, linear_cells
from cupynorm.bench.measure import Truth, verify
from cupynorm.bench.peers import PEERS, Peer, prepare, tensors_of
from cupynorm.dispatch.devices import DEVICES
from cupynorm.gpu import launch, nvrtc

NORMS = ("layer_norm", "rms_norm")
SCALES = ("given", "tensor", "row", "block", "block64")
OPTIONS = [
    {},
    {"residual": True},
    {"weight_dtype": "float32"},
    {"out_dtype": "float16"},
    *({"out_dtype": "float8_e4m3fn", "scales": [scale]} for scale in SCALES),
    {"out_dtype": "float8_e5m2", "amax": True, "residual": True},
    {"out_dtype": "int8", "scales": ["row"]},
]


class Untimed:
    num_flushes: dict = {}

    def sample(self, runner):
        if runner.before:
            runner.before()
        runner.call()
        return 1.0


@pytest.fixture
def on_cpu(monkeypatch):
    """bench() on torch tensors of the CPU, where cupynorm uses its reference."""
    of_cell = measure.measure_cell
    monkeypatch.setattr(launch, "current_device", lambda: DEVICES["H200"])
    monkeypatch.setattr(measure, "check_runs", lambda runs: None)
    monkeypatch.setattr(measure.Timer, "on_gpu", Untimed)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    can_run = {"cupynorm", "torch", "torch.compile", "gemm", "mine"}
    absent = lambda name: None if name in can_run else "not here"  # noqa: E731
    monkeypatch.setattr(measure, "missing", absent)
    on_host = lambda *given: of_cell(*given, "cpu")  # noqa: E731
    monkeypatch.setattr(measure, "measure_cell", on_host)


# Cells.


def test_bytes_are_those_of_the_rows():
    def num_bytes(direction, **options):
        return Cell("layer_norm", direction, "bfloat16", 4, 256, **options).num_bytes / 1024

    assert num_bytes("forward") == 4 and num_bytes("backward") == 6
    assert num_bytes("backward", weight_dtype="float32") == 6  # weights are not counted
    assert num_bytes("forward", out_dtype="float32") == 2 + 4
    assert num_bytes("backward", out_dtype="float32") == 2 + 4 + 2  # x, dy, dx
    assert num_bytes("forward", residual=True) == 8  # x, residual, sum, y
    assert num_bytes("backward", residual=True) == 8  # x, dy, dsum, dx
    eight = {"out_dtype": "float8_e5m2"}
    assert num_bytes("forward", **eight, scale="given") == 3
    assert num_bytes("forward", **eight, scale="row") == 3 + 4 * 4 / 1024
    assert num_bytes("forward", **eight, scale="block") == 3 + 4 * 2 * 4 / 1024
    assert LinearCell(2, 8, 3).num_bytes == 2 * 8 * 4
    assert LinearCell(2, 8, 3, "fp8", "both").num_bytes == 2 * 8 * 9


def test_every_combination_once():
    made = cells(NORMS, ["bfloat16", "float32"], cols=[32, 100], rows=[7, 8])
    assert len(made) == len(set(made)) == 32 and [cell.num_cols for cell in cells()] == [*COLS] * 2
    sizes = [cell.num_rows * cell.num_cols for cell in cells(NORMS[:1], ["float32"], cols=[64])]
    assert sizes == [2**27] * 2
    of_models = cells(models=list(MODELS))
    assert len(of_models) == len(set(of_models))
    assert Cell("rms_norm", "forward", "bfloat16", 131072, 128) in of_models
    (quantized,) = cells(directions=["forward"], cols=[64], rows=[1], out_dtype="float8_e5m2")
    assert quantized.scale == "given"
    assert quantized.kind == "layer_norm forward, bfloat16, y float8_e5m2, scale given"
    assert len(linear_cells([(300, 8, 8), (16, 8, 8)])) == 6  # few rows run forward alone


# Runs.


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_run(on_cpu, tmp_path, options):
    """Our results are right, and those of torch.compile where it has the options."""
    is_quantized = str(options.get("out_dtype")).endswith(("e4m3fn", "e5m2", "int8"))
    directions = ["forward"] if is_quantized else ["forward", "backward"]
    todo = cells(NORMS, ["bfloat16"], directions, [33, 256], rows=[9], **options)
    names = ["torch", "torch.compile", "liger"]
    result = measure.bench(todo, runs=2, seed=3, peers=names)
    assert result.ok and [each.cell for each in result.measurements] == todo
    assert result.missing == {"liger": "not here"}
    for each in result.measurements:
        assert 0 < each.errors["cupynorm"] <= 1 and "cupynorm" not in each.faults
        assert len(each.samples["copy"]) == len(each.samples["cupynorm"]) == 2
        if is_quantized:  # the rounding to 8 bits is most of what is allowed
            assert each.errors["cupynorm"] > 0.5 and each.errors["torch.compile"] <= 1
            assert each.faults.keys() == {"torch"}
        if "out_dtype" in options:
            lacks = sorted(each.cell.extras - {"residual"})[0]
            assert each.faults["torch"].endswith(f"its {each.cell.norm} has no {lacks}")
        elif each.cell.direction == "forward" and "weight_dtype" not in options:
            assert 0 < each.errors["torch"] <= 1 and not each.faults
    (tmp_path / "a.json").write_text(result.to_json())
    again = report.read(tmp_path / "a.json")
    assert again.measurements == result.measurements


def test_a_run_of_a_norm_and_a_linear_layer(on_cpu):
    todo = linear_cells([(300, 64, 32)], ["bfloat16"])
    result = measure.bench(todo, runs=1, seed=3, peers=["gemm", "torch", "cupynorm-current"])
    assert result.ok and [each.cell for each in result.measurements] == todo
    for each in result.measurements:
        assert set(each.samples) == {"copy", "cupynorm", "gemm", "torch"}
        assert max(each.errors.values()) <= 1 and each.share("cupynorm") == 1 + 1 / 0.97
    assert "300 x 64 x 32" in str(result)


def test_a_peer_that_fails_or_is_off_does_not_end_the_run(on_cpu, monkeypatch):
    def fails(cell, tensors):
        raise RuntimeError(f"no kernel for {cell.num_cols} columns\nand a second line")

    todo = cells(dtypes=["float32"], directions=["forward"], cols=[64], rows=[4])
    for make, sentence in (
        (fails, "mine could not run: no kernel for 64 columns"),
        (lambda cell, tensors: lambda: tensors.x * 2, "mine is off: y is "),
    ):
        monkeypatch.setitem(PEERS, "mine", Peer("mine", make))
        (each,) = (result := measure.bench(todo, runs=1, peers=["mine"])).measurements
        assert each.faults["mine"].startswith(sentence) and "mine" not in each.fastest
        assert result.ok


def test_what_ends_a_run_early(on_cpu, monkeypatch):
    todo = cells(dtypes=["float32"], cols=[64], rows=[4])

    def interrupted(items, **how):
        yield items[0]
        raise KeyboardInterrupt

    result = measure.bench(todo, runs=1, peers=[], progress=interrupted)
    assert [each.cell for each in result.measurements] == todo[:1] and not result
    assert str(result).endswith("stopped after 1 of 2 cells: KeyboardInterrupt")

    def fails(name, cell, tensors):
        if cell.direction == "backward":
            raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")
        return prepare(name, cell, tensors)

    monkeypatch.setattr(measure, "prepare", fails)
    result = measure.bench(todo, runs=1, peers=[])
    assert str(result).endswith("stopped after 1 of 2 cells: CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(RuntimeError, match="LAUNCH_FAILED"):  # nothing was measured
        measure.bench(todo[1:], runs=1, peers=[])


def test_arguments_are_checked_first():
    with pytest.raises(ValueError, match="peers has 'nobody'; expected some of cupynorm, torch"):
        measure.bench(peers=["nobody"])
    with pytest.raises(ValueError, match="peers has 'nobody'"):
        measure.host(peers=["nobody"])
    with pytest.raises(ValueError, match="runs is 0"):
        measure.bench(runs=0)
    if not nvrtc.has_gpu():
        with pytest.raises(ValueError, match="none was found"):
            measure.bench()


def test_the_host_is_timed_in_functions_and_modules(monkeypatch):
    found = measure.host(NORMS, shapes=[(4, 16)], rounds=1, peers=[], device="cpu")
    assert len(found) == 6
    for case, times in found.items():
        name = "LayerNorm" if case.startswith("layer_norm") else "RMSNorm"
        assert set(times) == {"cupynorm", f"cupynorm.{name}", f"nn.{name}", "enabled"}
        assert min(times.values()) > 0


# Wrong outputs.


def judged(cell, spoil, library="cupynorm"):
    """The sentence about outputs of a library that spoil(outputs) has changed."""
    tensors = tensors_of(cell, 3, "cpu")
    truth = Truth(cell, tensors, 0)
    runner = prepare(library, cell, tensors)

    def outputs(result):
        made = {name: each.clone() for name, each in runner.outputs(result).items()}
        spoil(made)
        return made

    return verify(runner._replace(outputs=outputs), truth, rounded_mean=False)[1]


@pytest.mark.parametrize(
    "direction, name, residual",
    [("forward", "y", False), ("backward", "dx", False), ("backward", "dx", True)]
    + [("forward", "y", True), ("forward", "sum", True)],
)
def test_a_wrong_output_is_found(direction, name, residual):
    cell = Cell("layer_norm", direction, "float32", 64, 512, residual=residual)
    assert judged(cell, lambda made: None) is None
    assert judged(cell, lambda made: made[name].mul_(1.001)).startswith(f"{name} is")
    assert judged(cell, lambda made: made[name][63, 7:8].fill_(torch.nan)).startswith(f"{name} is")
    as_double = lambda made: made.update({name: made[name].double()})  # noqa: E731
    assert judged(cell, as_double) == f"{name} is torch.float64; expected float32"


def test_an_output_that_is_not_written_is_found():
    cell = Cell("layer_norm", "forward", "float32", 8, 64)
    tensors = tensors_of(cell, 3, "cpu")
    runner = prepare("cupynorm", cell, tensors)
    first = runner.call()
    lazy = runner._replace(call=lambda: first)  # nothing is computed: what was poisoned stays
    assert verify(lazy, Truth(cell, tensors, 0), rounded_mean=False)[1].startswith("y is nan")


@pytest.mark.parametrize("library", ["cupynorm", "torch.compile"])
@pytest.mark.parametrize("scale", SCALES)
def test_wrong_8_bit_outputs_are_found(on_cpu, scale, library):
    cell = Cell("rms_norm", "forward", "float32", 8, 320, out_dtype="float8_e4m3fn", scale=scale)

    def halved(made):
        """Values times scale are right, but the range of the format is not used."""
        made["y"].copy_((made["y"].float() / 2).to(made["y"].dtype))
        made["scale_inv"] *= 2

    def other_byte(made):
        made["y"].view(torch.uint8)[:, 7] ^= 8

    assert judged(cell, lambda made: None, library) is None
    assert judged(cell, lambda made: made["scale_inv"].mul_(1.25), library) is not None
    assert judged(cell, other_byte, library).startswith("y is")
    if scale not in ("given", "tensor"):
        assert "scale_inv" in judged(cell, halved, library)
    if scale.startswith("block"):
        fewer = lambda made: made.update(scale_inv=made["scale_inv"][:, :-1])  # noqa: E731
        assert "scales of a row; expected" in judged(cell, fewer, library)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_small_run(options):
    is_quantized = str(options.get("out_dtype")).endswith(("e4m3fn", "e5m2", "int8"))
    directions = ["forward"] if is_quantized else ["forward", "backward"]
    dtypes = ["bfloat16", "float32"]
    todo = cells(NORMS, dtypes, directions, [96, 4096], rows=[512], **options)
    result = measure.bench(todo, runs=3, seed=5, peers=["torch"], jobs=2)
    assert result.ok and len(result.measurements) == len(todo), str(result)
    for each in result.measurements:
        assert each.errors["cupynorm"] <= 1 and min(each.samples["cupynorm"]) > 0
        # A kernel that is several times faster than a copy was not measured right.
        assert each.share("cupynorm") < 5
    assert report.guard(result, lambda todo: result)[2]


@pytest.mark.gpu
def test_a_small_run_of_layers():
    result = measure.bench(linear_cells([(512, 256, 512)]), runs=2)
    assert result.ok and all("gemm" in each.samples for each in result.measurements), str(result)


@pytest.mark.gpu
def test_eager_calls():
    found = measure.host(NORMS, shapes=[(4, 256)], rounds=5, peers=["torch"])
    assert all(0.1 < each < 10**5 for times in found.values() for each in times.values())
    assert peers.PEERS.keys() >= {"torch"} and len(found) == 6
