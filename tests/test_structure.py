"""Rules of the whole repository: imports, words, headers, formatting, what kernels may not do."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cupynorm

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "cupynorm"
CUDA_SRC = REPOSITORY / "cuda_src"
# By path in the package: "dtypes", "plan/dispatch".
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py" or path.parent == PACKAGE
}
KERNELS = sorted(CUDA_SRC.glob("*.cu"))
SOURCES = sorted(
    path for path in CUDA_SRC.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp")
)
DEVICE_SOURCES = sorted(path for path in CUDA_SRC.iterdir() if path.suffix in (".cu", ".cuh"))
PYTHON = sorted(
    path
    for folder in ("cupynorm", "reference", "tests", "docs")
    for path in (REPOSITORY / folder).rglob("*.py")
)


def names_of(paths):
    return {"argvalues": paths, "ids": [str(path.relative_to(REPOSITORY)) for path in paths]}


# Imported modules and import time.


def python(script: str) -> str:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = (
    "torch",
    "cupy",
    "cupy_backends",
    "triton",
    "scipy",
    "pandas",
    "matplotlib",
    "ml_dtypes",
    "IPython",
    "pytest",
    "jax",
)


def brought_by(statements: str) -> set[str]:
    """Top-level names of the modules that statements bring beyond what Python starts with."""
    script = f"""
import json, sys
before = set(sys.modules)
{statements}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""
    return set(json.loads(python(script)))


def test_import_brings_nothing_heavy():
    """`import cupynorm` imports only itself and the standard library, not NumPy."""
    brought = brought_by("import cupynorm")
    assert "cupynorm" in brought
    assert brought - {"cupynorm"} <= set(sys.stdlib_module_names)


def test_plans_and_numpy_input_bring_only_numpy():
    """A star import, a plan, and norms of NumPy arrays import neither torch nor CuPy."""
    brought = brought_by("""
import numpy, cupynorm
for name in cupynorm.__all__:
    getattr(cupynorm, name)
cupynorm.plan(768, device="H200")
x = numpy.ones((2, 8), "float32")
made = cupynorm.layer_norm_forward(x)
cupynorm.layer_norm_backward(x, x, made.mean, made.rstd)
""")
    assert {"cupynorm", "numpy"} <= brought
    assert brought.isdisjoint(HEAVY)


@pytest.mark.slow
def test_import_takes_less_than_50_milliseconds_beyond_numpy():
    """The best of several processes, because other work on the machine only adds time."""

    def best(statements: str, before: str = "") -> float:
        script = f"import time\n{before}\nstart = time.perf_counter()\n{statements}\n"
        script += "print(time.perf_counter() - start)"
        return min(float(python(script)) for _ in range(5))

    assert best("import cupynorm", "import numpy") < 0.050
    names = best("for name in cupynorm.__all__: getattr(cupynorm, name)", "import numpy, cupynorm")
    # All modules together may take twice as long as NumPy on the same machine.
    assert names < 2 * max(0.050, best("import numpy"))


# Imports between folders.

# From the bottom up: a module imports from its own folder or from those before it.
WINGS = (
    "dtypes",
    "arguments",
    "table",
    "svg",
    "plan",
    "gpu",
    "norm",
    "functors",
    "nn",
    "linear",
    "parallel",
    "check",
    "bench",
    "explore",
    "__main__",
)
BELOW_ALL = {"reference", "data", "__version__"}
TORCH = {"nn", "linear", "parallel"}
CUPY = {"gpu/nvrtc", "gpu/launch"}


