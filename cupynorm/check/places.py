"""Right values in wrong places: where each row or column comes from, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .judged import Candidate, Judged, of_line

_MOST = 2048  # rows or columns between which places are sought
_NUM_KEYS = 6
_SOME = 3  # keys that must be numbers
_AGREE = 0.7  # of the known places with a rule; its values are then compared


class Moved(NamedTuple):
    """words: what is in the wrong place. source: of each place, the place whose values it has."""

    words: str
    source: np.ndarray


def nearest(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Of each place, the place of known with the nearest keys; -1 where there are no numbers.

    keys, known: [num_keys, number of places].
    """
    far = np.zeros((keys.shape[1], known.shape[1]))
    for key, right in zip(keys, known):
        far = np.maximum(far, np.abs(key[:, None] - right[None]))
    far = np.where(np.isnan(far), np.inf, far)
    return np.where(np.isfinite(far).any(axis=1), np.argmin(far, axis=1), -1)


def moves(source: np.ndarray, name: str, what: str = "values") -> Iterator[Moved]:
    """Rules that agree with a map of places, or the map itself if there is none.

    source: of each place, the place whose values it has; -1 if unknown. name: of a place, in
    singular. what: it has of that place.
    """
    n, at = len(source), np.arange(len(source))
    known = source >= 0
    if n < 3 or not known.any() or (source == at)[known].all():
        return
    found = False
    for words, rule in _rules(source[known], at[known], n, name, what):
        if (rule == source)[known].mean() >= _AGREE:
            found = True
            yield Moved(words, rule)
    if not found:
        to = np.flatnonzero(known & (source != at))[:2]
        examples = " and ".join(f"{name} {each} those of {name} {source[each]}" for each in to)
        words = f"some {name}s have the {what} of others: {examples}"
        yield Moved(words, np.where(known, source, at))


def _rules(
    source: np.ndarray, place: np.ndarray, n: int, name: str, what: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Sentences and maps, made from the known sources of some places."""
    at = np.arange(n)
    ahead = int(np.bincount((source - place) % n).argmax())
    if ahead:
        count, where = (ahead, "after") if ahead <= n // 2 else (n - ahead, "before")
        of = f"the {name} {where} it" if count == 1 else f"the {name} {count} {where} it"
        by = "one" if count == 1 else str(count)
        words = f"each {name} has the {what} of {of}: an index is off by {by}"
        yield words, (at + ahead) % n
    yield f"all {name}s have the {what} of {name} {source[0]}", np.full(n, source[0])
    steps = (source - place)[source != place]
    if len(np.unique(steps)) == 1:
        moved = np.zeros(n, bool)
        moved[place[source != place]] = True
        which = of_line(moved, name).rpartition(" ")[0]
        where, they = "before" if steps[0] < 0 else "after", "them" if moved.sum() > 1 else "it"
        words = f"{which} {'have' if moved.sum() > 1 else 'has'} the {what} of the {name}"
        words += f"{'s' if moved.sum() > 1 else ''} {abs(steps[0])} {where} {they}"
        yield words, np.where(moved, at + steps[0], at)
    period = int(place[source < place][0] - source[source < place][0]) if steps.min() < 0 else 0
    if 1 < period < n / 2:
        words = f"the {what} of the first {period} {name}s repeat: an index is taken modulo "
        yield f"{words}{period}", at % period
    for size in {int((place - source).max()) + 1, int((source - place).max()) + 1} - {1}:
        yield f"each {size} {name}s have the {what} of the first of them", at // size * size
        last = np.minimum(at // size * size + size, n) - 1
        turned = at // size * size + last - at
        yield f"each {size} {name}s are in reverse order", turned
    if 1 in place and source[place == 1][0] > 1:
        stride = int(source[place == 1][0])
        if n % stride == 0:
            words = f"neighbouring {name}s have the {what} of {name}s that are {stride} apart"
            yield words, at % (n // stride) * stride + at // (n // stride)


def moved(judged: Judged) -> Iterator[Candidate]:
    """Whole rows or columns of right values in wrong places."""
    if judged.got.ndim != 2:
        return
    for axis, name in ((1, "column"), (0, "row")):
        extent, others = judged.got.shape[axis], judged.got.shape[1 - axis]
        if not 2 < extent <= _MOST or others < _SOME:
            continue
        got, expected = (np.moveaxis(each, axis, 1) for each in (judged.got, judged.expected))
        keys = np.flatnonzero(np.isfinite(got).mean(axis=1) > 0.5)
        if len(keys) < _SOME:
            continue
        keys = keys[np.linspace(0, len(keys) - 1, _NUM_KEYS).astype(int)]
        is_off = judged.off.mean(axis=1 - axis) > 0.5
        source = np.where(is_off, nearest(got[keys], expected[keys]), np.arange(extent))
        for words, rule in moves(source, name):
            moved, allowed = judged.expected.take(rule, axis), judged.allowed.take(rule, axis)
            yield Candidate(words, moved, allowed)
