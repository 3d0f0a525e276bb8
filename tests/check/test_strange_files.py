"""Files of strangers: damaged ones, false claims, bombs, and names that a terminal would obey.

Each is refused in one sentence, or read, without much memory or time.
"""

import collections
import importlib.util
import io
import json
import pickle
import random
import struct
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from cupynorm import __main__ as command
from cupynorm.check import array_files
from cupynorm.check.activations import read

X = np.random.default_rng(0).standard_normal((3, 8)).astype("f4")
CONTROL = "\x1b]0;owned\x07\n\u202e"


def npy(array=X, shape=None, descr=None):
    """The bytes of a .npy file. shape, descr: in the header, in place of the array's."""
    stream = io.BytesIO()
    header = {"descr": descr or array.dtype.str, "fortran_order": False}
    np.lib.format.write_array_header_1_0(stream, header | {"shape": shape or array.shape})
    return stream.getvalue() + array.tobytes()


def safetensors(name="x", **changes):
    """The bytes of a .safetensors file. changes: of the entry of its header."""
    entry = {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, X.nbytes]} | changes
    header = json.dumps({name: entry}).encode()
    return struct.pack("<Q", len(header)) + header + X.tobytes()


def saved(value):
    """The bytes of a .pt file."""
    torch = pytest.importorskip("torch")
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def zipped(members, compression=zipfile.ZIP_DEFLATED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def outcome(path, content):
    """What reading says: the names of arrays, or the sentence of the refusal. All is printable."""
    path.write_bytes(content)
    notes = []
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            said = [each.name for each in read(path, notes.append)]
    except ValueError as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**26
    for line in notes + (said if isinstance(said, list) else [said]):
        assert line.isprintable() and len(line) < 600
    return said


@pytest.mark.parametrize("shape", [(2**40,), (2**31, 2**31, 2**31), (-3, 8), (True, 8), (4, 8)])
def test_shapes_of_numpy_that_the_file_does_not_hold(tmp_path, shape):
    raw = npy(shape=shape)
    if shape == (True, 8):
        raw = npy(shape=(1, 8)).replace(b"(1, 8)", b"(True, 8)").replace(b"    \n", b" \n", 1)
    for suffix, content in ((".npy", raw), (".npz", zipped({"x.npy": raw}))):
        assert "shape" in outcome(tmp_path / f"a{suffix}", content)


def test_dtypes_and_orders_of_numpy(tmp_path):
    for array in (np.asfortranarray(X), X.astype(">f8"), X[::2, ::2], X[:, 0], X.astype("f2")):
        stream = io.BytesIO()
        np.save(stream, array)
        assert outcome(tmp_path / "a.npy", stream.getvalue()) == ["a"]
    records = np.zeros(3, [("a\n\x1b", "f4"), ("b", "f8")])
    for array in (records, np.zeros((0, 4)), np.array(1.5), np.zeros(3, "M8[s]"), X > 0):
        assert outcome(tmp_path / "a.npy", npy(array, descr=array.dtype.descr)) == []
    assert "pickled objects" in outcome(tmp_path / "a.npy", npy(descr="|O"))


@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"])
def test_headers_of_numpy(tmp_path, version):
    deep = b"{'descr': " + b"(" * 5000 + b")" * 5000 + b"}"
    for length, header in ((2**32 - 1, b""), (0, b""), (len(deep), deep), (2**15, b"-" * 2**15)):
        size = (
            struct.pack("<I", length)
            if version > b"\x01\x00"
            else struct.pack("<H", length % 2**16)
        )
        said = outcome(tmp_path / "a.npy", b"\x93NUMPY" + version + size + header)
        assert "is not a readable .npy file" in said


def test_a_bomb_of_numpy_is_refused(tmp_path):
    """Its arrays are compressed by 1000 and take more than is read, together or alone."""
    stream = io.BytesIO()
    zeros = np.zeros(2**20, "f4")
    np.savez_compressed(stream, **{f"x{at}": zeros for at in range(4)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_files, "_MOST_BYTES", 8 * 2**22 - 1)
        assert "as float64 its arrays take more than" in outcome(
            tmp_path / "a.npz", stream.getvalue()
        )
    assert len(outcome(tmp_path / "a.npz", zipped({"x.npy": npy(np.zeros((2**10, 8)))}))) == 1


def test_members_of_zips_that_cannot_be_read(tmp_path):
    plain = zipped({"x.npy": npy()}, zipfile.ZIP_STORED)
    at = plain.index(b"PK\x01\x02")
    encrypted, unknown = bytearray(plain), bytearray(plain)
    encrypted[6] = encrypted[at + 8] = 1
    unknown[8] = unknown[at + 10] = 99
    assert "encrypted" in outcome(tmp_path / "a.npz", bytes(encrypted))
    assert "compression method" in outcome(tmp_path / "a.npz", bytes(unknown))
    larger = bytearray(plain)
    larger[at + 24 : at + 28] = struct.pack("<I", 2**31)
    assert outcome(tmp_path / "a.npz", bytes(larger))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [True, 24]},
        {"shape": [-3, -8]},
        {"shape": [3.0, 8]},
        {"shape": ["3", 8]},
        {"shape": [2**20, 2**20]},
        {"shape": [0, 2**70], "data_offsets": [0, 0]},
        {"shape": [10**300, 10**300]},
        {"shape": {"3": 8}},
        {"data_offsets": [0, 96, 96]},
        {"data_offsets": [False, 96]},
        {"data_offsets": [0.0, 96.0]},
        {"data_offsets": [-96, 0]},
        {"data_offsets": [0, 48]},
        {"data_offsets": [96, 192]},
        {"dtype": ["F32"]},
        {"dtype": 32},
    ],
)
def test_entries_of_safetensors_that_do_not_fit(tmp_path, changes):
    assert "a.safetensors is not a readable" in outcome(
        tmp_path / "a.safetensors", safetensors(**changes)
    )


