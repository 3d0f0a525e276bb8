"""Whether torch's async tensor parallelism fuses the products and collectives of a module.

torch._inductor.config._micro_pipeline_tp runs its pass. It knows no product with a bias.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributed

FUSED = ("symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default")


def assert_fused(module: torch.nn.Module, x: torch.Tensor, in_forward: bool = True) -> None:
    """Compiles it in one graph; its backward has both fused operators, and so has forward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch.distributed._symmetric_memory import _test_mode

    graphs = []

    def record(traced, example):
        seen = torch.fx.GraphModule(traced, copy.deepcopy(traced.graph))
        view_to_reshape(seen)
        with pytest.MonkeyPatch.context() as patch, _test_mode():
            patch.setattr(distributed, "is_nccl_available", lambda: True)
            micro_pipeline_tp_pass(seen.graph)
        graphs.append({str(node.target) for node in seen.graph.nodes})
        return traced

    backend = aot_autograd(fw_compiler=record, decompositions=select_decomp_table())
    torch.compile(module, backend=backend, fullgraph=True)(x).square().sum().backward()
    forward, backward = graphs
    assert backward.issuperset(FUSED), backward
    assert forward.issuperset(FUSED) == in_forward, forward
