"""Rules of the CUDA sources: headers, sizes, sums, PTX and macros."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository_files import (
    CUDA_SRC,
    DEVICE_SOURCES,
    KERNELS,
    REPOSITORY,
    SOURCE_OF,
    SOURCES,
    names_of,
)

from cupynorm.gpu import nvrtc
from cupynorm.plan.instances import Kernel
from cupynorm.plan.problem import PATHS, PATHS_OF_STRATEGY


@pytest.mark.parametrize("path", **names_of(KERNELS))
def test_header_of_a_kernel(path):
    """At most 12 lines: `// name -- formula, who owns a row`; owns, moves, takes, needs."""
    lines = path.read_text().splitlines()
    header = lines[: next(at for at, line in enumerate(lines) if not line.startswith("//"))]
    assert len(header) <= 12
    assert re.match(rf"// {path.stem} -- \S", header[0])
    keys = [match[1] for line in header[1:] if (match := re.match(r"// (\w+):\s+\S", line))]
    assert keys == ["owns", "moves", "takes", "needs"]
    for line in header[1:]:
        assert re.match(r"//( (owns|moves|takes|needs): |        )\s*\S", line), (
            f"neither a key nor its continuation: {line}"
        )
    for file in re.findall(r"\w+\.cuh?\b", "\n".join(header)):
        assert file in SOURCE_OF, f"the header names {file}, which is not there"


@pytest.mark.parametrize("path", **names_of([path for path in SOURCES if path.suffix != ".cu"]))
def test_header_of_a_header(path):
    """At most 12 lines, of which the first says what is in the file; the runtime is no header."""
    lines = path.read_text().splitlines()
    header = lines[: next(at for at, line in enumerate(lines) if not line.startswith("//"))]
    assert re.match(rf"// {re.escape(path.name)} -- \S", header[0])
    assert len(header) <= 12
    assert lines.count("#pragma once") == (path.suffix != ".cpp")


# The two kernels to read first.
SIMPLEST = {"forward_uncached.cu": 45, "forward_warp.cu": 45}


def test_kernel_files_are_short():
    """At most 250 lines, the simplest less."""
    limits = dict.fromkeys((path.name for path in SOURCES), 250)
    limits |= SIMPLEST
    lines = {path.name: len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: count for name, count in lines.items() if count > limits[name]}


def test_lines_of_cuda_sources_have_at_most_100_columns():
    lines = [(path.name, line) for path in SOURCES for line in path.read_text().splitlines()]
    assert not [(name, line) for name, line in lines if len(line) > 100]


def test_files_that_a_comment_names_are_there():
    for path in DEVICE_SOURCES:
        for file in re.findall(r"\b\w+\.cuh?\b", path.read_text()):
            assert file in SOURCE_OF, f"{path.name} names {file}, which is not there"


# docs/sources.md.

SOURCES_PAGE = (REPOSITORY / "docs" / "sources.md").read_text()


def groups_of_sources() -> dict[str, dict[str, str]]:
    """The tables below "All files", from the top: by heading the text of each file by its name."""
    sections = SOURCES_PAGE.partition("## All files")[2].split("\n### ")[1:]
    return {
        each.partition("\n")[0]: dict(re.findall(r"^\| `(\w+\.cuh?)` \| (.*) \|$", each, re.M))
        for each in sections
    }


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include "(\w+\.cuh)"$', path.read_text(), re.M)


def test_the_page_of_the_sources_has_every_file():
    """Once, with the text of the first line of the file."""
    rows = [row for group in groups_of_sources().values() for row in group.items()]
    first_lines = {
        path.name: path.read_text().partition("\n")[0].partition(" -- ")[2]
        for path in DEVICE_SOURCES
    }
    missing = [f"| `{name}` | {text} |" for name, text in first_lines.items() - rows]
    assert not missing, "give docs/sources.md these rows:\n" + "\n".join(sorted(missing))
    assert sorted(name for name, _ in rows) == sorted(first_lines)


def test_sources_include_no_group_above_their_own():
    groups = list(groups_of_sources().values())
    place = {name: at for at, group in enumerate(groups) for name in group}
    arrows = {(path.name, other) for path in DEVICE_SOURCES for other in includes(path)}
    assert len(groups) > 8 and len(arrows) > 100
    upward = sorted((file, other) for file, other in arrows if place[other] < place[file])
    assert not upward, "these includes point up in docs/sources.md"


def test_a_folder_has_the_headers_of_a_group():
    """Kernels are in cuda_src itself, and so are forward.cuh and backward.cuh."""
    folders = [path for path in CUDA_SRC.iterdir() if path.is_dir() and path.name != "on_cpu"]
    assert len(SOURCE_OF) == len(DEVICE_SOURCES), "two files have one name"
    named = set()
    for heading, group in groups_of_sources().items():
        folder = "".join(re.findall(r": `(\w+)/`$", heading))
        named.add(folder)
        for name in group:
            expected = CUDA_SRC / folder if name.endswith(".cuh") else CUDA_SRC
            assert SOURCE_OF[name].parent == expected, name
    assert named == {"", *(path.name for path in folders)}


def included_by(name: str) -> set[str]:
    """The file and all that it includes."""
    found, rest = set(), {name}
    while rest:
        found |= rest
        rest = {other for each in rest for other in includes(SOURCE_OF[each])} - found
    return found


def test_the_page_of_the_sources_has_every_path():
    """With its strategies, and files that an instance of one of their kernels includes."""
    table = SOURCES_PAGE.partition("| path | strategies |")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.split("\n")[2:]]
    assert {path: strategies.split(", ") for path, strategies, *_ in rows} == {
        path: [name for name, paths in PATHS_OF_STRATEGY.items() if path in paths] for path in PATHS
    }
    for path, strategies, *files in rows:
        for direction, file in zip(("forward", "backward"), files):
            kernels = [
                Kernel(f"{direction}_{name}.cu", f"Path::{path}") for name in strategies.split(", ")
            ]
            files = re.findall(r'"(.*)"', "".join(map(nvrtc.includes, kernels)))
            assert not file or file in set().union(*map(included_by, files)), path


def code(path: Path) -> str:
    """The text without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)


