"""Checks by two processes: DTensor, DistributedDataParallel and fully_shard.

test_dtensor.py starts it once for each rank:

    python tests/nn/two_ranks.py gloo|nccl RANK FOLDER

gloo runs on the CPU, nccl on GPUs 0 and 1. All checks but those of dtypes are in float64, so that
the order of additions matters little. FOLDER/RANK.json has the outcome of each check: "passed", or
a traceback, after which the other checks are not run.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed
from torch.nn import functional

import cupynorm
from cupynorm.gpu import arrays
from cupynorm.nn import dtensor as parallel

try:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import register_sharding  # noqa: F401
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
except ImportError:
    HAS_SHARDING = False
else:
    HAS_SHARDING = True


class Ranks(NamedTuple):
    rank: int
    device: str
    mesh: DeviceMesh | None

    def random(self, *shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
        """Random numbers that are the same on both ranks."""
        generator = torch.Generator().manual_seed(seed + sum(shape))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device, dtype)

    def lay(self, tensor: torch.Tensor, placement) -> DTensor:
        """A DTensor of a tensor that both ranks have. Partial: all on rank 0, zeros on rank 1."""
        if placement.is_partial():
            return DTensor.from_local(
                tensor * (self.rank == 0), self.mesh, [placement], run_check=False
            )
        return distribute_tensor(tensor, self.mesh, [placement])


CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def check_of_dtensors(function):
    return check(function) if HAS_SHARDING else function


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares float64 results of one formula whose operations differ in order.

    Allows 2^10 roundings of terms of at most 2^4 times the largest result.
    """
    got = full(got).detach()
    assert got.dtype == expected.dtype == torch.float64, f"{name} is of dtype {got.dtype}"
    allowed = 2.0**-53 * 2**14 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        got, expected, rtol=0, atol=allowed, msg=lambda text: f"{name}: {text}"
    )


def ours(norm, x, weight, bias, extents=(8,), **options):
    if norm == "rms_norm":
        return cupynorm.rms_norm(x, extents, weight, 0.1, bias=bias, **options)
    return cupynorm.layer_norm(x, extents, weight, bias, 0.1, **options)


def theirs(norm, x, weight, bias, extents=(8,)):
    if norm == "rms_norm":
        return functional.rms_norm(x, extents, weight, 0.1) + (0 if bias is None else bias)
    return functional.layer_norm(x, extents, weight, bias, 0.1)


NORMS = ("layer_norm", "rms_norm")


# DTensor.


def gradients(call, tensors, dy):
    """y and the gradients of new leaves with the values and placements of tensors."""
    given = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y = call(*given)
    y.backward(dy)
    return [y, *(tensor.grad for tensor in given)]


def check_placement(ranks, norm, placement, dy_placement, on_ranks, shape=(5, 4, 8)):
    """on_ranks: makes of a weight the tensor that each rank has."""
    whole = ranks.random(*shape), ranks.random(8, seed=1), ranks.random(8, seed=2)
    dy = ranks.random(*shape, seed=3)
    expected = gradients(partial(theirs, norm), whole, dy)
    x, dy = ranks.lay(whole[0], placement), ranks.lay(dy, dy_placement)
    found = gradients(partial(ours, norm), (x, *map(on_ranks, whole[1:])), dy)
    for name, got, right in zip(("y", "dx", "dweight", "dbias"), found, expected):
        assert_close(f"{norm} {placement} {dy_placement} {name}", got, right)
    return found


def placements(shape=(5, 4, 8)):
    """Sharded rows, replicated rows, split rows, and partial sums of rows."""
    return [*map(Shard, range(len(shape) - 1)), Replicate(), Shard(len(shape) - 1), Partial()]


@check_of_dtensors
def dtensors_of_any_placement(ranks):
    whole = partial(ranks.lay, placement=Replicate())
    for norm in NORMS:
        for placement in placements():
            for dy_placement in (Shard(0), Replicate()):
                y, dx, dweight, dbias = check_placement(ranks, norm, placement, dy_placement, whole)
                for gradient in (dweight, dbias):
                    assert [each.is_partial() for each in gradient.placements] == [
                        each.is_shard() and each != Shard(2) for each in dx.placements
                    ]
                if not placement.is_partial():
                    assert y.placements == (placement,)


