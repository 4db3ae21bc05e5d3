"""Common training loops; ranks are threads, and processes for torch's own wrappers."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import gossamer
from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, Gossip, GradScaler, decentralize
from gossamer.topology import Schedule, parse
from tests.pool import ProcessPool
from tests.ranks import run_ranks
from tests.reference import ORDERS, loss_of, make_model, mix_, sgd, vector_of

Update = Callable[[int, nn.Module, Any, int], None]
"""What one worker does in a step: of the worker, its model, its optimizer and the step."""


def gradients(model: nn.Module, worker: int, step: int) -> None:
    model.zero_grad()
    loss_of(model, worker, step).backward()


def expected(
    schedule: Schedule, order: str, make: Callable[[nn.Module], Any], update: Update, steps: int
) -> list[Tensor]:
    """Train by the reference: a step of all workers is gradients, mixing and updates."""
    models = [make_model() for _ in range(schedule.num_workers)]
    optimizers = [make(model) for model in models]
    for step in range(steps):
        mixed = [copy.deepcopy(model) for model in models]
        weights = torch.from_numpy(schedule.round(step).matrix().toarray())
        if order == "awc":
            mix_(mixed, weights)
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            # Gradients at the unmixed parameters, the update on the mixed ones.
            with torch.no_grad():
                unmixed = [p.clone() for p in model.parameters()]
            update(worker, model, _Deferred(optimizer, model, mixed[worker], unmixed), step)
        if order == "atc":
            mix_(models, weights)
    return [vector_of(model) for model in models]


class _Deferred:
    """An optimizer whose first step of a training step moves the model to the mixed parameters."""

    def __init__(
        self, optimizer: Any, model: nn.Module, mixed: nn.Module, unmixed: list[Tensor]
    ) -> None:
        self._optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self._model, self._mixed, self._unmixed = model, mixed, unmixed

    @torch.no_grad()
    def mix(self) -> None:
        """Add the change by mixing, so that edits of this step stay."""
        pairs = zip(self._model.parameters(), self._mixed.parameters(), self._unmixed, strict=True)
        for p, mixed, unmixed in pairs:
            p.add_(mixed - unmixed)

    def step(self) -> None:
        self.mix()
        for optimizer in self._optimizers:
            optimizer.step()


def gossiped(
    num_ranks: int, order: str, make: Callable[[nn.Module], Any], loop: Callable[..., None]
) -> list[Tensor]:
    """Run ``loop(rank, model, optimizer, gossip)`` on thread ranks on a ring."""

    def body(group: ProcessGroup) -> Tensor:
        model = make_model()
        optimizer = make(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group, order=order)
        loop(group.rank(), model, optimizer, gossip)
        gossip.close()
        return vector_of(model)

    return run_ranks(num_ranks, body)


def assert_same(results: Sequence[Tensor], references: Sequence[Tensor]) -> None:
    for result, reference in zip(results, references, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-12)


# - Several optimizers


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    first, _, last = model.children()
    return [SGD(first.parameters(), lr=0.05, momentum=0.9), AdamW(last.parameters(), lr=0.01)]


@pytest.mark.parametrize("order", ORDERS)
def test_several_optimizers_form_one_step(order: str) -> None:
    """SGD on one layer and AdamW on another, one after the other, mix once per step."""

    def loop(rank: int, model: nn.Module, optimizers: list[Optimizer], gossip: Gossip) -> None:
        for step in range(6):
            gradients(model, rank, step)
            for optimizer in optimizers:
                optimizer.step()
        assert gossip.num_steps == 6

    def update(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        gradients(model, worker, step)
        optimizer.step()

    results = gossiped(3, order, two_optimizers, loop)
    assert_same(results, expected(parse("ring", 3), order, two_optimizers, update, 6))


def test_optimizers_that_train_in_turns_are_refused() -> None:
    """A second step of one optimizer before the other's, or a closure for the second, raises."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        first, second = two_optimizers(model)
        gossip = decentralize(model, [first, second], process_group=group)
        gradients(model, 0, 0)
        first.step()
        with pytest.raises(UserError, match="each of the 2 optimizers must take one step"):
            first.step()
        with pytest.raises(UserError, match="got a closure for a later one"):
            second.step(lambda: 0.0)
        second.step()
        gossip.close()
        twice = [sgd(model), sgd(model)]
        with pytest.raises(UserError, match="each parameter must be in one optimizer, got 4 in"):
            decentralize(model, twice, process_group=group)

    run_ranks(1, body)