def wing_of(name: str) -> str:
    """The folder of a module, given as "plan/tile" or "plan.tile"."""
    first = re.split(r"[/.]", name)[0]
    return first


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at module level) of each import; here as cupynorm.<module>."""
    tree = ast.parse(path.read_text(), str(path))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        at_module_level = id(node) not in inside
        if isinstance(node, ast.Import):
            found += [(alias.name, at_module_level) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # The folder of the file, and one folder up for each further dot.
                folder = (
                    path.relative_to(PACKAGE).parts[:-1] if path.is_relative_to(PACKAGE) else ()
                )
                folder = folder[: len(folder) + 1 - node.level]
                base = ".".join(filter(None, ("cupynorm", *folder, base)))
            if base == "cupynorm" or (PACKAGE.parent / base.replace(".", "/")).is_dir():
                found += [(f"{base}.{alias.name}", at_module_level) for alias in node.names]
            else:
                found.append((base, at_module_level))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
            "import_module",
            "__import__",
        ):
            found.append((ast.unparse(node.args[0]), at_module_level))
    return found


def test_imports_sees_every_kind(tmp_path):
    """The parser of the tests below finds every kind of import."""
    path = tmp_path / "sample.py"
    path.write_text(
        "import a.b, c\nfrom . import d\nfrom .e import f\nfrom g.h import k\n"
        "if True:\n    import m\n"
        "def function():\n    import n\n    from .o import p\nclass C:\n    import q\n"
        "importlib.import_module('r')\n"
    )
    assert sorted(imports(path)) == sorted(
        [
            ("a.b", True),
            ("c", True),
            ("cupynorm.d", True),
            ("cupynorm.e", True),
            ("g.h", True),
            ("m", True),
            ("q", True),
            ("'r'", True),
            ("n", False),
            ("cupynorm.o", False),
        ]
    )


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__"])
def test_arrows_go_one_way(name):
    own = wing_of(name)
    assert own in WINGS, f"cupynorm/{name}.py is in no wing: say in WINGS where it stands"
    for imported, _ in imports(MODULES[name]):
        package, _, module = imported.partition(".")
        if package != "cupynorm" or module in BELOW_ALL or wing_of(module) in BELOW_ALL:
            continue
        other = wing_of(module)
        assert other in WINGS, f"{name} imports {imported}, which is in no wing"
        upward = WINGS.index(other) > WINGS.index(own)
        assert not upward, f"{name} imports {imported} from a wing above"


def test_modules_do_not_import_in_circles():
    """Imports inside functions count too, but those of the package itself, which loads names."""
    names = {f"cupynorm.{name.replace('/', '.')}": name for name in MODULES if name != "__init__"}
    arrows = {
        name: {names[found] for found, _ in imports(MODULES[name]) if found in names}
        | {
            names[parent]
            for found, _ in imports(MODULES[name])
            if (parent := found.rpartition(".")[0]) in names
        }
        - {name}
        for name in names.values()
    }
    assert arrows["norm/prepared"] >= {"gpu/arrays", "plan/dispatch", "dtypes", "plan/problem"}
    left = dict(arrows)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert not left, f"in a circle: {', '.join(left)}"


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_may_import_torch_and_cupy(name):
    for imported, at_module_level in imports(MODULES[name]):
        library = imported.partition(".")[0]
        if library == "torch":
            in_torch = wing_of(name) in TORCH or name == "bench/triton_tutorial"
            assert not at_module_level or in_torch, f"{name} imports torch at module level"
            assert wing_of(name) not in ("dtypes", "plan"), f"{name} imports torch"
        if library in ("cupy", "cupy_backends", "cupyx"):
            assert name in CUPY, f"{name} imports {imported}; nvrtc.cupy() is the way to it"
            assert not at_module_level, f"{name} imports {imported} at module level"
    assert any(MODULES[user].read_text().count("import cupy") for user in CUPY)


def test_the_pure_modules_need_only_numpy_and_the_standard_library():
    pure = [name for name in MODULES if wing_of(name) in ("dtypes", "plan")]
    assert len(pure) > 5
    for name in pure:
        outside = {imported.partition(".")[0] for imported, _ in imports(MODULES[name])} - {
            "cupynorm"
        }
        assert outside <= set(sys.stdlib_module_names) | {"numpy"}, name
        assert name == "dtypes" or "numpy" not in {
            imported for imported, _ in imports(MODULES[name])
        }


def test_reference_imports_only_numpy_and_itself():
    for path in sorted((REPOSITORY / "reference").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} == {"numpy"}, path.name
            if isinstance(node, ast.ImportFrom):
                assert node.level == 1 or node.module in (
                    "__future__",
                    "collections.abc",
                    "typing",
                ), path.name


def test_no_module_has_a_catch_all_name():
    for path in REPOSITORY.rglob("*"):
        inside = path.relative_to(REPOSITORY).parts
        if path.suffix in (".py", ".cu", ".cuh", ".h") and not inside[0].startswith("."):
            assert path.stem.lower() not in (
                "utils",
                "util",
                "common",
                "helpers",
                "helper",
                "core",
                "misc",
            ), path


# Sizes.

MOST_POSITIONAL = 6
MOST_LINES = 500
# Another library or Triton decides the signature of these; those of tests imitate one.
LONG_SIGNATURES = {
    "linear/module.LayerNormLinear.__init__",
    "linear/api.layer_norm_linear_backward",
    "bench/triton_tutorial._forward",
    "bench/triton_tutorial._backward_rows",
    "bench/triton_tutorial._backward_columns",
    "tests/bench/test_peers._flash_attn.layer_norm_fn",
    "tests/bench/test_peers._liger.LigerRMSNormFunction.forward",
    "tests/bench/test_peers._quack.rmsnorm",
    "tests/linear/test_norm_linear.gemm_of_columns",
}


def positional_parameters(text: str) -> dict[str, int]:
    """The number of positional parameters of every function, by qualified name."""
    counts = {}

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [each.arg for each in (*child.args.posonlyargs, *child.args.args)]
                counts[name] = len(given) - (given[:1] in (["self"], ["cls"]))
            visit(child, name)

    visit(ast.parse(text), "")
    return counts


def test_positional_parameters_are_counted():
    text = (
        "def f(a, b=1, /, c=2, *rest, d, **others): pass\n"
        "class C:\n    def m(self, a):\n        def inner(x, y): pass\n"
        "    @classmethod\n    async def k(cls): pass\n"
    )
    assert positional_parameters(text) == {"f": 3, "C.m": 1, "C.m.inner": 2, "C.k": 0}


def test_functions_have_few_positional_parameters():
    """Those of the package, reference/, tests/ and docs/; pytest calls tests by name."""
    others = {
        path.relative_to(REPOSITORY).with_suffix("").as_posix(): path
        for path in PYTHON
        if PACKAGE not in path.parents
    }
    found = {
        f"{module}.{name}"
        for module, path in (MODULES | others).items()
        for name, count in positional_parameters(path.read_text()).items()
        if count > MOST_POSITIONAL and not name.startswith("test_")
    }
    assert not found - LONG_SIGNATURES, "pass a small dataclass, or keyword-only parameters"
    assert not LONG_SIGNATURES - found, "no longer long: remove from LONG_SIGNATURES"


def test_python_files_are_short():
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


# Underscore names.

# Public members of namedtuple, whose names begin with an underscore.
OF_NAMEDTUPLES = {"_fields", "_make", "_replace", "_asdict", "_field_defaults"}


def is_underscored(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMEDTUPLES


def borrowed_underscores(text: str) -> list[str]:
    """Underscore names that a file takes from other modules of the package."""
    tree = ast.parse(text)
    found, imported = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").split(".")[0] == "cupynorm"
        ):
            found += [alias.name for alias in node.names if is_underscored(alias.name)]
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {
                alias.asname or alias.name
                for alias in node.names
                if alias.name.split(".")[0] == "cupynorm"
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_underscored(node.attr):
            owner = ast.unparse(node.value)
            if owner in imported or owner.startswith("cupynorm."):
                found.append(f"{owner}.{node.attr}")
    return found


def test_borrowed_underscores_are_found():
    text = (
        "from .a import _x, y\nfrom cupynorm.b import c as d\nimport torch, cupynorm\n"
        "d._z; y._fields; torch._C; self._own; cupynorm.gpu._f; d.__name__\n"
    )
    assert sorted(borrowed_underscores(text)) == ["_x", "cupynorm.gpu._f", "d._z"]


@pytest.mark.parametrize("name", MODULES)
def test_underscore_names_stay_in_their_module(name):
    assert not borrowed_underscores(MODULES[name].read_text())


# Kernels.


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
        assert (CUDA_SRC / file).is_file(), f"the header names {file}, which is not there"


@pytest.mark.parametrize(
    "path", **names_of([path for path in DEVICE_SOURCES if path.suffix == ".cuh"])
)
def test_header_of_a_header(path):
    text = path.read_text()
    assert re.match(rf"// {re.escape(path.name)} -- \S", text)
    assert text.count("#pragma once") == 1


def test_kernel_files_are_short():
    """A .cu has at most 120 lines, a .cuh 250, and each of the two simplest kernels 45."""
    lines = {path.name: len(path.read_text().splitlines()) for path in DEVICE_SOURCES}
    limits = {"forward_uncached.cu": 45, "forward_warp.cu": 45}
    too_long = {
        name: count
        for name, count in lines.items()
        if count > limits.get(name, 120 if name.endswith(".cu") else 250)
    }
    assert not too_long


@pytest.mark.parametrize("path", **names_of(SOURCES))
def test_lines_of_cuda_sources_have_at_most_100_columns(path):
    assert not [line for line in path.read_text().splitlines() if len(line) > 100]


@pytest.mark.parametrize("path", **names_of(DEVICE_SOURCES))
def test_files_that_a_comment_names_are_there(path):
    for file in re.findall(r"\b\w+\.cuh?\b", path.read_text()):
        assert (CUDA_SRC / file).is_file(), f"{path.name} names {file}, which is not there"


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


@pytest.mark.parametrize("path", **names_of(DEVICE_SOURCES))
def test_sums_are_made_in_a_fixed_order(path):
    """No atomic sums, because their order and so their last bits change. A maximum does not."""
    text = code(path)
    assert not ATOMIC.search(text.replace("atomicMax(", "") if path.name == "amax.cuh" else text)


@pytest.mark.parametrize("path", **names_of(DEVICE_SOURCES))
def test_ptx_is_in_two_headers(path):
    """Only in cluster.cuh and bulk.cuh, with a C++ branch. pack.cuh has empty statements."""
    text = code(path)
    statements = ASM.findall(text)
    assert len(re.findall(r"\b(?:asm|__asm__|__asm)\b", text)) == len(statements), (
        "an asm that the pattern does not understand"
    )
    if path.name in ("cluster.cuh", "bulk.cuh"):
        assert statements and all(statements)
        assert "#ifdef CUPYNORM_ON_CPU" in text
    else:
        assert not any(statements)
        assert not statements or path.name == "pack.cuh"


def declared(text: str) -> set[str]:
    return set(re.findall(r"__device__ __forceinline__ [\w:*<> ]+?[ *&](\w+)\(", text))


@pytest.mark.parametrize("name", ("cluster.cuh", "bulk.cuh"))
def test_every_ptx_function_has_a_twin(name):
    """Both branches declare the same functions, but for those of PTX or of the runtime."""
    _, on_cpu, on_gpu = re.split(r"#ifdef CUPYNORM_ON_CPU|#else", code(CUDA_SRC / name))
    extra = {"smem_address", "dynamic_smem"}
    assert len(declared(on_cpu)) >= 3
    assert declared(on_gpu) - extra == declared(on_cpu) - extra


@pytest.mark.parametrize("path", **names_of(DEVICE_SOURCES))
def test_kernels_are_chosen_by_templates_not_by_macros(path):
    """Template parameters choose the code; there are no macros and no #if."""
    text = code(path)
    assert not re.search(r"^\s*#\s*(define|if|elif|ifndef)\b", text, re.M)
    assert set(re.findall(r"#ifdef (\w+)", text)) <= {"CUPYNORM_ON_CPU"}


