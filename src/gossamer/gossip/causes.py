"""Why an exchange failed, and which rank stopped first.

Note [Finding the cause]
In Gloo a wait that times out breaks its connection, so one failure causes many others, and the peer
that an error names may be healthy. Each rank therefore posts a notice when it fails, when it ends,
and when it has been blocked for a while. A notice names the ranks that its author waits for. The
search starts at a rank's own notice and follows these names until a rank without a notice, which
is gone or stalled, or until a notice that is a cause itself: an exception, an end, a collective
call that not all ranks made, or another round at the same step.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import NamedTuple

from gossamer.gossip.notices import Notice, NoticeBoard, name_ranks


class Cause(NamedTuple):
    """The first failure."""

    reason: str
    culprit: int | None
    """The rank that failed, if known."""


COLLECTIVE_ADVICE = "every rank must make this call; put the `if` inside"
"""For a collective call on some ranks only, as under `if rank == 0:`."""

_NO_ANSWER = Cause(
    "the cause is not known, because the store does not answer: the process that holds it, often "
    "rank 0, is gone or stalled",
    None,
)


_UNFINISHED = Cause("the cause is not known, because the rank that searched for it is gone", None)

_FEW = 16
"""Up to so many ranks, each searches for the cause by itself. With more, one searches and the
others use its result: n ranks that read n notices each would overload the store."""


def find_cause(board: NoticeBoard, own: Notice, *, lost: bool) -> Cause:
    """Post this rank's notice, and search from it; see Note [Finding the cause].

    Args:
        board: holds the notices.
        own: this rank's notice.
        lost: whether a connection closed, rather than a wait timed out. The peer has then ended,
            and a notice that it posted while blocked does not explain it.
    """

    def search() -> Cause:
        board.post(own)
        if board.size <= _FEW:
            return _search(board, own, lost=lost)
        if board.store.add("searches", 1) > 1:
            return _await_conclusion(board)
        cause = _search(board, own, lost=lost)
        board.store.set("cause", json.dumps(cause))
        return cause

    return board.ask(search, _NO_ANSWER)


def _await_conclusion(board: NoticeBoard) -> Cause:
    """Return the cause that the first rank to fail has found: later failures follow from it."""
    try:
        board.store.wait(["cause"], timedelta(seconds=1.2 * board.search_s))
    except RuntimeError:
        return _UNFINISHED
    return Cause(*json.loads(board.store.get("cause")))


def _search(board: NoticeBoard, own: Notice, *, lost: bool) -> Cause:
    deadline = time.monotonic() + board.search_s
    seen = [own]
    while time.monotonic() < deadline:
        notice = seen[-1]
        if notice.ended and own.step > notice.step:
            return _explain_end(board, own, notice)
        if not notice.peers:
            return _end_of(notice)
        if notice.call:
            return _explain_call(board, notice)
        peer, found = _next_notice(board, notice, final=lost and notice is own)
        if found is None:
            first = board.first_failure()
            if first is not None and not first.peers:  # the peer may not have posted yet
                return _end_of(first)
            saw_it_end = lost and len(seen) == 1
            return Cause(f"rank {peer} is {'gone' if saw_it_end else 'gone or stalled'}", peer)
        if found.mixes_otherwise(notice):
            ranks = name_ranks([notice.rank, peer])
            return Cause(f"{ranks} mix with different rounds at step {notice.step}", peer)
        if found in seen:
            return Cause(f"{name_ranks([n.rank for n in seen])} wait for each other", None)
        seen.append(found)
    return Cause(f"rank {seen[-1].rank} has stopped, and the search for why timed out", None)


def _explain_call(board: NoticeBoard, notice: Notice) -> Cause:
    """Return the cause of a failed collective call: a rank did not make it, or is gone."""
    absent = [rank for rank in notice.peers if board.call_of(rank) != notice.numbered_call]
    for rank in absent or notice.peers:
        found = board.notice_of(rank)
        if found is not None and not found.peers:
            return _end_of(found)
    if absent:
        at = {rank: found.step for rank in absent if (found := board.notice_of(rank))}
        ahead = [rank for rank, step in at.items() if step > notice.step]
        took = f", {name_ranks(ahead)} took an optimizer.step() more" if ahead else ""
        return Cause(
            f"rank {notice.rank} called {notice.call} at step {notice.step}, and "
            f"{name_ranks(absent)} did not, or went away{took}; {COLLECTIVE_ADVICE}",
            absent[0] if len(absent) == 1 else notice.rank,
        )
    return Cause(f"one of {name_ranks(notice.peers)} went away in {notice.call}", None)


def _explain_end(board: NoticeBoard, own: Notice, notice: Notice) -> Cause:
    """Return the cause where a peer ended first: it took too few steps, or this rank too many."""
    deadline = time.monotonic() + board.search_s / 2
    pause = 0.02
    others = [rank for rank in range(board.size) if rank != own.rank]
    while True:
        found = [board.notice_of(rank) for rank in others]
        if all(found) or time.monotonic() >= deadline:
            break
        time.sleep(pause)
        pause *= 1.5
    ended = [n.rank for n in found if n is not None and n.ended and n.step == notice.step]
    if 2 * len(ended) < board.size:
        return _end_of(notice)
    return Cause(
        f"rank {own.rank} goes on to step {own.step}, and {name_ranks(ended)} ended their gossip "
        f"at step {notice.step}; every rank must call optimizer.step() as often, or use join()",
        own.rank if len(ended) > 1 else None,
    )


def _next_notice(board: NoticeBoard, notice: Notice, *, final: bool) -> tuple[int, Notice | None]:
    """Return the peer to follow, and its notice.

    In this order: one that ended, one that mixes with another round, one without a notice, another.
    """
    began = time.monotonic()
    pause = 0.02
    while True:
        found = {peer: board.notice_of(peer) for peer in notice.peers}
        ended = [p for p, n in found.items() if n and not n.peers]
        differing = [p for p, n in found.items() if n and n.mixes_otherwise(notice)]
        absent = [p for p, n in found.items() if n is None]
        blocked = [p for p, n in found.items() if n and final and not n.final]
        explained = ended or differing
        # One peer without a notice is probably the lost one. Of several, most have not been blocked
        # long enough to post: give up too early, and a healthy rank is blamed.
        patience = board.search_s * (0.5 if len(absent) < 2 else 0.9)
        if explained or not (absent or blocked) or time.monotonic() - began >= patience:
            peer = (explained or absent or blocked or [*found])[0]
            return peer, found[peer] if explained or peer not in blocked else None
        time.sleep(pause)
        pause *= 1.5  # many ranks may search at once


def _end_of(notice: Notice) -> Cause:
    return Cause(f"rank {notice.rank} {notice.what} at step {notice.step}", notice.rank)
