"""Compiles the unchanged .cu files with the machine's C++ compiler and runs them on the CPU.

It is for tests and exploration. Threads are fibers (cuda_src/on_cpu). A seed decides the order in
which they run, so that a missing barrier shows. Deadlocks, wrong masks and accesses out of bounds
raise `OnCpuError`.
"""

import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..dispatch.functor_text import FunctorError
from ..dispatch.instances import Kernel
from . import nvrtc
from .nvrtc import cache_folder, cuda_src, include_options, is_private

# -ffp-contract=off: results are the same bits on all machines, with or without an fma instruction.
# Kernels that need an fma call fmaf.
# -fno-strict-aliasing: packs are read through pointers of other types, which CUDA compilers allow.
# -Og: -O1 compiles a third longer, and kernels run about a quarter faster. Most kernels run once.
_SHARED_FLAGS = ["-std=c++20", "-fPIC", "-shared", "-w"]
_FLAGS = [*_SHARED_FLAGS, "-Og", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"]
_FLAGS += ["-fno-exceptions", "-fno-rtti"]
# A kernel finds the standard libraries through the runtime, so the linker need not read them. Not
# of clang, which may come without libgcc.
_LINK_FLAGS = ["-nostdlib", "-lgcc"]
_RUNTIME_FLAGS = [*_SHARED_FLAGS, "-O2", "-pthread"]
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr"]
_SANITIZERS += ["-fno-omit-frame-pointer", "-g1"]
# For traced kernels (cuda_on_cpu_trace.h): the compiler calls the trace before each access, and
# keeps the accesses of 16 bytes whole. -O1 drops accesses that change nothing, as a GPU's compiler
# does. -g names the lines.
_TRACE_FLAGS = ["-fsanitize=thread", "-O1", "-fno-tree-sra", "-g"]
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_SUFFIXES = (".cu", ".cuh", ".h", ".cpp")
_RUNTIME = "cuda_on_cpu_runtime.cpp"
_MESSAGE_SIZE = 4096
EVENT_BYTES = 40  # of a trace::Event


_kernels: dict[str, "CpuKernel"] = {}


class OnCpuError(RuntimeError):
    """A kernel does not compile, or has failed while it ran on the CPU."""


class NoCompilerError(RuntimeError):
    """No C++20 compiler was found."""


class CpuKernel:
    """One instance of a kernel template, loaded into this process."""

    def __init__(self, name_expression: str, path: Path):
        self.name_expression = name_expression
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._kernel = ctypes.addressof(ctypes.c_char.in_dll(self._library, "on_cpu_kernel"))
        # The runtime defines this function, and the library depends on the runtime.
        self._launch = self._library.on_cpu_launch
        self._launch.restype = ctypes.c_int
        unsigned = ctypes.c_uint
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, *[unsigned] * 5, ctypes.c_uint64]
        self._launch.argtypes += [ctypes.c_char_p, unsigned]

    def launch(
        self,
        grid_size: int,
        block_size: int,
        words: bytes,
        *,
        smem_bytes: int = 0,
        cluster_size: int = 1,
        seed: int = 0,
    ) -> None:
        """Runs the whole grid before it returns.

        words: the packed argument struct, whose pointers are host addresses.
        seed: decides the order in which threads run.
        Launches from several threads are allowed. They run one after another.

        Raises OnCpuError for wrong launch sizes and for a failure while the kernel runs.
        """
        message = ctypes.create_string_buffer(_MESSAGE_SIZE)
        sizes = (grid_size, block_size, smem_bytes, cluster_size)
        words = bytes(words)
        failed = self._launch(
            self._kernel, words, len(words), *sizes, seed & (2**64 - 1), message, _MESSAGE_SIZE
        )
        if failed:
            raise OnCpuError(
                f"{self.name_expression} (seed {seed}): {message.value.decode(errors='replace')}"
            )

    def take_trace(self) -> bytes:
        """What the last launch of a traced kernel recorded: trace::Events as bytes.

        Raises OnCpuError where that was too much.
        """
        self._library.on_cpu_trace.restype = ctypes.c_void_p
        num_events = ctypes.c_ulonglong()
        events = self._library.on_cpu_trace(ctypes.byref(num_events))
        if events is None and num_events.value:
            raise OnCpuError(
                f"{self.name_expression} made more than {num_events.value:,} accesses and waits; "
                "expected fewer: trace fewer rows"
            )
        return ctypes.string_at(events, num_events.value * EVENT_BYTES) if events else b""

    def first_address(self) -> int:
        """Where the library is loaded, which its debug information counts from."""
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        names = (str(self.path), f"{self.path} (deleted)")
        return min(int(line.split("-")[0], 16) for line in maps if line.endswith(names))


