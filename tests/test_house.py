"""The house of docs/design.md: which module imports which, and how large everything is."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from repository_files import (
    CUDA_SRC,
    DEVICE_SOURCES,
    KERNELS,
    MODULES,
    PACKAGE,
    PYTHON,
    REPOSITORY,
    SOURCES,
)

# From the bottom up: a module imports from its own folder or from those before it.
HOUSE = ("dtypes", "options", "command_line", "table", "dispatch", "gpu", "norm", "plans")
HOUSE += ("functors", "recipes", "nn", "linear", "parallel", "functional", "verify", "bench")
HOUSE += ("explore", "types", "__main__")
BELOW_ALL = {"reference", "data", "__version__", ""}
# torch.fx records a module's call as one of cupynorm.layer_norm, so the module must call that.
UPWARD = {"nn/modules imports cupynorm.functional"}
TORCH = {"recipes", "nn", "linear", "parallel", "bench"}  # import torch at module level


def folder_of(name: str) -> str:
    """Of a module, given as "dispatch/tile" or "dispatch.tile"."""
    return re.split(r"[/.]", name)[0]


@cache
def nodes(text: str) -> list[tuple[ast.AST, bool]]:
    """All of a file of Python, and whether each is outside of functions."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
    found = [(ast.parse(text), True)]
    for node, is_top in found:  # it grows
        is_top = is_top and not isinstance(node, kinds)
        found += ((child, is_top) for child in ast.iter_child_nodes(node))
    return found


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at module level) of each import; here as cupynorm.<module>."""
    found = []
    for node, is_top in nodes(path.read_text()):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # the folder of the file, and one up for each further dot
                own = path.relative_to(PACKAGE).parts[:-1] if PACKAGE in path.parents else ()
                own = own[: len(own) + 1 - node.level]
                base = ".".join(filter(None, ("cupynorm", *own, base)))
            is_folder = base == "cupynorm" or (PACKAGE.parent / base.replace(".", "/")).is_dir()
            names = [f"{base}.{alias.name}" for alias in node.names] if is_folder else [base]
        found += [(name, is_top) for name in names]
    return found


def test_imports_of_every_kind_are_seen(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(
        "import a.b, c\nfrom . import d\nfrom .e import f\nfrom g.h import k\n"
        "def function():\n    import n\n    from .o import p\nclass C:\n    import q\n"
    )
    top = {"a.b", "c", "cupynorm.d", "cupynorm.e", "g.h", "q"}
    assert set(imports(path)) == {*((each, True) for each in top), ("n", False)} | {
        ("cupynorm.o", False)
    }


def test_arrows_go_one_way():
    upward = set()
    for name in MODULES.keys() - {"__init__"}:
        own = folder_of(name)
        assert own in HOUSE, f"say in HOUSE where cupynorm/{name}.py stands"
        for imported, _ in imports(MODULES[name]):
            package, _, module = imported.partition(".")
            other = folder_of(module)
            if package == "cupynorm" and other not in BELOW_ALL:
                assert other in HOUSE, f"{name} imports {imported}, which is not in HOUSE"
                if HOUSE.index(other) > HOUSE.index(own):
                    upward.add(f"{name} imports {imported}")
    assert upward == UPWARD


def test_modules_do_not_import_in_circles():
    names = {f"cupynorm.{name.replace('/', '.')}": name for name in MODULES if name != "__init__"}
    left = {}
    for name in names.values():
        found = {imported for imported, _ in imports(MODULES[name])}
        found |= {each.rpartition(".")[0] for each in found}
        left[name] = {names[each] for each in found if each in names} - {name}
    assert "gpu/arrays" in left["norm/prepared"] and sum(map(len, left.values())) > 100
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert not left, f"in a circle: {', '.join(left)}"


def test_libraries_are_imported_where_they_may_be():
    """At module level torch in its folders alone; cupy in functions of gpu/; the model and the
    reference need neither."""
    for name in MODULES:
        folder = folder_of(name)
        for imported, is_top in imports(MODULES[name]):
            library = imported.partition(".")[0]
            if library == "torch":
                assert not is_top or folder in TORCH, f"{name} imports torch at module level"
            if library in ("cupy", "cupy_backends", "cupyx"):
                assert folder == "gpu" and not is_top, f"{name} imports {imported}"
            if folder in ("dtypes", "dispatch"):
                pure = {*sys.stdlib_module_names, "numpy", "cupynorm"}
                assert library in pure, f"{name} imports {imported}"
    for path in (REPOSITORY / "reference").glob("*.py"):
        libraries = {imported.partition(".")[0] for imported, _ in imports(path)}
        assert libraries <= {*sys.stdlib_module_names, "numpy", "cupynorm"}, path.name
        assert not re.search(r"^\s*(from|import) cupynorm", path.read_text(), re.M), path.name


OF_NAMEDTUPLES = {"_fields", "_make", "_replace", "_asdict", "_field_defaults"}


def borrowed_underscores(text: str) -> list[str]:
    """Underscore names that a file takes from other modules of the package."""

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__") and name not in OF_NAMEDTUPLES

    found, imported = [], {"cupynorm"}
    for node, _ in nodes(text):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").split(".")[0] == "cupynorm"
        ):
            found += [alias.name for alias in node.names if is_private(alias.name)]
            imported |= {alias.asname or alias.name for alias in node.names}
    for node, _ in nodes(text):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value).split(".")[0] in imported:
                found.append(ast.unparse(node))
    return found


def test_underscore_names_stay_in_their_module():
    sample = (
        "from .a import _x, y\nfrom cupynorm.b import c as d\nd._z; y._fields; self._own; torch._C"
    )
    assert borrowed_underscores(sample) == ["_x", "d._z"]
    borrowed = {name: borrowed_underscores(path.read_text()) for name, path in MODULES.items()}
    assert not {name: names for name, names in borrowed.items() if names}


def test_names_are_not_used_twice():
    """Of modules, and of folders beside public functions; and none says nothing."""
    stems = [name.rpartition("/")[2] for name in MODULES]
    assert not {stem for stem in stems if stems.count(stem) > 1}
    nothing = {"utils", "util", "common", "helpers", "helper", "core", "misc"}
    assert not nothing & {path.stem.lower() for path in (*PYTHON, *SOURCES)}


# Sizes.

LIMITS = {
    "cupynorm": 20_000,
    "files of cupynorm": 80,
    "cuda_src": 8_700,
    "files of cuda_src": 80,
    "reference": 1_000,
    "tests": 28_000,
    "programs of notebooks": 1_500,
    "words of docs": 22_000,
    "README.md": 130,
}
# What is above its limit may shrink, and may not grow.
ABOVE = {"cupynorm": 23_500, "files of cupynorm": 86}


def lines_of(paths) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def sizes() -> dict[str, int]:
    python = {
        name: sorted((REPOSITORY / name).rglob("*.py"))
        for name in ("cupynorm", "reference", "tests", "notebooks")
    }
    docs = (REPOSITORY / "docs").glob("*.md")
    return {
        "cupynorm": lines_of(python["cupynorm"]),
        "files of cupynorm": len(python["cupynorm"]),
        "cuda_src": lines_of(SOURCES),
        "files of cuda_src": len(SOURCES),
        "reference": lines_of(python["reference"]),
        "tests": lines_of(python["tests"]),
        "programs of notebooks": lines_of(python["notebooks"]),
        "words of docs": sum(len(path.read_text(encoding="utf-8").split()) for path in docs),
        "README.md": lines_of([REPOSITORY / "README.md"]),
    }


@pytest.mark.parametrize("name", LIMITS)
def test_size(name):
    """A limit is met within a tenth."""
    assert 0 < sizes()[name] <= ABOVE.get(name, 1.1 * LIMITS[name])


def test_files_are_short():
    """A file of Python has at most 800 lines, one of CUDA 250, within a tenth."""
    limits = dict.fromkeys(PYTHON, 800) | dict.fromkeys(SOURCES, 250)
    assert len(limits) > 100
    assert not {
        str(path.relative_to(REPOSITORY)): lines_of([path])
        for path, limit in limits.items()
        if lines_of([path]) > 1.1 * limit
    }


def closure(path: Path) -> set[Path]:
    """The headers that a source includes, and theirs."""
    of_name = {each.name: each for each in DEVICE_SOURCES}
    found, rest = set(), {path}
    while rest:
        found |= rest
        named = {n for each in rest for n in re.findall(r'#include "(\w+\.cuh)"', each.read_text())}
        rest = {of_name[name] for name in named if name in of_name} - found
    return found - {path}


# Kernel -> headers, and lines with them.
READ = {"forward_warp.cu": (12, 1_800), "forward_block.cu": (16, 2_400)}


@pytest.mark.parametrize("name", READ)
def test_a_kernel_can_be_read(name):
    headers, (most, lines) = closure(CUDA_SRC / name), READ[name]
    assert 0 < len(headers) <= 1.1 * most
    assert lines_of([CUDA_SRC / name, *headers]) <= 1.1 * lines


def positional_parameters(path: Path) -> dict[str, int]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = {}
    for node, _ in nodes(path.read_text()):
        if isinstance(node, kinds):
            given = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
            found[node.name] = len(given) - (given[:1] in (["self"], ["cls"]))
    return found


def test_functions_have_at_most_six_positional_arguments():
    """Another library or Triton decides the signature of others."""
    found = {
        f"{name}.{function}"
        for name, path in MODULES.items()
        for function, count in positional_parameters(path).items()
        if count > 6
    }
    allowed = re.compile(r"bench/|(linear|parallel)/\w+\.__init__$|nn/(by_torch|enable)\.")
    assert not [each for each in found if not allowed.match(each)]


# Formats.


def complaint(tool: str, *arguments: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(tool, path=path)
    if not program:
        pytest.skip(f"{tool} is not installed: pip install {tool}")
    done = subprocess.run([program, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    return done.returncode and (done.stdout + done.stderr)[-4000:]


def test_sources_are_formatted_and_linted(tmp_path):
    wrong = tmp_path / "sample.cu"
    wrong.write_text("int  main( ){return 0 ;}\n")
    assert complaint("clang-format", "--dry-run", "-Werror", str(wrong))
    assert not complaint("clang-format", "--dry-run", "-Werror", *map(str, SOURCES))
    files = list(map(str, PYTHON))
    assert not complaint("ruff", "check", "--no-cache", *files)
    assert not complaint("ruff", "format", "--check", "--no-cache", *files)


def test_kernels_say_what_they_need():
    """`// name -- formula, who owns a row`; owns, moves, takes, needs; at most 12 lines."""
    for path in KERNELS:
        header = path.read_text().split("\n#pragma")[0].split("\n#include")[0].splitlines()
        header = [line for line in header if line.startswith("//")]
        keys = [match[1] for line in header if (match := re.match(r"// (\w+):\s+\S", line))]
        assert re.match(rf"// {path.stem} -- \S", header[0]) and len(header) <= 12, path.name
        assert keys == ["owns", "moves", "takes", "needs"], path.name
    page = (REPOSITORY / "docs" / "sources.md").read_text()
    missing = [path.name for path in DEVICE_SOURCES if f"`{path.name}`" not in page]
    assert not missing, "docs/sources.md has no line for these"


def test_sums_are_made_in_a_fixed_order():
    """No atomic sums, because their order and so their last bits change. A maximum does not, nor
    does a counter of rows."""
    atomic = re.compile(r"\batomic[A-Z]\w*|\batomic_ref\b|\bred\.(global|shared|async)|\batom\.")
    allowed = ("atomicMax(", "atomicAdd(call.next_row,")
    assert atomic.search('asm("red.global.add.f32 [%0], %1;")') and atomic.search("atomicCAS(a)")
    for path in DEVICE_SOURCES:
        text = re.sub(r"//[^\n]*", "", path.read_text())
        for each in allowed:
            text = text.replace(each, "")
        assert not atomic.search(text), path.name


OF_PYPI = (
    r"(?<![\w./-])cupynorm\[[a-z]",
    r"\b(pip3?|pipx|uv|conda|poetry)\b[^`|&;#]* (install|add)\b[^`|&;#]*(?<![\w./-])cupynorm\b",
)


def test_no_text_has_users_install_a_name_that_anybody_may_take():
    """cupynorm is not on PyPI. pip takes pyproject's own extras from the project that it builds."""

    def of_pypi(text: str) -> list[str]:
        joined = re.sub(r'"\s*\n\s*f?"', "", text)  # a message over several lines
        lines = [line for line in joined.splitlines() if "--no-index" not in line]
        return [line for line in lines if any(re.search(each, line) for each in OF_PYPI)]

    assert of_pypi("pip install -U 'cupynorm[cuda12]'") and of_pypi("uv add torch cupynorm")
    assert not of_pypi('pip install ".[cuda12]"  # in a checkout of cupynorm')
    folders = ("cupynorm", "cuda_src", "reference", "docs", "notebooks", ".ci")
    suffixes = (".py", ".md", ".ipynb", ".cu", ".cuh", ".h", ".cpp", ".yml", ".html", "")
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    paths = [path for path in (*paths, *REPOSITORY.iterdir()) if path.suffix in suffixes]
    texts = {path: path.read_text() for path in paths if path.is_file() and path.name != ".git"}
    assert len(texts) > 100
    assert not {str(path): found for path, text in texts.items() if (found := of_pypi(text))}


