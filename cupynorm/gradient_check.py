"""The gradient check: kernels, or any callable like layer_norm, against float64, in units of the error that the dtypes allow.

What is allowed, element by element, with u the rounding error of the arithmetic (2^-24; 2^-53 for float64), h(v) half a unit in
the last place of the output dtype at v, n = num_cols and g = u * (4 + sqrt(n)): a sum of n rounded terms errs like a random
walk.

    x_hat    e = g * a * (1 + |x_hat|) + m + m^2 * |x_hat|
             a = max(1, var / |var + eps|) is what a negative eps takes from rstd. m is what the rounding of the mean takes: in
             backward u * |mean| * rstd, in forward nothing; with welford, whose mean errs more, g * |mean| * rstd in both.
    y        |w| * e + 2u * (|x_hat * w| + |bias|) + h(y)     round_x_hat: |w| * h(x_hat) more, in the input's dtype
    memory_efficient, where backward has x_hat from y: e of backward is what is allowed of y over max(|w|, t), and
             |x_hat| * (max(0, 1 - |w| / t) + 2u), with t half a unit in the last place of 1 in y's dtype; of dweight
             sum |dy * e|
    mean     u * |mean| + g * mean(|x - mean|)                  welford: g * |mean| in place of u * |mean|
    rstd     rstd * (g * a + u + m^2)                           m of forward
    dx       rstd * (4u * |wdy| + g * mean(|wdy|) + |x_hat| * (g * mean(|wdy * x_hat|) + mean(|wdy| * e))
             + e * (|mean(wdy * x_hat)| + mean(|wdy| * e))) + g * a * |dx| + h(dx)
    dweight  2 * sqrt(sum (dy * e)^2) + s(dy * x_hat) + h(dweight)
    dbias    s(dy) + h(dbias)          s(t) = u * (4 + sqrt(num_rows)) * max(|sum t|, sqrt(num_rows) * rms(t)): sums over rows

    sum      exact; where x is scaled, or the sum has its own dtype: 4u * |scaled x| + u * |sum| + h(sum), less what does not
             apply. All else is then judged as of the very sum that came out
    dresidual  as dx, of which dx is then scaled, and 4u * |dx| more; u * |dresidual| more where dsum is added
    recomputed, y as backward writes it again: as y, with e of backward
    y1       as y, with its own dweight1 and dbias1; what it brings to dx is allowed as dx of its own, and 2u * |dx| to add it

For float64 all of it twice: the reference then errs as much as what it judges.

A NaN must be a NaN, an infinity the same infinity. Below the smallest normal float32 the GPU's arithmetic may flush to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from . import arrays, calls, launch, nvrtc, on_cpu, reference
from .arrays import Rows
from .devices import DEVICES, Device
from .dispatch import Kernel, Launch
from .dtypes import DTYPES, compute_dtype, decode, encode
from .problem import Tile
from .reference.layer_norm import scale

NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class Case:
    """One problem to check. None: absent (dtypes) or left to the width (strategy, tile, statistics).

    residual: whether there is one, of the sum's dtype, or its dtype. row_scale: its dtype.
    dsum: whether a gradient reaches the sum.
    weight1, bias1: the dtypes of those of a second output. recompute: whether backward writes y again.
    """

    norm: str
    num_rows: int
    num_cols: int
    x: str
    y: str | None = None
    weight: str | None = "same"
    bias: str | None = "same"
    strategy: str | None = None
    tile: Tile | None = None
    statistics: str | None = None
    zero_centered_weight: bool = False
    residual: bool | str = False
    eps: float = 1e-5
    sm_margin: int = 0
    residual_dtype: str | None = None
    row_scale: str | None = None
    dropout_p: float = 0.0
    dsum: bool = False
    weight1: str | None = None
    bias1: str | None = None
    round_x_hat: bool = False
    memory_efficient: bool = False
    recompute: bool = False

    def dtype(self, name: str) -> str | None:
        value = getattr(self, name)
        return self.x if value == "same" or (name == "y" and value is None) else value

    @property
    def sum(self) -> str:
        """The dtype of what is normalised."""
        return self.residual_dtype or self.x

    @property
    def added(self) -> str | None:
        """The dtype of the residual."""
        return self.residual if isinstance(self.residual, str) else self.sum if self.residual else None

    @property
    def has_own_sum(self) -> bool:
        """Whether the row is more than x, or x and a residual of one dtype."""
        return self.is_scaled or {self.sum, self.added or self.x} != {self.x}

    @property
    def has_second(self) -> bool:
        return self.weight1 is not None or self.bias1 is not None

    @property
    def is_scaled(self) -> bool:
        return self.row_scale is not None or self.dropout_p > 0

    def __str__(self) -> str:
        extras = [self.dtype("y") if self.dtype("y") != self.x else "", self.strategy or "", self.statistics or ""]
        extras += [f"residual {self.added}" if self.residual else "", "1 + weight" if self.zero_centered_weight else ""]
        extras += [f"sum {self.sum}" if self.residual_dtype else "", "dsum" if self.dsum else ""]
        extras += [f"{name} {getattr(self, name)}" for name in ("weight1", "bias1") if getattr(self, name)]
        extras += [
            f"row_scale {self.row_scale}" if self.row_scale else "",
            f"dropout {self.dropout_p}" if self.dropout_p else "",
            "recomputed" if self.recompute else "",
        ]
        return " ".join(filter(None, [self.norm, f"{self.num_rows} x {self.num_cols}", self.x, *extras]))


@dataclass(frozen=True)
class Finding:
    """The worst element of one tensor of one case. error: |got - expected| / allowed, NaN where the kinds differ."""

    case: str
    tensor: str
    error: float
    where: tuple[int, ...]
    got: float
    expected: float
    allowed: float
    num_off: int

    @property
    def ok(self) -> bool:
        return self.num_off == 0


@dataclass
class CheckResult:
    """Findings of a check; true if every element of every tensor is within what is allowed. Prints as a table."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        header = ("case", "tensor", "error", "where", "got", "expected", "allowed", "verdict")
        table = [header]
        for found in self.findings:
            verdict = "ok" if found.ok else f"OFF: {found.num_off} elements"
            where = ",".join(map(str, found.where)) or "-"
            numbers = (f"{found.got:.6g}", f"{found.expected:.6g}", f"{found.allowed:.2g}")
            table.append((found.case, found.tensor, f"{found.error:.3f}", where, *numbers, verdict))
        widths = [max(len(line[at]) for line in table) for at in range(len(header))]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in table]
        num_off = sum(not found.ok for found in self.findings)
        verdict = "all within what their dtypes allow" if not num_off else f"{num_off} off"
        lines.append(f"{len(self.findings)} tensors checked, {verdict}; error is in units of what is allowed")
        return "\n".join(lines)

    def summary(self) -> str:
        """One line for each tensor name: its worst finding over all cases."""
        worst: dict[str, Finding] = {}
        for found in self.findings:
            known = worst.get(found.tensor)
            if known is None or (not found.ok, found.error) > (not known.ok, known.error):
                worst[found.tensor] = found
        lines = str(CheckResult(list(worst.values()))).splitlines()
        num_off = sum(not found.ok for found in self.findings)
        lines[-1] = f"{len(self.findings)} tensors checked, {num_off} off; shown is the worst of each name"
        return "\n".join(lines)


