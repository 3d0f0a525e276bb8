"""No kernel of a grid of problems spills much, for six architectures, with no GPU.

The division and the square root of float64 are subroutines that may keep a stack frame.
"""

from __future__ import annotations

import itertools
import shutil

import pytest
from kernel_grid import ARCHITECTURES, FULL, HAS_TIME, batches, instances, plan_of
from nvrtc_here import needs_nvrtc
from plan_problems import without_file

import cupynorm
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import choose
from cupynorm.dispatch.grids import fetches_ahead
from cupynorm.dispatch.instances import Kernel
from cupynorm.dispatch.problem import SCALINGS, Layout, Problem, Tile
from cupynorm.gpu.nvrtc import compile_for, compile_together, cuda_src
from cupynorm.plans import plan

# Bytes of a thread. On an H200 tiles that spilled 4 to 88 bytes were up to 50% faster than tiles of
# fewer blocks that spill none (docs/experiments.md).
MOST_SPILLED = 96
# Tests of each architecture, so that pytest-xdist can share them out.
PARTS = {80: 2, 86: 1, 89: 1, 90: 2, 100: 1, 120: 1}
# With few cores: (first, step) of the kernels that are compiled. The plans of sm_86 and sm_89 have
# the same limits, so other kernels are compiled for each.
SHARES = {80: (0, 12), 86: (1, 24), 89: (5, 24), 90: (4, 72), 100: (9, 24), 120: (13, 24)}


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute_capability", "part"),
    [(key, part) for key, parts in PARTS.items() for part in range(parts)],
    ids=str,
)
def test_no_chosen_kernel_spills_much(compute_capability, part):
    """That would mean that the tile has too many elements or blocks for the registers."""
    found = instances(compute_capability)

    kernels = sorted(found, key=lambda kernel: (kernel.source, kernel.name_expression))
    if not HAS_TIME:
        first, step = SHARES[compute_capability]
        kernels = kernels[first::step]
    reports = {}
    of_part = kernels[part :: PARTS[compute_capability]]
    for batch in batches(of_part):
        for kernel, (_, used) in compile_together(batch, compute_capability)[1].items():
            reports[kernel] = used
    spilled = [
        f"{found[kernel]}: {used.registers} registers, "
        f"{used.spill_store_bytes} + {used.spill_load_bytes} bytes spilled"
        for kernel, used in reports.items()
        if spills_much(used)
    ]
    count = f"{len(spilled)} of {len(of_part)} kernels spill much on sm_{compute_capability}"
    assert not spilled, "\n".join([count, *spilled])
    for kernel, used in reports.items():
        assert 0 < used.registers <= 255, found[kernel]
        if "double" not in kernel.name_expression:
            frame = f"{found[kernel]}: a stack frame of {used.stack_bytes} bytes"
            # A frame is made of units of 8 bytes.
            assert used.stack_bytes <= -(-used.spill_store_bytes // 8) * 8, frame


def spills_much(used) -> bool:
    return max(used.spill_store_bytes, used.spill_load_bytes) > MOST_SPILLED


TO_8_BITS = {"direction": "forward", "y": "float8_e4m3fn"}
BLOCKS = {"scaling": "block"}
SUM = {"direction": "forward", "residual": True, **dict.fromkeys(("x", "y", "weight"), "float16")}
OF_FLOAT64 = {"dtype": "float16", "weight_dtype": "float64", "bias_dtype": "float64"}


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_cols", "problem"),
    [
        (999, TO_8_BITS | {"x": "float64", "weight": "float64", "bias": "float64"} | BLOCKS),
        (7168, TO_8_BITS | {"x": "bfloat16", "weight": "bfloat16", "scaling": "tensor"}),
        (72, OF_FLOAT64 | {"direction": "backward"}),
        (320, OF_FLOAT64 | {"direction": "backward"}),
        (136, {"direction": "backward", "weight_dtype": "float32", "bias_dtype": "float32"}),
        (32345, {"residual": True, "weight_dtype": "float32", "bias_dtype": "float32"}),
        (52257, {"scaling": "row", "weight": "float32", "x": "bfloat16"} | TO_8_BITS),
        (8143, SUM | {"bias": "float16"}),
        (9609, SUM | {"centered": False}),
        (39, {"direction": "backward", "dtype": "float16", "residual": True}),
        (118811, {"residual": True}),
    ],
)
def test_tight_kernels(num_cols, problem):
    """Those near the limit, and some that were above it."""
    for device in (DEVICES["H200"], without_file("H200")):
        for launch in plan_of(problem, num_cols, 2**20, device).launches:
            assert not spills_much(compile_for(launch.kernel, 90)[1]), launch


