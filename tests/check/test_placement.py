"""Tensors in layouts of their own, between guard bytes, for kernels that write them."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.check.run import GUARD_BYTES, LAYOUTS, WrongWrite, empty, place


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_placed_tensor_has_its_values(layout, dtype):
    values = np.arange(1, 13, dtype=dtype).reshape(3, 4)
    placed = place(values, layout)
    expected = np.broadcast_to(values[:1], values.shape) if layout == "broadcast" else values
    np.testing.assert_array_equal(placed.view(), expected)
    if layout != "broadcast":
        np.testing.assert_array_equal(placed.taken_from(placed.memory.copy()), expected)
    is_aligned = placed.offset % GUARD_BYTES == 0
    assert is_aligned == (layout not in ("misaligned", "reversed"))


@pytest.mark.parametrize("layout", ["contiguous", "gap", "misaligned", "reversed", "transposed"])
def test_a_write_anywhere_else_is_found(layout):
    """One byte at a time, in front of the tensor, between its rows and behind it."""
    placed = empty((3, 4), np.dtype("float16"), layout)
    inside = placed._replace(memory=np.zeros_like(placed.memory))
    inside.view()[...] = 1
    num_outside = 0
    for at in np.flatnonzero(inside.memory == 0):
        memory = placed.memory.copy()
        memory.view(np.uint8)[2 * at] = 0
        with pytest.raises(WrongWrite, match="1 bytes outside it"):
            placed.taken_from(memory)
        num_outside += 1
    assert num_outside == placed.memory.size - 12 > 2 * GUARD_BYTES // 2
