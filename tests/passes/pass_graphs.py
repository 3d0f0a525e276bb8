"""The graphs that torch.compile makes, with the passes applied and without generating code."""

from __future__ import annotations

import ast
import json
import operator
from typing import Any

from cupynorm.nn.schemas import arguments_of
from functorch.compile import min_cut_rematerialization_partition, nop
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, GraphModule, Node

from cupynorm.passes import after_autograd, before_autograd
from cupynorm.passes.report import Report


class Passes:
    """A backend of torch.compile: both passes, then the graphs as torch runs them eagerly.

    before, after, joint: the text of torch's graph before and after the pass, and of the joint one.
    """

    def __init__(self, replace: str = "all", enabled: bool = True) -> None:
        self.replace, self.enabled, self.report = replace, enabled, Report()
        self.before = self.after = self.joint = ""

    def __call__(self, module: GraphModule, inputs: list[Any]) -> Any:
        self.before = text(module.graph)
        for each in module.modules():
            if self.enabled and isinstance(each, GraphModule):
                before_autograd.rewrite(each.graph, self.replace, self.report)
                each.graph.lint()
                each.recompile()
        self.after = text(module.graph)
        compiler = aot_autograd(fw_compiler=nop, partition_fn=self._partition)
        return compiler(module, inputs)

    def _partition(self, joint: GraphModule, inputs: Any, **options: Any) -> Any:
        if self.enabled:
            after_autograd.rewrite(joint.graph, self.replace, self.report)
            joint.graph.lint()
            joint.recompile()
        self.joint = text(joint.graph, is_joint=True)
        return min_cut_rematerialization_partition(joint, inputs, **options)


def text(graph: Graph, is_joint: bool = False) -> str:
    """The operations of a graph: cupynorm's in a line each, with the arguments that are given.

    Of a joint graph, whose other operations differ between versions of torch, only those.
    """
    lines, words = [], []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or node.target is operator.getitem:
            continue
        if _is_ours(node):
            lines += [" ".join(words)] if words else []
            lines.append(_call(node, is_joint))
            words = []
        elif not is_joint and "functorch" not in _operation(node):
            words.append(_operation(node))
    lines += [" ".join(words)] if words else []
    return "\n".join(lines)


def _is_ours(node: Node) -> bool:
    return str(node.target).startswith("cupynorm.")


def _operation(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return str(name).removesuffix(".default")


def _call(node: Node, is_joint: bool) -> str:
    given = arguments_of(node.target)(*node.args, **node.kwargs)._asdict()
    if "options" in given:
        given |= ast.literal_eval(given.pop("options"))
    own = ("normalized_shape", "eps", "centered", "numbers", "dbias_dtype", "dbias1_dtype")
    shown = [
        f"{name}={_shown(each, is_joint)}"
        for name, each in given.items()
        if name not in own and each not in (None, False, 0, 0.0, [])
    ]
    return f"{_operation(node)}({', '.join(shown)})"


def _shown(value: object, is_joint: bool) -> str:
    """A node by the operation that made it, in a joint graph only if that is cupynorm's."""
    if isinstance(value, Node):
        if value.op == "placeholder":
            return "tangent" if "tangents" in value.name else "given"
        if value.target is operator.getitem:
            source = _shown(value.args[0], is_joint)
            return source if source == "torch" else f"{source}[{value.args[1]}]"
        return "torch" if is_joint and not _is_ours(value) else _operation(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_shown(each, is_joint) for each in value)}]"
    if isinstance(value, str) and value.startswith("["):
        return json.loads(value)[0]  # a functor's name
    return str(value).removeprefix("torch.")
