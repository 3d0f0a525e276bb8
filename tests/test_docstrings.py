"""Every public name has a docstring with an example, and the examples and documents' code run."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from docstrings import docstring_of, text_after

import cupynorm
from cupynorm.gpu import on_cpu

NAMES = [name for name in dir(cupynorm) if not name.startswith("_")]
# Their examples compile kernels for the CPU.
COMPILED = {"trace", "Trace", "experiment", "Experiment", "functor", "functors"}
DOCUMENTS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples_of(text: str) -> doctest.DocTest:
    import torch

    names = {"cupynorm": cupynorm, "np": np, "torch": torch}
    return doctest.DocTestParser().get_doctest(text, names, "example", None, 0)


def faults(text: str) -> str:
    """What the examples of a docstring print that they do not show; what is wrong with its form."""
    opening, title, rest = text.partition("\n\nExamples:\n")
    if not title:
        return "it has no part Examples"
    lines = [line for line in opening.splitlines() if line]
    if len(lines) > 3:
        return f"it has {len(lines)} lines before its examples"
    test = examples_of(rest)
    if not any(example.want for example in test.examples):
        return "its examples show no result"
    if any(doctest.SKIP in example.options for example in test.examples):
        return "an example is skipped"
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    return "".join(printed)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COMPILED)) for name in NAMES]
)
def test_examples_of_public_names(name):
    pytest.importorskip("torch")
    if name in COMPILED:
        try:
            on_cpu.compiler()
        except on_cpu.NoCompilerError as error:
            pytest.skip(str(error))
    assert not faults(docstring_of(name)), name


def test_docstrings_without_examples_and_wrong_examples_are_found():
    pytest.importorskip("torch")
    assert faults("One line.") == "it has no part Examples"
    assert "4 lines" in faults("a\nb\nc\nd\n\nExamples:\n    >>> 1\n    1")
    assert faults("One.\n\nExamples:\n    >>> x = 1") == "its examples show no result"
    assert "skipped" in faults("One.\n\nExamples:\n    >>> 1  # doctest: +SKIP\n    2")
    assert "Expected:\n    3\nGot:\n    2" in faults("One.\n\nExamples:\n    >>> 1 + 1\n    3")
    assert not faults("One.\n\nExamples:\n    >>> 1 + 1\n    2\n\nresult: a number.")
    assert text_after("B", 'A = 1\n"""of A"""\nB = 2\n"""of B"""\n') == "of B"
    assert text_after("A", "A = 1\nB = 2\n") == ""


# Returned or raised by another public name; Format is an enumeration.
RETURNED = {"Explanation", "QuantizedTensor", "SwappedNorms"}
RETURNED |= {"Format", "FunctorError", "MissingLibraryError"}
AS = re.compile(r"\bas (?:for |of |in )?(?:cupynorm\.)?(\w+)")


def with_references(name: str) -> str:
    """The docstring, and those to which it refers: "as for layer_norm"."""
    texts, names = [], [name]
    for each in names:
        texts.append(docstring_of(each))
        names += {found for found in AS.findall(texts[-1]) if found in NAMES} - set(names)
    return "\n".join(texts)


def unsaid(text: str, parameters: list[str]) -> list[str]:
    return [name for name in parameters if not re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize(
    "name", [name for name in NAMES if callable(getattr(cupynorm, name)) and name not in RETURNED]
)
def test_docstrings_say_what_arguments_are(name):
    """And functions what they return and raise, or by which other function."""
    pytest.importorskip("torch")
    public, text = getattr(cupynorm, name), with_references(name)
    signature = inspect.signature(public)
    assert not unsaid(
        text, [each for each in signature.parameters if each not in ("args", "kwargs")]
    )
    if not isinstance(public, type):
        assert "Raises" in text
        # Nothing is returned by use_tiles; two others are for `with`.
        returns = not str(signature.return_annotation).startswith(("None", "Iterator"))
        assert re.search(r"\breturns?\b", text, re.I) or not returns


def test_arguments_that_a_docstring_leaves_out_are_found():
    pytest.importorskip("torch")
    assert unsaid("x: the input.", ["x", "weight"]) == ["weight"]
    assert "return_residual:" in with_references("rms_norm_forward")
    assert "return_residual:" not in docstring_of("rms_norm_forward")


def test_help_begins_with_three_lines_and_an_example():
    lines = inspect.getdoc(cupynorm.layer_norm).splitlines()
    assert lines.index("Examples:") <= 5 and lines[lines.index("Examples:") + 1].startswith(
        "    >>> "
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_code_of_the_documents_runs(path):
    """Blocks of Python in docs/, each from the top of its page on.

    tests/nn/test_decode_graph.py runs the block that needs a GPU.
    """
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    if path.stem == "calls":
        blocks = [block for block in blocks if "torch.cuda" not in block]
    if blocks:
        pytest.importorskip("torch")
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, path.name, "exec"), names)
    assert all(name in names for block in blocks for name in re.findall(r"^(\w+) = ", block, re.M))


def test_the_documents_have_code():
    assert sum(len(BLOCK.findall(path.read_text(encoding="utf-8"))) for path in DOCUMENTS) >= 2