# Where kernels run.


class CpuMachine:
    """Runs the kernels on the CPU as they would be planned for `device`. Arrays are NumPy's, in storage dtypes."""

    def __init__(self, device: Device = DEVICES["H200"], seed: int = 0, sanitize: tuple[str, ...] = ()) -> None:
        self.device = device
        self.seed = seed
        self.sanitize = sanitize

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, int]:
        array = np.empty(shape, DTYPES[dtype].storage)
        array.view(np.uint8).reshape(-1)[...] = 0xFF if array.size else 0
        return array, array.ctypes.data

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        array = np.ascontiguousarray(array)
        return array, array.ctypes.data

    def get(self, array: np.ndarray) -> np.ndarray:
        return array

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        instance = _cpu_kernel(kernel_launch.kernel, self.sanitize)
        instance.launch(
            kernel_launch.grid_size, kernel_launch.block_size, launch.pack(words), smem_bytes=kernel_launch.smem_bytes,
            cluster_size=kernel_launch.cluster_size, seed=self.seed,
        )  # fmt: skip


@cache
def _cpu_kernel(kernel: Kernel, sanitize: tuple[str, ...]) -> on_cpu.CpuKernel:
    return on_cpu.kernel(kernel.source, kernel.name_expression, sanitize=sanitize)


