"""The cache of prepared calls. A key is all that a prepared call depends on."""

from __future__ import annotations

from typing import Any

forwards: dict[tuple, Any] = {}
backwards: dict[tuple, Any] = {}
repeated: dict[tuple, Any] = {}  # of torch's tensors, the last forward of each kind
matrices: dict[tuple, Any] = {}  # quantisations, reductions, updates of scales
# Then all are dropped: a program with new shapes in each call must not fill the memory.
_MOST = 4096


def keep(prepared: dict, key: tuple | None, value: object) -> None:
    """key None: do not keep this one."""
    if key is not None:
        if len(prepared) >= _MOST:
            prepared.clear()
        prepared[key] = value


def forget() -> None:
    """Drops every prepared call, so that the next of each kind is planned anew."""
    for prepared in (forwards, backwards, repeated, matrices):
        prepared.clear()
