"""Norms of rows whose columns are on several ranks: all ranks in one process, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.reference import parallel
from every_split import run_shared, shared_cases

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.plan import split_rows as plans
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.split_rows import Part, gradients_launches, row_tile

torch = pytest.importorskip("torch")
from cupynorm.nn import row_statistics  # noqa: E402
from cupynorm.norm.split_rows import OfPart, SplitNorm, Wanted  # noqa: E402

ALL = Wanted("float32", "float32", "float32")


def on_ranks(norm: SplitNorm, x, dy=None, weight=None, bias=None, wanted: Wanted = ALL):
    """y, dx, dweight, dbias of whole rows, and the statistics. None where not wanted."""
    parts = [
        [None] * norm.num_ranks if each is None else each.split(norm.counts, -1)
        for each in (x, weight, bias, dy)
    ]
    ranks = [OfPart(*each) for each in zip(*parts)]
    own = [row_statistics.statistics_of_part(each, norm) for each in ranks]
    ranks = [each._replace(parts=torch.stack(own)) for each in ranks]
    made = [row_statistics.normalize(each, norm, x.dtype) for each in ranks]
    y, statistics = torch.cat([each for each, _ in made], -1), made[0][1]
    if dy is None:
        return y, statistics
    ranks = [each._replace(parts=None, statistics=statistics) for each in ranks]
    sums = sum(row_statistics.sums_of_part(each, norm) for each in ranks)
    found = [row_statistics.gradients(each._replace(sums=sums), norm, wanted) for each in ranks]
    gradients = [None if each[0] is None else torch.cat(each, -1) for each in zip(*found)]
    return y, *gradients, statistics


@pytest.mark.parametrize("shared", shared_cases(), ids=lambda shared: str(shared.case))
def test_results_are_within_what_their_dtypes_allow_and_wrong_ones_are_not(shared):
    case, num_ranks = shared
    problem = random_problem(case)
    results = run_shared(problem, num_ranks, CpuMachine())
    found = CheckResult(judge_all(problem, results))
    assert found and len(found.findings) == len(results), found
    for name, values in results.items():
        values.flat[-1] += 1.0
        assert not CheckResult(judge_all(problem, {name: values})), name


def test_shared_cases_cover_registers_and_neither_and_parts_of_every_size():
    paths, sizes = set(), []
    for case, num_ranks in shared_cases():
        norm = SplitNorm(True, 1e-5, False, case.num_cols, num_ranks)
        part = Part(case.num_rows, norm.counts[0], 16, True, case.x, case.dtype("y"))
        paths.add(row_tile(part).path)
        sizes.append((norm.counts[0] > norm.counts[-1], norm.counts[-1] > 0))
    assert paths == {"registers", "uncached"}
    assert set(sizes) == {(False, True), (True, True), (True, False)}


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.mark.parametrize("holders", (plans.HOLDERS, ()), ids=("registers", "uncached"))
def test_a_mean_of_1000_deviations_and_an_outlier_cost_no_digits(
    holders, device, random, monkeypatch
):
    """y errs by sums of deviations alone, also where the means of ranks differ."""
    monkeypatch.setattr(plans, "HOLDERS", holders)
    x = random(7, 96) + 1000.0
    x[1, 5] += 3000.0
    x[2, 48:] -= 2000.0  # the other rank
    x[3] -= 1000.0
    dy = random(7, 96)
    problem = random_problem(Case("layer_norm", 7, 96, "float32", weight=None, bias=None))
    problem.x, problem.dy = x.double().numpy(), dy.double().numpy()
    norm = SplitNorm(True, 1e-5, False, 96, 2)
    y, dx, _, _, statistics = on_ranks(
        norm, x.to(device), dy.to(device), wanted=Wanted("float32", None, None)
    )
    results = {"y": y, "dx": dx, "mean": statistics[0], "rstd": statistics[2]}
    results = {name: each.double().cpu().numpy() for name, each in results.items()}
    found = CheckResult(judge_all(problem, results))
    assert len(found.findings) == 4 and found, found


@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "float64"))
def test_constant_rows_give_exactly_the_bias(dtype, anywhere, random):
    """Also of ranks with different numbers of columns, and of none: 8 share 20 columns."""
    for num_ranks, num_cols in ((2, 96), (8, 20)):
        norm = SplitNorm(True, 1e-5, False, num_cols, num_ranks)
        assert sum(norm.counts) == num_cols and len(norm.counts) == num_ranks
        bias = random(num_cols).to(anywhere, getattr(torch, dtype))
        x = random(6, 1).to(bias).expand(6, num_cols) * 1234.567
        y, statistics = on_ranks(norm, x, weight=bias, bias=bias)
        assert torch.equal(y, bias.expand_as(y))
        assert torch.equal(statistics[0].to(x.dtype), x[:, 0]) and not statistics[1].any()


def test_ranks_agree_with_the_reference_of_the_sharded_layer(anywhere, random):
    """Zero-centered weights, rows with gaps, every option of what is wanted."""
    x, dy = random(9, 80)[:, :48], random(9, 80)[:, 16:64]
    weight, bias = random(48), random(48)
    for centered in (True, False):
        norm = SplitNorm(centered, 0.25, True, 48, 3)
        split = lambda each: np.split(each.double().numpy(), 3, axis=-1)  # noqa: E731
        none = [np.zeros((1, 16))] * 3
        shards = parallel.Shards(split(weight), split(bias), none, [None] * 3)
        options = {"zero_centered_weight": True}
        made = parallel.row_linear(split(x), shards, 0.25, centered=centered, **options)
        zeros = [np.zeros((9, 1))] * 3
        right = parallel.row_linear_backward(zeros, made, shards, dnormalized=split(dy), **options)
        expected = [np.concatenate([each.normalized for each in made], axis=1)]
        expected += [np.concatenate(each, axis=-1) for each in list(zip(*right))[:3]]
        given = [each.to(anywhere) for each in (x, dy, weight, bias)]
        for wanted in (ALL, Wanted(None, "float32", None), Wanted("float32", None, "float32")):
            found = on_ranks(norm, *given, wanted=wanted)[:4]
            for got, value, is_wanted in zip(found, expected, (True, *wanted)):
                assert (got is None) == (not is_wanted)
                if is_wanted:
                    # 2^10 roundings of the largest.
                    allowed = 2.0**-14 * np.abs(value).max()
                    assert np.abs(got.double().cpu().numpy() - value).max() <= allowed


def test_gradients_repeat_to_the_bit_and_no_rows_give_zeros(device, random):
    norm = SplitNorm(True, 1e-5, False, 64, 2)
    given = [each.to(device) for each in (random(40, 64), random(40, 64), random(64), random(64))]
    for one, other in zip(on_ranks(norm, *given), on_ranks(norm, *given)):
        assert one.abs().max() > 0 and torch.equal(one, other)
    y, dx, dweight, dbias, _ = on_ranks(norm, given[0][:0], given[1][:0], *given[2:])
    assert y.shape == dx.shape == (0, 64) and not dweight.any() and not dbias.any()
    assert dweight.shape == dbias.shape == (64,)


def test_slabs_hold_all_rows():
    for num_rows, num_cols in ((1, 8), (37, 14336), (8192, 14336), (2**20, 64)):
        part = Part(num_rows, num_cols, 8, True, "bfloat16", "bfloat16")
        (launch, _), slabs = gradients_launches(
            part, DEVICES["H200"], dx=True, dweight="bfloat16", dbias=None
        )
        assert slabs.count * slabs.num_rows >= num_rows > (slabs.count - 1) * slabs.num_rows
        across = -(-num_cols // 256)
        assert launch.grid_size == slabs.count * across
