"""Every kernel on the CPU under the sanitizers of addresses and of undefined behaviour."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from mutated_cases import ODD, SUM
from mutated_machine import ROOT, copy_of_sources, mutate, sees_a_bug

from cupynorm.check.cases import Case
from cupynorm.gpu import on_cpu
from cupynorm.gpu.on_cpu import NoCompilerError
from cupynorm.plan.problem import Tile

SANITIZED = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from cupynorm.gpu import on_cpu
from cupynorm.plan.problem import Tile
from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine, uses_welford
from cupynorm.check.run import run_kernels
from cupynorm.check.results import CheckResult, judge_all

sanitize, folder, cases = ("address", "undefined"), {{folder!r}}, {{cases!r}}
if folder:
    kernel = on_cpu.kernel
    own = dict(folder=Path(folder))
    on_cpu.kernel = lambda *arguments, **options: kernel(*arguments, **(options | own))
for case in cases:
    problem, machine = random_problem(case), CpuMachine(sanitize=sanitize)
    welford = uses_welford(case, machine.device)
    findings = judge_all(problem, run_kernels(problem, machine), rounded_mean=welford)
    assert CheckResult(findings).ok, CheckResult(findings)
print(len(cases), "cases pass")
"""


def run_sanitized(cases: list[Case], folder: str = "") -> subprocess.CompletedProcess:
    try:
        environment = on_cpu.sanitized_environment()
    except NoCompilerError as error:
        pytest.skip(str(error))
    script = SANITIZED.format(folder=folder, cases=cases)
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )


# Every kernel and path, in packs and in single elements.
SMALL_CASES = [
    Case("layer_norm", 5, 40, "bfloat16", strategy="warp"),
    Case("layer_norm", 5, 37, "float32", strategy="warp", residual=True),
    Case("rms_norm", 3, 264, "float16", strategy="block"),
    Case("layer_norm", 3, 264, "float16", strategy="block", tile=Tile(8, 64)),
    Case("layer_norm", 3, 263, "float64", strategy="block", tile=Tile(1, 64)),
    Case("layer_norm", 3, 264, "bfloat16", strategy="cluster"),
    Case("layer_norm", 3, 264, "bfloat16", strategy="cluster", tile=Tile(8, 64, cluster_size=4)),
    Case(
        "layer_norm",
        3,
        264,
        "float16",
        strategy="cluster",
        tile=Tile(8, 32, packs_per_thread=1, cluster_size=8),
    ),
    Case("rms_norm", 3, 129, "float32", strategy="cluster"),
    # Wide enough for a ring in backward, too.
    Case(
        "layer_norm",
        3,
        2056,
        "bfloat16",
        weight="float32",
        strategy="block",
        tile=Tile(8, 96, packs_per_thread=3, stages=2),
    ),
    Case(
        "rms_norm",
        3,
        4100,
        "float32",
        strategy="cluster",
        tile=Tile(4, 64, packs_per_thread=2, cluster_size=16, stages=2),
    ),
    Case("layer_norm", 3, 264, "float32", strategy="uncached"),
    # Fused options, in packs and single elements.
    SUM,
    replace(SUM, num_cols=264, strategy="cluster"),
    replace(SUM, num_cols=264, strategy="uncached"),
]


@pytest.mark.slow
def test_every_kernel_passes_the_sanitizers():
    result = run_sanitized(SMALL_CASES)
    assert (result.returncode, result.stdout) == (0, f"{len(SMALL_CASES)} cases pass\n"), (
        result.stderr[-4000:]
    )


@pytest.mark.slow
def test_address_sanitizer_sees_a_read_past_the_last_row(tmp_path):
    # The value read is not used: only the sanitizer can see it.
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(
        folder,
        "register_row.cuh",
        "return in_row(pack) ? col_of(pack) : cols.first_col;",
        "return col_of(pack);",
    )
    assert not sees_a_bug(folder, ODD, 0.0)
    result = run_sanitized([ODD], str(folder))
    assert result.returncode != 0
    assert (
        "AddressSanitizer: heap-buffer-overflow" in result.stderr
        and "forward_warp" in result.stderr
    )
