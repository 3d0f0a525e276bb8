"""What modules import and take from others, and how long an import takes."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from repository_files import MODULES, PACKAGE, REPOSITORY

# Imported modules and import time.


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
made = cupynorm.layer_norm_forward(x, x.shape[-1])
cupynorm.layer_norm_backward(x, x, x.shape[-1], made.mean, made.rstd)
""")
    assert {"cupynorm", "numpy"} <= brought
    assert brought.isdisjoint(HEAVY)


@pytest.mark.slow
def test_import_takes_less_than_50_milliseconds_beyond_numpy(tmp_path):
    """Time of the processor, and the best of several processes, because other work on the machine
    only adds time. All of them share compiled modules, which an installation brings."""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}

    def best(statements: str, before: str = "") -> float:
        script = f"import time\n{before}\nstart = time.process_time()\n{statements}\n"
        script += "print(time.process_time() - start)"
        return min(float(python(script, **compiled)) for _ in range(7))

    assert best("sum(range(10**7))") > 0.050  # what takes longer is seen
    assert best("import cupynorm", "import numpy") < 0.050
    names = best("for name in cupynorm.__all__: getattr(cupynorm, name)", "import numpy, cupynorm")
    # All modules together may take twice as long as NumPy on the same machine.
    assert names < 2 * max(0.050, best("import numpy"))


# Imports between folders.

# From the bottom up: a module imports from its own folder or from those before it.
WINGS = (
    "dtypes",
    "command_line",
    "table",
    "plan",
    "gpu",
    "norm",
    "functors",
    "nn",
    "linear",
    "parallel",
    "functional",
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
    return re.split(r"[/.]", name)[0]


@cache
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


def test_arrows_go_one_way():
    for name in MODULES:
        own = wing_of(name)
        if name == "__init__":
            continue
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


def test_modules_that_may_import_torch_and_cupy():
    of_all = [(name, *found) for name in MODULES for found in imports(MODULES[name])]
    for name, imported, at_module_level in of_all:
        library = imported.partition(".")[0]
        if library == "torch":
            in_torch = wing_of(name) in {*TORCH, "bench"}
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


def test_underscore_names_stay_in_their_module():
    borrowed = {name: borrowed_underscores(path.read_text()) for name, path in MODULES.items()}
    assert not {name: names for name, names in borrowed.items() if names}
