"""What a plan must know of a GPU, and some GPUs by name. Pure Python, no GPU needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral


@dataclass(frozen=True)
class Device:
    """What a plan must know of a GPU.

    Examples:
        >>> from dataclasses import replace
        >>> small = replace(cupynorm.DEVICES["H100"], name="H100 PCIe", num_sms=114)
        >>> cupynorm.plan(4096, device=small).device.num_sms
        114

    name: as plans and the benchmark print it.
    compute_capability: major * 10 + minor, 90 for an H100.
    num_sms: multiprocessors.
    smem_per_block: the opt-in limit of shared memory of one block, in bytes.
    smem_per_sm, threads_per_sm, registers_per_sm: of a multiprocessor: bytes, threads, and
        registers of 32 bits.
    clusters: pairs of a size (2, 4, 8 or 16 blocks) and how many such clusters are resident at once
        with one block a multiprocessor; empty if the device has no clusters. Further clusters run
        in a second wave.
    """

    name: str
    compute_capability: int
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    threads_per_sm: int
    clusters: tuple[tuple[int, int], ...] = ()
    registers_per_sm: int = 65536

    def __post_init__(self) -> None:
        counts = {name: value for name, value in vars(self).items() if name not in _NOT_COUNTS}
        for name, value in counts.items():
            if not _is_count(value):
                raise ValueError(f"{name} is {value!r}; expected an int of 1 or more")
        pairs = self.clusters if isinstance(self.clusters, Sequence) else [self.clusters]
        for pair in pairs:
            if not (isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_count, pair))):
                raise ValueError(
                    f"clusters is {self.clusters!r}; expected pairs of a size and a number of "
                    "clusters, both ints of 1 or more"
                )
        # Plans are cached by device, and a list cannot be a key.
        object.__setattr__(self, "clusters", tuple(map(tuple, pairs)))


_NOT_COUNTS = ("name", "clusters")


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value > 0


def _device(name: str, compute_capability: int, num_sms: int, **changes: object) -> Device:
    family = _FAMILIES[compute_capability]
    device = Device(name, compute_capability, num_sms, *family)
    if compute_capability >= 90:
        sizes = (2, 4, 8, 16) if compute_capability < 120 else (2, 4, 8)
        # A cluster runs in one graphics processing cluster (GPC). Some GPCs have fewer
        # multiprocessors than others, so 10% of all are not counted.
        clusters = ((size, int(num_sms * 0.9) // size) for size in sizes)
        device = replace(device, clusters=tuple((size, count) for size, count in clusters if count))
    return replace(device, **changes)


# (smem_per_block, smem_per_sm, threads_per_sm): CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
_FAMILIES = {
    80: (166912, 167936, 2048),
    86: (101376, 102400, 1536),
    89: (101376, 102400, 1536),
    90: (232448, 233472, 2048),
    100: (232448, 233472, 2048),
    120: (101376, 102400, 1536),
}

DEVICES = {
    device.name: device
    for device in (
        _device("A100", 80, 108),
        _device("A10", 86, 72),
        _device("RTX 3090", 86, 82),
        _device("RTX 4090", 89, 128),
        _device("L40S", 89, 142),
        # cuOccupancyMaxActiveClusters on an H200, one block a multiprocessor.
        _device("H100", 90, 132, clusters=((2, 66), (4, 30), (8, 15), (16, 7))),
        _device("H200", 90, 132, clusters=((2, 66), (4, 30), (8, 15), (16, 7))),
        _device("B200", 100, 148),
        _device("RTX 5090", 120, 170),
    )
}
"""The GPUs whose plans need no GPU, by name; each is a Device.

Examples:
    >>> list(cupynorm.DEVICES)
    ['A100', 'A10', 'RTX 3090', 'RTX 4090', 'L40S', 'H100', 'H200', 'B200', 'RTX 5090']
"""


def device_like(
    name: str,
    compute_capability: int,
    num_sms: int,
    smem_per_block: int,
    smem_per_sm: int,
    threads_per_sm: int,
) -> Device:
    """The Device that matches a driver's report: one of DEVICES if name and num_sms match.

    Of an unknown GPU the clusters are estimated: a driver does not report them.
    """
    known = next(
        (device for key, device in DEVICES.items() if key in name and device.num_sms == num_sms),
        None,
    )
    if known is not None:
        return known
    family = max((key for key in _FAMILIES if key <= compute_capability), default=80)
    return replace(
        _device(name, family, num_sms),
        compute_capability=compute_capability,
        smem_per_block=smem_per_block,
        smem_per_sm=smem_per_sm,
        threads_per_sm=threads_per_sm,
    )
