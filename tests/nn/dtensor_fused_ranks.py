"""Checks of fused options and 8-bit outputs of DTensors on two ranks."""

from __future__ import annotations

import itertools

import torch
from rank_checks import NORMS, check, full, ours
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import cupynorm

SHAPE = (5, 4, 8)  # ranks have 3 and 2 of 5 rows


def options_of(ranks, dtype):
    """Keywords by name. Tensors of the input's leading shape lie as the input does."""
    weight, bias = ranks.random(8, seed=4), ranks.random(8, seed=5)
    residual = ranks.random(*SHAPE, seed=6, dtype=dtype)
    row_scale = ranks.random(*SHAPE[:-1], seed=7)
    return {
        "residual_dtype": {"residual": residual, "residual_dtype": "float64"},
        "row_scale": {"row_scale": row_scale, "residual": residual},
        "weight1": {"weight1": weight, "bias1": bias},
        "weight1 on all ranks": {"weight1": ranks.lay(weight, Replicate()), "bias1": bias},
        "round_x_hat": {"round_x_hat": True},
        "memory_efficient": {"memory_efficient": True},
    }


def on_ranks(ranks, given, placement):
    is_split = placement == Shard(2)
    places = {"residual": placement, "row_scale": Replicate() if is_split else placement}
    return {
        name: ranks.lay(each, places[name]) if name in places else each
        for name, each in given.items()
    }


def on_one(given):
    return {
        name: full(each) if isinstance(each, torch.Tensor) else each for name, each in given.items()
    }


