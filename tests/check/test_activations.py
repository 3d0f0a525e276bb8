"""Reading activations from each format, and the errors for files that cannot be read."""

import json
import pickle
import struct
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from cupynorm.check import kernels
from cupynorm.check.activations import read, shipped
from cupynorm.check.results import judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu import on_cpu
from cupynorm.gpu.nvrtc import MissingLibraryError


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def safetensors(tensors, **changes):
    """A .safetensors file's bytes. tensors: name -> (the format's dtype, shape, raw bytes)."""
    header, data = {"__metadata__": {"format": "np"}}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        header[name].update(changes)
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def only(path):
    (found,) = read(path)
    return found


# Shipped activations.


def test_shipped_activations_have_outliers_and_a_tiny_weight():
    layers = shipped()
    assert [layer.name.rpartition("/")[2] for layer in layers] == ["layer5_output"]
    for layer in layers:
        assert layer.x.shape == layer.dy.shape == (
            1,
            384,
        ) and layer.weight.shape == layer.bias.shape == (384,)
        assert layer.eps == 1e-12 and set(layer.dtypes.values()) == {"float32", "float64"}
        deviations = (layer.x - layer.x.mean(1, keepdims=True)) / layer.x.std(1, keepdims=True)
        assert np.abs(deviations).max() > 15  # outliers, unlike in random numbers
        assert 0 < np.abs(layer.weight).min() < 1e-32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_problem_is_representable_in_its_dtype(dtype):
    layer = shipped()[0]
    problem = layer.problem("rms_norm", dtype)
    assert (problem.case.norm, problem.case.x, problem.case.eps) == ("rms_norm", dtype, 1e-12)
    for values, original in (
        (problem.x, layer.x),
        (problem.dy, layer.dy),
        (problem.weight, layer.weight),
    ):
        assert np.array_equal(decode(encode(values, dtype), dtype), values)
        assert np.allclose(
            values, original, rtol=DTYPES[dtype].half_ulp, atol=DTYPES[dtype].smallest
        )


def test_max_elements_leaves_out_rows():
    layer = replace(
        shipped()[0],
        x=draw(40, 384).astype(np.float32),
        dy=draw(40, 384, seed=1).astype(np.float32),
    )
    problem = layer.problem("layer_norm", max_elements=10 * 384 + 1)
    assert problem.x.shape == problem.dy.shape == (10, 384) and problem.case.num_rows == 10
    assert np.array_equal(problem.x[[0, -1]], layer.x[[0, -1]]) and np.array_equal(
        problem.dy[-1], layer.dy[-1]
    )
    assert layer.problem("layer_norm", max_elements=1).x.shape == (1, 384)
    assert layer.problem("layer_norm", max_elements=80 * 384).x.shape == (40, 384)


# Round trips.


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_an_npy_file_is_read_exactly(tmp_path, dtype):
    x = draw(2, 3, 8).astype(dtype)
    np.save(tmp_path / "a.npy", x)
    found = only(tmp_path / "a.npy")
    assert found.name == "a" and found.dtypes == {"x": np.dtype(dtype).name}
    assert np.array_equal(found.x, x.reshape(6, 8).astype(np.float64)) and found.weight is None
    problem = found.problem("layer_norm", seed=3)
    assert problem.case.dtype("weight") is None and np.array_equal(problem.x, found.x)
    assert problem.dy.shape == (6, 8) and not np.array_equal(
        problem.dy, found.problem("layer_norm", seed=4).dy
    )


def test_one_dimension_is_one_row(tmp_path):
    np.save(tmp_path / "a.npy", draw(8))
    assert only(tmp_path / "a.npy").x.shape == (1, 8)


