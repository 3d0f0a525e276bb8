"""What results look like in a terminal and in Jupyter."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

import cupynorm
from cupynorm.bench import report
from cupynorm.svg import Picture, shade
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


def test_a_picture_is_xml_and_has_no_colour_of_its_own_for_words():
    picture = Picture(100, "a & b")
    picture.rectangle(0, 0, (10, 10), "#0072B2", "hint <1>")
    picture.text(0, 20, "x < y")
    picture.line((0, 0), (5, 30))
    picture.curve([(0, 0), (1, 1)], "#0072B2")
    root = xml.etree.ElementTree.fromstring(str(picture))
    kinds = [child.tag.rpartition("}")[2] for child in root]
    assert kinds == ["title", "rect", "text", "line", "polyline"]
    assert float(root.attrib["height"]) >= 30
    assert 'fill="currentColor"' in str(picture) and 'stroke="currentColor"' in str(picture)
    assert shade("#0072B2", 0) == "#0072b2" and shade("#0072B2", 1) == "#ffffff"


def test_a_bare_plan_reads_well():
    plan = cupynorm.plan(4096, device="H200")
    assert repr(plan) == str(plan) and repr(plan).startswith("problem ")
    assert max(map(len, repr(plan).splitlines())) < 140
    assert "layer_norm forward, 4096 rows x 4096 columns" in plan._repr_html_()
    assert plan._repr_html_().count("<tr>") == len(str(plan).splitlines())


def test_a_benchmark_has_a_picture_for_each_kind_of_cell():
    path = NOTEBOOKS / "h200.json"
    result = report.read(path)
    made = result._repr_html_()
    assert repr(result) == str(result)
    kinds = len(result.tables())
    assert made.count("<svg") == made.count("<table") == kinds
    first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
    assert f"cupynorm, {first['num_cols']} columns: " in made
    for picture in re.findall(r"<svg.*?</svg>", made):
        xml.etree.ElementTree.fromstring(picture)


def test_swapped_norms_are_a_table():
    torch = pytest.importorskip("torch")
    report = cupynorm.swap_norms(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.ReLU()))
    assert repr(report) == str(report)
    assert "cupynorm.LayerNorm" in report._repr_html_() and "1 swapped" in report._repr_html_()