@pytest.mark.slow
def test_the_grid_meets_every_strategy():
    """The kernels compiled above are of every .cu file, clusters only where there are any."""
    for compute_capability in ARCHITECTURES:
        found = instances(compute_capability)
        files = {kernel.source for kernel in found}
        clusters = {"forward_cluster.cu", "backward_cluster.cu"}
        everything = {path.name for path in cuda_src().glob("*.cu")}
        everything.remove("apply_functor.cu")  # for arrays on the CPU alone
        if compute_capability != 90:
            everything.remove("norm_linear.cu")
        assert files == (everything if compute_capability >= 90 else everything - clusters)
        tiled = [kernel for kernel in found if "Tile{" in kernel.name_expression]
        rings = [kernel for kernel in tiled if ".stages = 0" not in kernel.name_expression]
        assert len(rings) >= 50 if compute_capability >= 90 else not rings
        assert len(found) >= (400 if compute_capability in FULL else 200)
        names = " ".join(kernel.name_expression for kernel in found)
        for scaling, steps in dict.fromkeys(SCALINGS, ("amax", "write")).items():
            steps = {"given": ("write", "all"), "row": ("all",), "tensor": steps}.get(
                scaling, (*steps, "all")
            )
            assert all(f"Scaling::{scaling}, Step::{step}>" in names for step in steps)
        assert all(
            f"quantize<{each}<" in names
            for each in ("ScaledSource", "NormalizedSource", "BytesSource")
        )


@needs_nvrtc
def test_spills_are_seen():
    """The check above can fail: 4 packs of sums in 1024 threads cannot fit 64 registers."""
    tile = cupynorm.Tile(pack_size=8, threads_per_row=1024, packs_per_thread=4)
    made = plan(
        32768, 8, "float32", direction="backward", device="H200", strategy="block", tile=tile
    )
    used = compile_for(made.launches[0].kernel, 90)[1]
    assert used.registers == 64 and spills_much(used)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    ({}, {"y": "float8_e5m2", "x": "float16"}, {"weight": "float32"}, {"residual": True}),
    ids=str,
)
def test_plan_and_kernel_agree_on_early_fetches(tmp_path, changes):
    """fetches_ahead of quantize_store.cuh agrees with grids.fetches_ahead."""
    folder = tmp_path / "cuda_src"
    shutil.copytree(cuda_src(), folder)
    (folder / "says.cu").write_text(
        '#include "forward.cuh"\n#include "register_row.cuh"\n'
        "template <class Load, class Store, bool centered, Statistics statistics, Tile tile, "
        "bool expected>\n"
        "__global__ void says() {\n"
        "  static_assert(Store::template fetches_ahead<Load, RegisterRow<Load, tile>, tile> == "
        "expected);\n"
        "}\n"
    )

    def compile_what(said: bool, instance: str) -> None:
        name = (
            instance.replace("forward_block<", "says<").removesuffix(">")
            + f", {str(said).lower()}>"
        )
        compile_for(Kernel("says.cu", name), 90, folder)

    x = changes.get("x", "bfloat16")
    of_all = {"y": "float8_e4m3fn", "weight": x, "bias": x, **changes, "x": x}
    seen = set()
    for scaling, packs, blocks, exact in itertools.product(
        ("row", "block", "given"), (7, 8), (2, 4, 5), (0, 1)
    ):
        tile = Tile(8, 128, packs, blocks_per_sm=blocks, exact=exact)
        num_cols = tile.cols - 8 * (not exact)
        layout = Layout.of_new_arrays(num_cols)
        problem = Problem("forward", True, num_cols, layout=layout, scaling=scaling, **of_all)
        expected = fetches_ahead(problem, tile)
        seen.add(expected)
        choice = choose(problem, DEVICES["H200"], "block", tile)
        if choice.amax_kernel is not None:
            continue  # scales that two launches find
        compile_what(expected, choice.kernel.name_expression)
        if (scaling, packs, blocks, exact) == ("row", 8, 4, 1):
            with pytest.raises(RuntimeError, match="assert"):
                compile_what(not expected, choice.kernel.name_expression)
    assert seen == ({False} if "residual" in changes or "weight" in changes else {True, False})
