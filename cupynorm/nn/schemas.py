"""The schemas of the operators torch.ops.cupynorm, and how an operator is registered.

A result that is absent is empty: a mean of rms_norm, a sum that is the input itself, a gradient
that is not wanted. Arguments are those of cupynorm.layer_norm_forward and layer_norm_backward. tile
has the fields of a cupynorm.Tile in their order. load and store are the text of functors
(plan/functors.py). A norm_backward without a mean is that of rms_norm.

All are differentiable but fused_norm_backward, functor_norm_backward and recomputing_norm_backward.
All accept torch's fake tensors and any number of rows.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..norm.options import dtype_name

_library = torch.library.Library("cupynorm", "DEF")
for _schema in (
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
    "SymInt[] normalized_shape, float? eps, bool centered, bool zero_centered_weight, "
    "ScalarType? out_dtype, int sm_margin, str? strategy, str? statistics, int[]? tile, "
    "int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum)",
    "norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? dsum, "
    "SymInt[] normalized_shape, bool[3] wanted, bool zero_centered_weight, "
    "ScalarType? dbias_dtype, int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
    "recomputing_norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, Tensor? dsum, SymInt[] normalized_shape, bool[3] wanted, "
    "bool zero_centered_weight, int sm_margin) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor y)",
    "fused_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
    "Tensor? weight1, Tensor? bias1, Tensor? row_scale, Tensor? dropout_seed, "
    "SymInt[] normalized_shape, float? eps, bool centered, bool zero_centered_weight, "
    "ScalarType? out_dtype, ScalarType? residual_dtype, float dropout_p, bool round_x_hat, "
    "bool memory_efficient, int sm_margin, str? strategy, str? statistics, int[]? tile, "
    "int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum, Tensor y1)",
    "fused_norm_backward(Tensor? dy, Tensor? dy1, Tensor x, Tensor? mean, Tensor rstd, "
    "Tensor? weight, Tensor? weight1, Tensor? dsum, Tensor? row_scale, Tensor? dropout_seed, "
    "Tensor? bias, SymInt[] normalized_shape, bool[6] wanted, bool centered, "
    "bool zero_centered_weight, bool memory_efficient, ScalarType? dbias_dtype, "
    "ScalarType? dbias1_dtype, ScalarType? dx_dtype, ScalarType? dresidual_dtype, "
    "float dropout_p, int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dweight1, "
    "Tensor dbias1)",
    "functor_norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
    "Tensor? row_scale, Tensor? dropout_seed, Tensor[] arrays, str? load, str? store, "
    "float[] numbers, SymInt[] normalized_shape, float? eps, bool centered, "
    "bool zero_centered_weight, ScalarType? out_dtype, ScalarType? residual_dtype, "
    "float dropout_p, int sm_margin, str? strategy, str? statistics, int[]? tile, "
    "int backward_sm_margin=0) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor sum)",
    "functor_norm_backward(Tensor dy, Tensor? input, Tensor x, Tensor? mean, Tensor rstd, "
    "Tensor? weight, Tensor? bias, Tensor? dsum, Tensor? row_scale, Tensor? dropout_seed, "
    "Tensor[] arrays, str? load, str? store, float[] numbers, SymInt[] normalized_shape, "
    "bool[4] wanted, "
    "bool[] wanted_arrays, bool centered, bool zero_centered_weight, ScalarType dx_dtype, "
    "ScalarType? dresidual_dtype, float dropout_p, int sm_margin, str? strategy) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor[] arrays)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


# Arguments that some schemas have. An operator without them computes what these values mean.
_ABSENT = dict.fromkeys(
    ("bias", "residual", "row_scale", "dropout_seed", "weight1", "bias1", "dy1", "input", "load")
    + ("store", "strategy", "residual_dtype", "dx_dtype", "dresidual_dtype", "dbias1_dtype")
)
_ABSENT |= {"dropout_p": 0.0, "centered": False, "round_x_hat": False, "memory_efficient": False}
_ABSENT |= {"arrays": (), "numbers": ()}
_ABSENT["dbias_dtype"] = property(lambda call: None if call.bias is None else call.bias.dtype)


@cache
def arguments_of(operator: Any) -> Any:
    """A NamedTuple class of the arguments of an operator, as its schema names them.

    Arguments of the other operators are attributes of it with the values that they have there by
    default. operator: the operator itself. returns_y1: whether that is its last result.
    has_fused_options: beyond those of a plain norm.
    """
    arguments = operator._schema.arguments
    defaults = [each.default_value for each in arguments if each.has_default_value()]
    fields = namedtuple("Arguments", [each.name for each in arguments], defaults=defaults)
    absent = {name: value for name, value in _ABSENT.items() if name not in fields._fields}
    return type(
        "Arguments",
        (fields,),
        {
            "__slots__": (),
            "operator": operator,
            "returns_y1": operator._schema.returns[-1].name == "y1",
            "has_fused_options": "dropout_p" in fields._fields,
            **absent,
        },
    )


def torch_dtype(dtype: object, name: str) -> torch.dtype | None:
    """A dtype as torch's; None for None. name: of the argument. Raises as dtype_name."""
    return None if dtype is None else getattr(torch, dtype_name(dtype, name))


def register(
    signature: Any,
    implementation: Callable,
    fake: Callable,
    autograd: tuple,
    decomposition: Callable | None = None,
) -> None:
    """Registers an operator on the CPU and on CUDA.

    signature: arguments_of the operator. fake: its results for fake tensors. autograd: the
    functions setup_context and backward of torch.library.register_autograd. decomposition: the
    same by torch operations.
    """
    name = signature.operator._schema.name.partition("::")[2]
    for device in ("CPU", "CUDA"):
        _library.impl(name, implementation, device)
    torch.library.register_fake(f"cupynorm::{name}", fake, lib=_library)
    save, differentiate = autograd
    torch.library.register_autograd(
        f"cupynorm::{name}", differentiate, setup_context=save, lib=_library
    )
    if decomposition is not None:
        register_decompositions(name, decomposition, fake)


def register_decompositions(name: str, decomposition: Callable, fake: Callable) -> None:
    """Puts an operator into torch's table of all decompositions.

    Fake tensors would use these too. They use `fake`, as for other operators, if it is in torch's
    table of meta functions.
    """
    operator = getattr(torch.ops.cupynorm, name).default
    torch._decomp.register_decomposition(operator)(decomposition)
    torch._decomp.register_decomposition(operator, type="meta")(fake)


def save_nothing(ctx, inputs, output):
    """setup_context of an operator whose backward needs no tensor."""
    ctx.set_materialize_grads(False)


def refuse_second_derivatives(ctx, *gradients):
    """backward of an operator that has none: raises NotImplementedError."""
    raise NotImplementedError(
        "the second derivative of a norm with residual_dtype, row_scale, dropout_p, weight1, "
        "bias1, round_x_hat, memory_efficient, load or store, or of recomputing_norm_backward, was "
        "asked for; "
        "it has first derivatives only"
    )
