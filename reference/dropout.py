"""The mask of dropout.

The random words are those of Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011). Its key is the seed.
Word col % 4 of the counter (col / 4, row) decides element (row, col). The kernels make the same
mask and do not store it.
"""

from __future__ import annotations

import numpy as np

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(key: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The four 32-bit words [..., 4] of each counter (low, high).

    key: any int, of which 64 bits count. low, high: uint64.
    """
    counter = [
        np.uint64(0) + half
        for part in np.broadcast_arrays(low, high)
        for half in (part & _LOW, part >> _HALF)
    ]
    keys = [np.uint64(key % 2**64) & _LOW, np.uint64(key % 2**64) >> _HALF]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            second >> _HALF ^ counter[1] ^ keys[0],
            second & _LOW,
            first >> _HALF ^ counter[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [keys[0] + np.uint64(0x9E3779B9) & _LOW, keys[1] + np.uint64(0xBB67AE85) & _LOW]
    return np.stack(counter, axis=-1)


def dropout_mask(num_rows: int, num_cols: int, dropout_p: float, dropout_seed: int) -> np.ndarray:
    """bool [num_rows, num_cols]: True for the elements that are kept.

    An element is False with probability dropout_p, to within 2^-33.
    """
    rows = np.arange(num_rows, dtype=np.uint64)[:, None]
    counters = np.arange(-(-num_cols // 4), dtype=np.uint64)
    words = philox(dropout_seed, counters, rows).reshape(num_rows, 4 * len(counters))[:, :num_cols]
    return words >= np.uint64(round(dropout_p * 2**32))
