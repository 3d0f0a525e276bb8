"""Norms with y in 8-bit floats, for every_kernel.py: problems, how they run, and their findings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cupynorm.reference import fp8

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine
from cupynorm.check.results import Finding
from cupynorm.dtypes import DTYPES, FLOAT8S, compute_dtype, decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import forward_call
from cupynorm.norm.quantized_tensor import scale_shape
from cupynorm.norm.request import ForwardOptions, Options, Quantization
from cupynorm.plan.dispatch import Plan
from cupynorm.plan.problem import SCALINGS, Tile
from cupynorm.plan.strategies import STRATEGIES

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
