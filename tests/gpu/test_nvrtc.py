"""nvrtc.py: every kernel that plan can choose compiles without spills for six architectures, with no GPU; and the cache's key.

0 bytes of spills, not 0 bytes of stack: the division and square root of float64 are subroutines that may keep a frame.
The whole grid takes half an hour of one core: with fewer than 8 cores it is a sample.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import cupynorm
from cupynorm.dtypes import DTYPES, FLOAT8S
from cupynorm.gpu import nvrtc
from cupynorm.gpu.nvrtc import Resources, compile_for, cuda_src, source
from cupynorm.norm.plans import plan
from cupynorm.plan.devices import DEVICES, Device
from cupynorm.plan.dispatch import choose, make_plan
from cupynorm.plan.instances import Kernel, Launch
from cupynorm.plan.matrices import quantize_launch, survey_launch, update_scales_launch
from cupynorm.plan.problem import SCALINGS, Layout, Problem, Tile
from cupynorm.plan.tile_model import fetches_ahead

REPOSITORY = Path(__file__).parents[2]


def _nvrtc_is_missing() -> str:
    try:
        nvrtc.version()
    except Exception as error:
        return f"NVRTC is needed to compile: {error}"
    return ""


needs_nvrtc = pytest.mark.skipif(
    bool(_nvrtc_is_missing()), reason=_nvrtc_is_missing() or "NVRTC is there"
)

# Every instance that plan can choose.

ARCHITECTURES = {80: "A100", 86: "A10", 89: "RTX 4090", 90: "H200", 100: "B200", 120: "RTX 5090"}
# Odd and even, both sides of every border of the table, and rows that only fit a cluster or nothing.
WIDTHS = (
    1, 7, 33, 64, 768, 1000, 1023, 1024, 1025, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536, 131072, 262144, 1 << 20,
)  # fmt: skip
MIXED = {"weight_dtype": "float32", "bias_dtype": "float32"}
BARE = {"weight_dtype": None, "bias_dtype": None}


def _problems() -> list[dict]:
    found = []
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        for norm in ("layer_norm", "rms_norm"):
            found += [
                {"dtype": dtype, "norm": norm},
                {"dtype": dtype, "norm": norm, "direction": "backward"},
            ]
        found.append({"dtype": dtype, "residual": True})
    for norm in ("layer_norm", "rms_norm"):
        for options in (MIXED, BARE):
            found += [{"norm": norm, **options}, {"norm": norm, "direction": "backward", **options}]
    found += [{"residual": True, **MIXED}, {"residual": True, "norm": "rms_norm"}]
    for dtype, out_dtype in (
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "float16"),
    ):
        found += [
            {"dtype": dtype, "out_dtype": out_dtype},
            {"dtype": dtype, "out_dtype": out_dtype, "direction": "backward"},
        ]
    return found


PROBLEMS = _problems()
# The architectures differ in shared memory and in what ptxas makes of the same code; these are the tightest in registers.
FEWER_WIDTHS = (7, 768, 1000, 1023, 1025, 4096, 8192, 65536, 1 << 20)
FEWER_PROBLEMS = (
    {}, {"direction": "backward"}, {"dtype": "float16", "direction": "backward"},
    {"dtype": "float16", "norm": "rms_norm", "direction": "backward"}, {"residual": True, **MIXED},
    {"dtype": "float32", "direction": "backward"}, {"dtype": "float64"}, {"dtype": "float64", "direction": "backward"},
)  # fmt: skip
# Rows that pass through a ring, in steps of 8 columns: few fill their tile. Each problem has other registers or shared memory.
RING_WIDTHS = (1096, 2048, 5128, 8192, 12296, 24576, 40008, 100000, 131072, 200000, 262144)
FEWER_RING_WIDTHS = (1096, 5128, 12296, 131072, 262144)
RING_PROBLEMS = [
    {"dtype": dtype, "direction": direction, **options}
    for direction, dtype, options in (
        ("forward", "bfloat16", {}), ("forward", "float32", {}), ("forward", "bfloat16", MIXED),
        ("backward", "bfloat16", {}), ("backward", "float16", {}), ("backward", "float32", {}), ("backward", "bfloat16", MIXED),
    )
]  # fmt: skip
# Rows that come and go in bundles, on 1 to 32 lanes, the tightest of each; single elements, pairs, packs of 4.
BUNDLE_WIDTHS = (
    41,
    67,
    95,
    127,
    301,
    320,
    497,
    639,
    895,
    1057,
    1569,
    2047,
    2559,
    24,
    50,
    72,
    136,
    250,
    392,
    500,
    900,
)
BUNDLE_PROBLEMS = [
    {"dtype": dtype, "direction": direction, **options}
    for dtype, options in (
        ("bfloat16", {}), ("float16", {}), ("bfloat16", MIXED), ("float32", {}),
        ("float16", {"weight_dtype": "float64", "bias_dtype": "float64", "zero_centered_weight": True}),
    )
    for direction in ("forward", "backward")
]  # fmt: skip
# Fused options, by the fields of a Problem: a stream of float32 beside 16-bit inputs, and dropout, which takes most registers.
DROPS = {"row_scale": "float32", "dropout": True}
PARAMETERS = ("weight", "bias", "weight1", "bias1")
FUSED_PROBLEMS = [
    {
        "direction": "forward", "x": held, "input": dtype, "residual_dtype": held, "y": dtype, "weight": dtype, "bias": dtype,
        **options,
    }
    for dtype, held, options in (
        ("bfloat16", "float32", {}), ("bfloat16", "float32", DROPS), ("float16", "float16", DROPS),
        ("float64", "float64", DROPS),
    )
] + [
    {"direction": "forward", "x": dtype, "y": dtype, "y1": dtype, "residual": residual} | dict.fromkeys(PARAMETERS, weight)
    for dtype, weight, residual in (
        ("bfloat16", "float32", True), ("bfloat16", "bfloat16", False), ("float32", "float32", False),
    )
] + [
    {
        "direction": "backward", "x": held, "dy": dtype, "dx": dtype, "weight": dtype, "dweight": dtype, "dbias": dtype,
        "dsum": held, "dresidual": held, **options,
    }
    for dtype, held, options in (
        ("bfloat16", "float32", {}), ("float16", "float32", DROPS), ("bfloat16", "bfloat16", DROPS),
        ("float64", "float64", DROPS),
    )
]  # fmt: skip
FUSED_PROBLEMS += [
    {
        "direction": "backward", "x": held, "y": y, "y_weight": weight, "y_bias": weight, "dy": y, "dx": y, "weight": weight,
        "dweight": weight, "dbias": weight,
    }
    for y, held, weight in (
        ("bfloat16", "float32", "float32"), ("float16", "float32", "float16"), ("float64", "float64", "float64"),
    )
]  # fmt: skip
FUSED_PROBLEMS.append(
    {
        "direction": "forward",
        "x": "float16",
        "y": "float16",
        "round_x_hat": "float16",
        "weight": "float16",
    }
)
FUSED_PROBLEMS += [
    {"direction": "forward", "x": dtype} for dtype in ("bfloat16", "float32")
]  # statistics alone
FUSED_WIDTHS = (7, 768, 1000, 1025, 8192, 262144)
FEWER_FUSED_WIDTHS = (768, 1025)
# Backward that writes y again: the bias and one more stream beside what there was, at every edge of registers and rings.
RECOMPUTING_PROBLEMS = [
    {"direction": "backward", "x": dtype, "dy": dtype, "dx": dtype, "recomputed": dtype}
    | dict.fromkeys(("weight", "bias", "dweight", "dbias"), weight)
    for dtype, weight in (
        ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32"),
        ("float64", "float64"),
    )
]  # fmt: skip
RECOMPUTING_WIDTHS = (33, 64, 512, 640, 768, 1000, 1096, 1792, 4096, 8192, 12296, 40008, 262144)
FEWER_RECOMPUTING_WIDTHS = (512, 1096, 4096, 12296)
# y in 8-bit floats. Where scales are found in the row its values wait longer: lone elements and long threads are the tightest.
E4M3, E5M2 = FLOAT8S
QUANTIZED_PROBLEMS = [
    {"direction": "forward", "scaling": scaling, **options}
    for scaling in SCALINGS
    for options in (
        {"x": "bfloat16", "y": E4M3, "weight": "bfloat16", "bias": "bfloat16"},
        {"x": "float16", "y": E5M2, "weight": "float32", "centered": False},
        {"x": "float32", "y": E4M3},
    )
] + [
    {"direction": "forward", "x": dtype, "y": E4M3, "scaling": scaling, "weight": weight, "bias": weight, **options}
    for scaling, dtype, weight, options in (
        ("given", "bfloat16", "bfloat16", {"amax": True}), ("given", "float32", "float32", {"amax": True}),
        ("row", "bfloat16", "float32", {"residual": True}), ("mx", "float16", "float32", {"residual": True}),
        ("row", "float64", "float64", {}), ("block", "float64", "float64", {}),
        ("row", "float32", "bfloat16", {"input": "bfloat16", "residual_dtype": "float32"}),
        ("tensor", "float32", "bfloat16", {"input": "bfloat16", "residual_dtype": "float32"}),
        ("row", "bfloat16", "bfloat16", {"input": "bfloat16", "residual_dtype": "bfloat16", **DROPS}),
        ("mx", "float16", "float16", {"round_x_hat": "float16", "centered": False}),
    )
]  # fmt: skip
QUANTIZED_WIDTHS = (
    1,
    33,
    40,
    255,
    768,
    999,
    1536,
    2048,
    4096,
    6144,
    8192,
    13312,
    16384,
    65536,
    200000,
)
FEWER_QUANTIZED_WIDTHS = (255, 1536, 65536, 66000)


# Tiles that only an H200 has: long threads of wide 16-bit rows, two blocks of float32 rows, lone elements in lanes and in small
# rings, weights of 32 bits in lanes; and y unpacked until its row's scale is known, or in as few registers as one scale needs.
TUNED_PROBLEMS = [
    {"dtype": dtype, "norm": norm, **options}
    for dtype, norm, options in (
        ("bfloat16", "layer_norm", {}), ("float16", "layer_norm", {}), ("bfloat16", "rms_norm", {}),
        ("bfloat16", "layer_norm", {"zero_centered_weight": True}), ("float32", "layer_norm", {}), ("float32", "rms_norm", {}),
        ("bfloat16", "layer_norm", MIXED), ("float32", "layer_norm", {"out_dtype": "bfloat16"}),
    )
]  # fmt: skip
TUNED_WIDTHS = (
    511,
    901,
    1160,
    2601,
    4097,
    8191,
    9304,
    10000,
    12001,
    13312,
    14336,
    15000,
    16384,
    20001,
    20480,
    24576,
)


def _tuned_quantized(
    scalings: tuple[tuple[str, bool], ...], norms: tuple[tuple[str, bool], ...]
) -> list[dict]:
    return [
        {
            "direction": "forward",
            "x": dtype,
            "y": E4M3,
            "scaling": scaling,
            "weight": dtype,
            "amax": amax,
        }
        | ({"bias": dtype} if centered else {"centered": False})
        for scaling, amax in scalings
        for dtype, centered in norms
    ]


LAYER_NORMS, NORMS = (
    (("bfloat16", True), ("float16", True)),
    (("bfloat16", True), ("float16", True), ("bfloat16", False)),
)
TUNED_QUANTIZED_PROBLEMS = _tuned_quantized(
    (("row", False), ("given", False), ("given", True), ("block", False)), NORMS
)
TUNED_QUANTIZED_WIDTHS = (
    256,
    384,
    640,
    896,
    1024,
    1536,
    2560,
    3072,
    5120,
    7168,
    12288,
    24576,
    28672,
    49152,
)
# Threads as long as their registers hold, of lanes and of blocks; next rows in registers or in shared memory.
LONG_QUANTIZED_PROBLEMS = _tuned_quantized((("given", False), ("given", True)), NORMS)
LONG_QUANTIZED_PROBLEMS += _tuned_quantized((("tensor", False),), LAYER_NORMS)
LONG_QUANTIZED_WIDTHS = (
    576,
    704,
    768,
    6500,
    7000,
    9000,
    10000,
    11000,
    13000,
    14000,
    15000,
    16000,
    17600,
    20000,
)
AHEAD_QUANTIZED_PROBLEMS = _tuned_quantized(
    (("row", False), ("block", False), ("mx", False)), LAYER_NORMS
)
AHEAD_QUANTIZED_WIDTHS = (768, 3000, 5000, 6000, 7000, 7600, 8600, 9000, 10000, 11000, 15000)


def matrix_launches(limits: tuple[int, ...], device: Device) -> list[Launch]:
    """Every kind of quantize.cu and survey.cu, with packs of up to each of these elements; and what updates scales."""
    found = [update_scales_launch(3)]
    for limit in limits:
        for dtype, sums in itertools.product(DTYPES, (None, "bfloat16")):
            found += survey_launch(device, 130, 257, dtype, limit, sums)[0]
        for sums, scaling, dtype in itertools.product(
            (None, "bfloat16"), ("given", "tensor"), DTYPES
        ):
            found += quantize_launch(130, 257, dtype, E5M2, limit, sums=sums, scaling=scaling)
        found += itertools.chain(
            *(quantize_launch(130, 257, format, format, limit) for format in FLOAT8S)
        )
        for dtype, weight in (
            ("bfloat16", "bfloat16"),
            ("float16", "float32"),
            ("float32", None),
            ("float64", "float64"),
        ):
            options = {"weight": weight, "zero_centered": dtype == "bfloat16"}
            found += quantize_launch(
                130, 257, dtype, E4M3, limit, centered=True, bias=weight, **options
            )
            found += quantize_launch(130, 257, dtype, E5M2, limit, centered=False, **options)
    return found


# sm_80 and sm_90 stand for GPUs without and with clusters: all of the grid. Parts, so that pytest-xdist can share them out.
HAS_TIME = os.cpu_count() >= 8
FULL = (80, 90) if HAS_TIME else ()
PARTS = {80: 8, 86: 2, 89: 2, 90: 8, 100: 4, 120: 4}


@cache
def instances(compute_capability: int) -> dict[Kernel, str]:
    """The distinct kernels of the grid, each with the first problem that asks for it."""
    full = compute_capability in FULL
    grid = [
        (
            PROBLEMS if full or compute_capability == 90 else FEWER_PROBLEMS,
            WIDTHS if full else FEWER_WIDTHS,
        )
    ]
    if compute_capability >= 90:
        grid.append(
            (
                RING_PROBLEMS,
                RING_WIDTHS if HAS_TIME or compute_capability == 90 else FEWER_RING_WIDTHS,
            )
        )
        grid.append(
            (
                BUNDLE_PROBLEMS,
                BUNDLE_WIDTHS if HAS_TIME or compute_capability == 90 else BUNDLE_WIDTHS[::4],
            )
        )
    found: dict[Kernel, str] = {}
    grid.append((FUSED_PROBLEMS, FUSED_WIDTHS if full or HAS_TIME else FEWER_FUSED_WIDTHS))
    grid.append((RECOMPUTING_PROBLEMS, RECOMPUTING_WIDTHS if full else FEWER_RECOMPUTING_WIDTHS))
    grid.append(
        (QUANTIZED_PROBLEMS, QUANTIZED_WIDTHS if full or HAS_TIME else FEWER_QUANTIZED_WIDTHS)
    )
    if compute_capability == 90:
        grid += [(TUNED_PROBLEMS, TUNED_WIDTHS), (TUNED_QUANTIZED_PROBLEMS, TUNED_QUANTIZED_WIDTHS)]
        grid += [
            (LONG_QUANTIZED_PROBLEMS, LONG_QUANTIZED_WIDTHS),
            (AHEAD_QUANTIZED_PROBLEMS, AHEAD_QUANTIZED_WIDTHS),
        ]
    device = DEVICES[ARCHITECTURES[compute_capability]]
    rows = (4096, 2**30)  # few rows may have tiles of their own
    for problem, num_cols, num_rows in (
        each for problems, widths in grid for each in itertools.product(problems, widths, rows)
    ):
        if "x" in problem:  # the fields of a Problem, not what plan() is given
            fields = {
                "centered": True,
                "num_cols": num_cols,
                "layout": Layout.of(num_cols, ()),
                **problem,
            }
            made = make_plan(Problem(**fields), device, num_rows)
        else:
            made = plan(num_cols, num_rows, device=device, **problem)
        for launch in made.launches:
            words = " ".join(f"{key}={value}" for key, value in problem.items())
            text = f"{num_cols:>7} {words:<60} {launch.kernel.source:<23} {launch.tile}"
            found.setdefault(launch.kernel, text)
    for launch in matrix_launches((1, 2, 4, 8, 16) if full else (1, 16), device):
        found.setdefault(launch.kernel, launch.kernel.name_expression)
    return found


def batches(kernels: list[Kernel], size: int) -> list[list[Kernel]]:
    return [kernels[first : first + size] for first in range(0, len(kernels), size)]


def resources_of(kernels: list[Kernel], compute_capability: int) -> dict[Kernel, Resources]:
    """As compile_for, of kernels of one source, which is read once for all of them."""
    from cupy.cuda import get_cuda_path
    from cupy_backends.cuda.libs import nvrtc as library

    flags = [*nvrtc.options(), "-ftz=true", f"-arch=sm_{compute_capability}", "-Xptxas=-v"]
    program = library.createProgram(source(kernels[0]), "instances.cu", (), ())
    try:
        for kernel in kernels:
            library.addNameExpression(program, kernel.name_expression)
        library.compileProgram(program, [*flags, *nvrtc._include_options(get_cuda_path())])
        assert library.getCUBIN(program)[:4] == b"\x7fELF"
        reports = library.getProgramLog(program).split("Compiling entry function '")[1:]
        assert len(reports) == len(kernels)
        of_name = {report.partition("'")[0]: nvrtc._resources(report) for report in reports}
        return {
            kernel: of_name[library.getLoweredName(program, kernel.name_expression)]
            for kernel in kernels
        }
    finally:
        library.destroyProgram(program)


@needs_nvrtc
def test_kernels_that_are_compiled_together_use_what_each_uses_alone():
    kernels = [
        plan(num_cols, device="H200", direction="backward").launches[0].kernel
        for num_cols in (128, 256, 512)
    ]
    assert resources_of(kernels, 90) == {kernel: compile_for(kernel, 90)[1] for kernel in kernels}


@needs_nvrtc
@pytest.mark.parametrize(
    ("compute_capability", "part"),
    [(key, part) for key, parts in PARTS.items() for part in range(parts)],
    ids=lambda value: str(value),
)
def test_every_chosen_kernel_compiles_without_spills(compute_capability, part):
    """A spill means that a row does not fit the registers: its tile has too many elements or blocks."""
    found = instances(compute_capability)
    kernels = sorted(found, key=lambda kernel: (kernel.source, kernel.name_expression))[
        part :: PARTS[compute_capability]
    ]
    reports = {}
    for _, of_source in itertools.groupby(kernels, key=lambda kernel: kernel.source):
        for batch in batches(list(of_source), 16):
            reports |= resources_of(batch, compute_capability)
    spilled = [
        f"{found[kernel]}: {used.registers} registers, {used.spill_store_bytes} + {used.spill_load_bytes} bytes spilled"
        for kernel, used in reports.items()
        if used.spill_store_bytes or used.spill_load_bytes
    ]
    assert not spilled, (
        f"{len(spilled)} of {len(kernels)} kernels spill on sm_{compute_capability}:\n"
        + "\n".join(spilled)
    )
    for kernel, used in reports.items():
        assert 0 < used.registers <= 255, found[kernel]
        if "double" not in kernel.name_expression:
            assert used.stack_bytes == 0, (
                f"{found[kernel]}: a stack frame of {used.stack_bytes} bytes"
            )


def test_the_grid_meets_every_strategy():
    """What is compiled above is every .cu file (but what needs clusters where there are none), and not a handful."""
    for compute_capability in ARCHITECTURES:
        found = instances(compute_capability)
        files = {kernel.source for kernel in found}
        clusters = {"forward_cluster.cu", "backward_cluster.cu"}
        everything = {path.name for path in cuda_src().glob("*.cu")}
        assert files == (everything if compute_capability >= 90 else everything - clusters)
        rings = [kernel for kernel in found if ".stages = 0" not in kernel.name_expression]
        assert len(rings) >= 50 if compute_capability >= 90 else not rings
        assert len(found) >= (400 if compute_capability in FULL else 50)
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
    """The check above can fail: 16 rows of sums in each of 1024 threads cannot fit 64 registers, and the report says so."""
    tile = cupynorm.Tile(pack_size=8, threads_per_row=1024, packs_per_thread=4)
    made = plan(
        32768, 8, "float32", direction="backward", device="H200", strategy="block", tile=tile
    )
    used = compile_for(made.launches[0].kernel, 90)[1]
    assert used.registers == 64 and used.spill_store_bytes > 0 and used.spill_load_bytes > 0


@needs_nvrtc
def test_what_the_compiler_refuses_is_said_in_its_words():
    with pytest.raises(RuntimeError, match=r"(?s)forward_warp<nonsense>.*nonsense"):
        compile_for(Kernel("forward_warp.cu", "forward_warp<nonsense>"), 90)


# The cache's key.

KERNEL = plan(768, 8, device="H200").launches[0].kernel


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "cuda_src"
    shutil.copytree(cuda_src(), copy)
    return copy


@needs_nvrtc
@pytest.mark.parametrize(
    "changes",
    ({}, {"y": "float8_e5m2", "x": "float16"}, {"weight": "float32"}, {"residual": True}),
    ids=str,
)
def test_kernels_fetch_the_next_row_early_where_the_plan_says_so(folder, changes):
    """fetches_ahead of quantized_write.cuh and tile_model.fetches_ahead, on tiles around what fits."""
    (folder / "says.cu").write_text(
        '#include "forward.cuh"\n#include "register_row.cuh"\n'
        "template <class Load, class Store, bool centered, Statistics statistics, Tile tile, bool expected>\n"
        "__global__ void says() {\n"
        "  static_assert(fetches_ahead<Load, Store, RegisterRow<Load, tile>, tile> == expected);\n"
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
        ("row", "block", "mx", "given"), (7, 8), (2, 4, 5), (0, 1)
    ):
        tile = Tile(8, 128, packs, blocks_per_sm=blocks, exact=exact)
        num_cols = tile.cols - 8 * (not exact)
        layout = Layout.of(num_cols, ())
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


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} no longer has {old!r}"
    path.write_text(text.replace(old, new, 1))


def test_source_is_a_digest_and_one_include(folder):
    lines = source(KERNEL).splitlines()
    assert len(lines) == 2 and lines[1] == '#include "forward_warp.cu"'
    assert lines[0].startswith("// ") and len(bytes.fromhex(lines[0][3:])) == 32
    assert source(KERNEL, folder) == source(KERNEL), (
        "the digest is of what files hold, not of where they lie"
    )


@pytest.mark.parametrize(
    "name", sorted(path.name for path in cuda_src().iterdir() if path.suffix in (".cu", ".cuh"))
)
def test_every_source_file_counts_in_the_digest(folder, name):
    before = source(KERNEL, folder)
    with (folder / name).open("a") as file:
        file.write("// changed\n")
    assert source(KERNEL, folder).splitlines()[0] != before.splitlines()[0]
    assert source(KERNEL, folder).splitlines()[1] == before.splitlines()[1]


def test_renaming_and_swapping_files_change_the_digest(folder):
    before = source(KERNEL, folder)
    tile, cluster = (folder / "tile.cuh").read_bytes(), (folder / "cluster.cuh").read_bytes()
    (folder / "tile.cuh").write_bytes(cluster)
    (folder / "cluster.cuh").write_bytes(tile)
    assert source(KERNEL, folder) != before
    (folder / "tile.cuh").write_bytes(tile)
    (folder / "cluster.cuh").write_bytes(cluster)
    assert source(KERNEL, folder) == before
    (folder / "tile.cuh").rename(folder / "tiles.cuh")
    assert source(KERNEL, folder) != before


@needs_nvrtc
def test_a_changed_header_gives_another_cubin(folder):
    """Compiled from a copy of the sources: the same cubin, until a header that the kernel only includes is changed."""
    original = compile_for(KERNEL, 90)[0]
    assert compile_for(KERNEL, 90, folder)[0] == original
    edit(
        folder / "store.cuh",
        "y_values[at] * weights[at] + biases[at]",
        "y_values[at] * weights[at] - biases[at]",
    )
    assert compile_for(KERNEL, 90, folder)[0] != original
    assert compile_for(KERNEL, 90)[0] == original


COMPILE = """
import hashlib, sys
from cupynorm.norm.plans import plan
from cupynorm.gpu.nvrtc import compile_for
for line in sys.stdin:  # wait until both processes are up
    break
