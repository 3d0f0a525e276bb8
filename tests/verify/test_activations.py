"""Reading activations of files, and the errors for files that cannot be read."""

import pickle
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.verify.activations import read, shipped

CONTROL = "\x1b]0;owned\x07\n\u202e"


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def only(path):
    (found,) = read(path)
    return found


def test_shipped_activations_have_outliers_and_a_tiny_weight():
    (layer,) = shipped()
    assert layer.x.shape == layer.dy.shape == (1, 384)
    assert layer.weight.shape == layer.bias.shape == (384,) and layer.eps == 1e-12
    deviations = (layer.x - layer.x.mean(1, keepdims=True)) / layer.x.std(1, keepdims=True)
    assert np.abs(deviations).max() > 15  # unlike in random numbers
    assert 0 < np.abs(layer.weight).min() < 1e-32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_problem_is_representable_in_its_dtype(dtype):
    layer = shipped()[0]
    problem = layer.problem("rms_norm", dtype)
    assert (problem.case.norm, problem.case.x, problem.case.eps) == ("rms_norm", dtype, 1e-12)
    limits = {"rtol": DTYPES[dtype].half_ulp, "atol": DTYPES[dtype].smallest}
    for name in ("x", "dy", "weight"):
        values = getattr(problem, name)
        assert np.array_equal(decode(encode(values, dtype), dtype), values)
        assert np.allclose(values, getattr(layer, name), **limits)


def test_max_elements_leaves_out_rows():
    layer = replace(shipped()[0], x=draw(40, 384), dy=draw(40, 384, seed=1))
    problem = layer.problem("layer_norm", "float64", max_elements=10 * 384 + 1)
    assert problem.x.shape == problem.dy.shape == (10, 384) and problem.case.num_rows == 10
    assert np.array_equal(problem.x[[0, -1]], layer.x[[0, -1]])
    assert np.array_equal(problem.dy[-1], layer.dy[-1])
    assert layer.problem("layer_norm", max_elements=1).x.shape == (1, 384)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_an_npy_file_is_read_exactly(tmp_path, dtype):
    x = draw(2, 3, 8).astype(dtype)
    np.save(tmp_path / "a.npy", x)
    found = only(tmp_path / "a.npy")
    assert found.name == "a" and found.dtypes == {"x": np.dtype(dtype).name}
    assert np.array_equal(found.x, x.reshape(6, 8).astype(np.float64)) and found.weight is None
    problem, other = (found.problem("layer_norm", seed=seed) for seed in (3, 4))
    assert problem.case.dtype("weight") is None and not np.array_equal(problem.dy, other.dy)


def test_an_npz_file_is_read_with_and_without_prefixes(tmp_path):
    tensors = {"x": draw(2, 3, 8), "bias": draw(8), "dy": draw(2, 3, 8, seed=1)}
    tensors["weight"] = draw(8).astype(np.float32)
    nested = {f"deep/er/{name}": array for name, array in tensors.items()}
    alone = {"other": draw(4, 5), "ids": np.arange(3), "scalar": 1.5, "none": np.empty((2, 0))}
    alone |= {"l/input": draw(3, 8), "l/weight": draw(8), CONTROL: draw(2)}
    np.savez(tmp_path / "a.npz", **tensors, **nested, eps=1e-3, **alone)
    found = {each.name: each for each in read(tmp_path / "a.npz")}
    own = {name for name in found if "owned" in name}
    assert set(found) == {"a", "a/deep/er", "a/other", "a/l", *own}
    assert len(own) == 1 and own.pop().isprintable()
    for name, eps in (("a", 1e-3), ("a/deep/er", 1e-5)):
        assert np.array_equal(found[name].x, tensors["x"].reshape(6, 8))
        assert np.array_equal(found[name].dy, tensors["dy"].reshape(6, 8))
        assert np.array_equal(found[name].weight, tensors["weight"]) and found[name].eps == eps
        assert np.array_equal(found[name].bias, tensors["bias"])
        assert found[name].problem("layer_norm").case.dtype("weight") == "float32"
    assert np.array_equal(found["a/other"].x, alone["other"]) and found["a/other"].dy is None
    assert np.array_equal(found["a/l"].x, alone["l/input"]) and found["a/l"].weight.shape == (8,)


# Errors.


class Trap:
    """An object whose unpickling writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_malformed_files_are_refused_and_none_is_unpickled(tmp_path):
    trap = np.array([Trap(tmp_path / "sprung")], dtype=object)
    np.save(tmp_path / "a.npy", trap, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=draw(2, 4), trap=trap)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("readme.txt", "not an array")
    contents = (b"", b"no such format", bytes(64), b"\x93NUMPY\x01\x00", b"PK\x03\x04 broken")
    for at, content in enumerate(contents):
        for suffix in (".npy", ".npz"):
            (tmp_path / f"{at}{suffix}").write_bytes(content)
    np.save(tmp_path / "cut.npy", draw(8, 8))
    np.savez(tmp_path / "cut.npz", x=draw(8, 8))
    claims = (tmp_path / "cut.npy").read_bytes().replace(b"(8, 8)", b"(8, 9)")
    (tmp_path / "untrue.npy").write_bytes(claims)
    for path in tmp_path.glob("cut.*"):
        path.write_bytes(path.read_bytes()[:-100])
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(ValueError, match=f"{path.name} is not a readable {path.suffix}") as why:
            list(read(path))
        assert str(why.value).isprintable()
    assert len(list(tmp_path.iterdir())) == 17 and not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("weight", draw(5), r"a: weight has shape \(5,\), x has \(2, 8\); expected \(8,\)"),
        ("bias", draw(2, 8), r"a: bias has shape \(2, 8\)"),
        ("dy", draw(3, 8), r"a: dy has shape \(3, 8\)"),
        ("eps", draw(1), r"a: eps has shape \(1,\)"),
        ("eps", np.array(np.nan), "a: eps is nan; expected a finite number"),
        ("l/weight", draw(7), "a/l has weight; expected an x of at least one dimension"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(tmp_path, field, wrong, message):
    np.savez(tmp_path / "a.npz", x=draw(2, 8), **{field: wrong})
    with pytest.raises(ValueError, match=message):
        list(read(tmp_path / "a.npz"))


def test_files_that_are_missing_or_unknown_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read(tmp_path / "a.npy"))
    with pytest.raises(ValueError, match="a.pt is of no known format; expected a .npy or .npz"):
        list(read(tmp_path / "a.pt"))
