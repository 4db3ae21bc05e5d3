"""Mistakes in loops that would have no visible error raise or warn, with a remedy."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import gossamer
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, Gossip, decentralize, failures
from gossamer.gossip.notices import describe
from tests.pool import ProcessPool
from tests.ranks import run_ranks
from tests.reference import loss_of, make_model, sgd, vector_of


def take_step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


# - DDP around what gossips


def train_through_wrappers() -> tuple[str, str, float]:
    """Return the errors for a wrapper made before and one made after, and the ranks' distance."""
    rank = dist.get_rank()
    before = DistributedDataParallel(make_model())
    model, optimizer = before.module, sgd(before.module)
    with gossamer.decentralize(model, optimizer, "ring") as gossip:
        with pytest.raises(UserError) as first:
            loss_of(before, rank, 0)
        with torch.no_grad():
            loss_of(before, rank, 0)  # an evaluation
        for step in range(3):  # a wrapper that is only there
            take_step(model, optimizer, rank, step)
        distance = gossip.consensus_distance()
    take_step(before, optimizer, rank, 3)  # and after the end it is the user's again
    model = make_model()
    optimizer = sgd(model)
    with gossamer.decentralize(model, optimizer, "ring"):
        after = DistributedDataParallel(nn.Sequential(model))
        take_step(after, optimizer, rank, 0)
        with pytest.raises(UserError) as second:
            take_step(after, optimizer, rank, 1)
    return str(first.value), str(second.value), distance


def test_training_through_a_ddp_wrapper_is_refused(pool: ProcessPool) -> None:
    """Raises in the first forward pass, or the second for a late wrapper; unused ones pass."""
    for before, after, distance in pool.run(train_through_wrappers):
        assert "got a forward pass through a DDP wrapper" in before
        assert "call the model itself (ddp.module) in the loop" in after
        assert distance > 0


# - Steps that are not where they seem to be


def test_a_step_inside_a_backward_pass_is_refused_under_awc() -> None:
    """One optimizer per parameter, stepped by gradient hooks: atc allows it, equal to the loop."""

    def body(group: ProcessGroup, order: str, inside: bool) -> Tensor:
        model = make_model()
        optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
        gossip = decentralize(
            model, [*optimizers.values()], "ring", process_group=group, order=order
        )
        for parameter in model.parameters() if inside else ():
            parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        try:
            for step in range(3):
                model.zero_grad()
                loss_of(model, group.rank(), step).backward()
                for optimizer in () if inside else optimizers.values():
                    optimizer.step()
        finally:
            gossip.close()
        return vector_of(model)

    with pytest.raises(AssertionError, match=r"got one inside it .*; use order='atc'"):
        run_ranks(2, lambda group: body(group, "awc", inside=True))
    hooked = run_ranks(2, lambda group: body(group, "atc", inside=True))
    looped = run_ranks(2, lambda group: body(group, "atc", inside=False))
    torch.testing.assert_close(hooked, looped, rtol=0, atol=1e-12)


def test_a_second_optimizer_that_was_not_passed_is_named() -> None:
    """The error names that optimizer, instead of parameters that changed by themselves."""

    def body(group: ProcessGroup) -> str:
        model = make_model()
        first, last = model.get_submodule("0"), model.get_submodule("2")
        passed, other = SGD(first.parameters(), lr=0.1), Adam(last.parameters(), lr=0.1)
        gossip = decentralize(model, passed, "ring", process_group=group)
        loss_of(model, group.rank(), 0).backward()
        passed.step()
        other.step()
        with pytest.raises(UserError) as caught:
            passed.step()
        gossip.close()
        return str(caught.value)

    for said in run_ranks(2, body):
        assert "got a changed 2.weight, which is in an optimizer Adam that was not" in said
        assert "decentralize(model, [first, second])" in said


@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("extra", [1, -1])
def test_one_step_more_or_less_blames_the_rank_that_took_it(order: str, extra: int) -> None:
    """Rank 1 of 4 calls optimizer.step() once more or once less: every error names rank 1."""

    def body(group: ProcessGroup) -> int | None:
        model = make_model()
        optimizer = sgd(model)
        options: dict[str, Any] = {"order": order, "timeout": timedelta(seconds=3)}
        gossip = decentralize(model, optimizer, "ring", process_group=group, **options)
        try:
            for step in range(6 + (extra if group.rank() == 1 else 0)):
                take_step(model, optimizer, group.rank(), step)
            gossip.close()
        except ExchangeError as error:
            return error.culprit
        return -1

    culprits = run_ranks(4, body)
    assert set(culprits) <= {1, -1}, culprits
    assert 1 in culprits