def test_headers_of_safetensors(tmp_path):
    deep = b"[" * 100_000
    for content in (struct.pack("<Q", 2**63), struct.pack("<Q", len(deep)) + deep, b"\xff" * 8):
        assert "is not a readable" in outcome(tmp_path / "a.safetensors", content)
    many = {f"x{at}": {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, 96]} for at in range(9)}
    header = json.dumps(many).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_files, "_MOST_BYTES", 8 * 9 * 24 - 1)  # all at the same bytes
        assert "take more than" in outcome(
            tmp_path / "a.safetensors", struct.pack("<Q", len(header)) + header + X.tobytes()
        )


def test_tensors_of_torch_that_are_larger_than_their_storage(tmp_path):
    torch = pytest.importorskip("torch")
    vast = torch.zeros(1).as_strided((2**20, 2**20), (0, 0))
    assert "take more than" in outcome(tmp_path / "a.pt", saved({"x": vast}))
    assert outcome(tmp_path / "a.pt", saved(torch.zeros(1).expand(3, 8))) == ["a"]
    x = torch.from_numpy(X)
    path = tmp_path / "a.pt"
    assert outcome(path, saved(torch._neg_view(x))) == ["a"]
    assert np.array_equal(next(read(path)).x, -X.astype(np.float64))
    assert outcome(path, saved([x.to("meta"), x.to_sparse(), x.to(torch.complex64)])) == []


def test_containers_of_torch_without_an_end(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(array_files, "_MOST_VALUES", 10_000)
    cyclic, deep, wide = {}, torch.ones(2), [torch.ones(2)]
    cyclic["again"] = cyclic
    for _ in range(300):
        deep = [deep]
    for _ in range(40):
        wide = [wide, wide]
    for value in (cyclic, deep, wide, {"n" * 300: torch.ones(2)}):
        assert "it has more than 10000 values or 100 levels" in outcome(
            tmp_path / "a.pt", saved(value)
        )
    assert outcome(tmp_path / "a.pt", saved({("t", 1): torch.ones(2)})) == ["a/tuple"]


def test_zips_of_torch_that_claim_more_than_they_have(tmp_path):
    torch = pytest.importorskip("torch")
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(2**20)))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert "are compressed or overlap" in outcome(tmp_path / "a.pt", zipped(members))

    class Storage:
        pass

    class Vast:
        def __reduce__(self):
            arguments = (Storage, 0, (2**30,), (1,), False, collections.OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", 2**30) if value is Storage else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump({"x": Vast()})
    name = next(each for each in members if each.endswith("data.pkl"))
    members[name] = stream.getvalue()
    said = outcome(tmp_path / "a.pt", zipped(members, zipfile.ZIP_STORED))
    assert "is not a readable .pt file" in said


@pytest.mark.parametrize("version", ["2.5.1+cu124", "1.13.0"])
def test_an_older_torch_is_refused(tmp_path, monkeypatch, version):
    torch = pytest.importorskip("torch")
    content = saved(torch.ones(2))
    monkeypatch.setattr(torch, "__version__", version)
    assert f"torch {version} may run code of the file" in outcome(tmp_path / "a.pt", content)


def test_names_are_printed_with_escapes(tmp_path, capsys):
    files = {
        "a.npz": zipped({f"{CONTROL}.npy": npy(), f"i{CONTROL}.npy": npy(np.arange(3))}),
        "b.safetensors": safetensors(CONTROL * 1000),
        "c.safetensors": safetensors(dtype=CONTROL),
        "d.npz": zipped({f"{CONTROL}.npy": b"none"}),
        f"e{CONTROL}.npy": npy(),
        f"f{CONTROL}.npy": b"none",
        "g.pt": saved({CONTROL: {"x": X.tolist(), CONTROL: 1.5}}),
    }
    for name, content in files.items():
        outcome(tmp_path / name, content)
        code = command.main(["check", str(tmp_path / name), "--forward", "numpy:copy"])
        said = "".join(capsys.readouterr())
        assert code in (1, 2)
        assert not any(part in said for part in ("\x1b]", "\x07", "\u202e", "Traceback")), said


def test_mutations_of_files_are_read_or_refused(tmp_path):
    """Some thousands more, by other seeds, were read or refused too."""
    compressed = io.BytesIO()
    np.savez_compressed(
        compressed, **{"l/x": X, "l/weight": X[0], "eps": 1e-3, "ids": np.arange(3)}
    )
    contents = {
        ".npy": npy(),
        ".npz": compressed.getvalue(),
        ".safetensors": safetensors(),
    }
    if importlib.util.find_spec("torch"):
        import torch

        contents[".pt"] = saved({"l": {"x": torch.from_numpy(X), "eps": 1e-6}, "n": "text"})
    generator, refused = random.Random(0), collections.Counter()
    for at in range(600):
        suffix = list(contents)[at % len(contents)]
        path, raw = tmp_path / f"a{suffix}", bytearray(contents[suffix])
        for _ in range(generator.choice((1, 2, 8))):
            first, count = generator.randrange(len(raw)), generator.randrange(4)
            raw[first : first + count] = generator.randbytes(generator.randrange(4))
        if generator.random() < 0.2:
            del raw[generator.randrange(len(raw)) :]
        refused[suffix] += isinstance(outcome(path, bytes(raw)), str)
    assert all(0 < refused[suffix] for suffix in contents)