def kernel(
    source: str,
    name_expression: str,
    *,
    sanitized: bool = False,
    folder: Path | None = None,
    traced: bool = False,
    functors: str = "",
) -> CpuKernel:
    """Compiles and loads one instance of a kernel template.

    source: a file of `folder`, for example "forward_warp.cu". folder: None: the installed sources.
    functors: the structs of a user's functors, compiled behind the source.
    sanitized: by the sanitizers of addresses and of undefined behaviour. A process that runs such
        kernels must be started with `sanitized_environment()`. It ends with the sanitizer's report
        when an error is found.
    traced: every launch is recorded for CpuKernel.take_trace().

    Raises OnCpuError if the kernel does not compile, FunctorError if it has functors, and
    NoCompilerError without a C++20 compiler.
    """
    # Loading such a library ends the process unless the sanitizer was preloaded.
    if sanitized and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise OnCpuError(
            "the address sanitizer is not preloaded; expected Python in a subprocess with "
            "env=sanitized_environment()"
        )
    wanted = Kernel(source, name_expression, functors)
    return _load(*_compile(wanted, _instruments(sanitized, traced), folder))


def compile_many(kernels: Iterable[Kernel]) -> Iterator[object]:
    """Compiles installed kernels ahead, by one compiler for each CPU. Yields after each."""
    _runtime(cuda_src(), _Flags())  # compiled once, before the threads need it
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda each: _compile(each, _Flags(), None), kernels)


def compiler() -> str:
    """The command of the C++20 compiler.

    It is $CXX if that is set, else the first of c++, g++ and clang++ that supports C++20.
    """
    return shlex.join(_compiler_and_macros()[0])


def sanitized_environment() -> dict[str, str]:
    """The environment for a subprocess that runs kernels compiled with `sanitized`."""
    command, _ = _compiler_and_macros()
    names = ["libasan.so", "libubsan.so"]
    if _is_clang():
        names = [f"libclang_rt.asan-{os.uname().machine}.so"]
    # The address sanitizer must be loaded first. At its start it needs libstdc++, which Python
    # does not load.
    libraries = []
    for name in [*names, "libstdc++.so.6"]:
        path = _run([*command, f"-print-file-name={name}"]).stdout.strip()
        if not os.path.isabs(path):
            raise NoCompilerError(f"{compiler()} has no {name}: install its sanitizer libraries.")
        libraries.append(os.path.realpath(path))
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        # Python does not free all memory when it exits. Fibers do not work with fake stacks.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


# The compiler.


@functools.cache
def _find_compiler(cxx: str, path: str) -> tuple[tuple[str, ...], str]:
    """The compiler's command and its predefined macros.

    The macros depend on the compiler's version, the C++ standard and the target.
    """
    wanted = [shlex.split(cxx)] if cxx.strip() else [["c++"], ["g++"], ["clang++"]]
    refused = []
    for program, *options in wanted:
        path_of_program = shutil.which(program, path=path)
        if path_of_program is None:
            continue
        command = (path_of_program, *options)
        result = _run([*command, "-std=c++20", "-x", "c++", "-dM", "-E", os.devnull])
        standard = re.search(r"#define __cplusplus (\d+)", result.stdout)
        if result.returncode == 0 and standard and int(standard[1]) >= 202002:
            return command, result.stdout
        said = result.stderr.strip().splitlines()[:1]
        refused.append(": ".join([shlex.join(command), *said]))
    looked = f"$CXX ({cxx})" if cxx.strip() else "c++, g++ and clang++ ($CXX is not set)"
    reason = f"; {' and '.join(refused)} cannot compile C++20" if refused else ""
    raise NoCompilerError(
        f"Running kernels on the CPU needs a C++20 compiler. Looked for {looked} in $PATH{reason}. "
        "Install g++ 11 or newer, or clang++ 14 or newer, or set CXX."
    )


def _compiler_and_macros() -> tuple[tuple[str, ...], str]:
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


def _is_clang() -> bool:
    return "__clang__" in _compiler_and_macros()[1]


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess:
    # A sanitizer that is preloaded in this process would slow the compiler down.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    # The compiler's messages are in the encoding of its locale.
    encoding = {"encoding": "utf-8", "errors": "backslashreplace"}
    return subprocess.run(command, input=text, capture_output=True, env=environment, **encoding)


class _Flags(NamedTuple):
    """Of the compiler, besides the usual ones."""

    of_kernel: tuple[str, ...] = ()
    of_runtime: tuple[str, ...] = ()