class GpuCheckMachine:
    """Runs the kernels on a GPU. Arrays are CuPy's, in storage dtypes, filled with NaN."""

    def __init__(self, device_index: int = 0) -> None:
        self.device_index = device_index
        self.device = launch.device(device_index)

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
        cupy = nvrtc.cupy()
        with cupy.cuda.Device(self.device_index):
            array = cupy.empty(shape, DTYPES[dtype].storage)
            if array.size:
                array.view(cupy.uint8).fill(0xFF)
        return array, array.data.ptr

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        cupy = nvrtc.cupy()
        with cupy.cuda.Device(self.device_index):
            there = cupy.asarray(array)
        return there, there.data.ptr

    def get(self, array: Any) -> np.ndarray:
        return array.get()

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        cupy = nvrtc.cupy()
        with cupy.cuda.Device(self.device_index):
            stream = cupy.cuda.get_current_stream().ptr
        launch.run(kernel_launch, self.device_index, stream, words)


def has_gpu() -> bool:
    """Whether CuPy is installed and finds a device."""
    try:
        return nvrtc.cupy().cuda.runtime.getDeviceCount() > 0
    except Exception:
        return False


def machine(on: str | None = None) -> CpuMachine | GpuCheckMachine:
    """on: "gpu", "cpu", or None for a GPU if there is one."""
    if on not in (None, "gpu", "cpu"):
        raise ValueError(f"on is {on!r}; expected 'gpu', 'cpu' or None for a GPU if there is one")
    if on == "cpu" or (on is None and not has_gpu()):
        return CpuMachine()
    nvrtc.cupy()  # without it: says what to install
    if not has_gpu():
        raise ValueError("on is 'gpu', and CuPy finds none; use on='cpu' to run the same kernels on the CPU")
    return GpuCheckMachine()


# What is computed: by the kernels, by the reference, by a callable.


@dataclass
class Problem:
    """float64 values of one case's tensors, each exactly representable in its dtype."""

    case: Case
    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray | None
    bias: np.ndarray | None
    residual: np.ndarray | None = None
    row_scale: np.ndarray | None = None
    dsum: np.ndarray | None = None
    dropout_seed: int = -0x123456789ABCDEF
    weight1: np.ndarray | None = None
    bias1: np.ndarray | None = None
    dy1: np.ndarray | None = None

    def scaled(self, of: np.ndarray) -> np.ndarray:
        """As x before the residual is added, and as the gradient of the sum on its way to x."""
        return reference.scaled(of, self.row_scale, self.case.dropout_p, self.dropout_seed)


def random_problem(case: Case, seed: int = 0) -> Problem:
    """Fresh random values, rows of different mean and spread."""
    generator = np.random.default_rng([seed, case.num_rows, case.num_cols])

    def draw(shape: tuple[int, ...], dtype: str | None, center: object = 0.0, spread: object = 1.0) -> np.ndarray | None:
        if dtype is None:
            return None
        return decode(encode(generator.standard_normal(shape) * spread + center, dtype), dtype)

    shape = (case.num_rows, case.num_cols)
    centers = generator.uniform(-2, 2, (case.num_rows, 1))
    spreads = generator.uniform(0.25, 4, (case.num_rows, 1))
    x = draw(shape, case.x, centers, spreads)
    dy = draw(shape, case.dtype("y"))
    weight = draw(shape[1:], case.dtype("weight"), 0.0 if case.zero_centered_weight else 1.0, 0.5)
    bias = draw(shape[1:], case.dtype("bias"))
    residual = draw(shape, case.added)
    row_scale = draw(shape[:1], case.row_scale, 1.0)
    problem = Problem(case, x, dy, weight, bias, residual, row_scale, draw(shape, case.sum) if case.dsum else None)
    problem.weight1 = draw(shape[1:], case.weight1, 0.0 if case.zero_centered_weight else 1.0, 0.5)
    problem.bias1 = draw(shape[1:], case.bias1)
    problem.dy1 = draw(shape, case.dtype("y") if case.has_second else None)
    return problem


