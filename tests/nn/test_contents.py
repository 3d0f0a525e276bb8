"""The contents of a folder at its head name every file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "cupynorm" / "nn"


def test_the_head_of_a_folder_names_its_files():
    head = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text())) or ""
    lines = head.splitlines()[2:]
    named = [word for line in lines for word in re.split(r"  +", line.strip())[0].split(", ")]
    assert sorted(named) == sorted(
        path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"
    )
