"""Runs every kernel once on small problems, for tools that check a whole process:

    compute-sanitizer --tool memcheck python tests/every_kernel.py

The other tools are racecheck, initcheck and synccheck. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from cupynorm.reference import fp8

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.results import CheckResult, Finding, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES, FLOAT8S, compute_dtype, decode, encode
from cupynorm.gpu import nvrtc
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import QuantizeOptions, forward_call, quantize_call, survey_call
from cupynorm.norm.plans import plan
from cupynorm.norm.quantized_tensor import scale_shape
from cupynorm.norm.request import ForwardOptions, Options, Quantization
from cupynorm.plan.dispatch import Plan
from cupynorm.plan.matrices import update_scales_launch
from cupynorm.plan.problem import SCALINGS, Tile
from cupynorm.plan.strategies import STRATEGIES


def cases() -> list[Case]:
    every = []
    for strategy in STRATEGIES:
        for norm in ("layer_norm", "rms_norm"):
            # Whole packs, then lone elements and mixed dtypes.
            every.append(Case(norm, 300, 512, "bfloat16", strategy=strategy))
            every.append(Case(norm, 5, 255, "float32", weight="float64", strategy=strategy))
        every.append(
            Case(
                "layer_norm", 7, 504, "float16", weight="float32", strategy=strategy, residual=True
            )
        )
        every.append(Case("layer_norm", 3, 256, "float64", strategy=strategy, statistics="welford"))
        every.append(
            Case(
                "layer_norm",
                9,
                500,
                "bfloat16",
                y="float32",
                strategy=strategy,
                zero_centered_weight=True,
            )
        )
        # Sums of another dtype of a scaled input with dropout, in packs and single elements.
        options = {
            "residual": True,
            "residual_dtype": "float32",
            "dropout_p": 0.2,
            "row_scale": "float32",
            "dsum": True,
        }
        options |= {"weight1": "bfloat16", "bias1": "float32"}
        every.append(Case("layer_norm", 300, 512, "bfloat16", strategy=strategy, **options))
        every.append(
            Case("rms_norm", 7, 255, "float16", strategy=strategy, residual_dtype="float32")
        )
        every.append(
            Case(
                "rms_norm",
                9,
                500,
                "bfloat16",
                strategy=strategy,
                weight1="bfloat16",
                round_x_hat=True,
            )
        )
        every.append(
            Case("layer_norm", 9, 500, "bfloat16", strategy=strategy, memory_efficient=True)
        )
        every.append(Case("layer_norm", 300, 512, "bfloat16", strategy=strategy, recompute=True))
        every.append(
            Case("rms_norm", 7, 255, "float32", strategy=strategy, bias="bfloat16", recompute=True)
        )
    # Rows at any address: in bundles of one and of several images, and in rings.
    for num_cols in (33, 127, 511):
        every += [
            Case(norm, 300, num_cols, dtype)
            for norm, dtype in (("layer_norm", "bfloat16"), ("rms_norm", "float32"))
        ]
    # With a residual, and what reaches its sum from elsewhere; the last through a ring.
    for norm, num_cols, dtype in (
        ("layer_norm", 127, "bfloat16"),
        ("rms_norm", 333, "float32"),
        ("layer_norm", 512, "bfloat16"),
    ):
        every.append(Case(norm, 300, num_cols, dtype, residual=True, dsum=True))
    every += [
        Case("layer_norm", num_rows, num_cols, "bfloat16")
        for num_rows, num_cols in ((300, 2049), (60, 33333))
    ]
    every += [
        Case("layer_norm", 300, num_cols, "bfloat16", recompute=True)
        for num_cols in (1023, 1024, 12288)
    ]
    # Rows in the registers of clusters of 2 to 16 blocks; 200001 and 262144 backward are wider.
    every += [
        Case("layer_norm", 9, num_cols, "float32") for num_cols in (200_000, 230_001)
    ]  # one row fills a ring
    every += [
        Case("layer_norm", 2, num_cols, "bfloat16")
        for num_cols in (20000, 40000, 66000, 131072, 200001, 262144)
    ]
    for strategy, sizes in (("block", (1,)), ("cluster", (2, 16))):
        for cluster_size in sizes:
            num_rows = (
                40 if cluster_size == 16 else 300
            )  # more than are resident; racecheck takes a second for a million elements
            # Forward rows in shared memory: other devices and wider rows get them.
            tile = Tile(8, 64, cluster_size=cluster_size)
            every.append(
                Case(
                    "layer_norm",
                    num_rows,
                    4096,
                    "bfloat16",
                    strategy=strategy,
                    tile=tile,
                    sm_margin=32,
                )
            )
            if cluster_size == 1:
                staged = Tile(8, 64, 8, blocks_per_sm=2, exact=1, stages=1)
                every.append(
                    Case(
                        "layer_norm",
                        num_rows,
                        4096,
                        "bfloat16",
                        strategy=strategy,
                        tile=staged,
                        sm_margin=100,
                    )
                )
            # Rings: forward of few packs, so that several rounds of them are quick;
            # backward of the narrowest rows that get one.
            for dtype, pack_size in (("bfloat16", 8), ("float32", 4)):
                num_cols = narrowest_ring(dtype, cluster_size)
                packs_per_thread = max(1, -(-num_cols // (cluster_size * pack_size * 256)))
                tile = Tile(pack_size, 256, packs_per_thread, cluster_size=cluster_size, stages=2)
                every.append(
                    Case(
                        "layer_norm",
                        num_rows,
                        num_cols,
                        dtype,
                        strategy=strategy,
                        tile=tile,
                        sm_margin=32,
                    )
                )
    return every


def narrowest_ring(dtype: str, cluster_size: int) -> int:
    """The fewest columns, a multiple of 1000, whose backward is a ring of such clusters."""
    for num_cols in range(1000, 200_000, 1000):
        tile = plan(num_cols, dtype=dtype, direction="backward", device="H200").tile
        if tile.stages and tile.cluster_size == cluster_size:
            return num_cols
    raise ValueError(f"no backward of {dtype} is a ring of clusters of {cluster_size}")


# y in 8-bit floats: by the norm, and of matrices.

E4M3, E5M2 = FLOAT8S
GIVEN_SCALE = 20.0


class How(NamedTuple):
    """How y becomes 8-bit floats; amax: whether that of y is recorded beside a given scale."""

    dtype: str
    scaling: str
    amax: bool = False


def quantized_cases() -> list[tuple[Case, How]]:
    """Those of a given scale come with an amax and without."""
    every = []
    for strategy in STRATEGIES:
        for scaling in SCALINGS:
            # Packs, with a part of a block of columns at the end; single elements.
            every.append(
                (Case("layer_norm", 40, 560, "bfloat16", strategy=strategy), How(E4M3, scaling))
            )
            lone = Case("rms_norm", 5, 255, "float32", weight=None, bias=None, strategy=strategy)
            every.append((lone, How(E5M2, scaling)))
        summed = Case(
            "layer_norm", 7, 504, "float16", weight="float32", strategy=strategy, residual=True
        )
        every += [(summed, How(E4M3, scaling)) for scaling in ("tensor", "row", "block")]
        double = Case("layer_norm", 3, 256, "float64", strategy=strategy, statistics="welford")
        every += [(double, How(E5M2, scaling)) for scaling in ("tensor", "mx")]
        # Two blocks of a cluster share a block of 128 columns, and one scale.
        shared = Case("layer_norm", 9, 128, "float64", strategy=strategy)
        every.append((shared, How(E5M2, "block")))
        options = {
            "residual": True,
            "residual_dtype": "float32",
            "dropout_p": 0.2,
            "row_scale": "float32",
        }
        dropped = Case("layer_norm", 9, 512, "bfloat16", strategy=strategy, **options)
        every += [(dropped, How(E4M3, scaling)) for scaling in ("given", "tensor", "block")]
    # Rings, of rows that begin anywhere, too, and of clusters; and staged rows.
    for num_cols, tile in (
        (4096, Tile(8, 256, 2, exact=1, stages=2)),
        (1023, Tile(1, 64, 16, stages=2)),
        (9000, Tile(8, 256, 3, cluster_size=2, stages=2)),
        (4000, Tile(8, 256, 2, stages=1)),  # staged
    ):
        strategy = "block" if tile.cluster_size == 1 else "cluster"
        ring = Case(
            "layer_norm", 160, num_cols, "bfloat16", strategy=strategy, tile=tile, sm_margin=100
        )  # some turns each
        every += [(ring, How(E4M3, scaling)) for scaling in SCALINGS]
    # Threads as long as their registers hold, and next rows in those of a warp.
    for num_cols, strategy, tile, scalings in (
        (576, "warp", Tile(8, 8, 9, rows_per_block=8, blocks_per_sm=8, exact=1), ("given",)),
        (13000, "block", Tile(8, 128, 13, blocks_per_sm=4), ("given", "tensor")),
        (9000, "block", Tile(8, 96, 12, blocks_per_sm=5), ("given", "tensor")),
        (1024, "block", Tile(8, 32, 4, blocks_per_sm=24, exact=1), ("row", "block")),
        (1000, "block", Tile(8, 32, 4, blocks_per_sm=20), ("row", "block")),
    ):
        places = (
            32 * tile.blocks_per_sm * tile.rows_per_block
        )  # on the multiprocessors that are left
        num_rows = places + places // 4
        long = Case(
            "layer_norm",
            num_rows,
            num_cols,
            "bfloat16",
            strategy=strategy,
            tile=tile,
            sm_margin=100,
        )
        every += [(long, How(E4M3, scaling)) for scaling in scalings]
    # Rows in the shared memory of a block, or a cluster.
    for cluster_size in (1, 2):
        strategy = "block" if cluster_size == 1 else "cluster"
        kept = Case(
            "layer_norm",
            40,
            4160,
            "bfloat16",
            strategy=strategy,
            tile=Tile(8, 64, cluster_size=cluster_size),
        )
        every += [(kept, How(E4M3, scaling)) for scaling in SCALINGS]
    return every + [
        (case, how._replace(amax=True)) for case, how in every if how.scaling == "given"
    ]


class Kept:
    """Arrays where kernels run, by name; all that kernels write is poisoned with bits of NaN."""

    def __init__(self, where: CpuMachine | GpuCheckMachine) -> None:
        self.where = where
        self.arrays: dict[str, tuple] = {}

    def put(self, name: str, array: np.ndarray | None) -> int:
        """Its address; 0 of None."""
        if array is None:
            return 0
        there, pointer = self.where.put(array)
        self.arrays[name] = there, pointer
        return pointer

    def poisoned(self, name: str, shape: tuple[int, ...], storage: str | np.dtype) -> int:
        return self.put(
            name,
            np.full((*shape, np.dtype(storage).itemsize), 0xFF, np.uint8).view(storage)[..., 0],
        )

    def get(self, name: str) -> np.ndarray:
        return self.where.get(self.arrays[name][0])


def run_quantized(
    case: Case, quantization: How, where: CpuMachine | GpuCheckMachine
) -> tuple[dict, dict]:
    """Arrays by name of a call with y in 8 bits and of one with y in the compute dtype."""
    problem = random_problem(case)
    shape, compute, centered = (
        (case.num_rows, case.num_cols),
        compute_dtype(case.sum).name,
        case.norm == "layer_norm",
    )
    num_parts = scale_shape(quantization.scaling, shape[:1], case.num_cols)

    def run(dtype: str, quantization: How | None, options: Options) -> tuple[Kept, Plan]:
        kept = Kept(where)

        def put(name: str, dtype: str | None) -> int:
            values = getattr(problem, name)
            return kept.put(name, None if values is None else encode(values, dtype))

        def rows(pointer: int, dtype: str) -> Rows | None:
            return Rows(pointer, *shape, case.num_cols, dtype) if pointer else None

        def parameter(name: str, dtype: str | None) -> Rows | None:
            values, pointer = getattr(problem, name), put(name, dtype)
            return Rows(pointer, 1, values.size, values.size, dtype) if pointer else None

        x, residual = rows(put("x", case.x), case.x), rows(put("residual", case.added), case.added)
        added = (
            rows(kept.poisoned("sum", shape, DTYPES[case.sum].storage), case.sum)
            if residual
            else None
        )
        y = rows(kept.poisoned("y", shape, (DTYPES | FLOAT8S)[dtype].storage), dtype)
        mean = kept.poisoned("mean", shape[:1], compute) if centered else 0
        rstd = kept.poisoned("rstd", shape[:1], compute)
        tensors = {"x": x, "y": y, "residual": residual, "sum": added}
        tensors |= {
            name: parameter(name, case.dtype(name)) for name in ("weight", "bias", "row_scale")
        }
        addresses = {"mean": mean, "rstd": rstd}
        if quantization:
            scaling = quantization.scaling
            if scaling == "given":
                addresses["scale"] = kept.put("scale", np.full(1, GIVEN_SCALE, np.float32))
            scale_type = "uint8" if scaling == "mx" else "float32"
            addresses["scale_inv"] = kept.poisoned("scale_inv", num_parts, scale_type)
            addresses["amax"] = kept.put("amax", np.zeros(num_parts, np.float32))
            if quantization.amax:
                tensors["amax"] = Rows(addresses["amax"], 1, 1, 1, "float32")
        tensors = {name: rows for name, rows in tensors.items() if rows}
        asked = ForwardOptions(
            centered,
            shape[1:],
            case.eps,
            dropout_p=case.dropout_p,
            quantization=quantization and Quantization(quantization.dtype, quantization.scaling),
            launch=options,
        )
        call = forward_call(where.device, tensors, asked, "forward")
        addresses |= {name: rows.pointer for name, rows in tensors.items()}
        for launch, words in zip(call.launches, call.fill(addresses, problem.dropout_seed)):
            where.launch(launch, words)
        return kept, call.plan

    in_8_bits, plan = run(
        quantization.dtype,
        quantization,
        Options(case.strategy, case.tile, case.statistics, case.sm_margin),
    )
    plain, _ = run(
        compute, None, Options(plan.strategy, plan.tile, plan.statistics, case.sm_margin)
    )
    return tuple({name: kept.get(name) for name in kept.arrays} for kept in (in_8_bits, plain))


def expected(
    y: np.ndarray, name: str, scaling: str, scale=None, power_of_two=False
) -> fp8.Quantized:
    """The reference's result for y in the compute dtype; scale_inv as cupynorm returns it."""
    with np.errstate(all="ignore"):
        if scaling == "given":
            made = fp8.quantize(y, name, np.float32(1) if scale is None else scale)
        elif scaling == "tensor":
            made = fp8.quantize(y, name, fp8.scale_of(fp8.amax(y), name, power_of_two=power_of_two))
        elif scaling == "row":
            made = fp8.quantize_rows(y, name, power_of_two=power_of_two)
        elif scaling == "block":
            made = fp8.quantize_blocks(y, name, power_of_two=power_of_two)
        else:
            made = fp8.quantize_mxfp8(y, name)
    scale_inv = np.asarray(made.scale_inv).reshape(
        (1,) if scaling in ("given", "tensor") else (len(y), -1)
    )
    return made._replace(scale_inv=scale_inv)


