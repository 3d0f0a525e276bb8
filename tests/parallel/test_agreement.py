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


def exchange_all(store: Any, number: int, calls: dict[int, dict]) -> list[Any]:
    """What each of these ranks gets or raises."""

    def exchange(rank: int) -> Any:
        time.sleep(0.02 * rank)
        try:
            return agreement.exchange(store, number, rank, SIZE, calls[rank])
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(exchange, calls))


def alike(**call: object) -> dict[int, dict]:
    return {rank: {"shape": (3, 4), **call} for rank in range(SIZE)}


def test_calls_of_all_ranks_are_compared(store):
    """The store keeps those of the last exchange alone."""
    for number in range(5):
        calls = alike(number=number)
        calls[3]["shape"] = (3, 4) if number < 4 else (5, 4)
        for found in exchange_all(store, number, calls):
            assert [each["number"] for each in found] == [str(number)] * SIZE
            if number < 4:
                agreement.check_same(found)
                continue
            with pytest.raises(ValueError, match=r"^shape is \(5, 4\) on rank 3 of tp_group and "):
                agreement.check_same(found)
        assert store.num_keys() == SIZE


@pytest.mark.parametrize("absent", ((1, 3), (4,)))
def test_ranks_that_do_not_come(store, absent):
    """They are named, and the others take back what they brought."""
    some = {rank: call for rank, call in alike().items() if rank not in absent}
    started, names = time.monotonic(), ", ".join(map(str, absent))
    for error in exchange_all(store, 0, some):
        with pytest.raises(RuntimeError, match=f"rank {names} has none; expected the same"):
            raise error
    assert time.monotonic() - started < 10 * SECONDS
    calls = exchange_all(store, 0, alike(number=2))
    assert calls == [[{"shape": "(3, 4)", "number": "2"}] * SIZE] * SIZE


@pytest.mark.slow
def test_ranks_that_make_different_calls(tmp_path, monkeypatch):
    disagreeing_ranks = pytest.importorskip("disagreeing_ranks")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    reports = start_ranks.start(disagreeing_ranks.__file__, 2, tmp_path)
    assert reports == [dict.fromkeys(disagreeing_ranks.CHECKS, "passed")] * 2
