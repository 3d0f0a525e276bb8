"""notebooks/models.py: six models, their runs, and the tables of what was measured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import models_report as report  # noqa: E402
import models_steps as steps  # noqa: E402

import cupynorm  # noqa: E402

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "notebooks" / "models.json"
DIT = ("--quick", "--device", "cpu", "--models", "dit", "--steps", "2")


@pytest.fixture(autouse=True)
def threads():
    """Keeps torch's number of threads, which --quick sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eager(monkeypatch):
    """torch.compile traces, and runs what it traced without generating code."""
    torch.compiler.reset()
    monkeypatch.setattr(steps, "BACKEND", "eager")


@pytest.fixture
def variants(monkeypatch):
    """run -> the variants that were made."""
    made: dict[str, list] = {}
    plain = steps.variant_of

    def variant_of(model, run, whole=False):
        made.setdefault(run, []).append(plain(model, run, whole))
        return made[run][-1]

    monkeypatch.setattr(steps, "variant_of", variant_of)
    return made


def result_of(times, distances, **settings) -> report.Result:
    """A model whose phases all have these times and distances."""
    phases = {phase: report.Phase(dict(times), dict(distances)) for phase in report.PHASES}
    return report.Result(
        {"gpu": "NVIDIA H200", "torch": "2.11", "cupynorm": "0.1", "date": "2026-11-25T01"},
        {"command": "python notebooks/models.py", "steps": 3, "quick": False} | settings,
        {"gpt2": report.ModelResult("GPT-2 124M", "16 x 1024 tokens", phases)},
    )


def test_a_gain_is_of_equal_turns():
    """Not of medians: the second run is 1% faster in each turn, while both become slower."""
    slow = [1.01, 2.02, 4.04, 8.08]
    found = report.Phase({"torch": slow, "cupynorm": [1.0, 2.0, 4.0, 8.0]})
    assert found.gain("cupynorm", "torch") == pytest.approx((0.01, 0))
    assert found.gain("cupynorm", "torch-compiled") is None


class Again:
    """A replay that calls the model, for machines without CUDA graphs."""

    def __init__(self, step, model, batch):
        self.step, self.model = step, model

    def __call__(self, batch):
        return self.step(self.model, batch)


def test_inference_in_graphs_is_compared_and_timed(example, monkeypatch):
    class Stale(Again):
        """Forgets to copy its inputs."""

        def __call__(self, batch):
            self.batch = getattr(self, "batch", batch)
            return super().__call__(self.batch)

    torch.set_num_threads(1)
    settings = steps.Settings(("torch", "cupynorm"), 4, True, "cpu", 0)
    model = steps.make(example.MODELS["dit"], settings)
    variants = [steps.variant_of(model, run) for run in ("torch", "float64", "cupynorm")]
    step = steps.Step("inference", example.MODELS["dit"], settings)
    for replay, is_wrong in ((Again, False), (Stale, True)):
        monkeypatch.setattr(steps, "Replay", replay)
        found, failed = steps.measure_graphs(step, variants, steps.tqdm(disable=True))
        assert not failed and [*found.distances] == ["torch", "float64", "cupynorm"]
        assert {run: len(each) for run, each in found.milliseconds.items()} == {
            "torch": 4,
            "cupynorm": 4,
        }
        assert (found.distances["cupynorm"]["outputs"] > 0.1) == is_wrong
    made = result_of({}, {})
    made.models["gpt2"].phases = {report.GRAPHED: found}
    assert made.too_far and [row[1] for row in made.distances()[1:]] == ["outputs in a CUDA graph"]
    monkeypatch.setattr(steps, "Replay", lambda *each: 1 / 0)
    found, failed = steps.measure_graphs(step, variants[:1], steps.tqdm(disable=True))
    assert failed == {"torch": "ZeroDivisionError: division by zero"} and not found.milliseconds


