"""The passes as inductor takes them, with keys for its cache of compiled code on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._inductor.config as config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.fx import Graph

from . import after_autograd, before_autograd
from .report import Report

_PLACES = {
    "pre_grad_custom_pass": before_autograd.rewrite,
    "joint_custom_post_pass": after_autograd.rewrite,
}


def _call_directly() -> None:
    """Makes inductor call the operators without torch's dispatcher, where its classes allow that.

    They are imported here, where inductor runs and has imported them.
    """
    with contextlib.suppress(ImportError, AttributeError):  # of another version of inductor
        from . import direct_calls

        direct_calls.register()


class _Pass(CustomGraphPass):
    """One of the passes, as inductor takes it."""

    def __init__(
        self, rewrite: Callable[[Graph, str, Report], None], replace: str, report: Report
    ) -> None:
        self._rewrite, self._replace, self._report = rewrite, replace, report

    def __call__(self, graph: Graph) -> None:
        # A program that loads an AOTInductor package need not have Python's operators.
        if not V.aot_compilation:
            _call_directly()
            self._rewrite(graph, self._replace, self._report)

    def uuid(self) -> Any:
        """For the key of inductor's cache on disk: the text of the passes, and their options."""
        files = tuple(sorted(str(path) for path in Path(__file__).parent.glob("*.py")))
        return get_hash_for_files(files).hex(), self._rewrite.__module__, self._replace

    def __reduce__(self) -> tuple[Any, ...]:
        """Some versions of torch put the pickled pass into the key."""
        return tuple, (self.uuid(),)


class _Chain(CustomGraphPass):
    """Passes of others, and one of these after them."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        """None, which means that nothing is cached, if one of the others has none."""
        found = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return None if None in found else tuple(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.uuid() or (),)


def install(replace: str, report: Report) -> Callable[[], None]:
    """Adds the passes to those of others, and returns a function that takes them out.

    That function raises RuntimeError if others were set since.
    """
    before = {place: getattr(config, place) for place in _PLACES}
    for place, rewrite in _PLACES.items():
        others = before[place] if isinstance(before[place], (list, tuple)) else [before[place]]
        passes = (*_without_ours(others), _Pass(rewrite, replace, report))
        setattr(config, place, passes[0] if len(passes) == 1 else _Chain(passes))
    now = {place: getattr(config, place) for place in _PLACES}

    def undo() -> None:
        for place, each in now.items():
            if getattr(config, place) is not each:
                raise RuntimeError(
                    f"torch._inductor.config.{place} was set again after compile_passes; "
                    "expected that to be undone first"
                )
        for place in now:
            setattr(config, place, before[place])

    return undo


def _without_ours(passes: Any) -> list[Any]:
    """Passes of others: a second compile_passes takes the place of the first."""
    found: list[Any] = []
    for each in passes:
        if isinstance(each, _Chain):
            found += _without_ours(each.passes)
        elif each is not None and not isinstance(each, _Pass):
            found.append(each)
    return found
