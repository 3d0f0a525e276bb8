"""The weight and bias by which a column of y is right, and the groups of columns of one mean."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .judged import Candidate, Judged, best_of, explains, rest_of
from .mistakes import Rows
from .places import moves, nearest

_FEWEST_ROWS = 6
_MOST_COLS = 2048
_FEWEST_IN_GROUP = 4


def of_columns(rows: Rows, judged: Judged, counted: np.ndarray) -> str:
    """Which weight and bias each column was given, or "" if none explains the numbers."""
    plain = counted.all(axis=1) & np.isfinite(judged.got).all(axis=1) if counted.ndim == 2 else []
    if judged.tensor != "y" or rows.problem.weight is None or np.sum(plain) < _FEWEST_ROWS:
        return ""
    x_hat, got = rows.x_hat[plain], judged.got[plain]
    centered = x_hat - x_hat.mean(axis=0)
    weight = (centered * got).sum(axis=0) / (centered**2).sum(axis=0)
    bias = got.mean(axis=0) - weight * x_hat.mean(axis=0)
    if not explains(judged, rows.x_hat * weight + bias, counted, 2.0):
        return ""
    known = best_of(judged, _moved(rows, judged, weight, bias), counted)
    if known:
        return known
    of_weight, of_bias = rows.x_hat * weight + rows.bias, rows.x_hat * rows.w + bias
    for values, words in ((of_weight, "weight"), (of_bias, "bias")):
        if explains(judged, values, counted):
            return f"each column is right for another {words}: is its index the column?"
    return "each column is right for another weight and bias: are their indices the column?"


def _moved(rows: Rows, judged: Judged, weight: np.ndarray, bias: np.ndarray) -> Iterator[Candidate]:
    if rows.n > _MOST_COLS:
        return
    keys = {"weight": (weight, rows.w)}
    if rows.problem.bias is not None:
        keys |= {"bias": (bias, rows.bias)}
    for names in ({"weight"}, {"bias"}, {"weight", "bias"}):
        if not names <= set(keys):
            continue
        each = [keys[name] for name in sorted(names)]
        nearest_columns = nearest(
            np.stack([got for got, _ in each]), np.stack([own for _, own in each])
        )
        for words, source in moves(
            nearest_columns, "column", " and ".join(sorted(names, reverse=True))
        ):
            w = rows.w[source] if "weight" in names else rows.w
            b = rows.bias[source] if "bias" in names else rows.bias
            yield Candidate(words, rows.x_hat * w + b)


def of_groups(rows: Rows, judged: Judged, counted: np.ndarray) -> str:
    """Whether groups of columns have a mean and rstd each, or ""."""
    if judged.tensor != "y":
        return ""
    use = np.abs(rows.w) > 0.1
    z = np.where(use, (judged.got - rows.bias) / np.where(use, rows.w, 1), 0)
    tried = [(np.zeros(rows.n, int), ""), *_groups(rows.n)]
    for group, sentence in sorted(tried, key=lambda each: each[0].max()):
        if np.bincount(group[use]).min() < _FEWEST_IN_GROUP:
            continue
        fitted = np.zeros_like(z)
        for at in range(group.max() + 1):
            own, here = group == at, (group == at) & use
            x_hat = rows.x_hat[:, here]
            middle = x_hat.mean(axis=1, keepdims=True)
            lever = x_hat - middle
            factor = (lever * z[:, here]).sum(axis=1, keepdims=True)
            factor /= (lever**2).sum(axis=1, keepdims=True)
            fitted[:, own] = z[:, here].mean(axis=1, keepdims=True)
            fitted[:, own] += factor * (rows.x_hat[:, own] - middle)
        values = fitted * rows.w + rows.bias
        if not sentence and (rest_of(judged, values)[counted] <= 1).mean() > 0.8:
            return ""  # most rows have one mean and rstd
        if sentence and explains(judged, values, counted):
            return sentence
    return ""


def _groups(n: int) -> Iterator[tuple[np.ndarray, str]]:
    """Groups of columns: the number of each column's group, and the sentence."""
    at = np.arange(n)
    for size in 2 ** np.arange(3, 16):
        if size < n:
            words = f"each {size} columns have a mean and rstd of their own: "
            yield at // size, words + "sums of threads or warps are not added up"
    for pack, what in (
        (1, "columns"),
        (2, "pairs of columns"),
        (4, "packs of 4"),
        (8, "packs of 8"),
    ):
        for count in (2, 4, 8, 16, 32):
            if pack * count < n:
                words = f"{count} neighbouring {what} differ in mean and rstd: "
                yield at // pack % count, words + "a step of the sum over lanes is missing"
