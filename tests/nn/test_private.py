"""Each private name of torch is where nn/private.py expects it, and does what it is used for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from repository_files import MODULES  # noqa: E402

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


def test_tensors_of_is_grads_batched_are_mapped():
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            seen.append(private.is_mapped(dy))
            return dy

    x = torch.ones(2, requires_grad=True)
    y = Seen.apply(x)
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


def test_nodes_that_a_backward_executes():
    x, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    y, seen = x.exp() * other.exp(), []
    nodes = [edge[0] for edge in y.grad_fn.next_functions]
    y.register_hook(lambda dy: seen.append([private.will_execute(node) for node in nodes]))
    torch.autograd.grad(y.sum(), x)
    assert seen == [[True, False]]


def test_names_of_cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    device = torch.cuda.current_device()
    stream = torch.cuda.current_stream().cuda_stream
    assert private.current_raw_stream(device) == stream == TorchLibrary(device).stream()
    assert TorchLibrary(device).exchange_device(device) == device
    made = TorchLibrary.allocator((2, 3), torch.float32)()
    assert made.shape == (2, 3) and made.is_cuda and made.is_contiguous()