# Words.

NEVER = r"hidden_size|gamma|beta|grad_output|invvar|rsigma|epsilon|ctas?|nblks|is_rms_norm"
NEVER += r"|smem_size|qscale|prologue|epilogue"


@pytest.mark.parametrize(
    "path", **names_of(DEVICE_SOURCES + sorted((REPOSITORY / "reference").glob("*.py")))
)
def test_words_that_are_not_used(path):
    """No word of NEVER in kernels and reference. Strings may have PTX's spellings."""
    text = re.sub(r"\"[^\"\n]*\"", "", path.read_text())
    assert not re.findall(rf"\b({NEVER})\b", text, re.I)


# Formatting.


def tool(name: str) -> str:
    found = shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if not found:
        pytest.skip(f"{name} is not installed: pip install {name}")
    return found


def complaint(*command: str) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return (
        ""
        if done.returncode == 0
        else (done.stdout + done.stderr)[-4000:] or f"exit {done.returncode}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", **names_of(SOURCES))
def test_cuda_sources_are_formatted(path):
    assert not complaint(tool("clang-format"), "--dry-run", "-Werror", str(path))


def test_clang_format_finds_wrong_format(tmp_path):
    path = tmp_path / "sample.cu"
    path.write_text("int  main( ){return 0 ;}\n")
    assert "code should be clang-formatted" in complaint(
        tool("clang-format"), "--dry-run", "-Werror", str(path)
    )