def test_an_npz_file_is_read_with_and_without_prefixes(tmp_path):
    tensors = {
        "x": draw(2, 3, 8),
        "weight": draw(8).astype(np.float32),
        "bias": draw(8),
        "dy": draw(2, 3, 8, seed=1),
    }
    alone = draw(4, 5)
    nested = {f"deep/er/{name}": array for name, array in tensors.items()}
    np.savez(
        tmp_path / "a.npz", **tensors, **nested, eps=1e-3, other=alone, **{"lone/weight": draw(7)}
    )
    found = {each.name: each for each in read(tmp_path / "a.npz")}
    assert set(found) == {"a", "a/deep/er", "a/other", "a/lone/weight"}
    for name, eps in (("a", 1e-3), ("a/deep/er", 1e-5)):
        for field in ("x", "dy"):
            assert np.array_equal(getattr(found[name], field), tensors[field].reshape(6, 8))
        assert np.array_equal(found[name].weight, tensors["weight"]) and np.array_equal(
            found[name].bias, tensors["bias"]
        )
        assert found[name].eps == eps
        assert (
            found[name].dtypes["weight"] == "float32"
            and found[name].problem("layer_norm").case.dtype("weight") == "float32"
        )
    assert np.array_equal(found["a/other"].x, alone) and found["a/other"].dy is None
    assert found["a/lone/weight"].x.shape == (1, 7)


def test_x_may_be_called_input(tmp_path):
    x, other, weight = draw(3, 8), draw(2, 8), draw(8)
    np.savez(tmp_path / "a.npz", **{"l/input": x, "l/weight": weight, "x": x, "input": other})
    found = {each.name: each for each in read(tmp_path / "a.npz")}
    assert set(found) == {"a/l", "a", "a/input"}
    assert np.array_equal(found["a/l"].x, x) and np.array_equal(found["a/l"].weight, weight)
    assert np.array_equal(found["a"].x, x) and np.array_equal(found["a/input"].x, other)


