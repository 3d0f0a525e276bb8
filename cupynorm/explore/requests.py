"""Accesses as requests: what a warp asks of memory at once, and what serving it takes.

The accesses of a warp's lanes to the same place of the code, the same time round, are one request,
as on a GPU. Global memory is moved in sectors of 32 bytes; shared memory has 32 banks of 4 bytes.
"""

from __future__ import annotations

import subprocess
from typing import NamedTuple

import numpy as np

from ..gpu.on_cpu import CpuKernel
from .recording import BULK

SECTOR_BYTES = 32
NUM_BANKS = 32


class Site(NamedTuple):
    """A place in the sources. lines: file:line of the access, and of the calls that led to it."""

    lines: tuple[str, ...]

    @property
    def of_kernel(self) -> str:
        """The line of the kernel itself, or else the outermost one."""
        in_kernel = [line for line in self.lines if ".cu:" in line]
        return in_kernel[-1] if in_kernel else (self.lines or ("?",))[-1]

    def __str__(self) -> str:
        return " < ".join(self.lines) or "?"


def requests_of(accesses: np.ndarray) -> np.ndarray:
    """The number of each access's request. A bulk copy is a request of its own."""
    fields = ("block", "thread", "site", "space")
    order = np.lexsort([accesses[name] for name in fields])
    ordered = accesses[order]
    changes = np.zeros(len(accesses), bool)
    for name in fields:
        changes[1:] |= ordered[name][1:] != ordered[name][:-1]
    places = np.arange(len(accesses))
    first = np.maximum.accumulate(np.where(changes, places, 0))
    ordinal = np.empty(len(accesses), np.int64)
    ordinal[order] = places - first
    thread = accesses["thread"].astype(np.int64)
    lane = np.where(np.isin(accesses["kind"], BULK), thread, thread // 32)
    keys = [accesses["block"], lane, accesses["site"], accesses["space"], ordinal]
    keys = np.stack([np.asarray(key).astype(np.uint64) for key in keys], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def sectors_of(accesses: np.ndarray, request: np.ndarray) -> tuple[int, int]:
    """Sectors that the requests move, and the fewest for so many different bytes."""
    moved = least = 0
    for own in _by_request(accesses, request):
        moved += len(_units(own, SECTOR_BYTES))
        least += -(-len(_units(own, 1)) // SECTOR_BYTES)
    return moved, least


def turns_of(accesses: np.ndarray, request: np.ndarray) -> tuple[int, int]:
    """Turns in which the banks serve the requests, and the fewest for so many different words.

    Lanes that read one word share it. A request of more than 128 bytes takes several turns.
    """
    moved = least = 0
    for own in _by_request(accesses, request):
        words = _units(own, 4)
        if np.isin(own["kind"][0], BULK):
            moved += -(-len(words) // NUM_BANKS)
        else:
            moved += int(np.bincount((words % NUM_BANKS).astype(np.int64)).max())
        least += -(-len(words) // NUM_BANKS)
    return moved, least


def _by_request(accesses: np.ndarray, request: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(request, kind="stable")
    cuts = np.flatnonzero(np.diff(request[order])) + 1
    return np.split(accesses[order], cuts)


def _units(accesses: np.ndarray, size: int) -> np.ndarray:
    """The different units of so many bytes that the accesses touch."""
    first = accesses["address"] // np.uint64(size)
    last = (accesses["address"] + accesses["num_bytes"] - np.uint64(1)) // np.uint64(size)
    most = int((last - first).max()) + 1
    units = first[:, None] + np.arange(most, dtype=np.uint64)
    return np.unique(units[units <= last[:, None]])


def sites_of(kernel: CpuKernel, addresses: np.ndarray) -> list[Site]:
    """The lines of addresses in the kernel's code, as binutils' addr2line reports them."""
    base = kernel.first_address()
    # An address is where the call returns to: the byte before belongs to the call.
    offsets = [hex(int(address) - base - 1) for address in addresses]
    try:
        command = ["addr2line", "-e", str(kernel.path), "-i", "-a"]
        ran = subprocess.run(command, input="\n".join(offsets), capture_output=True, text=True)
    except FileNotFoundError:
        return [Site(()) for _ in addresses]
    sites: list[list[str]] = []
    for line in ran.stdout.splitlines():
        if line.startswith("0x"):
            sites.append([])
        elif not line.startswith("?"):
            path, _, number = line.partition(" ")[0].rpartition(":")
            sites[-1].append(f"{path.rpartition('/')[2]}:{number}")
    return [Site(tuple(lines)) for lines in sites]