@check_of_dtensors
def they_lie_where_torch_puts_its_own(ranks):
    whole = ranks.lay(ranks.random(8, seed=1), Replicate())
    # Not of split rows, which torch leaves split.
    for placement in placements()[:-2]:
        x, dy = (ranks.lay(ranks.random(5, 4, 8, seed=seed), placement) for seed in (0, 3))
        found, expected = (
            gradients(partial(call, "layer_norm"), (x, whole, whole), dy) for call in (ours, theirs)
        )
        assert [each.placements for each in found] == [each.placements for each in expected], (
            placement
        )


@check_of_dtensors
def plain_parameters_count_as_the_same_on_every_rank(ranks):
    for norm in NORMS:
        for placement in placements():
            *_, dweight, dbias = check_placement(
                ranks, norm, placement, Shard(0), lambda weight: weight
            )
            assert type(dweight) is type(dbias) is torch.Tensor


@check_of_dtensors
def rows_that_do_not_share_out_evenly(ranks):
    for shape in ((1, 8), (3, 8), (8,), (0, 8)):
        for placement in (Shard(0), Replicate()):
            if shape == (0, 8) or placement == Shard(0) == Shard(len(shape) - 1):
                continue
            check_placement(ranks, "layer_norm", placement, placement, lambda weight: weight, shape)


@check_of_dtensors
def a_mesh_of_two_dimensions(ranks):
    # The second dimension splits rows, or the columns of one rank.
    for mesh_shape, rows in (((2, 1), [Shard(0), Shard(1)]), ((1, 2), [Shard(0), Shard(2)])):
        on_mesh(ranks, init_device_mesh(ranks.device, mesh_shape), rows)


def on_mesh(ranks, mesh, rows):
    x, weight, bias = ranks.random(4, 6, 8), ranks.random(8, seed=1), ranks.random(8, seed=2)
    dy = ranks.random(4, 6, 8, seed=3)
    expected = gradients(partial(theirs, "layer_norm"), (x, weight, bias), dy)
    each = [Replicate(), Replicate()]
    given = distribute_tensor(x, mesh, rows), distribute_tensor(weight, mesh, each), bias
    found = gradients(partial(ours, "layer_norm"), given, distribute_tensor(dy, mesh, rows))
    for name, got, right in zip(("y", "dx", "dweight", "dbias"), found, expected):
        assert_close(name, got, right)


@check_of_dtensors
def split_rows_are_not_gathered(ranks):
    """Ranks exchange three numbers a row, also where they have different numbers of columns."""
    from torch.distributed import _functional_collectives as collectives

    plain, sent = collectives.all_gather_tensor, []

    def all_gather_tensor(tensor, *arguments):
        sent.append(tensor.numel())
        return plain(tensor, *arguments)

    for norm, numbers in (("layer_norm", 3), ("rms_norm", 1)):
        for num_cols in (8, 7, 1):
            x, dy = (ranks.random(5, num_cols, seed=seed) for seed in (0, 1))
            x = x + 1000.0
            expected = gradients(
                lambda x, norm=norm: theirs(norm, x, None, None, x.shape[-1:]), [x], dy
            )
            collectives.all_gather_tensor = all_gather_tensor
            try:
                given = [ranks.lay(x, Shard(1))]
                found = gradients(
                    lambda x, norm=norm: ours(norm, x, None, None, x.shape[-1:]),
                    given,
                    ranks.lay(dy, Shard(1)),
                )
            finally:
                collectives.all_gather_tensor = plain
            assert sent == [numbers * 5], sent
            sent.clear()
            for name, got, right in zip(("y", "dx"), found, expected):
                assert got.placements == (Shard(1),)
                # The mean is 1000 standard deviations.
                assert_close(f"{norm} of {num_cols} columns: {name}", got / 1000, right / 1000)


