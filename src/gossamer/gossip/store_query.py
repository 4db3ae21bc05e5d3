"""Queries to the store with a deadline.

A store whose process is stopped, or that the network no longer reaches, does not answer, and its
clients do not time out: a query that somebody waits for needs a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


def query(question: Callable[[], Answer]) -> Future[Answer]:
    """Return the future answer to a question that calls the store.

    ``result(seconds)`` of it raises what the question raised, a RuntimeError if it is the store's,
    or TimeoutError; the thread then still waits for the store.
    """
    answer: Future[Answer] = Future()
    threading.Thread(
        target=_run, args=(question, answer), name="gossamer-query", daemon=True
    ).start()
    return answer


def _run(question: Callable[[], Answer], answer: Future[Answer]) -> None:
    try:
        answer.set_result(question())
    except Exception as error:  # raised in the thread that waits for the answer
        answer.set_exception(error)
        # The error refers to this frame: a cycle would keep what the question refers to, such as a
        # connection to the store, until the garbage collector runs.
        del answer
