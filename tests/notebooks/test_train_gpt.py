"""notebooks/train_gpt.py: the losses with torch's norms and with cupynorm's agree.

A wrong norm is seen in them.
"""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
TINY = ["--steps", "12", "--layers", "2", "--width", "64", "--batch", "4", "--context", "32"]


def allowed(trained) -> float:
    """Float32 rounds each weight and each sum. 12 steps accumulate less than 2^10 roundings of a
    loss of this size."""
    return 2.0**-24 * 2**10 * trained["torch"].losses[0]


def test_the_losses_agree_on_a_cpu(example, tmp_path, capsys):
    file = tmp_path / "losses.json"
    runs = ["--runs", "torch,float64,cupynorm", "--json", str(file)]
    trained = example.main([*TINY, "--device", "cpu", *runs])
    losses = trained["torch"].losses
    assert len(losses) == 12 and 5.4 < losses[0] < 5.7  # ln 256 = 5.55 is guessing
    assert losses[-1] < losses[0] - 0.3
    for run in ("float64", "cupynorm"):
        assert len(trained[run].losses) == 12
        assert example.largest_gap(trained[run], trained["torch"]) <= allowed(trained)
    printed = capsys.readouterr().out
    assert all(f"\n{run} " in printed for run in trained)
    content = json.loads(file.read_text())
    names, values = ("steps", "layers", "width", "batch", "context"), (12, 2, 64, 4, 32)
    assert content["settings"] == dict(zip(names, values)) | {"device": "cpu"}
    for run, each in content["runs"].items():
        assert each["losses"] == trained[run].losses
        assert len(each["milliseconds"]) == 12 and min(each["milliseconds"]) > 0


def test_a_wrong_norm_would_show(example, monkeypatch):
    """One part in a thousand of a norm's output."""
    plain = example.cupynorm.LayerNorm.forward
    wrong = lambda self, x: plain(self, x) * 1.001  # noqa: E731
    monkeypatch.setattr(example.cupynorm.LayerNorm, "forward", wrong)
    trained = example.main([*TINY, "--device", "cpu", "--runs", "torch,cupynorm"])
    assert example.largest_gap(trained["cupynorm"], trained["torch"]) > allowed(trained)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--runs", "apex"], "--runs has apex; expected some of torch"),
        (["--width", "193"], "--width is 193"),
    ],
)
def test_what_it_refuses(example, arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        example.main(arguments)
    assert sentence in capsys.readouterr().err


@pytest.mark.gpu
def test_all_runs_on_a_gpu(example):
    """The run float64 measures how far bfloat16 alone moves the losses: those of cupynorm may
    differ by a few times as much."""
    trained = example.main([*TINY, "--steps", "40", "--device", "cuda"])
    assert list(trained) == list(example.RUNS)
    roundings = example.largest_gap(trained["float64"], trained["torch"])
    more = 2.0**-16 * trained["torch"].losses[0]
    assert example.largest_gap(trained["cupynorm"], trained["torch"]) <= 8 * roundings + more
    assert trained["cupynorm"].losses[-1] < trained["cupynorm"].losses[0] - 0.5