@pytest.mark.slow
def test_quick_measures_six_models_in_20_seconds_of_a_cpu(example, variants, tmp_path, capsys):
    file = tmp_path / "models.json"
    start = time.process_time()
    assert example.main(["--quick", "--device", "cpu", "--json", str(file)]) == 0
    assert time.process_time() - start < 20
    found = report.Result.from_json(file.read_text())
    printed = capsys.readouterr().out
    assert len(found.models) == 6 and [*found.models] == [*example.MODELS]
    for model in found.models.values():
        assert [*model.phases] == ["training", "inference"]
        for phase, quantities in zip(model.phases.values(), ({"loss", "gradients"}, {"outputs"})):
            assert [*phase.milliseconds] == ["torch", "cupynorm"]
            assert all(len(each) == 3 and min(each) > 0 for each in phase.milliseconds.values())
            assert [*phase.distances] == ["float64", "cupynorm"]
            # Float32, and norms that differ: not the same model twice.
            assert all({*each} == quantities for each in phase.distances.values())
            assert max(phase.distances["cupynorm"].values()) > 0
            assert max(max(each.values()) for each in phase.distances.values()) < 2e-6
        assert f"\n{model.title}  " in printed
    for model in (each.model for each in variants["cupynorm"]):
        own = [each for each in model.modules() if type(each).__module__.startswith("cupynorm")]
        assert own and not [
            each for each in model.modules() if type(each) in (torch.nn.LayerNorm, torch.nn.RMSNorm)
        ]
    _, qwen3 = (each.model for each in variants["cupynorm"] if hasattr(each.model, "rotary"))
    assert type(qwen3.blocks[0].attention.query_norm).__module__.startswith("cupynorm")


def test_full_sizes_are_those_of_the_papers(example):
    """Numbers of parameters; those of layers are counted by hand from the widths."""

    def num_parameters(name):
        with torch.device("meta"):
            model = example.MODELS[name].make(**example.MODELS[name].sizes)
        return sum(each.numel() for each in model.parameters())

    assert round(num_parameters("gpt2") / 1e6) == 124
    assert round(num_parameters("bert") / 1e6) == 110
    assert round(num_parameters("vit") / 1e6) == 304
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096
    assert num_parameters("llama3") == 2 * layer + 4096
    layer = 2048 * (2048 + 2 * 1024 + 2048 + 3 * 6144) + 2 * 2048 + 2 * 128
    assert num_parameters("qwen3") == 4 * layer + 2048
    assert num_parameters("dit") == 1024 * 18 * 1024 + (3 + 1 + 4 + 1 + 6) * 1024


def test_a_wrong_norm_is_found(example, monkeypatch, capsys):
    """One part in a thousand of a norm's output."""
    plain = cupynorm.LayerNorm.forward
    monkeypatch.setattr(cupynorm.LayerNorm, "forward", lambda self, x: plain(self, x) * 1.001)
    assert example.main(DIT) == 1
    assert "TOO FAR: DiT-L/2, 1 block, training: gradients of cupynorm" in capsys.readouterr().out


def test_a_run_that_fails_leaves_the_others(example, monkeypatch, tmp_path, capsys):
    def fail(self, x):
        raise ValueError("no such row")

    monkeypatch.setattr(cupynorm.LayerNorm, "forward", fail)
    file = tmp_path / "models.json"
    assert example.main([*DIT, "--json", str(file)]) == 1
    assert "training: cupynorm failed: ValueError: no such row" in capsys.readouterr().out
    (model,) = report.Result.from_json(file.read_text()).models.values()
    assert [*model.phases["inference"].milliseconds] == ["torch"]


def test_kernels_of_norms():
    """Names as torch.profiler gives them."""
    ours = "void backward_block<__nv_bfloat16, true, Tile{(int)8, (int)128}>(Backward<int>)"
    of_torch = "void at::native::(anonymous namespace)::"
    assert steps.is_norm(ours) and steps.is_norm("backward_parameters<float>(Sums)")
    assert steps.is_norm(f"{of_torch}vectorized_layer_norm_kernel<float, float, true>(int)")
    assert steps.is_norm(f"{of_torch}GammaBetaBackwardCUDAKernelTemplate<float>(long)")
    assert not steps.is_norm(f"{of_torch}embedding_backward_feature_kernel<float>(long)")
    assert not steps.is_norm("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>")


