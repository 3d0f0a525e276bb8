"""The README says what the code says: its dispatch table, its commands, its calls."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import cupynorm
from cupynorm.__main__ import main
from cupynorm.bench_report import read
from cupynorm.devices import DEVICES
from cupynorm.dispatch import plan, widest
from cupynorm.strategies import STRATEGIES

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def block(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, re.DOTALL)
    assert found, f"README.md has no block {name}"
    return found[1].strip()


def strategies_markdown() -> str:
    """The dispatch table as the README shows it: the widest rows of bfloat16 on an H200."""
    device = DEVICES["H200"]
    lines = ["| strategy | a row waits | widest row, forward | widest row, backward |", "|---|---|---|---|"]
    for row in STRATEGIES.values():
        problems = (plan(4096, direction=direction, device=device).problem for direction in ("forward", "backward"))
        cols = (widest(row.name, problem, device) for problem in problems)
        lines.append(
            " | ".join([f"| {row.name}", row.row_waits, *("any" if each is None else f"{each:,}" for each in cols)]) + " |"
        )
    return "\n".join(lines)


def test_the_dispatch_table_is_generated():
    assert block("strategies") == strategies_markdown()


def test_the_table_of_speeds_is_what_was_measured():
    assert block("bench") == read(NOTEBOOKS / "h200.json").markdown().strip()


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("h200*.json")), ids=lambda path: path.name)
def test_commands_beside_figures_can_be_typed_anywhere(path):
    """They name the file that holds them, and no folder of the machine they ran on."""
    command = json.loads(path.read_text(encoding="utf-8"))["settings"]["command"]
    assert f"--json {path.name}" in command and "/" not in command


def test_ci_runs_the_command_of_the_readme():
    script = (Path(__file__).parents[1] / ".ci" / "run").read_text(encoding="utf-8")
    assert "<!-- test -->" in script and "README.md" in script
    command = block("test").removeprefix("```sh\n").removesuffix("\n```")
    assert command.startswith("pip install") and "pytest" in command and "\n" not in command


def test_every_call_it_names_exists():
    named = set(re.findall(r"^\| `([a-z_]+)`(?:, `([a-z_]+)`)*", README, re.MULTILINE)[0]) | {"plan", "check", "rms_norm"}
    for name in filter(None, named):
        assert callable(getattr(cupynorm, name)), name


def run(name, num_lines=None):
    """The names that a block of Python leaves behind, of so many lines."""
    code = block(name).removeprefix("```python\n").removesuffix("\n```")
    assert num_lines is None or sum(bool(line) for line in code.splitlines()) == num_lines
    names = {}
    exec(code, names)
    return names


def test_its_swap_runs(capsys):
    pytest.importorskip("torch")
    names = run("swap")
    assert "torch.RMSNorm  cupynorm.RMSNorm" in capsys.readouterr().out
    assert type(names["model"][1]).__module__.startswith("torch.")


def test_its_linear_layer_runs():
    torch = pytest.importorskip("torch")
    names = run("linear", 5)
    layer = names["layer"]
    assert names["y"].shape == (32, 192) and layer._fp8_states["forward"].scale[0] != 1
    for name in ("query_weight", "key_weight", "value_weight", "value_bias", "layer_norm_weight"):
        gradient = getattr(layer, name).grad
        assert torch.isfinite(gradient).all() and gradient.abs().max() > 0, name


def test_its_8_bit_output_runs():
    torch = pytest.importorskip("torch")
    names = run("fp8", 5)
    y, norm = names["y"], names["norm"]
    assert y.data.dtype == torch.float8_e4m3fn and y.scale_inv.item() == 1 and y.transposed.shape == (256, 32)
    assert norm._fp8_scales.scale != 1 and torch.isfinite(norm.weight.grad).all() and norm.weight.grad.abs().max() > 0


def test_the_scales_it_names_are_those_that_there_are():
    from cupynorm.problem import SCALINGS

    rows = "\n".join(line.split("|")[1] for line in README.splitlines() if line.startswith(("| `None`", '| `"')))
    assert set(re.findall(r'"(\w+)"', rows)) == set(SCALINGS) - {"given"}
    layer_norm = next(line for line in README.splitlines() if line.startswith("| `layer_norm`, `rms_norm` |"))
    options = set(re.findall(r"`(\w+)`", layer_norm.split("|")[2]))
    assert options <= set(inspect.signature(cupynorm.layer_norm).parameters)
    assert {"scale", "amax", "power_of_two", "transpose"} <= options


def test_its_plan_command_prints_a_plan(capsys):
    assert main(["plan", "4096", "--device", "H200"]) == 0
    assert "forward_block.cu" in capsys.readouterr().out


def test_every_file_it_names_is_there():
    named = set(re.findall(r"`(?:python )?((?:notebooks|tests|cuda_src|cupynorm|reference)/[\w./]*)`", README))
    assert {"notebooks/train_gpt.py", "notebooks/swap_hugging_face.py", "cupynorm/norm.py"} <= named
    for path in named:
        assert (Path(__file__).parents[1] / path).exists(), path


def test_what_it_says_of_several_ranks_is_checked():
    """Of DistributedDataParallel, fully_shard and DTensors: by name, in what two processes run."""
    pytest.importorskip("torch")
    two_ranks = pytest.importorskip("two_ranks")
    claimed = {"distributed_data_parallel"}
    if two_ranks.HAS_SHARDING:
        claimed |= {
            "fully_sharded", "fully_sharded_and_compiled", "dtensors_of_any_placement", "they_lie_where_torch_puts_its_own",
            "plain_parameters_count_as_the_same_on_every_rank",
        }  # fmt: skip
    assert claimed <= set(two_ranks.CHECKS)
