"""Compiles kernels with NVRTC, through CuPy's RawModule. No other module does.

An instance is compiled on first use and kept in CuPy's disk cache. The cache key is the source
text without its headers, so the first line of that text is a digest of all headers. Several
processes can share the cache, because CuPy writes it by renaming whole files.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..plan.functor_text import FunctorError
from ..plan.instances import Kernel
from .source_files import include_options, source_files

# The package is not on PyPI, where anybody may take its name.
_HOW_TO_INSTALL = (
    "in a checkout of the repository run pip install '.[cuda12]' for CUDA 12 or "
    "pip install '.[cuda13]' for CUDA 13"
)


class MissingLibraryError(ImportError):
    """CuPy or NVRTC is not installed. The message says what to install.

    Examples:
        >>> issubclass(cupynorm.MissingLibraryError, ImportError)
        True
    """


def source(kernel: Kernel, folder: Path | None = None) -> str:
    """The text that is compiled: a digest of all sources in a comment, an include, functors."""
    digest = _digest(folder) if folder else _installed_digest()
    return f'// {digest}\n#include "{kernel.source}"\n{kernel.functors}'


def _digest(folder: Path | None) -> str:
    digest = hashlib.sha256()
    for name, path in source_files(folder).items():
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _installed_digest() -> str:
    return _digest(None)


def options(folder: Path | None = None) -> tuple[str, ...]:
    """The compiler options of every kernel."""
    # -default-device: constexpr member functions need no __device__.
    return ("-std=c++20", "-default-device", *include_options(folder))


@cache
def cupy():
    """The cupy module. Raises MissingLibraryError if it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise MissingLibraryError(
            f"CuPy could not be imported ({error}); arrays on a GPU need it: {_HOW_TO_INSTALL}"
        ) from error
    return cupy


@cache
def version() -> tuple[int, int]:
    """NVRTC's version. Raises MissingLibraryError if it does not load."""
    if int(cupy().__version__.split(".")[0]) < 14:
        # CuPy 13 does not search the nvidia-cuda-nvrtc package. It finds a library that is loaded.
        for path in Path(cupy().__file__).parents[1].glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.*"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    try:
        from cupy_backends.cuda.libs import nvrtc

        return nvrtc.getVersion()
    except Exception as error:
        raise MissingLibraryError(
            f"NVRTC could not be loaded ({error}); it compiles the kernels: {_HOW_TO_INSTALL}"
        ) from error


def function(kernel: Kernel, folder: Path | None = None):
    """The cupy.RawKernel of a kernel, compiled and loaded on the current device.

    Raises FunctorError if a user's functor does not compile.
    """
    loaded = module(kernel, folder)
    from cupy.cuda.compiler import CompileException

    try:
        loaded = loaded.get_function(kernel.name_expression)
        loaded.kernel  # noqa: B018  (compiles and loads it now)
    except CompileException as error:
        if not kernel.functors:
            raise
        raise FunctorError(f"a functor does not compile:\n{error}") from error
    return loaded


def module(kernel: Kernel, folder: Path | None = None):
    """The cupy.RawModule of one kernel. CuPy compiles it when its function is first used."""
    version()
    from cupy.cuda import get_cuda_path

    flags = (*options(folder), *_include_options(get_cuda_path()))
    if kernel.architecture:  # CuPy adds the device's own, without such features
        flags += (f"-arch={kernel.architecture}",)
    code = source(kernel, folder)
    return cupy().RawModule(code=code, options=flags, name_expressions=(kernel.name_expression,))


class Resources(NamedTuple):
    """ptxas's report of one kernel. Each number is per thread."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def compile_for(
    kernel: Kernel, compute_capability: int, folder: Path | None = None
) -> tuple[bytes, Resources]:
    """Compiles a kernel for any GPU. Needs neither a GPU nor a driver. Returns (cubin, resources).

    Raises MissingLibraryError without CuPy or NVRTC, RuntimeError with the compiler's log if the
    source does not compile, FunctorError with it if there is a user's functor.
    """
    # NVRTC 12.9 and later use the driver's cache, which does not keep ptxas's report.
    no_cache = ["-no-cache"] if version() >= (12, 9) else []
    from cupy.cuda import get_cuda_path
    from cupy_backends.cuda.libs import nvrtc

    flags = [
        *options(folder),
        *no_cache,
        "-ftz=true",
        f"-arch={kernel.architecture or f'sm_{compute_capability}'}",
        "-Xptxas=-v",
    ]
    flags += _include_options(get_cuda_path())
    program = nvrtc.createProgram(source(kernel, folder), "instance.cu", (), ())
    try:
        nvrtc.addNameExpression(program, kernel.name_expression)
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            if kernel.functors:
                raise FunctorError(f"a functor does not compile:\n{log}") from error
            raise RuntimeError(f"{kernel.name_expression}: {log}") from error
        return nvrtc.getCUBIN(program), _resources(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def _include_options(cuda_path: str | None) -> list[str]:
    """-I of the folder of cuda_fp16.h: in a CUDA toolkit or in the nvidia-cuda-runtime package."""
    candidates = [Path(cuda_path) / "include"] if cuda_path else []
    site = Path(cupy().__file__).parents[1]
    candidates += [*site.glob("nvidia/cuda_runtime/include"), *site.glob("nvidia/cu*/include")]
    return [f"-I{folder}" for folder in candidates if (folder / "cuda_fp16.h").is_file()][:1]


def _resources(log: str) -> Resources:
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    if registers is None or frame is None:
        raise RuntimeError(f"the compiler's report has an unknown format: {log}")
    return Resources(int(registers[1]), *(int(value) for value in frame.groups()))