def run_kernels(problem: Problem, where: CpuMachine | GpuCheckMachine) -> dict[str, np.ndarray]:
    """y, mean, rstd, dx, dweight, dbias of the kernels, as float64, and sum and dresidual; outputs are NaN before they run."""
    case = problem.case
    shape = (case.num_rows, case.num_cols)
    centered = case.norm == "layer_norm"
    compute = compute_dtype(case.sum).name
    kept = []  # arrays must outlive the launches that use their addresses

    def put(values: np.ndarray | None, dtype: str | None) -> int:
        if values is None:
            return 0
        array, pointer = where.put(encode(values, dtype))
        kept.append(array)
        return pointer

    def as_rows(pointer: int, dtype: str) -> Rows:
        return Rows(pointer, case.num_rows, case.num_cols, case.num_cols, dtype)

    outputs: dict[str, tuple[Any, str]] = {}

    def make(name: str, shape: tuple[int, ...], dtype: str) -> int:
        array, pointer = where.empty(shape, dtype)
        outputs[name] = (array, dtype)
        return pointer

    options = calls.Options(case.strategy, case.tile, case.statistics, case.sm_margin)
    weight = (put(problem.weight, case.dtype("weight")), case.dtype("weight")) if problem.weight is not None else None
    bias = (put(problem.bias, case.dtype("bias")), case.dtype("bias")) if problem.bias is not None else None
    x = as_rows(put(problem.x, case.x), case.x)
    residual = added = None
    if problem.residual is not None:
        residual = as_rows(put(problem.residual, case.added), case.added)
    if problem.residual is not None or case.has_own_sum:
        added = as_rows(make("sum", shape, case.sum), case.sum)
    row_scale = (put(problem.row_scale, case.row_scale), case.row_scale) if case.row_scale else None
    weight1 = (put(problem.weight1, case.weight1), case.weight1) if case.weight1 else None
    bias1 = (put(problem.bias1, case.bias1), case.bias1) if case.bias1 else None
    y1 = as_rows(make("y1", shape, case.dtype("y")), case.dtype("y")) if case.has_second else None
    dropout = calls.NO_DROPOUT
    if case.dropout_p:
        # Of two equal seeds the kernels are given one by value, the other by its address.
        seed_at, array = where.put(np.array([problem.dropout_seed]))[::-1]
        kept.append(array)
        dropout = calls.Dropout(case.dropout_p, seed_at, 0)
    y = as_rows(make("y", shape, case.dtype("y")), case.dtype("y"))
    mean = make("mean", shape[:1], compute) if centered else 0
    rstd = make("rstd", shape[:1], compute)
    calls.run_forward(
        where, centered, x, y, weight, bias, mean, rstd, case.eps, case.zero_centered_weight, residual, added, options,
        row_scale=row_scale, dropout=dropout, y1=y1, weight1=weight1, bias1=bias1, round_x_hat=case.round_x_hat,
    )  # fmt: skip

    dy = as_rows(put(problem.dy, case.dtype("y")), case.dtype("y"))
    dx = as_rows(make("dx", shape, case.x), case.x)
    dweight = (make("dweight", shape[1:], weight[1]), weight[1]) if weight else None
    dbias = (make("dbias", shape[1:], bias[1]), bias[1]) if bias else None
    # What backward knows of the row: the row, or y.
    row, of_y = added or x, None
    if case.memory_efficient:
        row, of_y = y, calls.OfY(weight, bias, compute)
    dresidual = dsum = None
    if residual and case.has_own_sum:
        dresidual = as_rows(make("dresidual", shape, case.added), case.added)
    if problem.dsum is not None:
        dsum = as_rows(put(problem.dsum, case.sum), case.sum)
    if case.dropout_p:
        dropout = calls.Dropout(case.dropout_p, 0, problem.dropout_seed)
    if case.has_second:
        # What the second output brings comes first, and goes on in the arithmetic's dtype.
        dy1 = as_rows(put(problem.dy1, case.dtype("y")), case.dtype("y"))
        array, pointer = where.empty(shape, compute)
        kept.append(array)
        calls.run_backward(
            where, centered, row, dy1, mean, rstd, weight1, case.zero_centered_weight, as_rows(pointer, compute),
            (make("dweight1", shape[1:], case.weight1), case.weight1) if weight1 else None,
            (make("dbias1", shape[1:], case.bias1), case.bias1) if bias1 else None, dsum, options._replace(tile=None),
            of_y=of_y,
        )  # fmt: skip
        dsum = as_rows(pointer, compute)
    recomputed = None
    if case.recompute:
        recomputed = calls.Recomputed(as_rows(make("recomputed", shape, case.dtype("y")), case.dtype("y")), bias)
    calls.run_backward(
        where, centered, row, dy, mean, rstd, weight, case.zero_centered_weight, dx, dweight, dbias, dsum,
        options._replace(tile=None), dresidual=dresidual, row_scale=row_scale, dropout=dropout, of_y=of_y,
        recomputed=recomputed,
    )  # fmt: skip
    return {name: decode(where.get(array), dtype) for name, (array, dtype) in outputs.items()}


