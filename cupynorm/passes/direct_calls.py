"""How inductor generates code for the operators of graph_operators: as calls of known_calls.

    buf0 = torch.ops.cupynorm.norm_forward_in_graph.default(x, ..)    through torch's dispatcher
    buf0 = known_call("forward ..")(x, ..)                            a direct call

These classes of inductor are private. Where they differ from what is expected here, the code calls
the operators as it calls those of others.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import sympy
import torch
from torch._inductor import ir, lowering
from torch._inductor.graph import SubgraphLowering
from torch._inductor.virtualized import V

from ..nn.dtypes import name_of
from .graph_operators import BACKWARD, FORWARD, parsed_forward

_IMPORT = "from cupynorm.passes.known_calls import known_call"


class _DirectCall(ir.FallbackKernel):
    """A call of an operator in the code that inductor generates."""

    def codegen(self, wrapper: Any) -> None:
        with contextlib.suppress(AttributeError):  # of another version of inductor
            self._call_directly(wrapper)
        super().codegen(wrapper)

    def _call_directly(self, wrapper: Any) -> None:
        key = self._key()
        # Code of C++ knows operators alone; a subgraph's imports are not written.
        is_python = not (V.graph.cpp_wrapper or V.graph.fx_wrapper)
        if key is None or not is_python or isinstance(V.graph, SubgraphLowering):
            return
        wrapper.add_import_once(_IMPORT)
        for each in self.outputs:
            # They have the layouts of the fake results, by which inductor planned.
            each.skip_size_stride_alignment_checks = True
        self.python_kernel_name = f"known_call({key!r})"

    def _key(self) -> str | None:
        """Of known_call. None for functors, and for sizes that inductor does not know."""
        arguments, _ = self.unflatten_args(self.inputs, self.constant_args)
        text = arguments[-1]
        if self.op_overload is FORWARD:
            direction, tensors = "forward", arguments[:5]
            if parsed_forward(text).functors is not None:
                return None
        else:
            direction, tensors = "backward", arguments[:8]
        layouts = ["absent" if each is None else layout_of(each) for each in tensors]
        return None if None in layouts else f"{direction} {text} {layouts}"


def layout_of(tensor: Any) -> str | None:
    """Device, dtype, sizes and strides of inductor's tensor; None if some are not known."""
    sizes, strides = tensor.get_size(), tensor.get_stride()
    if not all(isinstance(each, (int, sympy.Integer)) for each in (*sizes, *strides)):
        return None
    shape, strides = tuple(map(int, sizes)), tuple(map(int, strides))
    return f"{tensor.get_device()} {name_of(tensor.get_dtype())} {shape} {strides}"


@cache
def register() -> None:
    """Gives the operators to inductor."""
    for operator in (FORWARD, BACKWARD):
        lowering.add_needs_realized_inputs(operator)
        lowering.fallbacks.add(operator)
        lowering.register_lowering(operator, type_promotion_kind=None)(_lowering_of(operator))


def _lowering_of(operator: torch._ops.OpOverload) -> Any:
    def lowered(*arguments: Any) -> list[Any]:
        return [ir.TensorBox.create(each) for each in _DirectCall.create(operator, *arguments)]

    return lowered
