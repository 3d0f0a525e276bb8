"""The CUDA sources in pieces, and changed copies: files, replaced words, or a unified diff."""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..gpu.arrays import type_in_words
from ..gpu.nvrtc import folder_of_process, is_private, source_files

Replacements = Sequence[tuple[str, str]]
Changes = str | Mapping[str, str | Replacements]


def changed_sources(changes: Changes) -> Path:
    """The folder of a copy of the sources with the changes.

    changes: a unified diff; or by file name the whole new text, or pairs (old, new), each old text
        once in the file. A name that does not exist is a new file.

    Raises ValueError for changes that do not fit.
    """
    texts = {name: path.read_text(encoding="utf-8") for name, path in source_files().items()}
    before = dict(texts)
    if isinstance(changes, str):
        _apply_diff(texts, changes)
    elif isinstance(changes, Mapping):
        for name, change in changes.items():
            texts[name] = change if isinstance(change, str) else _replace(texts, name, change)
    else:
        kind = type_in_words(changes)
        raise TypeError(f"changes is {kind}; expected a diff, or a dict of files")
    for name in texts:
        if Path(name).name != name or Path(name).suffix not in (".cu", ".cuh"):
            raise ValueError(f"changes names {name!r}; expected a .cu or .cuh file of cuda_src")
    if texts == before:
        raise ValueError("changes leaves every file as it is; expected a change")
    return _folder_of(texts)


def _folder_of(texts: dict[str, str]) -> Path:
    """The same texts get the same folder in a process, so that nothing is compiled twice."""
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    parent = folder_of_process("sources")
    folder = parent / digest
    if not _has(folder, texts):
        shutil.rmtree(folder, ignore_errors=True)
        own_folder = Path(tempfile.mkdtemp(dir=parent))
        for name, text in texts.items():
            (own_folder / name).write_text(text, encoding="utf-8")
            (own_folder / name).chmod(0o600)
        try:
            own_folder.rename(folder)
        except OSError:  # another thread was faster
            shutil.rmtree(own_folder)
    return folder


def _has(folder: Path, texts: dict[str, str]) -> bool:
    """Whether the folder has these files, has not lost one, and is this user's."""
    try:
        if not is_private(folder, stat.S_ISDIR) or not all(map(is_private, folder.iterdir())):
            return False
        found = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    except (OSError, ValueError):
        return False
    return found == texts


def _replace(texts: dict[str, str], name: str, pairs: Replacements) -> str:
    if name not in texts:
        raise ValueError(f"changes names {name!r}, which is not in cuda_src; expected a file of it")
    text = texts[name]
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(
                f"{name} has {old!r} {text.count(old)} times; expected it once: "
                "give more of the text around it"
            )
        text = text.replace(old, new)
    return text


def _apply_diff(texts: dict[str, str], diff: str) -> None:
    """A unified diff, as `git diff` and `diff -u` write it. Line numbers are only a hint."""
    name, hunks = "", 0
    lines = diff.strip("\n").splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith("+++ "):
            name = Path(line[4:].split("\t")[0].strip()).name
            if name not in texts:
                raise ValueError(
                    f"the diff changes {name!r}, which is not in cuda_src; expected a file of it"
                )
        elif line.startswith("@@"):
            old, new = [], []
            while at < len(lines) and not re.match(r"@@|diff |--- |\+\+\+ ", lines[at]):
                kind, rest = lines[at][:1], lines[at][1:]
                if kind in ("-", " ", ""):
                    old.append(rest)
                if kind in ("+", " ", ""):
                    new.append(rest)
                at += 1
            before, after = "\n".join(old) + "\n", "\n".join(new) + "\n"
            texts[name] = _replace(texts, name, [(before, after)])
            hunks += 1
    if not hunks:
        raise ValueError(
            "changes is a text without a part that begins with @@; "
            "expected a unified diff, or a dict of files"
        )


def piece(name: str, first: str, last: str | None = None) -> str:
    """The lines of a file of cuda_src from one text to another, numbered.

    first, last: texts that the first and the last line contain; the last is searched for from the
        first on. None: the first line alone.

    Raises ValueError for a file or a text that is not there.
    """
    path = source_files().get(name)
    if path is None:
        raise ValueError(f"name is {name!r}, which is not in cuda_src; expected a file of it")
    lines = path.read_text(encoding="utf-8").splitlines()

    def find(text: str, start: int) -> int:
        for at in range(start, len(lines)):
            if text in lines[at]:
                return at
        raise ValueError(f"{name} has no line with {text!r} from line {start + 1} on; expected one")

    begin = find(first, 0)
    end = begin if last is None else find(last, begin)
    return "\n".join(f"{at + 1:>4}  {lines[at]}".rstrip() for at in range(begin, end + 1))
