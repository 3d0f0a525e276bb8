"""500 drawn calls of the kernels, run on the CPU: the bits of what they write may not change.

After an intended change write tests/data/frozen_bits.csv again, which takes some minutes:
PYTHONPATH=.:tests/kernels python tests/kernels/frozen_calls.py

A call is operands by name and options by name. `results_of` alone knows how cupynorm is called.
Values come from the raw words of a counter-based generator, which no version of NumPy changes.
"""

from __future__ import annotations

import csv
import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from quantized_calls import How, run_8_bits

from cupynorm import functors
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.norm.arguments import PlacedArray, PlacedFunctor, PlacedFunctors
from cupynorm.norm.request import Launch, of_backward
from cupynorm.verify.cases import Case, Problem
from cupynorm.verify.kernels import CpuMachine, Tensors, launch_kernels, run_backward, run_forward

FILE = Path(__file__).parents[1] / "data" / "frozen_bits.csv"
NUM_FAMILIES, CALLS_OF_A_FAMILY = 100, 5  # calls of a family share most of their kernels
WIDTHS = (1, 7, 33, 64, 127, 250, 392, 511, 768, 1000, 1024, 1025, 2048, 3000, 4097, 5120, 8192)
WIDE = (12296, 20000, 40008, 65536)
STRATEGIES = {"warp": 256, "block": 4096, "cluster": 65536, "uncached": 65536}


def families() -> Iterator[dict[str, Any]]:
    """What calls have in common, by name. What is not named is absent, or the default."""
    generator = random.Random(2026)
    for number in range(NUM_FAMILIES):
        x = generator.choice(["bfloat16", "bfloat16", "float16", "float32", "float32", "float64"])
        num_cols = generator.choice(WIDE if number % 8 == 7 else WIDTHS)
        family = {"norm": generator.choice(["layer_norm", "rms_norm"]), "x": x}
        family |= {"num_cols": num_cols, "device": generator.choice(["H200", "H200", "A100"])}
        parameter = generator.choice([x, x, x, "float32", None])
        family |= {"weight": parameter, "bias": generator.choice([parameter, None])}
        kind = generator.choice(["plain", "plain", "residual", "residual", "scaled", "8 bits"])
        if kind != "8 bits" and x != "float64" and generator.random() < 0.25:
            family["y"] = generator.choice(["bfloat16", "float16", "float32"])
        if kind == "residual":
            family |= {"residual": generator.choice([x, x, "float32"]) if x != "float64" else x}
            family |= {"dsum": generator.random() < 0.5}
        if kind == "scaled":
            family |= {"residual": generator.choice([None, x]), "dropout_p": 0.25}
            family |= {"row_scale": generator.choice([None, x])}
        if kind == "8 bits":
            family["y"] = generator.choice(["float8_e4m3fn", "float8_e5m2"])
            family["scaling"] = generator.choice(["given", "tensor", "row", "block"])
            family["amax"] = family["scaling"] == "given" and generator.random() < 0.5
            family["power_of_two"] = family["scaling"] != "given" and generator.random() < 0.3
            family["residual"] = generator.choice([None, x])
        elif generator.random() < 0.2:
            family["round_x_hat"] = True
        family["zero_centered_weight"] = generator.random() < 0.2
        wide_enough = [name for name, most in STRATEGIES.items() if num_cols <= most]
        if family["device"] == "A100":
            wide_enough = [name for name in wide_enough if name != "cluster"]
        if generator.random() < 0.3 and num_cols >= 64:
            family["strategy"] = generator.choice(wide_enough)
            family["statistics"] = generator.choice([None, "welford"])
        yield {name: value for name, value in family.items() if value not in (None, False)}


