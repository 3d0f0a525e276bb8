"""Public names: their docstrings, the examples in them, and which of them need torch."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from operator import attrgetter

import numpy as np
import pytest
from repository_files import REPOSITORY

import cupynorm
from cupynorm.gpu import on_cpu
from cupynorm.norm.checks import REMOVED_KEYWORDS

PUBLIC = [name for name in dir(cupynorm) if not name.startswith("_")]
PUBLIC += [f"{module}.{name}" for name, module in cupynorm._MOVED.items()]


def public(name: str) -> object:
    """What a public name stands for."""
    if name.partition(".")[0] not in cupynorm.__all__:
        pytest.importorskip("torch")
    return attrgetter(name)(cupynorm)


def documented(function: object, seen: frozenset[str] = frozenset()) -> str:
    """A function's docstring and those of public functions that it names."""
    text = inspect.getdoc(function) or ""
    referred = [name for name in PUBLIC if name not in seen and re.search(rf"\b{name}\b", text)]
    functions = [public(name) for name in referred if inspect.isfunction(public(name))]
    return "\n".join([text, *(documented(other, seen | set(referred)) for other in functions)])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    """Docstrings name every argument and what is raised, or name a function that does."""
    value = public(name)
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        assert value, f"{name} is empty"
        return
    assert len((value.__doc__ or "").split()) >= 5
    # The docstrings that dataclasses and NamedTuples generate do not count.
    assert not re.match(rf"{value.__name__}\(\w+", value.__doc__)
    if inspect.isfunction(value):
        text = documented(value)
        missing = [
            argument
            for argument, given in inspect.signature(value).parameters.items()
            if given.kind is not given.VAR_KEYWORD and not re.search(rf"\b{argument}\b", text)
        ]
        assert not missing, f"{name} does not say what {', '.join(missing)} is"
        assert "Raises" in text or "Error" in text


# Their examples compile kernels for the CPU.
COMPILED = {"trace", "types.Trace", "experiment", "types.Experiment", "functor", "functors"}


def docstring_of(name: str) -> str:
    """The docstring of a public name. That of a constant follows it in its module."""
    value = public(name)
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        return inspect.cleandoc(value.__doc__ or "")
    module = importlib.import_module(f"cupynorm.{cupynorm._NAMES[name]}")
    body = ast.parse(inspect.getsource(module)).body
    for node, following in zip(body, body[1:]):
        if any(getattr(target, "id", "") == name for target in getattr(node, "targets", ())):
            return inspect.cleandoc(str(following.value.value))
    return ""


def faults(text: str) -> str:
    """What the examples of a docstring print that they do not show."""
    import torch

    _, title, rest = text.partition("\n\nExamples:\n")
    names = {"cupynorm": cupynorm, "np": np, "torch": torch}
    test = doctest.DocTestParser().get_doctest(rest, names, "example", None, 0)
    if not title or not any(example.want for example in test.examples):
        return "it has no example with a result"
    if any(doctest.SKIP in example.options for example in test.examples):
        return "an example is skipped"
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    return "".join(printed)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COMPILED)) for name in PUBLIC]
)
def test_examples_of_public_names(name):
    pytest.importorskip("torch")
    if name in COMPILED:
        try:
            on_cpu.compiler()
        except on_cpu.NoCompilerError as error:
            pytest.skip(str(error))
    assert not faults(docstring_of(name)), name


def test_missing_and_wrong_examples_are_found():
    pytest.importorskip("torch")
    assert "no example" in faults("One line.") and faults("One.\n\nExamples:\n    >>> x = 1")
    assert "Expected:\n    3\nGot:\n    2" in faults("One.\n\nExamples:\n    >>> 1 + 1\n    3")
    assert not faults("One.\n\nExamples:\n    >>> 1 + 1\n    2\n\nresult: a number.")


def test_public_names_are_the_ones_that_resolve():
    need_torch = {"LayerNorm", "RMSNorm", "swap_norms", "SwappedNorms", "LayerNormLinear"}
    need_torch |= {"Linear", "layer_norm_linear", "rms_norm_linear", "recipes"}
    need_torch |= {"fp8_autocast", "fp8_checkpoint_contexts"}
    need_torch |= {"enable", "disable", "enabled"}
    assert set(dir(cupynorm)) - set(cupynorm.__all__) == need_torch
    assert len(set(cupynorm.__all__)) == len(cupynorm.__all__)
    with pytest.raises(AttributeError, match="module 'cupynorm' has no attribute 'layernorm'"):
        _ = cupynorm.layernorm


@pytest.mark.parametrize("name", cupynorm._REMOVED)
def test_removed_names_say_what_to_do_instead(name):
    assert name not in dir(cupynorm)
    with pytest.raises(AttributeError, match=rf"^cupynorm\.{name} was removed: \w.*\w$"):
        getattr(cupynorm, name)