def judge_quantized(
    case: Case, quantization: How, got: dict, plain: dict, exact: bool
) -> list[Finding]:
    """exact: y has the bytes of the reference, computed from y in the compute dtype.

    A GPU's compiler may fuse other operations in another kernel. Then values agree within half a
    step, and scales and the rest within a few roundings.
    """
    truth = expected(plain["y"], quantization.dtype, quantization.scaling, np.float32(GIVEN_SCALE))
    wanted = {"y": truth.data, "scale_inv": truth.scale_inv}
    wanted |= {name: plain[name] for name in ("sum", "mean", "rstd") if name in plain}
    if quantization.amax:
        wanted["amax"] = np.asarray(truth.amax, np.float32).reshape(1)
    label = f"{case}, {quantization.dtype} {quantization.scaling}"
    if exact:
        return [same_bytes(label, name, got[name], each) for name, each in wanted.items()]
    few = 2.0**-20
    y, format = plain["y"].astype(np.float64), FLOAT8S[quantization.dtype]
    values = {name: decode(got[name], case.sum if name == "sum" else "float64") for name in wanted}
    wanted = {
        name: decode(each, case.sum if name == "sum" else "float64")
        for name, each in wanted.items()
    }
    factors = (
        2.0 ** (values["scale_inv"] - 127) if quantization.scaling == "mx" else values["scale_inv"]
    )
    cols = {"block": 128, "mx": 32}.get(quantization.scaling, case.num_cols)
    spread = np.repeat(factors.reshape(-1, factors.shape[-1]), cols, axis=1)[:, : case.num_cols]
    values["y"], wanted["y"] = fp8.decode(got["y"], quantization.dtype) * spread, y
    allowed = {name: few * np.abs(each).max() for name, each in wanted.items()}
    allowed["y"] = (1 + few) * (np.abs(y) * format.half_ulp + spread * format.smallest / 2)
    if quantization.scaling == "mx":
        allowed["scale_inv"] = np.ones(1)  # the next power of two, where an amax is close to one
    allowed |= (
        {"sum": 2 * DTYPES[case.sum].half_ulp * np.abs(wanted["sum"])} if "sum" in wanted else {}
    )
    return [within(label, name, values[name], wanted[name], allowed[name]) for name in wanted]