@pytest.mark.parametrize(
    "kind,dtype", [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32"), ("F64", "float64")]
)
def test_a_safetensors_file_is_read_exactly(tmp_path, kind, dtype):
    raw = encode(draw(3, 8), dtype)
    weight = encode(draw(8), "float32")
    content = safetensors(
        {"layer/x": (kind, (3, 8), raw.tobytes()), "layer/weight": ("F32", (8,), weight.tobytes())}
    )
    (tmp_path / "a.safetensors").write_bytes(content)
    found = only(tmp_path / "a.safetensors")
    assert found.name == "a/layer" and found.dtypes == {"x": dtype, "weight": "float32"}
    assert np.array_equal(found.x, decode(raw, dtype)) and np.array_equal(
        found.weight, decode(weight, "float32")
    )


def test_safetensors_written_by_its_package(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    x = draw(3, 8).astype(np.float32)
    numpy.save_file({"x": x}, tmp_path / "a.safetensors")
    assert np.array_equal(only(tmp_path / "a.safetensors").x, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pt_file_is_read_exactly(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(draw(3, 8)).to(getattr(torch, dtype))
    torch.save(
        {"layer": {"x": x, "eps": 1e-6}, "list": [x.t(), torch.nn.Parameter(x[0])]},
        tmp_path / "a.pt",
    )
    found = {each.name: each for each in read(tmp_path / "a.pt")}
    assert set(found) == {"a/layer", "a/list/0", "a/list/1"}
    assert (
        np.array_equal(found["a/layer"].x, x.double().numpy())
        and found["a/layer"].dtypes["x"] == dtype
    )
    assert found["a/layer"].eps == 1e-6 and np.array_equal(
        found["a/list/0"].x, x.t().double().numpy()
    )
    torch.save(x, tmp_path / "b.pt")
    assert only(tmp_path / "b.pt").name == "b"


def test_entries_left_out_are_named(tmp_path):
    torch = pytest.importorskip("torch")
    np.savez(
        tmp_path / "a.npz", x=draw(2, 4), ids=np.arange(3), scalar=1.5, nothing=np.empty((2, 0))
    )
    content = safetensors(
        {
            "x": ("F32", (2, 4), bytes(32)),
            "ids": ("I64", (1,), bytes(8)),
            "f8": ("F8_E4M3", (4,), bytes(4)),
        }
    )
    (tmp_path / "a.safetensors").write_bytes(content)
    torch.save({"x": torch.ones(2, 4), "ids": torch.arange(3), "name": "text"}, tmp_path / "a.pt")
    for name, left_out in (
        ("a.npz", ("ids", "scalar", "nothing")),
        ("a.safetensors", ("ids", "f8")),
        ("a.pt", ("ids",)),
    ):
        notes = []
        (found,) = read(tmp_path / name, notes.append)
        assert found.name == "a" and len(notes) == len(left_out)
        for word in left_out:
            assert any(word in note and "left out" in note for note in notes)


# Errors.


def refusal(path, error=ValueError):
    with pytest.raises(error) as caught:
        list(read(path))
    assert str(path.name) in str(caught.value) or path.stem in str(caught.value)
    return str(caught.value)


class Trap:
    """An object whose unpickling writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_are_refused(tmp_path):
    trap = np.array([Trap(tmp_path / "sprung")], dtype=object)
    np.save(tmp_path / "a.npy", trap, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=draw(2, 4), trap=trap)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    for name in ("a.npy", "a.npz", "b.npy"):
        assert "pickled objects, which are not read" in refusal(tmp_path / name)
    torch = pytest.importorskip("torch")
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "a.pt")
    assert "pickled objects are not read" in refusal(tmp_path / "a.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize(
    "content", [b"", b"no such format", bytes(64), b"\x93NUMPY\x01\x00", b"PK\x03\x04 broken"]
)
def test_malformed_files_are_refused(tmp_path, suffix, content):
    if suffix == ".pt":
        pytest.importorskip("torch")
    if suffix == ".safetensors" and content == b"":
        content = b"1234"
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    assert "\n" not in refusal(path)


def test_truncated_files_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    np.save(tmp_path / "a.npy", draw(8, 8))
    np.savez(tmp_path / "a.npz", x=draw(8, 8))
    torch.save(torch.ones(8, 8), tmp_path / "a.pt")
    (tmp_path / "a.safetensors").write_bytes(safetensors({"x": ("F64", (8, 8), bytes(512))}))
    for path in list(tmp_path.iterdir()):
        path.write_bytes(path.read_bytes()[:-100])
        refusal(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_offsets": [0, 4096]},
        {"data_offsets": [8, 0]},
        {"data_offsets": "none"},
        {"shape": [3, 3]},
        {"shape": None},
        {"dtype": "I8", "shape": [9]},
        {"dtype": None},
        {"dtype": "F16"},
        {"data_offsets": [0, 31]},
    ],
)
def test_wrong_safetensors_headers_are_refused(tmp_path, changes):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors({"x": ("F32", (2, 4), bytes(32))}, **changes))
    if changes.get("dtype") == "I8":
        assert list(read(path)) == []  # an unknown dtype is left out, not an error
    else:
        refusal(path)


def test_a_header_that_is_not_a_dict_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    refusal(tmp_path / "a.safetensors")


def test_wrong_shapes_are_refused(tmp_path):
    for field, wrong in (
        ("weight", draw(5)),
        ("bias", draw(2, 8)),
        ("dy", draw(3, 8)),
        ("eps", draw(1)),
    ):
        np.savez(tmp_path / "a.npz", x=draw(2, 8), **{field: wrong})
        with pytest.raises(ValueError, match=rf"a: {field} has shape .*, x has \(2, 8\); expected"):
            list(read(tmp_path / "a.npz"))


def test_an_eps_that_makes_every_result_alike_is_refused(tmp_path):
    for eps in (np.nan, np.inf):
        np.savez(tmp_path / "a.npz", x=draw(2, 8), eps=np.array(eps))
        with pytest.raises(ValueError, match=f"a: eps is {eps}; expected a finite number"):
            list(read(tmp_path / "a.npz"))


def test_missing_files_and_unknown_suffixes_are_refused(tmp_path):
    assert "there is no file" in refusal(tmp_path / "a.npy", FileNotFoundError)
    (tmp_path / "a.pkl").write_bytes(b"")
    assert ".npy, .npz, .safetensors, .pt" in refusal(tmp_path / "a.pkl")


def test_a_pt_file_without_torch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    (tmp_path / "a.pt").write_bytes(b"")
    assert "pip install torch" in refusal(tmp_path / "a.pt", MissingLibraryError)


def test_a_zip_without_arrays_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "not an array")
    refusal(tmp_path / "a.npz")


def test_kernels_run_on_read_activations(tmp_path):
    layer = shipped()[0]
    np.savez(
        tmp_path / "a.npz",
        **{name: getattr(layer, name).astype(np.float32) for name in ("x", "dy", "weight", "bias")},
    )
    problem = only(tmp_path / "a.npz").problem("layer_norm", max_elements=4 * 384)
    try:
        results = run_kernels(problem, kernels.machine())
    except on_cpu.NoCompilerError as error:
        pytest.skip(str(error))
    assert all(finding.ok for finding in judge_all(problem, results))