def run_callable(function: Callable, problem: Problem) -> dict[str, np.ndarray]:
    """y and, if torch is installed, the gradients of function(input, normalized_shape, weight, bias, eps)."""
    case = problem.case
    try:
        import torch
    except ImportError:
        given = [
            None if values is None else arrays.from_float64(values, dtype, np.empty(0))
            for values, dtype in (
                (problem.x, case.x),
                (problem.weight, case.dtype("weight")),
                (problem.bias, case.dtype("bias")),
            )
        ]
        return {"y": arrays.to_float64(function(given[0], (case.num_cols,), given[1], given[2], case.eps))}
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensor(values: np.ndarray | None, dtype: str | None) -> Any:
        if values is None:
            return None
        return arrays.from_float64(values, dtype, torch.empty(0)).to(device).requires_grad_(True)

    x, weight, bias = (
        tensor(problem.x, case.x),
        tensor(problem.weight, case.dtype("weight")),
        tensor(problem.bias, case.dtype("bias")),
    )
    y = function(x, (case.num_cols,), weight, bias, case.eps)
    wanted = {"dx": x, "dweight": weight, "dbias": bias}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    dy = torch.from_numpy(problem.dy).to(device=device, dtype=y.dtype)
    gradients = torch.autograd.grad(y, list(wanted.values()), dy)
    results = {"y": y, **dict(zip(wanted, gradients))}
    return {name: value.detach().double().cpu().numpy() for name, value in results.items()}