def calls() -> list[dict[str, Any]]:
    made = []
    for number, family in enumerate(families()):
        generator = random.Random(number)
        for _ in range(CALLS_OF_A_FAMILY):
            most = max(1, min(37, 40_000 // family["num_cols"]))
            call = {**family, "num_rows": generator.randint(1, most)}
            call["seed"] = generator.getrandbits(32)
            if generator.random() < 0.2:
                call["sm_margin"] = generator.randrange(1, 100)
            made.append(call)
    return made


def values(call: dict[str, Any], name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Of an operand, exact in its dtype: between -2 and 2 around a mean of each row."""
    words = np.random.Philox(key=[call["seed"], crc32(name.encode())])
    raw = words.random_raw(int(np.prod(shape)) + shape[0])
    uniform = (raw >> np.uint64(40)).astype(np.float64) / 2**22 - 2
    drawn, means = uniform[shape[0] :].reshape(shape), uniform[: shape[0]]
    if name in ("x", "residual"):
        drawn = drawn + means[:, None]
    if name == "row_scale" or (name == "weight" and not call.get("zero_centered_weight")):
        drawn = drawn + 1
    return decode(encode(drawn, dtype), dtype)


def operands(call: dict[str, Any]) -> dict[str, np.ndarray]:
    """By name; those that the call has."""
    rows, cols = call["num_rows"], call["num_cols"]
    shapes = {"x": (rows, cols), "weight": (cols,), "bias": (cols,), "residual": (rows, cols)}
    dtypes = {name: call[name] for name in shapes if name in call}
    dtypes["dy"], shapes["dy"] = dy_dtype(call), (rows, cols)
    if "row_scale" in call:
        dtypes["row_scale"], shapes["row_scale"] = call["row_scale"], (rows,)
    if "dsum" in call:
        dtypes["dsum"], shapes["dsum"] = call["residual"], (rows, cols)
    return {name: values(call, name, shapes[name], dtype) for name, dtype in dtypes.items()}


def dy_dtype(call: dict[str, Any]) -> str:
    y = call.get("y", call["x"])
    return y if y in DTYPES else call["x"]


def results_of(call: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the kernels write, by name, in storage dtypes."""
    given = operands(call)
    is_8_bit = "scaling" in call
    case = Case(
        call["norm"],
        call["num_rows"],
        call["num_cols"],
        call["x"],
        y=None if is_8_bit else call.get("y"),
        weight=call.get("weight"),
        bias=call.get("bias"),
        strategy=call.get("strategy"),
        statistics=call.get("statistics"),
        zero_centered_weight=call.get("zero_centered_weight", False),
        residual=call.get("residual", False),
        sm_margin=call.get("sm_margin", 0),
        dsum=call.get("dsum", False),
        round_x_hat=call.get("round_x_hat", False),
    )
    problem = Problem(
        case,
        given["x"],
        given["dy"],
        given.get("weight"),
        given.get("bias"),
        given.get("residual"),
        given.get("dsum"),
    )
    where = CpuMachine(DEVICES[call["device"]])
    if is_8_bit:
        how = How(call["y"], call["scaling"], call.get("amax", False), "power_of_two" in call)
        return run_8_bits(problem, how, where)[0]
    if "dropout_p" in call:
        return scaled_results(problem, call, given.get("row_scale"), where)
    return launch_kernels(problem, where).raw()


def scaled_results(problem: Problem, call: dict, scale: np.ndarray | None, where: CpuMachine):
    """What the kernels write of a call with the functors row_scale and dropout."""
    case, tensors, placed = problem.case, Tensors(where), []
    if scale is not None:
        tensors.put("row_scale.scale", scale[:, None], call["row_scale"])
        rows = tensors.rows["row_scale.scale"]._replace(num_cols=case.num_cols, row_stride=1)
        array = PlacedArray(rows, 1, 2**62, per_row=True)
        placed.append(PlacedFunctor(functors.row_scale, (), (array,), "row_scale"))
    drop = functors.dropout(call["dropout_p"], call["seed"])
    tensors.put("dropout.seed", np.array(drop.seeds), "int64")
    placed.append(PlacedFunctor(drop.functor, drop.numbers, (), "dropout"))
    launch = Launch(case.strategy, None, case.statistics, case.sm_margin)
    run_forward(problem, tensors, launch, functors=PlacedFunctors(tuple(placed)))
    run_backward(problem, tensors, of_backward(launch), PlacedFunctors(tuple(placed)))
    return tensors.raw()


def digest(results: dict[str, np.ndarray]) -> str:
    """Of all results, by name. A NaN has one bit pattern."""
    found = hashlib.sha256()
    for name in sorted(results):
        found.update(f"{name} {results[name].dtype} {results[name].shape} ".encode())
        found.update(np.ascontiguousarray(results[name]).tobytes())
    return found.hexdigest()[:24]


def line(call: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in call.items())


def digests_of_family(number: int) -> list[tuple[str, str]]:
    first = number * CALLS_OF_A_FAMILY
    family = calls()[first : first + CALLS_OF_A_FAMILY]
    return [(line(call), digest(results_of(call))) for call in family]


def main() -> None:
    with ProcessPoolExecutor() as pool:
        rows = [row for each in pool.map(digests_of_family, range(NUM_FAMILIES)) for row in each]
    with FILE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("call", "digest"), *rows])


if __name__ == "__main__":
    main()
