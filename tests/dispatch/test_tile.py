"""Tile: its text, its C++ initialisers, and its paths."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from plan_problems import CUDA_SRC, TABLE, problem_of

from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import make_plan
from cupynorm.dispatch.problem import PATHS, PATHS_OF_STRATEGY, Tile


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


def test_a_path_is_checked_although_an_equal_tile_has_fitted():
    """Tiles are equal whatever their paths are, and choices are remembered by tile."""
    given = problem_of(1024), DEVICES["H200"], 8
    tile = Tile(8, 32, 4, path="registers")
    assert make_plan(*given, strategy="warp", tile=tile)
    with pytest.raises(ValueError, match="path 'ring'; expected one of registers, bundle"):
        make_plan(*given, strategy="warp", tile=replace(tile, path="ring"))
