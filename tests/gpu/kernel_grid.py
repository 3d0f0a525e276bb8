"""Every kind of kernel that plan can choose, for six architectures: what test_spills.py compiles.

The whole grid takes half an hour of one core. With fewer than 8 cores it has fewer widths.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path

from plan_problems import problem_of_row, widths_of_row, without_file

from cupynorm import functors
from cupynorm.dispatch import measured
from cupynorm.dispatch.devices import DEVICES, Device
from cupynorm.dispatch.dispatch import Plan, make_plan
from cupynorm.dispatch.functor_text import Fused, FusedPart
from cupynorm.dispatch.grids import quantize_launch, reduce_matrix_launch, update_scales_launch
from cupynorm.dispatch.instances import Kernel, KernelLaunch
from cupynorm.dispatch.problem import SCALINGS, Layout, Problem
from cupynorm.dispatch.product_plan import DTYPES as PRODUCT_DTYPES
from cupynorm.dispatch.product_plan import (
    MOST_ROWS,
    NormLinearProblem,
    few_launch,
    fold_launch,
    product_launch,
)
from cupynorm.dtypes import DTYPES, FLOAT8S
from cupynorm.gpu import nvrtc
from cupynorm.plans import plan

ARCHITECTURES = {80: "A100", 86: "A10", 89: "RTX 4090", 90: "H200", 100: "B200", 120: "RTX 5090"}
HAS_TIME = os.cpu_count() >= 8
# sm_80 and sm_90 stand for GPUs without and with clusters: they get all of the grid.
FULL = (80, 90) if HAS_TIME else ()
E4M3, E5M2 = FLOAT8S
BATCH = 12

# A problem is a dict: arguments of plan() or, if it has an "x", fields of a Problem.


def _dtypes(dtype: str, direction: str = "forward", **options: object) -> dict:
    return {"dtype": dtype, "direction": direction, **options}


# Odd and even widths, both sides of every edge of a strategy, and rows that fit only a cluster or
# nothing.
WIDTHS = (1, 7, 33, 64, 768, 1000, 1023, 1024, 1025, 2048, 4096, 5120, 8192, 12288, 16384, 32768)
WIDTHS += (65536, 131072, 262144, 1 << 20)
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
# The other architectures differ in shared memory and in the registers that ptxas needs. These
# problems need the most.
FEWER_WIDTHS = (7, 768, 1000, 1023, 1025, 4096, 8192, 65536, 1 << 20)
FEWER_PROBLEMS = (
    {},
    {"direction": "backward"},
    {"dtype": "float16", "direction": "backward"},
    {"dtype": "float16", "norm": "rms_norm", "direction": "backward"},
    {"residual": True, **MIXED},
    {"dtype": "float32", "direction": "backward"},
    {"dtype": "float64"},
    {"dtype": "float64", "direction": "backward"},
)
# Rings: each problem needs other registers or other shared memory. Few of the widths fill a tile.
RING_WIDTHS = (1096, 2048, 5128, 8192, 12296, 24576, 40008, 100000, 131072, 200000, 262144)
FEWER_RING_WIDTHS = (1096, 5128, 12296, 131072, 262144)
RING_PROBLEMS = [
    _dtypes("bfloat16"),
    _dtypes("float32"),
    _dtypes("bfloat16", **MIXED),
    _dtypes("bfloat16", "backward"),
    _dtypes("float16", "backward"),
    _dtypes("float32", "backward"),
    _dtypes("bfloat16", "backward", **MIXED),
]
# Bundles on 1 to 32 lanes, the widest rows of each; single elements, pairs and packs of 4.
BUNDLE_WIDTHS = (41, 67, 95, 127, 301, 320, 497, 639, 895, 1057, 1569, 2047, 2559)
BUNDLE_WIDTHS += (24, 50, 72, 136, 250, 392, 500, 900)
DOUBLE = {"weight_dtype": "float64", "bias_dtype": "float64", "zero_centered_weight": True}
BUNDLE_PROBLEMS = [
    _dtypes(dtype, direction, **options)
    for dtype, options in (
        ("bfloat16", {}),
        ("float16", {}),
        ("bfloat16", MIXED),
        ("float32", {}),
        ("float16", DOUBLE),
    )
    for direction in ("forward", "backward")
]
# Fused options: a float32 sum of 16-bit inputs, and functors. dropout needs the most registers.
_DROPS = (
    FusedPart(functors.row_scale, ("float32",), ("own_row",), (None,)),
    FusedPart(functors.dropout(0.5).functor),
)
DROPS = {"load": Fused(_DROPS)}


def _chain(*chain: object, source: str | None = None, gradient: str | None = None) -> Fused:
    """Functors with arrays of float16. gradient: dtype of those of the arrays, in backward."""
    sizes = [(each, len(each.arrays)) for each in chain]
    parts = [FusedPart(e, ("float16",) * n, ("packs",) * n, (gradient,) * n) for e, n in sizes]
    return Fused(tuple(parts), source)


STORED, LOADED = (functors.rotary, functors.silu_gate), (functors.bias_gelu, functors.layer_scale)
BACKWARD = ("dy", "dx", "weight", "dweight", "dbias")


def _forward_of_sum(dtype: str, held: str, **options: object) -> dict:
    named = dict.fromkeys(("input", "y", "weight", "bias"), dtype)
    return {"direction": "forward", "x": held, "residual_dtype": held} | named | options


def _backward_of_sum(dtype: str, held: str, **options: object) -> dict:
    named = dict.fromkeys(BACKWARD, dtype)
    return {"direction": "backward", "x": held, "dsum": held, "dresidual": held} | named | options


FUSED_PROBLEMS = [
    _forward_of_sum("bfloat16", "float32"),
    _forward_of_sum("bfloat16", "float32", **DROPS),
    _forward_of_sum("float16", "float16", **DROPS),
    _forward_of_sum("float64", "float64", **DROPS),
    _backward_of_sum("bfloat16", "float32"),
    _backward_of_sum("float16", "float32", input="float16", **DROPS),
    _backward_of_sum("bfloat16", "bfloat16", load=Fused(_DROPS[1:])),
    _backward_of_sum("float64", "float64", input="float64", **DROPS),
    {"direction": "forward"} | dict.fromkeys(("x", "y", "round_x_hat", "weight"), "float16"),
]
FUSED_WIDTHS = (7, 768, 1000, 1025, 8192, 262144)
FEWER_FUSED_WIDTHS = (768, 1025)
# Backward that writes y again reads the bias and writes one more tensor.
RECOMPUTING_PROBLEMS = [
    {"direction": "backward"}
    | dict.fromkeys(("x", "dy", "dx", "recomputed"), dtype)
    | dict.fromkeys(("weight", "bias", "dweight", "dbias"), weight)
    for dtype, weight in (
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("float64", "float64"),
    )
]
RECOMPUTING_WIDTHS = (33, 64, 512, 640, 768, 1000, 1096, 1792, 4096, 8192, 12296, 40008, 262144)
FEWER_RECOMPUTING_WIDTHS = (512, 1096, 4096, 12296)
# y in 8 bits. Where a row's own scale is used, y is kept until it is known: single elements and
# long threads need the most registers.


def _to_8_bits(scaling: str, dtype: str, weight: str, **options: object) -> dict:
    named = {"x": dtype, "y": E4M3, "scaling": scaling, "weight": weight, "bias": weight}
    return {"direction": "forward"} | named | options


def _sum_in(held: str) -> dict:
    return {"input": "bfloat16", "residual_dtype": held}


QUANTIZED_PROBLEMS = [
    {"direction": "forward", "scaling": scaling, **options}
    for scaling in SCALINGS
    for options in (
        {"x": "bfloat16", "y": E4M3, "weight": "bfloat16", "bias": "bfloat16"},
        {"x": "float16", "y": E5M2, "weight": "float32", "centered": False},
        {"x": "float32", "y": E4M3},
    )
] + [
    _to_8_bits("given", "bfloat16", "bfloat16", amax=True),
    _to_8_bits("given", "float32", "float32", amax=True),
    _to_8_bits("row", "bfloat16", "float32", residual=True),
    _to_8_bits("row", "float64", "float64"),
    _to_8_bits("block", "float64", "float64"),
    _to_8_bits("row", "float32", "bfloat16", **_sum_in("float32")),
    _to_8_bits("tensor", "float32", "bfloat16", **_sum_in("float32")),
    _to_8_bits("row", "bfloat16", "bfloat16", **_sum_in("bfloat16"), **DROPS),
]
QUANTIZED_WIDTHS = (1, 33, 40, 255, 768, 999, 1536, 2048, 4096, 6144, 8192, 13312, 16384)
QUANTIZED_WIDTHS += (65536, 200000)
FEWER_QUANTIZED_WIDTHS = (255, 1536, 65536, 66000)
# Chains of functors with arrays.
CHAIN_PROBLEMS = [
    {"direction": "forward", "x": "float16", "y": "float16", "store": _chain(*STORED)},
    {"direction": "backward", "x": "float16", **dict.fromkeys(BACKWARD, "float16")}
    | {"dy": "float32", "store": _chain(*STORED, source="float16", gradient="float32")},
    _forward_of_sum("float16", "float16", load=_chain(*LOADED)),
    {"direction": "forward", "x": "float32", "y": "float16"}
    | {"load": _chain(*LOADED, source="float16")},
    {"direction": "backward", "x": "float16", "input": "float16", "dresidual": "float16"}
    | dict.fromkeys(BACKWARD, "float16")
    | {"load": _chain(*LOADED, gradient="float32")},
    _to_8_bits("tensor", "float16", "float16", store=_chain(*STORED)),
]
CHAIN_WIDTHS = (128, 1024, 4096) if HAS_TIME else ()


def problems_of_rows() -> list[tuple[dict, int]]:
    """The widest problem of each class of each row of h200.csv: its tile has the most packs."""
    found = []
    for row in measured.read_rows(Path(measured.__file__).parent / "h200.csv"):
        for _, norm, dtype, _ in row.keys:
            problem = problem_of_row(row, norm, dtype, num_cols := widths_of_row(row)[-1])
            given = {each.name: getattr(problem, each.name) for each in fields(problem)}
            present = {name: value for name, value in given.items() if value}
            found.append((present | {"centered": problem.centered}, num_cols))
    return found


def plan_of(problem: dict, num_cols: int, num_rows: int, device: Device) -> Plan:
    if "x" not in problem:
        return plan(num_cols, num_rows, device=device, **problem)
    given = {"centered": True, "num_cols": num_cols, "layout": Layout.of_new_arrays(num_cols)}
    return make_plan(Problem(**given | problem), device, num_rows)


def matrix_launches(limits: tuple[int, ...], device: Device) -> list[KernelLaunch]:
    """All kinds of quantize.cu and reduce_matrix.cu, packs of up to `limits`, and update_scales."""
    found = [update_scales_launch(3)]
    for dtype, weight, flag in (("bfloat16", "float32", True), ("float16", None, False)):
        for in_features in (8, 4096, 8192):
            found.append(
                fold_launch(
                    (8, in_features), dtype, weight, weight, centered=flag, zero_centered=flag
                )
            )
    for num_rows, dtype, weight, flag in itertools.chain(
        ((each, "bfloat16", "bfloat16", True) for each in range(1, MOST_ROWS + 1)),
        ((each, "float16", None, False) for each in (1, MOST_ROWS)),
    ):
        few = NormLinearProblem(num_rows, 1024, 8, dtype, weight, weight, flag, flag)
        found.append(few_launch(device, few).launch)
    if device.compute_capability == 90:
        for dtype, centered, size in itertools.product(PRODUCT_DTYPES, (True, False), (1, 2)):
            plan = product_launch(device, 8, 8, dtype, centered=centered, cluster_size=size)
            found.append(plan.launch)
    for limit in limits:
        for dtype, sums in itertools.product(DTYPES, (None, "bfloat16")):
            found += reduce_matrix_launch(device, 130, 257, dtype, limit, sums)[0]
        for sums, scaling, dtype in itertools.product(
            (None, "bfloat16"), ("given", "tensor"), DTYPES
        ):
            found += quantize_launch(130, 257, dtype, E5M2, limit, sums=sums, scaling=scaling)
        for name in FLOAT8S:
            found += quantize_launch(130, 257, name, name, limit)
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


def _grid(compute_capability: int) -> list[tuple[dict, int, Device]]:
    """Problems with a width, and the device that they are planned for."""
    full, is_sm_90 = compute_capability in FULL, compute_capability == 90
    grid = [
        (PROBLEMS if full or is_sm_90 else FEWER_PROBLEMS, WIDTHS if full else FEWER_WIDTHS),
        (FUSED_PROBLEMS, FUSED_WIDTHS if HAS_TIME else FEWER_FUSED_WIDTHS),
        (CHAIN_PROBLEMS, CHAIN_WIDTHS),
        (RECOMPUTING_PROBLEMS, RECOMPUTING_WIDTHS if full else FEWER_RECOMPUTING_WIDTHS),
        (QUANTIZED_PROBLEMS, QUANTIZED_WIDTHS if HAS_TIME else FEWER_QUANTIZED_WIDTHS),
    ]
    if compute_capability >= 90:
        all_widths = HAS_TIME or is_sm_90
        grid += [
            (RING_PROBLEMS, RING_WIDTHS if all_widths else FEWER_RING_WIDTHS),
            (BUNDLE_PROBLEMS, BUNDLE_WIDTHS if all_widths else BUNDLE_WIDTHS[::4]),
        ]
    pairs = [pair for each in grid for pair in itertools.product(*each)]
    device = DEVICES[ARCHITECTURES[compute_capability]]
    found = [(*each, device) for each in pairs + (problems_of_rows() if is_sm_90 else [])]
    # Widths that no list names, as many in each octave; the model decides, not the data file.
    generator, by_model = random.Random(compute_capability), without_file(device.name)
    for problem in (each for problems, _ in grid for each in problems):
        found.append((problem, int(2 ** generator.uniform(2, 18)), by_model))
    return found


def pack_limits(compute_capability: int) -> tuple[int, ...]:
    """Widest packs of the kernels of matrices; wide packs need the most registers."""
    if compute_capability in FULL:
        return (1, 2, 4, 8, 16)
    return (1, 16) if HAS_TIME or compute_capability in (80, 90) else (16,)


@cache
def instances(compute_capability: int) -> dict[Kernel, str]:
    """The distinct kernels of the grid, each with the first problem that asks for it."""
    device = DEVICES[ARCHITECTURES[compute_capability]]
    found: dict[Kernel, str] = {}
    rows = (16, 4096, 2**30)  # few rows may have tiles and kernels of their own
    for (problem, num_cols, planned), num_rows in itertools.product(
        _grid(compute_capability), rows
    ):
        for launch in plan_of(problem, num_cols, num_rows, planned).launches:
            words = " ".join(f"{key}={value}" for key, value in problem.items())
            text = f"{num_cols:>7} {words:<60} {launch.kernel.source:<23} {launch.tile}"
            found.setdefault(launch.kernel, text)
    limits = pack_limits(compute_capability)
    for launch in matrix_launches(limits, device):
        found.setdefault(launch.kernel, launch.kernel.name_expression)
    return found


def batches(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Kernels of one source text each, few enough to be compiled together."""
    of_source: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        of_source.setdefault(nvrtc.source(kernel), []).append(kernel)
    steps = [(each, at) for each in of_source.values() for at in range(0, len(each), BATCH)]
    return [each[at : at + BATCH] for each, at in steps]
