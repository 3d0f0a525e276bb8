"""README.md and docs/ match the code: tables, figures, commands, code, files."""

from __future__ import annotations

import dataclasses
import inspect
import re
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import cupynorm
from cupynorm.bench.report import SHORT_COLS, read
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import widest
from cupynorm.dispatch.problem import SCALINGS
from cupynorm.dispatch.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
README, CALLS, FLOAT8, FUNCTORS = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/calls.md", "docs/float8.md", "docs/functors.md")
)


def block(name: str, text: str = README) -> str:
    """The text between the markers of a name."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found, f"there is no block {name}"
    return found[1].strip()


def command(name: str) -> str:
    """The only line of a shell block."""
    line = block(name).removeprefix("```sh\n").removesuffix("\n```")
    assert "\n" not in line
    return line


def run(name: str, text: str = README, **names: object) -> dict[str, object]:
    """Runs a block of Python and returns its names."""
    code = block(name, text).removeprefix("```python\n").removesuffix("\n```")
    exec(code, names)
    return names


def rows(text: str) -> list[list[str]]:
    """The cells of each line of a table, without its two header lines."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# Claims.


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(path):
    """Files in backticks by their path in the repository, links by that from the document."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(
        r"`(?:python )?((?:\.ci|notebooks|tests|cuda_src|cupynorm|reference|docs)/[\w./-]*)`", text
    )
    for each in named:
        assert (ROOT / each).exists(), each
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)", text)
    links += [(link, "") for link in re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE)]
    for link, anchor in links:
        target = path.parent / link if link else path
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
            }, anchor


def test_the_version_is_the_same_everywhere():
    version = re.escape(cupynorm.__version__)
    for name, line in (
        ("pyproject.toml", rf'^version = "{version}"$'),
        ("CITATION.cff", rf"^version: {version}$"),
        ("CHANGELOG.md", rf"^## \[{version}\] - (\d{{4}}-\d\d-\d\d|unreleased)$"),
    ):
        assert re.search(line, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE), name


# Commands.


def test_ci_runs_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "<!-- test -->" in script and "README.md" in script
    assert command("test").startswith("pip install") and "pytest" in command("test")


def test_the_plan_of_the_documents_is_that_of_the_code():
    text = (ROOT / "docs" / "dispatch.md").read_text(encoding="utf-8")
    assert block("plan", text) == f"```\n{cupynorm.plan(1023, device='H200')}\n```"


# Tables.


def test_the_dispatch_table_has_the_widest_rows_of_bfloat16_on_an_h200():
    table = rows(block("strategies"))
    assert [row[0] for row in table] == list(STRATEGIES)
    device = DEVICES["H200"]
    for name, _, _, *shown in table:
        for direction, text in zip(("forward", "backward"), shown):
            cols = widest(
                name, cupynorm.plan(4096, direction=direction, device=device).problem, device
            )
            assert text == ("any" if cols is None else f"{cols:,}"), (name, direction)


def test_the_dispatch_table_has_the_paths_that_plans_take():
    """Plans for these widths, dtypes and GPUs have exactly the paths of the table."""
    found: dict[str, set[str]] = {name: set() for name in STRATEGIES}
    widths = (8, 127, 768, 2332, 4096, 12288, 14000, 24576, 65536, 300_000, 400_000, 2_000_000)
    for device in ("H200", "A100"):
        for num_cols in widths:
            for dtype in ("bfloat16", "float32"):
                options = [{"direction": "forward"}, {"direction": "backward"}]
                options += [{"out_dtype": "float8_e4m3fn", "scale": "row"}]
                for each in options:
                    made = cupynorm.plan(num_cols, dtype=dtype, device=device, **each)
                    found[made.strategy].add(made.tile.path)
    assert {row[0]: set(row[1].split(", ")) for row in rows(block("strategies"))} == found


def test_tables_of_speeds_match_the_measurements():
    measured = read(NOTEBOOKS / "h200.json")
    assert block("bench") == measured.markdown().strip()
    assert len(rows(block("bench"))) == len(SHORT_COLS) == 8


def test_the_cells_that_it_wins_are_those_that_the_readme_counts():
    cells = read(NOTEBOOKS / "h200.json").measurements
    fastest = sum("cupynorm" in each.fastest for each in cells)
    num_widths = len({each.cell.num_cols for each in cells})
    text = " ".join(README.split())
    assert (
        f"Over {num_widths} widths and three dtypes" in text
        and len({each.cell.dtype for each in cells}) == 3
    )
    assert f"in {fastest} of {len(cells)} cells" in text


def test_the_cells_that_others_win_are_those_that_the_readme_counts():
    cells = read(NOTEBOOKS / "h200_models.json").measurements
    behind = [each for each in cells if "cupynorm" not in each.fastest]
    slower = [each.median("cupynorm") / each.median(each.right[0]) - 1 for each in behind]
    said = re.search(r"is (\d+) to (\d+)% faster in (\d+) of (\d+) cells", README)
    assert tuple(map(int, said.groups())) == (
        round(100 * min(slower)),
        round(100 * max(slower)),
        len(behind),
        len(cells),
    )


# Code.


PASTED = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("pasted", PASTED, ids=["enable", "check", "plan"])
def test_its_blocks_print_what_they_show(pasted, capsys, monkeypatch):
    """The comments at the end of a block are what it prints, perhaps over several lines."""
    if "torch" in pasted:
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    exec(pasted, {})
    if "enable" in pasted:
        cupynorm.disable()
    printed = capsys.readouterr().out
    shown = re.findall(r"^# (.*)$", pasted, re.MULTILINE)
    assert shown and " ".join(printed.split()) == " ".join(" ".join(shown).split())


def test_the_functor_of_the_documents_runs(capsys):
    torch = pytest.importorskip("torch")
    names = run("functor", FUNCTORS)
    x, gate, y = names["x"], names["gate"], names["y"]
    right = torch.nn.functional.rms_norm(x, (64,)) * (1 + 0.5 * gate)
    torch.testing.assert_close(y, right)
    for given, gradient in zip((x, gate), torch.autograd.grad(right.sum(), (x, gate))):
        torch.testing.assert_close(given.grad, gradient)
    gated = names["gated"]
    run("check_functor", FUNCTORS, cupynorm=cupynorm, gated=gated)
    assert "all within what their dtypes allow" in capsys.readouterr().out
    swapped = "; ".join(reversed(gated.backward.rstrip(";").split("; "))) + ";"
    wrong = dataclasses.replace(gated, backward=swapped)
    (found,) = cupynorm.check_functor(wrong(gate="cols", alpha=0.5), on="cpu").diagnoses
    assert found in " ".join(FUNCTORS.split())


def test_the_shipped_functors_are_listed():
    table = next(part for part in FUNCTORS.split("\n## ") if part.startswith("Those that ship"))
    shipped = {
        name: each
        for name, each in vars(cupynorm.functors).items()
        if isinstance(each, cupynorm.types.Functor)
    }
    listed = {row[0].strip("`"): row for row in rows(table)}
    assert listed.pop("dropout")[1:] == ["x", "0 with probability p, or x / (1 - p)", "p, seed"]
    assert listed.keys() == shipped.keys() - {"_drop"}
    (members,) = re.findall(r"members: \[(.*)\]", (ROOT / "docs/reference/norms.md").read_text())
    assert set(members.split(", ")) == {*listed, "dropout"}
    for name, (_, value, _, takes) in listed.items():
        own = shipped[name]
        assert {"load": "x", "store": "y"}[own.role] == value
        assert tuple(takes.split(", ")) == own.arrays + own.numbers + own.seeds


# Names.


def test_every_public_call_is_listed():
    """The table of docs/calls.md has every public function and class that a user calls."""
    listed = set(
        re.findall(r"`([\w.]+)`", "\n".join(row[0] for row in rows(block("calls", CALLS))))
    )
    assert all(attrgetter(name)(cupynorm) for name in listed)
    moved = {f"{module}.{name}" for name, module in cupynorm._MOVED.items()}
    public = {*(name for name in dir(cupynorm) if not name.startswith("_")), *moved}
    of_results = {name for name in public if name.startswith("types.")}
    others = {"Tile", "DEVICES", "STRATEGIES", "MissingLibraryError", "SwappedNorms", "types"}
    assert public - listed <= of_results | others | {"recipes", "reference"}


def test_every_keyword_of_the_norms_is_listed():
    row = next(row for row in rows(block("calls", CALLS)) if row[0].startswith("`layer_norm`"))
    listed = set(re.findall(r"`(\w+)`", row[1]))
    parameters = inspect.signature(cupynorm.layer_norm).parameters.values()
    assert listed == {
        each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_the_scales_of_the_documents_are_those_that_there_are():
    listed = {
        name for row in rows(block("scales", FLOAT8)) for name in re.findall(r'"(\w+)"', row[0])
    }
    assert listed == set(SCALINGS) - {"given", "block64"}


# Install, and errors.


def code_of(cell: str) -> str:
    found = re.match(r"^`([^`]+)`", cell)
    assert found, cell
    return found[1]


ERRORS, INSTALL = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("errors.md", "install.md")
)
RAISED = [
    row
    for name in ("arrays", "options", "torch")
    for row in rows(block(f"errors of {name}", ERRORS))
]


@pytest.mark.parametrize("row", RAISED, ids=lambda row: re.sub(r"\W+", "-", row[0])[1:40])
def test_calls_raise_the_messages_of_the_page(row):
    torch = pytest.importorskip("torch")
    message, call = map(code_of, row[:2])
    if "torch finds no GPU" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    names = {"cupynorm": cupynorm, "np": np, "torch": torch}
    names |= {"x": np.ones((2, 8)), "t": torch.ones(2, 8)}
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
        exec(call, names)
    assert str(raised.value) == message


def test_the_extras_of_the_install_page_are_those_of_pyproject():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    text = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    shown = "\n".join(row[1] for row in rows(block("extras", INSTALL)))
    named = re.findall(r"\[([\w,]+)\]\"", shown)
    assert {name for names in named for name in names.split(",")} == set(extras)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem == "torch_compile"), id=path.stem)
        for path in DOCUMENTS
        if path.parent == ROOT / "docs"
    ],
)
def test_code_of_the_documents_runs(path):
    """Blocks of Python in docs/, each from the top of its page on.

    tests/nn/test_decode_graph.py runs the block that needs a GPU.
    """
    code = r"^```python\n(.*?)^```$"
    blocks = re.findall(code, path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    for block in blocks:
        if "torch.cuda" not in block:
            pytest.importorskip("torch")
            exec(compile(block, path.name, "exec"), names)
    assert bool(names) == any("torch.cuda" not in block for block in blocks)
