"""A kernel may read several rows as one piece of memory only if the rows of all of its tensors follow one another."""

from __future__ import annotations

import pytest

from cupynorm.arrays import Rows
from cupynorm.calls import DEFAULTS, BackwardCall, ForwardCall
from cupynorm.devices import DEVICES

NUM_ROWS = 70
WIDTHS = (3, 8, 65, 641)


def rows(num_cols: int, row_stride: int | None = None) -> Rows:
    return Rows(1 << 20, NUM_ROWS, num_cols, num_cols if row_stride is None else row_stride, "float16")


def strides_of(num_cols: int) -> dict[str, int]:
    return {"gap": num_cols + 64, "broadcast": 0}


def forward(num_cols: int, **operands: Rows) -> ForwardCall:
    given = {"residual": rows(num_cols), "sum": rows(num_cols)} | operands
    parameter = (1 << 20, "float16")
    return ForwardCall(
        DEVICES["H200"], True, rows(num_cols), rows(num_cols), parameter, parameter, 1e-5, False, given["residual"],
        given["sum"], DEFAULTS,
    )  # fmt: skip


def backward(num_cols: int, **operands: Rows) -> BackwardCall:
    parameter = (1 << 20, "float16")
    return BackwardCall(
        DEVICES["H200"], True, rows(num_cols), rows(num_cols), parameter, False, rows(num_cols), parameter, parameter,
        operands.get("dsum", rows(num_cols)), DEFAULTS,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["gap", "broadcast"])
@pytest.mark.parametrize("num_cols", WIDTHS)
@pytest.mark.parametrize("make, operand", [(forward, "residual"), (forward, "sum"), (backward, "dsum")])
def test_every_streamed_tensor_says_whether_its_rows_follow_one_another(make, operand, num_cols, layout) -> None:
    assert not make(num_cols).plan.problem.pitched
    assert make(num_cols, **{operand: rows(num_cols, strides_of(num_cols)[layout])}).plan.problem.pitched
