"""Every notebook runs from top to bottom without a GPU, and is stored with its outputs.

A cell with the tag "exact" prints the same text on every machine.
"""

import re
from pathlib import Path

import pytest

import cupynorm
from cupynorm.gpu import on_cpu

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALL_WITHIN = "all within what their dtypes allow"
PICTURES = {"image/svg+xml", "image/png"}
WITHOUT_COMPILER = {"1_layer_norm", "6_speed", "7_eight_bits"}  # run no kernel


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def text_of(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def exact(notebook):
    """What the cells print that are the same everywhere."""
    cells = [cell for cell in code_cells(notebook) if "exact" in cell.metadata.get("tags", ())]
    return [text_of(cell) for cell in cells]


def num_pictures(notebook):
    return sum(bool(PICTURES & set(output.get("data", {}))) for output in outputs(notebook))


def conditions(notebook):
    """The last cell, which asserts, and what the cells print that call cupynorm.check."""
    last = code_cells(notebook)[-1]
    assert len(re.findall(r"^\s*assert \S", last.source, re.M)) >= 2, "ends with conditions"
    return [
        text_of(cell)
        for cell in code_cells(notebook)
        if re.search(r"cupynorm\.check\(", cell.source)
    ]


def run(notebook, monkeypatch):
    """Runs all cells in their folder. Raises if a cell does."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    nbclient.NotebookClient(
        notebook, timeout=90, kernel_name="python3", resources=resources
    ).execute()


def skip_without_compiler():
    try:
        on_cpu.compiler()
    except on_cpu.NoCompilerError as error:
        pytest.skip(str(error))


def test_the_notebooks_are_numbered_in_the_order_of_reading():
    assert NOTEBOOKS
    numbers = [path.stem.partition("_")[0] for path in NOTEBOOKS]
    assert numbers == [str(at) for at in range(1, len(NOTEBOOKS) + 1)]
    overview = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((.*?)\)", overview) == [path.name for path in NOTEBOOKS]
    for path, number in zip(NOTEBOOKS, numbers):
        assert read(path).cells[0].source.startswith(f"# {number} ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs(path):
    notebook = read(path)
    assert path.stat().st_size < 300_000
    assert all(
        output.output_type in ("stream", "execute_result", "display_data")
        for output in outputs(notebook)
    )
    assert all(output.get("name") != "stderr" for output in outputs(notebook))
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run all cells, once, from the top"
    assert num_pictures(notebook) >= 2
    assert all(ALL_WITHIN in text for text in conditions(notebook))
    assert exact(notebook) and all(exact(notebook))
    stored = path.read_text(encoding="utf-8")
    for folder in (str(ROOT), str(Path.home()), "/tmp/", "/home/"):
        assert f"{folder.rstrip('/')}/" not in stored  # no path of the machine that made it


def test_stored_outputs_name_lines_as_the_files_have_them():
    skip_without_compiler()
    (path,) = (path for path in NOTEBOOKS if path.stem == "2_one_warp")
    named = re.compile(r"^(\w+\.cuh?:\d+) +(\w+)", re.MULTILINE)
    tile = cupynorm.Tile(pack_size=4, threads_per_row=32, packs_per_thread=2, rows_per_block=2)
    fresh = named.findall(str(cupynorm.trace(256, 4, "float32", strategy="warp", tile=tile)))
    texts = [text_of(cell) for cell in code_cells(read(path))]
    (stored,) = (found for text in texts if (found := named.findall(text)))
    assert fresh and stored == fresh


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_reader_is_told_what_to_change(path):
    notebook = read(path)
    assert any("# Change this" in cell.source for cell in code_cells(notebook))
    words = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert re.search(r"\bTry\b", words)
    lines = "\n".join(cell.source for cell in notebook.cells).splitlines()
    assert max(map(len, lines)) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, monkeypatch):
    if path.stem not in WITHOUT_COMPILER:
        skip_without_compiler()
    if "import torch" in path.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    stored, fresh = read(path), read(path)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    run(fresh, monkeypatch)
    assert num_pictures(fresh) == num_pictures(stored)
    assert all(ALL_WITHIN in text for text in conditions(fresh))
    assert exact(fresh) == exact(stored)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, asked, old, new",
    [
        ("2", "Try `num_cols=252`", "dtype = 256,", "dtype = 252,"),
        ("4", "Try `num_cols = 1024`", "num_cols = 128", "num_cols = 1024"),
    ],
)
def test_the_change_that_a_notebook_asks_for_runs(number, asked, old, new, monkeypatch):
    skip_without_compiler()
    notebook = read(next(path for path in NOTEBOOKS if path.stem.startswith(number)))
    before = [text_of(cell) for cell in code_cells(notebook)]
    assert any(asked in cell.source for cell in notebook.cells)
    changed = next(cell for cell in code_cells(notebook) if old in cell.source)
    changed.source = changed.source.replace(old, new)
    run(notebook, monkeypatch)
    after = [text_of(cell) for cell in code_cells(notebook)]
    assert after != before
    assert number == "2" or any(" x 1024 float32 block" in text for text in after)