def test_overlapping_kernels_count_once():
    """The second kernel of a norm's backward starts early and waits for the first."""
    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(start, end, name="first", device=gpu, is_named=False):
        """Times in milliseconds of a step."""
        factor = 1e3 * steps.NUM_PROFILED
        between = SimpleNamespace(start=start * factor, end=end * factor)
        found = torch.autograd.DeviceType(int(device))  # a new object, as the profiler makes it
        return SimpleNamespace(
            name=name, time_range=between, device_type=found, is_user_annotation=is_named
        )

    first, waiting, inside = event(10, 139), event(40, 146, "waiting"), event(20, 30)
    assert steps.busy([]) == 0 and steps.busy([first]) == pytest.approx(129)
    assert steps.busy([waiting, inside, first]) == pytest.approx(136)
    assert steps.busy([first, event(139, 140), event(200, 201.5)]) == pytest.approx(131.5)
    assert steps.is_of_gpu(first) and not steps.is_of_gpu(event(0, 1, device=cpu))
    assert not steps.is_of_gpu(event(0, 1, is_named=True))
    found = steps.slowest([waiting, inside, first])
    assert found == {"first": [pytest.approx(2 / 3, abs=0.1), 139.0], "waiting": [0.3, 106.0]}
    assert list(found) == ["first", "waiting"]


def test_results_that_are_not_finite_are_no_distance():
    one, other = [torch.ones(2), torch.ones(3)], [torch.ones(2), torch.tensor([1.0, 1.0, 2.0])]
    assert steps.distance(one, one) == 0
    assert steps.distance(other, one) == pytest.approx(5**-0.5)
    with pytest.raises(ArithmeticError, match="not comparable"):
        steps.distance([torch.full((2,), float("nan")), torch.ones(3)], one)


def test_each_compiled_run_has_its_own_code(example, eager, variants):
    runs = ("torch-compiled", "cupynorm-compiled")
    assert example.main([*DIT, "--runs", ",".join(runs)]) == 0
    assert {run: each.backend.num_graphs for run, (each,) in variants.items()} == {
        "torch": 0,
        "float64": 0,
        **dict.fromkeys(runs, 2),
    }


def test_models_are_compiled_ahead_in_processes(example, monkeypatch):
    """Here in threads, for their imports take seconds."""
    started = []
    monkeypatch.setattr(steps, "compile_ahead", lambda *each: started.append(each[:2]))
    monkeypatch.setattr(
        steps.concurrent.futures,
        "ProcessPoolExecutor",
        lambda jobs, context: steps.concurrent.futures.ThreadPoolExecutor(jobs),
    )
    settings = steps.Settings(("torch", "torch-compiled", "cupynorm-compiled"), 1, True, "cpu", 0)
    steps.compile_in_processes([example.MODELS["dit"]], settings, 2)
    assert sorted(run for _, run in started) == ["cupynorm-compiled", "torch-compiled"]


@pytest.mark.slow
def test_compiling_ahead_compiles_both_phases(example, eager, variants):
    for whole, num_layers in ((0, 1), (2, 2)):
        variants.clear()
        settings = steps.Settings(("torch", "torch-compiled"), 1, True, "cpu", 0, whole=whole)
        with torch._inductor.config.patch(compile_threads=4):  # restored afterwards
            steps.compile_ahead(example.MODELS["llama3"], "torch-compiled", settings)
            assert torch._inductor.config.compile_threads == 1
        (found,) = variants["torch-compiled"]
        assert found.backend.num_graphs == 2 and len(found.model.blocks) == num_layers


def test_whole_models_are_one_graph(example, eager, variants, tmp_path, capsys):
    file = tmp_path / "whole.json"
    asked = ("--quick", "--device", "cpu", "--models", "vit", "--steps", "2", "--whole", "1")
    assert example.main([*asked, "--runs", "torch-compiled", "--json", str(file)]) == 0
    (found,) = variants["torch-compiled"]
    assert found.backend.num_graphs == 2 and len(found.model.blocks) == 1
    assert "Each model is compiled as one graph. " in capsys.readouterr().out
    (model,) = report.Result.from_json(file.read_text()).models.values()
    assert model.about == "tiny; layers: 1" and len(model.phases) == 2