def same_bytes(case: str, tensor: str, got: np.ndarray, wanted: np.ndarray) -> Finding:
    """Of elements of one dtype and shape."""
    off = np.argwhere(
        (got.view(np.uint8) != wanted.view(np.uint8)).reshape(*got.shape, -1).any(axis=-1)
    )
    where = tuple(off[0].tolist()) if len(off) else ()
    shown = (float(got[where]), float(wanted[where])) if len(off) else (0.0, 0.0)
    return Finding(case, tensor, float("inf") if len(off) else 0.0, where, *shown, 0.0, len(off))


def within(
    case: str, tensor: str, got: np.ndarray, wanted: np.ndarray, allowed: np.ndarray
) -> Finding:
    """Of values."""
    got, wanted, allowed = np.broadcast_arrays(got, wanted, allowed)
    with np.errstate(invalid="ignore"):
        errors = np.abs(got - wanted) / np.maximum(allowed, np.finfo(np.float64).tiny)
    at = np.unravel_index(np.argmax(np.where(np.isnan(errors), np.inf, errors)), errors.shape)
    numbers = (float(each[at]) for each in (errors, got, wanted, allowed))
    error, *shown = numbers
    return Finding(case, tensor, error, tuple(map(int, at)), *shown, int((~(errors <= 1)).sum()))


