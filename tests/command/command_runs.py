"""Runs of python -m cupynorm, in another process and in this one."""

import os
import subprocess
import sys
from pathlib import Path

from cupynorm import __main__ as command

ROOT = Path(__file__).parents[2]


def run(*arguments, cwd=None, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "cupynorm", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
    )


def call(capsys, *arguments):
    """The command in this process: exit code, stdout, stderr."""
    code = command.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err
