"""Sums of dx over rows: which graphs get them from the kernel of a norm's backward."""

from __future__ import annotations

import operator

import pytest

torch = pytest.importorskip("torch", "2.11")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from cupynorm.passes import dx_sums  # noqa: E402
from cupynorm.passes.graph_operators import BACKWARD, text_of  # noqa: E402
from cupynorm.plan.devices import DEVICES  # noqa: E402


def test_dx_is_summed_where_its_kernel_does(monkeypatch):
    """In rings of an H200, and not in the registers of narrower rows."""
    monkeypatch.setattr(dx_sums, "device_of", lambda index: DEVICES["H200"])

    def joint(num_cols, x_dtype=torch.bfloat16, **of_sum):
        graph = torch.fx.Graph()
        options = {"normalized_shape": (num_cols,), "centered": True, "dx_dtype": "bfloat16"}
        text = text_of(("dx", "dweight"), options)
        shapes = ((4096, num_cols), (4096, num_cols), (4096,), (4096,), (num_cols,))
        dtypes = (x_dtype, x_dtype, torch.float32, torch.float32, torch.float32)
        with FakeTensorMode():
            given = [graph.placeholder(name) for name in ("dy", "x", "mean", "rstd", "weight")]
            for node, shape, kind in zip(given, shapes, dtypes):
                node.meta["val"] = torch.empty(shape, dtype=kind, device="cuda")
            operands = (*given, None, None, None, text)
            made = graph.call_function(BACKWARD, operands)
            made.meta["val"] = BACKWARD(*torch.fx.map_arg(operands, lambda each: each.meta["val"]))
            dx, dweight = (graph.call_function(operator.getitem, (made, at)) for at in range(2))
            aten = torch.ops.aten
            total = graph.call_function(aten.sum.dim_IntList, (dx, [0], True), of_sum)
            last = graph.call_function(aten.view.default, (total, [num_cols]))
            for node in (dx, dweight, total, last):
                arguments = torch.fx.map_arg(node.args, lambda each: each.meta["val"])
                node.meta["val"] = node.target(*arguments, **node.kwargs)
            graph.output((dx, dweight, last))
            remark = dx_sums.add_sum(graph, made)
        graph.lint()
        return remark, aten.sum.dim_IntList in {node.target for node in graph.nodes}

    assert joint(1024) == ("sums dx over rows", False)
    assert joint(768, torch.float32) == ("sums dx over rows", False)
    # As torch 2.11 has it for a GPU.
    assert joint(1024, dtype=torch.float32)[1] is False
    assert joint(128) == (None, True)
