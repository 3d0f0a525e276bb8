"""Arguments that the public calls refuse: the error, its sentence, and that nothing is written."""

from __future__ import annotations

import re

import numpy as np
import pytest
from array_libraries import api, loaded_torch, ones

import cupynorm
from cupynorm.dispatch.problem import Tile
from cupynorm.verify.cases import NORMS

X, ERRORS = ones(4, 40), (TypeError, ValueError)


def torch_ones(*shape: int):
    return loaded_torch().ones(*shape)


def words(value: object) -> str:
    """The sentence of an error, in the name of its test."""
    return value if isinstance(value, str) else ""


REFUSED = [
    ("input is a list; expected a CuPy, torch or NumPy array", lambda: ([1.0], 1)),
    (
        "input is of dtype int64; expected one of float16, bfloat16",
        lambda: (ones(4, 40, dtype="int64"), 40),
    ),
    ("input is of dtype complex64", lambda: (ones(4, 40, dtype="complex64"), 40)),
    (r"normalized_shape is \(40,\), input has shape \(\)", lambda: (ones(), 40)),
    (r"normalized_shape is \(41,\), input has shape \(4, 40\)", lambda: (X, 41)),
    (r"normalized_shape is \(4,\), input has shape", lambda: (X, 4)),
    ("normalized_shape is empty", lambda: (X, ())),
    (r"normalized_shape is 40\.0; expected an int", lambda: (X, 40.0)),
    ("normalized_shape is None; expected an int", lambda: (X, None)),
    *(
        (rf"normalized_shape is {re.escape(repr(wrong))}; expected", lambda wrong=wrong: (X, wrong))
        for wrong in (True, (2, True), "40", ((40,),), 1j, np.float64(40))
    ),
    (r"weight has shape \(41,\); expected \(40,\)", lambda: (X, 40, ones(41))),
    (r"weight has shape \(1, 40\); expected \(40,\)", lambda: (X, 40, ones(1, 40))),
    (r"bias has shape \(39,\); expected \(40,\)", lambda: (X, 40, None, ones(39))),
    ("weight is of dtype int32", lambda: (X, 40, ones(40, dtype="int32"))),
    ("weight is a list; expected a CuPy, torch or NumPy array", lambda: (X, 40, [1.0] * 40)),
    ("weight is a torch tensor on cpu, input is a NumPy array", lambda: (X, 40, torch_ones(40))),
    (
        "weight is a NumPy array, input is a torch tensor on cpu",
        lambda: (torch_ones(4, 40), 40, ones(40)),
    ),
    ("eps is '1e-5'; expected a real number", lambda: (X, 40, None, None, "1e-5")),
    ("eps is nan; expected a real number", lambda: (X, 40, None, None, float("nan"))),
    ("eps is True; expected a real number", lambda: (X, 40, None, None, True)),
    ("eps is None; expected a real number", lambda: (X, 40, None, None, None)),
]


LAUNCHES = [
    ("strategy is 'wrap'; expected one of warp, block, cluster, uncached", {"strategy": "wrap"}),
    (
        "statistics is 'one_pass'; expected 'two_pass', 'welford' or None",
        {"statistics": "one_pass"},
    ),
    ("tile is given without strategy; expected the strategy", {"tile": Tile(8, 32)}),
    ("tile is a str; expected a cupynorm.Tile or a dict", {"strategy": "warp", "tile": "8x32"}),
    (
        "tile has fields packs; expected pack_size, threads_per_row and some of packs_per_thread",
        {"strategy": "warp", "tile": {"packs": 8}},
    ),
    (
        r"tile has pack_size 8\.0; expected an int",
        {"strategy": "warp", "tile": Tile(8.0, 32, 1, 4)},
    ),
    (
        "tile has exact True; expected an int",
        {"strategy": "warp", "tile": {"pack_size": 8, "threads_per_row": 32, "exact": True}},
    ),
    (
        "path 'smem'; expected one of registers, bundle",
        {"strategy": "warp", "tile": Tile(4, 32, 1, 4, path="smem")},
    ),
    ("sm_margin is -1; expected a number of multiprocessors", {"sm_margin": -1}),
    ("sm_margin is True; expected a number of multiprocessors", {"sm_margin": True}),
]


