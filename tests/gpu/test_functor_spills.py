"""NVRTC compiles kernels with functors, and ptxas reports no spills: no GPU is needed."""

from __future__ import annotations

import pytest

from cupynorm import functors
from cupynorm.dispatch import dispatch
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.functor_text import FunctorError, Fused, FusedPart, functor
from cupynorm.dispatch.problem import Layout, Problem
from cupynorm.gpu.nvrtc import compile_for

pytest.importorskip("cupy")
GPUS = {90: DEVICES["H200"], 80: DEVICES["A100"]}


def fused(chain, source=None, gradient=None, dtype="float16"):
    parts = []
    for own in chain:
        count = len(own.arrays)
        parts.append(FusedPart(own, (dtype,) * count, ("packs",) * count, (gradient,) * count))
    return Fused(tuple(parts), source)


def problem(direction, num_cols, **fields):
    outputs = {"forward": ("y",), "backward": ("dy", "dx", "dweight", "dbias")}[direction]
    given = {**dict.fromkeys((*outputs, "weight", "bias"), "float16"), "x": "float16", **fields}
    layout = Layout.of_new_arrays(num_cols)
    return Problem(direction, True, num_cols, layout=layout, **given)


def store(own, num_cols):
    yield problem("forward", num_cols, store=fused(own))
    for scaling in ("tensor", "row"):
        yield problem("forward", num_cols, store=fused(own), y="float8_e4m3fn", scaling=scaling)
    yield problem("backward", num_cols, dy="float32", store=fused(own, "float16", "float32"))


def load(own, num_cols):
    yield problem("forward", num_cols, x="float32", load=fused(own, "float16"))
    yield problem("forward", num_cols, input="float16", residual_dtype="float16", load=fused(own))
    own = fused(own, gradient="float32")
    yield problem("backward", num_cols, input="float16", dresidual="float16", load=own)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compute_capability, problems",
    [
        (90, list(store([functors.silu_gate], 4096))),
        (80, list(store([functors.rotary, functors.silu_gate], 128))),
        (90, list(load([functors.bias_gelu, functors.layer_scale], 1024))),
    ],
    ids=["silu_gate", "rotary, silu_gate", "bias_gelu, layer_scale"],
)
def test_no_spills(compute_capability, problems):
    for each in problems:
        choice = dispatch.choose(each, GPUS[compute_capability])
        for kernel in filter(None, (choice.amax_kernel, choice.kernel)):
            _, resources = compile_for(kernel, compute_capability)
            assert resources.spill_store_bytes == resources.spill_load_bytes == 0, choice


def test_lines_that_do_not_compile():
    wrong = functor("wrong", "// a comment\ny = gat;")
    with pytest.raises(FunctorError, match=r'functor wrong\(2\).*"gat" is undefined'):
        compile_for(dispatch.choose(next(store([wrong], 64)), GPUS[90]).kernel, 90)
