"""What the graph passes did: a record that prints as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ..table import as_html, as_text


class Change(NamedTuple):
    """One norm of one graph.

    done: "replaced" by cupynorm's operator; "fused", an operator that was there and takes in what
    is around it; "kept", one that was there; "cast", one that reads or writes another dtype now;
    or "left" to torch. remark: what was taken in, or why it was left.
    """

    graph: int
    name: str
    norm: str
    done: str
    remark: str


@dataclass
class Report:
    """All changes, in the order of compilation."""

    changes: list[Change] = field(default_factory=list)
    num_graphs: int = 0

    def next_graph(self) -> int:
        self.num_graphs += 1
        return self.num_graphs

    def rows(self) -> list[tuple[str, ...]]:
        """Equal changes of one graph, which only operators without a name have, are one row."""
        lines = [("graph", "name", "norm", "done", "")]
        for each, times in Counter(self.changes).items():
            remark = f"{each.remark} ({times} times)" if times > 1 else each.remark
            lines.append((str(each.graph), *each[1:4], remark))
        return lines

    def summary(self) -> str:
        done = [change.done for change in self.changes]
        counts = (f"{done.count(each)} {each}" for each in ("replaced", "fused", "kept", "left"))
        graphs = "1 graph" if self.num_graphs == 1 else f"{self.num_graphs} graphs"
        return f"{graphs}: {', '.join(counts)}"

    def as_text(self) -> str:
        return f"{as_text(self.rows())}\n{self.summary()}" if self.changes else self.summary()

    def as_html(self) -> str:
        return f"{as_html(self.rows())}{self.summary()}"