class Matrix(NamedTuple):
    """A matrix to quantize and transpose.

    x: its dtype, or that of y if it is only transposed. norm: the norm of x is quantized.
    scaling: given, or tensor for a scale from the amax of x.
    """

    num_rows: int
    num_cols: int
    x: str
    y: str
    norm: str | None = None
    scaling: str = "given"


def matrices() -> list[Matrix]:
    """Whole and partial squares of 128, columns written by 16 bytes and by 1, every pack size."""
    every = [
        *(Matrix(256, 128, dtype, E4M3) for dtype in DTYPES),
        *(Matrix(130, num_cols, "bfloat16", E5M2) for num_cols in (1, 257, 130, 132, 136)),
        *(Matrix(48, num_cols, "float32", E4M3) for num_cols in (33, 34, 140)),
        *(
            Matrix(150, num_cols, dtype, E4M3, None, "tensor")
            for num_cols, dtype in ((136, "bfloat16"), (35, "float64"))
        ),
        *(
            Matrix(num_rows, num_cols, E5M2, E5M2)
            for num_rows, num_cols in ((144, 272), (130, 129), (7, 40))
        ),
        *(Matrix(num_rows, num_cols, E4M3, E4M3) for num_rows, num_cols in ((16, 130), (33, 132))),
    ]
    for norm in ("layer_norm", "rms_norm"):
        every += [Matrix(144, 136, "bfloat16", E4M3, norm), Matrix(131, 257, "float32", E5M2, norm)]
        every.append(Matrix(20, 130, "float64", E4M3, norm))
    return every


