"""plan(): which kernels a problem gets, for a named device or for the GPU that is present."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any

from ..dtypes import DTYPES, EIGHT_BITS, ELEMENTS
from ..gpu import arrays, launch, nvrtc
from ..plan.devices import DEVICES, Device
from ..plan.dispatch import Plan, make_plan
from ..plan.problem import (
    DIRECTIONS,
    NORMS,
    SCALINGS,
    Direction,
    Layout,
    NormName,
    OperandLayout,
    Problem,
    Tile,
)
from ..plan.strategies import StatisticsName, StrategyName
from .request import Launch, planned_with

WITHOUT_GPU = "H200"  # what is planned for where no GPU is present
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def plan(
    num_cols: int,
    num_rows: int = 4096,
    dtype: str = "bfloat16",
    *,
    norm: NormName = "layer_norm",
    direction: Direction = "forward",
    device: str | Device | None = None,
    weight_dtype: str | None = "same",
    bias_dtype: str | None = "same",
    out_dtype: str | None = None,
    scale: str | None = None,
    amax: bool = False,
    residual: bool = False,
    zero_centered_weight: bool = False,
    alignment: int = 256,
    strategy: StrategyName | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: StatisticsName | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Plan:
    """Which kernel, tile and grid a problem gets, the bytes it moves, and why. Needs no GPU.

    Examples:
        >>> plan = cupynorm.plan(4096, device="H200")
        >>> plan.strategy, plan.launches[0].kernel.source, plan.bytes_needed
        ('block', 'forward_block.cu', 67158016)

    num_cols, num_rows: the extents of x.
    dtype: of x; a name such as "bfloat16", or "bf16", "fp16", "fp32", "fp64".
    weight_dtype, bias_dtype: the same as dtype unless given; None if absent.
    out_dtype: of y, by name, also "float8_e4m3fn", "float8_e5m2" or "int8" in forward.
    scale: for an out_dtype of 8 bits, "given", "tensor", "row", "block" or "block64"; int8 takes
        "given" or "row".
    amax: whether the amax of y is recorded beside a given scale.
    residual: whether forward adds a residual to x; backward then adds the gradient of the sum.
    norm: "layer_norm" or "rms_norm".
    direction: "forward", or "backward" with all three gradients.
    device: a name of cupynorm.DEVICES or a Device; None is the current GPU. Without one it is an
        H200, as a warning says.
    alignment: bytes of which every base address is a multiple.
    strategy, tile, statistics, sm_margin: as for cupynorm.Launch.
    zero_centered_weight: as for layer_norm.

    Returns a Plan, which prints as a short table. Raises ValueError for unknown names and for a
    strategy or tile that does not fit, TypeError for an extent that is no int.
    """
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; expected 'layer_norm' or 'rms_norm'")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; expected 'forward' or 'backward'")
    _check_int("num_cols", num_cols, 0)
    _check_int("num_rows", num_rows, 0)
    _check_int("alignment", alignment, 1)
    launch_as = Launch(strategy, tile, statistics, sm_margin)
    dtype, out_dtype = full_name(dtype), full_name(out_dtype)
    weight, bias = (
        dtype if name == "same" else full_name(name) for name in (weight_dtype, bias_dtype)
    )
    y = out_dtype or dtype
    is_quantized = direction == "forward" and y in list(EIGHT_BITS)
    if direction == "backward" and y in list(EIGHT_BITS):
        raise ValueError(
            f"out_dtype is {y!r} and direction 'backward'; expected 'forward', because no gradient "
            "has 8 bits"
        )
    dtypes = {"dtype": dtype, "out_dtype": dtype if is_quantized else y}
    parameters = {"weight_dtype": weight, "bias_dtype": bias}
    dtypes |= {name: given for name, given in parameters.items() if given is not None}
    for name, given in dtypes.items():
        if given not in list(DTYPES):
            known = (
                *DTYPES,
                *(EIGHT_BITS if name == "out_dtype" and direction == "forward" else ()),
            )
            raise ValueError(f"{name} is {given!r}; expected one of {', '.join(known)}")
    switches = {"residual": residual, "zero_centered_weight": zero_centered_weight, "amax": amax}
    for name, given in switches.items():
        if given not in (True, False):
            raise TypeError(f"{name} is {given!r}; expected True or False")
    scalings = ("given", "row") if is_quantized and y == "int8" else SCALINGS
    if scale is not None and (not is_quantized or scale not in scalings):
        raise ValueError(
            f"scale is {scale!r}; expected one of {', '.join(scalings)}, of a forward whose "
            f"out_dtype {'is int8' if y == 'int8' else 'has 8 bits'}"
        )
    if amax and (not is_quantized or scale not in (None, "given")):
        raise ValueError(
            f"amax is recorded with scale {scale!r}; "
            "expected 'given', of a forward whose out_dtype has 8 bits"
        )
    device = device_of(device)
    tensors = {"y": y, "bias": bias, "residual": bool(residual), "amax": bool(amax)}
    tensors["scaling"] = (scale or "given") if is_quantized else None
    if direction == "backward":
        tensors = {
            "dy": y,
            "dx": dtype,
            "dweight": weight,
            "dbias": bias,
            "dsum": dtype if residual else None,
        }
    operands = [
        OperandLayout(alignment, 0, ELEMENTS[name].itemsize)
        for name in filter(None, (dtype, y, weight, bias))
    ]
    problem = Problem(
        direction,
        norm == "layer_norm",
        num_cols,
        dtype,
        Layout.of(num_cols, operands),
        weight=weight,
        zero_centered=bool(zero_centered_weight),
        **tensors,
    )
    return make_plan(problem, device, num_rows, **planned_with(launch_as, direction))


def _check_int(name: str, given: object, least: int) -> None:
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        is_short = isinstance(given, (str, numbers.Number))
        found = repr(given) if is_short else arrays.type_in_words(given)
        raise TypeError(f"{name} is {found}; expected an int")
    if given < least:
        raise ValueError(f"{name} is {given}; expected an int of {least} or more")


def full_name(dtype: Any) -> Any:
    """The name of a dtype that was given in short."""
    return _SHORT_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype


def device_of(device: str | Device | None) -> Device:
    """A Device, or one by name in any case; None is the current GPU, or an H200 without one.

    Raises ValueError for an unknown name.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        if nvrtc.has_gpu():
            return launch.current_device()
        warnings.warn(
            f"no GPU was found: planned for an {WITHOUT_GPU}; device= names another", stacklevel=3
        )
        return DEVICES[WITHOUT_GPU]
    by_name = {name.lower(): each for name, each in DEVICES.items()}
    if not isinstance(device, str) or device.lower() not in by_name:
        raise ValueError(
            f"device is {device!r}; expected one of {', '.join(DEVICES)}, a Device, "
            "or None for the current GPU"
        )
    return by_name[device.lower()]