for num_cols in (768, 1000, 8192):
    print(hashlib.sha256(compile_for(plan(num_cols, 8, device="H200").launches[0].kernel, 90)[0]).hexdigest(), flush=True)
"""


@needs_nvrtc
def test_two_processes_compile_at_once():
    """Both get, bit for bit, what one process alone gets."""

    def start() -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-c", COMPILE], cwd=REPOSITORY, env=environment(), text=True, **pipes
        )

    processes = [start(), start()]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 0, errors
    alone = start().communicate("go\n", timeout=300)[0]
    assert len(set(alone.split())) == 3
    assert [output for output, _ in outputs] == [alone, alone]


@pytest.mark.gpu
def test_resources_are_read_of_a_kernel_that_was_compiled_before():
    """With a driver NVRTC keeps what it compiled, and would not report on it again: `tune` asks twice."""
    assert compile_for(KERNEL, 90) == compile_for(KERNEL, 90)


@pytest.mark.gpu
def test_two_processes_share_an_empty_cache(tmp_path):
    """CuPy writes its disk cache by renaming whole files: two processes that meet a new kernel at once both get y right."""
    script = """
import cupy, cupynorm, numpy
x = cupy.arange(24, dtype="float32").reshape(3, 8) ** 2
y = cupynorm.layer_norm(x, 8).get()
expected = cupynorm.layer_norm(x.get(), 8)
print(float(numpy.abs(y - expected).max()))
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=REPOSITORY, env=environment(CUPY_CACHE_DIR=str(tmp_path)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert float(output) < 1e-5
    # Ours, and two that CuPy made for the test's own arithmetic (arange, power).
    ours = [path for path in tmp_path.glob("*.cubin") if b"forward_warp" in path.read_bytes()]
    assert len(ours) == 1


# Without CuPy, without NVRTC.


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | changes


REFUSE = """
import importlib.abc, json, sys

class Refuse(importlib.abc.MetaPathFinder):
    def __init__(self, *names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if any(name == refused or name.startswith(refused + ".") for refused in self.names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def outcome(call):
    try:
        return ["returned", repr(call())]
    except Exception as error:
        return [type(error).__module__ + "." + type(error).__name__, str(error)]
"""


def run_script(script: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", REFUSE + script],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_cupy():
    """NumPy input is computed; all that needs a GPU says what to install; nothing says so at import."""
    found = run_script("""
sys.meta_path.insert(0, Refuse("cupy", "cupy_backends"))
import numpy
import cupynorm
from cupynorm.gpu.nvrtc import compile_for

class Exporter:
    shape, dtype = (2, 4), numpy.dtype("float32")
    def __dlpack__(self, **options):
        raise AssertionError("never asked")
    def __dlpack_device__(self):
        return 2, 0

x = numpy.array([[1.0, 2.0, 3.0, 6.0]])
forward = cupynorm.layer_norm_forward(x, eps=0.0)
backward = cupynorm.layer_norm_backward(x, x, forward.mean, forward.rstd)
kernel = cupynorm.plan(768, 8, device="H200").launches[0].kernel
print(json.dumps({
    "y": cupynorm.layer_norm(x, 4, eps=0.0).tolist(), "dbias": backward.dbias.tolist(),
    "layer_norm": outcome(lambda: cupynorm.layer_norm(Exporter(), 4)),
    "rms_norm_forward": outcome(lambda: cupynorm.rms_norm_forward(Exporter())),
    "backward": outcome(lambda: cupynorm.rms_norm_backward(Exporter(), Exporter(), Exporter())),
    "plan": outcome(lambda: cupynorm.plan(768)),
    "compile_for": outcome(lambda: compile_for(kernel, 90)),
    "is ImportError": issubclass(cupynorm.MissingLibraryError, ImportError),
    "cupy": "cupy" in sys.modules,
}))
""")
    assert found["cupy"] is False and found["is ImportError"] is True
    # mean 3, deviations -2 -1 0 3, variance 14 / 4
    assert found["y"] == [
        pytest.approx([value / 3.5**0.5 for value in (-2, -1, 0, 3)], rel=1e-15, abs=0)
    ]
    assert found["dbias"] == [1.0, 2.0, 3.0, 6.0]
    for call in ("layer_norm", "rms_norm_forward", "backward", "plan", "compile_for"):
        kind, message = found[call]
        assert kind == "cupynorm.gpu.nvrtc.MissingLibraryError", (call, kind, message)
        assert (
            "pip install 'cupynorm[cuda12]'" in message
            and "CuPy" in message
            and "No module named 'cupy'" in message
        )


@pytest.mark.skipif(
    "CuPy could not" in _nvrtc_is_missing(), reason="CuPy is needed to take NVRTC from it"
)
@pytest.mark.parametrize("way", ("import", "library"))
def test_without_nvrtc(way):
    """Whether its binding cannot be imported or the shared library cannot be found: compile_for says what to install."""
    hide = {
        "import": """
import cupy_backends.cuda.libs
sys.modules.pop("cupy_backends.cuda.libs.nvrtc", None)
vars(cupy_backends.cuda.libs).pop("nvrtc", None)
sys.meta_path.insert(0, Refuse("cupy_backends.cuda.libs.nvrtc"))
""",
        "library": """
from cupy_backends.cuda.libs import nvrtc as binding
class Missing:
    def __getattr__(self, name):
        raise RuntimeError("CuPy failed to load libnvrtc.so.12")
import cupy_backends.cuda.libs
sys.modules["cupy_backends.cuda.libs.nvrtc"] = cupy_backends.cuda.libs.nvrtc = Missing()
""",
    }[way]
    found = run_script(f"""
import cupy, numpy
{hide}
import cupynorm
from cupynorm.gpu.nvrtc import compile_for
kernel = cupynorm.plan(768, 8, device="H200").launches[0].kernel
print(json.dumps({{
    "compile_for": outcome(lambda: compile_for(kernel, 90)),
    "y": cupynorm.rms_norm(numpy.array([[3.0, 4.0]]), 2, eps=0.0).tolist(),
}}))
""")
    kind, message = found["compile_for"]
    assert kind == "cupynorm.gpu.nvrtc.MissingLibraryError", message
    assert "NVRTC could not be loaded" in message and "pip install 'cupynorm[cuda12]'" in message
    assert ("libnvrtc.so.12" if way == "library" else "nvrtc") in message.removeprefix(
        "NVRTC could not be loaded"
    )
    assert found["y"] == [pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5], rel=1e-15, abs=0)]


def test_missing_sources_are_said(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "__file__", str(tmp_path / "cupynorm" / "gpu" / "nvrtc.py"))
    with pytest.raises(
        FileNotFoundError, match=rf"neither {tmp_path}/cupynorm/cuda_src nor {tmp_path}/cuda_src"
    ):
        cuda_src.__wrapped__()
