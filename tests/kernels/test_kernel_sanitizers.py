"""Every kernel on the CPU under the sanitizers of addresses and of undefined behaviour."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kernel_paths import PATHS
from mutated_machine import ROOT, copy_of_sources, mutate

from cupynorm.gpu import on_cpu
from cupynorm.gpu.on_cpu import NoCompilerError

SANITIZED = """
import sys
from pathlib import Path
import kernel_checks, kernel_paths
from cupynorm.verify.cases import random_problem
from cupynorm.verify.kernels import CpuMachine

folder = sys.argv[1] and Path(sys.argv[1])
machine = CpuMachine(kernel_paths.SMALL, 0, True, folder or None)
for words in sys.argv[2:]:
    call = kernel_paths.Call(*words.split("; "), {})
    case, backward = kernel_paths.case_of(call, machine)
    problem = kernel_checks.only_rows(random_problem(case), slice(0, 12))
    kernel_checks.assert_right(problem, kernel_checks.run(problem, machine, backward), machine)
    print("right")
"""
OF_8_BITS = """
from every_matrix import *
from every_quantized import quantized_cases, run_quantized
from quantized_calls import judge_bytes
from cupynorm.verify.results import CheckResult

machine = CpuMachine(sanitized=True)
findings = judge_scales(*run_scales(2, machine))
for case, how in quantized_cases()[::10]:
    findings += judge_bytes(case, how, *run_quantized(case, how, machine))
for matrix in matrices()[::8]:
    findings += judge_matrix(matrix, *run_matrix(matrix, machine))
for reduction in reductions()[::8]:
    findings += judge_reduction(reduction, *run_reduction(reduction, machine))
assert CheckResult(findings).ok and len(findings) > 20, CheckResult(findings)
print("right")
"""


def sanitized(script: str, *arguments: str) -> subprocess.CompletedProcess:
    try:
        environment = on_cpu.sanitized_environment()
    except NoCompilerError as error:
        pytest.skip(str(error))
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "kernels")
    environment["PYTHONPATH"] = ":".join(map(str, folders))
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["plain", "float32 sum"])
def test_every_path_passes_the_sanitizers(option):
    calls = [f"{name}; {option}" for name, path in PATHS.items() if path.is_core]
    calls = [call for call in calls if not call.startswith("chosen")]
    calls = calls[option != "plain" :: 2]  # all paths, with one option or the other
    done = sanitized(SANITIZED, "", *calls)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("right") == len(calls) >= 6


@pytest.mark.slow
def test_kernels_of_8_bits_pass_the_sanitizers():
    done = sanitized(OF_8_BITS)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-4000:]


@pytest.mark.slow
def test_address_sanitizer_sees_a_read_past_the_last_row(tmp_path):
    """The value read is not used: only the sanitizer can see it."""
    folder = copy_of_sources(tmp_path / "cuda_src")
    old, new = "return in_row(pack) ? col_of(pack) : cols.first_col;", "return col_of(pack);"
    mutate(folder, "register_row.cuh", old, new)
    done = sanitized(SANITIZED, str(folder), "lanes, single elements; plain")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "forward_warp" in done.stderr
