"""torch: DTensors, which several ranks hold together, as arguments of the operators.

Tensors with one row for each row of the input are sharded by rows, or replicated on every rank.
weight and bias are replicated. Their gradients are sums over rows: where rows are sharded, each
rank has a partial sum, which torch reduces when it is read, as it does for its own layer_norm.
Rows that are split between ranks are gathered by torch first, and partial sums are reduced first.
Calls with fused options are in dtensor_whole_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from ..gpu.arrays import type_in_words

# Arguments and results of the operators. All other tensors are the same for every row.
_BY_ROW = {"input", "residual", "dy", "x", "mean", "rstd", "dsum", "y", "sum", "dx"}
_SUMS = {"dweight", "dbias"}


def parameters_like(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """weight and bias for an operator: DTensors if input is one.

    A plain weight or bias beside a DTensor counts as replicated. Its gradient is plain again, and
    is the whole sum.
    """
    check_kinds(input, residual=residual, weight=weight, bias=bias)
    if not hasattr(input, "device_mesh"):
        return weight, bias
    _register()
    return on_every_rank(weight, input), on_every_rank(bias, input)


def check_kinds(input: Tensor, by_row: Sequence[str] = ("residual",), **others: object) -> None:
    """Raises TypeError for a DTensor beside a plain input, and for plain rows beside a DTensor.

    by_row: which of the others have a value for each row. None is neither.
    """
    for name, tensor in others.items():
        is_sharded = hasattr(tensor, "device_mesh")
        if is_sharded and not hasattr(input, "device_mesh"):
            raise TypeError(
                f"{name} is a DTensor and input is {type_in_words(input)}; "
                "expected input to be a DTensor too"
            )
        lacks = name in by_row and tensor is not None and not is_sharded
        if lacks and hasattr(input, "device_mesh"):
            raise TypeError(
                f"input is a DTensor and {name} is {type_in_words(tensor)}; expected a DTensor too"
            )


def is_any(*tensors: object) -> bool:
    """Whether one of them is a DTensor."""
    for each in tensors:
        # torch.compile cannot trace hasattr of a symbolic number.
        if isinstance(each, Tensor) and hasattr(each, "device_mesh"):
            return True
    return False


def refuse(options: str, **tensors: object) -> None:
    """Raises NotImplementedError for a DTensor in a call with one of these options."""
    for name, tensor in tensors.items():
        if hasattr(tensor, "device_mesh"):
            raise NotImplementedError(
                f"{name} is a DTensor and {options} was given; "
                f"expected none of these options, or {name}.to_local()"
            )


def on_every_rank(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    """A plain tensor as a DTensor that is replicated over the mesh of another."""
    if not isinstance(tensor, Tensor) or hasattr(tensor, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _register() -> None:
    _register_once()


# The mark of torch.compiler.assume_constant_result, which would import the compiler now. With it
# the compiler calls the function without tracing it.
_register._dynamo_marked_constant = True


@cache
def _register_once() -> None:
    """Tells torch how the operators take DTensors.

    Called for the first DTensor, because the imports take seconds.
    """
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError as error:
        raise NotImplementedError(
            f"input is a DTensor and torch {torch.__version__} has no "
            "torch.distributed.tensor.experimental.register_sharding; expected a later torch, or "
            "input.to_local()"
        ) from error
    operators = torch.ops.cupynorm.norm_forward.default, torch.ops.cupynorm.norm_backward.default
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for operator in operators:
        register_sharding(operator)(partial(_shardings, operator))
        # torch caches a decision under the call's arguments. Those that are not tensors count only
        # from static_argnum on: by default from the first int.
        names = [argument.name for argument in operator._schema.arguments]
        static_argnum = names.index("normalized_shape")
        known[operator] = replace(known[operator], static_argnum=static_argnum)


def _shardings(operator, *arguments_given) -> list[tuple[list, list]]:
    """How an operator may be split along one dimension of a mesh.

    Returns pairs of lists: placements of the results, and of the arguments (None for those that are
    not tensors).
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    arguments = dict(
        zip((argument.name for argument in operator._schema.arguments), arguments_given)
    )
    results = [result.name for result in operator._schema.returns]
    if operator is torch.ops.cupynorm.norm_forward.default:
        has_shards = {"y": True, "mean": arguments["centered"], "rstd": True}
        has_shards["sum"] = arguments["residual"] is not None
    else:
        has_shards = dict(zip(results, arguments["wanted"]))

    def split(rows, sums):
        placements = dict.fromkeys(_BY_ROW, rows) | dict.fromkeys(_SUMS, sums)
        return (
            [placements[name] if has_shards[name] else Replicate() for name in results],
            [
                placements.get(name, Replicate()) if hasattr(value, "placements") else None
                for name, value in arguments.items()
            ],
        )

    num_leading = arguments_given[0].ndim - len(arguments["normalized_shape"])
    by_rows = [split(Shard(dim), Partial()) for dim in range(num_leading)]
    return [split(Replicate(), Replicate()), *by_rows]