ATOMIC = re.compile(r"\batomic[A-Z]\w*|\batomic_ref\b|\bred\.(global|shared|async)|\batom\.")
ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b(?:\s+(?:volatile|__volatile__))?\s*\(\s*\"([^\"]*)\"")


def test_patterns_of_atomics_and_ptx():
    for text in (
        "atomicAdd(&sum, value);",
        'asm("red.global.add.f32 [%0], %1;" :: "l"(at), "f"(v));',
        "atomicCAS(a, b, c)",
    ):
        assert ATOMIC.search(text), text
    assert ASM.findall('asm("" : "+r"(word)); asm volatile("mov.u32 %0, %%r;" : "=r"(rank));') == [
        "",
        "mov.u32 %0, %%r;",
    ]
    assert ASM.findall('asm volatile(\n "mbarrier.init\\n"\n "more"') == ["mbarrier.init\\n"]


def test_sums_are_made_in_a_fixed_order():
    """No atomic sums, because their order and so their last bits change.

    A maximum does not, nor does a counter of rows.
    """
    allowed = {"scales.cuh": "atomicMax(", "row_statistics.cuh": "atomicAdd(call.next_row,"}
    for path in DEVICE_SOURCES:
        text = code(path).replace(allowed.get(path.name, "-"), "-")
        assert not ATOMIC.search(text), path.name


PTX_HEADERS = sorted(path.name for path in (CUDA_SRC / "ptx").iterdir())


@pytest.mark.parametrize("path", **names_of(DEVICE_SOURCES))
def test_ptx_is_in_a_few_headers(path):
    """Only in cuda_src/ptx, with a C++ branch. pack.cuh has empty statements."""
    text = code(path)
    statements = ASM.findall(text)
    assert len(re.findall(r"\b(?:asm|__asm__|__asm)\b", text)) == len(statements), (
        "an asm that the pattern does not understand"
    )
    if path.name in PTX_HEADERS:
        assert statements and all(statements)
        assert "#ifdef CUPYNORM_ON_CPU" in text
    else:
        assert not any(statements)
        assert not statements or path.name == "pack.cuh"


def declared(text: str) -> set[str]:
    return set(re.findall(r"__device__ __forceinline__ [\w:*<> ]+?[ *&](\w+)\(", text))


@pytest.mark.parametrize("name", PTX_HEADERS)
def test_every_ptx_function_has_a_twin(name):
    """Both branches declare the same functions, but for those of PTX or of the runtime."""
    _, on_cpu, on_gpu, _ = re.split(r"#ifdef \w+|#else|#endif", code(SOURCE_OF[name]))
    extra = {"smem_address", "dynamic_smem"}
    assert declared(on_cpu)
    assert declared(on_gpu) - extra == declared(on_cpu) - extra


def test_kernels_are_chosen_by_templates_not_by_macros():
    """Template parameters choose the code; there are no macros and no #if."""
    for path in DEVICE_SOURCES:
        text = code(path)
        assert not re.search(r"^\s*#\s*(define|if|elif|ifndef)\b", text, re.M), path.name
        assert set(re.findall(r"#ifdef (\w+)", text)) <= {"CUPYNORM_ON_CPU"}, path.name
