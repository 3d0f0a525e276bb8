"""Pieces of the CUDA sources, with the numbers of their lines."""

from __future__ import annotations

from ..gpu.nvrtc import source_files


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
