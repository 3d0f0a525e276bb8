"""notebooks/models.py: six models, their runs, and the tables of what was measured."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
import models
import torch

import cupynorm

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "notebooks" / "models_eager.json"
DIT = ("--quick", "--device", "cpu", "--models", "dit", "--steps", "2")


@pytest.fixture(autouse=True)
def as_many_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # which --quick sets


def result_of(times, distances) -> models.Result:
    """A model whose phases all have these times and distances."""
    phases = {phase: models.Phase(dict(times), dict(distances)) for phase in models.PHASES}
    return models.Result(
        {"gpu": "NVIDIA H200", "torch": "2.11", "cupynorm": "0.1", "date": "2026-11-25T01"},
        {"command": "python notebooks/models.py", "steps": 3, "quick": False},
        {"gpt2": models.ModelResult("GPT-2 124M", "16 x 1024 tokens", phases)},
    )


def test_a_gain_is_of_equal_turns():
    """Not of the medians: the clocks of a GPU may differ from turn to turn."""
    phase = models.Phase({"torch": [10.0, 20.0, 33.0], "cupynorm": [10.0, 16.0, 30.0]})
    middle, spread = phase.gain("cupynorm")
    assert middle == pytest.approx(0.1) and spread == pytest.approx(0.0625)
    assert phase.gain("enabled") is None


@pytest.mark.slow
def test_quick_measures_six_models(tmp_path, monkeypatch, capsys):
    made, variant_of = [], models.variant_of
    keep = lambda model, run: made.append((run, variant_of(model, run))) or made[-1][1]  # noqa: E731
    monkeypatch.setattr(models, "variant_of", keep)
    file = tmp_path / "models.json"
    asked = ["--quick", "--device", "cpu", "--runs", "cupynorm", "--json", str(file)]
    assert models.main(asked) == 0
    found, out = models.Result.from_json(file.read_text()), capsys.readouterr().out
    assert [*found.models] == [*models.MODELS] and found.to_json() + "\n" == file.read_text()
    for model in found.models.values():
        for phase, quantities in zip(model.phases.values(), ({"loss", "gradients"}, {"outputs"})):
            assert [*phase.milliseconds] == ["torch", "cupynorm"]
            assert all(len(each) == 3 and min(each) > 0 for each in phase.milliseconds.values())
            assert [*phase.distances] == ["float64", "cupynorm"]
            # Float32, and norms that differ: not the same model twice.
            assert all({*each} == quantities for each in phase.distances.values())
            assert 0 < max(phase.distances["cupynorm"].values()) < 2e-6
        assert f"| {model.title} |" in out
    for run, model in made:
        kinds = {type(each).__module__.partition(".")[0] for each in model.modules()}
        assert ("cupynorm" in kinds) == (run == "cupynorm")


def test_full_sizes_are_those_of_the_papers():
    def parameters(name):
        with torch.device("meta"):
            model = models.MODELS[name].make(**models.MODELS[name].sizes)
        return sum(each.numel() for each in model.parameters())

    counts = {"gpt2": 124.4e6, "bert": 109.5e6, "vit": 304.3e6}
    for name, expected in counts.items():
        assert parameters(name) == pytest.approx(expected, rel=0.01), name


def test_a_wrong_norm_is_found(monkeypatch, capsys):
    forward = cupynorm.LayerNorm.forward
    monkeypatch.setattr(cupynorm.LayerNorm, "forward", lambda self, x: 1.001 * forward(self, x))
    assert models.main(DIT) == 1
    assert "TOO FAR: DiT-L/2, 1 block, training: gradients of cupynorm" in capsys.readouterr().out


def test_a_run_that_fails_leaves_the_others(monkeypatch, capsys):
    def fails(self, x):
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(cupynorm.LayerNorm, "forward", fails)
    assert models.main(DIT) == 1
    out = capsys.readouterr().out
    assert "DiT-L/2, 1 block, training: cupynorm failed: RuntimeError: no kernel\n" in out


def test_results_that_are_not_finite_are_no_distance():
    one, nan = torch.ones(3), torch.full((3,), torch.nan)
    assert models.distance([one], [2 * one]) == pytest.approx(0.5)
    for found, expected in ((nan, one), (one, 0 * one), (one, nan)):
        with pytest.raises(ArithmeticError, match="are not comparable"):
            models.distance([found], [expected])


def test_what_roundings_do_not_explain():
    def sentences(**distances):
        found = {run: {"loss": each} for run, each in distances.items()}
        return result_of({}, found).too_far

    assert not sentences(float64=1e-3, cupynorm=7e-3)
    (first, _) = sentences(float64=1e-3, cupynorm=9e-3)
    assert first == (
        "GPT-2 124M, training: loss of cupynorm differs from torch's by 9.0e-03; "
        "roundings explain 8.0e-03"
    )
    assert sentences(float64=1e-5, enabled=7e-3)


def test_a_file_is_written_into_the_document(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = result_of({run: [float(at + 1)] * 3 for at, run in enumerate(models.RUNS)}, {})
    Path("models.json").write_text(made.to_json())
    Path("docs").mkdir()
    document = Path("docs/benchmarks.md")
    document.write_text("before\n<!-- steps -->\nold\n<!-- /steps -->\nafter\n")
    assert models.main(["--docs", "models.json"]) == 0
    assert capsys.readouterr().out == f"{made}\n"
    text = document.read_text()
    assert made.markdown() in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")


def test_the_tables_of_the_documents_are_those_of_the_file():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    measured = models.Result.from_json(MEASURED.read_text(encoding="utf-8"))
    table = text.partition("<!-- steps -->")[2].partition("<!-- /steps -->")[0]
    assert table.strip() == measured.markdown()
    assert measured.environment["gpu"] and not measured.settings["quick"]
    assert not measured.too_far


@pytest.mark.gpu
def test_all_runs_on_a_gpu(tmp_path):
    file = tmp_path / "models.json"
    asked = ["--quick", "--models", "gpt2,qwen3", "--json", str(file)]
    assert models.main(asked) == 0
    for model in models.Result.from_json(file.read_text()).models.values():
        assert all({*each.milliseconds} == {*models.RUNS} for each in model.phases.values())
