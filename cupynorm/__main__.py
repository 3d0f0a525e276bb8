"""python -m cupynorm [check | plan | bench | tune]

Exit codes: 0 all is well; 1 a kernel is off, failed or became slower; 2 the request is not
possible, with a sentence on stderr; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__, plans
from .bench import bench_command
from .bench.report import BenchResult
from .dispatch.devices import Device
from .gpu import launch, on_cpu
from .gpu.nvrtc import MissingLibraryError, has_gpu
from .table import printable
from .verify import command as check_command

COMMANDS = ("check", "plan", "bench", "tune")


def current_device() -> Device | None:
    """The GPU that is there, or None."""
    return launch.current_device() if has_gpu() else None


def draw_chart(result: BenchResult, path: Path) -> None:
    """That of the README. Raises ImportError without matplotlib."""
    from .explore import plots

    plots.chart(result, path)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each sets `run`, which takes the arguments."""
    about = "LayerNorm and RMSNorm kernels: check them, see which is chosen, measure them."
    top = argparse.ArgumentParser(prog="python -m cupynorm", description=about)
    top.add_argument("--version", action="version", version=f"cupynorm {__version__}")
    commands = top.add_subparsers(dest="command", metavar=f"{{{','.join(COMMANDS)}}}")
    check_command.add_to(commands)
    plans.add_to(commands, current_device)
    bench_command.add_to(commands, draw_chart)
    return top


def kernel_errors() -> tuple[type[Exception], ...]:
    """What compiling, launching or running a kernel raises."""
    # CUDA's errors are RuntimeErrors, those of CuPy's compiler are not.
    compiler = sys.modules.get("cupy.cuda.compiler")
    return (RuntimeError, compiler.CompileException) if compiler else (RuntimeError,)


def sentence_of(error: Exception) -> str:
    """The message of an error, without the number that the operating system gives it.

    Names of files and modules may be in it: what cannot be printed is escaped.
    """
    text = str(error) or f"{type(error).__name__} was raised"
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return "\n".join(printable(line, 2000) for line in text.split("\n"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in (*COMMANDS, "-h", "--help", "--version"):
        if words and words[0].isidentifier():
            found = f"{words[0]!r} is no command"
            if words[0] in dir(sys.modules[__package__]):
                found = f"cupynorm.{words[0]} is a name of Python and no command"
            print(f"cupynorm: {found}; expected one of {', '.join(COMMANDS)}", file=sys.stderr)
            return 2
        words = ["check", *words]
    parsed = parser().parse_args(words)
    parsed.given = words
    try:
        code = parsed.run(parsed)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("cupynorm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed stdout; nothing can be written, even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MissingLibraryError, on_cpu.NoCompilerError, ValueError, OSError, MemoryError) as error:
        print(f"cupynorm: {sentence_of(error)}", file=sys.stderr)
        return 2
    except kernel_errors() as error:
        print(f"cupynorm: a kernel failed: {sentence_of(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
