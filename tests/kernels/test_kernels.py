"""Every kernel against float64: strategies, edges of width, dtypes, options; the same bits again, alone and in any batch."""

from __future__ import annotations

import bisect
from dataclasses import replace

import numpy as np
import pytest

from cupynorm import reference
from cupynorm.check import run
from cupynorm.check.cases import NORMS, Case, Problem, random_problem
from cupynorm.check.kernels import CpuMachine, GpuCheckMachine, uses_welford
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES, compute_dtype, decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import Address, backward_call, forward_call
from cupynorm.norm.request import BackwardOptions, ForwardOptions, Options
from cupynorm.plan import dispatch
from cupynorm.plan.devices import DEVICES, Device
from cupynorm.plan.problem import Layout, Tile
from cupynorm.plan.problem import Problem as DispatchProblem
from cupynorm.plan.strategies import STATISTICS, STRATEGIES

H200 = DEVICES["H200"]
# Two multiprocessors and one cluster of each size: a few rows are enough for every block to take several.
SMALL = replace(
    H200, name="small", num_sms=2, clusters=tuple((size, 1) for size, _ in H200.clusters)
)
# Room for two clusters of any size: a margin of half of it leaves one.
TWO_CLUSTERS = replace(
    SMALL, name="two clusters", num_sms=32, clusters=tuple((size, 2) for size, _ in H200.clusters)
)
# No row fits its registers, so that clusters keep theirs in shared memory.
NO_REGISTERS = replace(SMALL, name="no registers", registers_per_sm=0)
OUTPUTS = {"y", "mean", "rstd", "dx", "dweight", "dbias"}
SEEDS = range(5)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request):
    return CpuMachine() if request.param == "cpu" else GpuCheckMachine()


def check(case: Case, where: CpuMachine | GpuCheckMachine, seed: int = 0) -> dict[str, np.ndarray]:
    problem = random_problem(case, seed)
    results = run_kernels(problem, where)
    welford = case.statistics == "welford" or uses_welford(case, where.device)
    result = CheckResult(judge_all(problem, results, rounded_mean=welford))
    missing = OUTPUTS - set(results)
    allowed = {"mean"} if case.norm == "rms_norm" else set()
    allowed |= {f"d{name}" for name in ("weight", "bias") if case.dtype(name) is None}
    assert missing == allowed
    assert len(result.findings) == len(results)
    assert result.ok, f"\n{result}"
    return results


def problem_of(
    direction: str, dtype: str, centered: bool = True, layout: Layout | None = None
) -> DispatchProblem:
    others = (
        {"y": dtype, "bias": dtype}
        if direction == "forward"
        else {"dy": dtype, "dx": dtype, "dweight": dtype, "dbias": dtype}
    )
    return DispatchProblem(
        direction, centered, 1, dtype, layout or Layout(16, contiguous=True), weight=dtype, **others
    )


def strategy_of(direction: str, dtype: str, num_cols: int, device: Device) -> str:
    problem = problem_of(direction, dtype, layout=Layout.of(num_cols, ()))
    return dispatch.choose(replace(problem, num_cols=num_cols), device).strategy


# -- widths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cols", [1, 2, 3, 5, 7, 33, 127, 768, 1000, 1023, 1025])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_width(name, dtype, num_cols, where):
    check(Case(name, 5, num_cols, dtype), where)


