"""torch: weight gradients that do not go to autograd.

With fuse_wgrad_accumulation they are added to weight.main_grad. With delay_wgrad_compute they wait
in a queue for backward_dw(). A WeightGradientSink takes them from a backward. WeightGradients is
what a layer keeps for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn import modes, private
from ..nn.modes import outside_autocast
from ..nn.quantization import wide_product
from .operands import split_like, sum_rows


class Step:
    """The forwards whose gradients one main_grad sums.

    is_stale: whether main_grad still holds the sum of an earlier step, and is to be overwritten.
    """

    def __init__(self, is_stale: bool) -> None:
        self.is_stale = is_stale


class WeightProduct(NamedTuple):
    """What the gradients of weights and biases are made of.

    rows: dy, [num_rows, out_features].
    make_normalized: makes the normalised tensor, [num_rows, in_features]; or None.
    make_dweight: makes the product of both in a dtype, where that is more than a product; or None.
    reads: the tensors that make_normalized reads, by name.
    """

    rows: Tensor
    make_normalized: Callable[[], Tensor] | None = None
    make_dweight: Callable[[torch.dtype], Tensor] | None = None
    reads: Mapping[str, Tensor | None] = {}


class WeightGradientSink:
    """Takes the gradients of one forward's weights and biases.

    step: of main_grad; None where gradients go to .grad. queue: of delayed work, or None.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        step: Step | None,
        queue: deque[Callable[[], None]] | None,
    ) -> None:
        self.weights, self.biases, self.step, self.queue = weights, biases, step, queue

    @property
    def delays(self) -> bool:
        """Whether the work is queued."""
        return self.queue is not None

    def take(
        self, product: WeightProduct, wanted: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """What autograd gets for weights and biases. wanted: of weights, then of biases."""
        num_weights = len(self.weights)
        weights = [each if asked else None for each, asked in zip(self.weights, wanted)]
        biases = [each if asked else None for each, asked in zip(self.biases, wanted[num_weights:])]
        if self.delays:
            reads = dict(product.reads)
            if product.make_dweight is None or any(bias is not None for bias in biases):
                reads["the gradient of y"] = product.rows
            versions = [
                (name, each, each._version) for name, each in reads.items() if each is not None
            ]
            self.queue.append(partial(self._run_delayed, product, weights, biases, versions))
            return [None] * len(weights), [None] * len(biases)
        bias_gradients = self._bias_gradients(product.rows, biases)
        self._add_weights(product, weights)
        return [_placeholder(weight) for weight in weights], bias_gradients

    def take_nothing(self) -> None:
        """For a backward that no gradient of y has reached."""
        if self.delays:
            self.queue.append(lambda: None)

    def _bias_gradients(self, rows: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor | None]:
        if all(bias is None for bias in biases):
            return list(biases)
        parts = split_like(sum_rows(rows, self.biases[0].dtype), self.biases)
        return [None if bias is None else part for bias, part in zip(biases, parts)]

    def _run_delayed(
        self,
        product: WeightProduct,
        weights: Sequence[Tensor | None],
        biases: Sequence[Tensor | None],
        versions: Sequence[tuple[str, Tensor, int]],
    ) -> None:
        for name, each, version in versions:
            if each._version != version:
                raise RuntimeError(
                    f"{name} was written to between a backward and its backward_dw(), which reads "
                    "it; expected no such write (autograd may add another gradient into the memory "
                    "of that of y: y.register_hook(torch.clone) keeps them separate)"
                )
        for bias, gradient in zip(biases, self._bias_gradients(product.rows, biases)):
            if bias is not None:
                _accumulate(bias, gradient)
        self._add_weights(product, weights)

    def _add_weights(self, product: WeightProduct, weights: Sequence[Tensor | None]) -> None:
        if all(weight is None for weight in weights):
            return
        rows, make_normalized, make_dweight, _ = product
        normalized = make_normalized() if make_dweight is None else None
        if self.step is None:
            if make_dweight is None:
                dweight = rows.t() @ normalized
            else:
                dweight = make_dweight(self.weights[0].dtype)
            for weight, part in zip(weights, split_like(dweight, self.weights)):
                if weight is not None:
                    _accumulate(weight, part)
            return
        sizes = [len(weight) for weight in self.weights]
        overwrites, self.step.is_stale = self.step.is_stale, False
        if make_dweight is None:
            parts = rows.split(sizes, 1)
        else:
            parts = make_dweight(torch.float32).t().split(sizes, 1)
        for weight, part in zip(weights, parts):
            if weight is not None:
                over = overwrites or getattr(weight, "overwrite_main_grad", False)
                _add_product(_main_grad(weight), part.t(), normalized, accumulate=not over)
                if hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True


class WeightGradients:
    """What a layer keeps for fuse_wgrad_accumulation and delay_wgrad_compute.

    layer, in the methods: has both as attributes, weight_names, bias_names, return_bias, and the
    lists weights() and biases().
    """

    def __init__(self) -> None:
        self.step, self.begins_later = Step(False), False
        self.queue: deque[Callable[[], None]] = deque()

    def begin(self, layer: Any) -> None:
        """Refuses reducers of torch; also before a checkpoint, which records the call later."""
        if not (layer.training or torch.is_grad_enabled()) or modes.is_compiling():
            return
        if layer.delay_wgrad_compute:
            check_reducers("delay_wgrad_compute", [*layer.weights(), *layer.biases()])
        elif layer.fuse_wgrad_accumulation:
            check_reducers("fuse_wgrad_accumulation", layer.weights())

    def end(self, layer: Any, is_first_microbatch: bool | None) -> None:
        """Notes a forward that is not recorded: a checkpoint may record it later."""
        if layer.fuse_wgrad_accumulation and is_first_microbatch and layer.training:
            self.begins_later = self.begins_later or not torch.is_grad_enabled()

    def has_sink(self, layer: Any) -> bool:
        """Whether a WeightGradientSink takes the weight gradients of a call now."""
        if not (layer.fuse_wgrad_accumulation or layer.delay_wgrad_compute):
            return False
        if not torch.is_grad_enabled():
            return False
        if not modes.wants_gradient(*layer.weights(), *layer.biases()):
            return False
        return modes.is_compiling() or not modes.learns_shapes()

    def make_sink(self, layer: Any, is_first_microbatch: bool | None) -> WeightGradientSink:
        """What takes the weight gradients of a call. Changes nothing before take_step."""
        weights, step = layer.weights(), None
        if layer.fuse_wgrad_accumulation:
            for name, weight in zip(layer.weight_names, weights):
                check_main_grad(name, weight)
            # The first forward begins a step, unless a step that has begun was not yet written to.
            # A forward that a checkpoint recomputes inside of backward does not begin one, unless
            # its first run recorded nothing (use_reentrant=True).
            begins = self.begins_later if modes.is_inside_backward() else is_first_microbatch
            step = Step(True) if begins and not self.step.is_stale else self.step
        biases = [] if layer.return_bias else layer.biases()
        if not layer.delay_wgrad_compute:
            return WeightGradientSink(weights, biases, step, None)
        for name, each in zip((*layer.weight_names, *layer.bias_names), (*weights, *biases)):
            check_is_leaf(name, each)
        return WeightGradientSink(weights, biases, step, self.queue)

    def take_step(self, sink: WeightGradientSink | None) -> None:
        """After a forward that was not refused: its step is that of the forwards that follow."""
        if sink is not None and sink.step is not None:
            self.step, self.begins_later = sink.step, False

    def run_delayed(self, like: Tensor) -> None:
        """The gradients that the oldest backward left. like: any weight."""
        if not self.queue:
            raise RuntimeError(
                "backward_dw() was called and no backward has left a weight gradient; "
                "expected one call for each backward"
            )
        with torch.no_grad(), outside_autocast(like):
            self.queue.popleft()()


def asked_for(
    node: Any, wanted: Sequence[bool], sink: WeightGradientSink | None
) -> tuple[Sequence[bool], WeightGradientSink | None]:
    """wanted and sink for what this backward asks for. wanted ends with weights and biases.

    torch.autograd.grad and backward(inputs=...) may leave out parameters. Autograd drops their
    gradients, but a sink would keep them. node: the node of the forward, which runs.
    """
    num_parts = 0 if sink is None else len(sink.weights) + len(sink.biases)
    if not any(wanted[len(wanted) - num_parts :]):
        return wanted, sink
    edges = node.next_functions[-num_parts:]
    parts = [
        is_wanted and _is_reached(edge) for is_wanted, (edge, _) in zip(wanted[-num_parts:], edges)
    ]
    return (*wanted[:-num_parts], *parts), sink if any(parts) else None


def _is_reached(node: Any) -> bool:
    try:
        return private.will_execute(node)
    except RuntimeError:  # autograd.grad asks for this leaf, or compiled autograd runs
        return True


def check_reducers(option: str, parameters: Sequence[Tensor]) -> None:
    """Raises NotImplementedError where torch would reduce gradients over ranks too early.

    option: fuse_wgrad_accumulation or delay_wgrad_compute. parameters: whose gradients it takes.
    """
    if not torch.distributed.is_available():
        return
    if _share(parameters, private.reduced_parameters()):
        name = "DistributedDataParallel"
    elif _share(parameters, private.gathered_parameters()):
        name = "fully_shard"
    else:
        return
    raise NotImplementedError(
        f"a layer with {option}=True runs inside {name}, which reduces gradients at the end of "
        f"backward and would miss this one; expected {option}=False, or Megatron's reducer"
    )


def _share(ones: Sequence[Tensor], others: Iterable[Tensor | None]) -> bool:
    return not {id(each) for each in ones}.isdisjoint(map(id, others))


def check_is_leaf(name: str, weight: Tensor) -> None:
    """Raises RuntimeError where a delayed gradient would reach no parameter."""
    if weight.requires_grad and not weight.is_leaf:
        raise RuntimeError(
            f"{name} is made of other tensors (by FullyShardedDataParallel or a parametrization), "
            "which backward_dw() cannot reach; expected a parameter, or delay_wgrad_compute=False"
        )


def check_main_grad(name: str, weight: Tensor) -> None:
    """Raises RuntimeError or ValueError where a weight has no main_grad of its shape."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None and weight.requires_grad and not hasattr(weight, "__fsdp_param__"):
        raise RuntimeError(
            f"{name} has no main_grad, to which fuse_wgrad_accumulation=True adds its gradient; "
            f"expected a tensor of shape {tuple(weight.shape)}, made before the forward"
        )
    if main_grad is not None and main_grad.shape != weight.shape:
        raise ValueError(
            f"{name}.main_grad has shape {tuple(main_grad.shape)}; expected {tuple(weight.shape)}"
        )


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Adds a delayed gradient to .grad, and runs the hooks that follow."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in tuple(hooks.values()):
        hook(parameter)


def _main_grad(weight: Tensor) -> Tensor:
    """Megatron's FSDP makes it on request."""
    return weight.get_main_grad() if hasattr(weight, "__fsdp_param__") else weight.main_grad


def _placeholder(weight: Tensor | None) -> Tensor | None:
    """What autograd gets for a gradient that is in main_grad already.

    Whoever marked the weight with grad_added_to_main_grad has hooks that need a tensor.
    """
    if weight is None or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    zeros = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if zeros else torch.empty_like(weight)


def _add_product(to: Tensor, a: Tensor, b: Tensor | None, *, accumulate: bool) -> None:
    """to += a b, or to = a b, in to's dtype. b None: a is the product.

    The product is not rounded before the addition where torch can avoid it.
    """
    if b is None:
        to.add_(a) if accumulate else to.copy_(a)
    elif to.dtype == a.dtype:
        torch.addmm(to, a, b, beta=int(accumulate), out=to)
    elif to.is_cuda and to.dtype == torch.float32 and a.element_size() == 2:
        torch.addmm(to, a, b, out_dtype=to.dtype, beta=int(accumulate), out=to)
    elif accumulate:
        to.add_(wide_product(a, b))
    else:
        to.copy_(wide_product(a, b))