@check_of_dtensors
def parameters_of_split_rows(ranks):
    """A weight that is split as the rows are has such a gradient."""
    x, dy = ranks.random(5, 8), ranks.random(5, 8, seed=1)
    weight, bias = ranks.random(8, seed=2), ranks.random(8, seed=3)
    for norm in NORMS:
        expected = gradients(partial(theirs, norm), (x, weight, bias), dy)
        given = ranks.lay(x, Shard(1)), ranks.lay(weight, Shard(0)), ranks.lay(bias, Shard(0))
        found = gradients(partial(ours, norm), given, ranks.lay(dy, Shard(1)))
        for name, got, right in zip(("y", "dx", "dweight", "dbias"), found, expected):
            assert_close(f"{norm} {name}", got, right)
        assert found[2].placements == found[3].placements == (Shard(0),)


@check_of_dtensors
def residuals_and_options(ranks):
    x, residual = ranks.random(5, 4, 8), ranks.random(5, 4, 8, seed=1)
    weight, dy = ranks.random(8, seed=2), ranks.random(5, 4, 8, seed=3)

    def call(norm, normalize, x, residual, weight):
        y, added = normalize(norm, x, residual, weight)
        return y * added

    def our(norm, x, residual, weight):
        return ours(
            norm,
            x,
            weight,
            None,
            residual=residual,
            return_residual=True,
            zero_centered_weight=True,
        )

    def torchs(norm, x, residual, weight):
        return theirs(norm, x + residual, 1 + weight, None), x + residual

    for norm in NORMS:
        expected = gradients(partial(call, norm, torchs), (x, residual, weight), dy)
        given = (
            ranks.lay(x, Shard(1)),
            ranks.lay(residual, Shard(0)),
            ranks.lay(weight, Replicate()),
        )
        split = (ranks.lay(x, Shard(2)), *given[1:])
        for tensors in (given, split):
            found = gradients(partial(call, norm, our), tensors, ranks.lay(dy, Shard(1)))
            for name, got, right in zip(("y * sum", "dx", "dresidual", "dweight"), found, expected):
                assert_close(f"{norm} {name}", got, right)


@check_of_dtensors
def calls_that_differ_in_what_is_no_tensor(ranks):
    """torch caches the sharding of a call by its arguments. Each of these needs its own entry."""
    x = ranks.lay(ranks.random(4, 2, 8), Shard(1))
    for extents, split in (((8,), (Shard(1),)), ((2, 8), None), ((8,), (Shard(1),))):
        for norm in NORMS:
            y = ours(norm, x, None, None, extents)
            assert_close(f"{norm} over {extents}", y, theirs(norm, full(x), None, None, extents))
            assert split is None or y.placements == split
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        y = cupynorm.layer_norm(x, 8, out_dtype=dtype)
        assert y.dtype == y.to_local().dtype == full(y).dtype == dtype
    for eps in (0.1, 10.0):
        y = cupynorm.layer_norm(x, 8, eps=eps)
        assert_close(f"eps {eps}", y, functional.layer_norm(full(x), (8,), eps=eps))


@check_of_dtensors
def second_derivatives(ranks):
    x, weight = ranks.random(4, 3, 8), ranks.random(8, seed=1)

    def call(normalize, x, weight):
        x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
        first = torch.autograd.grad(
            (normalize("layer_norm", x, weight, None) ** 3).sum(), (x, weight), create_graph=True
        )
        return torch.autograd.grad((first[0] ** 2).sum() + (first[1] ** 2).sum(), (x, weight))

    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        found = call(ours, ranks.lay(x, placement), ranks.lay(weight, Replicate()))
        for name, got, right in zip(("x", "weight"), found, call(theirs, x, weight)):
            assert_close(f"{placement} {name}", got, right)


