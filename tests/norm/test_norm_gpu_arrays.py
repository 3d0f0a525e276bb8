"""Arrays on a GPU: exchange between libraries, strides, addresses and devices."""

from __future__ import annotations

import numpy as np
import pytest
from array_libraries import Torch, library, loaded_torch

import cupynorm
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import arrays
from cupynorm.verify.cases import Case, random_problem


class Exporter:
    """An array with the two methods of DLPack and no others."""

    def __init__(self, array) -> None:
        self.array = array

    def __dlpack__(self, *arguments, **options):
        return self.array.__dlpack__(*arguments, **options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.gpu
def test_any_dlpack_exporter_is_taken_and_gives_cupy_arrays():
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    x, weight, dy = (
        torch.randn(4, 40, device="cuda"),
        torch.randn(40, device="cuda"),
        torch.randn(4, 40, device="cuda"),
    )
    forward = cupynorm.layer_norm_forward(x, 40, weight)
    found = cupynorm.layer_norm_forward(Exporter(x), 40, Exporter(weight))
    assert isinstance(found.y, cupy.ndarray)
    assert (found.y.get() == forward.y.cpu().numpy()).all()
    backward = cupynorm.layer_norm_backward(dy, x, 40, forward.mean, forward.rstd, weight)
    statistics = (Exporter(forward.mean), Exporter(forward.rstd))
    gradients = cupynorm.layer_norm_backward(
        Exporter(dy), Exporter(x), 40, *statistics, Exporter(weight)
    )
    for got, right in zip(gradients, backward):
        assert isinstance(got, cupy.ndarray) and (got.get() == right.cpu().numpy()).all()


def cupy_of(dtype: str):
    cupy = pytest.importorskip("cupy")
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
        try:
            cupy.empty(1, arrays._numpy_dtype(dtype))
        except (TypeError, ValueError) as error:
            pytest.skip(f"this CuPy has no bfloat16: {error}")
    return cupy


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_reads_torch_results_without_a_copy(dtype):
    cupy, torch = cupy_of(dtype), loaded_torch()
    x = torch.randn(4, 40, device="cuda").to(getattr(torch, dtype))
    forward = cupynorm.layer_norm_forward(x, x.shape[-1])
    backward = cupynorm.layer_norm_backward(x, x, x.shape[-1], forward.mean, forward.rstd)
    for tensor in (x, *forward, *backward):
        view = cupy.from_dlpack(tensor)
        assert view.data.ptr == tensor.data_ptr() == arrays.TorchLibrary.view(tensor).pointer
        assert view.shape == tuple(tensor.shape) and view.dtype.name == arrays.dtype_name(tensor)
        assert arrays.CuPyLibrary.view(view) == arrays.TorchLibrary.view(tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_cupy_results_without_a_copy(dtype):
    cupy, torch = cupy_of(dtype), loaded_torch()
    x = cupy.from_dlpack(torch.randn(4, 40, device="cuda").to(getattr(torch, dtype)))
    forward = cupynorm.layer_norm_forward(x, x.shape[-1])
    backward = cupynorm.layer_norm_backward(x, x, x.shape[-1], forward.mean, forward.rstd)
    for array in (x, *forward, *backward):
        assert isinstance(array, cupy.ndarray)
        view = torch.from_dlpack(array)
        assert view.data_ptr() == array.data.ptr == arrays.CuPyLibrary.view(array).pointer
        assert arrays.TorchLibrary.view(view) == arrays.CuPyLibrary.view(array)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_rows_with_gaps_are_read_in_place(name, monkeypatch):
    lib = library(name)
    problem = random_problem(Case("layer_norm", 6, 40, "float32"))
    weight = lib.put(problem.weight, "float32")

    def results(x, dy):
        forward = cupynorm.layer_norm_forward(x, 40, weight)
        return [
            forward.y,
            *cupynorm.layer_norm_backward(dy, x, 40, forward.mean, forward.rstd, weight),
        ]

    expected = [
        lib.get(each)
        for each in results(lib.put(problem.x, "float32"), lib.put(problem.dy, "float32"))
    ]
    owner = arrays.TorchLibrary if lib.is_torch else arrays.CuPyLibrary
    contiguous = owner.contiguous

    def refuse_matrices(array):
        assert array.ndim == 1, "a matrix was copied"
        return contiguous(array)

    monkeypatch.setattr(owner, "contiguous", staticmethod(refuse_matrices))
    wide = np.full((6, 96), np.nan)
    wide[:, 24:64] = problem.x
    x = lib.put(wide, "float32")[:, 24:64]
    wide[:, 24:64] = problem.dy
    for got, right in zip(results(x, lib.put(wide, "float32")[:, 24:64]), expected):
        assert (lib.get(got) == right).all()
    if name == "cupy":
        reverse = [
            lib.put(values[::-1].copy(), "float32")[::-1] for values in (problem.x, problem.dy)
        ]
        for got, right in zip(results(*reverse), expected):
            assert (lib.get(got) == right).all()
    # Shows that the test can fail: columns with gaps need a copy.
    with pytest.raises(AssertionError, match="a matrix was copied"):
        cupynorm.layer_norm(lib.put(np.ones((6, 80)), "float32")[:, ::2], 40)


@pytest.mark.gpu
def test_results_are_allocated_by_the_library_of_the_input():
    cupy, torch = pytest.importorskip("cupy"), loaded_torch()
    pool = cupy.get_default_memory_pool()
    x = torch.randn(1024, 1024, device="cuda")
    cupynorm.layer_norm(x, 1024)
    allocated, used = torch.cuda.memory_allocated(), pool.used_bytes()
    forward = cupynorm.layer_norm_forward(x, x.shape[-1])
    assert torch.cuda.memory_allocated() - allocated >= x.nbytes + 2 * 4096
    assert pool.used_bytes() == used
    backward = cupynorm.layer_norm_backward(x, x, x.shape[-1], forward.mean, forward.rstd)
    assert torch.cuda.memory_allocated() - allocated >= 2 * x.nbytes + 4 * 4096
    assert pool.used_bytes() == used
    del forward, backward
    assert torch.cuda.memory_allocated() == allocated

    there = cupy.asarray(np.ones((1024, 1024), "float32"))
    allocated, used = torch.cuda.memory_allocated(), pool.used_bytes()
    kept = cupynorm.layer_norm_forward(there, 1024)
    assert kept.y.nbytes == there.nbytes
    assert pool.used_bytes() - used >= there.nbytes + 2 * 4096
    assert torch.cuda.memory_allocated() == allocated


# Several GPUs.


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_kernels_run_on_the_device_of_the_input(name):
    cupy = pytest.importorskip("cupy")
    lib = library(name)
    # 100 000 columns need more shared memory than the default, which is an attribute set on each
    # device.
    for num_cols in (40, 100_000):
        problem = random_problem(Case("layer_norm", 3, num_cols, "float32"))
        results = []
        for device in (0, 1):
            with cupy.cuda.Device(device):
                if lib.is_torch:
                    lib = Torch(f"cuda:{device}")
                x, weight = lib.put(problem.x, "float32"), lib.put(problem.weight, "float32")
            with cupy.cuda.Device(1 - device):
                current = cupy.cuda.runtime.getDevice()
                y = cupynorm.layer_norm(x, num_cols, weight)
                assert cupy.cuda.runtime.getDevice() == current
            assert arrays.library(y).view(y).device == device
            with cupy.cuda.Device(device):
                results.append(lib.get(y))
        assert (results[0] == results[1]).all() and np.abs(results[0]).max() > 1