# - Mixed precision


@pytest.mark.parametrize("fused", [False, True])
def test_an_infinity_on_one_rank_skips_the_step_on_all(fused: bool) -> None:
    """No rank waits for one that skipped, all scales stay equal, and training continues."""

    def body(group: ProcessGroup) -> tuple[Tensor, float, int]:
        model = make_model().float()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        scaler = GradScaler(gossip, init_scale=2.0**10)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 5)).square().mean()
            if step == 2 and group.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            before = vector_of(model)
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                # A fused optimizer takes the step without an update; mixing equal workers is
                # the identity to rounding.
                torch.testing.assert_close(vector_of(model), before)
        scale, steps = scaler.get_scale(), gossip.num_steps
        distance = gossip.consensus_distance()
        gossip.close()
        assert distance < 1e-6  # all had the same data
        return vector_of(model), scale, steps

    for vector, scale, steps in run_ranks(3, body):
        assert torch.isfinite(vector).all()
        assert scale == 2.0**9
        assert steps == (5 if fused else 4)


def test_one_skipped_optimizer_of_two_does_not_stop_the_step() -> None:
    """Of two optimizers the one with finite gradients steps, and mixing continues."""

    def body(group: ProcessGroup) -> int:
        model = make_model().float()
        optimizers = two_optimizers(model)
        gossip = decentralize(model, optimizers, "ring", process_group=group)
        scaler = GradScaler(gossip, init_scale=4.0)
        for step in range(6):
            model.zero_grad()
            scaler.scale(model(torch.ones(4, 5)).square().mean()).backward()
            for index, layer in enumerate([model.get_submodule("0"), model.get_submodule("2")]):
                if group.rank() == 0 and step % 3 == index:
                    next(layer.parameters()).grad.fill_(float("inf"))  # pyright: ignore
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        steps = gossip.num_steps
        gossip.close()
        return steps

    assert run_ranks(2, body) == [6, 6]


def test_torchs_own_scaler_is_refused() -> None:
    """It would skip a step on one rank only, and deadlock the others."""

    def body(group: ProcessGroup) -> None:
        model = make_model().float()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, process_group=group)
        off = torch.amp.GradScaler("cpu", enabled=False)  # as in a loop that can do both
        off.step(optimizer)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(4, 5)).square().mean()).backward()
        with pytest.raises(UserError, match=r"got torch's, .* use gossamer.GradScaler\(gossip\)"):
            scaler.step(optimizer)
        gossip.close()

    run_ranks(1, body)


# - Parameters that others change


@torch.no_grad()
def perturb_(model: nn.Module) -> list[Tensor]:
    """Take SAM's ascent step; return the parameters before it."""
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        assert p.grad is not None
        p.add_(p.grad, alpha=0.05)
    return before


