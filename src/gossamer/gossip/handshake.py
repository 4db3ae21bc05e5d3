"""The comparison of all ranks' arguments, before anything is sent.

It goes through the store: rank 0 publishes its facts, the others publish their differences from
them, rank 0 collects these and publishes the conclusion. Each of the others reads two keys and
writes one, however many ranks there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.gossip.failures import ExchangeError
from gossamer.gossip.network import MOST_ROUNDS_CONNECTED
from gossamer.gossip.notices import NoticeBoard, describe, name_ranks
from gossamer.gossip.shards import is_sharded, local
from gossamer.topology import Schedule
from gossamer.topology.round import digest_of

_CONCLUDES_WITHIN = timedelta(seconds=4)
"""How long rank 0 may take to publish its conclusion after its last wait."""

_MOST_DIFFERENCES = 3

_ROUNDS_COMPARED = 16
"""How many rounds of a schedule without a period are compared. Of a periodic schedule, all rounds
that connections are opened for before training."""


def rounds_digest(schedule: Schedule) -> str:
    """Return a short digest of the rounds that ranks compare before training."""
    num_rounds = min(schedule.period or _ROUNDS_COMPARED, MOST_ROUNDS_CONNECTED)
    return digest_of(map(schedule.round, range(num_rounds)))[:8]


def facts_about(model: nn.Module) -> dict[str, str]:
    """Return the facts about a model that must be equal on all ranks."""
    tensors = {
        **{f"parameter {name}": parameter for name, parameter in model.named_parameters()},
        **{f"buffer {name}": buffer for name, buffer in model.named_buffers()},
    }
    facts = {name: _describe(tensor) for name, tensor in tensors.items()}
    # Equal tensors in another order would have other offsets in a bucket.
    facts["the order of tensors"] = hashlib.blake2b(str([*tensors]).encode()).hexdigest()[:8]
    return facts


def facts_about_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the facts that must be equal for one worker's optimizer state to fit another's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def describe(optimizer: Optimizer) -> str:
        groups = [
            [names.get(id(each), "?") for each in group["params"]]
            for group in optimizer.param_groups
        ]
        sizes = ", ".join(str(len(group)) for group in groups)
        digest = hashlib.blake2b(str(groups).encode()).hexdigest()[:8]
        return f"{type(optimizer).__name__} of groups of {sizes} parameters ({digest})"

    return {f"optimizer {i}": describe(optimizer) for i, optimizer in enumerate(optimizers)}


def facts_about_bits(model: nn.Module) -> dict[str, str]:
    """Return digests of the parameters, which must be equal on ranks that hold the same replica.

    Takes about a second per gigabyte of parameters.
    """
    return {
        f"the digest of {name}": hashlib.blake2b(_bytes_of(parameter)).hexdigest()[:8]
        for name, parameter in model.named_parameters()
        if not is_sharded(parameter)
    }


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def facts_about_shards(model: nn.Module) -> dict[str, str]:
    """Return the shapes of shards, which must be equal on the ranks that gossip."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    return {
        f"the shard of {name}": f"{[*local(parameter).shape]} of dim {parameter.placements[0].dim}"
        for name, parameter in parameters.items()
        if is_sharded(parameter)
    }