OPTIONS = [
    ("launch is a str; expected a cupynorm.Launch or None", {"launch": "warp"}),
    ("out_dtype is 'int32'; expected one of float16", {"out_dtype": "int32"}),
    ("out_dtype is 'float17'; expected one of float16", {"out_dtype": "float17"}),
    (r"residual has shape \(4, 41\); expected \(4, 40\)", {"residual": ones(4, 41)}),
    ("residual is of dtype int64", {"residual": ones(4, 40, dtype="int64")}),
]


OUTS = [
    (r"out has shape \(40, 4\); expected the input's, \(4, 40\)", lambda: ones(40, 4)),
    ("out is of dtype float64; expected float32", lambda: ones(4, 40, dtype="float64")),
    ("out is a torch tensor on cpu, input is a NumPy array", lambda: torch_ones(4, 40)),
    (
        r"out is a list; expected an array of the input's library, or a tuple \(y, sum\)",
        lambda: [[1.0] * 40] * 4,
    ),
    (r"out has strides \(80, 2\); expected rows that are contiguous", lambda: ones(4, 80)[:, ::2]),
    (r"out has strides \(1, 4\); expected rows that are contiguous", lambda: ones(40, 4).T),
    (
        r"out has strides \(20, 1\); expected rows that are contiguous and do not overlap",
        lambda: np.lib.stride_tricks.as_strided(ones(200), (4, 40), (80, 4)),
    ),
]


@pytest.mark.parametrize("sentence, arguments", REFUSED, ids=words)
def test_wrong_arguments_are_refused(sentence, arguments):
    out = ones(4, 40)
    with pytest.raises(ERRORS, match=sentence):
        cupynorm.layer_norm(*arguments(), out=out)
    assert (out == 1).all()


@pytest.mark.parametrize("sentence, options", LAUNCHES, ids=words)
def test_a_wrong_launch_is_refused_when_it_is_made(sentence, options):
    with pytest.raises(ERRORS, match=sentence):
        cupynorm.Launch(**options)


@pytest.mark.parametrize("sentence, options", OPTIONS, ids=words)
@pytest.mark.parametrize("norm_name", NORMS)
def test_wrong_options_are_refused(norm_name, sentence, options):
    out = ones(4, 40)
    for call in (getattr(cupynorm, norm_name), api(norm_name, "forward")):
        with pytest.raises(ERRORS, match=sentence):
            call(X, 40, out=out, **options)
        assert (out == 1).all()


@pytest.mark.parametrize("sentence, make", OUTS, ids=words)
def test_a_wrong_out_is_refused(sentence, make):
    out = make()
    with pytest.raises(ERRORS, match=sentence):
        cupynorm.layer_norm(X, 40, out=out)
    assert (np.asarray(out) == 1).all()


@pytest.mark.parametrize("shared", ["input", "weight", "bias", "residual"])
def test_out_that_shares_memory_with_an_argument_is_refused(shared):
    memory = ones(8, 40)
    given = {"input": ones(4, 40), "weight": ones(40), "bias": ones(40), "residual": ones(4, 40)}
    given[shared] = memory[3] if shared in ("weight", "bias") else memory[2:6]
    with pytest.raises(
        ValueError, match=f"out shares memory with {shared}; expected memory of its own"
    ):
        cupynorm.layer_norm(**given, normalized_shape=40, out=memory[:4])
    assert (memory == 1).all()
    # Adjacent parts of one buffer share no memory.
    given[shared] = memory[4] if shared in ("weight", "bias") else memory[4:]
    assert cupynorm.layer_norm(**given, normalized_shape=40, out=memory[:4]).base is not None


