"""LayerNormLinear: arguments, parameters and results."""

from __future__ import annotations

import contextlib
import copy
import inspect

import pytest
from linear_bounds import assert_right

torch = pytest.importorskip("torch")
from linear_cases import (  # noqa: E402
    CPU,
    DEVICES,
    SPLIT,
    as_float64,
    gradients_of,
    problem_of,
    tensor,
)

from cupynorm import LayerNormLinear  # noqa: E402

pytestmark = pytest.mark.usefixtures("sums_in_float32")

# The arguments of TransformerEngine's constructor in order, with their defaults.
ARGUMENTS = {
    "in_features": inspect.Parameter.empty,
    "out_features": inspect.Parameter.empty,
    "eps": 1e-5,
    "sequence_parallel": False,
    "fuse_wgrad_accumulation": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "init_method": None,
    "bias": True,
    "normalization": "LayerNorm",
    "return_bias": False,
    "params_dtype": None,
    "parallel_mode": None,
    "return_layernorm_output": False,
    "return_layernorm_output_gathered": False,
    "parameters_split": None,
    "zero_centered_gamma": False,
    "device": "cuda",
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_bulk_dgrad": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "name": None,
}


def test_the_arguments_are_those_of_transformer_engine():
    given = list(inspect.signature(LayerNormLinear).parameters.values())
    positional = [each for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert {each.name: each.default for each in positional} == ARGUMENTS and len(ARGUMENTS) == 28
    assert [each.name for each in positional] == list(ARGUMENTS)
    assert [each.name for each in given[28:]] == [
        "save_normalized",
        "fused",
        "sm_margin",
        "reduce_norm_gradients",
    ]
    called = {
        each.name: each.default
        for each in inspect.signature(LayerNormLinear.forward).parameters.values()
    }
    assert list(called)[1:] == ["inp", "is_first_microbatch", "fp8_output", "fp8_grad"]
    assert list(called.values())[2:] == [None, False, False]


NORM = ["layer_norm_weight", "layer_norm_bias"]


@pytest.mark.parametrize(
    "options, names",
    (
        ({}, [*NORM, "weight", "bias"]),
        ({"normalization": "RMSNorm", "bias": False}, ["layer_norm_weight", "weight"]),
        (
            {"parameters_split": ("query", "key_")},
            [*NORM, "query_weight", "key_weight", "query_bias", "key_bias"],
        ),
        (
            {"parameters_split": SPLIT, "bias": False},
            [*NORM, "q_weight", "k_weight", "v_weight"],
        ),
    ),
    ids=str,
)
def test_parameters_and_state_dict(options, names):
    module, other = (LayerNormLinear(24, 16, **options, **CPU) for _ in range(2))
    assert [name for name, _ in module.named_parameters()] == names
    assert [name for name in module.state_dict() if name != "_extra_state"] == names
    assert (module.layer_norm_weight == 1).all() and not any(map(torch.any, module.biases()))
    other.load_state_dict(module.state_dict(), strict=True)
    x = torch.randn(3, 24)
    assert torch.equal(other(x), module(x))
    zero = LayerNormLinear(24, 16, **options, zero_centered_gamma=True, **CPU)
    assert (zero.layer_norm_weight == 0).all()
    assert (module.layer_norm_bias is None) == (options.get("normalization") == "RMSNorm")
    if options.get("bias") is False:
        assert all(getattr(module, name).shape == (0,) for name in module.bias_names)
    sizes = module.parameter_split_sizes
    assert [len(each) for each in module.weights()] == sizes and sum(sizes) == 16
    assert module.weight_names == [name for name in names if name.endswith("weight")][1:]


def lie_together(module) -> bool:
    weights = module.weights()
    return all(
        before.data_ptr() + before.numel() * before.element_size() == after.data_ptr()
        for before, after in zip(weights, weights[1:])
    )


def test_splits_stay_views_of_one_buffer():
    module = LayerNormLinear(24, 16, parameters_split=SPLIT, **CPU)
    x = torch.randn(3, 24)
    y = module(x)
    on_meta = LayerNormLinear(24, 16, parameters_split=SPLIT, device="meta").to_empty(device="cpu")
    on_meta.load_state_dict(module.state_dict())
    for moved in (module, copy.deepcopy(module), module.double().float(), on_meta):
        assert lie_together(moved) and torch.equal(moved(x), y)
    # Parameters in separate buffers are copied, and give the same result.
    apart, state = LayerNormLinear(24, 16, parameters_split=SPLIT, **CPU), module.state_dict()
    apart.load_state_dict({name: each.clone() for name, each in state.items()}, assign=True)
    assert not lie_together(apart) and torch.equal(apart(x), y)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "float64"))
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"normalization": "RMSNorm", "zero_centered_gamma": True},
        {"bias": False, "save_normalized": True},
        {"parameters_split": SPLIT, "return_bias": True},
        {"parameters_split": ("a", "b"), "return_layernorm_output": True},
        {
            "return_bias": True,
            "return_layernorm_output": True,
            "return_layernorm_output_gathered": True,
        },
        {"normalization": "RMSNorm", "return_bias": True, "bias": False},
    ),
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_results_and_gradients_are_within_bounds(device, options, dtype):
    module = LayerNormLinear(
        24, 16, 0.01, params_dtype=getattr(torch, dtype), device=device, **options
    )
    returns_normalized, returns_bias = (
        options.get("return_layernorm_output", False),
        options.get("return_bias", False),
    )
    problem = problem_of(module, dtype=dtype, eps=0.01, dnormalized=returns_normalized)
    x = tensor(problem.x, dtype, device, grad=True)
    results = module(x)
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == 1 + returns_bias + returns_normalized
    y, outside = results[0], [tensor(problem.dy, dtype, device)]
    if returns_bias:
        returned = results[1]
        assert returned.dtype == y.dtype and returned.shape == ((16,) if module.use_bias else (0,))
        if module.use_bias:
            y = y + returned  # as the caller does
    results = [y, *results[2 if returns_bias else 1 :]]
    if returns_normalized:
        outside.append(tensor(problem.dnormalized, dtype, device))
    torch.autograd.backward(results, outside)
    found = as_float64(dict(zip(("y", "normalized"), results)) | {"dx": x.grad}) | gradients_of(
        module
    )
    # y is rounded once more where the caller adds the bias.
    left_out = ("y", "dbias") if returns_bias and dtype == "bfloat16" else ()
    assert_right(
        problem, found, ("sum", *(() if returns_normalized else ("normalized",)), *left_out)
    )


