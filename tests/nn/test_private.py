"""Each private name of torch is where nn/private.py expects it, and does what it is used for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from repository_files import MODULES  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

from cupynorm.gpu.arrays import TorchLibrary  # noqa: E402
from cupynorm.nn import private  # noqa: E402

# Below nn/, and without an import of torch.
OF_GPU = {"_C", "_dynamo", "_empty_strided_cuda"}


def private_names(text: str) -> set[str]:
    """Underscored names that a file takes from torch, by attribute or by import."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Attribute):
            names = re.sub(r"sys\.modules\[.torch.\]", "torch", ast.unparse(node)).split(".")
        elif isinstance(node, ast.ImportFrom):
            names = (node.module or "").split(".") + [each.name for each in node.names]
        if names and names[0] == "torch":
            found |= {each for each in names if re.match("_[^_]", each)}
    return found


def test_no_other_module_spells_a_private_name_of_torch():
    spelled = "import torch\nfrom torch._a import b\nfrom torch.c import _d\nx.torch._no\n"
    assert private_names(f"{spelled}sys.modules['torch']._C.e\ntorch.f._g(1)") == {
        *("_a", "_d", "_C", "_g")
    }
    found = {
        name: private_names(Path(path).read_text())
        for name, path in MODULES.items()
        if not name.startswith(("bench/", "check/fuzz", "nn/private"))
    }
    assert {name: names for name, names in found.items() if names} == {"gpu/arrays": OF_GPU}


def test_what_torch_does_with_a_call():
    def answers(*_: object) -> tuple:
        return (
            private.jit_tracing_state() is not None,
            private.num_dispatch_modes() > 0,
            private.has_functorch_transforms(),
            private.is_forward_mode(),
            bool(private.present_tracer()),
            private.is_any_autocast_enabled(),
            private.is_exporting(),
            private.graph_task_id() != -1,
        )

    x, seen = torch.ones(2, requires_grad=True), []
    nothing = (False,) * 8
    assert answers() == nothing

    def record(x):
        seen.append(answers())
        return x * 2

    def place_of(run) -> int:
        """The only place of the answers that is True inside of run, and no longer after it."""
        seen.clear()
        run()
        assert answers() == nothing and sum(seen[0]) == 1
        return seen[0].index(True)

    with FakeTensorMode() as fake:
        assert answers().index(True) == 1
        assert private.dispatch_mode(private.DispatchModeKey.FAKE) is fake
        assert private.dispatch_mode(private.DispatchModeKey.PROXY) is None
        assert private.dispatch_mode(private.DispatchModeKey.FUNCTIONAL) is None
    assert place_of(lambda: torch.jit.trace(record, (x,), check_trace=False)) == 0
    assert place_of(lambda: torch.func.vmap(record)(x)) == 2
    with torch.autograd.forward_ad.dual_level():
        assert answers().index(True) == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert answers().index(True) == 5
    x.register_hook(record)
    assert place_of(lambda: (x * 2).sum().backward()) == 7


def test_tensors_of_is_grads_batched_are_mapped():
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            seen.append((private.is_mapped(dy), private.keeps_graph()))
            return dy

    x = torch.ones(2, requires_grad=True)
    y = Seen.apply(x)
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [(True, True), (False, False)]


def test_nodes_that_a_backward_executes():
    x, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    y, seen = x.exp() * other.exp(), []
    nodes = [edge[0] for edge in y.grad_fn.next_functions]
    y.register_hook(lambda dy: seen.append([private.will_execute(node) for node in nodes]))
    torch.autograd.grad(y.sum(), x)
    assert seen == [[True, False]]


def test_hooks_of_saved_tensors():
    assert private.top_saved_tensors_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(abs, abs):
        assert private.top_saved_tensors_hooks(False)[0] is abs


def test_guards_compare_layouts():
    x = torch.ones(4, 6)
    check = private.TensorGuards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    assert check(torch.zeros(4, 6))
    for other in (x[:2], x.double(), x.t(), torch.ones(6, 4).t(), x.clone().requires_grad_()):
        assert not check(other)


def test_a_graph_breaks_where_it_is_asked_to():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count)
    def function(x):
        x = x + 1
        private.graph_break("here")
        return x * 2

    assert torch.equal(function(torch.ones(2)), torch.full((2,), 4.0)) and len(graphs) == 2
    assert private.is_compiled(torch.compile(torch.nn.Linear(2, 2)))
    assert not private.is_compiled(torch.nn.Linear(2, 2))


def test_the_ragged_dimension_of_nested_tensors():
    parts = [torch.ones(2, 3), torch.ones(5, 3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert private.ragged_dim(nested) == 1 and private.ragged_dim(nested.transpose(1, 2)) == 2


def test_products_of_8_bit_floats():
    """Its arguments by name, as products.py gives them."""
    schema = str(torch.ops.aten._scaled_mm.default._schema)
    for name in ("scale_a", "scale_b", "bias", "out_dtype", "use_fast_accum"):
        assert f" {name}=" in schema or f" {name}," in schema


def test_wrappers_of_parameters(tmp_path):
    """DistributedDataParallel and fully_shard, of one rank; FullyShardedDataParallel's mark."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch has no torch.distributed")
    from torch.distributed.fsdp import fully_shard

    seen = []
    assert private.reduced_parameters() == [] and [*private.gathered_parameters()] == []
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        plain = torch.nn.Linear(2, 2)
        plain.register_forward_pre_hook(lambda *_: seen.extend(private.reduced_parameters()))
        torch.nn.parallel.DistributedDataParallel(plain)(torch.ones(1, 2))
        assert {id(each) for each in seen} == {id(each) for each in plain.parameters()}
        seen.clear()
        layer = torch.nn.Linear(2, 2)
        mesh = distributed.init_device_mesh("cpu", (1,))
        fully_shard(layer, mesh=mesh)
        names = {"weight", "bias"}
        with torch.no_grad():
            layer(torch.ones(1, 2))
        layer.unshard()
        gathered = [each for each in private.gathered_parameters() if each is not None]
        assert {id(getattr(layer, name)) for name in names} <= {id(each) for each in gathered}
        collectives = private.functional_collectives()
        assert callable(collectives.all_gather_tensor_autograd)
        x = torch.tensor([1.0, 2.0])
        name = distributed.group.WORLD.group_name
        assert torch.equal(private.functional_all_reduce(x, name), x)
    finally:
        distributed.destroy_process_group()


def test_names_of_cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    device = torch.cuda.current_device()
    stream = torch.cuda.current_stream().cuda_stream
    assert private.current_raw_stream(device) == stream == TorchLibrary(device).stream()
    assert TorchLibrary(device).exchange_device(device) == device
    made = TorchLibrary.allocator((2, 3), torch.float32)()
    assert made.shape == (2, 3) and made.is_cuda and made.is_contiguous()
