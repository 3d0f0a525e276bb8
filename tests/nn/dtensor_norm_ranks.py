"""Checks of norms of DTensors on two ranks."""

from __future__ import annotations

from functools import partial

import torch
from rank_checks import NORMS, assert_close, check, full, ours, theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import cupynorm
from cupynorm.gpu import arrays


def gradients(call, tensors, dy):
    """y and the gradients of new leaves with the values and placements of tensors."""
    given = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y = call(*given)
    y.backward(dy)
    return [y, *(tensor.grad for tensor in given)]


def assert_same(what, found, expected):
    names = ("y", "dx", "dweight", "dbias")
    for name, got, right in zip(names[: len(found)], found, expected, strict=True):
        assert_close(f"{what} {name}", got, right)


def check_placement(ranks, norm, placement, dy_placement, on_ranks, shape=(5, 4, 8)):
    """on_ranks: makes of a weight the tensor that each rank has."""
    whole = ranks.random(*shape), ranks.random(8, seed=1), ranks.random(8, seed=2)
    dy = ranks.random(*shape, seed=3)
    expected = gradients(partial(theirs, norm), whole, dy)
    x, dy = ranks.lay(whole[0], placement), ranks.lay(dy, dy_placement)
    found = gradients(partial(ours, norm), (x, *map(on_ranks, whole[1:])), dy)
    assert_same(f"{norm} {placement} {dy_placement}", found, expected)
    return found


def placements(shape=(5, 4, 8)):
    """Sharded rows, replicated rows, split rows, and partial sums of rows."""
    return [*map(Shard, range(len(shape) - 1)), Replicate(), Shard(len(shape) - 1), Partial()]


@check
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
                    is_split = placement == Shard(2)
                    assert y.placements == (Replicate() if is_split else placement,)


@check
def plain_parameters_count_as_the_same_on_every_rank(ranks):
    for norm in NORMS:
        for placement in placements():
            *_, dweight, dbias = check_placement(
                ranks, norm, placement, Shard(0), lambda weight: weight
            )
            assert type(dweight) is type(dbias) is torch.Tensor


@check
def rows_that_do_not_share_out_evenly(ranks):
    for shape in ((1, 8), (3, 8), (8,), (0, 8)):
        for placement in (Shard(0), Replicate()):
            if shape == (0, 8) or placement == Shard(0) == Shard(len(shape) - 1):
                continue
            check_placement(ranks, "layer_norm", placement, placement, lambda weight: weight, shape)


@check
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
    assert_same("", found, expected)


@check
def parameters_of_split_rows(ranks):
    """A weight may be split as the rows are."""
    x, dy = ranks.random(5, 8), ranks.random(5, 8, seed=1)
    weight, bias = ranks.random(8, seed=2), ranks.random(8, seed=3)
    for norm in NORMS:
        expected = gradients(partial(theirs, norm), (x, weight, bias), dy)
        given = ranks.lay(x, Shard(1)), ranks.lay(weight, Shard(0)), ranks.lay(bias, Shard(0))
        found = gradients(partial(ours, norm), given, ranks.lay(dy, Shard(1)))
        assert_same(norm, found, expected)


@check
def residuals_and_options(ranks):
    x, residual = ranks.random(5, 4, 8), ranks.random(5, 4, 8, seed=1)
    weight, dy = ranks.random(8, seed=2), ranks.random(5, 4, 8, seed=3)

    def our(norm, x, residual, weight):
        options = {"return_residual": True, "zero_centered_weight": True}
        y, added = ours(norm, x, weight, None, residual=residual, **options)
        return y * added

    def torchs(norm, x, residual, weight):
        return theirs(norm, x + residual, 1 + weight, None) * (x + residual)

    others = ranks.lay(residual, Shard(0)), ranks.lay(weight, Replicate())
    for norm in NORMS:
        expected = gradients(partial(torchs, norm), (x, residual, weight), dy)
        for placement in (Shard(1), Shard(2)):
            given = ranks.lay(x, placement), *others
            found = gradients(partial(our, norm), given, ranks.lay(dy, Shard(1)))
            assert_same(f"{norm} of x, residual and weight", found, expected)


@check
def compiled(ranks):
    whole = ranks.random(5, 4, 8), ranks.random(8, seed=1), ranks.random(8, seed=2)
    dy = ranks.random(5, 4, 8, seed=3)
    expected = gradients(partial(theirs, "layer_norm"), whole, dy)
    call = torch.compile(partial(ours, "layer_norm"), fullgraph=True, backend="aot_eager")
    for on_ranks in (partial(ranks.lay, placement=Replicate()), lambda weight: weight):
        found = gradients(
            call,
            (ranks.lay(whole[0], Shard(0)), *map(on_ranks, whole[1:])),
            ranks.lay(dy, Shard(0)),
        )
        assert_same("", found, expected)


@check
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
    of_row, given = ranks.random(4), "was given and an argument is a DTensor; expected to_local()"
    norm, rms, forward = cupynorm.layer_norm, cupynorm.rms_norm, cupynorm.layer_norm_forward
    backward = cupynorm.layer_norm_backward
    silu, too_few = cupynorm.functors.silu_gate(gate=x), ranks.lay(ranks.random(3, 8), Shard(0))
    plain = "and another argument is a DTensor; expected a DTensor too"
    for call, sentence in (
        (partial(norm, x, 8, there), f"input is a Tensor {plain}"),
        (partial(rms, x, 8, weight, residual=rows), f"input is a Tensor {plain}"),
        (partial(norm, rows, 8, residual=x), f"residual is a Tensor {plain}"),
        (partial(norm, rows, 8, residual=too_few), "residual has shape (3, 8)"),
        (partial(norm, rows, 8, fuse=silu), f"fuse {given}"),
        (partial(norm, rows, 8, out=x), f"out {given}"),
        (partial(rms, rows, 8, out_dtype="float8_e5m2"), f"an 8-bit out_dtype {given}"),
        (partial(norm, rows, 7), "normalized_shape is (7,), input has shape (2, 8)"),
        (partial(forward, rows, 8, weight), "input is a DTensor, which has no address"),
        (partial(forward, x, 8, there), "weight is a DTensor, which has no address"),
        (
            partial(backward, x, rows, 8, of_row, of_row, weight),
            "x is a DTensor, which has no address",
        ),
        (
            partial(cupynorm.layer_norm_linear, x, weight, None, ranks.lay(x, Replicate())),
            "a weight or bias is a DTensor and input is a Tensor; expected input to be a DTensor",
        ),
    ):
        try:
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            assert sentence in str(error), error
        else:
            raise AssertionError(f"nothing was raised; expected: {sentence}")


@check
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
