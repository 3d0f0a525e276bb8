"""compile_passes: puts the graph passes into torch.compile, and takes them out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .report import Change, Report

REPLACE = ("faster", "all", "none")
_OLDEST = (2, 11)


class CompilePasses:
    """What compile_passes installed, and what it did. Prints as a table.

    Examples:
        >>> with cupynorm.compile_passes() as passes:
        ...     passes
        0 graphs: 0 replaced, 0 fused, 0 kept, 0 left

    changes: one for each norm of each compiled graph, with what was done and why; one for each
    operator that reads or writes another dtype. undo() takes the passes out; so does the end of a
    with statement.
    """

    def __init__(self, report: Report, undo: Callable[[], None]) -> None:
        self._report = report
        self._undo: Callable[[], None] | None = undo

    @property
    def changes(self) -> list[Change]:
        return self._report.changes

    def undo(self) -> None:
        """Takes the passes out of torch.compile. What is compiled already stays as it is.

        Raises RuntimeError if inductor's passes were set again since; undo that first.
        """
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __enter__(self) -> CompilePasses:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        return self._report.as_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._report.as_html()


def compile_passes(*, replace: str = "faster") -> CompilePasses:
    """Makes torch.compile fuse the operations around a norm into cupynorm's kernels.

    Examples:
        >>> with cupynorm.compile_passes(replace="all") as passes:
        ...     model = torch.compile(torch.nn.LayerNorm(8))  # compiled by its first call
        >>> passes.changes
        []

    Additions of a residual, autocast's casts, dropout, scales and gates beside a norm become
    options of its operator, forward and backward. This changes cupynorm's own norms, and those of
    torch that are replaced. Only code that is compiled after this call changes. A second call
    replaces the first.

    replace: which norms of torch become cupynorm's, torch.nn.functional's and those written in
        torch operations. "faster": those that docs/torch_compile.md says are faster. "all": all
        that are found, also on the CPU. "none": none.

    Returns a CompilePasses: prints what was replaced, and why a norm was left.
    Raises ValueError for another replace, RuntimeError for a torch before 2.11.
    """
    if replace not in REPLACE:
        raise ValueError(f"replace is {replace!r}; expected one of {', '.join(REPLACE)}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        raise RuntimeError(f"torch is {torch.__version__}; expected 2.11 or later")
    from .inductor import install  # imports torch's compiler

    report = Report()
    return CompilePasses(report, install(replace, report))