@pytest.mark.parametrize("num_cols", [1, 2, 7, 33, 768, 1000, 1025])
@pytest.mark.parametrize("strategy", ["block", "cluster", "uncached"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_strategy_at_widths_where_it_would_not_be_chosen(name, dtype, strategy, num_cols, where):
    check(Case(name, 3, num_cols, dtype, strategy=strategy), where)


EDGES = [("warp", "forward"), ("warp", "backward"), ("block", "backward")]


def last_width(strategy: str, direction: str, dtype: str, device) -> int:
    """The most columns, a multiple of 16, for which this strategy or an earlier one is chosen."""
    order = list(STRATEGIES)

    def beyond(num_cols: int) -> bool:
        return order.index(strategy_of(direction, dtype, num_cols, device)) > order.index(strategy)

    return 16 * (
        bisect.bisect_left(range(1, 4096), True, key=lambda sixteens: beyond(16 * sixteens))
    )


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("strategy, direction", EDGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_edge_of_a_strategy(name, dtype, strategy, direction, step, where):
    # Where rows are read in packs; a neighbour of an even width is odd and read element by element.
    widest = last_width(strategy, direction, dtype, where.device)
    assert strategy_of(direction, dtype, widest, where.device) == strategy
    assert strategy_of(direction, dtype, widest + 16, where.device) != strategy
    check(Case(name, 2, widest + step, dtype), where)


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_of_block_forward(dtype, step, where):
    widest = last_width("block", "forward", dtype, where.device)
    assert strategy_of("forward", dtype, widest, where.device) == "block"
    assert strategy_of("forward", dtype, widest + 16, where.device) != "block"
    check(Case("layer_norm", 1, widest + step, dtype), where)


@pytest.mark.parametrize("strategy", ["block", "cluster"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_last_width_of_registers_and_first_of_shared_memory(dtype, strategy, where):
    # Within a strategy, rows move from registers to shared memory: a second edge with another kernel on each side. block has it
    # where there are no clusters; clusters of two have it at fewer columns.
    if strategy == "block":
        where = CpuMachine(DEVICES["A100"])
    elif isinstance(where, CpuMachine):
        where = CpuMachine(replace(SMALL, clusters=((2, 1),)))
    problem = problem_of("forward", dtype, layout=Layout(8, contiguous=True))

    def in_registers(num_cols: int) -> bool:
        choice = dispatch.choose(replace(problem, num_cols=num_cols), where.device, strategy)
        return choice.tile.packs_per_thread > 0

    low, high = 2048, dispatch.widest(strategy, problem, where.device)
    assert in_registers(low) and not in_registers(high)
    while high - low > 8:
        middle = (low + high) // 16 * 8
        low, high = (middle, high) if in_registers(middle) else (low, middle)
    for num_cols in (low - 1, low, low + 1, high):
        assert strategy_of("forward", dtype, num_cols, where.device) == strategy
        check(Case("layer_norm", 2, num_cols, dtype), where)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_row_that_needs_a_cluster_and_one_that_fits_nowhere(dtype, where):
    widest = {
        name: dispatch.widest(name, problem_of("backward", dtype), where.device)
        for name in ("block", "cluster")
    }
    two = 2 * widest["block"] + 8
    assert strategy_of("backward", dtype, two, where.device) == "cluster"
    check(Case("layer_norm", 2, two, dtype), where)
    beyond = widest["cluster"] + 16
    assert strategy_of("backward", dtype, beyond, where.device) == "uncached"
    check(Case("layer_norm", 1, beyond, dtype), where)


@pytest.mark.parametrize("device", ["A100", "RTX 4090", "RTX 5090"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_kernels_planned_for_other_devices(dtype, device):
    # No cluster, no copy engine, or less shared memory: other tiles and other edges.
    where = CpuMachine(DEVICES[device])
    widest = dispatch.widest("block", problem_of("backward", dtype), where.device)
    for num_cols in (96, widest + 8):
        check(Case("layer_norm", 3, num_cols, dtype), where)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("num_rows, num_cols", [(1000, 1), (515, 3), (257, 8), (131, 64)])
def test_many_rows_of_few_columns(name, num_rows, num_cols, where):
    check(Case(name, num_rows, num_cols, "float16"), where)


# -- dtypes, parameters, options -------------------------------------------------------------------------


MIXED = [
    (x, weight)
    for x, weights in (
        ("bfloat16", ("float32", "float64", "float16")),
        ("float16", ("float32", "float64", "bfloat16")),
        ("float32", ("bfloat16", "float16", "float64")),
        ("float64", ("bfloat16", "float32")),
    )
    for weight in weights
]


@pytest.mark.parametrize("x, weight", MIXED)
def test_weight_of_another_dtype(x, weight, where):
    check(Case("layer_norm", 4, 96, x, weight=weight, bias=weight), where)


def test_weight_and_bias_of_two_dtypes(where):
    check(Case("layer_norm", 4, 96, "float16", weight="float32", bias="bfloat16"), where)
    check(Case("rms_norm", 4, 97, "bfloat16", weight="float64", bias="float16"), where)


@pytest.mark.parametrize("y", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
def test_out_dtype(x, y, where):
    check(Case("layer_norm", 4, 72, x, y=y), where)


@pytest.mark.parametrize("weight, bias", [("same", None), (None, "same"), (None, None)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NORMS)
def test_absent_parameters(name, strategy, weight, bias, where):
    check(Case(name, 4, 100, "bfloat16", weight=weight, bias=bias, strategy=strategy), where)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_centered_weight(strategy, dtype, where):
    case = Case("rms_norm", 4, 100, dtype, strategy=strategy, zero_centered_weight=True)
    results = check(case, where)
    # The option matters: the same numbers without it are another result.
    plain = run_kernels(
        replace(random_problem(case), case=replace(case, zero_centered_weight=False)), where
    )
    assert not np.array_equal(results["y"], plain["y"])


@pytest.mark.parametrize(
    "x, weight", [("bfloat16", "float64"), ("float64", "float32"), ("float64", "bfloat16")]
)
def test_zero_centered_weight_near_minus_one(x, weight, where):
    """1 + weight is formed in the wider of the two types: its leading digits cancel."""
    case = Case("layer_norm", 4, 200, x, y="float32", weight=weight, zero_centered_weight=True)
    problem = random_problem(case)
    problem.weight = decode(encode(problem.weight * 2.0**-8 - 1, weight), weight)
    result = CheckResult(judge_all(problem, run_kernels(problem, where)))
    assert result.ok, f"\n{result}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_residual(strategy, dtype, where):
    for name, num_cols in (("layer_norm", 120), ("rms_norm", 77)):
        case = Case(name, 4, num_cols, dtype, strategy=strategy, residual=True)
        problem = random_problem(case)
        fused = check(case, where)
        # As normalising the sum that it returns, to the bit.
        tile = dispatch.choose(_forward_problem(case), where.device, strategy).tile
        alone = replace(
            problem, case=replace(case, residual=False, tile=tile), x=fused["sum"], residual=None
        )
        assert run_kernels(alone, where)["y"].tobytes() == fused["y"].tobytes()


def _forward_problem(case: Case) -> DispatchProblem:
    return replace(
        problem_of("forward", case.x, case.norm == "layer_norm", Layout.of(case.num_cols, ())),
        num_cols=case.num_cols, residual=case.residual,
    )  # fmt: skip


# What is normalised is a sum of its own dtype, or of an input that is scaled first.
SUMS = {
    "float32 stream": ("bfloat16", {"residual": True, "residual_dtype": "float32", "dsum": True}),
    "float32 stream begins": ("float16", {"residual_dtype": "float32"}),
    "float32 stream, residual of the input's dtype": (
        "bfloat16", {"residual": "bfloat16", "residual_dtype": "float32", "dsum": True},
    ),
    "narrower stream": ("float32", {"residual": True, "residual_dtype": "bfloat16", "dsum": True}),
    "float64 stream": ("float32", {"residual": True, "residual_dtype": "float64", "weight": "float32"}),
    "input of float64": ("float64", {"residual": True, "residual_dtype": "float32"}),
    "row_scale": ("bfloat16", {"residual": True, "row_scale": "float32"}),
    "row_scale of float64": ("float64", {"row_scale": "float64", "dsum": True}),
    "dropout": ("float32", {"dropout_p": 0.3}),
    "dropout and residual": ("float16", {"residual": True, "dropout_p": 0.5, "dsum": True}),
    "everything": (
        "bfloat16",
        {
            "residual": True, "residual_dtype": "float32", "row_scale": "bfloat16", "dropout_p": 0.1, "dsum": True,
            "weight": "float32",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", SUMS)
def test_sum_of_its_own(what, strategy, where):
    dtype, options = SUMS[what]
    # Packs and lone elements, both norms: by turns, so that each option meets all of them over the strategies.
    turn = (list(SUMS).index(what) + list(STRATEGIES).index(strategy)) % 2
    name, num_cols = (("layer_norm", 120), ("rms_norm", 77))[turn]
    results = check(Case(name, 4, num_cols, dtype, strategy=strategy, **options), where)
    assert "sum" in results and ("dresidual" in results) == ("residual" in options)


@pytest.mark.parametrize("what", ["float32 stream", "everything"])
@pytest.mark.parametrize(
    "strategy, num_cols, tile",
    [
        ("warp", 64, Tile(2, 4, packs_per_thread=8, rows_per_block=8)),
        ("block", 1000, Tile(8, 64, packs_per_thread=2)),
        ("cluster", 1000, Tile(8, 32, cluster_size=4)),
        ("cluster", 999, Tile(1, 96, cluster_size=2)),
        ("uncached", 1000, Tile(2, 96)),
    ],
)
def test_sum_of_its_own_with_explicit_tiles(
    strategy, num_cols, tile, what, where, tile_of_backward
):
    dtype, options = SUMS[what]
    plans = tile_of_backward(tile)
    results = check(
        Case("layer_norm", 9, num_cols, dtype, strategy=strategy, tile=tile, **options), where
    )
    assert plans[-1].tile == tile and np.isfinite(results["dresidual"]).all()


def test_sum_of_its_own_in_the_shared_memory_of_a_block(where):
    dtype, options = SUMS["everything"]
    for num_cols, tile in ((1000, Tile(8, 128)), (1001, Tile(1, 96))):
        check(Case("layer_norm", 4, num_cols, dtype, strategy="block", tile=tile, **options), where)


@pytest.mark.parametrize(
    "num_cols, tile",
    [(1000, Tile(4, 64, 4, stages=2)), (1000, Tile(4, 32, 4, cluster_size=2, stages=3))],
)
def test_the_gradient_of_a_sum_is_split_by_a_ring(num_cols, tile, small, tile_of_backward):
    """A ring fetches x and dsum as float32 beside dy; what it cannot make is refused."""
    plans = tile_of_backward(tile)
    dtype, options = SUMS["float32 stream"]
    strategy = "cluster" if tile.cluster_size > 1 else "block"
    check(
        Case(
            "layer_norm",
            rows_of_turns(small, tile, 4),
            num_cols,
            dtype,
            strategy=strategy,
            **options,
        ),
        small,
    )
    assert plans[-1].tile == tile and "SplitStore" in plans[-1].launches[0].kernel.name_expression
    for problem in (
        replace(plans[-1].problem, dropout=True),
        replace(plans[-1].problem, row_scale="float32"),
        replace(plans[0].problem, layout=Layout(4, contiguous=True)),
    ):
        with pytest.raises(
            ValueError, match="a ring needs .* neither residual_dtype nor dropout nor row_scale"
        ):
            dispatch.choose(problem, small.device, strategy, tile)


@pytest.mark.parametrize("num_cols", [198, 199, 200])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mask_depends_on_seed_row_and_column_alone(strategy, num_cols, where):
    """Forward and backward, whatever the strategy, the pack size and where the seed is; the reference makes the very same."""
    case = Case("rms_norm", 5, num_cols, "float32", strategy=strategy, dropout_p=0.4)
    problem = random_problem(case)
    for seed in (0, 1, -1, 2**62 + 12345):
        problem.dropout_seed = seed
        results = run_kernels(problem, where)
        kept = reference.dropout_mask(5, num_cols, 0.4, seed)
        assert ((results["sum"] != 0) == kept).all() and ((results["dx"] != 0) == kept).all()


@pytest.mark.parametrize("p, kept", [(1.0, 0), (1e-12, 400), (1 - 2.0**-33, 0), (2.0**-30, 400)])
def test_dropout_at_the_ends(p, kept, where):
    """All dropped: zeros, as torch's dropout gives; almost none: the input itself, and its scale."""
    problem = random_problem(Case("layer_norm", 4, 100, "float32", dropout_p=p))
    results = run_kernels(problem, where)
    assert (results["sum"] != 0).sum() == (results["dx"] != 0).sum() == kept
    assert np.isfinite(results["y"]).all()


SECONDS = {
    "weights": ("bfloat16", {"weight1": "bfloat16"}),
    "weights and biases": (
        "float32",
        {"weight1": "float32", "bias1": "float32", "zero_centered_weight": True},
    ),
    "other dtypes": (
        "float16",
        {"y": "float32", "weight": None, "bias": None, "weight1": "float64", "bias1": "bfloat16"},
    ),
    "a bias": ("float64", {"bias1": "float64", "dsum": True}),
    "a sum": (
        "bfloat16",
        {
            "weight1": "float32",
            "residual": True,
            "residual_dtype": "float32",
            "dropout_p": 0.2,
            "dsum": True,
        },
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", SECONDS)
def test_second_output(what, strategy, where):
    dtype, options = SECONDS[what]
    turn = (list(SECONDS).index(what) + list(STRATEGIES).index(strategy)) % 2
    name, num_cols = (("layer_norm", 120), ("rms_norm", 77))[turn]
    case = Case(name, 4, num_cols, dtype, strategy=strategy, **options)
    results = check(case, where)
    # The second output is that of a call of its own: the same bits on the CPU, whose compiler fuses nothing.
    if not case.has_own_sum and isinstance(where, CpuMachine):
        problem = random_problem(case)
        alone = replace(case, weight=case.weight1, bias=case.bias1, weight1=None, bias1=None)
        tile = dispatch.choose(dispatch_problem(case), where.device, strategy).tile
        alone = replace(
            problem, case=replace(alone, tile=tile), weight=problem.weight1, bias=problem.bias1
        )
        assert run_kernels(alone, where)["y"].tobytes() == results["y1"].tobytes()


def dispatch_problem(case: Case) -> DispatchProblem:
    """Of a forward whose row is x, with two outputs."""
    names = ("weight", "bias", "weight1", "bias1")
    return DispatchProblem(
        "forward", case.norm == "layer_norm", case.num_cols, case.x, y=case.dtype("y"), y1=case.dtype("y"),
        **{name: case.dtype(name) for name in names}, layout=Layout.of(case.num_cols, ()),
    )  # fmt: skip


@pytest.mark.parametrize(
    "tile",
    [Tile(8, 64, 3, stages=2), Tile(8, 64, 3, cluster_size=2, stages=3)],
    ids=["block", "cluster"],
)
@pytest.mark.parametrize("weight1, bias1", [("bfloat16", "bfloat16"), (None, "float32")])
def test_second_output_of_a_ring(weight1, bias1, tile, small, tile_of_backward):
    tile_of_backward(tile)
    num_rows, packs = rows_of_turns(small, tile, 4), 190 * tile.cluster_size
    check(
        ring_case(
            "layer_norm",
            num_rows,
            "bfloat16",
            packs,
            tile,
            weight1=weight1,
            bias1=bias1,
            residual=True,
        ),
        small,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_x_hat_is_rounded_first(dtype, strategy, where):
    """To the bit: a product of two 16-bit numbers is exact in float32, and rounded once."""
    for name, num_cols in (("layer_norm", 120), ("rms_norm", 77)):
        case = Case(name, 4, num_cols, dtype, bias=None, strategy=strategy, round_x_hat=True)
        tile = dispatch.choose(_forward_problem(case), where.device, strategy).tile
        if tile.bundle:  # which a y of another size has no place in
            tile = replace(tile, blocks_per_sm=1, stages=0, bundle=0, path="registers")
        problem = random_problem(replace(case, tile=tile))
        rounded = check(problem.case, where)["y"]
        bare = replace(problem.case, y="float32", weight=None, round_x_hat=False)
        x_hat = run_kernels(replace(problem, case=bare, weight=None), where)["y"]
        expected = decode(
            encode(decode(encode(x_hat, dtype), dtype) * problem.weight, dtype), dtype
        )
        assert rounded.tobytes() == expected.tobytes()
        once = run_kernels(replace(problem, case=replace(problem.case, round_x_hat=False)), where)[
            "y"
        ]
        assert 0.1 < (rounded != once).mean() < 0.6


@pytest.mark.parametrize(
    "tile",
    [Tile(8, 64, 3, stages=2), Tile(8, 64, 3, cluster_size=2, stages=3)],
    ids=["block", "cluster"],
)
def test_x_hat_is_rounded_in_a_ring(tile, small, tile_of_backward):
    tile_of_backward(tile)
    num_rows, packs = rows_of_turns(small, tile, 4), 190 * tile.cluster_size
    case = ring_case("rms_norm", num_rows, "bfloat16", packs, tile, bias=None, round_x_hat=True)
    once = run_kernels(random_problem(replace(case, round_x_hat=False)), small)["y"]
    assert 0.1 < (check(case, small)["y"] != once).mean() < 0.6


BY_Y = {
    "y": ("bfloat16", {}),
    "y of another dtype": (
        "float16",
        {"y": "float32", "weight": "float32", "zero_centered_weight": True},
    ),
    "y of float64": ("float64", {"bias": "float32"}),
    "y without parameters": ("float32", {"weight": None, "bias": None}),
    "y, dropout and a second output": (
        "bfloat16",
        {
            "residual": True,
            "residual_dtype": "float32",
            "dropout_p": 0.2,
            "dsum": True,
            "weight1": "float32",
            "bias1": "float32",
        },
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", BY_Y)
def test_backward_that_knows_y_alone(what, strategy, where):
    """Also of a weight that is all but zero: its column errs by as much as is said, the others by no more than before."""
    dtype, options = BY_Y[what]
    turn = (list(BY_Y).index(what) + list(STRATEGIES).index(strategy)) % 2
    name, num_cols = (("layer_norm", 120), ("rms_norm", 77))[turn]
    case = Case(name, 4, num_cols, dtype, strategy=strategy, memory_efficient=True, **options)
    check(case, where)
    if case.weight is not None:
        problem = random_problem(case)
        for col, weight in ((3, -1.5e-9), (7, 0.0), (11, 1e-4)):
            problem.weight[col] = decode(
                encode(np.array(weight - case.zero_centered_weight), case.dtype("weight")),
                case.dtype("weight"),
            )
        results = run_kernels(problem, where)
        result = CheckResult(
            judge_all(problem, results, rounded_mean=uses_welford(case, where.device))
        )
        assert result.ok and np.isfinite(results["dx"]).all(), f"\n{result}"


@pytest.mark.parametrize("strategy, num_cols, tile", [
    ("block", 1000, Tile(8, 64, packs_per_thread=2)), ("cluster", 1000, Tile(8, 32, cluster_size=4)),
    ("cluster", 999, Tile(1, 96, cluster_size=2)),
])  # fmt: skip
def test_backward_that_knows_y_alone_with_explicit_tiles(
    strategy, num_cols, tile, where, tile_of_backward
):
    plans = tile_of_backward(tile)
    check(
        Case("layer_norm", 9, num_cols, "bfloat16", strategy=strategy, memory_efficient=True), where
    )
    assert plans[-1].tile == tile and "LoadXHat" in plans[-1].launches[0].kernel.name_expression


# -- y written again by backward -------------------------------------------------------------------------


def bits(values: np.ndarray) -> bytes:
    """Of values that hold no zero of a sign that matters."""
    return (values + 0.0).tobytes()


def y_of(problem: Problem, results: dict[str, np.ndarray]) -> np.ndarray:
    """What the mean and rstd that were kept say of y, operation by operation in the arithmetic's dtype,
    as the CPU's compiler leaves it."""
    case = problem.case
    compute = compute_dtype(case.sum).name
    given = (
        results.get("sum", problem.x),
        results.get("mean"),
        results["rstd"],
        problem.weight,
        problem.bias,
    )
    x, mean, rstd, weight, bias = (None if each is None else each.astype(compute) for each in given)
    y = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    if weight is not None:
        wide = problem.weight.astype(compute_dtype(case.dtype("weight")).name)
        y = y * ((1 + wide).astype(compute) if case.zero_centered_weight else weight)
    y = y if bias is None else y + bias
    return decode(encode(y.astype(np.float64), case.dtype("y")), case.dtype("y"))


RECOMPUTED = {
    "plain": {},
    "without parameters": {"weight": None, "bias": None},
    "without weight": {"weight": None},
    "without bias": {"bias": None},
    "1 + weight": {"zero_centered_weight": True},
    "wide parameters": {"weight": "float64", "bias": "float32"},
    "y of another dtype": {"y": "float32", "weight": "float32"},
    "a residual": {"residual": True, "dsum": True},
}


@pytest.mark.parametrize("what", RECOMPUTED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_writes_y_again(strategy, what, where):
    """The very bits that forward writes of the same mean and rstd;
    welford, but in a ring, keeps no rest of the mean beside them."""
    turn = list(RECOMPUTED).index(what) + list(STRATEGIES).index(strategy)
    for at, (name, num_cols) in enumerate(
        (("layer_norm", 120 + turn % 2), ("rms_norm", 77 - turn % 2))
    ):
        dtype = list(DTYPES)[(turn // 2 + at) % 4]
        case = Case(
            name,
            5,
            num_cols,
            dtype,
            strategy=strategy,
            statistics="welford",
            recompute=True,
            **RECOMPUTED[what],
        )
        results = check(case, where)
        if isinstance(where, CpuMachine):
            assert bits(results["recomputed"]) == bits(y_of(random_problem(case), results))
        # Without a weight a GPU may take x_hat + bias together, rounded once.
        if (name == "rms_norm" or strategy != "cluster") and (
            case.weight is not None or case.bias is None
        ):
            assert bits(results["recomputed"]) == bits(results["y"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_y_again_is_of_the_mean_that_was_kept(strategy, dtype):
    case = Case(
        "layer_norm", 5, 120, dtype, strategy=strategy, statistics="two_pass", recompute=True
    )
    results = check(case, CpuMachine())
    assert bits(results["recomputed"]) == bits(y_of(random_problem(case), results))


@pytest.mark.parametrize(
    "gradients", [(), ("dweight",), ("dbias",), ("dx",), ("dx", "dweight", "dbias")], ids=str
)
@pytest.mark.parametrize("strategy, num_cols, tile", [
    ("warp", 64, None), ("block", 1000, Tile(8, 64, packs_per_thread=2)), ("block", 1000, Tile(4, 64, 4, stages=2)),
    ("cluster", 1000, Tile(8, 32, packs_per_thread=1, cluster_size=4)), ("cluster", 1000, Tile(8, 32, cluster_size=4)),
    ("cluster", 1000, Tile(4, 32, 4, cluster_size=2, stages=3)), ("cluster", 999, Tile(1, 96, cluster_size=2)),
    ("uncached", 1000, None),
])  # fmt: skip
def test_y_again_whatever_else_is_wanted(strategy, num_cols, tile, gradients, where, monkeypatch):
    """Alone, with some of the gradients, and with all of them; the others are left as they are."""
    plans = []
    plain = run.backward_call

    def backward_call(device, tensors, options, compute):
        unwanted = {"dx", "dweight", "dbias"} - set(gradients)
        tensors = {name: rows for name, rows in tensors.items() if name not in unwanted}
        options = options._replace(launch=options.launch._replace(tile=tile))
        call = plain(device, tensors, options, compute)
        plans.append(call.plan)
        return call

    monkeypatch.setattr(run, "backward_call", backward_call)
    case = Case("layer_norm", 9, num_cols, "bfloat16", strategy=strategy, recompute=True)
    problem = random_problem(case)
    results = run_kernels(problem, where)
    for name in ("dx", "dweight", "dbias"):
        if name not in gradients:
            assert np.isnan(results.pop(name)).all()
    result = CheckResult(judge_all(problem, results, rounded_mean=uses_welford(case, where.device)))
    assert result.ok and len(result.findings) == 4 + len(gradients), f"\n{result}"
    assert tile is None or plans[-1].tile == tile
    assert "RecomputingStore" in plans[-1].launches[0].kernel.name_expression


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"residual": True, "dsum": True},
        {"weight": "float32", "bias": "float32"},
        {"bias": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("tile", [
    Tile(8, 64, 3, stages=2), Tile(8, 64, 1, rows_per_block=3, stages=3), Tile(8, 64, 3, cluster_size=2, stages=3),
    Tile(1, 64, 24, stages=2),
], ids=str)  # fmt: skip
def test_y_again_of_a_ring(tile, options, small, tile_of_backward):
    """Biases in registers, and where there are many in shared memory, beside weights or alone."""
    plans = tile_of_backward(tile)
    num_rows, packs = (
        rows_of_turns(small, tile, 4),
        (tile.threads_per_row * tile.packs_per_thread - 2) * tile.cluster_size,
    )
    case = ring_case("layer_norm", num_rows, "bfloat16", packs, tile, recompute=True, **options)
    results = check(case, small)
    if isinstance(small, CpuMachine):
        assert bits(results["recomputed"]) == bits(y_of(random_problem(case), results))
    assert (
        plans[-1].tile == tile
        and plans[-1].launches[0].kernel.name_expression.count("RecomputingStore") == 1
    )


def test_y_again_counts_in_bytes():
    made = [
        dispatch.make_plan(
            replace(
                problem_of("backward", "bfloat16"), num_cols=4096, recomputed=recomputed, bias=bias
            ),
            H200,
            1000,
        )
        for recomputed, bias in ((None, None), ("float32", "float16"))
    ]
    assert made[1].bytes_needed - made[0].bytes_needed == 1000 * 4096 * 4 + 4096 * 2
    uncached = [
        dispatch.make_plan(
            replace(plan.problem, num_cols=1 << 20, dx=None), H200, 10, strategy="uncached"
        )
        for plan in made
    ]
    assert [len(plan.launches) for plan in uncached] == [1, 2]
    # x and dy once for the sums; for y once more.
    assert uncached[1].bytes_moved - uncached[0].bytes_moved == (1 << 20) * (10 * (2 + 2 + 4) + 2)


# -- statistics alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy, tile", [
    ("warp", None), ("block", Tile(8, 64, packs_per_thread=2)), ("block", Tile(8, 64)), ("block", Tile(8, 64, 2, stages=2)),
    ("cluster", Tile(8, 32, packs_per_thread=1, cluster_size=4)), ("cluster", Tile(8, 32, cluster_size=2)),
    ("cluster", Tile(8, 32, 2, cluster_size=2, stages=2)), ("uncached", None),
])  # fmt: skip
def test_statistics_alone(strategy, tile, statistics, residual, where, monkeypatch):
    """The bits of a forward with y, which nothing writes: its array is not even there."""
    case = Case(
        "layer_norm",
        7,
        1000,
        "bfloat16",
        weight=None,
        bias=None,
        strategy=strategy,
        tile=tile,
        statistics=statistics,
    )
    case = replace(case, residual=residual, num_cols=240 if strategy == "warp" else 1000)
    problem = random_problem(case)
    plans, plain = [], run.forward_call
    with_y = run_kernels(problem, where)

    def forward_call(device, tensors, options, kind):
        tensors = {name: rows for name, rows in tensors.items() if name != "y"}
        call = plain(device, tensors, options, kind)
        plans.append(call.plan)
        # run_kernels has an address for y, which such a kernel has no use for.
        arguments = [
            [0 if word == Address("y") else word for word in words] for words in call.arguments
        ]
        return call._replace(arguments=tuple(arguments))

    monkeypatch.setattr(run, "forward_call", forward_call)
    alone = run_kernels(problem, where)
    assert np.isnan(alone["y"]).all()
    for name in ("mean", "rstd", *(["sum"] if residual else [])):
        assert alone[name].tobytes() == with_y[name].tobytes() and np.isfinite(alone[name]).all()
    assert "Store<void, void, void, false>" in plans[0].launches[0].kernel.name_expression
    assert tile is None or plans[0].tile == tile
    read = 7 * case.num_cols * 2
    assert plans[0].bytes_needed == read * (1 + 2 * residual) + 7 * 2 * 4
    if strategy == "uncached":
        passes = 2 if statistics == "two_pass" else 1
        assert plans[0].bytes_moved == plans[0].bytes_needed + (passes - 1) * read * (1 + residual)


# A warp of any dtype takes 240.
@pytest.mark.parametrize("num_cols", [57, 240])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_statistics(dtype, strategy, statistics, num_cols, where):
    check(Case("layer_norm", 4, num_cols, dtype, strategy=strategy, statistics=statistics), where)


@pytest.mark.parametrize("statistics", STATISTICS)
def test_rows_in_the_shared_memory_of_one_block(statistics, where):
    check(
        Case(
            "layer_norm",
            4,
            1000,
            "float16",
            strategy="block",
            tile=Tile(8, 128),
            statistics=statistics,
        ),
        where,
    )
    check(
        Case(
            "layer_norm",
            4,
            1001,
            "float16",
            strategy="block",
            tile=Tile(1, 96),
            statistics=statistics,
        ),
        where,
    )


@pytest.mark.parametrize(
    "strategy, num_cols, tile",
    [
        ("warp", 64, Tile(2, 4, packs_per_thread=8, rows_per_block=8)),
        ("warp", 64, Tile(8, 1, packs_per_thread=8, rows_per_block=32)),
        ("warp", 64, Tile(1, 32, packs_per_thread=2, rows_per_block=1)),
        ("warp", 33, Tile(1, 16, packs_per_thread=3, rows_per_block=2)),
        ("block", 96, Tile(4, 32, packs_per_thread=1)),
        ("block", 1000, Tile(8, 96, packs_per_thread=2)),
        ("block", 1024, Tile(1, 1024, packs_per_thread=1)),
        ("cluster", 1000, Tile(8, 32, cluster_size=16)),
        ("cluster", 1000, Tile(8, 32, packs_per_thread=1, cluster_size=16)),
        ("cluster", 1032, Tile(8, 32, packs_per_thread=2, cluster_size=4)),
        ("cluster", 1024, Tile(8, 32, packs_per_thread=2, cluster_size=2, exact=1)),
        ("cluster", 999, Tile(1, 96, packs_per_thread=6, cluster_size=2)),
        ("cluster", 24, Tile(8, 64, packs_per_thread=1, cluster_size=8)),
        ("cluster", 24, Tile(8, 64, cluster_size=8)),
        ("cluster", 1024, Tile(8, 512, cluster_size=4)),
        ("cluster", 999, Tile(1, 96, cluster_size=2)),
        ("uncached", 1000, Tile(2, 1024)),
        ("uncached", 1000, Tile(8, 32)),
    ],
)  # fmt: skip
def test_explicit_tile(strategy, num_cols, tile, where):
    check(Case("layer_norm", 5, num_cols, "float16", strategy=strategy, tile=tile), where)


@pytest.mark.parametrize(
    "strategy, num_cols, tile",
    [
        ("warp", 64, Tile(2, 4, packs_per_thread=8, rows_per_block=8)),
        ("warp", 33, Tile(1, 32, packs_per_thread=2, rows_per_block=1)),
        ("block", 1000, Tile(8, 96, packs_per_thread=2)),
        ("block", 96, Tile(1, 1024, packs_per_thread=1)),
        ("cluster", 1024, Tile(8, 64, cluster_size=16)),
        ("cluster", 1000, Tile(8, 32, packs_per_thread=1, cluster_size=16)),
        ("cluster", 1032, Tile(8, 32, packs_per_thread=2, cluster_size=4)),
        ("cluster", 1024, Tile(8, 32, packs_per_thread=2, cluster_size=2, exact=1)),
        ("cluster", 999, Tile(1, 96, packs_per_thread=6, cluster_size=2)),
        ("cluster", 24, Tile(8, 32, packs_per_thread=1, cluster_size=8)),
        ("cluster", 24, Tile(8, 32, cluster_size=8)),
        ("cluster", 999, Tile(1, 96, cluster_size=2)),
        ("uncached", 1000, Tile(4, 96)),
    ],
)
def test_explicit_tile_of_backward(strategy, num_cols, tile, where, tile_of_backward):
    plans = tile_of_backward(tile)
    check(Case("layer_norm", 5, num_cols, "bfloat16", strategy=strategy), where)
    assert plans[-1].tile == tile


@pytest.mark.parametrize(
    "strategy, device, num_rows, num_cols, margin",
    [
        ("warp", SMALL, 3000, 40, 1),
        ("block", SMALL, 37, 264, 1),
        # One cluster is left, up to 32 times on its multiprocessors.
        ("cluster", TWO_CLUSTERS, 75, 264, 16),
        # There is but one cluster, which needs both multiprocessors; in shared memory it stays.
        ("cluster", NO_REGISTERS, 37, 264, 0),
        ("uncached", SMALL, 37, 264, 1),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else None,
)
@pytest.mark.parametrize("name", NORMS)
def test_blocks_that_take_many_rows(name, strategy, device, num_rows, num_cols, margin):
    # One multiprocessor or cluster is left, so a block comes round to row after row with the same buffers.
    where = CpuMachine(device)
    case = Case(name, num_rows, num_cols, "float16", strategy=strategy, sm_margin=margin)
    plan = dispatch.make_plan(
        _forward_problem(case), device, num_rows, strategy=strategy, sm_margin=margin
    )
    assert (plan.tile.packs_per_thread == 0) == (device is NO_REGISTERS or strategy == "uncached")
    assert (
        plan.launches[0].grid_size // plan.tile.cluster_size * plan.tile.rows_per_block < num_rows
    )
    results = check(case, where)
    for seed in SEEDS:
        assert identical(results, run_kernels(random_problem(case), CpuMachine(device, seed=seed)))
    # A margin shrinks the grid and never changes a row.
    full = run_kernels(
        random_problem(replace(case, sm_margin=0)),
        CpuMachine(replace(device, num_sms=132, clusters=H200.clusters)),
    )
    for tensor in ("y", "rstd", "dx"):
        assert results[tensor].tobytes() == full[tensor].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NORMS)
def test_margin_on_a_gpu(name, strategy):
    where = GpuCheckMachine()
    # Two multiprocessors are left, which a cluster of two needs.
    case = Case(name, 3001, 760, "float16", strategy=strategy, sm_margin=where.device.num_sms - 2)
    results = check(case, where)
    full = run_kernels(random_problem(replace(case, sm_margin=0)), where)
    for tensor in ("y", "rstd", "dx"):
        assert results[tensor].tobytes() == full[tensor].tobytes()


# -- the same bits ---------------------------------------------------------------------------------------


def identical(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].tobytes() == right[name].tobytes() for name in left
    )


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_twenty_runs_give_the_same_bits(dtype, strategy, statistics):
    # The seed draws the order in which threads run, within what their barriers allow.
    problem = random_problem(
        Case("layer_norm", 9, 104, dtype, strategy=strategy, statistics=statistics)
    )
    first = run_kernels(problem, CpuMachine(SMALL))
    assert all(np.isfinite(values).all() for values in first.values())
    for seed in range(1, 20):
        assert identical(first, run_kernels(problem, CpuMachine(SMALL, seed=seed))), f"seed {seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NORMS)
def test_twenty_runs_on_a_gpu_give_the_same_bits(name, strategy):
    where = GpuCheckMachine()
    problem = random_problem(Case(name, 2049, 760, "float16", strategy=strategy))
    first = run_kernels(problem, where)
    assert all(np.isfinite(values).all() for values in first.values())
    for _ in range(19):
        assert identical(first, run_kernels(problem, where))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_cols", [3, 40, 264])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NORMS)
def test_any_order_of_threads(name, strategy, num_cols, seed):
    check(
        Case(name, 5, num_cols, "bfloat16", strategy=strategy), CpuMachine(SMALL, seed=seed), seed
    )


def only_row(problem: Problem, row: int) -> Problem:
    one = slice(row, row + 1)
    return replace(
        problem, case=replace(problem.case, num_rows=1), x=problem.x[one], dy=problem.dy[one]
    )


def assert_rows_alone_are_rows_of_a_batch(problem: Problem, where, rows) -> None:
    together = run_kernels(problem, where)
    for row in rows:
        alone = run_kernels(only_row(problem, row), where)
        for tensor in {"y", "mean", "rstd", "dx"} & set(together):
            assert alone[tensor][0].tobytes() == together[tensor][row].tobytes(), (
                f"{tensor} of row {row}"
            )


@pytest.mark.parametrize("num_rows", [1, 7, 132])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_is_the_same_alone_and_in_a_batch(strategy, statistics, num_rows):
    problem = random_problem(
        Case("layer_norm", num_rows, 40, "float32", strategy=strategy, statistics=statistics)
    )
    # Another order of threads, and fewer multiprocessors, change nothing either.
    for machine in (CpuMachine(), CpuMachine(SMALL, seed=1)):
        assert_rows_alone_are_rows_of_a_batch(problem, machine, {0, num_rows // 2, num_rows - 1})


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 132, 4097])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_row_is_the_same_alone_and_in_a_batch_on_a_gpu(dtype, strategy, num_rows):
    problem = random_problem(Case("layer_norm", num_rows, 504, dtype, strategy=strategy))
    assert_rows_alone_are_rows_of_a_batch(
        problem, GpuCheckMachine(), {0, num_rows // 2, num_rows - 1}
    )


@pytest.mark.parametrize("num_cols", [16, 24, 32, 64, 96, 128, 160, 250, 256, 320, 500, 512, 640])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", NORMS)
def test_few_rows_get_the_bits_that_many_rows_get_from_fewer_lanes(name, dtype, num_cols, where):
    problem = replace(
        problem_of("forward", dtype, name == "layer_norm", Layout.of(num_cols, ())),
        num_cols=num_cols,
    )
    of_many = dispatch.choose(problem, where.device)
    of_few = dispatch.make_plan(problem, where.device, 5).tile
    in_a_warp = of_many.strategy == "warp" and not of_many.tile.bundle
    if in_a_warp and of_many.tile.packs_per_thread % 2 == 0 and of_many.tile.threads_per_row < 32:
        assert of_few.threads_per_row > of_many.tile.threads_per_row
    assert of_few.cols == of_many.tile.cols
    assert_bits_are_of_tile(Case(name, 5, num_cols, dtype), of_many.strategy, of_many.tile, where)


# The options of a call.
CALL_OPTIONS = {
    "welford": {"statistics": "welford"},
    "weight float32": {"weight": "float32", "bias": "float32"},
    "weight float64, 1 + weight": {
        "weight": "float64",
        "bias": "float64",
        "zero_centered_weight": True,
    },
    "y float32": {"y": "float32"},
    "no weight": {"weight": None},
    "no parameters": {"weight": None, "bias": None},
}
# But welford, whose lanes stay as many.
SUM_OPTIONS = {
    name: options for name, options in CALL_OPTIONS.items() if "statistics" not in options
}
SUM_OPTIONS |= {
    "residual": {"residual": True},
    "residual float32, dropout": {
        "residual": True,
        "residual_dtype": "float32",
        "dropout_p": 0.25,
        "row_scale": "float32",
    },
    "two outputs": {"weight1": "bfloat16", "bias1": "bfloat16"},
    "rounded": {"round_x_hat": True},
}


@pytest.mark.parametrize("options", SUM_OPTIONS)
def test_few_rows_get_the_bits_of_many_with_every_option(options, where):
    case = Case("layer_norm", 5, 256, "bfloat16", strategy="warp", **SUM_OPTIONS[options])
    check(case, where)
    for lanes in (8, 16):
        assert_bits_are_of_tile(
            case, "warp", Tile(8, lanes, 32 // lanes, 64 // lanes, exact=1), where
        )


def assert_bits_are_of_tile(case: Case, strategy: str, tile: Tile, where) -> None:
    """What a case's own tile gives and what this one gives."""
    problem = random_problem(case, seed=case.num_cols)
    own = run_kernels(problem, where)
    forced = run_kernels(replace(problem, case=replace(case, strategy=strategy, tile=tile)), where)
    for tensor in {"y", "y1", "sum", "mean", "rstd"} & set(own):
        assert own[tensor].tobytes() == forced[tensor].tobytes(), tensor


# -- rows that come and go in bundles --------------------------------------------------------------------

# (norm, dtype, columns, tile), of every number of lanes; a pack that no lane's row has, rows of which the last are few.
BUNDLES = {
    "a lane a row": ("layer_norm", "bfloat16", 33, Tile(1, 1, 33, 64, exact=1, stages=2, bundle=32)),
    "one element a row": ("rms_norm", "float32", 1, Tile(1, 1, 1, 32, exact=1, stages=3, bundle=96)),
    "2 lanes, pairs": ("layer_norm", "float16", 50, Tile(2, 2, 13, 32, stages=2, bundle=32)),
    "4 lanes": ("rms_norm", "bfloat16", 27, Tile(1, 4, 7, 8, stages=1, bundle=8)),
    "8 lanes": ("layer_norm", "bfloat16", 127, Tile(1, 8, 16, 8, stages=2, bundle=12)),
    "8 lanes, packs of 4": ("rms_norm", "float16", 100, Tile(4, 8, 4, 4, stages=2, bundle=8)),
    "a lane a row, packs of 4": ("layer_norm", "bfloat16", 24, Tile(4, 1, 6, 64, exact=1, stages=2, bundle=96)),
    "4 lanes, packs of 8": ("rms_norm", "bfloat16", 72, Tile(8, 4, 3, 16, stages=2, bundle=24)),
    "8 lanes, pairs, 12 warps": ("layer_norm", "bfloat16", 72, Tile(2, 8, 5, 48, stages=2, bundle=16)),
    "16 lanes": ("layer_norm", "float32", 255, Tile(1, 16, 16, 4, stages=3, bundle=4)),
    "32 lanes": ("layer_norm", "bfloat16", 511, Tile(1, 32, 16, 2, stages=2, bundle=3)),
    "32 lanes of which some have nothing": ("layer_norm", "bfloat16", 29, Tile(1, 32, 1, 1, stages=2, bundle=2)),
    "32 lanes, an odd number of packs": ("layer_norm", "float16", 223, Tile(1, 32, 7, 2, exact=0, stages=2, bundle=1)),
}  # fmt: skip
BUNDLE_OPTIONS = {name: options for name, options in CALL_OPTIONS.items() if "y" not in options}
BUNDLE_OPTIONS |= {"rounded": {"round_x_hat": True}}


class MisalignedMachine(CpuMachine):
    """Arrays begin anywhere in 16 bytes, each elsewhere, between bytes that are NaN."""

    def _placed(self, array):
        self.placed = getattr(self, "placed", 0) + 1
        room = np.full(array.nbytes + 64, 0xFF, np.uint8)
        offset = -room.ctypes.data % 16 + self.placed % (16 // array.itemsize) * array.itemsize + 16
        placed = room[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed, placed.ctypes.data

    def empty(self, shape, dtype):
        return self._placed(super().empty(shape, dtype)[0])

    def put(self, array):
        return self._placed(array)


@pytest.mark.parametrize("num_rows", [1, 4, 37, 201])
@pytest.mark.parametrize("bundle", BUNDLES)
def test_bundle(bundle, num_rows, small, tile_of_backward):
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    plans = tile_of_backward(tile)
    case = Case(norm, num_rows, num_cols, dtype, strategy="warp", tile=tile)
    results = check(case, small)
    assert [plan.tile for plan in plans] == [tile, tile]
    if isinstance(small, CpuMachine):
        for seed in range(2):
            assert identical(
                results, run_kernels(random_problem(case), CpuMachine(SMALL, seed=seed))
            ), f"seed {seed}"


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bundle", BUNDLES)
def test_bundles_begin_anywhere(bundle, residual, tile_of_backward):
    """x, residual, sum, y, dy and dx each elsewhere in 16 bytes: the same bits as of aligned arrays."""
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    if tile.pack_size > 1:
        pytest.skip("packs begin on multiples of their size")
    plans = tile_of_backward(tile)
    case = Case(norm, 201, num_cols, dtype, strategy="warp", tile=tile, residual=residual)
    aligned, problem = check(case, CpuMachine(SMALL)), random_problem(case)
    for _ in range(3):
        assert identical(aligned, run_kernels(problem, MisalignedMachine(SMALL)))
    assert {plan.tile for plan in plans} == {tile}


@pytest.mark.parametrize("bundle", ["8 lanes", "32 lanes"])
@pytest.mark.parametrize("options", BUNDLE_OPTIONS)
def test_options_of_bundles(options, bundle, small, tile_of_backward):
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    tile_of_backward(tile)
    check(
        Case(norm, 101, num_cols, dtype, strategy="warp", tile=tile, **BUNDLE_OPTIONS[options]),
        small,
    )


@pytest.mark.parametrize("bundle", BUNDLES)
def test_residual_of_bundles(bundle, small, tile_of_backward):
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    tile_of_backward(tile)
    problem = random_problem(
        Case(norm, 101, num_cols, dtype, strategy="warp", tile=tile, residual=True)
    )
    fused = check(problem.case, small)
    alone = replace(
        problem, case=replace(problem.case, residual=False), x=fused["sum"], residual=None
    )
    assert run_kernels(alone, small)["y"].tobytes() == fused["y"].tobytes()
    assert_dsum_is_added(alone, small, tile)


@pytest.mark.parametrize("bundle", BUNDLES)
def test_a_row_of_a_bundle_is_the_same_alone_and_in_a_batch(bundle, small, tile_of_backward):
    norm, dtype, num_cols, tile = BUNDLES[bundle]
    tile_of_backward(tile)
    problem = random_problem(Case(norm, 201, num_cols, dtype, strategy="warp", tile=tile))
    assert_rows_alone_are_rows_of_a_batch(problem, small, {0, 100, 200})


def test_rows_with_gaps_come_in_no_bundles():
    pointers = {"x": Rows(0, 9, 127, 129, "bfloat16"), "y": Rows(0, 9, 127, 127, "bfloat16")}
    tile = BUNDLES["8 lanes"][3]
    for rows, contiguous in (
        (pointers["x"], False),
        (pointers["x"]._replace(num_rows=1), True),
        (pointers["y"], True),
    ):
        tensors = {"x": rows, "y": pointers["y"]._replace(num_rows=rows.num_rows)}
        call = forward_call(H200, tensors, ForwardOptions(True, (127,), 1e-5), "forward")
        assert (
            call.plan.problem.layout.contiguous == contiguous == (call.plan.tile.path == "bundle")
        )
        if not contiguous:
            with pytest.raises(ValueError, match="bundles need .* rows without gaps"):
                dispatch.choose(call.plan.problem, H200, "warp", tile)


# -- rows that pass through a ring -----------------------------------------------------------------------


# (norm, dtype, packs of a row, tile). A warp has 32 x packs_per_thread packs side by side,
# a block of a cluster a multiple of 8.
RINGS = {
    "one warp": ("layer_norm", "float32", 20, Tile(4, 32, 1, stages=2)),
    "block": ("rms_norm", "bfloat16", 128, Tile(8, 64, 2, exact=1, stages=4)),
    "block whose last warp has a part": ("layer_norm", "float32", 470, Tile(4, 96, 5, stages=3)),
    "block whose last warp has nothing": ("layer_norm", "float16", 130, Tile(8, 128, 2, stages=2)),
    "block with weights in shared memory": ("layer_norm", "bfloat16", 192, Tile(8, 64, 3, exact=1, stages=2)),
    "block of 4 rows": ("layer_norm", "bfloat16", 180, Tile(8, 64, 3, rows_per_block=4, stages=3)),
    "block of 3 rows of one warp": ("rms_norm", "float32", 30, Tile(4, 32, 1, rows_per_block=3, stages=2)),
    "block of 7 rows of one warp": ("layer_norm", "float32", 110, Tile(4, 32, 4, rows_per_block=7, stages=4)),
    "block of 12 rows of one warp": ("layer_norm", "bfloat16", 80, Tile(8, 32, 3, rows_per_block=12, stages=3)),
    # Lanes that share out what the warps send have three each, or two and three, or four.
    "block of 11 warps": ("layer_norm", "bfloat16", 340, Tile(8, 352, 1, stages=3)),
    "cluster of 4 with 20 warps": ("layer_norm", "float16", 620, Tile(8, 160, 1, cluster_size=4, stages=2)),
    "cluster of 16 with 64 warps": ("layer_norm", "bfloat16", 2000, Tile(8, 128, 1, cluster_size=16, stages=2)),
    # Rows and slices that begin and end anywhere within 16 bytes.
    "block of single elements": ("layer_norm", "bfloat16", 333, Tile(1, 64, 6, stages=3)),
    "cluster of pairs": ("rms_norm", "float16", 270, Tile(2, 64, 3, cluster_size=2, stages=2)),
    "cluster of single elements": ("layer_norm", "float32", 1301, Tile(1, 96, 4, cluster_size=4, stages=2)),
    "cluster of 2": ("layer_norm", "float32", 256, Tile(4, 64, 2, cluster_size=2, exact=1, stages=3)),
    "cluster of 2 and 2 rows": ("layer_norm", "float16", 100, Tile(8, 64, 1, 2, cluster_size=2, stages=2)),
    "cluster of 4 whose last warp has nothing": ("layer_norm", "bfloat16", 200, Tile(8, 64, 1, cluster_size=4, stages=3)),
    "cluster of 8 of which 3 have nothing": ("rms_norm", "float16", 36, Tile(8, 32, 1, cluster_size=8, stages=4)),
    "cluster of 16": ("layer_norm", "bfloat16", 512, Tile(8, 32, 1, cluster_size=16, exact=1, stages=2)),
    "cluster of 16 of which 3 have nothing": ("layer_norm", "float32", 510, Tile(4, 64, 1, cluster_size=16, stages=3)),
}  # fmt: skip
# A block and a cluster; packs_per_thread is 3 so that weights lie in shared memory, too.
OPTION_TILES = (Tile(8, 64, 3, stages=2), Tile(8, 64, 3, cluster_size=2, stages=3))


def ring_case(
    norm: str, num_rows: int, dtype: str, packs: int, tile: Tile, **options: object
) -> Case:
    strategy = "cluster" if tile.cluster_size > 1 else "block"
    return Case(
        norm, num_rows, packs * tile.pack_size, dtype, strategy=strategy, tile=tile, **options
    )


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def small(request):
    """As `where`, with so few multiprocessors on the CPU that a few rows go round a ring."""
    return CpuMachine(SMALL) if request.param == "cpu" else GpuCheckMachine()


def rows_of_turns(where: CpuMachine | GpuCheckMachine, tile: Tile, turns: int) -> int:
    """So many that blocks, or clusters, take `turns` rows one after the other, and the last of them one row less."""
    at_once = (
        dict(where.device.clusters)[tile.cluster_size]
        if tile.cluster_size > 1
        else where.device.num_sms
    )
    return max(1, turns * at_once * tile.rows_per_block - 1)


# Fewer turns than the ring has stages, as many, and so many that every slot and buffer is used again and again.
@pytest.mark.parametrize("turns", [1, 3, 12])
@pytest.mark.parametrize("ring", RINGS)
def test_ring(ring, turns, small, tile_of_backward):
    norm, dtype, packs, tile = RINGS[ring]
    plans = tile_of_backward(tile)
    case = ring_case(norm, rows_of_turns(small, tile, turns), dtype, packs, tile)
    results = check(case, small)
    assert [plan.tile for plan in plans] == [tile, tile]
    for plan in plans:
        taken = -(
            -case.num_rows
            // (plan.launches[0].grid_size // tile.cluster_size * tile.rows_per_block)
        )
        assert max(1, turns - 1) <= taken <= turns
    if isinstance(small, CpuMachine):
        for seed in SEEDS:
            assert identical(
                results, run_kernels(random_problem(case), CpuMachine(SMALL, seed=seed))
            ), f"seed {seed}"


# Backward, where one row fills the shared memory.
ONE_ROW_RINGS = {
    "block": ("layer_norm", "float32", 470, Tile(4, 96, 5, stages=1)),
    "block that is filled": ("rms_norm", "bfloat16", 512, Tile(8, 64, 8, exact=1, stages=1)),
    "cluster of single elements": (
        "layer_norm",
        "float32",
        1301,
        Tile(1, 96, 4, cluster_size=4, stages=1),
    ),
    "cluster whose last warp has a part": (
        "layer_norm",
        "float16",
        1100,
        Tile(8, 64, 9, cluster_size=2, stages=1),
    ),
    "cluster of 16": (
        "layer_norm",
        "float32",
        8192,
        Tile(4, 32, 16, cluster_size=16, exact=1, stages=1),
    ),
}


@pytest.mark.parametrize("turns", [1, 2, 7])
@pytest.mark.parametrize("ring", ONE_ROW_RINGS)
def test_ring_of_one_row(ring, turns, small, tile_of_backward):
    norm, dtype, packs, tile = ONE_ROW_RINGS[ring]
    plans = tile_of_backward(tile)
    case = replace(
        ring_case(norm, rows_of_turns(small, tile, turns), dtype, packs, tile), tile=None
    )
    results = check(case, small)
    assert plans[1].tile == tile
    if isinstance(small, CpuMachine):
        for seed in SEEDS:
            assert identical(
                results, run_kernels(random_problem(case), CpuMachine(SMALL, seed=seed))
            ), f"seed {seed}"


@pytest.mark.parametrize("options", [
    {"residual": True, "dsum": True}, {"recompute": True}, {"weight": "float64", "bias": None}, {"weight": None, "bias": None},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("ring", ["block", "cluster of single elements"])
def test_options_of_a_ring_of_one_row(ring, options, small, tile_of_backward):
    norm, dtype, packs, tile = ONE_ROW_RINGS[ring]
    plans = tile_of_backward(tile)
    check(
        replace(
            ring_case(norm, rows_of_turns(small, tile, 4), dtype, packs, tile, **options), tile=None
        ),
        small,
    )
    assert plans[-1].tile == tile


@pytest.mark.parametrize("ring", ONE_ROW_RINGS)
def test_a_row_of_a_ring_of_one_row_is_the_same_alone_and_in_a_batch(ring, small, tile_of_backward):
    norm, dtype, packs, tile = ONE_ROW_RINGS[ring]
    tile_of_backward(tile)
    num_rows = rows_of_turns(small, tile, 5)
    problem = random_problem(replace(ring_case(norm, num_rows, dtype, packs, tile), tile=None))
    assert_rows_alone_are_rows_of_a_batch(problem, small, {0, num_rows // 2, num_rows - 1})


@pytest.mark.parametrize("tile", OPTION_TILES, ids=["block", "cluster"])
@pytest.mark.parametrize("options", CALL_OPTIONS)
def test_options_of_a_ring(options, tile, small, tile_of_backward):
    tile_of_backward(tile)
    check(
        ring_case(
            "layer_norm",
            rows_of_turns(small, tile, 4),
            "bfloat16",
            190 * tile.cluster_size,
            tile,
            **CALL_OPTIONS[options],
        ),
        small,
    )


@pytest.mark.parametrize("ring", RINGS)
def test_a_row_of_a_ring_is_the_same_alone_and_in_a_batch(ring, small, tile_of_backward):
    norm, dtype, packs, tile = RINGS[ring]
    tile_of_backward(tile)
    num_rows = rows_of_turns(small, tile, 12)
    problem = random_problem(ring_case(norm, num_rows, dtype, packs, tile))
    assert_rows_alone_are_rows_of_a_batch(problem, small, {0, num_rows // 2, num_rows - 1})
    # Nor does a margin change a row.
    where = CpuMachine(TWO_CLUSTERS) if isinstance(small, CpuMachine) else small
    margin = replace(problem, case=replace(problem.case, sm_margin=where.device.num_sms // 2))
    whole, left = run_kernels(problem, where), run_kernels(margin, where)
    for tensor in ("y", "rstd", "dx"):
        assert left[tensor].tobytes() == whole[tensor].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("ring", RINGS)
def test_twenty_runs_of_a_ring_on_a_gpu_give_the_same_bits(ring, tile_of_backward):
    where = GpuCheckMachine()
    norm, dtype, packs, tile = RINGS[ring]
    tile_of_backward(tile)
    problem = random_problem(ring_case(norm, rows_of_turns(where, tile, 12), dtype, packs, tile))
    first = run_kernels(problem, where)
    assert all(np.isfinite(values).all() for values in first.values())
    for _ in range(19):
        assert identical(first, run_kernels(problem, where))


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "ring", ["block whose last warp has nothing", "cluster of 8 of which 3 have nothing"]
)
def test_values_that_are_hard_for_a_ring(ring, dtype, statistics, small, tile_of_backward):
    """What the warps send is merged, also of those without columns: means far from zero, equal values, overflow, infinities."""
    _, _, packs, tile = RINGS[ring]
    tile = replace(tile, pack_size=16 // DTYPES[dtype].itemsize)
    tile_of_backward(tile)
    usual = random_problem(ring_case("layer_norm", 3, dtype, packs, tile, statistics=statistics))

    def run(x: np.ndarray, eps: float = 1e-5) -> tuple[Problem, dict[str, np.ndarray]]:
        x = decode(encode(np.broadcast_to(x, usual.x.shape), dtype), dtype)
        problem = replace(usual, x=x, case=replace(usual.case, eps=eps))
        return problem, run_kernels(problem, small)

    if statistics == "two_pass":  # welford's mean errs more than is allowed of y
        result = CheckResult(judge_all(*run(usual.x + 1000)))
        assert result.ok, f"\n{result}"
    constants = np.array([0.1, -1 / 3, 1e-3 + 1e4])[:, None]
    for x in (constants, 1e20 * constants):
        problem, results = run(x)
        assert (results["y"] == problem.bias).all() and (results["mean"] == problem.x[:, 0]).all()
        assert np.isfinite(results["dx"]).all() and (results["dweight"] == 0).all()
    _, results = run(constants, eps=0.0)
    assert np.isposinf(results["rstd"]).all() and np.isnan(results["y"]).all()
    for value in (1e20, 1e37):  # an infinite variance: rstd is 0 and y is bias
        problem, results = run(value * np.resize([-1.0, 1.0], usual.x.shape))
        assert (
            (results["rstd"] == 0).all()
            and (results["y"] == problem.bias).all()
            and (results["dx"] == 0).all()
        )
    _, clean = run(usual.x)
    for value in (np.inf, np.nan):
        broken = usual.x.copy()
        broken[1, 5] = value
        _, results = run(broken)
        for tensor in ("y", "rstd", "dx"):
            assert np.isnan(results[tensor][1]).all()
            assert results[tensor][[0, 2]].tobytes() == clean[tensor][[0, 2]].tobytes()


def gradients_of(
    problem: Problem, where, tile: Tile, wanted: tuple[str, ...], dsum: np.ndarray | None = None
) -> dict:
    """The wanted gradients of a problem with the statistics of float64,
    and with the gradient that reaches dx from elsewhere."""
    case, shape = problem.case, problem.x.shape
    centered, compute = case.norm == "layer_norm", compute_dtype(case.x).name
    norm = reference.layer_norm if centered else reference.rms_norm
    forward = norm(problem.x, problem.weight, problem.bias, case.eps)
    given = {"x": problem.x, "dy": problem.dy, "weight": problem.weight, "dsum": dsum}
    put = {
        name: where.put(encode(values, case.x))
        for name, values in given.items()
        if values is not None
    }
    saved = {"mean": forward.mean, "rstd": forward.rstd} if centered else {"rstd": forward.rstd}
    put_saved = {name: where.put(encode(values, compute)) for name, values in saved.items()}
    mean, rstd = (put_saved[name][1] if name in put_saved else 0 for name in ("mean", "rstd"))
    made = {name: where.empty(shape if name == "dx" else shape[1:], case.x) for name in wanted}
    rows = {
        name: Rows(pointer, *shape, shape[1], case.x) for name, (_, pointer) in (put | made).items()
    }
    for name in {"weight", "dweight", "dbias"} & set(rows):
        rows[name] = rows[name]._replace(num_rows=1)
    options = BackwardOptions(centered, shape[1:], launch=Options(case.strategy, tile))
    call = backward_call(where.device, rows, options, compute)
    assert call.plan.tile == tile
    addresses = {name: each.pointer for name, each in rows.items()} | {"mean": mean, "rstd": rstd}
    kept = []
    if call.partials_shape:
        array, addresses["partials"] = where.empty(call.partials_shape, compute)
        kept.append(array)
    for launch, words in zip(call.launches, call.fill(addresses)):
        where.launch(launch, words)
    return {name: decode(where.get(made[name][0]), case.x) for name in wanted}


def assert_dsum_is_added(problem: Problem, where, tile: Tile) -> None:
    """What reaches x + residual from elsewhere is added before the one rounding: the GPU may fuse the two."""
    dtype, names = problem.case.x, ("dx", "dweight", "dbias")
    dsum = decode(encode(np.random.default_rng(1).standard_normal(problem.x.shape), dtype), dtype)
    alone, found = (
        gradients_of(problem, where, tile, names),
        gradients_of(problem, where, tile, names, dsum),
    )
    off = np.abs(found["dx"] - (alone["dx"] + dsum))
    assert (
        off <= DTYPES[dtype].half_ulp * (2 * np.abs(alone["dx"]) + np.abs(alone["dx"] + dsum))
    ).all()
    assert (
        isinstance(where, GpuCheckMachine)
        or found["dweight"].tobytes() == alone["dweight"].tobytes()
    )


@pytest.mark.parametrize("ring", RINGS)
def test_residual_through_a_ring(ring, small):
    norm, dtype, packs, tile = RINGS[ring]
    problem = random_problem(
        ring_case(norm, rows_of_turns(small, tile, 5), dtype, packs, tile, residual=True)
    )
    fused = check(problem.case, small)
    alone = replace(
        problem, case=replace(problem.case, residual=False), x=fused["sum"], residual=None
    )
    assert run_kernels(alone, small)["y"].tobytes() == fused["y"].tobytes()


@pytest.mark.parametrize("ring", RINGS)
def test_gradients_of_a_ring_that_are_asked_for(ring, small):
    norm, dtype, packs, tile = RINGS[ring]
    problem = random_problem(ring_case(norm, rows_of_turns(small, tile, 5), dtype, packs, tile))
    names = ("dx", "dweight", "dbias")
    everything = gradients_of(problem, small, tile, names)
    for number in range(1, 7):
        wanted = tuple(name for bit, name in enumerate(names) if number >> bit & 1)
        found = gradients_of(problem, small, tile, wanted)
        assert CheckResult(judge_all(problem, found)).ok and set(found) == set(wanted)
        # A GPU's compiler fuses other products and sums where there are fewer.
        assert isinstance(small, GpuCheckMachine) or identical(
            found, {name: everything[name] for name in wanted}
        ), wanted
    assert_dsum_is_added(problem, small, tile)


# -- this file can fail ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", sorted(OUTPUTS))
def test_one_wrong_element_is_seen(tensor):
    problem = random_problem(Case("layer_norm", 4, 100, "float32"))
    results = run_kernels(problem, CpuMachine())
    assert CheckResult(judge_all(problem, results)).ok
    wrong = results[tensor].reshape(-1)
    wrong[-1] = wrong[-1] * (1 + 1e-4) + 1e-4
    result = CheckResult(judge_all(problem, results))
    assert [found.tensor for found in result.findings if not found.ok] == [tensor]
