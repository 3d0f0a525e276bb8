"""Checks that torch's async tensor parallelism fuses products and collectives of compiled layers.

By two processes on the CPU; the graphs are the same on GPUs.
torch._inductor.config._micro_pipeline_tp runs the pass. It knows no product with a bias.
"""

from __future__ import annotations

import copy

import pytest
import torch
from dtensor_ranks import make_layer, mesh_of_all, random
from layer_cases import IN, OUT, ROWS, WIDTH
from start_ranks import main
from torch import distributed
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from cupynorm import LayerNormLinear
from cupynorm.parallel.styles import ColwiseParallel, RowwiseParallel

FUSED = ("symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default")


def assert_fused(module: torch.nn.Module, x: torch.Tensor, in_forward: bool = True) -> None:
    """Compiles it in one graph; its backward has both fused operators, and so has forward."""
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
        graphs.append({str(node.target) for node in seen.graph.nodes})
        return traced

    backend = aot_autograd(fw_compiler=record, decompositions=select_decomp_table())
    torch.compile(module, backend=backend, fullgraph=True)(x).square().sum().backward()
    forward, backward = graphs
    assert backward.issuperset(FUSED), backward
    assert forward.issuperset(FUSED) == in_forward, forward


def tensor_parallel_layers(rank):
    layers = []
    for mode, (num_in, num_out) in (("column", (IN, OUT)), ("row", (OUT, IN))):
        options = {"parallel_mode": mode, "sequence_parallel": True, "bias": False}
        group = distributed.group.WORLD
        layers.append(LayerNormLinear(num_in, num_out, tp_group=group, device="cpu", **options))
    x = torch.randn(ROWS // distributed.get_world_size(), WIDTH, IN)
    assert_fused(torch.nn.Sequential(*layers), x)


def layers_of_dtensors_without_a_bias(rank):
    styles = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "1": RowwiseParallel(output_layouts=Shard(0)),
    }
    x = random(4, 2, 24).chunk(2)[rank]
    for bias in (False, True):
        layers = torch.nn.Sequential(make_layer(24, 32, bias=bias), make_layer(32, 24, bias=bias))
        assert_fused(parallelize_module(layers, mesh_of_all(), styles), x, in_forward=not bias)


CHECKS = {
    each.__name__: each for each in (tensor_parallel_layers, layers_of_dtensors_without_a_bias)
}

if __name__ == "__main__":
    main(CHECKS)