def _describe(tensor: Tensor) -> str:
    """Describe everything about a tensor that ranks must agree on to exchange it.

    >>> import torch
    >>> _describe(torch.zeros(2, 3))
    'float32 [2, 3]'
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f" with strides {[*tensor.stride()]}"
    trained = " (trained)" if tensor.requires_grad else ""
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{dtype} {[*tensor.shape]}{strides}{trained}{device}"


def shake_hands(board: NoticeBoard, facts: dict[str, str], remedy: str = "") -> None:
    """Raise on all ranks if facts differ between any of them. A collective call.

    Args:
        board: the ranks to compare.
        facts: what must be equal.
        remedy: what to do about a difference, appended to the error.
    """
    if board.rank == 0:
        board.store.set("facts", json.dumps(facts))
        _conclude(board, _collect_differences(board))
    else:
        shown = _read(board, "facts", "rank 0 to call decentralize()")
        _differ(board, _differences(facts, shown))
    _raise_conclusion(board, remedy)


def compare_later(board: NoticeBoard, facts: dict[str, str]) -> None:
    """Raise if a worker that joins has other arguments than the workers that started first."""
    began: dict[str, str] = _read(board, "facts", "the arguments of the first workers")
    _raise_differences(
        [
            f"{field} is {theirs} on the others and {ours} on rank {board.rank}"
            for field, (ours, theirs) in _differences(facts, began).items()
        ]
    )


@contextlib.contextmanager
def declining_on_error(*boards: NoticeBoard) -> Generator[None]:
    """Report an error of this rank to the others, so that they do not wait for it."""
    try:
        yield
    except Exception as error:
        for board in boards:
            _decline(board, f"rank {board.rank} could not start: {describe(error, str)}")
        raise


def _decline(board: NoticeBoard, reason: str) -> None:
    if board.rank == 0:
        board.store.set("facts", json.dumps({}))  # or the others would wait for them
        _conclude(board, [reason])
    else:
        _differ(board, {"": (reason, "")})


def _differ(board: NoticeBoard, differences: dict[str, tuple[str, str]]) -> None:
    """Publish how this rank's facts differ from rank 0's; an error has an empty name."""
    board.store.set(f"differs/{board.rank}", json.dumps(differences))


def _collect_differences(board: NoticeBoard) -> list[str]:
    """Return all differences, in words; a rank that does not answer in time is one."""
    ranks_by_difference: dict[tuple[str, str, str], list[int]] = {}
    reasons: list[str] = []
    # One deadline for all ranks: with a timeout for each, several missing ranks would add up, and
    # the others would give up before the conclusion.
    deadline = time.monotonic() + board.timeout.total_seconds()
    for rank in range(1, board.size):
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
        try:
            differences = _read(board, f"differs/{rank}", "", left)
        except ExchangeError:
            reasons.append(f"rank {rank} did not call decentralize() within {board.timeout}")
            continue
        for field, (theirs, ours) in differences.items():
            if field:
                ranks_by_difference.setdefault((field, theirs, ours), []).append(rank)
            else:
                reasons.append(theirs)
    for (field, theirs, ours), ranks in ranks_by_difference.items():
        reasons.append(f"{field} is {ours} on rank 0 and {theirs} on {name_ranks(ranks)}")
    return reasons


def _conclude(board: NoticeBoard, reasons: list[str]) -> None:
    board.store.set("conclusion", json.dumps(reasons))


def _raise_conclusion(board: NoticeBoard, remedy: str) -> None:
    # Rank 0 may use the full timeout to arrive and again to wait for the others, and only then
    # publishes. A shorter wait would hide its error, which names the rank that is missing.
    patience = 2 * board.timeout + _CONCLUDES_WITHIN
    _raise_differences(_read(board, "conclusion", "rank 0 to compare all ranks", patience), remedy)


def _raise_differences(reasons: list[str], remedy: str = "") -> None:
    if reasons:
        shown = reasons[:_MOST_DIFFERENCES]
        more = len(reasons) - len(shown)
        raise UserError(
            "all ranks must call decentralize() with the same model and arguments, but "
            + "; ".join(shown)
            + (f"; and {more} more" if more else "")
            + remedy
        )


def _read(board: NoticeBoard, key: str, what: str, timeout: timedelta | None = None) -> Any:
    timeout = timeout or board.timeout
    try:
        board.store.wait([key], timeout)
        return json.loads(board.store.get(key))
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {board.rank} waited for {what}, at most {timeout}, and failed: {error}; "
            "look for a rank that stopped, or allow a longer timeout"
        ) from error


def _differences(ours: dict[str, str], theirs: dict[str, str]) -> dict[str, tuple[str, str]]:
    fields = {**theirs, **ours}
    pairs = {field: (ours.get(field, "absent"), theirs.get(field, "absent")) for field in fields}
    return {field: (a, b) for field, (a, b) in pairs.items() if a != b}
