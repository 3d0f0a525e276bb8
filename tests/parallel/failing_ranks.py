"""Checks of ranks that hang, end, or have another shape, by two processes: see start_ranks.py."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta

import pytest
import torch
from start_ranks import Checks, main
from torch import distributed

from cupynorm import LayerNormLinear

CHECKS = Checks()
check = CHECKS.add
SECONDS = 1.5


def make_layer() -> LayerNormLinear:
    """Of a group of its own, which waits for SECONDS."""
    group = distributed.new_group(timeout=timedelta(seconds=SECONDS))
    layer = LayerNormLinear(24, 16, parallel_mode="row", tp_group=group, device="cpu")
    layer(torch.ones(4, 12))
    return layer


@contextlib.contextmanager
def impatient_store(layer):
    store = distributed.distributed_c10d._get_process_group_store(layer.tp_group)
    before = store.timeout
    store.set_timeout(timedelta(seconds=SECONDS))
    try:
        yield
    finally:
        store.set_timeout(before)


@check
def new_shapes_that_differ(rank):
    """All ranks raise, and the layer works afterwards. Calls like former ones are not compared."""
    layer = make_layer()
    for rows in ((6, 8), (10, 2)):
        sentence = rf"input is \({rows[1]}, 12\) on rank 1 of tp_group and \({rows[0]}, 12\) on "
        with pytest.raises(ValueError, match=sentence):
            layer(torch.ones(rows[rank], 12))
        assert layer(torch.ones(4, 12)).isfinite().all()
    with pytest.raises(ValueError, match="dtype of the input is torch.* on rank 1 of tp_group"):
        layer(torch.ones(6, 12, dtype=(torch.float64, torch.bfloat16)[rank]))
    for rows in (6, 7, 6, 8, 8):
        assert layer(torch.ones(rows, 12)).isfinite().all()


@check
def a_timeout_that_is_caught(rank):
    """A rank that waits in vain takes back its call: later ones are compared as before."""
    layer = make_layer()
    with impatient_store(layer):
        for _ in range(2):
            if rank == 1:
                with pytest.raises(RuntimeError, match="rank 0 has none; expected the same calls"):
                    layer(torch.ones(6, 12))
            distributed.barrier()
            for rows in (7, 8):
                assert layer(torch.ones(rows, 12)).isfinite().all()
        with pytest.raises(
            ValueError, match=r"input is \(10, 12\) on rank 1 .* \(9, 12\) on rank 0"
        ):
            layer(torch.ones(9 + rank, 12))
        assert layer(torch.ones(6, 12)).isfinite().all()


@check
def a_rank_that_hangs(rank):
    """The other one raises at the timeout of the group."""
    layer = make_layer()
    if rank == 1:
        time.sleep(2 * SECONDS)
    else:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="[Tt]imed out"):
            layer(torch.ones(4, 12))
        assert time.monotonic() - start < 2 * SECONDS
    distributed.barrier()


@check
def a_rank_that_ends(rank):
    """It runs last: rank 1 does not come back."""
    layer = make_layer()
    x = torch.ones(4, 12, requires_grad=True)
    y = layer(x)
    if rank == 1:
        os._exit(1)
    with pytest.raises(RuntimeError, match="[Cc]onnection|closed|reset"):
        y.sum().backward()


if __name__ == "__main__":
    main(CHECKS)