# What an import brings.

HEAVY = {"torch", "cupy", "cupy_backends", "triton", "scipy", "pandas", "matplotlib", "ml_dtypes"}


def python(script: str, **variables: str) -> str:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": path} | variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def brought_by(statements: str) -> set[str]:
    """Top-level names of the modules that statements bring beyond what Python starts with."""
    script = f"""
import json, sys
before = set(sys.modules)
{statements}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""
    return set(json.loads(python(script)))


def test_imports_bring_nothing_heavy():
    """`import cupynorm` brings only itself; plans and norms of NumPy arrays bring NumPy."""
    assert brought_by("import cupynorm") - {"cupynorm"} <= set(sys.stdlib_module_names)
    brought = brought_by("""
import numpy, cupynorm
for name in cupynorm.__all__:
    getattr(cupynorm, name)
cupynorm.plan(768, device="H200")
x = numpy.ones((2, 8), "float32")
made = cupynorm.layer_norm_forward(x, x.shape[-1])
cupynorm.layer_norm_backward(x, x, x.shape[-1], made.mean, made.rstd)
""")
    assert {"cupynorm", "numpy"} <= brought and brought.isdisjoint(HEAVY)


@pytest.mark.slow
def test_import_takes_less_than_50_milliseconds_beyond_numpy(tmp_path):
    """The best of several processes, because other work on the machine only adds time."""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}

    def best(statements: str, before: str = "") -> float:
        script = f"import time\n{before}\nstart = time.process_time()\n{statements}\n"
        script += "print(time.process_time() - start)"
        return min(float(python(script, **compiled)) for _ in range(7))

    assert best("sum(range(10**7))") > 0.050  # what takes longer is seen
    assert best("import cupynorm", "import numpy") < 0.050