def test_steps_are_compared_in_every_collective_call() -> None:
    """If a rank gets ahead, as in local SGD, the next collective call raises."""

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = sgd(model)
        topology = gossamer.topology.spaced(gossamer.topology.parse("complete", 3), 8)
        gossip = decentralize(model, optimizer, topology, process_group=group, order="atc")
        for step in range(3 + (group.rank() == 2)):
            take_step(model, optimizer, group.rank(), step)
        with pytest.raises(ExchangeError) as caught:
            gossip.consensus_distance()
        return f"{caught.value.culprit} {caught.value}"

    said = run_ranks(3, body)
    assert all("got [3, 3, 4] steps on ranks 0 to 2" in words for words in said)
    assert [words[0] for words in said[:2]] == ["2", "2"]


# - States


def test_the_averaged_state_is_plain_and_exact(tmp_path: Path) -> None:
    """Means of all workers in storage of their own, buffers as in averaged(), in any format."""

    def body(group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        tied, last = nn.Linear(3, 3), nn.Linear(3, 3)
        last.weight = tied.weight
        model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), tied, last).double()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        for step in range(3):
            take_step(model, optimizer, group.rank(), step)
        before = vector_of(model)
        state = gossip.averaged_state_dict()
        assert torch.equal(before, vector_of(model))
        with gossip.averaged():
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        gossip.close()
        return state, expected, before

    results = run_ranks(3, body)
    for state, expected, _ in results:
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
        assert len(addresses) == len(state)
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.values())
    state = results[0][0]
    save_file(state, tmp_path / "a.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "a.safetensors"), state, rtol=0, atol=0)
    torch.save(state, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 2 * sum(t.nbytes for t in state.values()) + 20_000
    assert not torch.equal(results[0][2], results[1][2])  # replicas differ


def save_with_dcp(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Save the average and optimizers; return what was saved and loaded, and if states match."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with gossamer.decentralize(model, optimizer, "ring") as gossip:
        for step in range(3):
            take_step(model, optimizer, rank, step)
        average = gossip.averaged_state_dict()
        own = {f"optimizer of rank {rank}": optimizer.state_dict()}
        save({"model": average, **own}, checkpoint_id=folder)
    read = {
        "model": make_model().state_dict(),
        f"optimizer of rank {rank}": copy.deepcopy(optimizer.state_dict()),
    }
    moments = next(iter(read[f"optimizer of rank {rank}"]["state"].values()))["momentum_buffer"]
    saved = moments.clone()
    moments.zero_()
    load(read, checkpoint_id=folder)
    return average, read["model"], torch.equal(moments, saved)


@pytest.mark.filterwarnings("ignore")
def test_torchs_distributed_checkpoint_takes_the_averaged_state(
    pool: ProcessPool, tmp_path: Path
) -> None:
    """Parts written by ranks load as the one average, with each rank's optimizer state."""
    results = pool.run(save_with_dcp, str(tmp_path))
    for average, read, came_back in results:
        torch.testing.assert_close(average, results[0][0], rtol=0, atol=0)
        torch.testing.assert_close(read, average, rtol=0, atol=0)
        assert came_back


def test_a_replicas_state_is_called_that_once(caplog: pytest.LogCaptureFixture) -> None:
    """model.state_dict() outside averaged() warns once; copies do not, nor a single worker."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        gossip = decentralize(model, sgd(model), "ring", process_group=group)
        gossip.averaged_state_dict()
        with gossip.averaged():
            model.state_dict()
        copy.deepcopy(model).state_dict()
        torch.load(_saved(model), weights_only=False).state_dict()
        assert not [r for r in caplog.records if f"rank {group.rank()}'s" in r.message]
        model.state_dict()
        model.state_dict()
        gossip.close()
        assert not model._state_dict_hooks

    with caplog.at_level(logging.WARNING):
        run_ranks(1, body)
        assert not caplog.records
        run_ranks(2, body)
    said = sorted(record.message for record in caplog.records)
    assert len(said) == 2
    assert "model.state_dict() is rank 0's replica, one of 2 that differ" in said[0]
    assert "gossip.averaged_state_dict() on every rank" in said[0]


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


# - Ranks that wait


def test_a_call_made_alone_is_warned_about_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """averaged() under `if rank == 0:`: warnings with the remedy, at growing intervals."""
    monkeypatch.setattr(failures, "_WARN_S", 0.3)
    monkeypatch.setattr(failures, "_BLOCKED_S", 0.1)

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = sgd(model)
        wait: dict[str, Any] = {"timeout": timedelta(seconds=3)}
        gossip = decentralize(model, optimizer, "ring", process_group=group, **wait)
        take_step(model, optimizer, group.rank(), 0)

        def evaluate_on_rank_0() -> None:
            if group.rank() == 0:
                with gossip.averaged():
                    pass
            for step in range(1, 4):
                take_step(model, optimizer, group.rank(), step)

        with pytest.raises(ExchangeError):
            evaluate_on_rank_0()

    with caplog.at_level(logging.WARNING):
        run_ranks(2, body)
    advice = "every rank must make this call; put the `if` inside"
    alone = [r.message for r in caplog.records if "rank 0 at step 1 in averaged()" in r.message]
    others = [r.message for r in caplog.records if "rank 1 at step 2 waits for" in r.message]
    assert len(alone) >= 2
    assert all(advice in words for words in alone)
    assert any(f"; rank 0 is in averaged(); {advice}" in words for words in others)
    assert len(alone) <= 4  # 0.3, 0.6, 1.2 and 2.4 s


@pytest.mark.parametrize("name", ["gather()", "sketches()"])
def test_calls_that_gather_are_named_when_made_alone(name: str) -> None:
    """The error names the call, as it does for averaged()."""
    call: Callable[[Gossip], object] = {
        "gather()": lambda gossip: gossip.gather(1),
        "sketches()": lambda gossip: gossip.sketches(),
    }[name]

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = sgd(model)
        wait: dict[str, Any] = {"timeout": timedelta(seconds=1)}
        gossip = decentralize(model, optimizer, "ring", process_group=group, **wait)

        def call_on_rank_1() -> None:
            if group.rank() == 1:
                call(gossip)
            for step in range(4):
                take_step(model, optimizer, group.rank(), step)

        with pytest.raises(ExchangeError) as caught:
            call_on_rank_1()
        return str(caught.value)

    for said in run_ranks(3, body):
        assert f"rank 1 called {name} at step 0, and ranks 0, 2 did not" in said


class Unspeakable(Exception):
    """An exception whose repr raises."""

    def __repr__(self) -> str:
        raise ValueError("no words")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Unspeakable(), "raised Unspeakable (which cannot be printed)"),
        (ValueError("x" * 3_000_000), "xxx…"),
    ],
)
def test_an_exception_is_told_whatever_it_says(error: Exception, words: str) -> None:
    """One whose repr raises, one of 3 MB: both are reported to the others in a few words."""

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = sgd(model)
        wait: dict[str, Any] = {"timeout": timedelta(seconds=2)}
        try:
            with decentralize(model, optimizer, "ring", process_group=group, **wait):
                for step in range(4):
                    take_step(model, optimizer, group.rank(), step)
                    if group.rank() == 1 and step == 2:
                        raise error
        except ExchangeError as failure:
            return str(failure)
        except type(error):
            return ""
        return "nothing"

    said = run_ranks(2, body)
    assert said[1] == ""
    assert words in said[0]
    assert len(said[0]) < 1000
    assert len(describe(error)) <= 500


def test_closed_gossips_leave_nothing_in_the_store() -> None:
    """After five gossips one after the other, the store has no more keys than after one."""
    store = HashStore()
    counted: list[int] = []

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = sgd(model)
        with decentralize(model, optimizer, "complete", process_group=group) as gossip:
            take_step(model, optimizer, group.rank(), 0)
            gossip.gather(0)

    for _ in range(5):
        run_ranks(3, body, store=store)
        counted.append(store.num_keys())
    assert counted == [3] * 5  # how many gossips each rank has opened
