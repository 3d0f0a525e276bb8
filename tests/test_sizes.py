"""Sizes of Python files and of signatures."""

from __future__ import annotations

import ast

import pytest
from repository_files import MODULES, PACKAGE, PYTHON, REPOSITORY

MOST_POSITIONAL = 6
MOST_LINES = 500
MOST_LINES_OF_MODEL = 600
# Another library or Triton decides the signature of these; those of tests imitate one.
LONG_SIGNATURES = {
    "linear/module.OneRankLayerNormLinear.__init__",
    "bench/triton_tutorial._forward",
    "bench/triton_tutorial._backward_rows",
    "bench/triton_tutorial._backward_columns",
    "tests/bench/test_peers._flash_attn.layer_norm_fn",
    "tests/bench/test_peers._liger.LigerRMSNormFunction.forward",
    "tests/bench/test_peers._quack.rmsnorm",
}


def positional_parameters(text: str) -> dict[str, int]:
    """The number of positional parameters of every function, by qualified name."""
    counts = {}

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [each.arg for each in (*child.args.posonlyargs, *child.args.args)]
                counts[name] = len(given) - (given[:1] in (["self"], ["cls"]))
            visit(child, name)

    visit(ast.parse(text), "")
    return counts


def test_positional_parameters_are_counted():
    text = (
        "def f(a, b=1, /, c=2, *rest, d, **others): pass\n"
        "class C:\n    def m(self, a):\n        def inner(x, y): pass\n"
        "    @classmethod\n    async def k(cls): pass\n"
    )
    assert positional_parameters(text) == {"f": 3, "C.m": 1, "C.m.inner": 2, "C.k": 0}


@pytest.mark.slow
def test_functions_have_few_positional_parameters():
    """Those of all Python files; pytest calls tests by name."""
    others = {
        path.relative_to(REPOSITORY).with_suffix("").as_posix(): path
        for path in PYTHON
        if PACKAGE not in path.parents
    }
    found = {
        f"{module}.{name}"
        for module, path in (MODULES | others).items()
        for name, count in positional_parameters(path.read_text()).items()
        if count > MOST_POSITIONAL and not name.startswith("test_")
    }
    assert not found - LONG_SIGNATURES, "pass a small dataclass, or keyword-only parameters"
    assert not LONG_SIGNATURES - found, "no longer long: remove from LONG_SIGNATURES"


def test_python_files_are_short():
    """Those of the package, reference/, tests/, docs/ and notebooks/."""
    lines = {
        str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in PYTHON
    }
    assert {"tests/test_sizes.py", "notebooks/train_gpt.py"} <= set(lines)
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_the_model_of_tiles_is_short():
    """A special case of one GPU, or of few widths, belongs to a data file (measured.py)."""
    model = [PACKAGE / "plan" / name for name in ("tile_model.py", "paths.py", "abilities.py")]
    assert sum(len(path.read_text().splitlines()) for path in model) <= MOST_LINES_OF_MODEL
