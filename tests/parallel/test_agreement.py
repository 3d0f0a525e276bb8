"""Ranks that compare their calls: threads that share a store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)
import start_ranks  # noqa: E402

from cupynorm.parallel import agreement  # noqa: E402

SIZE = 5
SECONDS = 0.4


@pytest.fixture
def store() -> Any:
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=SECONDS))
    return store


def compare_all(store: Any, calls: dict[int, dict], pause: float = 0.0) -> list[Any]:
    """What each of these ranks gets or raises. pause: before each but the first."""

    def compare(rank: int) -> Any:
        time.sleep(pause * (rank != min(calls)))
        try:
            return agreement.compare(store, rank, SIZE, calls[rank])
        except (ValueError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(compare, calls))


def alike(**call: object) -> dict[int, dict]:
    return {rank: {"shape": (3, 4), **call} for rank in range(SIZE)}


def test_calls_alike(store):
    for number in range(20):
        assert compare_all(store, alike(number=number)) == [number] * SIZE
    assert store.num_keys() == 1


def test_calls_that_differ(store):
    calls = alike()
    calls[3]["shape"] = (5, 4)
    for _ in range(3):
        for error in compare_all(store, calls):
            with pytest.raises(ValueError, match=r"^shape is \(5, 4\) on rank 3 of tp_group and "):
                raise error
    number, *_ = compare_all(store, alike())
    assert number == 6, "each difference takes two meetings"


def test_ranks_that_do_not_come(store):
    """They are named, and the others take back what they brought."""
    calls = alike()
    for absent in ((1, 3), (4,), (1, 3)):
        some = {rank: call for rank, call in calls.items() if rank not in absent}
        started = time.monotonic()
        for error in compare_all(store, some):
            names = ", ".join(map(str, absent))
            with pytest.raises(RuntimeError, match=f"and rank {names} has none; expected the same"):
                raise error
        assert time.monotonic() - started < 10 * SECONDS
    assert compare_all(store, calls) == [0] * SIZE


@pytest.mark.parametrize("pause", [SECONDS * part for part in (0.9, 0.99, 1, 1.01, 1.1)])
def test_a_meeting_is_for_all_ranks_or_for_none(store, pause):
    """Four come when the time of the first ends. Those that wait in vain compare as before."""
    found = compare_all(store, alike(), pause)
    kinds = {type(each) for each in found}
    assert kinds in ({int}, {RuntimeError}), found
    assert len({str(each) for each in compare_all(store, alike())}) == 1


def test_nothing_that_ranks_send_is_code(store):
    """The state is JSON: what is no JSON is refused."""
    store.set("cupynorm", b"\x80\x04cposix\nsystem\n.")
    with pytest.raises(ValueError):
        agreement.compare(store, 0, SIZE, {})


@pytest.mark.slow
def test_ranks_that_make_different_calls(tmp_path, monkeypatch):
    disagreeing_ranks = pytest.importorskip("disagreeing_ranks")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    reports = start_ranks.start(disagreeing_ranks.__file__, 2, tmp_path)
    assert reports == [dict.fromkeys(disagreeing_ranks.CHECKS, "passed")] * 2