def test_initial_values_and_their_random_state():
    seen = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, *names):
            seen.append(("enter", names))
            yield
            seen.append(("leave", names))

    def fill(weight):
        seen.append(tuple(weight.shape))
        weight.fill_(2.0)

    module = LayerNormLinear(
        24,
        16,
        None or 1e-5,
        get_rng_state_tracker=Tracker,
        init_method=fill,
        parameters_split=SPLIT,
        **CPU,
    )
    assert seen == [
        each for size in (8, 4, 4) for each in (("enter", ()), (size, 24), ("leave", ()))
    ]
    assert all((weight == 2).all() for weight in module.weights())
    seen.clear()
    module.rng_tracker_name = "model-parallel"
    module.reset_parameters()
    assert seen[0] == ("enter", ("model-parallel",)) and len(seen) == 9
    torch.manual_seed(0)
    weight = LayerNormLinear(500, 400, **CPU).weight
    # Of 200,000 draws, the standard deviation has a standard error of 0.16%.
    assert abs(weight.std() / 0.023 - 1) < 0.01 and abs(weight.mean()) < 3e-4


def test_attributes_for_reductions_of_gradients():
    for mode in (None, "column"):
        module = LayerNormLinear(24, 16, parallel_mode=mode, ub_name="qkv", name="layer", **CPU)
        for again in (module, copy.deepcopy(module), module.double()):
            assert (
                again.layer_norm_weight.sequence_parallel
                is again.layer_norm_bias.sequence_parallel
                is False
            )
            for parameter, is_marked in ((again.weight, True), (again.bias, mode == "column")):
                assert getattr(parameter, "tensor_model_parallel", False) == is_marked
                assert getattr(parameter, "partition_dim", None) == (0 if is_marked else None)
                assert getattr(parameter, "partition_stride", None) == (1 if is_marked else None)


class Group:
    def __init__(self, num_ranks):
        self.num_ranks = num_ranks

    def size(self):
        return self.num_ranks


@pytest.mark.parametrize("mode", (None, "column", "row"))
def test_with_one_rank_no_argument_of_parallelism_matters(mode):
    flags = ("sequence_parallel", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad")
    flags += ("ub_bulk_wgrad", "ub_bulk_dgrad", "return_layernorm_output_gathered")
    flags += ("reduce_norm_gradients", "return_layernorm_output")
    module = LayerNormLinear(
        24,
        16,
        tp_group=Group(1),
        parallel_mode=mode,
        symmetric_ar_type="multimem_all_reduce",
        ub_name="qkv",
        **dict.fromkeys(flags, True),
        **CPU,
    )
    plain = LayerNormLinear(24, 16, return_layernorm_output=True, **CPU)
    plain.load_state_dict(module.state_dict())
    module.set_tensor_parallel_group(None)
    x = torch.randn(3, 24)
    for got, right in zip(module(x), plain(x)):
        assert torch.equal(got, right)
    assert module.weight.shape == (16, 24) and not module.layer_norm_weight.sequence_parallel


def test_a_group_that_does_not_fit_is_refused_before_any_call():
    with pytest.raises(ValueError, match="tp_group has 3 ranks and tp_size is 2; expected the sam"):
        LayerNormLinear(24, 16, tp_group=Group(3), tp_size=2, parallel_mode="column", **CPU)
    module = LayerNormLinear(24, 16, tp_size=2, parallel_mode="column", **CPU)
    with pytest.raises(ValueError, match="tp_group has 4 ranks and tp_size is 2"):
        module.set_tensor_parallel_group(Group(4))
    with pytest.raises(RuntimeError, match="tp_size is 2 and the layer has no tp_group; expected "):
        module(torch.ones(3, 24))


def test_a_layer_on_meta_can_be_filled_later():
    module = LayerNormLinear(24, 16, device="meta", parallel_mode="column")
    assert all(each.is_meta for each in module.parameters()) and module.weight.partition_dim == 0
    module.to_empty(device="cpu").reset_parameters()
    assert (
        (module.layer_norm_weight == 1).all()
        and 0.01 < module.weight.std() < 0.04
        and (module.bias == 0).all()
    )
    assert module.weight.partition_dim == 0


def test_repr_shows_options_that_are_not_default():
    assert (
        repr(LayerNormLinear(24, 16, **CPU)) == "LayerNormLinear(in_features=24, out_features=16)"
    )
    module = LayerNormLinear(
        24, 16, 0.1, bias=False, normalization="RMSNorm", fused="kernel", **CPU
    )
    assert (
        repr(module) == "LayerNormLinear(in_features=24, out_features=16, eps=0.1, bias=False, "
        "normalization='RMSNorm', fused='kernel')"
    )