def _instruments(sanitized: bool, traced: bool) -> _Flags:
    both = (*_SANITIZERS, *["-shared-libasan"] * _is_clang()) if sanitized else ()
    # -O0 compiles faster than -Og, and drops no access that a sanitizer should see.
    of_kernel = (*both, *["-O0"] * sanitized, *(_TRACE_FLAGS if traced else ()))
    return _Flags(of_kernel, (*both, *["-DCUPYNORM_TRACE"] * traced))


def _compile(kernel: Kernel, added: _Flags, folder: Path | None) -> tuple[str, Path]:
    source, name_expression, functors = kernel.source, kernel.name_expression, kernel.functors
    folder = Path(folder).resolve() if folder else cuda_src()
    if not (folder / source).is_file():
        raise OnCpuError(f"there is no {source} in {folder}; expected a .cu file of it")
    runtime = _runtime(folder, added)
    flags = [*_FLAGS, *added.of_kernel]
    # Instruments name the lines of a file by its path.
    paths = [str(folder)] if added.of_kernel else []
    text = (
        f'#include "cuda_on_cpu.h"\n{nvrtc.includes(kernel)}{functors}'
        'extern "C" const on_cpu::Kernel on_cpu_kernel = '
        f"on_cpu::Instance<&{name_expression}>::kernel;\n"
    )
    # The library contains the runtime's path, so the path is part of the key.
    key = _digest(folder, text, str(runtime), *flags, *paths)
    path = runtime.parent / f"{key}.so"
    if not is_private(path):
        libraries = [str(runtime)]
        if not added.of_kernel and not _is_clang():
            libraries += _LINK_FLAGS
        flags += [f"-I{_headers(folder)}", *include_options(folder)]
        try:
            _build(text, path, flags, f"{source}: {name_expression}", libraries)
        except OnCpuError as error:
            if not functors:
                raise
            raise FunctorError(f"a functor does not compile: {error}") from error
    return name_expression, path


def _runtime(folder: Path, added: _Flags) -> Path:
    """Compiles the scheduler as a separate library, once, because that takes long."""
    flags = [*_RUNTIME_FLAGS, *added.of_runtime]
    cache = cache_folder("on_cpu")
    text = f'#include "{_RUNTIME}"\n'
    path = cache / f"runtime-{_digest(folder, text, *flags)}.so"
    if not is_private(path):
        _build(text, path, [*flags, f"-I{_headers(folder)}"], _RUNTIME)
    return path


def _headers(folder: Path) -> Path:
    own = folder / "on_cpu"
    return own if (own / "cuda_on_cpu.h").is_file() else cuda_src() / "on_cpu"


def _build(
    text: str, path: Path, flags: list[str], name: str, libraries: Sequence[str] = ()
) -> None:
    command, _ = _compiler_and_macros()
    # Other processes may build it too: each renames a file of its own.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as building:
        built = Path(building, path.name)
        # Two commands: a linker that sees a trace's flag adds the thread sanitizer's own library.
        result = _run([*command, *flags, "-c", "-x", "c++", "-", "-o", f"{built}.o"], text)
        if result.returncode == 0:
            flags = [flag for flag in flags if flag not in _TRACE_FLAGS]
            result = _run([*command, *flags, f"{built}.o", *libraries, "-o", str(built)])
        if result.returncode != 0:
            raise OnCpuError(f"{name} does not compile with {compiler()}:\n{result.stderr.strip()}")
        built.chmod(0o700)
        os.replace(built, path)


def _load(name_expression: str, path: Path) -> CpuKernel:
    # Without a lock, which a forked child could find locked for ever: of two threads one wins.
    if path.name not in _kernels:
        _kernels.setdefault(path.name, CpuKernel(name_expression, path))
    return _kernels[path.name]


# The keys of the cache on disk.


def _digest(folder: Path, text: str, *parts: str) -> str:
    """Of the compiler, a text, the files of a folder that it includes, and other parts."""
    files = _texts(folder) if folder != cuda_src() else {}
    digest, left, seen = hashlib.sha256(), [text], set()
    digest.update(repr((text, parts, _compiler_and_macros())).encode())
    while left:
        for name in _included(left.pop()):
            content = files.get(name) or _installed_texts().get(name)
            if content and name not in seen:
                seen.add(name)
                digest.update(f"{name} {len(content)}\n{content}".encode())
                left.append(content)
    return digest.hexdigest()[:32]


@functools.lru_cache(maxsize=256)
def _included(text: str) -> list[str]:
    return _INCLUDE.findall(text)


def _texts(folder: Path) -> dict[str, str]:
    """The sources of a folder by name."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@functools.cache
def _installed_texts() -> dict[str, str]:
    return _texts(cuda_src())