def test_tables():
    times = {"torch": [2.0, 3.0, 4.0], "cupynorm": [1.0, 2.0, 3.0], "torch-compiled": [1.0] * 3}
    distances = {"float64": {"loss": 1e-3}, "cupynorm": {"loss": 2e-3}}
    made = result_of(times, distances)
    assert len(made.kernels()) == 1
    made.models["gpt2"].phases["training"].kernels = {"torch": 1.5, "cupynorm": 1.25}
    row = ["GPT-2 124M", "training", "1.50", "1.25", "-"]
    assert made.kernels()[1:] == [row] and "in which kernels are on the GPU" in str(made)
    assert "| GPT-2 124M | training | 1.50 | 1.25 | - |" in made.markdown()
    assert len(made.norms()) == 1
    made.models["gpt2"].phases["training"].norms = {"torch": 0.25, "cupynorm": 0.125}
    row = ["GPT-2 124M", "training", "1.50", "0.25", "0.12", "+20.0%"]
    assert made.norms()[1:] == [row] and "of norms among them" in str(made)
    assert "| GPT-2 124M | training | 1.50 | 0.25 | 0.12 | +20.0% |" in made.markdown()
    assert made.times("training") == [
        ["model", "torch", "cupynorm", "gain", "torch compiled"],
        ["GPT-2 124M", "3.00 ± 0.50", "2.00 ± 0.50", "+50.0% ± 16.7", "1.00 ± 0.00"],
    ]
    (gains,) = made.gains()
    assert gains == (
        "Gain of cupynorm over torch: +50.0% to +50.0% in training, +50.0% to +50.0% in inference."
    )
    assert made.distances()[1] == ["GPT-2 124M", "loss", "1e-03", "2e-03", "-"]
    assert report.Result.from_json(made.to_json()) == made
    text = made.markdown()
    assert "NVIDIA H200, torch 2.11, cupynorm 0.1, 2026-11-25. Milliseconds" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "| GPT-2 124M | 3.00 ± 0.50 | 2.00 ± 0.50 | +50.0% ± 16.7 | 1.00 ± 0.00 |" in text
    assert "| GPT-2 124M | loss | 1e-03 | 2e-03 | - |" in text
    assert text.endswith("Made by `python notebooks/models.py`.")


def test_what_roundings_do_not_explain():
    def sentences(**distances):
        found = {run.replace("_", "-"): {"loss": each} for run, each in distances.items()}
        return result_of({}, found).too_far

    assert not sentences(float64=1e-3, cupynorm=7e-3)
    (first, _) = sentences(float64=1e-3, cupynorm=9e-3)
    assert first == (
        "GPT-2 124M, training: loss of cupynorm differs from torch's by 9.0e-03; "
        "roundings explain 8.0e-03"
    )
    # Compiled code rounds elsewhere, as torch's own does.
    assert not sentences(float64=1e-5, torch_compiled=1e-3, cupynorm_compiled=7e-3)
    assert sentences(float64=1e-5, torch_compiled=1e-3, cupynorm=7e-3)
    assert sentences(float64=1e-5, torch_compiled=1e-3, cupynorm_compiled=9e-3)
    assert not sentences(float64=1e-5, cupynorm_compiled=1.0)


