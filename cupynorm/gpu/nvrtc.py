"""Compiles kernels with NVRTC, through CuPy's RawModule. No other module does.

An instance is compiled on first use and kept in CuPy's disk cache. The cache key is the source
text without its headers, so the first line of that text is a digest of all headers. Several
processes can share the cache, because CuPy writes it by renaming whole files.

Also: the CUDA sources, the libraries of this machine, and the folders for what is compiled.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..dispatch.functor_text import FunctorError
from ..dispatch.instances import Kernel

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


# The sources. Kernels are in the folder itself, their parts in folders below it. A file has its
# name once, so an include names it without its folder.


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


def includes(kernel: Kernel) -> str:
    """The includes of an instance: its file, and headers that only some instances need.

    Those are of its path, of 8 bits, of a residual and of functors.
    """
    file, name = kernel.source, kernel.name_expression
    direction = re.match("backward_few|forward|backward|", file)[0]
    wanted = {
        f"{direction}_ring.cuh": "Path::ring" in name,
        f"{direction}_bundle.cuh": "Path::bundle" in name,
        "forward_ring_scaled.cuh": "Path::ring" in name and "QuantizeStore<" in name,
        "quantize_store.cuh": "QuantizeStore<" in name,
        "sum_load.cuh": "ResidualLoad<" in name or "SumLoad<" in name,
        "functor.cuh": kernel.functors and direction == "forward",
        "functor_gradient.cuh": kernel.functors and direction.startswith("backward"),
    }
    files = [file, *(header for header, is_wanted in wanted.items() if is_wanted)]
    return "".join(f'#include "{each}"\n' for each in files)


def source(kernel: Kernel, folder: Path | None = None) -> str:
    """The text that is compiled: a digest of all sources in a comment, includes, functors."""
    digest = _installed_digest() if folder is None else _digest(folder)
    return f"// {digest}\n{includes(kernel)}{kernel.functors}"


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


def has_gpu() -> bool:
    """Whether CuPy is installed and finds a GPU."""
    try:
        return cupy().cuda.runtime.getDeviceCount() > 0
    except Exception:
        return False


def environment() -> dict[str, str | None]:
    """GPU, driver, versions and date. A missing one is None. Does not import torch."""
    from .. import __version__

    names = ("gpu", "driver", "cuda_runtime", "nvrtc", "cupy", "torch")
    versions: dict[str, str | None] = dict.fromkeys(names)
    with contextlib.suppress(Exception):  # a library is missing or does not load
        versions["cupy"] = cupy().__version__
        number = cupy().cuda.runtime.runtimeGetVersion()
        versions["cuda_runtime"] = f"{number // 1000}.{number % 1000 // 10}"
        versions["nvrtc"] = ".".join(map(str, version()))
    if has_gpu():
        runtime = cupy().cuda.runtime
        name = runtime.getDeviceProperties(runtime.getDevice())["name"]
        versions["gpu"] = name.decode() if isinstance(name, bytes) else name
        with contextlib.suppress(OSError, TypeError):  # not Linux, or another format
            text = Path("/proc/driver/nvidia/version").read_text()
            versions["driver"] = re.search(r"\d+\.\d+(\.\d+)?", text)[0]
    import importlib.metadata  # takes a tenth of the time of importing all of the package

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        loaded = getattr(sys.modules.get("torch"), "__version__", None)
        versions["torch"] = str(loaded or importlib.metadata.version("torch"))
    return versions | {
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cupynorm": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def function(kernel: Kernel, folder: Path | None = None):
    """The cupy.RawKernel of a kernel, compiled and loaded on the current device.

    Raises FunctorError if a user's functor does not compile.
    """
    version()
    from cupy.cuda import get_cuda_path
    from cupy.cuda.compiler import CompileException

    flags = (*options(folder), *_include_options(get_cuda_path()))
    if kernel.architecture:  # CuPy adds the device's own, without such features
        flags += (f"-arch={kernel.architecture}",)
    name = kernel.name_expression
    loaded = cupy().RawModule(code=source(kernel, folder), options=flags, name_expressions=(name,))
    try:
        loaded = loaded.get_function(name)
        loaded.kernel  # noqa: B018  (compiles and loads it now)
    except CompileException as error:
        if not kernel.functors:
            raise
        raise FunctorError(f"a functor does not compile:\n{error}") from error
    return loaded


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
    cubin, found = compile_together([kernel], compute_capability, folder)
    return cubin, found[kernel][1]


def compile_together(
    kernels: list[Kernel], compute_capability: int, folder: Path | None = None
) -> tuple[bytes, dict[Kernel, tuple[str, Resources]]]:
    """One cubin of kernels with the same source(); of each its name there, and its resources."""
    # NVRTC 12.9 and later use the driver's cache, which does not keep ptxas's report.
    no_cache = ["-no-cache"] if version() >= (12, 9) else []
    from cupy.cuda import get_cuda_path
    from cupy_backends.cuda.libs import nvrtc

    first, names = kernels[0], [kernel.name_expression for kernel in kernels]
    architecture = first.architecture or f"sm_{compute_capability}"
    flags = [*options(folder), *no_cache, "-ftz=true", f"-arch={architecture}", "-Xptxas=-v"]
    flags += _include_options(get_cuda_path())
    program = nvrtc.createProgram(source(first, folder), "instance.cu", (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            if first.functors:
                raise FunctorError(f"a functor does not compile:\n{log}") from error
            raise RuntimeError(f"{', '.join(names)}: {log}") from error
        reports = nvrtc.getProgramLog(program).split("Compiling entry function '")[1:]
        used = {each.partition("'")[0]: _resources(each) for each in reports}
        lowered = [nvrtc.getLoweredName(program, name) for name in names]
        found = {kernel: (name, used[name]) for kernel, name in zip(kernels, lowered)}
        return nvrtc.getCUBIN(program), found
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


# Folders that only this user can write, for all that is compiled or loaded: what another user could
# exchange would run as this user. They have mode 0700 and are checked whenever they are used.

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_temporary: dict[str, Path] = {}  # the folders of this process, or of the one that it is a fork of


def cache_folder(name: str) -> Path:
    """A folder of the user's cache; a temporary one where the cache cannot be written.

    Raises PermissionError where others can write to it.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    home = home if os.path.isabs(home) else os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(os.path.realpath(home)) / "cupynorm" / name
    try:
        for each in (*reversed(folder.parents), folder):
            if not os.path.lexists(each):
                each.mkdir(0o700, exist_ok=True)
    except OSError:
        return folder_of_process(name)
    for each in (folder.parent, folder):
        if not is_private(each, stat.S_ISDIR):
            raise PermissionError(
                f"{each} is no folder that only user {os.geteuid()} can change; expected one, "
                f"because compiled code is loaded from it: rm -r {each}, or set XDG_CACHE_HOME to "
                "a folder of your own"
            )
    return folder if os.access(folder, os.W_OK | os.X_OK) else folder_of_process(name)


def folder_of_process(name: str) -> Path:
    """A temporary folder that is removed when this process ends. It has one of each name."""
    folder = _temporary.get(name)
    if folder is None or not is_private(folder, stat.S_ISDIR):
        folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="cupynorm-")))
        atexit.register(_remove, folder, os.getpid())
        _temporary[name] = folder
    return folder


def is_private(path: Path, kind=stat.S_ISREG) -> bool:
    """Whether a path is a file, or of another kind, that this user alone owns and can write."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    is_own = found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS
    return kind(found.st_mode) and is_own


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the folder to its parent
        shutil.rmtree(folder, ignore_errors=True)
