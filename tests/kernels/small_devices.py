"""Devices so small that a few rows are enough for every block to work on several."""

from __future__ import annotations

from dataclasses import replace

from cupynorm.plan.devices import DEVICES

H200 = DEVICES["H200"]
# Two multiprocessors and one cluster of each size.
SMALL = replace(
    H200, name="small", num_sms=2, clusters=tuple((size, 1) for size, _ in H200.clusters)
)
# Two clusters of any size: a margin of half the multiprocessors leaves one.
TWO_CLUSTERS = replace(
    SMALL, name="two clusters", num_sms=32, clusters=tuple((size, 2) for size, _ in H200.clusters)
)
# No row fits its registers, so clusters keep rows in shared memory.
NO_REGISTERS = replace(SMALL, name="no registers", registers_per_sm=1)
