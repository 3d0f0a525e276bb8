"""Runs every_kernel.py under a tool of compute-sanitizer, in several processes, for some time:

    python tests/sanitize.py racecheck --seconds 300

Prints what became of each step: clean, found (by the tool), wrong, raised (an error), not finished,
or no report (the tool was stopped in a later step of the process). Exits with 0 if all are clean.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from every_kernel import chosen

_EVERY_KERNEL = Path(__file__).with_name("every_kernel.py")
_SHARE_OF_LAST = 0.25  # of the time: no step begins in it
# In which a process begins steps. The tool reports at its end: if a later step is stopped, the
# steps before it have no report.
_SECONDS_OF_PROCESS = 15.0
_SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)")
# Whatever else the tool says that is not a detail of what it said before.
_FOUND = re.compile(r"========= (?!COMPUTE-SANITIZER|Target application|\s)\S")
_RAISED = re.compile(r"[\w.]*(?:Error|Exception)\b")


def judged(log: str) -> dict[int, str]:
    """What became of the steps of one process: their numbers, and words."""
    words: dict[int, str] = {}
    current, summary = None, None
    for line in log.splitlines():
        if match := re.match(r"begin (\d+)", line):
            current = int(match[1])
            words[current] = "not finished"
        elif match := re.match(r"end (\d+) ?(.*)", line):
            if words[int(match[1])] == "not finished":
                words[int(match[1])] = f"wrong: {match[2]}" if match[2] else "clean"
        elif match := _SUMMARY.match(line):
            summary = int(match[1])
        elif current is not None and _FOUND.match(line):
            if not words[current].startswith("found"):
                words[current] = f"found: {line.strip('= ')}"
        elif current is not None and words[current] == "not finished" and _RAISED.match(line):
            words[current] = f"raised: {line}"
    is_told = any(each.startswith("found") for each in words.values())
    if summary is None or (summary and not is_told):
        why = "no report" if summary is None else f"found: {summary} in one of the process's steps"
        words = {key: why if each == "clean" else each for key, each in words.items()}
    return words


def run(tool: list[str], only: str, seconds: float, jobs: int) -> dict[int, str]:
    """What became of the steps, of those that began."""
    began = time.time()
    end, until = began + seconds, began + seconds * (1 - _SHARE_OF_LAST)
    num_steps = len(chosen(only))
    with tempfile.TemporaryDirectory() as folder:
        claims = Path(folder) / "claims"
        claims.mkdir()
        command = [*tool, sys.executable, str(_EVERY_KERNEL), "--only", only]
        command += ["--claims", str(claims), "--until"]
        running, logs = [], []
        while time.time() < end:
            running = [each for each in running if each.poll() is None]
            # A process that has ended is replaced.
            is_open = time.time() < until and len(list(claims.iterdir())) < num_steps
            while is_open and len(running) < jobs:
                logs.append(Path(folder) / f"log{len(logs)}")
                last = str(min(until, time.time() + _SECONDS_OF_PROCESS))
                with logs[-1].open("w") as log:
                    options = {"stdout": log, "stderr": subprocess.STDOUT}
                    process = subprocess.Popen([*command, last], start_new_session=True, **options)
                running.append(process)
            if not running:
                break
            time.sleep(0.2)
        for each in running:
            if each.poll() is None:
                os.killpg(each.pid, 9)
                each.wait()
        words: dict[int, str] = {}
        for log in logs:
            text = log.read_text(errors="replace")
            words |= judged(text)
            if "begin" not in text and "steps ran" not in text:
                print(f"a process began no step: {text[-300:]}")
        return words


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=("memcheck", "initcheck", "racecheck", "synccheck"))
    parser.add_argument("--seconds", type=float, default=300.0, help="the most in all (300)")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--only", default="", help="steps whose names have this text")
    asked = parser.parse_args(arguments)
    program = shutil.which("compute-sanitizer")
    if program is None:
        parser.error("compute-sanitizer was not found; it is a part of the CUDA toolkit")
    began, steps = time.time(), chosen(asked.only)
    found = run([program, "--tool", asked.tool], asked.only, asked.seconds, asked.jobs)
    words = {step.name: found.get(at, "not finished") for at, step in enumerate(steps)}
    for name, each in words.items():
        if each != "clean":
            print(f"{each}: {name}")
    kinds = Counter(each.partition(":")[0] for each in words.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{asked.tool}: {len(words)} steps in {time.time() - began:.0f} s: {counts}")
    return 0 if set(kinds) == {"clean"} else 1


if __name__ == "__main__":
    sys.exit(main())
