"""explain(): each part of the story is that of the plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nvrtc_here import needs_nvrtc

import cupynorm
from cupynorm.dispatch import problem
from cupynorm.explore.explain import PATHS, Occupancy, occupancy_of
from cupynorm.gpu import nvrtc

PROBLEMS = {
    "warp": {"num_cols": 1024},
    "bundle": {"num_cols": 33},
    "block": {"num_cols": 4096},
    "cluster": {"num_cols": 65536},
    "uncached": {"num_cols": 4096, "strategy": "uncached"},
    "residual": {"num_cols": 768, "residual": True},
    "rms_norm": {"num_cols": 768, "norm": "rms_norm", "dtype": "float32"},
    "backward": {"num_cols": 1024, "direction": "backward"},
    "backward, residual": {"num_cols": 5000, "direction": "backward", "residual": True},
    "A100": {"num_cols": 16384, "device": "A100"},
}


def explain(**options) -> cupynorm.types.Explanation:
    return cupynorm.explain(**{"device": "H200", **options})


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_traffic_adds_up_to_the_bytes_of_the_plan(name):
    story = explain(**PROBLEMS[name])
    _, *rows, total = story.traffic()
    assert sum(number(row[-1]) for row in rows) == number(total[-1]) == story.plan.bytes_moved
    has_passes = any(row[0] == "read in further passes" for row in rows)
    assert has_passes is (name == "uncached")


@pytest.mark.parametrize("name", PROBLEMS)
def test_one_strategy_is_chosen_and_narrower_ones_say_why_not(name):
    story = explain(**PROBLEMS[name])
    _, *rows = story.choice()
    chosen = [row for row in rows if row[2].startswith("chosen")]
    assert [row[0] for row in chosen] == [story.plan.strategy]
    assert chosen[0][2] == f"chosen: {story.plan.reason}"
    for strategy, most, verdict in rows:
        if verdict == "too wide":
            assert story.plan.problem.num_cols > number(most), strategy
        if name == "A100" and strategy == "cluster":
            assert verdict == "needs a newer GPU"


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_least_time_is_that_of_the_bytes(name):
    story = explain(**PROBLEMS[name])
    bandwidth = 2.04e12 if name == "A100" else 4.8e12
    assert story.least_microseconds() == pytest.approx(story.plan.bytes_moved / bandwidth * 1e6)
    # An element of 2 bytes that is read and written once, with 8 operations: 2 for each byte.
    if name == "block":
        assert story.operations_per_byte() == pytest.approx(2, rel=1e-3)
    assert "memory is the limit" in story.speed()


@pytest.mark.slow
@needs_nvrtc
def test_occupancy_is_limited_by_what_runs_out_first():
    story = explain(num_cols=4096)
    (found,) = story.occupancies
    (launch,) = story.plan.launches
    _, used = nvrtc.compile_for(launch.kernel, 90)
    assert found.registers == used.registers and found.spilled_bytes == 0
    assert found.blocks * launch.block_size * used.registers <= 65536
    assert found.blocks >= launch.tile.blocks_per_sm
    ring = explain(num_cols=1024, direction="backward").occupancies[0]
    assert (ring.blocks, ring.limit) == (1, "shared memory")


def test_without_nvrtc_registers_are_unknown(monkeypatch):
    def missing(*_):
        raise nvrtc.MissingLibraryError("none")

    monkeypatch.setattr(nvrtc, "compile_for", missing)
    story = explain(num_cols=1024)
    found = occupancy_of(story.plan.launches[0], story.plan.device)
    assert found == Occupancy(32, "threads", 64, 64, None, 0)
    found = explain(num_cols=1024, device="A10").occupancies[0]
    assert found == Occupancy(16, "blocks", 32, 48, None, 0)  # of 64 threads each
    assert ("forward_warp.cu", "?") in {(row[0], row[2]) for row in story.kernels()}


@pytest.mark.slow
def test_the_story_prints_and_draws():
    story = explain(num_cols=1024, num_rows=4096)
    text = str(story)
    assert text.startswith("layer_norm forward of 4096 x 1024 on H200\n")
    assert "forward_warp -- y = (x - mean) * rstd * weight + bias; 1 to 32 lanes of a warp" in text
    assert story.header in text and story.source.startswith("// forward_warp --")
    assert repr(story) == text
    pytest.importorskip("matplotlib")
    html = story._repr_html_()
    assert html.count("<table") == 3 and html.count("<svg") == 2
    (point,) = story.roofline().axes[0].lines[1:]
    assert point.get_xydata()[0] == pytest.approx([2.0, 9.6e12], rel=0.01)
    assert "nothing to compute" in str(explain(num_cols=8, num_rows=0))


def test_the_path_names_its_file_and_what_it_is_for():
    page = (Path(__file__).parents[2] / "docs" / "sources.md").read_text(encoding="utf-8")
    for path, (_, *files) in PATHS.items():
        cells = [f"`{file}`" if file else "" for file in files]
        assert re.search(
            rf"^\| {path} \| [\w, ]+ \| {' [|] '.join(cells)} ?\|$", page, re.MULTILINE
        )
    assert set(PATHS) == set(problem.PATHS)
    assert explain(num_cols=1023).path() == (
        "2 bundles of 2 rows for each warp, in forward_bundle.cuh: several rows move as one piece, "
        "because rows begin on 2 bytes and the copy engine needs 16"
    )
    ring = explain(num_cols=4096, direction="backward").path()
    assert ring.endswith("in backward_ring.cuh: the next rows arrive while one is written")
