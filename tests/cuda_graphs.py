"""What tests of CUDA graphs share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def side_stream() -> Iterator[torch.cuda.Stream]:
    """Another stream than the current one, as torch asks of calls before a capture."""
    side, present = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(present)
    with torch.cuda.stream(side):
        yield side
    present.wait_stream(side)
