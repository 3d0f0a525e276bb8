"""What users ask of plans: plan(), use_tiles(), and the command `python -m cupynorm plan`.

It knows the GPU that is present and how a call is launched. The modules of dispatch/ do not.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .command_line import Commands, number
from .dispatch.devices import DEVICES, Device
from .dispatch.dispatch import Plan, choose, make_plan, widest
from .dispatch.measured import read_rows, use_rows
from .dispatch.problem import (
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
from .dispatch.product_plan import NormLinearProblem
from .dispatch.product_plan import choose as choose_product
from .dispatch.strategies import STRATEGIES, StatisticsName, StrategyName
from .dtypes import DTYPES, EIGHT_BITS, ELEMENTS
from .gpu import launch, nvrtc
from .norm.prepared import forget
from .norm.request import Launch, planned_with
from .options import check_choice, check_flags, check_int, shown

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
    check_choice("norm", norm, NORMS)
    check_choice("direction", direction, DIRECTIONS)
    num_cols, num_rows = check_int("num_cols", num_cols), check_int("num_rows", num_rows)
    alignment = check_int("alignment", alignment, 1)
    check_flags(residual=residual, zero_centered_weight=zero_centered_weight, amax=amax)
    launch_as = Launch(strategy, tile, statistics, sm_margin)
    dtype, out_dtype = full_name(dtype), full_name(out_dtype)
    weight, bias = (
        dtype if isinstance(name, str) and name == "same" else full_name(name)
        for name in (weight_dtype, bias_dtype)
    )
    y = dtype if out_dtype is None else out_dtype
    in_8_bits = isinstance(y, str) and y in EIGHT_BITS
    is_quantized = direction == "forward" and in_8_bits
    if direction == "backward" and in_8_bits:
        raise ValueError(
            f"out_dtype is {y!r} and direction 'backward'; expected 'forward', because no gradient "
            "has 8 bits"
        )
    dtypes = {"dtype": dtype, "out_dtype": dtype if is_quantized else y}
    parameters = {"weight_dtype": weight, "bias_dtype": bias}
    dtypes |= {name: given for name, given in parameters.items() if given is not None}
    for name, given in dtypes.items():
        can_have_8 = name == "out_dtype" and direction == "forward"
        check_choice(name, given, (*DTYPES, *EIGHT_BITS) if can_have_8 else DTYPES)
    scalings = ("given", "row") if is_quantized and y == "int8" else SCALINGS
    is_known = scale is None or (isinstance(scale, str) and scale in scalings)
    if not is_known or (scale is not None and not is_quantized):
        raise ValueError(
            f"scale is {shown(scale)}; expected one of {', '.join(scalings)}, of a forward whose "
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
        tensors = {"dy": y, "dx": dtype, "dweight": weight, "dbias": bias}
        tensors["dsum"] = dtype if residual else None
    sizes = [ELEMENTS[name].itemsize for name in (dtype, y, weight, bias) if name]
    layout = Layout.of(num_cols, [OperandLayout(alignment, 0, size) for size in sizes])
    tensors |= {"weight": weight, "zero_centered": bool(zero_centered_weight)}
    problem = Problem(direction, norm == "layer_norm", num_cols, dtype, layout, **tensors)
    return make_plan(problem, device, num_rows, **planned_with(launch_as, direction))


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
    return _named("device", device)


def _named(option: str, name: object) -> Device:
    by_name = {each.lower(): device for each, device in DEVICES.items()}
    if not isinstance(name, str) or name.lower() not in by_name:
        others = "" if option.startswith("-") else ", a Device, or None for the current GPU"
        raise ValueError(f"{option} is {shown(name)}; expected one of {', '.join(DEVICES)}{others}")
    return by_name[name.lower()]


def use_tiles(path: str | Path | None) -> None:
    """Use the tiles of a file that `python -m cupynorm tune` wrote, for the rest of this process.

    Examples:
        >>> cupynorm.use_tiles(None)
        >>> cupynorm.plan(4096, device="H200").strategy
        'block'

    path: a .csv of ranges of widths, for all GPUs of this machine, or for any device without a GPU;
        docs/dispatch.md has its columns. None removes the file in use.

    Other problems, and calls whose Launch has a strategy or a tile, keep theirs. Results keep their
    error bounds; their last bits may differ. Do not call it while another thread is in a call of
    this library. A captured CUDA graph and a recorded autograd graph keep their tiles.

    Raises TypeError or ValueError, without a change, for what is no such file.
    """
    rows = None
    if path is not None:
        if not isinstance(path, (str, Path)):
            raise TypeError(f"path is {shown(path)}; expected that of a .csv, or None")
        path = Path(path)
        try:
            rows = read_rows(path)
        except (KeyError, TypeError, ValueError, OSError) as error:
            name = type(error).__name__
            raise ValueError(
                f"path is {str(path)!r}, which is no file of tiles: {name}: {error}; expected one "
                "that python -m cupynorm tune wrote"
            ) from error
        if not rows:
            raise ValueError(f"{path} has no rows; expected those that tune writes")
    use_rows(rows, "" if path is None else path.name, present() or None)
    choose.cache_clear()
    forget()


def present() -> list[Device]:
    """The GPUs of this machine; none without CuPy."""
    try:
        return [launch.device(index) for index in range(nvrtc.cupy().cuda.runtime.getDeviceCount())]
    except Exception:  # a missing library, driver or GPU raises different errors
        return []


# The command.


def add_to(commands: Commands, current: Callable[[], Device | None]) -> None:
    """Adds the parser of `plan`. current: returns the Device of the GPU, None if there is none."""
    about = "Show which kernel, tile and grid a problem gets, and why. Needs no GPU."
    help = "show which kernel, tile and grid a problem gets, and why"
    parser = commands.add_parser("plan", help=help, description=about)
    parser.set_defaults(run=lambda arguments: run(arguments, current))
    parser.add_argument("num_cols", metavar="NUM_COLS", type=number, nargs="?")
    add = parser.add_argument_group("the problem").add_argument
    add("--rows", type=number, default=4096, help="num_rows (4096)")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of all tensors (bfloat16)")
    add("--norm", choices=NORMS, default=NORMS[0], help="(layer_norm)")
    add("--direction", choices=(*DIRECTIONS, "both"), help="(both; for a y of 8 bits, forward)")
    add("--scale", choices=SCALINGS, help="of a y of 8 bits (given)")
    add("--out-dtype", choices=tuple(ELEMENTS), help="of y and dy (that of x)")
    amax = "record the largest |y| with a given scale, as delayed scaling does"
    add("--amax", action="store_true", help=amax)
    residual = "add a residual and return the sum; backward adds the gradient of the sum"
    add("--residual", action="store_true", help=residual)
    linear = "also say what computes the norm and a linear layer of OUT_FEATURES outputs after it"
    add("--linear", metavar="OUT_FEATURES", type=number, help=linear)
    add = parser.add_argument_group("the device and the choice").add_argument
    device = f"one of {', '.join(DEVICES)} (this GPU; without one, {WITHOUT_GPU})"
    add("--device", metavar="NAME", help=device)
    add("--tiles", metavar="FILE", help="a file of tiles, as cupynorm.use_tiles reads it")
    add("--strategy", choices=tuple(STRATEGIES), help="by default the width of a row decides")
    add("--sm-margin", type=number, default=0, help="multiprocessors to leave free (0)")
    table = "print the widest row of each strategy instead"
    add("--table", action="store_true", help=table)


_OPTIONS = ("dtype", "norm", "out_dtype", "scale", "amax", "residual", "strategy", "sm_margin")


def run(arguments: argparse.Namespace, current: Callable[[], Device | None]) -> int:
    """Prints plans or the table of strategies. Raises ValueError for options that do not fit."""
    if not arguments.table and arguments.num_cols is None:
        raise ValueError("plan has no number of columns; expected one, or --table")
    device = current() if arguments.device is None else _named("--device", arguments.device)
    if device is None:
        print(f"No GPU was found: planned for an {WITHOUT_GPU}. --device names another.\n")
        device = DEVICES[WITHOUT_GPU]
    if arguments.tiles:
        use_tiles(arguments.tiles)
    if arguments.table:
        print(strategy_table(device))
        return 0
    is_quantized = arguments.out_dtype in EIGHT_BITS
    direction = arguments.direction or ("forward" if is_quantized else "both")
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    options["bias_dtype"] = "same" if arguments.norm == "layer_norm" else None
    sizes = arguments.num_cols, arguments.rows
    plans = [
        plan(*sizes, direction=each, device=device, **options)
        for each in (DIRECTIONS if direction == "both" else (direction,))
    ]
    print("\n\n".join(map(str, plans)))
    if arguments.linear is not None:
        print(f"\n{with_linear_layer(arguments, device)}")
    return 0


def with_linear_layer(arguments: argparse.Namespace, device: Device) -> str:
    """What computes the norm and a linear layer after it, of parameters of the same dtype."""
    centered = arguments.norm == "layer_norm"
    sizes, dtype = (arguments.rows, arguments.num_cols, arguments.linear), arguments.dtype
    bias = dtype if centered else None
    problem = NormLinearProblem(*sizes, dtype, dtype, bias, centered, False)
    chosen = choose_product(
        device, problem, residual=arguments.residual, sm_margin=arguments.sm_margin
    )
    what = "one kernel" if chosen.takes_kernel else "a norm and a product after it"
    return f"with a linear layer of {arguments.linear} outputs: {what}, because {chosen.reason}"


def strategy_table(device: Device) -> str:
    """The dispatch table of a device: the widest row of each strategy, by dtype and direction."""
    rows = [["dtype", "direction", *STRATEGIES]]
    for dtype in DTYPES:
        for direction in DIRECTIONS:
            problem = plan(4096, dtype=dtype, device=device, direction=direction).problem
            cols = {name: widest(name, problem, device) for name in STRATEGIES}
            shown = ["-" if each is None else f"{each:,}" for each in cols.values()]
            rows.append([dtype, direction, *shown[:-1], "any"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        f"{device.name}, {device.num_sms} multiprocessors, sm_{device.compute_capability}: the "
        "most columns of a row"
    ]
    for row in rows:
        names = [f"{text:<{width}}" for text, width in zip(row[:2], widths)]
        numbers = [f"{text:>{width}}" for text, width in zip(row[2:], widths[2:])]
        lines.append("  ".join([*names, *numbers]))
    lines.append("The first strategy that is wide enough is chosen, unless a later one is faster.")
    lines.append("Where it keeps a row:")
    width = max(map(len, STRATEGIES))
    lines += [f"  {row.name:<{width}}  {row.kept_in}" for row in STRATEGIES.values()]
    return "\n".join(lines)
