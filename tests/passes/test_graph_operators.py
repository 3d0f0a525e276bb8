"""The operators of compiled graphs give what those of cupynorm.nn give."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", "2.11")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.passes import graph_operators  # noqa: E402
from cupynorm.passes.graph_operators import BACKWARD, FORWARD, FORWARD_RESULTS, text_of  # noqa: E402

WIDTH = 24


def given(*shapes, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def forward(results, x, weight=None, bias=None, residual=None, arrays=(), **options):
    options = {"normalized_shape": (WIDTH,), "eps": 1e-5, "centered": True} | options
    arguments = (x, weight, bias, residual, None, list(arrays), text_of(results, options))
    made = FORWARD(*arguments)
    with FakeTensorMode() as mode:
        fake = FORWARD(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
    assert [(e.shape, e.dtype) for e in fake] == [(e.shape, e.dtype) for e in made]
    return made


def test_forward_and_backward():
    x, residual, dy = given(*((2, 3, WIDTH),) * 3)
    weight, bias = given((WIDTH,), (WIDTH,))
    expected = cupynorm.layer_norm_forward(x, weight, bias, residual=residual)
    made = forward(FORWARD_RESULTS, x, weight, bias, residual, y1_dtype="bfloat16")
    assert all(map(torch.equal, made, expected)) and torch.equal(made[4], expected.y.bfloat16())
    (y,) = forward(("y",), x, weight, bias, residual, out_dtype="bfloat16")
    assert torch.equal(y, expected.y.bfloat16())
    text = text_of(("dx", "dbias"), {"normalized_shape": (WIDTH,), "centered": True})
    got = BACKWARD(dy, made[3], *made[1:3], weight, residual, None, None, text)
    gradients = cupynorm.layer_norm_backward(
        dy, expected.sum, expected.mean, expected.rstd, weight, dsum=residual
    )
    assert torch.equal(got[0], gradients.dx) and torch.equal(got[1], gradients.dbias)
    dy1 = residual.bfloat16()
    got = BACKWARD(dy, made[3], *made[1:3], weight, None, None, dy1, text)
    gradients = cupynorm.layer_norm_backward(
        dy.double() + dy1.double(), expected.sum, expected.mean, expected.rstd, weight
    )
    assert torch.equal(got[0], gradients.dx) and torch.equal(got[1], gradients.dbias)


def test_the_sum_of_dx():
    """torch adds up what a kernel does not: on the host, and where rows take no ring."""
    x, dy = given((2, 3, WIDTH), (2, 3, WIDTH))
    saved = cupynorm.layer_norm_forward(x)
    options = {"normalized_shape": (WIDTH,), "centered": True, "dx_sum_dtype": "bfloat16"}
    text = text_of(("dx_sum", "dx"), options)
    total, dx = BACKWARD(dy, x, saved.mean, saved.rstd, None, None, None, None, text)
    assert torch.equal(total, dx.sum((0, 1)).bfloat16())


def test_an_eps_of_0_is_kept():
    """It differs from None, torch's machine epsilon."""
    (x,) = given((2, WIDTH))
    x = 1e-4 * x
    for eps in (0.0, None, 0.5):
        (y,) = forward(("y",), x, eps=eps, centered=False)
        assert torch.equal(y, cupynorm.rms_norm(x, WIDTH, eps=eps))
    assert not torch.equal(*(forward(("y",), x, eps=e, centered=False)[0] for e in (0.0, None)))


def test_the_text_of_options():
    """Inductor's C++ puts it between double quotes; numbers of functors may be infinite."""
    options = {"normalized_shape": (WIDTH,), "eps": None, "out_dtype": "float16"}
    text = text_of(("y", "rstd"), options)
    assert '"' not in text and "\\" not in text
    parsed = graph_operators.parsed_forward(text)
    assert parsed.options.eps is None and parsed.options.out_dtype == "float16"
    assert parsed.options.extents == (WIDTH,) and parsed.results == ("y", "rstd")
    numbers = [float("inf"), 0.1, -2.0]
    assert graph_operators.parsed_forward(text_of(("y",), options | {"numbers": numbers}))[
        -1
    ] == tuple(numbers)


def test_a_functor_and_launch_options():
    x, gate = given((2, WIDTH), (2, WIDTH))
    store = cupynorm.functors.silu_gate
    tile = {"pack_size": 4, "threads_per_row": 8}
    tile = cupynorm.Tile(**tile).as_ints()
    (y,) = forward(("y",), x, arrays=(gate,), store=store.text, strategy="warp", tile=tile)
    torch.testing.assert_close(y, cupynorm.layer_norm(x, WIDTH) * torch.nn.functional.silu(gate))
    parsed = graph_operators.parsed_forward(
        text_of(
            ("y",),
            {
                "normalized_shape": (WIDTH,),
                "eps": 1.0,
                "strategy": "warp",
                "tile": tile,
                "sm_margin": 3,
            },
        )
    )
    assert parsed.options.launch.tile == cupynorm.Tile.from_ints(tile)
    assert parsed.options.launch.sm_margin == 3 and parsed.options.launch.strategy == "warp"


@pytest.mark.slow
def test_the_kernels(kernels):
    """y alone takes the kernel without statistics."""
    x, residual = given((3, WIDTH), (3, WIDTH), dtype=torch.bfloat16)
    exact = cupynorm.layer_norm(x.double() + 0, WIDTH)
    (y,) = forward(("y",), x)
    y_too, mean, rstd = forward(("y", "mean", "rstd"), x)
    assert len(kernels) >= 2 and torch.equal(y, y_too)
    torch.testing.assert_close(y.double(), exact.double(), rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(mean, x.float().mean(-1))
    text = text_of(("dx",), {"normalized_shape": (WIDTH,), "centered": True})
    (dx,) = BACKWARD(residual, x, mean, rstd, None, None, None, None, text)
    wide = x.double().requires_grad_()
    torch.nn.functional.layer_norm(wide, (WIDTH,)).backward(residual.double())
    torch.testing.assert_close(dx.double(), wide.grad, rtol=2**-7, atol=2**-7)
