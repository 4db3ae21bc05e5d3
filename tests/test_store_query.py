"""Queries to the store with a deadline: answers, errors, silence, and what they leave behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.gossip.notices import NoticeBoard
from gossamer.gossip.store_query import query


class Group:
    """As much of a process group as a board reads."""

    def __init__(self) -> None:
        self._store = HashStore()

    def rank(self) -> int:
        """Return the only rank."""
        return 0

    def size(self) -> int:
        """Return one."""
        return 1

    def get_group_store(self) -> HashStore:
        """Return a store in this process."""
        return self._store


class Connection:
    """What a question refers to."""

    def lose(self) -> None:
        """Fail as a store does."""
        raise RuntimeError("connection lost")


def board() -> NoticeBoard:
    group: Any = Group()
    return NoticeBoard(group, timedelta(seconds=0.4))


def test_answer_and_errors_reach_the_thread_that_asked() -> None:
    """A query returns what the question returned, and raises what it raised."""
    assert query(lambda: 7).result(5) == 7
    with pytest.raises(ZeroDivisionError):
        query(lambda: 1 // 0).result(5)


def test_silent_store_is_a_default_after_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """A question that the store never answers, or with an error, gives the default."""
    answered = threading.Event()
    asked = board()
    assert asked.ask(answered.wait, otherwise=False) is False
    answered.set()
    asked.end()
    assert asked.ask(Connection().lose, otherwise=None) is None
    assert not caplog.records


def test_mistake_in_a_question_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An error that no store raises gives the default too, and is not silent."""
    assert board().ask(lambda: 1 // 0, otherwise=None) is None
    (logged,) = caplog.records
    assert logged.getMessage() == "a query to the store failed"
    assert logged.exc_info is not None
    assert logged.exc_info[0] is ZeroDivisionError


def test_end_waits_for_queries_and_keeps_no_late_error() -> None:
    """A query that came too late and then failed is waited for, and what it asked is freed."""
    gc.disable()
    try:
        connection, answered, freed = Connection(), threading.Event(), threading.Event()
        weakref.finalize(connection, freed.set)
        lost: list[bool] = []

        def lose(of: Connection) -> None:
            answered.wait(5)
            lost.append(True)
            of.lose()

        asked = board()
        assert asked.ask(partial(lose, connection), otherwise=0) == 0
        del connection
        assert not freed.is_set()
        asked.search_s = 5
        threading.Timer(0.1, answered.set).start()
        asked.end()
        assert lost
        assert freed.wait(5)
    finally:
        gc.enable()


@pytest.mark.parametrize("ask", [lambda q: board().ask(q, None), lambda q: query(q).exception(5)])
def test_failed_query_frees_what_it_asked(ask: Callable[[Any], Any]) -> None:
    """A connection closes with the last reference to it: a failed query keeps none in a cycle."""
    gc.disable()
    try:
        connection = Connection()
        freed = threading.Event()
        weakref.finalize(connection, freed.set)
        ask(connection.lose)
        del connection
        assert freed.wait(5)
    finally:
        gc.enable()
