"""What a layer of several ranks refuses before any collective. The group has no processes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cupynorm import LayerNormLinear, fp8_autocast  # noqa: E402
from cupynorm.parallel.checkpoints import distributed_state_dict  # noqa: E402
from cupynorm.parallel.ranks import Ranks  # noqa: E402


class Group:
    """Two ranks, as far as a constructor asks."""

    def size(self) -> int:
        return 2


def make(mode: str, **options) -> LayerNormLinear:
    return LayerNormLinear(24, 16, parallel_mode=mode, tp_group=Group(), device="cpu", **options)


@pytest.mark.parametrize(
    "mode, shape, sentence",
    (
        ("column", (3, 23), r"input has shape \(3, 23\); expected \(..., 24\), this rank's in_f"),
        ("row", (4, 24), r"expected \(..., 12\), this rank's in_features, of 24 on all ranks"),
        ("row", (3, 2, 12), "input has 3 rows in its first dimension, and tp_size is 2; expected"),
        ("column", (24,), "with sequence_parallel; expected two dimensions or more"),
    ),
)
def test_inputs(mode, shape, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(mode, sequence_parallel=True)(torch.ones(shape))


def test_a_transformed_call_makes_no_scales(monkeypatch):
    monkeypatch.setattr(Ranks, "agree", lambda *given: None)
    layer = make("column")
    with fp8_autocast():
        with pytest.raises(NotImplementedError, match="was asked to transform a layer"):
            torch.func.vmap(layer)(torch.ones(2, 4, 24))
    assert layer.state_dict()["_extra_state"].numel() == 0


def test_a_state_dict_without_a_group():
    layer = LayerNormLinear(24, 16, parallel_mode="row", tp_size=2, device="cpu")
    with pytest.raises(RuntimeError, match="layer '0' has no tp_group; expected set_tensor_par"):
        distributed_state_dict(torch.nn.Sequential(layer))


def test_a_layer_that_is_not_shared_has_no_shards():
    layer = LayerNormLinear(24, 16, tp_group=Group(), device="cpu")
    assert layer.tp_size == 2 and layer.shard_dims() == {} and layer.weight.shape == (16, 24)
    assert torch.equal(layer(torch.ones(1, 24)), layer(torch.ones(1, 24)))


def test_its_text_says_how_it_is_shared():
    assert "parallel_mode='row', tp_size=2, sequence_parallel=True" in repr(
        make("row", sequence_parallel=True)
    )


def test_arguments_without_effect():
    """One warning names them."""
    with pytest.warns(
        UserWarning, match="^ub_overlap_rs, symmetric_ar_type has no effect: coll"
    ) as w:
        make("column", sequence_parallel=True, ub_overlap_rs=True, symmetric_ar_type="two_shot")
    assert len(w) == 1 and w[0].filename == __file__
