"""Kernels of random problems do not spill on six architectures: widths that no list names.

Where a data file has tiles for a GPU, every other problem is planned without it: the model also
decides there, for the widths between the rows of the file.
"""

from __future__ import annotations

import random

import pytest
from kernel_grid import ARCHITECTURES, HAS_TIME
from nvrtc_here import needs_nvrtc
from plan_problems import without_file
from random_problems import random_problem

from cupynorm.dispatch.devices import DEVICES, Device
from cupynorm.dispatch.dispatch import make_plan
from cupynorm.dispatch.grids import fetches_ahead
from cupynorm.dispatch.instances import KernelLaunch
from cupynorm.dispatch.measured import FILES
from cupynorm.dispatch.problem import Layout, Problem
from cupynorm.gpu.nvrtc import compile_for

pytestmark = pytest.mark.slow

NUM_PROBLEMS = 240 if HAS_TIME else 8
SAME_LIMITS = (86, 89)  # their plans have the same limits: with few cores each has half
MANY_ROWS, FEW_ROWS = 1 << 20, 64


def spills(problem: Problem, device: Device, num_rows: int) -> list[str]:
    """A line for each kernel of a problem that spills more registers than it may."""
    found = []
    for launch in make_plan(problem, device, num_rows).launches:
        used = compile_for(launch.kernel, device.compute_capability)[1]
        if max(used.spill_store_bytes, used.spill_load_bytes) > allowed(problem, launch):
            found.append(
                f"{problem.num_cols} {problem} {launch.kernel.source} {launch.tile} {used}"
            )
    return found


def allowed(problem: Problem, launch: KernelLaunch) -> int:
    """Bytes that a thread may spill: where everything that does not spill is slower.

    A second launch takes longer than what the one of few rows spills. A next row that is not
    prefetched costs rows to 8 bits more than a few registers.
    """
    if launch.kernel.source == "backward_few.cu":
        return 512
    ahead = problem.scaling is not None and fetches_ahead(problem, launch.tile)
    return 48 if ahead and not launch.tile.exact else 0


@needs_nvrtc
@pytest.mark.parametrize("compute_capability", ARCHITECTURES)
def test_kernels_of_random_problems_do_not_spill(compute_capability):
    generator = random.Random(compute_capability)
    device = DEVICES[ARCHITECTURES[compute_capability]]
    found = []
    halves = 1 if HAS_TIME or compute_capability not in SAME_LIMITS else 2
    for at in range(NUM_PROBLEMS // halves):
        problem, num_rows = random_problem(generator), generator.choice([FEW_ROWS, MANY_ROWS])
        has_file = any(device.name in names for names in FILES.values())
        planned = without_file(device.name) if has_file and at % 2 else device
        found += spills(problem, planned, num_rows)
    assert not found, "\n".join(found)


def forward(num_cols: int, dtype: str, centered: bool = True, **fields: object) -> Problem:
    named = {"x": dtype, "y": dtype, "weight": dtype, "bias": dtype if centered else None} | fields
    layout = Layout.of_new_arrays(num_cols)
    return Problem("forward", centered, num_cols, layout=layout, **named)


def backward(num_cols: int, dtype: str, centered: bool = True, **fields: object) -> Problem:
    named = dict.fromkeys(("x", "dy", "dx", "weight", "dweight"), dtype) | fields
    named["dbias"] = dtype if centered else None
    layout = Layout.of_new_arrays(num_cols)
    return Problem("backward", centered, num_cols, layout=layout, **named)


# The narrowest margins between what the model allows and what the compiler needs: architecture,
# number of rows, problem.
TIGHT = {
    "odd residual": (90, MANY_ROWS, forward(8143, "float16", residual=True)),
    "odd residual in a cluster": (90, MANY_ROWS, forward(118811, "bfloat16", residual=True)),
    "odd residual of RMSNorm": (90, MANY_ROWS, forward(9609, "bfloat16", False, residual=True)),
    "residual in pairs": (100, MANY_ROWS, forward(179746, "bfloat16", residual=True)),
    "pairs to 8 bits": (
        90,
        MANY_ROWS,
        forward(470, "bfloat16", False, y="float8_e4m3fn", scaling="given"),
    ),
    "uncached with dsum": (80, MANY_ROWS, backward(54272, "float32", False, dsum="float32")),
    "dsum on two lanes": (90, MANY_ROWS, backward(47, "float16", dsum="float16")),
    "dsum on one lane": (90, MANY_ROWS, backward(39, "float16", dsum="float16")),
}


@needs_nvrtc
@pytest.mark.parametrize("case", TIGHT)
def test_the_tightest_kernels_do_not_spill(case):
    compute_capability, num_rows, problem = TIGHT[case]
    device = without_file(ARCHITECTURES[compute_capability])
    assert not spills(problem, device, num_rows)
