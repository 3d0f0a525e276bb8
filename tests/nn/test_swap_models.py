"""swap_norms: whole models."""

from __future__ import annotations

import pytest

import cupynorm

torch = pytest.importorskip("torch")
from module_inputs import DEVICES_HERE, random_input  # noqa: E402
from swap_classes import Gated, GemmaRMSNorm, LlamaRMSNorm  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, num_cols: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(num_cols), LlamaRMSNorm(num_cols)])
        self.linear = torch.nn.Linear(num_cols, num_cols)
        self.last = self.norms[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(self.norms[0](x))
        return self.last(x + self.linear(self.norms[1](x)))


def test_a_shared_module_stays_shared():
    model = Block(8)
    shared, order = model.last, [name for name, _ in model.named_parameters()]
    report = cupynorm.swap_norms(model)
    assert model.last is model.norms[1] and type(model.last) is cupynorm.RMSNorm
    assert [swap.name for swap in report.swapped] == ["last", "norms.0", "norms.1"]
    assert report.swapped[2].remark == "the module of last"
    assert [name for name, _ in model.named_parameters()] == order
    assert not cupynorm.swap_norms(model).swapped
    report.undo()
    assert model.last is model.norms[1] is shared


def test_undo_keeps_the_current_parameters():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), GemmaRMSNorm(8))
    originals = list(model)
    report = cupynorm.swap_norms(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(random_input(3, 8)).square().sum().backward()
    optimizer.step()
    model.half().eval()
    state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    current = list(model.parameters())
    report.undo()
    report.undo()
    assert all(now is original for now, original in zip(model, originals)) and not model[1].training
    assert (
        all(now is then for now, then in zip(model.parameters(), current))
        and model[0].weight.dtype == torch.float16
    )


def test_the_report_is_a_table():
    model = torch.nn.ModuleDict({"first": torch.nn.LayerNorm(8), "second": Gated(8)})
    assert str(cupynorm.swap_norms(model)).splitlines() == [
        "name    was                 now",
        "first   torch.LayerNorm     cupynorm.LayerNorm",
        "second  swap_classes.Gated                      "
        "its forward takes x, gate; expected one input",
        "1 swapped, 1 left; compiled by torch.compile, a model runs torch's norms",
    ]


@pytest.mark.parametrize("device", DEVICES_HERE)
def test_a_transformer_computes_the_same(device):
    """In float64, so that only the order of additions differs.

    In training mode, because in eval mode torch fuses the layer and calls no norm.
    """
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, batch_first=True, norm_first=True, dtype=torch.float64
    )
    model = torch.nn.TransformerEncoder(
        layer, 2, torch.nn.RMSNorm(64, dtype=torch.float64), enable_nested_tensor=False
    ).to(device)
    x = random_input(2, 5, 64, dtype="float64").to(device)

    def outcome():
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = outcome()
    report = cupynorm.swap_norms(model)
    assert len(report.swapped) == 5 and not report.left
    # 64 columns and ten rows in twelve products: some hundred roundings of the largest value.
    for got, right in zip(outcome(), expected):
        torch.testing.assert_close(
            got, right, rtol=0, atol=2.0**-53 * 1000 * float(1 + right.abs().max())
        )
