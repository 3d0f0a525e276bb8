"""The only call of the CUDA compiler: kernel(name) for the current device, through CuPy's RawModule (NVRTC).

Instances are compiled when they are first asked for (60 to 110 ms) and kept in CuPy's disk cache, whose key is the source
text: the first line of that text is a digest of every header, so that a changed header never meets a stale binary. CuPy
writes its cache by renaming whole files, which makes it safe for several processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .dispatch import Kernel


class MissingLibraryError(ImportError):
    """CuPy or NVRTC is not installed; the message says what to install."""


@cache
def cuda_src() -> Path:
    """The folder of the .cu files: beside this file in an installed package, beside the package in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if (folder / "pack.cuh").is_file():
            return folder
    raise FileNotFoundError(
        f"the kernels are missing: neither {package / 'cuda_src'} nor {package.parent / 'cuda_src'} has them"
    )


def source(kernel: Kernel, folder: Path | None = None) -> str:
    """The text handed to the compiler: a digest of all sources, then one include."""
    folder = folder or cuda_src()
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f'// {digest.hexdigest()}\n#include "{kernel.source}"\n'


@cache
def _installed_source(kernel: Kernel) -> str:
    return source(kernel)


def options(folder: Path | None = None) -> tuple[str, ...]:
    # -default-device: a constexpr member function needs no __device__ of its own.
    return ("-std=c++20", "-default-device", f"-I{folder or cuda_src()}")


@cache
def cupy():
    """CuPy, or a MissingLibraryError that says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise MissingLibraryError(
            f"CuPy could not be imported ({error}); arrays on a GPU need it: pip install 'cupynorm[cuda12]' for CUDA 12 or "
            "'cupynorm[cuda13]' for CUDA 13"
        ) from error
    return cupy


@cache
def version() -> tuple[int, int]:
    """NVRTC's version, or a MissingLibraryError that says what to install."""
    if int(cupy().__version__.split(".")[0]) < 14:
        # CuPy 13 does not look into the nvidia-cuda-nvrtc package, but finds by its name what is loaded already.
        for path in Path(cupy().__file__).parents[1].glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.*"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    try:
        from cupy_backends.cuda.libs import nvrtc

        return nvrtc.getVersion()
    except Exception as error:
        raise MissingLibraryError(
            f"NVRTC could not be loaded ({error}); it compiles the kernels: pip install 'cupynorm[cuda12]' or "
            "'cupynorm[cuda13]'"
        ) from error


def module(kernel: Kernel, folder: Path | None = None):
    """The cupy.RawModule that holds one kernel, not yet compiled."""
    version()
    text = source(kernel, folder) if folder else _installed_source(kernel)
    from cupy.cuda import get_cuda_path

    flags = (*options(folder), *_include_options(get_cuda_path()))
    return cupy().RawModule(code=text, options=flags, name_expressions=(kernel.name_expression,))


class Resources(NamedTuple):
    """What ptxas reports of one kernel: registers a thread, bytes of stack, spill stores and spill loads."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def compile_for(kernel: Kernel, compute_capability: int, folder: Path | None = None) -> tuple[bytes, Resources]:
    """A kernel compiled for a GPU that need not be there, as (cubin, resources). Needs NVRTC, no driver.

    Raises MissingLibraryError without CuPy or NVRTC, RuntimeError with the compiler's own words if it refuses the source.
    """
    # What comes out of the cache that NVRTC shares with the driver since 12.9 comes without ptxas' report.
    no_cache = ["-no-cache"] if version() >= (12, 9) else []
    from cupy.cuda import get_cuda_path
    from cupy_backends.cuda.libs import nvrtc

    flags = [*options(folder), *no_cache, "-ftz=true", f"-arch=sm_{compute_capability}", "-Xptxas=-v"]
    flags += _include_options(get_cuda_path())
    program = nvrtc.createProgram(source(kernel, folder), "instance.cu", (), ())
    try:
        nvrtc.addNameExpression(program, kernel.name_expression)
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{kernel.name_expression}: {nvrtc.getProgramLog(program)}") from error
        return nvrtc.getCUBIN(program), _resources(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def _include_options(cuda_path: str | None) -> list[str]:
    """Where cuda_fp16.h lies: in a CUDA toolkit, or in the nvidia-cuda-runtime package."""
    candidates = [Path(cuda_path) / "include"] if cuda_path else []
    site = Path(cupy().__file__).parents[1]
    candidates += [*site.glob("nvidia/cuda_runtime/include"), *site.glob("nvidia/cu*/include")]
    return [f"-I{folder}" for folder in candidates if (folder / "cuda_fp16.h").is_file()][:1]


def _resources(log: str) -> Resources:
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or frame is None:
        raise RuntimeError(f"the compiler's report is not understood: {log}")
    return Resources(int(registers[1]), *(int(value) for value in frame.groups()))
