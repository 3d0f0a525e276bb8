"""The CUDA sources: their folder, and its files by name.

Kernels are in the folder itself, their parts in folders below it. A file has its name once, so an
include names it without its folder.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def cuda_src() -> Path:
    """The folder of the .cu files: in an installed package, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if (folder / "forward_warp.cu").is_file():
            return folder
    raise FileNotFoundError(
        f"the kernels are missing: neither {package / 'cuda_src'} nor "
        f"{package.parent / 'cuda_src'} has them"
    )


def source_files(folder: Path | None = None) -> dict[str, Path]:
    """The .cu and .cuh files of a copy of cuda_src, by name; of cuda_src itself by default."""
    folder = folder or cuda_src()
    return {path.name: path for path in sorted([*folder.glob("*.cu"), *folder.rglob("*.cuh")])}


@cache
def include_options(folder: Path | None = None) -> tuple[str, ...]:
    """The compiler options that name the folder, and the folders of its headers."""
    folder = folder or cuda_src()
    parents = dict.fromkeys((folder, *(path.parent for path in source_files(folder).values())))
    return tuple(f"-I{parent}" for parent in parents)
