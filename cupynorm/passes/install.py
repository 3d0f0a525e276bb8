"""compile_passes: puts the graph passes into torch.compile, and takes them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch._inductor.config as config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.fx import Graph

from . import after_autograd, before_autograd
from .report import Report
from .rule import REPLACE

_PLACES = {
    "pre_grad_custom_pass": before_autograd.rewrite,
    "joint_custom_post_pass": after_autograd.rewrite,
}


class _Pass(CustomGraphPass):
    """One of the passes, as inductor takes it."""

    def __init__(
        self, rewrite: Callable[[Graph, str, Report], None], replace: str, report: Report
    ) -> None:
        self._rewrite, self._replace, self._report = rewrite, replace, report

    def __call__(self, graph: Graph) -> None:
        # A program that loads an AOTInductor package need not have Python's operators.
        if not V.aot_compilation:
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


class CompilePasses:
    """What compile_passes installed, and what it did. Prints as a table.

    Examples:
        >>> with cupynorm.compile_passes() as passes:
        ...     passes
        0 graphs: 0 replaced, 0 fused, 0 kept, 0 left

    changes: one for each norm of each compiled graph, with what was done and why. undo() takes the
    passes out; so does the end of a with statement.
    """

    def __init__(self, replace: str) -> None:
        self._report = Report()
        self._before = {place: getattr(config, place) for place in _PLACES}
        for place, rewrite in _PLACES.items():
            before = self._before[place]
            others = before if isinstance(before, (list, tuple)) else [before]
            own = _Pass(rewrite, replace, self._report)
            passes = (*_without_ours(others), own)
            setattr(config, place, own if len(passes) == 1 else _Chain(passes))
        self._now = {place: getattr(config, place) for place in _PLACES}

    @property
    def changes(self) -> list[Any]:
        return self._report.changes

    def undo(self) -> None:
        """Restores inductor's passes as they were. Code that is compiled already stays.

        Raises RuntimeError if others were set since; undo those first.
        """
        for place, now in self._now.items():
            if getattr(config, place) is not now:
                raise RuntimeError(
                    f"torch._inductor.config.{place} was set again after compile_passes; "
                    "expected that to be undone first"
                )
        for place, before in self._before.items():
            setattr(config, place, before)
        self._now = {}

    def __enter__(self) -> CompilePasses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        return self._report.as_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._report.as_html()


def _without_ours(passes: Any) -> list[Any]:
    """Passes of others: a second compile_passes takes the place of the first."""
    found: list[Any] = []
    for each in passes:
        if isinstance(each, _Chain):
            found += _without_ours(each.passes)
        elif each is not None and not isinstance(each, _Pass):
            found.append(each)
    return found


def compile_passes(*, replace: str = "faster") -> CompilePasses:
    """Makes torch.compile fuse norms with what is around them.

    Examples:
        >>> with cupynorm.compile_passes(replace="all") as passes:
        ...     model = torch.compile(torch.nn.LayerNorm(8))  # compiled by its first call
        >>> passes.changes
        []

    replace: which norms of torch become cupynorm's. "faster": those that are measured to be faster,
        as docs/torch_compile.md says. "all": all. "none": none; only cupynorm's own are fused.

    Raises ValueError for another replace.
    """
    if replace not in REPLACE:
        raise ValueError(f"replace is {replace!r}; expected one of {', '.join(REPLACE)}")
    return CompilePasses(replace)