def run_matrix(matrix: Matrix, where: CpuMachine | GpuCheckMachine) -> tuple[dict, dict]:
    """What the kernel makes, and what it is given: arrays by name."""
    num_rows, num_cols, x, y, norm, scaling = matrix
    generator = np.random.default_rng([num_rows, num_cols])
    is_scaled = x != y
    values = generator.standard_normal((num_rows, num_cols)) + 0.5
    given = {"x": encode(values, x) if is_scaled else fp8.encode(values, y)}
    if norm:
        weight, bias = generator.standard_normal((2, num_cols)) * 0.5 + 1
        taken, compute = decode(given["x"], x), compute_dtype(x).name
        mean = taken.mean(axis=1) if norm == "layer_norm" else np.zeros(num_rows)
        given |= {
            "weight": encode(weight, x),
            "rstd": (1 / np.sqrt(((taken - mean[:, None]) ** 2).mean(axis=1))).astype(compute),
        }
        given |= (
            {"bias": encode(bias, x), "mean": mean.astype(compute)} if norm == "layer_norm" else {}
        )
    if scaling == "tensor":
        given["amax"] = np.abs(decode(given["x"], x)).max().astype(np.float32).reshape(1)
    elif is_scaled:
        given["scale"] = np.full(1, 9.0, np.float32)
    kept = Kept(where)
    at = {name: kept.put(name, array) for name, array in given.items()}
    at["transposed"] = kept.poisoned("transposed", (num_cols, num_rows), "uint8")
    if is_scaled:
        at["data"] = kept.poisoned("data", (num_rows, num_cols), "uint8")
        at["scale_inv"] = kept.poisoned("scale_inv", (1,), "float32")
        if scaling == "given":
            at["amax"] = kept.put("amax", np.zeros(1, np.float32))
    tensors = {"x": Rows(at["x"], num_rows, num_cols, num_cols, x)}
    tensors |= {
        name: Rows(at[name], 1, num_cols, num_cols, x) for name in ("weight", "bias") if name in at
    }
    sums = None
    if is_scaled and not norm:
        sums, squares = compute_dtype(x).name, -(-num_rows // 128)
        at["sums"] = kept.poisoned("sums", (num_cols,), sums)
        at["partials"] = kept.poisoned("partials", (squares, num_cols), sums)
    centered = norm and norm == "layer_norm"
    rule = (0.0, False) if scaling == "tensor" else None
    call = quantize_call(tensors, QuantizeOptions(y, centered, sums=sums, rule=rule))
    for launch, each in zip(call.launches, call.fill(at), strict=True):
        where.launch(launch, each)
    return {name: kept.get(name) for name in kept.arrays if name not in (*given, "partials")}, given


def judge_matrix(matrix: Matrix, got: dict, given: dict) -> list[Finding]:
    """To the byte; of a norm, whose x_hat is rounded, within a step of 8 bits, and few of them."""
    label = " ".join(map(str, matrix))
    if matrix.x == matrix.y:
        return [
            same_bytes(label, "transposed", got["transposed"], np.ascontiguousarray(given["x"].T))
        ]
    findings = [
        same_bytes(label, "transposed", got["transposed"], np.ascontiguousarray(got["data"].T))
    ]
    values = decode(given["x"], matrix.x)
    if matrix.norm:
        values = (values - given.get("mean", np.zeros(1)).reshape(-1, 1)) * given["rstd"].reshape(
            -1, 1
        )
        values = values * decode(given["weight"], matrix.x)
        values = values + decode(given["bias"], matrix.x) if "bias" in given else values
    found = (
        given["scale"][0] if matrix.scaling == "given" else fp8.scale_of(fp8.amax(values), matrix.y)
    )
    truth = fp8.quantize(values, matrix.y, found)
    findings.append(
        same_bytes(label, "scale_inv", got["scale_inv"], np.float32(truth.scale_inv).reshape(1))
    )
    if not matrix.norm:
        if matrix.scaling == "given":
            findings.append(
                same_bytes(label, "amax", got["amax"], np.float32(truth.amax).reshape(1))
            )
        # Additions in sequence, each rounded: 128 in a square, and one for each square.
        additions = 128 + -(-matrix.num_rows // 128)
        rounding = additions * DTYPES[compute_dtype(matrix.x).name].half_ulp
        findings.append(
            within(
                label,
                "sums",
                got["sums"],
                values.sum(axis=0),
                rounding * np.abs(values).sum(axis=0),
            )
        )
        return [*findings, same_bytes(label, "data", got["data"], truth.data)]
    made, wanted = (fp8.decode(each, matrix.y) for each in (got["data"], truth.data))
    allowed = 2 * FLOAT8S[matrix.y].half_ulp * np.abs(wanted) + FLOAT8S[matrix.y].smallest
    few = within(
        label,
        "bytes of a norm's data that differ, as a share",
        np.mean(made != wanted),
        np.zeros(()),
        np.full((), 0.01),
    )
    return [*findings, within(label, "data of a norm", made, wanted, allowed), few]


class Surveyed(NamedTuple):
    """A matrix for survey.cu: sums over rows, or the largest magnitude if sums is None."""

    num_rows: int
    num_cols: int
    x: str
    sums: str | None


def surveys() -> list[Surveyed]:
    """Both kinds in every dtype, packs and single elements, several slabs and a part of one."""
    shapes = (
        (1, 1, "float32"),
        (3000, 8, "bfloat16"),
        (130, 257, "float16"),
        (300, 136, "float32"),
        (700, 66, "float64"),
    )
    return [Surveyed(*shape, sums) for shape in shapes for sums in (None, shape[2])]


def run_survey(survey: Surveyed, where: CpuMachine | GpuCheckMachine) -> tuple[dict, dict]:
    """What the kernels find, and what they are given: arrays by name."""
    num_rows, num_cols, x, sums = survey
    values = (
        np.random.default_rng([num_rows, num_cols]).standard_normal((num_rows, num_cols)) + 0.25
    )
    given = {"x": encode(values, x)}
    kept = Kept(where)
    at = kept.put("x", given["x"])
    call = survey_call(where.device, Rows(at, num_rows, num_cols, num_cols, x), sums)
    found = {}
    if sums:
        found["partials"] = kept.poisoned("partials", call.partials_shape, compute_dtype(x).name)
        found["sums"] = kept.poisoned("sums", (num_cols,), DTYPES[sums].storage)
    else:
        found["amax"] = kept.put("amax", np.zeros(1, np.float32))
    for launch, each in zip(call.launches, call.fill({"x": at, **found}), strict=True):
        where.launch(launch, each)
    return {name: kept.get(name) for name in found if name != "partials"}, given


def judge_survey(survey: Surveyed, got: dict, given: dict) -> list[Finding]:
    """The largest to the byte; of sums each addition rounds, and the result once."""
    label, values = " ".join(map(str, survey)), decode(given["x"], survey.x)
    if survey.sums is None:
        return [
            same_bytes(
                label, "amax", got["amax"], np.abs(values).max().astype(np.float32).reshape(1)
            )
        ]
    rounding = (
        survey.num_rows * DTYPES[compute_dtype(survey.x).name].half_ulp * np.abs(values).sum(axis=0)
    )
    rounding += DTYPES[survey.sums].half_ulp * np.abs(values.sum(axis=0))
    return [
        within(label, "sums", decode(got["sums"], survey.sums), values.sum(axis=0), 1.01 * rounding)
    ]


def run_scales(num_steps: int, where: CpuMachine | GpuCheckMachine) -> tuple[dict, dict]:
    """Results and inputs of a step of delayed scaling for five tensors; the third is unused."""
    history = np.abs(np.random.default_rng(num_steps).standard_normal((num_steps, 5))).astype(
        np.float32
    )
    history[0] = (2.0, np.nan, 0.0, 1e-42, np.inf)
    largest = np.array([448, 57344, 448, 448, 57344], np.float32)
    given = {"scale": np.arange(1, 6, dtype=np.float32), "history": history, "largest": largest}
    kept = Kept(where)
    pointers = [kept.put(name, array.copy()) for name, array in given.items()]
    where.launch(update_scales_launch(5), (*pointers, 0.5, 0, num_steps, 5))
    return {name: kept.get(name) for name in ("scale", "history")}, given


def judge_scales(got: dict, given: dict) -> list[Finding]:
    """To the byte."""
    history, scale = given["history"], given["scale"].copy()
    amax = np.nan_to_num(history, nan=0.0, posinf=np.inf).max(axis=0)
    older = np.concatenate([np.zeros_like(history[:1]), history[2:], history[:1]])[: len(history)]
    used = history[0] != 0
    for at in np.flatnonzero(used & np.isfinite(amax) & (amax > 0)):
        with np.errstate(over="ignore"):
            scale[at] = min(
                given["largest"][at] * np.float32(0.5) / amax[at], np.finfo(np.float32).max
            )
    wanted = {
        "scale": scale,
        "history": np.where(used, older, history)
        if len(history) > 1
        else np.where(used, 0, history),
    }
    label = f"delayed scales of {len(history)} steps"
    return [
        same_bytes(label, name, got[name], each.astype(np.float32)) for name, each in wanted.items()
    ]


STEPS = (1, 2, 300)


class WholeUnits(GpuCheckMachine):
    """Arrays in units of 16 bytes that are zero, for initcheck.

    The copy engine reads whole units, also those that an array shares with others.
    """

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
        storage = DTYPES[dtype].storage
        num_bytes = int(np.prod(shape)) * storage.itemsize
        units = nvrtc.cupy().zeros(-(-num_bytes // 16) * 16, np.uint8)
        array = units[:num_bytes].view(storage).reshape(shape)
        array.view(np.uint8).fill(0xFF)
        return array, array.data.ptr

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        units = nvrtc.cupy().zeros(-(-array.nbytes // 16) * 16, np.uint8)
        there = units[: array.nbytes].view(array.dtype).reshape(array.shape)
        there[...] = nvrtc.cupy().asarray(array)
        return there, there.data.ptr


def main() -> int:
    where = WholeUnits()
    result = CheckResult()
    for case in cases():
        problem = random_problem(case)
        welford = case.statistics == "welford" or case.strategy == "uncached"
        result.findings += judge_all(problem, run_kernels(problem, where), rounded_mean=welford)
    for case, quantization in quantized_cases():
        result.findings += judge_quantized(
            case, quantization, *run_quantized(case, quantization, where), exact=False
        )
    for matrix in matrices():
        result.findings += judge_matrix(matrix, *run_matrix(matrix, where))
    for survey in surveys():
        result.findings += judge_survey(survey, *run_survey(survey, where))
    for num_steps in STEPS:
        result.findings += judge_scales(*run_scales(num_steps, where))
    print(result.summary())
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