@pytest.mark.parametrize("order", ORDERS)
def test_sharpness_aware_minimization_inside_drained(order: str) -> None:
    """Gradients at perturbed parameters, the update at the original ones, restored bit for bit."""

    def loop(rank: int, model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
        for step in range(5):
            gradients(model, rank, step)
            before = vector_of(model)
            with gossip.drained():
                perturb_(model)  # not undone: drained() does
                gradients(model, rank, step)
            assert torch.equal(vector_of(model), before)
            optimizer.step()

    @torch.no_grad()
    def restore_(model: nn.Module, before: list[Tensor]) -> None:
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)

    def update(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        gradients(model, worker, step)
        before = perturb_(model)
        gradients(model, worker, step)
        restore_(model, before)
        optimizer.step()

    assert_same(gossiped(3, order, sgd, loop), expected(parse("ring", 3), order, sgd, update, 5))


def test_changes_that_stay_are_what_is_mixed() -> None:
    """drained(keep_changes=True) sends the changed parameters: a clipped model stays clipped."""

    @torch.no_grad()
    def clip_(model: nn.Module) -> None:
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)

    def loop(rank: int, model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
        for step in range(5):
            gradients(model, rank, step)
            optimizer.step()
            with gossip.drained(keep_changes=True):
                clip_(model)

    def update(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        gradients(model, worker, step)
        optimizer.step()
        clip_(model)

    assert_same(gossiped(3, "awc", sgd, loop), expected(parse("ring", 3), "awc", sgd, update, 5))


def _edit(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("2.bias").add_(1)


def _to_float(model: nn.Module) -> None:
    model.to(torch.float32)


def _assign(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def _replace(model: nn.Module) -> None:
    model.get_submodule("2").bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_edit, r"got a changed 2\.bias; change them inside `with gossip\.drained"),
        (_to_float, r"got a replaced 0\.weight"),
        (_assign, r"got a replaced 0\.weight"),
        (_replace, r"got a replaced 2\.bias"),
    ],
)
def test_changes_behind_its_back_are_found(
    order: str, change: Callable[[nn.Module], None], words: str
) -> None:
    """An edit while parameters are in flight, or storage outside of the bucket, raises."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group, order=order)
        gradients(model, group.rank(), 0)
        optimizer.step()
        change(model)
        model.zero_grad()
        if order == "atc" and change is _edit:  # nothing is on the wire: the edit is the user's
            optimizer.step()
        else:
            with pytest.raises(UserError, match=words):
                optimizer.step()
        gossip.close()

    run_ranks(2, body)


def test_a_step_inside_a_block_that_restores_is_refused() -> None:
    """averaged() and drained() would undo the step; a closed gossip raises on every call."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, process_group=group)
        for block in (gossip.averaged, gossip.drained):
            with block(), pytest.raises(UserError, match=rf"outside of {block.__name__}\(\)"):
                optimizer.step()
        gossip.close()
        for call in (gossip.state_dict, gossip.consensus_distance, gossip.finalize):
            with pytest.raises(UserError, match="got one that was closed"):
                call()

    run_ranks(1, body)


def test_blocks_that_would_undo_each_other_are_refused() -> None:
    """Permanent changes, loading and ending raise inside blocks that restore parameters."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizers = two_optimizers(model)
        gossip = decentralize(model, optimizers, process_group=group)
        state = gossip.state_dict()
        calls: list[Callable[[], object]] = [
            lambda: gossip.drained(keep_changes=True).__enter__(),
            lambda: gossip.load_state_dict(state),
            gossip.finalize,
            gossip.close,
        ]
        for call in calls:
            with gossip.averaged(), pytest.raises(UserError, match=r"it inside averaged\(\)"):
                call()
        gradients(model, 0, 0)
        optimizers[0].step()
        for call in calls[:2]:
            with pytest.raises(UserError, match="got it after the first of 2 optimizers"):
                call()
        optimizers[1].step()
        gossip.close()

    run_ranks(1, body)


def test_an_exception_among_lasting_changes_does_not_shift_the_exchange() -> None:
    """A rank that catches an exception in the block stays in step with the others."""

    def loop(rank: int, model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
        for step in range(5):
            gradients(model, rank, step)
            optimizer.step()
            with contextlib.suppress(ZeroDivisionError), gossip.drained(keep_changes=True):
                if rank == 1:
                    raise ZeroDivisionError

    def update(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        gradients(model, worker, step)
        optimizer.step()

    assert_same(gossiped(3, "awc", sgd, loop), expected(parse("ring", 3), "awc", sgd, update, 5))


def test_a_failed_finalize_leaves_the_parameters() -> None:
    """If a rank does not take part, the others' models are unchanged, and gossip is broken."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = sgd(model)
        limit = timedelta(seconds=1)
        gossip = decentralize(model, optimizer, process_group=group, timeout=limit)
        if group.rank() == 2:
            time.sleep(2)
            gossip.close()
            return
        before = vector_of(model)
        with pytest.raises(ExchangeError, match=r"called finalize\(\) at step 0, and rank"):
            gossip.finalize()
        assert torch.equal(vector_of(model), before)
        with pytest.raises(ExchangeError):
            optimizer.step()
        gossip.close()

    run_ranks(3, body)


def test_a_block_closes_and_a_saved_model_is_free() -> None:
    """`with decentralize(...)` closes at its end; a model saved inside can gossip again."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        file = io.BytesIO()
        with decentralize(model, sgd(model), process_group=group) as gossip:
            torch.save(model, file)
        with pytest.raises(UserError, match="got one that was closed"):
            gossip.state_dict()
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        decentralize(loaded, sgd(loaded), process_group=group).close()

    run_ranks(1, body)


def test_closing_twice_is_closing_once() -> None:
    """`close()` inside a block that closes, or after `finalize()`, does nothing."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        with decentralize(model, sgd(model), process_group=group) as gossip:
            gossip.finalize()
            gossip.close()
        decentralize(model, sgd(model), process_group=group).close()

    run_ranks(2, body)


def test_a_step_that_failed_can_be_taken_again() -> None:
    """Also by an optimizer that calls its base class, for which torch calls hooks twice."""

    class Fails(SGD):
        times = 1

        def step(self, closure: Any = None) -> Any:  # pyright: ignore
            if Fails.times:
                Fails.times -= 1
                raise ZeroDivisionError
            return super().step(closure)

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = Fails(model.parameters(), lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, 0)
            loss.backward()
            return loss

        with decentralize(model, optimizer, process_group=group) as gossip:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(closure)
            optimizer.step(closure)
            assert gossip.num_steps == 1

    run_ranks(1, body)


# - Uneven inputs


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_with_fewer_batches_go_on_mixing(order: str) -> None:
    """Inside join() a rank without batches mixes without updates until all have finished."""
    batches = [3, 6, 4]

    def loop(rank: int, model: nn.Module, optimizer: Optimizer, gossip: Gossip) -> None:
        with gossip.join():
            for step in range(batches[rank]):
                gradients(model, rank, step)
                optimizer.step()
        assert gossip.num_steps == 6
        gradients(model, rank, 6)
        optimizer.step()  # after it training goes on together

    def update(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        if step < batches[worker] or step == 6:
            gradients(model, worker, step)
            optimizer.step()
        else:
            optimizer.mix()

    assert_same(gossiped(3, order, sgd, loop), expected(parse("ring", 3), order, sgd, update, 7))


def test_collective_calls_inside_join_are_refused() -> None:
    """A rank that has left its loop would not take part in them."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        gossip = decentralize(model, sgd(model), process_group=group)
        with gossip.join():
            for call in (gossip.consensus_distance, gossip.finalize, lambda: gossip.gather(1)):
                with pytest.raises(UserError, match=r"inside join\(\) ranks may be at different"):
                    call()
        gossip.close()

    run_ranks(2, body)


# - DDP inside a node


def train_nodes_of_two(num_steps: int, through_mesh: bool) -> Tensor:
    """DDP on ranks {0, 1} and {2, 3}; gossip on {0, 2} and {1, 3}."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("within"))
    optimizer = sgd(model)
    between: Any = mesh["between"] if through_mesh else mesh.get_group("between")
    gossip = gossamer.decentralize(ddp, optimizer, "complete", process_group=between)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(ddp, dist.get_rank(), step).backward()
        optimizer.step()
    gossip.close()
    return vector_of(model)


@pytest.mark.parametrize("through_mesh", [False, True])
def test_ddp_inside_a_node_and_gossip_between_nodes(pool: ProcessPool, through_mesh: bool) -> None:
    """Two nodes of two: each node is one worker with the batches of both ranks."""

    def update(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        model.zero_grad()
        for rank in (2 * worker, 2 * worker + 1):
            (loss_of(model, rank, step) / 2).backward()
        optimizer.step()

    results = pool.run(train_nodes_of_two, 6, through_mesh)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert_same(results[::2], expected(parse("complete", 2), "awc", sgd, update, 6))


def refuse_wrappers() -> list[str]:
    """Return the errors of models that cannot gossip on these ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    sharded = make_model()
    fully_shard(sharded, mesh=mesh)
    by_hand = make_model()
    layer = by_hand.get_submodule("0")
    weight = by_hand.get_parameter("0.weight").data
    layer.weight = nn.Parameter(distribute_tensor(weight, mesh))
    square = init_device_mesh("cpu", (2, 2))
    messages: list[str] = []
    for model, group in (
        (nn.Sequential(DistributedDataParallel(make_model())), None),
        (sharded, None),
        (by_hand, None),
        (FullyShardedDataParallel(make_model(), device_id=torch.device("cpu")), None),
        (make_model(), square),
    ):
        with pytest.raises(UserError) as caught:
            gossamer.decentralize(model, sgd(model), process_group=group)
        messages.append(str(caught.value))
    return messages


def test_wrappers_that_cannot_work_are_refused(pool: ProcessPool) -> None:
    """DDP over the gossip's own ranks, FSDP, DTensors and 2-d meshes raise with a reason."""
    for messages in pool.run(refuse_wrappers):
        same_ranks, fsdp, dtensor, flat, square = messages
        assert "must not connect the same ranks" in same_ranks
        assert "FSDP and gossip must not connect the same ranks" in fsdp
        assert "got 0.weight, a DTensor that fully_shard() does not own" in dtensor
        assert "FullyShardedDataParallel, which flattens them" in flat
        assert "a mesh must have one dimension, got 2" in square