@pytest.mark.parametrize("command", (("format", "--check"), ("check",)), ids=" ".join)
def test_python_sources_are_formatted_and_linted(command):
    assert len(PYTHON) > 10
    assert not complaint(tool("ruff"), *command, "--no-cache", *map(str, PYTHON))


def test_ruff_finds_errors(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(
        "import os\nx = [ 1,2 ]\n# " + 15 * "too long " + "\nprint(x, \nx)  # fmt: skip\n"
    )
    config = ("--no-cache", "--config", str(REPOSITORY / "pyproject.toml"), str(path))
    complained = complaint(tool("ruff"), "check", *config)
    # An unused import, a line that is too long, a blank at the end of a line.
    assert "F401" in complained and "E501" in complained and "W291" in complained
    assert "1 file would be reformatted" in complaint(tool("ruff"), "format", "--check", *config)
    path.write_text("x = [1, 2]\n")
    assert not complaint(tool("ruff"), "check", *config) and not complaint(
        tool("ruff"), "format", "--check", *config
    )


# Public names.

PUBLIC = [name for name in dir(cupynorm) if not name.startswith("_")]


def documented(function: object, seen: frozenset[str] = frozenset()) -> str:
    """A function's docstring and those of public functions that it names."""
    text = inspect.getdoc(function) or ""
    referred = [name for name in PUBLIC if name not in seen and re.search(rf"\b{name}\b", text)]
    functions = [
        getattr(cupynorm, name) for name in referred if inspect.isfunction(getattr(cupynorm, name))
    ]
    return "\n".join([text, *(documented(other, seen | set(referred)) for other in functions)])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    """Docstrings name every argument and what is raised, or name a function that does."""
    value = getattr(cupynorm, name)
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        assert value, f"{name} is empty"
        return
    assert len((value.__doc__ or "").split()) >= 5
    # The docstrings that dataclasses and NamedTuples generate do not count.
    assert not re.match(rf"{name}\(\w+", value.__doc__)
    if inspect.isfunction(value):
        text = documented(value)
        missing = [
            argument
            for argument in inspect.signature(value).parameters
            if not re.search(rf"\b{argument}\b", text)
        ]
        assert not missing, f"{name} does not say what {', '.join(missing)} is"
        assert "Raises" in text or "Error" in text


def test_public_names_are_the_ones_that_resolve():
    need_torch = {"LayerNorm", "RMSNorm", "swap_norms", "SwappedNorms", "LayerNormLinear"}
    need_torch |= {"fp8_autocast", "Format", "DelayedScaling", "CurrentScaling", "BlockScaling"}
    need_torch |= {"MXFP8BlockScaling", "Linear", "fp8_model_init"}
    assert set(dir(cupynorm)) - set(cupynorm.__all__) == need_torch
    assert len(set(cupynorm.__all__)) == len(cupynorm.__all__)
    with pytest.raises(AttributeError, match="module 'cupynorm' has no attribute 'layernorm'"):
        _ = cupynorm.layernorm


def test_names_that_need_torch_say_what_to_install():
    for name in ("LayerNorm", "LayerNormLinear", "swap_norms", "fp8_autocast"):
        code = f"import sys; sys.modules['torch'] = None; import cupynorm; cupynorm.{name}"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.endswith(
            f"cupynorm.{name} needs torch, which is not installed: pip install torch"
        )
        assert "MissingLibraryError" in last
