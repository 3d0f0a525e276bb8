"""`python -m cupynorm plan`: which kernel, tile and grid a problem gets, on any known device."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..command_line import Commands, number
from ..dtypes import DTYPES, EIGHT_BITS, ELEMENTS
from ..plan.devices import DEVICES, Device
from ..plan.dispatch import widest
from ..plan.problem import DIRECTIONS, NORMS, SCALINGS
from ..plan.product_plan import NormLinearProblem, choose
from ..plan.strategies import STRATEGIES
from .plans import WITHOUT_GPU, plan
from .plans import device_of as named_device


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
    add_results(add)
    linear = "also say what computes the norm and a linear layer of OUT_FEATURES outputs after it"
    add("--linear", metavar="OUT_FEATURES", type=number, help=linear)
    add = parser.add_argument_group("the device and the choice").add_argument
    device = f"one of {', '.join(DEVICES)} (this GPU; without one, {WITHOUT_GPU})"
    add("--device", metavar="NAME", help=device)
    add("--strategy", choices=tuple(STRATEGIES), help="by default the width of a row decides")
    add("--sm-margin", type=number, default=0, help="multiprocessors to leave free (0)")
    table = "print the widest row of each strategy instead"
    add("--table", action="store_true", help=table)


def add_results(add: Callable) -> None:
    """Adds the options of y and the sum that `bench` has too."""
    add("--out-dtype", choices=tuple(ELEMENTS), help="of y and dy (that of x)")
    amax = "record the largest |y| with a given scale, as delayed scaling does"
    add("--amax", action="store_true", help=amax)
    residual = "add a residual and return the sum; backward adds the gradient of the sum"
    add("--residual", action="store_true", help=residual)


def run(arguments: argparse.Namespace, current: Callable[[], Device | None]) -> int:
    """Prints plans or the table of strategies. Raises ValueError for options that do not fit."""
    if not arguments.table and arguments.num_cols is None:
        raise ValueError("plan has no number of columns; expected one, or --table")
    device = device_of(arguments.device, current)
    if arguments.table:
        print(strategy_table(device))
        return 0
    is_quantized = arguments.out_dtype in EIGHT_BITS
    direction = arguments.direction or ("forward" if is_quantized else "both")
    plans = [
        plan(
            arguments.num_cols,
            arguments.rows,
            arguments.dtype,
            norm=arguments.norm,
            direction=each,
            device=device,
            bias_dtype="same" if arguments.norm == "layer_norm" else None,
            out_dtype=arguments.out_dtype,
            scale=arguments.scale,
            amax=arguments.amax,
            residual=arguments.residual,
            strategy=arguments.strategy,
            sm_margin=arguments.sm_margin,
        )
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
    chosen = choose(device, problem, residual=arguments.residual, sm_margin=arguments.sm_margin)
    what = "one kernel" if chosen.takes_kernel else "a norm and a product after it"
    return f"with a linear layer of {arguments.linear} outputs: {what}, because {chosen.reason}"


def device_of(name: str | None, current: Callable[[], Device | None]) -> Device:
    """The device of this name. Without a name the GPU, else the default, which it prints."""
    if name is None:
        present = current()
        if present is None:
            print(f"No GPU was found: planned for an {WITHOUT_GPU}. --device names another.\n")
        return present or DEVICES[WITHOUT_GPU]
    if name.lower() not in map(str.lower, DEVICES):
        raise ValueError(f"--device is {name}; expected one of {', '.join(DEVICES)}")
    return named_device(name)


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
