"""Arrays as pointers, strides and rows, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from cupynorm.gpu import arrays
from cupynorm.gpu.arrays import Rows, View

CUBE = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)


def values_of(rows: Rows, array: np.ndarray) -> np.ndarray:
    """The float32 values that a kernel would read."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    memory = owner.reshape(-1)
    first = (rows.pointer - memory.ctypes.data) // memory.itemsize
    at = first + np.arange(rows.num_rows)[:, None] * rows.row_stride + np.arange(rows.num_cols)
    return memory[at]


# name: (array, num_dims, row_stride)
READ_IN_PLACE = {
    "contiguous": (CUBE, 1, 4),
    "two normalised dimensions": (CUBE, 2, 12),
    "all dimensions": (CUBE, 3, 0),
    "a slice of columns": (CUBE[:, :, 1:3], 1, 4),
    "every other row": (CUBE.reshape(6, 4)[::2], 1, 8),
    "rows in reverse": (CUBE.reshape(6, 4)[::-1], 1, -4),
    "rows in reverse, by two dimensions": (CUBE[::-1, ::-1], 1, -4),
    "one row repeated": (np.broadcast_to(CUBE[0, 0], (5, 4)), 1, 0),
    "one column of many": (CUBE[:, :, 2:3], 1, 4),
    "an extent of 1 in front": (CUBE[:1], 1, 4),
    "an extent of 1 between": (CUBE[:, :1], 1, 12),
    "one row": (CUBE[:1, :1], 1, 0),
}


@pytest.mark.parametrize("name", READ_IN_PLACE)
def test_rows_that_are_read_in_place(name):
    array, num_dims, row_stride = READ_IN_PLACE[name]
    rows = arrays.rows(arrays.view(array), num_dims)
    assert rows is not None and rows.row_stride == row_stride and rows.dtype == "float32"
    num_cols = int(np.prod(array.shape[array.ndim - num_dims :]))
    assert (rows.num_rows, rows.num_cols) == (array.size // num_cols, num_cols)
    np.testing.assert_array_equal(values_of(rows, array), array.reshape(-1, num_cols))


NEED_A_COPY = {
    "transposed": (CUBE.T, 1),
    "columns in reverse": (CUBE[:, :, ::-1], 1),
    "every other column": (CUBE[:, :, ::2], 1),
    "one column repeated": (np.broadcast_to(CUBE[:, :, :1], (2, 3, 4)), 1),
    "two dimensions with a gap": (CUBE[:, :, :2], 2),
    "rows at two distances": (CUBE[:, :2], 1),
    "batch and sequence swapped": (CUBE.transpose(1, 0, 2), 1),
}


@pytest.mark.parametrize("name", NEED_A_COPY)
def test_rows_that_need_a_copy(name):
    array, num_dims = NEED_A_COPY[name]
    assert arrays.rows(arrays.view(array), num_dims) is None
    copied = np.ascontiguousarray(array)
    rows = arrays.rows(arrays.view(copied), num_dims)
    np.testing.assert_array_equal(values_of(rows, copied).reshape(array.shape), array)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 4)])
def test_rows_of_nothing(shape):
    rows = arrays.rows(arrays.view(np.empty(shape, np.float16)), 1)
    num_rows = int(np.prod(shape[:-1]))
    assert rows[1:] == (num_rows, shape[-1], shape[-1], "float16")


def test_strides_of_extents_of_1_do_not_matter():
    odd = View(256, (1, 5, 1, 8), (777, 8, 999, 1), "float32", 0)
    assert arrays.rows(odd, 1) == Rows(256, 5, 8, 8, "float32")
    assert arrays.rows(odd, 2) == Rows(256, 5, 8, 8, "float32")


@pytest.mark.parametrize("array", [CUBE, CUBE.T, CUBE[::-1], CUBE[:, ::-1, ::-2], CUBE[1:, 2:]])
def test_extent_is_the_memory_that_an_array_touches(array):
    assert arrays.extent(arrays.view(array)) == np.lib.array_utils.byte_bounds(array)


def test_view_of_a_tensor_on_the_host():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(6, 4, dtype=torch.bfloat16)[1::2]
    assert arrays.dtype_name(tensor) == "bfloat16" and arrays.on_host(tensor)
    assert arrays.address(tensor) == tensor.untyped_storage().data_ptr() + 4 * 2
    made = arrays.view(tensor)
    assert made[:4] == (arrays.address(tensor), (3, 4), (8, 1), "bfloat16")


@pytest.mark.parametrize("given", [[1.0], 3, "x", None])
def test_objects_that_are_no_arrays_are_refused(given):
    with pytest.raises(TypeError, match="operand is .*; expected a CuPy, torch or NumPy array"):
        arrays.take(given, "operand")


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_view_that_negates_has_its_sign(dtype):
    """imag of a conjugated complex tensor has the memory of another one, and a mark."""
    torch = pytest.importorskip("torch")
    plain = torch.randn(4, 8, dtype=getattr(torch, dtype))
    negated = plain.conj().imag
    assert negated.is_neg()
    np.testing.assert_array_equal(arrays.to_float64(negated), -arrays.to_float64(plain.imag))