@pytest.mark.parametrize("keyword", REMOVED_KEYWORDS)
@pytest.mark.parametrize("direction", ["", "_forward", "_backward"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_removed_keywords_say_what_to_write_instead(norm, direction, keyword):
    name = norm + direction
    with pytest.raises(TypeError, match=rf"^{name} has no {keyword} any more; expected \w.*[\w)]$"):
        getattr(cupynorm, name)(np.ones((2, 8)), 8, **{keyword: None})


@pytest.mark.parametrize("keyword", REMOVED_KEYWORDS)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_calls_of_modules_say_what_to_write_instead(name, keyword):
    torch = pytest.importorskip("torch")
    said = rf"^{name}'s call has no {keyword} any more; expected \w.*[\w)]$"
    with pytest.raises(TypeError, match=said):
        getattr(cupynorm, name)(8)(torch.ones(2, 8), **{keyword: None})
    with pytest.raises(TypeError, match=f"^{name}'s call got an unexpected keyword argument 'own'"):
        getattr(cupynorm, name)(8)(torch.ones(2, 8), own=1)


@pytest.mark.parametrize("keyword", ["load", "store"])
@pytest.mark.parametrize(
    "name, options, instead",
    [
        ("check", {}, "cupynorm.check_functor"),
        ("trace", {"num_cols": 64, "strategy": "warp"}, "fuse=func"),
    ],
)
def test_check_and_trace_say_what_replaced_load_and_store(name, options, instead, keyword):
    with pytest.raises(TypeError, match=f"^{name} has no {keyword} any more; expected {instead}"):
        getattr(cupynorm, name)(**options, **{keyword: None})


@pytest.mark.parametrize(
    "call, order",
    [
        ("layer_norm_forward(x, row, row, 1e-5)", "input, normalized_shape, weight, bias, eps"),
        ("rms_norm_forward(x, row)", "input, normalized_shape, weight, eps"),
        ("layer_norm_backward(x, x, row, row, row)", "dy, x, normalized_shape, mean, rstd, weight"),
        ("layer_norm_backward(x, x, row, row)", "dy, x, normalized_shape, mean, rstd, weight"),
        ("rms_norm_backward(x, x, row)", "dy, x, normalized_shape, rstd, weight"),
    ],
)
def test_a_call_in_the_order_of_earlier_versions_is_shown_the_order(call, order):
    sentence = (
        "normalized_shape is an ndarray; expected an int or a tuple of ints: the order is "
        f"{call.partition('(')[0]}({order})"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        eval(f"cupynorm.{call}", {"cupynorm": cupynorm, "x": np.ones((4, 4)), "row": np.ones(4)})


# Statement -> the sentence that says what to write instead.
REMOVED_VALUES = {
    "cupynorm.layer_norm_linear(ones, None, None, ones, fused='fold')": (
        "ValueError: fused is 'fold', which was removed; expected None or 'plain', which are faster"
    ),
    "cupynorm.LayerNormLinear(2, 2, fused='fold', device='cpu')": (
        "ValueError: fused is 'fold', which was removed; expected None or 'plain', which are faster"
    ),
    "cupynorm.layer_norm_linear(ones.numpy(), None, None, ones.numpy())": (
        "TypeError: input is an ndarray; expected a torch tensor. For other arrays call "
        "layer_norm, and multiply by weight.T with @"
    ),
    "cupynorm.rms_norm_linear(ones.numpy(), None, ones.numpy())": (
        "TypeError: input is an ndarray; expected a torch tensor. For other arrays call rms_norm, "
        "and multiply by weight.T with @"
    ),
}


@pytest.mark.parametrize("statement", REMOVED_VALUES)
def test_removed_values_say_what_to_write_instead(statement):
    torch = pytest.importorskip("torch")
    with pytest.raises(Exception) as raised:  # noqa: PT011
        exec(statement, {"cupynorm": cupynorm, "ones": torch.ones(2, 2)})
    assert f"{raised.type.__name__}: {raised.value}" == REMOVED_VALUES[statement]


def test_modules_load_on_first_use():
    """Docstrings and docs name functions of these modules after `import cupynorm` alone."""
    code = (
        "import cupynorm; cupynorm.reference.dropout_mask(1, 2, 0.5, 3); cupynorm.functors.rotary"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize("is_old", [pytest.param(True, marks=pytest.mark.slow), False])
def test_names_that_need_torch_say_what_to_install(is_old):
    """One process says what each call raises: with a torch that is too old, and without any."""
    names = ("layer_norm_linear", "LayerNorm", "LayerNormLinear", "swap_norms", "fp8_autocast")
    given = "import torch; torch.__version__ = '2.7.1+cpu'" if is_old else "torch = None"
    if is_old:
        pytest.importorskip("torch")
    code = f"""
import sys
{given}
sys.modules["torch"] = torch
import cupynorm
for name in {names}:
    try:
        getattr(cupynorm, name)(None, None, None, None)
    except cupynorm.MissingLibraryError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    old = "torch 2.7.1+cpu is installed; expected 2.8 or later: pip install -U torch"
    none = "cupynorm.{} needs torch, which is not installed: pip install torch"
    expected = [old if is_old else none.format(name) for name in names]
    assert done.stdout.splitlines() == expected, done.stderr
