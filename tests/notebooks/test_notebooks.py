"""Every notebook runs from top to bottom without a GPU, and is stored with its outputs."""

from pathlib import Path

import pytest

from cupynorm.gpu import on_cpu

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALL_WITHIN = "all within what their dtypes allow"


def read(path):
    return nbformat.read(path, as_version=4)


def outputs(notebook):
    """All outputs of the code cells."""
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def text_of(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def checks(notebook):
    """What the cells print that call cupynorm.check."""
    return [
        text_of(cell)
        for cell in notebook.cells
        if cell.cell_type == "code" and "cupynorm.check(" in cell.source
    ]


def num_figures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs(path):
    notebook = read(path)
    assert path.stat().st_size < 300_000
    assert all(output.output_type != "error" for output in outputs(notebook))
    assert all(
        cell.execution_count
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.strip()
    )
    assert num_figures(notebook) >= 1
    assert checks(notebook) and all(ALL_WITHIN in text for text in checks(notebook))
    stored = path.read_text(encoding="utf-8")
    assert (
        str(ROOT) not in stored and str(Path.home()) + "/" not in stored
    )  # no path of the machine that made it


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, monkeypatch):
    try:
        on_cpu.compiler()
    except on_cpu.NoCompilerError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    stored = read(path)
    fresh = read(path)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources=resources
    ).execute()  # raises if a cell does
    assert num_figures(fresh) == num_figures(stored)
    assert checks(fresh) and all(ALL_WITHIN in text for text in checks(fresh))