def results(norm, x, weight, bias, dy, given):
    """Outputs, and the gradients of all tensors that have one."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves |= {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    constants = {name: leaves.pop(name) for name in ("row_scale",) if name in leaves}
    leaves = {name: each.detach().clone().requires_grad_() for name, each in leaves.items()}
    options = {name: each for name, each in given.items() if name not in leaves} | constants
    tensors = {name: each for name, each in leaves.items() if name not in ("x", "weight", "bias")}
    made = ours(
        norm,
        leaves["x"],
        leaves["weight"],
        leaves["bias"],
        return_residual=True,
        **options,
        **tensors,
    )
    torch.autograd.backward(made, [dy.to(each.dtype) for each in made])
    return made, {name: each.grad for name, each in leaves.items()}


def assert_same(name, got, right, dtype=None):
    """Of each row the bits are those of the unsharded call; sums over rows add in another order.

    dtype: in which kernels add, that of the input; by default that of the result.
    """
    got = full(got)
    assert got.dtype == right.dtype and right.abs().max() > 0, name
    if name in ("weight", "bias", "weight1", "bias1"):
        eps = torch.finfo(dtype or right.dtype).eps
        atol = eps * right.abs().max().item() * 2**4
        torch.testing.assert_close(got, right, rtol=0, atol=atol, msg=lambda text: f"{name} {text}")
    else:
        assert torch.equal(got, right), name


@check
def fused_options(ranks):
    for dtype in (torch.float64, torch.float32):
        x, dy = (ranks.random(*SHAPE, seed=seed, dtype=dtype) for seed in (0, 3))
        weight, bias = ranks.random(8, seed=1), ranks.random(8, seed=2)
        for name, given in options_of(ranks, dtype).items():
            norm = NORMS[len(name) % 2]
            right, gradients = results(norm, x, weight, bias, dy, on_one(given))
            for placement in (Shard(0), Shard(1), Replicate(), Shard(2), Partial()):
                made, found = results(
                    norm,
                    ranks.lay(x, placement),
                    ranks.lay(weight, Replicate()),
                    bias,
                    ranks.lay(dy, Shard(0)),
                    on_ranks(ranks, given, placement),
                )
                is_kept = placement in (Shard(0), Shard(1))
                for one, other in zip(made, right, strict=True):
                    assert one.placements == ((placement,) if is_kept else (Replicate(),))
                    assert_same(f"{name} {placement}", one, other)
                for leaf, gradient in gradients.items():
                    assert_same(leaf, found[leaf], gradient, dtype)
                assert type(found["bias"]) is torch.Tensor


@check
def dropout(ranks):
    """Each part of the rows has a mask of its own; copies of rows have the same."""
    x, dy, weight = ranks.random(*SHAPE), ranks.random(*SHAPE, seed=3), ranks.random(8, seed=1)
    seeds = (7, -(2**63), torch.tensor([2**40], device=ranks.device))
    lay = ranks.lay

    def own_part(tensor, placement):
        return lay(tensor, placement).to_local()

    for placement in (Shard(0), Shard(1), Replicate()):
        number = ranks.rank * placement.is_shard()
        for seed in seeds:
            made = []
            own = seed + (number << 32)
            for each, laid in ((seed, lay), (own, own_part)):
                rows = laid(x, placement).detach().clone().requires_grad_()
                y = cupynorm.layer_norm(rows, 8, weight, dropout_p=0.5, dropout_seed=each)
                y.backward(laid(dy, placement))
                made.append((y, rows.grad))
            for got, right in zip(*made):
                assert torch.equal(got.to_local(), right) and (right != 0).any()
            dropped = full(made[0][1]) == 0
            assert 0 < dropped.double().mean() < 1
            if placement == Shard(0):
                assert not torch.equal(dropped[:2], dropped[3:])
    options = {"dropout_p": 0.5, "return_residual": True}
    for _ in range(4):  # a scale that is found belongs to the mask of this call
        rows = lay(x.float(), Shard(0))
        y, added = cupynorm.rms_norm(rows, 8, out_dtype="float8_e4m3fn", scale="tensor", **options)
        largest = cupynorm.rms_norm(full(added), 8).abs().max()
        torch.testing.assert_close(448 * full(y.scale_inv), largest.reshape(1))
    sharded = [cupynorm.rms_norm(lay(x, Shard(0)), 8, dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*(full(each) for each in sharded))
    try:
        cupynorm.rms_norm(lay(x, Replicate()), 8, dropout_p=0.5)
    except ValueError as error:
        assert "dropout_p was given without dropout_seed for a DTensor" in str(error)
    else:
        raise AssertionError("nothing was raised")


GRANULARITIES = (
    {"scale": "tensor"},
    {"scale": "tensor", "power_of_two": True},
    {"scale": "row"},
    {"scale": "block"},
    {"scale": "mx"},
    {"scale": 2.5},
    {"scale": None},
)


@check
def eight_bits(ranks):
    """Data, scales, values and gradients have the bits of the unsharded call."""
    largest = ranks.random(*SHAPE)
    largest[-1] *= 30.0  # the amax of all is on one rank
    weight = ranks.random(8, seed=1).abs() + 1.0
    dy = ranks.random(*SHAPE, seed=3).float()

    def bits(tensor):
        return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor

    for given in GRANULARITIES:
        for placement in (Shard(0), Shard(1), Replicate()):
            made = []
            for lay in (lambda tensor, at: tensor, ranks.lay):
                options = dict(given)
                if not isinstance(given["scale"], str):
                    if given["scale"]:
                        options["scale"] = torch.full((1,), given["scale"], device=ranks.device)
                    options["amax"] = torch.zeros(1, device=ranks.device)
                x = lay(largest.float(), placement).detach().requires_grad_()
                y = cupynorm.layer_norm(x, 8, weight, out_dtype="float8_e4m3fn", **options)
                y.dequantize(torch.float32).backward(lay(dy, placement))
                made.append((y, x.grad, options.get("amax")))
            (right, dx, amax), (got, dx_of_ranks, amax_of_ranks) = made
            assert got.data.placements == dx_of_ranks.placements == (placement,)
            assert got.data.shape == right.data.shape and got.dtype == right.dtype
            own = ranks.lay(bits(right.data), placement).to_local()
            assert torch.equal(bits(got.data.to_local()), own), (given, placement)
            assert torch.equal(full(got.scale_inv), right.scale_inv), (given, placement)
            assert torch.equal(full(got.dequantize()), right.dequantize())
            assert torch.equal(full(dx_of_ranks), dx) and dx.abs().max() > 0
            assert amax is None or torch.equal(amax, amax_of_ranks) and amax > 0


@check
def a_transposed_copy_in_8_bits(ranks):
    options = {"out_dtype": "float8_e5m2", "scale": "tensor", "transpose": True}
    both = (Shard(0), Shard(1)), (Replicate(), Replicate())
    for num_rows, (placement, turned) in itertools.product((5, 1), both):
        x = ranks.random(num_rows, 8, dtype=torch.float32)  # of one row rank 1 has none
        right = cupynorm.rms_norm(x, 8, **options)
        made = cupynorm.rms_norm(ranks.lay(x, placement), 8, **options)
        assert made.transposed.placements == (turned,)
        own = ranks.lay(right.transposed.view(torch.uint8), turned).to_local()
        assert torch.equal(made.transposed.to_local().view(torch.uint8), own)
    try:
        cupynorm.rms_norm(ranks.lay(x[None], Shard(1)), 8, **options)
    except NotImplementedError as error:
        assert "transpose is True for a DTensor of shape (1, 1, 8)" in str(error)
    else:
        raise AssertionError("nothing was raised")


@check
def compiled_fused_options(ranks):
    x, dy, weight = ranks.random(*SHAPE), ranks.random(*SHAPE, seed=3), ranks.random(8, seed=1)
    row_scale = ranks.random(*SHAPE[:-1], seed=7)

    def call(x, row_scale):
        return ours("rms_norm", x, weight, None, row_scale=row_scale, weight1=weight)

    made = []
    for each in (torch.compile(call, backend="aot_eager"), call):
        rows = ranks.lay(x, Shard(1)).detach().requires_grad_()
        y, y1 = each(rows, ranks.lay(row_scale, Shard(1)))
        (y + y1).backward(ranks.lay(dy, Shard(1)))
        made.append((y, y1, rows.grad))
    for got, right in zip(*made):
        assert got.placements == (Shard(1),) and torch.equal(full(got), full(right))


@check
def modules_with_fp8_output(ranks):
    """The scales of DelayedScaling, and the data, are those of the unsharded module."""
    recipes = cupynorm.DelayedScaling(amax_history_len=2), cupynorm.CurrentScaling()
    for recipe in recipes:
        sharded, single = (cupynorm.RMSNorm(8, device=ranks.device) for _ in range(2))
        for step in range(3):
            made = []
            for norm, lay in ((sharded, ranks.lay), (single, lambda tensor, at: tensor)):
                x = ranks.random(*SHAPE, seed=step).float()
                x[-1] *= 30.0
                x = lay(x, Shard(0)).detach().requires_grad_()
                with cupynorm.fp8_autocast(recipe=recipe):
                    y = norm(x, fp8_output=True)
                y.dequantize().backward(lay(ranks.random(*SHAPE, seed=9).float(), Shard(0)))
                made.append((y.dequantize(), y.scale_inv, x.grad))
            for got, right in zip(*made):
                assert torch.equal(full(got), right) and right.abs().max() > 0
            assert_same("weight", sharded.weight.grad, single.weight.grad)


@check
def meshes_of_two_dimensions(ranks):
    """One of them shards rows, the other shards other rows, or has copies."""
    x, weight = ranks.random(4, 6, 8, dtype=torch.float32), ranks.random(8, seed=1)
    options = {"out_dtype": "float8_e4m3fn", "scale": "tensor"}
    right = cupynorm.layer_norm(x, 8, weight, **options)
    for mesh_shape, placements, number in (
        ((2, 1), [Shard(0), Shard(1)], ranks.rank),
        ((1, 2), [Replicate(), Shard(1)], ranks.rank),
        ((2, 1), [Replicate(), Shard(0)], 0),
    ):
        mesh = init_device_mesh(ranks.device, mesh_shape)
        rows = distribute_tensor(x, mesh, placements)
        made = cupynorm.layer_norm(rows, 8, weight, **options)
        assert torch.equal(full(made.dequantize()), right.dequantize())
        assert torch.equal(full(made.scale_inv), right.scale_inv)
        got = cupynorm.layer_norm(rows, 8, weight, dropout_p=0.5, dropout_seed=3)
        own = rows.to_local(), 8, weight
        expected = cupynorm.layer_norm(*own, dropout_p=0.5, dropout_seed=3 + (number << 32))
        assert torch.equal(got.to_local(), expected)
