"""Tile: its text, its C++ initialisers, and its paths."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from plan_problems import CUDA_SRC, DIRECTIONS, TABLE

from cupynorm.dispatch.problem import PATHS, PATHS_OF_STRATEGY, Tile
from cupynorm.plans import plan


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("device", ["H200", "A100"])
def test_tile_is_read_back_from_its_text(device, direction):
    for num_cols in (3, 64, 127, 1024, 4095, 12288, 40960, 1 << 20):
        made = plan(num_cols, direction=direction, device=device)
        assert Tile.of(str(made.tile)) == made.tile
        assert f"path {made.tile.path}" in str(Tile.of(str(made.tile)))
        assert made.tile.path in PATHS_OF_STRATEGY[made.strategy]
    assert Tile.of("pack_size 8,threads_per_row  32, stages 2") == Tile(8, 32, stages=2)
    with pytest.raises(ValueError, match="tile has path 'rings'; expected one of registers"):
        Tile.of("pack_size 8, threads_per_row 32, path rings")


def test_cpp_of_a_tile_has_the_fields_of_tile_cuh_in_order():
    """C++ requires designated initialisers in declaration order. The defaults agree, too."""
    struct = re.search(
        r"struct Tile \{(.*?)\n\n", next(CUDA_SRC.rglob("tile.cuh")).read_text(), re.S
    )[1]
    declared = re.findall(r"^\s*int (\w+)(?: = (\d+))?;", struct, re.M)
    *counts, path = fields(Tile)
    assert [name for name, _ in declared] == [field.name for field in counts]
    defaults = [int(default) for _, default in declared if default]
    assert defaults == [field.default for field in counts][-len(defaults) :]
    assert path.name == "path" and struct.split()[-4:] == ["Path", "path", "=", "Path::registers;"]
    tile = Tile(*range(1, len(counts) + 1), path="ring")
    initialisers = [f".{name} = {at}" for at, (name, _) in enumerate(declared, 1)]
    assert tile.cpp == "Tile{" + ", ".join([*initialisers, ".path = Path::ring"]) + "}"


def test_paths_are_those_of_tile_cuh():
    declared = re.search(
        r"enum class Path \{(.*?)\n\};", next(CUDA_SRC.rglob("tile.cuh")).read_text(), re.S
    )[1]
    assert tuple(re.findall(r"^\s*(\w+),", declared, re.M)) == PATHS
    assert {path for paths in PATHS_OF_STRATEGY.values() for path in paths} == set(PATHS)
    assert tuple(PATHS_OF_STRATEGY) == TABLE