def test_a_file_is_shown_drawn_and_written_into_the_document(
    example, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    times = {run: [float(at + 1)] * 3 for at, run in enumerate(report.RUNS)}
    made = result_of(times, {})
    (tmp_path / "models.json").write_text(made.to_json())
    (tmp_path / "docs").mkdir()
    document = tmp_path / "docs" / "benchmarks.md"
    document.write_text("before\n<!-- steps -->\nold\n<!-- /steps -->\nafter\n")
    asked = ["--from", "models.json", "--plot", "models.svg", "--docs"]
    assert example.main(asked) == 0
    assert capsys.readouterr().out == f"{made}\n"
    text = document.read_text()
    assert made.markdown() in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    drawn = (tmp_path / "models.svg").read_text()
    assert "<svg" in drawn and len(drawn) > 5000
    document.write_text("nothing")
    with pytest.raises(ValueError, match="docs/benchmarks.md needs the markers <!-- steps -->"):
        example.main(asked)


def test_a_run_that_was_stopped_is_resumed(example, tmp_path, variants):
    file = tmp_path / "models.json"
    asked = ["--quick", "--device", "cpu", "--steps", "2", "--json", str(file), "--resume"]
    assert example.main([*asked, "--models", "dit"]) == 0
    first = report.Result.from_json(file.read_text())
    command = first.settings["command"]
    assert command.endswith("--steps 2 --json models.json --models dit")
    assert example.main([*asked, "--models", "dit,bert"]) == 0
    both = report.Result.from_json(file.read_text())
    assert [*both.models] == ["bert", "dit"] and both.models["dit"] == first.models["dit"]
    assert both.settings["command"] == f"{command} && {command},bert --resume"
    assert len(variants["cupynorm"]) == 2
    with pytest.raises(ValueError, match="--resume: seed of the settings is 1, in .* 0"):
        example.main([*asked, "--seed", "1"])


def test_phases_are_added(example, tmp_path):
    file = tmp_path / "models.json"
    asked = ["--quick", "--device", "cpu", "--steps", "2", "--json", str(file), "--models", "dit"]
    assert example.main([*asked, "--phases", "inference"]) == 0
    (first,) = report.Result.from_json(file.read_text()).models.values()
    assert [*first.phases] == ["inference"]
    assert example.main([*asked, "--resume"]) == 0
    (both,) = report.Result.from_json(file.read_text()).models.values()
    assert [*both.phases] == ["training", "inference"]
    assert both.phases["inference"] == first.phases["inference"]


def test_no_model_is_started_that_would_end_too_late(example, monkeypatch, tmp_path):
    """Each takes 30 seconds of a clock here."""
    now = [0.0]

    def measure(subject, settings, bar):
        now[0] += 30
        return report.ModelResult(subject.title, "tiny"), []

    monkeypatch.setattr(example, "measure", measure)
    monkeypatch.setattr(example, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    file = tmp_path / "models.json"
    asked = ["--quick", "--device", "cpu", "--json", str(file), "--models", "dit,vit,gpt2"]
    assert example.main([*asked, "--seconds", "89"]) == 1
    found = report.Result.from_json(file.read_text())
    assert [*found.models] == ["vit", "dit"]
    now[0] = 0.0
    assert example.main([*asked, "--seconds", "90"]) == 0


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--resume"], "--resume is given without --json"),
        (["--graphs", "--phases", "training"], "--graphs is given without inference"),
        (["--models", "gpt9"], "'gpt9' is unknown; expected some of gpt2,bert"),
        (["--runs", "apex"], "'apex' is unknown; expected some of torch"),
        (["--graphs", "--device", "cpu"], "--graphs is given with --device cpu; expected a GPU"),
        (["--profile", "--device", "cpu"], "--profile is given with --device cpu; expected a GPU"),
        (["--steps", "0"], "0 is too few; expected 1 or more"),
    ],
)
def test_what_it_refuses(example, arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        example.main(arguments)
    assert sentence in capsys.readouterr().err


def test_the_tables_of_the_documents_are_those_of_the_file():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    start, end = "<!-- steps -->\n\n", "\n\n<!-- /steps -->"
    if not MEASURED.exists():
        assert start not in text
        return
    measured = report.Result.from_json(MEASURED.read_text(encoding="utf-8"))
    assert text.partition(start)[2].partition(end)[0] == measured.markdown()
    assert measured.environment["gpu"] and not measured.settings["quick"]
    assert not measured.too_far


@pytest.mark.gpu
def test_all_runs_on_a_gpu(example, tmp_path):
    torch.compiler.reset()
    file = tmp_path / "models.json"
    asked = ["--quick", "--profile", "--models", "qwen3,dit", "--json", str(file)]
    assert example.main(asked) == 0
    for model in json.loads(file.read_text())["models"].values():
        for phase in model["phases"].values():
            assert len(phase["milliseconds"]) >= 4
            # The GPU computes during a part of the step.
            assert all(
                0 < phase["kernels"][run] < 1.1 * max(each)
                for run, each in phase["milliseconds"].items()
            )
            assert {*phase["slowest"]} == {*phase["kernels"]}
            assert {*phase["norms"]} == {"torch", "cupynorm"}
            assert all(0 < each < phase["kernels"][run] for run, each in phase["norms"].items())


@pytest.mark.gpu
def test_graphs_on_a_gpu(example, tmp_path):
    file = tmp_path / "models.json"
    asked = ["--quick", "--models", "dit", "--runs", "cupynorm", "--graphs", "--json", str(file)]
    assert example.main(asked) == 0
    (model,) = report.Result.from_json(file.read_text()).models.values()
    found = model.phases[report.GRAPHED]
    assert {*found.milliseconds} == {"torch", "cupynorm"} and not found.kernels
    assert {*found.distances} == {"torch", "float64", "cupynorm"}