SHARED = [
    ("out has 3 arrays; expected one array, or (y, sum)", {"out": (None, None, None)}),
    (
        "out has a sum, and nothing is added to the input; expected one array, or a residual",
        {"out": (None, "x")},
    ),
    (
        "out shares memory with residual; expected memory of its own, or exactly that of the input",
        {"residual": "residual", "out": ("residual", "x")},
    ),
    (
        "the sum of out shares memory with out; expected memory of its own, or exactly that of the "
        "residual",
        {"residual": "residual", "out": ("new", "new")},
    ),
    (
        "the sum of out has shape (4, 39); expected the input's, (4, 40)",
        {"residual": "residual", "out": (None, np.ones((4, 39), "float32"))},
    ),
    (
        "the sum of out is of dtype float64; expected float32",
        {"residual": "residual", "out": (None, np.ones((4, 40)))},
    ),
    (
        "out was given with out_dtype float8_e4m3fn; expected out=None",
        {"out_dtype": "float8_e4m3fn", "out": "x"},
    ),
    (
        "out is the input, and functor rotary reads other columns; expected memory of its own",
        {"fuse": "rotary", "out": "x"},
    ),
]


@pytest.mark.parametrize("sentence, options", SHARED, ids=words)
def test_an_out_that_cannot_be_in_place_is_refused(sentence, options):
    given = {name: np.ones((4, 40), "float32") for name in ("x", "residual", "new")}
    angles = np.zeros((4, 40), "float32")
    given["rotary"] = cupynorm.functors.rotary(cos=angles, sin=angles)

    def put(value):
        if isinstance(value, tuple):
            return tuple(map(put, value))
        return given.get(value, value) if isinstance(value, str) else value

    with pytest.raises(ERRORS, match=f"^{re.escape(sentence)}$"):
        cupynorm.layer_norm(given["x"], 40, **{key: put(each) for key, each in options.items()})
    assert all((given[name] == 1).all() for name in ("x", "residual", "new"))


def test_tensors_of_other_devices_and_out_with_gradients_are_refused():
    torch = loaded_torch()
    with pytest.raises(
        TypeError,
        match="input is a torch tensor on meta, which has no memory; "
        "expected one on the CPU or on a CUDA device",
    ):
        cupynorm.layer_norm_forward(torch.empty(4, 40, device="meta"), 40, round_x_hat=True)
    x, out = torch.ones(4, 40, requires_grad=True), torch.ones(4, 40)
    with pytest.raises(
        ValueError,
        match="out was given for tensors that require gradients; "
        "expected out=None, or torch.no_grad",
    ):
        cupynorm.layer_norm(x, 40, out=out)
    gate = cupynorm.functors.silu_gate(torch.ones(4, 40))
    for options in ({"residual": out, "out": (None, out)}, {"out": out, "fuse": gate}):
        with pytest.raises(ValueError, match="out was given for tensors that require gradients"):
            cupynorm.layer_norm(x, 40, **options)
    for given in (2 * x, (None, 2 * x)):
        with pytest.raises(ValueError, match="out was given for tensors that require gradients"):
            cupynorm.layer_norm(out, 40, residual=out.clone(), out=given)
    assert (out == 1).all()


@pytest.mark.parametrize("options", [{}, {"round_x_hat": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "_mkldnn"])
@pytest.mark.parametrize("name", ["torch-cpu", pytest.param("torch-cuda", marks=pytest.mark.gpu)])
def test_sparse_tensors_are_refused(name, layout, options):
    torch = loaded_torch()
    if layout == "_mkldnn" and (name == "torch-cuda" or not torch.backends.mkldnn.is_available()):
        pytest.skip("no tensors of this layout here")
    x, of_row = (
        torch.ones(*shape, device=name.removeprefix("torch-")) for shape in ((4, 40), (4,))
    )
    sparse = x.to_mkldnn() if layout == "_mkldnn" else x.to_sparse(layout=getattr(torch, layout))
    dtypes = {"dx_dtype": "float32"} if options else {}
    for argument, call in (
        ("input", lambda: cupynorm.layer_norm(sparse, 40, **options)),
        ("input", lambda: cupynorm.rms_norm(sparse.detach().requires_grad_(), 40, **options)),
        ("residual", lambda: cupynorm.rms_norm(x, 40, residual=sparse, **options)),
        ("out", lambda: cupynorm.layer_norm(x, 40, out=sparse, **options)),
        ("input", lambda: cupynorm.layer_norm_forward(sparse, 40, **options)),
        ("dy", lambda: cupynorm.rms_norm_backward(sparse, x, 40, of_row, **dtypes)),
    ):
        with pytest.raises(
            TypeError, match=f"{argument} is a torch tensor of layout {layout}; expected a dense"
        ):
            call()
