"""A daemon thread that runs tasks in the order of their submission.

Threads of an executor are not daemons: a rank that fails would have to wait for its receives to
time out before it could exit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, final

_Tasks: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"
_Result = TypeVar("_Result")


@final
class Collector:
    """One thread, started when first needed."""

    def __init__(self) -> None:
        self._tasks: _Tasks = SimpleQueue()
        self._last: Future[Any] | None = None

    def submit(self, task: Callable[[], _Result]) -> Future[_Result]:
        """Queue a task; its future holds its result or exception."""
        if self._last is None:
            run = partial(_run_tasks, self._tasks)
            threading.Thread(target=run, name="gossamer-collector", daemon=True).start()
        self._last = future = Future[_Result]()
        self._tasks.put((task, future))
        return future

    def wait_idle(self, seconds: float) -> bool:
        """Wait until all tasks are done; return whether they are before the timeout."""
        return self._last is None or bool(futures.wait([self._last], seconds).done)

    def end(self) -> None:
        """End the thread when all tasks are done."""
        self._tasks.put(None)

    def __del__(self) -> None:
        self.end()


def _run_tasks(tasks: _Tasks) -> None:
    # The thread must refer to nothing but the queue while it waits, neither to the collector nor
    # to the last task: an unused transport could not be garbage-collected, nor its thread end.
    while (item := tasks.get()) is not None:
        task, future = item
        try:
            future.set_result(task())
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)
        del item, task, future
