"""What results look like in a terminal and in Jupyter."""

from __future__ import annotations

import re
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

import cupynorm
from cupynorm.bench import report
from cupynorm.norm.quantized import range_facts
from cupynorm.table import as_html, as_text, pairs_as_html

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
ROWS = [("name", "number"), ("a & b", "1,024"), ("<c>", "7")]


def test_a_table_is_the_same_as_text_and_as_html():
    assert as_text(ROWS) == "name   number\na & b  1,024\n<c>    7"
    made = as_html(ROWS)
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", made)
    assert cells == ["name", "number", "a &amp; b", "1,024", "&lt;c&gt;", "7"]
    assert made.count("right") == 2  # numbers
    assert "<th" in pairs_as_html(ROWS) and "1,024" in pairs_as_html(ROWS)
    xml.etree.ElementTree.fromstring(made)


def test_a_bare_plan_reads_well():
    plan = cupynorm.plan(4096, device="H200")
    assert repr(plan) == str(plan) and repr(plan).startswith("problem ")
    assert max(map(len, repr(plan).splitlines())) < 140
    assert "layer_norm forward, 4096 rows x 4096 columns" in plan._repr_html_()
    assert plan._repr_html_().count("<tr>") == len(str(plan).splitlines())


def test_a_benchmark_has_a_table_for_each_kind_of_cell():
    result = report.read(NOTEBOOKS / "h200.json")
    assert repr(result) == str(result)
    assert result._repr_html_().count("<table") == len(result.tables()) == 6


def test_a_quantized_tensor_shows_how_its_range_is_used():
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    x[0, :16] = 0
    y = cupynorm.rms_norm(x, 256, out_dtype=cupynorm.Quantize("float8_e4m3fn", "tensor"))
    made = y._repr_html_()
    assert "64 x 256" in made and "float8_e4m3fn" in made
    largest = int((y.data & 0x7F == 0x7E).sum())
    zeros = int((y.data & 0x7F == 0).sum())
    assert largest >= 1 and zeros >= 16
    assert f"{largest:,} ({largest / x.size:.2%})" in made
    assert f"{zeros:,} ({zeros / x.size:.2%})" in made


@pytest.mark.parametrize("format, infinite", [("float8_e4m3fn", 1), ("float8_e5m2", 4)])
def test_the_histogram_counts_what_is_not_finite(format, infinite):
    facts = range_facts(np.ones(128, int), format)
    assert dict(facts)["infinity or NaN"] == f"{infinite} ({infinite / 128:.2%})"


def test_swapped_norms_are_a_table():
    torch = pytest.importorskip("torch")
    report = cupynorm.swap_norms(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.ReLU()))
    assert repr(report) == str(report)
    assert "cupynorm.LayerNorm" in report._repr_html_() and "1 swapped" in report._repr_html_()
