"""Pictures of a trace: who owns which element, how requests are served, who waits for whom."""

from __future__ import annotations

import math

import numpy as np

from ..svg import COLORS, Picture, shade
from .recording import KINDS, Recording
from .requests import SECTOR_BYTES, requests_of

_WIDTH = 760
_LEFT = 90
_MOST_PACKS = 1200  # in a picture
_ROW_HEIGHT = 16
_WAITS = {
    "block": "__syncthreads",
    "cluster": "the cluster",
    "mbarrier": "mbarrier",
}


def owners(trace: Recording, tensor: str = "x", launch: int = 0) -> Picture:
    """Which warp and lane touches which columns of a tensor's first rows.

    A colour is a warp, counted over all blocks; the first lane is the darkest. Grey is copied
    between global and shared memory as a whole.
    """
    _, address, array = trace.tensors[tensor]
    num_rows, num_cols = array.shape if array.ndim == 2 else (1, array.size)
    accesses = trace.accesses(launch)
    own = accesses[accesses["tensor"] == list(trace.tensors).index(tensor)]
    first = (own["address"] - np.uint64(address)).astype(np.int64) // array.itemsize
    _, kept = np.unique(first, return_index=True)  # the first access to each pack
    own, first = own[kept], first[kept]
    last = first + np.maximum(1, own["num_bytes"].astype(np.int64) // array.itemsize) - 1
    shown_rows = max(1, min(num_rows, 8, _MOST_PACKS // max(1, int((first < num_cols).sum()))))
    picture = Picture(_WIDTH, f"who owns which columns of {tensor}")
    picture.text(0, 12, f"{tensor}: columns 0 to {num_cols - 1}, by warp (colour) and lane (shade)")
    scale = (_WIDTH - _LEFT) / num_cols
    warps_per_block = -(-trace.launches[launch].block_size // 32)
    for row in range(shown_rows):
        top, start = 22 + row * (_ROW_HEIGHT + 4), row * num_cols
        picture.text(0, top + 12, f"row {row}")
        in_row = (last >= start) & (first < start + num_cols)
        for at in np.flatnonzero(in_row)[:_MOST_PACKS]:
            col = max(0, int(first[at]) - start)
            end = min(num_cols, int(last[at]) - start + 1)
            block, thread = int(own["block"][at]), int(own["thread"][at])
            warp, lane = thread // 32, thread % 32
            color = shade(COLORS[(block * warps_per_block + warp) % 6], lane / 31 * 0.75)
            who = f"block {block}, warp {warp}, lane {lane}"
            if KINDS[own["kind"][at]].startswith("bulk"):
                color, who = COLORS[7], f"one copy to or from shared memory, started by {who}"
            width = (end - col) * scale
            size = (max(0.4, width - (0.4 if width > 2 else 0)), _ROW_HEIGHT)
            hint = f"columns {col} to {end - 1}: {who}"
            picture.rectangle(_LEFT + col * scale, top, size, color, hint)
    if shown_rows < num_rows:
        picture.text(0, 22 + shown_rows * (_ROW_HEIGHT + 4) + 10, f"... of {num_rows} rows")
    return picture


def lanes(trace: Recording, tensor: str = "x", launch: int = 0) -> Picture:
    """The first request of warp 0 to a tensor: the lanes above, the sectors that serve them below.

    A warp that asks for 512 neighbouring bytes gets them in 16 sectors. Lanes that ask for bytes
    far apart each need a sector of their own.
    """
    accesses = trace.accesses(launch)
    own = accesses[accesses["tensor"] == list(trace.tensors).index(tensor)]
    request = requests_of(own)
    one = own[request == request[0]]
    one = one[np.argsort(one["thread"], kind="stable")]
    sectors = (one["address"] // np.uint64(SECTOR_BYTES)).astype(np.int64)
    last = (one["address"] + one["num_bytes"] - np.uint64(1)) // np.uint64(SECTOR_BYTES)
    first_sector, last_sector = int(sectors.min()), int(last.max())
    touched = {sector for a, b in zip(sectors, last) for sector in range(int(a), int(b) + 1)}
    picture = Picture(_WIDTH, f"one request of a warp to {tensor}")
    num_bytes = int(one["num_bytes"].sum())
    who = f"{len(one)} lanes ask for" if len(one) > 1 else "one thread asks for"
    picture.text(0, 12, f"{who} {num_bytes} bytes of {tensor}: {len(touched)} sectors")
    step = (_WIDTH - 20) / 32
    scale = (_WIDTH - 20) / (last_sector - first_sector + 1)
    for access, sector in zip(one, sectors):
        lane = int(access["thread"]) % 32
        picture.rectangle(10 + lane * step, 20, (step - 1.5, 14), shade(COLORS[0], lane / 31 * 0.7))
        offset = float(access["address"]) / SECTOR_BYTES - float(access["address"] // 32)
        there = 10 + (int(sector) - first_sector + offset) * scale
        picture.line((10 + (lane + 0.5) * step, 34), (there + 1, 60), shade(COLORS[0], 0.4))
    for sector in sorted(touched):
        left = 10 + (sector - first_sector) * scale
        picture.rectangle(left, 60, (max(1.0, scale - 1), 14), COLORS[1])
    picture.text(10, 90, "lanes of the warp above, sectors of 32 bytes below")
    return picture


def timeline(trace: Recording, launch: int = 0, block: int = 0) -> Picture:
    """What each warp of a block waits for, step by step.

    A step is a switch between threads on the CPU. The order is one of many that are allowed.
    """
    spans = trace.timeline(launch, block)
    events = trace.events(launch)
    own = events[events["block"] == block]
    start, end = int(own["clock"].min()), int(own["clock"].max()) + 1
    num_warps = -(-trace.launches[launch].block_size // 32)
    picture = Picture(_WIDTH, f"what the warps of block {block} wait for")
    kinds = sorted({_WAITS.get(what, "lanes of the warp") for _, what, _, _ in spans})
    colors = dict(zip(kinds, COLORS))
    picture.text(0, 12, f"block {block}: steps of its warps, and what they wait for")
    picture.legend(_LEFT + 230, 12, colors)
    scale = (_WIDTH - _LEFT) / (end - start)
    for warp in range(num_warps):
        top = 22 + warp * 14
        picture.text(0, top + 9, f"warp {warp}")
        picture.rectangle(_LEFT, top, (_WIDTH - _LEFT, 10), shade(COLORS[7], 0.7))
    for warp, what, first, last in spans:
        left, width = _LEFT + (first - start) * scale, max(0.6, (last - first) * scale)
        hint = f"warp {warp} waits for {_WAITS.get(what, what)}: steps {first} to {last}"
        color = colors[_WAITS.get(what, "lanes of the warp")]
        picture.rectangle(left, 22 + warp * 14, (width, 10), color, hint)
    return picture


def roofline(device: str, peaks: tuple[float, float], operations_per_byte: float) -> Picture:
    """The most operations a second that a device can do, by operations for each byte.

    peaks: bytes and operations a second. Both axes are logarithmic.
    """
    bandwidth, most = peaks
    left, top, width, height = 60, 24, 520, 150
    picture = Picture(_WIDTH, f"roofline of {device}")
    least_x, most_x = 0.25, 256.0
    ceiling = math.log10(most) + 0.3

    def at(intensity: float, operations: float) -> tuple[float, float]:
        x = math.log(intensity / least_x) / math.log(most_x / least_x)
        floor = math.log10(least_x * bandwidth)
        y = (math.log10(operations) - floor) / (ceiling - floor)
        return left + x * width, top + (1 - y) * height

    knee = most / bandwidth
    roof = [(least_x, least_x * bandwidth), (knee, most), (most_x, most)]
    picture.text(0, 12, f"{device}: {bandwidth / 1e12:.2f} TB/s and {most / 1e12:.1f} TFLOP/s")
    picture.line((left, top), (left, top + height))
    picture.line((left, top + height), (left + width, top + height))
    picture.curve([at(*point) for point in roof], COLORS[0])
    for intensity in (0.25, 1, 4, 16, 64, 256):
        x, _ = at(intensity, most)
        picture.text(x, top + height + 14, f"{intensity:g}", "middle")
    picture.text(left + width / 2, top + height + 30, "operations for each byte", "middle")
    here = at(operations_per_byte, min(most, operations_per_byte * bandwidth))
    picture.line((here[0], here[1]), (here[0], top + height), COLORS[5])
    picture.rectangle(here[0] - 4, here[1] - 4, (8, 8), COLORS[5])
    reached = min(most, operations_per_byte * bandwidth) / 1e12
    words = f"this kernel: {operations_per_byte:.1f}, so at most {reached:.1f} TFLOP/s"
    picture.text(here[0] + 8, here[1] + 12, words)
    return picture
