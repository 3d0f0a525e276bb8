"""Files of the repository, for the tests of its rules."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "cupynorm"
CUDA_SRC = REPOSITORY / "cuda_src"
# By path in the package: "dtypes", "dispatch/dispatch".
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py" or path.parent == PACKAGE
}
KERNELS = sorted(CUDA_SRC.glob("*.cu"))
SOURCES = sorted(
    path for path in CUDA_SRC.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp")
)
DEVICE_SOURCES = [path for path in SOURCES if path.suffix in (".cu", ".cuh")]
# Includes and comments name a source without its folder.
SOURCE_OF = {path.name: path for path in DEVICE_SOURCES}
PYTHON = sorted(
    path
    for folder in ("cupynorm", "reference", "tests", "docs", "notebooks")
    for path in (REPOSITORY / folder).rglob("*.py")
)


def names_of(paths):
    return {"argvalues": paths, "ids": [str(path.relative_to(REPOSITORY)) for path in paths]}
