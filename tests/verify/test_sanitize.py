"""sanitize.py: what it makes of the output of compute-sanitizer, and how it shares out steps."""

from __future__ import annotations

import pytest
import sanitize
from every_kernel import chosen

END = "========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            f"========= COMPUTE-SANITIZER\nbegin 3\nend 3\nbegin 5\nend 5\n{END}",
            {3: "clean", 5: "clean"},
        ),
        ("begin 3\nend 3\nbegin 5\n", {3: "no report", 5: "not finished"}),
        (f"begin 3\nend 3\nbegin 5\n{END}", {3: "clean", 5: "not finished"}),
        (f"begin 3\nend 3 Finding(y)\n{END}", {3: "wrong: Finding(y)"}),
        (f"begin 3\nTraceback\nCUDADriverError: no\n{END}", {3: "raised: CUDADriverError: no"}),
        (
            "begin 3\nend 3\nbegin 5\n========= Error: Race reported between Write access\n"
            "=========     at f\nend 5\n========= RACECHECK SUMMARY: 1 hazard displayed\n",
            {3: "clean", 5: "found: Error: Race reported between Write access"},
        ),
        (
            "begin 3\nend 3\nbegin 5\nend 5\n========= ERROR SUMMARY: 2 errors\n",
            dict.fromkeys((3, 5), "found: 2 in one of the process's steps"),
        ),
    ],
)
def test_what_a_log_says_of_steps(log, expected):
    assert sanitize.judged(log) == expected


def tool(folder, monkeypatch, last: str) -> None:
    """A compute-sanitizer on the PATH, that runs the command and prints this last."""
    program = folder / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\nshift 2\n"$@"\nprintf "%s\\n" "{last}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(sanitize, "_SHARE_OF_LAST", 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("seconds_of_process", [0.0, 300.0])  # a step each, or all
def test_every_step_runs_in_one_of_the_processes(seconds_of_process, tmp_path, monkeypatch, capsys):
    tool(tmp_path, monkeypatch, END.strip())
    monkeypatch.setattr(sanitize, "_SECONDS_OF_PROCESS", seconds_of_process)
    arguments = ["memcheck", "--only", "_run_scales", "--jobs", "2", "--seconds", "300"]
    assert sanitize.main(arguments) == 0
    count = len(chosen("_run_scales"))
    assert f": {count} clean\n" in capsys.readouterr().out


@pytest.mark.slow
def test_what_the_tool_finds_is_no_success(tmp_path, monkeypatch, capsys):
    tool(tmp_path, monkeypatch, "========= RACECHECK SUMMARY: 2 hazards displayed")
    assert sanitize.main(["racecheck", "--only", "_run_scales 1", "--seconds", "300"]) == 1
    assert "found: 2 in one of" in capsys.readouterr().out
