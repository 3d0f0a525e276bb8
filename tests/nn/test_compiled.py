"""Calls in torch.compile, torch.export and make_fx: torch's operations, near the eager results."""

from __future__ import annotations

import functools
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from norm_calls import assert_few_roundings, leaves, random  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import cupynorm  # noqa: E402


def block(x, weight, bias, residual):
    """A pre-norm block of both norms, a residual, its sum, and torch operations between them."""
    y, added = cupynorm.layer_norm(2 * x, 40, weight, bias, residual=residual, return_residual=True)
    return (
        cupynorm.rms_norm(y + 1, (40,), weight, zero_centered_weight=True, out_dtype=torch.float32)
        + added
    )


def block_tensors(num_rows: int, dtype=torch.float32, device="cpu") -> list[torch.Tensor]:
    rows = leaves((num_rows, 3, 40), (num_rows, 3, 40), dtype=dtype, device=device)
    return [rows[0], *leaves((40,), (40,), device=device, dtype=torch.float32), rows[1]]


def check_compiled(compiled, tensors) -> None:
    """Checks that outputs and gradients of a compiled block are near the eager ones.

    Each passes two norms, and gradients of parameters are sums of up to 51 rows.
    """
    expected, got = (
        (y := function(*tensors), *torch.autograd.grad(y, tensors, torch.ones_like(y)))
        for function in (block, compiled)
    )
    assert_few_roundings(got, expected, 2**6, tensors[0].dtype)
    with torch.no_grad():
        assert_few_roundings([compiled(*tensors)], expected[:1], between=tensors[0].dtype)


@pytest.fixture
def compile_anew():
    torch.compiler.reset()
    counters.clear()
    yield functools.partial(torch.compile, fullgraph=True)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_for_any_number_of_rows_without_a_graph_break(compile_anew, backend):
    compiled = compile_anew(block, dynamic=True, backend=backend)
    for num_rows in (
        4,
        5,
        17,
        2,
    ):  # not the 3 of the second dimension: torch would take equal extents for one
        check_compiled(compiled, block_tensors(num_rows))
    assert counters["stats"]["unique_graphs"] == 2  # with gradients and without
    assert not counters["graph_break"]


@pytest.mark.slow
def test_inductor_gives_gradients_near_the_eager_ones(compile_anew):
    check_compiled(compile_anew(block), block_tensors(4, torch.bfloat16))


class Importing(types.ModuleType):
    """Imports another module whenever it is looked at, as lazy packages do."""

    def __getattribute__(self, name):
        sys.modules[f"imported_{len(sys.modules)}"] = sys
        return super().__getattribute__(name)


def of_8_bits(x):
    out_dtype = cupynorm.Quantize("float8_e5m2", "row")
    return cupynorm.rms_norm(x, 40, out_dtype=out_dtype).dequantize()


def with_a_drawn_seed(x):
    return cupynorm.rms_norm(x, 40, fuse=cupynorm.functors.dropout(0.5))


@pytest.mark.parametrize("call", (of_8_bits, with_a_drawn_seed))
def test_calls_are_compiled_beside_lazy_modules(compile_anew, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "lazy", Importing("lazy"))
    made = compile_anew(call, backend="eager")(x := random(3, 40))
    assert made.dtype == x.dtype and made.shape == x.shape


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(random(40, dtype=torch.float32))

    def forward(self, x):
        return cupynorm.layer_norm(x, x.shape[-1], self.weight)


# GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_by_inductor_on_a_gpu(compile_anew, dtype, dynamic):
    compiled = compile_anew(block, dynamic=dynamic)
    for num_rows in (4, 17) if dynamic else (4,):
        check_compiled(compiled, block_tensors(num_rows, dtype, "cuda"))


@pytest.mark.gpu
def test_a_compiled_module_is_captured_in_a_graph(compile_anew):
    module = Norm().cuda()
    compiled = compile_anew(module, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):  # warm-up, capture, replay
            x = random(8, 40, dtype=torch.float32, device="cuda", seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            assert_few_roundings([compiled(x)], [module(x)])