@check_of_dtensors
def compiled(ranks):
    whole = ranks.random(5, 4, 8), ranks.random(8, seed=1), ranks.random(8, seed=2)
    dy = ranks.random(5, 4, 8, seed=3)
    expected = gradients(partial(theirs, "layer_norm"), whole, dy)
    call = torch.compile(partial(ours, "layer_norm"), fullgraph=True, backend="aot_eager")
    parallel._register_once.cache_clear()  # as in a new process
    for on_ranks in (partial(ranks.lay, placement=Replicate()), lambda weight: weight):
        found = gradients(
            call,
            (ranks.lay(whole[0], Shard(0)), *map(on_ranks, whole[1:])),
            ranks.lay(dy, Shard(0)),
        )
        for name, got, right in zip(("y", "dx", "dweight", "dbias"), found, expected):
            assert_close(name, got, right)


@check_of_dtensors
def what_is_refused(ranks):
    x, weight = ranks.random(4, 8), ranks.random(8)
    there = ranks.lay(weight, Replicate())
    rows = ranks.lay(x, Shard(0))
    # A DTensor and a plain tensor share no prepared call.
    assert (
        arrays.TorchLibrary.layout_key(there)
        != arrays.TorchLibrary.layout_key(full(there))
        == arrays.TorchLibrary.layout_key(weight)
    )
    of_row = ranks.random(4)
    fused = (
        {"residual_dtype": "float64"},
        {"row_scale": of_row},
        {"row_scale": ranks.lay(of_row, Shard(0))},
        {"dropout_p": 0.5},
        {"weight1": weight},
        {"weight1": there},
        {"bias1": weight},
        {"round_x_hat": True},
        {"memory_efficient": True},
    )
    dropped, seed = (
        {"dropout_p": 0.5, "dropout_seed": 1},
        ranks.lay(torch.ones(1, dtype=torch.int64, device=ranks.device), Replicate()),
    )
    for call, sentence in (
        *(
            (
                partial(cupynorm.layer_norm, rows, 8, weight, **each),
                "input is a DTensor and residual_dtype, row_scale",
            )
            for each in fused
        ),
        *(
            (
                partial(cupynorm.rms_norm, x, 8, there, **each),
                "weight is a DTensor and residual_dtype",
            )
            for each in fused
        ),
        (
            lambda: cupynorm.layer_norm(x, 8, weight1=there),
            "weight1 is a DTensor and residual_dtype",
        ),
        (
            lambda: cupynorm.layer_norm(x, 8, residual=rows, dropout_p=0.5),
            "residual is a DTensor and residual_dtype",
        ),
        (
            lambda: cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=seed),
            "dropout_seed is a DTensor, which has no address",
        ),
        (
            lambda: cupynorm.layer_norm_forward(rows, weight, **dropped),
            "input is a DTensor, which has no address",
        ),
        (
            lambda: cupynorm.rms_norm_backward(rows, x, of_row, weight, **dropped),
            "dy is a DTensor, which has no address",
        ),
        (
            lambda: cupynorm.layer_norm_backward(
                x, rows, of_row, of_row, weight, dx_dtype="float32"
            ),
            "x is a DTensor, which has no",
        ),
        (
            lambda: cupynorm.rms_norm_backward(
                x, x, ranks.lay(of_row, Shard(0)), weight, **dropped
            ),
            "rstd is a DTensor, which has no",
        ),
        (
            lambda: cupynorm.rms_norm_backward(x, x, of_row, there, **dropped),
            "weight is a DTensor, which has no address",
        ),
        (
            lambda: cupynorm.rms_norm_backward(
                x, x, of_row, weight, bias=there, memory_efficient=True
            ),
            "bias is a DTensor, which",
        ),
        (
            lambda: cupynorm.layer_norm(x, 8, there),
            "weight is a DTensor and input is a Tensor; expected input to be a DTensor",
        ),
        (
            lambda: cupynorm.layer_norm(x, 8, weight, there),
            "bias is a DTensor and input is a Tensor",
        ),
        (
            lambda: cupynorm.rms_norm(x, 8, weight, residual=rows),
            "residual is a DTensor and input is a Tensor",
        ),
        (
            lambda: cupynorm.rms_norm(rows, 8, weight, residual=x),
            "input is a DTensor and residual is a Tensor",
        ),
        (
            lambda: cupynorm.layer_norm(rows, 8, out=x),
            "out was given to a call that torch traces or transforms",
        ),
        (
            lambda: cupynorm.layer_norm_forward(rows, weight),
            "input is a DTensor, which has no address",
        ),
        (
            lambda: cupynorm.layer_norm_forward(x, there),
            "weight is a DTensor, which has no address",
        ),
        (
            lambda: cupynorm.layer_norm_linear(x, weight, None, ranks.lay(x, Replicate())),
            "a weight or bias is a DTensor and input is a Tensor; expected input to be a DTensor",
        ),
        (lambda: cupynorm.layer_norm(rows, 7), r"normalized_shape is (7,), input has shape (4, 8)"),
    ):
        try:
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            assert sentence in str(error), error
        else:
            raise AssertionError(f"nothing was raised; expected: {sentence}")