def expect(
    problem: Problem, *, rounded_mean: bool = False, added: np.ndarray | None = None, e_backward: np.ndarray | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """float64 truth and what is allowed, for each tensor: formulas in this module's docstring.

    rounded_mean: allow forward the rounding of its mean, as for welford and for other people's kernels. added: the sum that
    came out, of a case that has its own; without it, the sum that is rounded once. e_backward: what backward's x_hat may err,
    if not as above.
    """
    case = problem.case
    centered = case.norm == "layer_norm"
    scaled_x = problem.scaled(problem.x)
    exact_sum = scaled_x if problem.residual is None else scaled_x + problem.residual
    x = added if added is not None and case.has_own_sum else decode(encode(exact_sum, case.sum), case.sum)
    forward = (reference.layer_norm if centered else reference.rms_norm)(
        x, problem.weight, problem.bias, case.eps, zero_centered_weight=case.zero_centered_weight
    )
    rstd = forward.rstd
    mean = forward.mean if centered else np.zeros(case.num_rows)
    if centered:
        gradients = reference.layer_norm_backward(
            problem.dy, x, mean, rstd, problem.weight, zero_centered_weight=case.zero_centered_weight
        )
    else:
        gradients = reference.rms_norm_backward(
            problem.dy, x, rstd, problem.weight, zero_centered_weight=case.zero_centered_weight
        )

    u = compute_dtype(case.sum).half_ulp
    g = u * (4 + np.sqrt(case.num_cols))

    def half_ulp(values: np.ndarray, dtype: str) -> np.ndarray:
        kind = DTYPES[dtype]
        floor = kind.smallest / 2 if dtype in ("float16", "float64") else 2.0**-126  # float32's subnormals may be flushed
        return np.maximum(np.abs(values) * kind.half_ulp, floor)

    with np.errstate(all="ignore"):
        columns = rstd[:, None]
        centered_x = x - mean[:, None]
        x_hat = centered_x * columns
        amplified = np.fmax(1.0, np.abs((centered_x**2).mean(axis=1) * rstd**2))[:, None]
        # What the rounding of the mean does to x_hat, and its square to rstd.
        of_mean = (g if rounded_mean else u) * np.abs(mean)[:, None] * columns
        e_usual = g * amplified * (1 + np.abs(x_hat)) + of_mean + of_mean**2 * np.abs(x_hat)
        e = e_usual if rounded_mean else g * amplified * (1 + np.abs(x_hat))
        if case.round_x_hat:
            e = e + half_ulp(x_hat, case.x)
        w = np.broadcast_to(scale(problem.weight, case.zero_centered_weight), (case.num_cols,))
        has_y_alone = case.memory_efficient or e_backward is not None
        if e_backward is None:
            e_backward = e_usual
        if case.memory_efficient:
            # x_hat is what y tells of it.
            least = DTYPES[case.dtype("y")].half_ulp
            of_y = np.abs(w) * e + 2 * u * (np.abs(x_hat * w) + np.abs(problem.bias if problem.bias is not None else 0.0))
            of_y = of_y + half_ulp(forward.y, case.dtype("y"))
            e_backward = of_y / np.maximum(np.abs(w), least) + np.abs(x_hat) * (np.maximum(0.0, 1 - np.abs(w) / least) + 2 * u)
        b = np.zeros(case.num_cols) if problem.bias is None else problem.bias
        wdy = problem.dy * w
        mean_wdy_x_hat = (wdy * x_hat).mean(axis=1, keepdims=True)
        dx_allowed = columns * (
            4 * u * np.abs(wdy)
            + g * np.abs(wdy).mean(axis=1, keepdims=True)
            + np.abs(x_hat)
            * (g * np.abs(wdy * x_hat).mean(axis=1, keepdims=True) + (np.abs(wdy) * e_backward).mean(axis=1, keepdims=True))
            + e_backward * (np.abs(mean_wdy_x_hat) + (np.abs(wdy) * e_backward).mean(axis=1, keepdims=True))
        )
        dx_allowed = dx_allowed + g * amplified * np.abs(gradients.dx)
        dx = gradients.dx
        if problem.dsum is not None:
            dx = dx + problem.dsum
            dx_allowed = dx_allowed + u * np.abs(dx)
        second = {}
        if case.has_second:
            # As another output of the row that was normalised, whose dx, rounded to the arithmetic's dtype,
            # is added to this one's.
            alone = replace(
                case, x=compute_dtype(case.sum).name, y=case.dtype("y"), weight=case.weight1, bias=case.bias1, weight1=None,
                bias1=None, residual=False, residual_dtype=None, row_scale=None, dropout_p=0.0, dsum=False, round_x_hat=False,
                memory_efficient=False, recompute=False,
            )  # fmt: skip
            second = expect(
                Problem(alone, x, problem.dy1, problem.weight1, problem.bias1), rounded_mean=rounded_mean, e_backward=e_backward
            )
            if case.round_x_hat:
                w1 = np.abs(scale(problem.weight1, case.zero_centered_weight))
                second["y"] = second["y"][0], second["y"][1] + w1 * half_ulp(x_hat, case.x)
            dx = dx + second["dx"][0]
            dx_allowed = dx_allowed + second["dx"][1] + 2 * u * np.abs(dx)
        dresidual, dresidual_allowed = dx, dx_allowed
        if case.is_scaled:
            dx = problem.scaled(dresidual)
            dx_allowed = np.abs(problem.scaled(dresidual_allowed)) + 4 * u * np.abs(dx)

        def of_sum(terms: np.ndarray) -> np.ndarray:
            num_rows = max(1, case.num_rows)
            size = np.maximum(np.abs(terms.sum(axis=0)), np.sqrt((terms**2).sum(axis=0)))
            return u * (4 + np.sqrt(num_rows)) * size

        of_affine = 2 * u * (np.abs(x_hat * w) + np.abs(b)) + half_ulp(forward.y, case.dtype("y"))
        expected = {
            "y": (forward.y, np.abs(w) * e + of_affine),
            "rstd": (rstd, rstd * (g * amplified[:, 0] + u + (of_mean[:, 0] ** 2 if rounded_mean else 0.0))),
            "dx": (dx, dx_allowed + half_ulp(dx, case.x)),
        }
        if case.recompute:
            expected["recomputed"] = (forward.y, np.abs(w) * e_usual + of_affine)
        if centered:
            of_rounding = (g if rounded_mean else u) * np.abs(mean)
            spread = g * np.abs(centered_x).mean(axis=1)
            expected["mean"] = (mean, of_rounding + spread + half_ulp(mean, compute_dtype(case.sum).name))
        if problem.weight is not None:
            off = np.abs(problem.dy * e_backward)
            allowed = off.sum(axis=0) if has_y_alone else 2 * np.sqrt((off**2).sum(axis=0))
            allowed = allowed + of_sum(problem.dy * x_hat)
            expected["dweight"] = (gradients.dweight, allowed + half_ulp(gradients.dweight, case.dtype("weight")))
        if problem.bias is not None:
            allowed = of_sum(problem.dy) + half_ulp(gradients.dbias, case.dtype("bias"))
            expected["dbias"] = (gradients.dbias, allowed)
        expected |= {f"{name}1": second[name] for name in ("y", "dweight", "dbias") if name in second}
        if case.has_own_sum:
            wide = max((compute_dtype(name) for name in (case.x, case.sum, case.added) if name), key=lambda kind: kind.digits)
            allowed = half_ulp(exact_sum, case.sum)
            if case.is_scaled:
                allowed = allowed + 4 * wide.half_ulp * np.abs(scaled_x)
            if case.is_scaled or case.sum != wide.name:
                allowed = allowed + wide.half_ulp * np.abs(exact_sum)
            expected["sum"] = (exact_sum, allowed)
            if problem.residual is not None:
                expected["dresidual"] = (dresidual, dresidual_allowed + half_ulp(dresidual, case.added))
        elif problem.residual is not None:
            expected["sum"] = (x, np.zeros_like(x) + np.finfo(np.float64).tiny)
    if compute_dtype(case.sum).name == "float64":  # the reference errs as much as the kernels
        expected = {name: (values, 2 * allowed) for name, (values, allowed) in expected.items()}
    return expected


def judge(
    case: object, tensor: str, got: np.ndarray, expected: np.ndarray, allowed: np.ndarray, largest: float = np.inf
) -> Finding:
    """The worst element of one tensor. largest: the output dtype's, beyond which infinity is right too."""
    if got.shape != expected.shape:
        raise ValueError(f"{tensor} of {case} has shape {got.shape}; expected {expected.shape}")
    if not got.size:
        return Finding(str(case), tensor, 0.0, (), 0.0, 0.0, 0.0, 0)
    with np.errstate(all="ignore"):
        error = np.abs(got - expected) / allowed
        same = (np.isnan(got) & np.isnan(expected)) | (got == expected)
        overflown = np.isinf(got) & (np.sign(got) == np.sign(expected)) & (np.abs(expected) * (1 + 2.0**-9) >= largest)
        error = np.where(same | overflown, 0.0, error)
        off = ~(error <= 1.0)
    order = np.where(off, np.where(np.isfinite(error), error, np.inf), np.where(np.isnan(error), np.inf, error))
    at = np.unravel_index(int(np.argmax(order)), order.shape)
    where = tuple(int(index) for index in at)
    numbers = (float(values[at]) for values in (got, expected, allowed))
    return Finding(str(case), tensor, float(error[at]), where, *numbers, int(off.sum()))


def judge_all(problem: Problem, results: dict[str, np.ndarray], *, rounded_mean: bool = False) -> list[Finding]:
    case = problem.case
    dtypes = {"dx": case.x, "sum": case.sum, "dweight": case.dtype("weight"), "dbias": case.dtype("bias"), "y": case.dtype("y")}
    dtypes |= {"dresidual": case.added, "y1": case.dtype("y"), "dweight1": case.weight1, "dbias1": case.bias1}
    dtypes["recomputed"] = case.dtype("y")
    findings = []
    for name, (expected, allowed) in expect(problem, rounded_mean=rounded_mean, added=results.get("sum")).items():
        if name in results:
            largest = DTYPES[dtypes.get(name) or compute_dtype(case.sum).name].largest
            findings.append(judge(case, name, results[name], expected, allowed, largest))
    return findings


def check(
    input: Any = None,
    weight: Any = None,
    bias: Any = None,
    dy: Any = None,
    *,
    eps: float = 1e-5,
    norm: str | Sequence[str] = "layer_norm",
    function: Callable | None = None,
    shapes: Iterable[tuple[int, int]] = ((64, 768),),
    dtypes: Iterable[str] = ("float32",),
    strategies: Iterable[str | None] = (None,),
    statistics: Iterable[str | None] = (None,),
    zero_centered_weight: bool = False,
    on: str | None = None,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] | None = None,
) -> CheckResult:
    """Compare y, mean, rstd, dx, dweight and dbias with float64, in units of the error that the dtypes allow.

    Either of given arrays: input [..., num_cols] of any library, weight and bias [num_cols] or None, dy as input (random if
    None); or of random ones: every combination of shapes (num_rows, num_cols), dtypes, strategies and statistics, with weight
    and bias.
    norm: "layer_norm", "rms_norm" or both. function: judge this callable in place of the kernels; it is called as
    function(input, normalized_shape, weight, bias, eps) on torch tensors (on NumPy arrays without torch: y alone).
    on: "gpu" or "cpu" (the same kernels, run on the CPU), None for a GPU if there is one. seed: of the random
    values. progress: wraps the cases, as tqdm does.

    Returns a CheckResult: true if all is within bounds; prints as a table. What is allowed: the docstring of
    cupynorm.gradient_check. Raises ValueError for what a kernel call would refuse too.
    """
    norms = (norm,) if isinstance(norm, str) else tuple(norm)
    for name in norms:
        if name not in NORMS:
            raise ValueError(f"norm is {name!r}; expected {' or '.join(NORMS)}")
    if input is not None:
        problems = [_given(name, input, weight, bias, dy, eps, strategy, kind, zero_centered_weight, seed)
                    for name in norms for strategy in strategies for kind in statistics]  # fmt: skip
    else:
        problems = [
            random_problem(
                Case(
                    name, *shape, dtype, strategy=strategy, statistics=kind, zero_centered_weight=zero_centered_weight, eps=eps,
                ),
                seed,
            )
            for name in norms for shape in shapes for dtype in dtypes for strategy in strategies for kind in statistics
        ]  # fmt: skip
    result = CheckResult()
    if function is None:
        where = machine(on)
        if isinstance(where, CpuMachine):
            on_cpu.compiler()  # says what to install before anything else happens
    for problem in progress(problems) if progress else problems:
        if function is not None:
            result.findings += judge_all(problem, run_callable(function, problem), rounded_mean=True)
        else:
            # uncached forms its statistics by welford unless told otherwise
            welford = problem.case.statistics == "welford" or uses_welford(problem.case, where.device)
            result.findings += judge_all(problem, run_kernels(problem, where), rounded_mean=welford)
    return result


