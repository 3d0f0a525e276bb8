"""Arrays of NumPy, CuPy or torch for functions that are checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import decode, encode
from ..gpu import arrays, environment, nvrtc
from .run import place

LIBRARIES = ("numpy", "cupy", "torch")


class Library:
    """NumPy, CuPy or torch: puts float64 values into arrays, and gets them back.

    name: "numpy", "cupy", "torch", or None for torch if it is installed, else NumPy. Tensors are
    on a GPU if torch finds one. Raises ValueError for another name and for CuPy without a GPU,
    MissingLibraryError for a library that is not installed.
    """

    def __init__(self, name: str | None = None) -> None:
        if name not in (None, *LIBRARIES):
            raise ValueError(
                f"library is {name!r}; expected {', '.join(map(repr, LIBRARIES))}, or None for "
                "torch if it is installed, else NumPy"
            )
        self._torch = None
        if name in (None, "torch"):
            try:
                import torch
            except ImportError as error:
                if name == "torch":
                    raise nvrtc.MissingLibraryError(
                        f"library is 'torch', which could not be imported ({error}): "
                        "pip install torch"
                    ) from error
            else:
                self._torch = torch
        self.name = name or ("torch" if self._torch else "numpy")
        if self.name == "cupy":
            nvrtc.cupy()  # without CuPy, the error says what to install
            if not environment.has_gpu():
                raise ValueError("library is 'cupy', but CuPy finds no GPU; use 'numpy' or 'torch'")

    def put(self, values: np.ndarray | None, dtype: str | None, layout: str = "contiguous") -> Any:
        """An array of this library, None for None. layout: one of run.LAYOUTS.

        torch has no negative strides, so there "reversed" is refused.
        """
        if values is None or dtype is None:
            return None
        if layout == "contiguous":
            return self._copy(values, dtype)
        placed = place(encode(values, dtype), layout)
        memory = self._copy(decode(placed.memory, dtype), dtype)
        if self.name == "torch":
            return memory.as_strided(placed.shape, placed.strides, placed.first)
        strides = tuple(stride * memory.itemsize for stride in placed.strides)
        tricks = (nvrtc.cupy() if self.name == "cupy" else np).lib.stride_tricks
        return tricks.as_strided(memory[placed.first :], placed.shape, strides)

    def _copy(self, values: np.ndarray, dtype: str) -> Any:
        if self._torch is not None:
            copy = arrays.from_float64(values, dtype, self._torch.empty(0))
            return copy.to("cuda" if self._torch.cuda.is_available() else "cpu")
        copy = arrays.from_float64(values, dtype, np.empty(0))
        return nvrtc.cupy().asarray(copy) if self.name == "cupy" else copy

    def get(self, array: Any, label: str) -> np.ndarray:
        """The float64 values of a result, of any of the libraries. TypeError: it is no array."""
        array = np.asarray(array) if isinstance(array, (int, float, np.generic)) else array
        array = arrays.take(array, label)
        return arrays.to_float64(array)
