"""layer_norm_backward and rms_norm_backward: the gradients with explicit statistics, for users.

Each function builds a request (request.py) and passes it to route.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.functor_text import Fuse
from .functors import bind_functors
from .launch_choice import Launch, checked_launch
from .options import extents_of, gradient_names, names_what_was_removed
from .request import Array, BackwardOperands, BackwardOptions, BackwardRequest
from .results import Backward, FusedBackward
from .route import explicit_backward


@names_what_was_removed
def layer_norm_backward(
    dy: Array,
    x: Array,
    normalized_shape: int | Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    zero_centered_weight: bool = False,
    dsum: Array | None = None,
    gradients: Sequence[str] = ("dx", "dweight", "dbias"),
    dx_dtype: Any = None,
    dweight_dtype: Any = None,
    dbias_dtype: Any = None,
    dresidual_dtype: Any = None,
    fuse: Fuse = (),
    input: Array | None = None,
    launch: Launch | None = None,
) -> Backward | FusedBackward:
    """Gradients of layer_norm at x (derivation: cupynorm.reference.layer_norm).

    Examples:
        >>> result = cupynorm.layer_norm_forward(x := np.array([[1.0, 2.0, 6.0]]), 3)
        >>> cupynorm.layer_norm_backward(x, x, 3, result.mean, result.rstd).dweight.round(3)
        array([-0.926, -0.926,  8.332])

    The order is that of torch.ops.aten.native_layer_norm_backward.

    dy: gradient of y, of x's shape, in any of the four dtypes.
    x: what was normalised (Forward.sum).
    normalized_shape, weight, zero_centered_weight, launch: as for layer_norm.
    mean, rstd: as layer_norm_forward returned them, of x's leading shape, in float32 (float64 for
        float64). x_hat is (x - mean) * rstd with these values.
    bias: that of the forward; functors on y need it.
    dsum: gradient that reaches the returned sum from elsewhere; it is added to dx.
    gradients: which to compute. The others are None and cost nothing.
    dx_dtype, dresidual_dtype: the dtypes of the forward's input and residual, by default x's.
    dweight_dtype, dbias_dtype: by default weight's dtype, or x's without a weight.
    fuse: as in the forward, with the same seeds.
    input: that of the forward; functors on x whose backward lines read x need it.

    Returns Backward(dx, dweight, dbias), the last two of normalized_shape. With fuse, dx_dtype,
    dresidual_dtype, or "dresidual" or "functors" among the gradients, returns FusedBackward, whose
    dx is that of the input; dsum is added to dx and dresidual before they are rounded. Sums over
    rows have a fixed order and repeat to the bit. Raises as layer_norm.
    """
    operands = BackwardOperands(dy, x, mean, rstd, weight, dsum, bias, input, bind_functors(fuse))
    options = BackwardOptions(
        True,
        extents_of(normalized_shape),
        zero_centered_weight,
        gradient_names(gradients),
        dx_dtype,
        dweight_dtype,
        dbias_dtype,
        dresidual_dtype,
        launch=checked_launch(launch),
    )
    return explicit_backward(BackwardRequest(operands, options))


@names_what_was_removed
def rms_norm_backward(
    dy: Array,
    x: Array,
    normalized_shape: int | Sequence[int],
    rstd: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    zero_centered_weight: bool = False,
    dsum: Array | None = None,
    gradients: Sequence[str] = ("dx", "dweight", "dbias"),
    dx_dtype: Any = None,
    dweight_dtype: Any = None,
    dbias_dtype: Any = None,
    dresidual_dtype: Any = None,
    fuse: Fuse = (),
    input: Array | None = None,
    launch: Launch | None = None,
) -> Backward | FusedBackward:
    """Gradients of rms_norm at x, for the rstd that rms_norm_forward returned.

    Examples:
        >>> rstd = cupynorm.rms_norm_forward(x := np.array([[3.0, 4.0]]), 2).rstd
        >>> cupynorm.rms_norm_backward(np.array([[1.0, 0.0]]), x, 2, rstd).dx.round(3)
        array([[ 0.181, -0.136]])

    dy, x, normalized_shape, rstd: as for layer_norm_backward, like all other arguments.

    Returns Backward or FusedBackward, as layer_norm_backward, and raises as it.
    """
    operands = BackwardOperands(dy, x, None, rstd, weight, dsum, bias, input, bind_functors(fuse))
    options = BackwardOptions(
        False,
        extents_of(normalized_shape),
        zero_centered_weight,
        gradient_names(gradients),
        dx_dtype,
        dweight_dtype,
        dbias_dtype,
        dresidual_dtype,
        launch=checked_launch(launch),
    )
    return explicit_backward(BackwardRequest(operands, options))