def uses_welford(case: Case, device: Device) -> bool:
    from . import dispatch

    own_sum = {}
    if case.has_own_sum:
        own_sum = {"input": case.x, "residual_dtype": case.added, "row_scale": case.row_scale, "dropout": case.dropout_p > 0}
    if case.has_second:
        own_sum |= {"y1": case.dtype("y"), "weight1": case.weight1, "bias1": case.bias1}
    problem = dispatch.Problem(
        "forward", case.norm == "layer_norm", case.num_cols, case.sum, y=case.dtype("y"), weight=case.dtype("weight"),
        bias=case.dtype("bias"), residual=bool(case.residual) and not case.has_own_sum,
        pack_limit=dispatch.pack_limit(case.num_cols, ()), **own_sum,
    )  # fmt: skip
    return dispatch.choose(problem, device, case.strategy, case.tile, case.statistics).statistics == "welford"


def _given(name, input, weight, bias, dy, eps, strategy, statistics, zero_centered_weight, seed) -> Problem:
    """A problem of a user's own arrays."""

    def host(array: Any, label: str) -> tuple[np.ndarray | None, str | None]:
        if array is None:
            return None, None
        array = arrays.take(array, label)
        dtype = arrays.dtype_name(array)
        if dtype not in DTYPES:
            raise TypeError(f"{label} is of dtype {dtype}; expected one of {', '.join(DTYPES)}")
        if arrays.is_torch(array):
            return array.detach().double().cpu().numpy(), dtype
        return arrays.to_float64(array.get() if arrays.is_cupy(array) else array), dtype

    x, x_dtype = host(input, "input")
    if x.ndim < 1:
        raise ValueError("input has no dimension to normalise over; expected at least one")
    num_cols = x.shape[-1]
    x = x.reshape(-1, num_cols)
    weight64, weight_dtype = host(weight, "weight")
    bias64, bias_dtype = host(bias, "bias")
    for label, values in (("weight", weight64), ("bias", bias64)):
        if values is not None and values.shape != (num_cols,):
            raise ValueError(f"{label} has shape {values.shape}; expected ({num_cols},)")
    case = Case(
        name,
        len(x),
        num_cols,
        x_dtype,
        None,
        weight_dtype,
        bias_dtype,
        strategy,
        None,
        statistics,
        zero_centered_weight,
        eps=eps,
    )
    dy64, dy_dtype = host(dy, "dy")
    if dy64 is None:
        dy64 = random_problem(case, seed).dy
    elif dy64.size != x.size:
        raise ValueError(f"dy has shape {dy64.shape}; expected the input's, {tuple(input.shape)}")
    elif dy_dtype != x_dtype:
        dy64 = decode(encode(dy64, x_dtype), x_dtype)
    return Problem(case, x, dy64.reshape(x.shape), weight64, bias64)
