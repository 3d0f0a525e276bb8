"""`python -m cupynorm fuzz` with a fault in the kernels: it is found, shown, and shown again."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from mutated_machine import copy_of_sources, mutate

from cupynorm import __main__ as main
from cupynorm.check.fuzz import command, judge
from cupynorm.check.kernels import CpuMachine


class InThisProcess:
    """A pool whose tasks have run when they were submitted."""

    def __init__(self, *given, **options): ...

    def __enter__(self):
        return self

    def __exit__(self, *given): ...

    def submit(self, function, *given) -> Future:
        future = Future()
        future.set_result(function(*given))
        return future


@pytest.mark.slow
def test_a_fault_in_the_kernels_is_found_and_shown_in_three_lines(tmp_path, monkeypatch, capsys):
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(folder, "statistics.cuh", "+ static_cast<Compute>(eps)", "")
    with monkeypatch.context() as patch:
        wrong = CpuMachine(folder=folder)
        patch.setattr(command, "ProcessPoolExecutor", InThisProcess)
        patch.setattr(command, "machines", lambda on: [wrong])
        for module in (command, judge):
            patch.setattr(module, "machine", lambda on: wrong)
        patch.setattr(command, "_SHRINK_SECONDS", 5.0)
        arguments = ["fuzz", "--on", "cpu", "--seed", "7", "--seconds", "5", "--jobs", "1"]
        assert main.main(arguments) == 1
        shown = capsys.readouterr().out
        assert "OFF: " in shown.splitlines()[-1] and "elements are off" in shown
        first = shown[: shown.index("\n\n")].splitlines()
        index, lines = int(first[0].split()[1].rstrip(":")), first[-3:]
        assert lines[0].startswith("from cupynorm.check.fuzz import ")
        exec("\n".join(lines), {})
        assert "elements are off" in capsys.readouterr().out
        # A simpler call has fewer options than the one that was drawn, and few rows and columns.
        assert len(lines[1]) + len(lines[2]) < 200
        assert main.main(["fuzz", "--on", "cpu", "--seed", "7", "--replay", str(index)]) == 1
    capsys.readouterr()
    exec("\n".join(lines), {})
    assert capsys.readouterr().out == "\n"  # the right kernels
    assert main.main(["fuzz", "--on", "cpu", "--seed", "7", "--replay", str(index)]) == 0
