"""The norm of rows whose columns are on several ranks: all ranks in one process, by float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)
from cupynorm.linear.operands import LinearOptions, Operands  # noqa: E402
from cupynorm.linear.products import Pending  # noqa: E402
from cupynorm.parallel import row  # noqa: E402

NORMS = {"layer_norm": True, "rms_norm": False}


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def on_ranks(x, *, centered=True, num_ranks=2, bias=None, eps=1e-5):
    """y and rstd of whole rows. All ranks must have the same rstd, to the bit."""
    options = LinearOptions(centered, eps, False, False, False, None, None)
    own = x.chunk(num_ranks, 1)
    parts, sent = [row.normalize_part(each, centered) for each in own], []

    def exchange(gather):
        group = SimpleNamespace(gather=gather)
        return [row.statistics_of_rows(*each, options, group) for each in zip(own, parts)]

    exchange(lambda tensor: Pending(sent.append(tensor) or tensor))
    found = exchange(lambda tensor: Pending(torch.cat(sent)))
    assert all(torch.equal(each[-1].isnan(), found[0][-1].isnan()) for each in found)
    assert all(torch.equal(each[-1].nan_to_num(), found[0][-1].nan_to_num()) for each in found)
    biases = [None] * num_ranks if bias is None else bias.chunk(num_ranks)
    ys = [
        row.normalize(
            Operands(x_of_rank, None, None, bias_of_rank, (), ()),
            options,
            statistics,
            x.dtype,
            part.x_hat,
        )
        for x_of_rank, bias_of_rank, statistics, part in zip(own, biases, found, parts)
    ]
    return torch.cat(ys, 1), found[0][-1]


def right(x, centered, eps=1e-5):
    x = x.double()
    x = x - x.mean(1, keepdim=True) if centered else x
    rstd = (x.square().mean(1) + eps).rsqrt()
    return x * rstd[:, None], rstd


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
def test_a_mean_of_1000_deviations_and_an_outlier_cost_no_digits(norm, dtype, anywhere, random):
    """Also where the means of ranks differ."""
    x = random(7, 96) + 1000.0
    x[1, 0] += 3000.0
    x[2, 48:] -= 2000.0  # the other rank
    x[3:] -= 1000.0
    x = x.to(anywhere, dtype)
    found = on_ranks(x, centered=NORMS[norm])
    for got, value in zip(found, right(x, NORMS[norm])):
        # Half an ulp of the result, and 8 roundings of the arithmetic.
        allowed = value.abs() * torch.finfo(got.dtype).eps / 2
        allowed += 2.0 ** (-50 if dtype == torch.float64 else -21) * value.abs().amax(-1, True)
        # float64 has no wider mean.
        allowed *= 1000 if dtype == torch.float64 else 1
        assert ((got.double() - value).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize(("num_ranks", "num_cols"), ((2, 96), (5, 35)))
def test_constant_rows_give_exactly_the_bias(num_ranks, num_cols, dtype, anywhere, random):
    bias = random(num_cols).to(anywhere, dtype)
    x = (random(6, 1) * 1234.567).to(bias).expand(6, num_cols)
    y, rstd = on_ranks(x, num_ranks=num_ranks, bias=bias)
    assert torch.equal(y, bias.expand_as(y))
    assert torch.equal(rstd, torch.full_like(rstd, 1e-5**-0.5))


def test_infinite_variances_give_the_bias_and_what_is_no_number_stays_in_its_row(anywhere, random):
    x, bias = random(5, 64), random(64).to(anywhere)
    x[1, 3], x[2, 40] = float("nan"), float("inf")
    x[3, ::2] *= 1e25
    y, _ = on_ranks(x.to(anywhere), bias=bias)
    assert y[1:3].isnan().all() and y[[0, 4]].isfinite().all()
    assert torch.equal(y[3], bias)


def test_no_rows(anywhere, random):
    y, rstd = on_ranks(random(0, 64).to(anywhere), bias=random(64).to(anywhere))
    assert y.shape == (0, 64) and rstd.shape == (0,)