@check_of_dtensors
def sequence_parallel(ranks):
    """torch's SequenceParallel plan on our modules."""
    norms = torch.nn.Sequential(cupynorm.LayerNorm(8), cupynorm.RMSNorm(8)).to(
        ranks.device, torch.float64
    )
    with torch.no_grad():
        for seed, parameter in enumerate(norms.parameters()):
            parameter.copy_(ranks.random(8, seed=seed))
    whole = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)).to(
        ranks.device, torch.float64
    )
    whole.load_state_dict(norms.state_dict())
    x, dy = ranks.random(3, 4, 8), ranks.random(3, 4, 8, seed=1)
    expected = gradients(whole, [x], dy)
    parallelize_module(norms, ranks.mesh, {"0": SequenceParallel(), "1": SequenceParallel()})
    mine = slice(2 * ranks.rank, 2 * ranks.rank + 2)
    found = gradients(norms, [x[:, mine]], ranks.lay(dy, Shard(1)))
    assert_close("y", found[0], expected[0])
    assert_close("dx", found[1], expected[1][:, mine])
    for (name, parameter), right in zip(norms.named_parameters(), whole.parameters()):
        assert_close(name, parameter.grad, right.grad)


# Models.


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(8), torch.nn.RMSNorm(8, 1e-5)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.norm_2(x + self.down(torch.tanh(self.up(self.norm_1(x)))))


def model_of_torch(ranks) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), Block(), Block(), torch.nn.LayerNorm(8)).to(
        ranks.device, torch.float64
    )
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(ranks.random(*parameter.shape, seed=seed) / 2)
    return model


NUM_NORMS = 5


def step(model, x, target):
    """The gradients, and the parameters after one step of AdamW, by name.

    A change of a gradient changes its parameter by no more: the step's slope is at most lr / eps,
    which is 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, weight_decay=0.1)
    functional.mse_loss(model(x), target).backward()
    of = {name: full(parameter.grad).clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    return of, {
        name: full(parameter).detach().clone() for name, parameter in model.named_parameters()
    }


def check_training(ranks, wrap) -> torch.nn.Module:
    """wrap(model), with half a batch on each rank, takes the step of torch's norms on all of it."""
    x, target = ranks.random(4, 3, 6), ranks.random(4, 3, 8, seed=1)
    plain = model_of_torch(ranks)
    expected = step(copy.deepcopy(plain), x, target)
    swapped = cupynorm.swap_norms(plain)
    assert len(swapped.swapped) == NUM_NORMS and not swapped.left, swapped
    mine = slice(2 * ranks.rank, 2 * ranks.rank + 2)
    model = wrap(plain)
    found = step(model, x[mine], target[mine])
    for what, one, other in zip(("gradient of", "stepped"), found, expected):
        one = {name.removeprefix("module."): value for name, value in one.items()}
        assert list(one) == list(other)
        for name, right in other.items():
            assert_close(f"{what} {name}", one[name], right)
    moved = max(
        (found[1][name] - right).abs().max().item()
        for name, right in zip(found[1], plain_values(ranks))
    )
    assert moved > 1e-3, "the step changed nothing: it shows nothing"
    return model


def plain_values(ranks):
    return [parameter.detach() for parameter in model_of_torch(ranks).parameters()]


