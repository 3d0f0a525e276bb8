"""Checks that torch's async tensor parallelism fuses products and collectives of compiled layers.

By two processes on the CPU; the graphs are the same on GPUs.
torch._inductor.config._micro_pipeline_tp runs the pass. It knows no product with a bias.
"""

from __future__ import annotations

import copy

import pytest
import torch
from layer_cases import IN, OUT, ROWS, WIDTH
from start_ranks import DEVICE, main
from torch import distributed

from cupynorm import LayerNormLinear

GATHERS = "symm_mem.fused_all_gather_matmul.default"
SCATTERS = "symm_mem.fused_matmul_reduce_scatter.default"


def fused(module: torch.nn.Module, x: torch.Tensor) -> list[set[str]]:
    """The fused operators of forward and of backward, which are compiled in one graph each."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch.distributed._symmetric_memory import _test_mode

    torch._dynamo.reset()  # sizes that have differed would become symbolic
    graphs = []

    def record(traced, example):
        seen = torch.fx.GraphModule(traced, copy.deepcopy(traced.graph))
        view_to_reshape(seen)
        with pytest.MonkeyPatch.context() as patch, _test_mode():
            patch.setattr(distributed, "is_nccl_available", lambda: True)
            micro_pipeline_tp_pass(seen.graph)
        graphs.append({str(node.target) for node in seen.graph.nodes} & {GATHERS, SCATTERS})
        return traced

    backend = aot_autograd(fw_compiler=record, decompositions=select_decomp_table())
    torch.compile(module, backend=backend, fullgraph=True)(x).square().sum().backward()
    return graphs


def a_column_parallel_layer(rank):
    options = {"parallel_mode": "column", "sequence_parallel": True, "bias": False}
    layer = LayerNormLinear(IN, OUT, tp_group=distributed.group.WORLD, device=DEVICE, **options)
    x = torch.randn(ROWS // distributed.get_world_size(), WIDTH, IN, device=DEVICE)
    assert fused(layer, x.requires_grad_()) == [{GATHERS}, {SCATTERS}]


CHECKS = {"a_column_parallel_layer": a_column_parallel_layer}

if __name__ == "__main__":
    main(CHECKS)
