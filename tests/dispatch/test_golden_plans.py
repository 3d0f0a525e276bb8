"""dispatch makes the plans of tests/data/golden_plans.csv, so a change of the model shows here.

After an intended change write the file: PYTHONPATH=. python tests/dispatch/test_golden_plans.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cupynorm.plans import plan

FILE = Path(__file__).parents[1] / "data" / "golden_plans.csv"
GPUS = ("A100", "RTX 4090", "H200", "B200")
# Widths that begin on 16 bytes, on 8, and on single elements, narrow to wide.
WIDTHS = (1, 7, 33, 64, 127, 300, 392, 512, 768, 1000, 1024, 1025, 2048, 3072, 4097, 5120, 8192)
WIDTHS += (9000, 12288, 16384, 20484, 32768, 65536, 131072, 262144)
FEW_WIDTHS = (64, 127, 768, 1024, 4096, 5000, 8192, 12288, 16384, 32768, 65536)
COLUMNS = ("device", "direction", "norm", "dtype", "options", "num_cols", "strategy", "tile")


def problems():
    """device, direction, norm, dtype, options of plan(), widths."""
    for device in GPUS:
        for direction in ("forward", "backward"):
            for dtype in ("bfloat16", "float16", "float32"):
                yield device, direction, "layer_norm", dtype, {}, WIDTHS
                yield device, direction, "rms_norm", dtype, {"bias_dtype": None}, FEW_WIDTHS
                yield device, direction, "layer_norm", dtype, {"residual": True}, FEW_WIDTHS
                yield device, direction, "layer_norm", dtype, {"alignment": 8}, FEW_WIDTHS
            yield (
                device,
                direction,
                "layer_norm",
                "bfloat16",
                {"weight_dtype": "float32", "bias_dtype": "float32"},
                FEW_WIDTHS,
            )
            yield (
                device,
                direction,
                "layer_norm",
                "bfloat16",
                {"weight_dtype": None, "bias_dtype": None},
                FEW_WIDTHS,
            )
            yield device, direction, "layer_norm", "float64", {}, FEW_WIDTHS
        for scale in ("given", "tensor", "row", "block"):
            for norm in ("layer_norm", "rms_norm"):
                options = {"out_dtype": "float8_e4m3fn", "scale": scale}
                yield device, "forward", norm, "bfloat16", options, FEW_WIDTHS


def rows():
    for device, direction, norm, dtype, options, widths in problems():
        words = " ".join(f"{name}={value}" for name, value in options.items())
        for num_cols in widths:
            made = plan(
                num_cols, 1 << 20, dtype, norm=norm, direction=direction, device=device, **options
            )
            yield (
                device,
                direction,
                norm,
                dtype,
                words,
                str(num_cols),
                made.strategy,
                str(made.tile),
            )


@pytest.mark.slow
@pytest.mark.parametrize("device", GPUS)
def test_plans_are_the_golden_ones(device):
    with FILE.open(encoding="utf-8", newline="") as file:
        golden = [tuple(row) for row in csv.reader(file)][1:]
    expected = [row for row in golden if row[0] == device]
    found = [row for row in rows() if row[0] == device]
    changed = [
        f"{' '.join(old)}\n  now {' '.join(new[6:])}"
        for old, new in zip(expected, found)
        if old != new
    ]
    assert len(expected) == len(found) > 500
    assert not changed, f"{len(changed)} plans changed:\n" + "\n".join(changed[:20])


if __name__ == "__main__":
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows())