@check
def distributed_data_parallel(ranks):
    options = {"device_ids": [ranks.rank]} if ranks.device == "cuda" else {}
    check_training(ranks, partial(torch.nn.parallel.DistributedDataParallel, **options))


def shard_blocks(model, **options):
    for block in model[1:3]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@check_of_dtensors
def fully_sharded(ranks):
    model = check_training(ranks, partial(shard_blocks, mesh=ranks.mesh))
    for name, parameter in model.named_parameters():
        assert (
            parameter.placements == (Shard(0),)
            and parameter.to_local().shape[0] == parameter.shape[0] // 2
        ), name


@check_of_dtensors
def fully_sharded_by_norms(ranks):
    """Each norm is a unit of fully_shard, as in models whose norms stay in float32."""

    def wrap(model):
        for norm in [
            each
            for each in model.modules()
            if isinstance(each, cupynorm.LayerNorm | cupynorm.RMSNorm)
        ]:
            fully_shard(norm, mesh=ranks.mesh)
        return fully_shard(model, mesh=ranks.mesh, reshard_after_forward=True)

    check_training(ranks, wrap)


@check_of_dtensors
def fully_sharded_and_compiled(ranks):
    def wrap(model):
        for block in model[1:3]:
            block.compile(backend="aot_eager")
        return shard_blocks(model, mesh=ranks.mesh)

    check_training(ranks, wrap)


@check_of_dtensors
def fully_sharded_in_mixed_precision(ranks):
    """float32 parameters, bfloat16 arithmetic, float32 sums: the mean of both ranks, to the bit."""
    norm = cupynorm.LayerNorm(8, device=ranks.device)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(ranks.random(8, seed=seed, dtype=torch.float32))
    leaves = [parameter.detach().bfloat16().requires_grad_() for parameter in norm.parameters()]
    x = ranks.random(5, 8, seed=10 + ranks.rank, dtype=torch.bfloat16)
    dy = ranks.random(5, 8, seed=20 + ranks.rank, dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(torch.nn.Sequential(norm), mesh=ranks.mesh, mp_policy=policy)
    y = model(x)
    y.backward(dy)
    right = cupynorm.layer_norm(x, 8, *leaves)
    right.backward(dy)
    assert y.dtype == torch.bfloat16 and torch.equal(y, right)
    for parameter, leaf in zip(norm.parameters(), leaves):
        average = leaf.grad.float()
        distributed.all_reduce(average)
        assert (
            parameter.dtype == torch.float32
            and torch.equal(full(parameter.grad), average / 2)
            and average.abs().max() > 0
        )


@check_of_dtensors
def norms_that_are_sharded_already_are_left(ranks):
    """fully_shard gathers weights by hooks of the module, which a swapped module would not have."""
    model = model_of_torch(ranks)
    x, target = ranks.random(4, 3, 6), ranks.random(4, 3, 8, seed=1)
    expected, _ = step(copy.deepcopy(model), x, target)
    fully_shard(model[1].norm_1, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh)
    swapped = cupynorm.swap_norms(model)
    assert len(swapped.left) == NUM_NORMS and not swapped.swapped, swapped
    found, _ = step(model, x, target)
    for name, right in expected.items():
        assert_close(f"gradient of {name}", found[name], right)


def main(backend: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    device = {"gloo": "cpu", "nccl": "cuda"}[backend]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend,
        f"file://{folder}/store",
        timedelta(seconds=60),
        world_size=2,
        rank=rank,
        device_id=torch.device(device, rank) if device == "cuda" else None,
    )
    ranks = Ranks(rank, device, init_device_mesh(device, (2,)) if HAS_SHARDING else None)
    became = dict.fromkeys(CHECKS, "not run, because of the one before")
    for name, function in CHECKS.items():
        became[name] = "not finished"
        (folder / f"{rank}.json").write_text(json.dumps(became))
        try:
            function(ranks)
            became[name] = "passed"
        except Exception:
            became[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(became))
        if became[name] != "passed":
            break
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
