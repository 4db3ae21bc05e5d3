"""What a training loop may do, and what the handle guarantees; ranks are threads."""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import LBFGS, SGD, Adam, AdamW

from gossamer.errors import UserError
from gossamer.gossip import ExchangeError, Gossip, decentralize
from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.network import Network
from gossamer.gossip.notices import NoticeBoard
from gossamer.optim import AccumAdamW, SmoothAdamW
from gossamer.topology import Schedule, from_matrix, parse, ring, static
from tests import reference
from tests.ranks import run_ranks
from tests.reference import fill_, loss_of, make_model, mix_, sgd, vector_of


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_steps: int
) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


class WithStatistics(nn.Module):
    """A network with BatchNorm: float buffers that training updates, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
        fill_(self)

    def forward(self, inputs: Tensor) -> Tensor:  # noqa: D102
        return self.layers(inputs)


def test_the_model_keeps_its_names_shapes_and_ties() -> None:
    """state_dict keys, load_state_dict, tied parameters and strides do not change."""

    def body(group: ProcessGroup) -> None:
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Conv2d(3, 8, 3)})
        model["b"].weight = model["a"].weight
        model["c"].to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        before = copy.deepcopy(model.state_dict())
        strides = {name: p.stride() for name, p in model.named_parameters()}
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group, order="atc")
        assert list(model.state_dict()) == list(before)
        assert model["b"].weight is model["a"].weight
        assert {name: p.stride() for name, p in model.named_parameters()} == strides
        loaded = {name: torch.full_like(tensor, group.rank()) for name, tensor in before.items()}
        model.load_state_dict(loaded)
        optimizer.step()
        for tensor in model.state_dict().values():  # what was loaded is what is mixed
            torch.testing.assert_close(tensor, torch.full_like(tensor, 0.5))
        gossip.close()
        assert {name: p.stride() for name, p in model.named_parameters()} == strides
        assert model["b"].weight is model["a"].weight

    run_ranks(2, body)


def test_everything_starts_as_on_rank_0() -> None:
    """Trainable and frozen parameters and buffers of any dtype and layout are broadcast."""

    def body(group: ProcessGroup) -> dict[str, Tensor]:
        model = WithStatistics()
        model.layers[0].requires_grad_(False)
        model.register_buffer("odd", torch.arange(6).reshape(2, 3).t())
        model.register_buffer("flag", torch.tensor([True, False]))
        for tensor in (*model.parameters(), *model.buffers()):
            if group.rank() > 0:
                tensor.detach().zero_()
        decentralize(model, sgd(model), "ring", process_group=group).close()
        return model.state_dict()

    first, *others = run_ranks(3, body)
    assert first["odd"].tolist() == [[0, 3], [1, 4], [2, 5]]
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(other[name], tensor), name


def test_accumulation_clipping_schedulers_and_groups_work_unchanged() -> None:
    """A loop with all of them equals the same loop with the reference's mixing."""
    rounds = parse("ring", 3)

    def make(model: nn.Module) -> tuple[Any, Any]:
        layers = list(model.children())
        groups = [
            {"params": layers[0].parameters(), "lr": 0.01},
            {"params": layers[2].parameters(), "lr": 0.03, "weight_decay": 0.1},
        ]
        optimizer = AdamW(groups)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def gradients(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
        optimizer.zero_grad()
        for micro in range(3):
            (loss_of(model, rank, 10 * step + micro) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def body(group: ProcessGroup) -> Tensor:
        model = make_model()
        optimizer, scheduler = make(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group, order="atc")
        for step in range(6):
            gradients(model, optimizer, group.rank(), step)
            optimizer.step()
            scheduler.step()
        gossip.close()
        return vector_of(model)

    models = [make_model() for _ in range(3)]
    made = [make(model) for model in models]
    for step in range(6):
        for rank, (model, (optimizer, scheduler)) in enumerate(zip(models, made, strict=True)):
            gradients(model, optimizer, rank, step)
            optimizer.step()
            scheduler.step()
        mix_(models, torch.from_numpy(rounds.round(step).matrix().toarray()))
    for result, model in zip(run_ranks(3, body), models, strict=True):
        torch.testing.assert_close(result, vector_of(model), rtol=0, atol=1e-12)


def test_frozen_parameters_stay_and_missing_gradients_do_not_stop_mixing() -> None:
    """A frozen layer is not sent; a layer without a gradient in this step is still mixed."""

    def body(group: ProcessGroup) -> tuple[Tensor, Tensor, int]:
        model = make_model()
        layers = list(model.children())
        layers[0].requires_grad_(False)
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "complete", process_group=group, order="atc")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(group.rank())
        optimizer.step()  # no gradient anywhere: nothing moves, everything is mixed
        sent = gossip.bytes_sent
        gossip.close()
        frozen, trained = layers[0].weight, layers[2].weight
        return frozen.detach().clone(), trained.detach().clone(), sent  # pyright: ignore[reportReturnType, reportCallIssue]

    (frozen0, trained0, sent), (frozen1, trained1, _) = run_ranks(2, body)
    torch.testing.assert_close(frozen1 - frozen0, torch.ones_like(frozen0))
    torch.testing.assert_close(trained0, trained1, rtol=0, atol=1e-15)
    assert sent == 8 * (24 + 8)  # one double per weight and bias of the last layer, aligned


def test_mixed_dtypes_travel_in_buckets_of_their_own() -> None:
    """Half and single precision have separate buckets, each mixed in its own dtype."""

    def body(group: ProcessGroup) -> nn.Module:
        model = nn.ModuleList(
            [nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3), nn.Linear(3, 3).double()]
        )
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "complete", process_group=group, order="atc")
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(group.rank()))
        optimizer.step()
        gossip.close()
        return model

    for model in run_ranks(3, body):
        dtypes = [p.dtype for p in model.parameters()][::2]
        assert dtypes == [torch.bfloat16, torch.float32, torch.float64]
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.data, torch.ones_like(parameter.data))


def test_autocast_and_a_compiled_model() -> None:
    """A compiled model under bf16 autocast trains, and its workers reach consensus."""

    def body(group: ProcessGroup) -> tuple[float, float, Tensor]:
        model = make_model().float()
        compiled: Any = torch.compile(model, backend="eager")
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "complete", process_group=group)
        losses: list[float] = []
        for _ in range(30):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(group.rank())
            inputs = torch.randn(16, 5, generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                loss = compiled(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        gossip.finalize()
        return losses[0], losses[-1], vector_of(model)

    (first, last, vector), (_, _, other) = run_ranks(2, body)
    assert last < first / 2
    assert torch.equal(vector, other)


def test_averaged_is_exact_and_restores_every_bit() -> None:
    """Inside: the mean of all workers, buffers too. After: the old bits, also in flight."""

    def body(group: ProcessGroup) -> dict[str, Any]:
        model = WithStatistics()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        take_steps(model, optimizer, group.rank(), 3)
        before = copy.deepcopy(model.state_dict())
        with gossip.averaged():
            during = copy.deepcopy(model.state_dict())
        after = copy.deepcopy(model.state_dict())
        take_steps(model, optimizer, group.rank(), 2)
        gossip.close()
        return {"before": before, "during": during, "after": after, "end": vector_of(model)}

    def uninterrupted(group: ProcessGroup) -> Tensor:
        model = WithStatistics()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        take_steps(model, optimizer, group.rank(), 3)
        take_steps(model, optimizer, group.rank(), 2)
        gossip.close()
        return vector_of(model)

    results = run_ranks(4, body)
    for name, tensor in results[0]["during"].items():
        if tensor.is_floating_point():
            mean = torch.stack([result["before"][name] for result in results]).mean(0)
            for result in results:
                torch.testing.assert_close(result["during"][name], mean, rtol=0, atol=1e-14)
    for result, end in zip(results, run_ranks(4, uninterrupted), strict=True):
        for name, tensor in result["before"].items():
            assert torch.equal(tensor, result["after"][name])
        assert torch.equal(result["end"], end)


def test_an_exception_inside_averaged_restores_too() -> None:
    """An evaluation that raises leaves the worker's parameters unchanged."""

    def body(group: ProcessGroup) -> bool:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        take_steps(model, optimizer, group.rank(), 2)
        before = vector_of(model)
        with pytest.raises(KeyError), gossip.averaged():
            raise KeyError
        gossip.close()
        return torch.equal(before, vector_of(model))

    assert run_ranks(2, body) == [True, True]


def test_consensus_distance_equals_its_formula() -> None:
    """Ξ² = (1/n) Σ ‖x̄ − x_i‖², equal on every rank."""

    def body(group: ProcessGroup) -> tuple[float, Tensor]:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        take_steps(model, optimizer, group.rank(), 3)
        distance, vector = gossip.consensus_distance(), vector_of(model)
        gossip.close()
        return distance, vector

    results = run_ranks(5, body)
    stacked = torch.stack([vector for _, vector in results])
    expected = (stacked - stacked.mean(0)).square().sum(1).mean().sqrt().item()
    for distance, _ in results:
        assert distance == pytest.approx(expected, rel=1e-12)


def test_finalize_leaves_the_average_and_no_hook() -> None:
    """After it all models are equal, and optimizer.step() no longer exchanges."""

    def body(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        take_steps(model, optimizer, group.rank(), 4)
        gossip.finalize()
        end = vector_of(model)
        sent = gossip.bytes_sent
        take_steps(model, optimizer, group.rank(), 1)
        assert gossip.bytes_sent == sent
        return end, vector_of(model)

    results = run_ranks(3, body)
    for end, _ in results:
        torch.testing.assert_close(end, results[0][0], rtol=0, atol=1e-15)
    assert not torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("policy", ["local", "average", "mix"])
def test_buffers_follow_their_policy(policy: str, order: str) -> None:
    """Statistics are local, or mixed like parameters; integer buffers never change."""

    def body(group: ProcessGroup) -> tuple[Tensor, Tensor, int]:
        model = WithStatistics()
        optimizer = sgd(model)
        gossip = decentralize(
            model, optimizer, "complete", process_group=group, order=order, buffers=policy
        )
        take_steps(model, optimizer, group.rank(), 6)
        norm: Any = model.layers[1]
        training = norm.running_mean.clone()
        with gossip.averaged():
            evaluating = norm.running_mean.clone()
        gossip.close()
        return training, evaluating, int(norm.num_batches_tracked)

    (first, first_eval, steps), (second, second_eval, _), _ = run_ranks(3, body)
    assert steps == 6
    apart = (first - second).norm()
    if policy == "mix" and order == "atc":
        assert apart < 1e-12  # the complete graph mixes completely after each step
    else:
        assert apart > 1e-3
    assert ((first_eval - second_eval).norm() < 1e-12) == (policy != "local")


def test_gossip_can_be_repeated_within_a_step() -> None:
    """Mixing three times with a ring equals mixing once with the cube of its matrix."""

    def body(group: ProcessGroup) -> Tensor:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(
            model, optimizer, "ring", process_group=group, order="atc", gossip_steps=3
        )
        take_steps(model, optimizer, group.rank(), 4)
        gossip.close()
        return vector_of(model)

    cubed = from_matrix(np.linalg.matrix_power(ring(5).matrix().toarray(), 3))
    expected = reference.train(static(cubed), "atc", lambda p: SGD(p, lr=0.05, momentum=0.9), 4)
    for result, vector in zip(run_ranks(5, body), expected, strict=True):
        torch.testing.assert_close(result, vector, rtol=0, atol=1e-13)


@pytest.mark.parametrize("topology", ["complete", "ring"])
def test_mixed_statistics_go_on_moving(topology: str) -> None:
    """Under awc the updates of a forward pass are kept, in all-reduced rounds and others.

    A worker's own weight applies to its current statistics: w_ii b_i + Σ_j w_ij (b_j as sent).
    """

    def body(group: ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        model = WithStatistics()
        optimizer = sgd(model)
        gossip = decentralize(
            model, optimizer, topology, process_group=group, buffers="mix", bucket_mb=1e-4
        )
        norm: Any = model.layers[1]
        seen: list[tuple[Tensor, Tensor]] = []
        for step in range(4):
            sent = norm.running_var.clone()
            optimizer.zero_grad()
            loss_of(model, group.rank(), step).backward()
            seen.append((sent, norm.running_var.clone()))
            optimizer.step()
        seen.append((norm.running_var.clone(), norm.running_var.clone()))
        gossip.close()
        return seen

    results = run_ranks(5, body)
    weights = torch.from_numpy(parse(topology, 5).round(0).matrix().toarray())
    for step in range(1, 4):
        sent = torch.stack([result[step][0] for result in results])
        moved = torch.stack([result[step][1] for result in results])
        mixed = torch.stack([result[step + 1][0] for result in results])
        expected = weights @ sent + torch.diag(weights)[:, None] * (moved - sent)
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-13)


def test_only_statistics_are_averaged() -> None:
    """A mask of −inf, or any other buffer of the user, is not changed after the start."""

    def body(group: ProcessGroup) -> Tensor:
        model = WithStatistics()
        model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group, buffers="mix")
        take_steps(model, optimizer, group.rank(), 3)
        gossip.finalize()
        return model.state_dict()["mask"]

    assert all(mask.tolist() == [0.0, float("-inf")] for mask in run_ranks(4, body))


def test_a_closure_is_evaluated_at_the_unmixed_parameters() -> None:
    """optimizer.step(closure) equals backward() and step(), and returns the loss."""

    def train(group: ProcessGroup, with_closure: bool) -> Tensor:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, group.rank(), step)
                loss.backward()
                return loss

            if with_closure:
                loss: Any = optimizer.step(closure)  # pyright: ignore[reportArgumentType]
                assert loss.item() > 0
            else:
                closure()
                optimizer.step()
        gossip.close()
        return vector_of(model)

    plain = run_ranks(3, lambda group: train(group, with_closure=False))
    closed = run_ranks(3, lambda group: train(group, with_closure=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, closed, strict=True))


@pytest.mark.parametrize(
    "text", ["ring", "complete", "aer(workers_per_node=4)", "star", "one_peer_ring"]
)
def test_bytes_and_messages_are_those_of_the_rounds(text: str) -> None:
    """The counters equal those of Round, so predictions can be checked against them."""
    num_steps = 5

    def body(group: ProcessGroup) -> tuple[int, int]:
        model = nn.Linear(16, 32, bias=False)  # 2048 bytes, divisible by eight
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, text, process_group=group, order="atc")
        for _ in range(num_steps):
            optimizer.step()
        gossip.close()
        return gossip.bytes_sent, gossip.messages_sent

    schedule = parse(text, 8)
    rounds = [schedule.round(step) for step in range(num_steps)]
    for rank, (num_bytes, messages) in enumerate(run_ranks(8, body)):
        assert num_bytes == 2048 * sum(round.copies_sent[rank] for round in rounds)
        assert messages == sum(round.messages_sent[rank] for round in rounds)


@pytest.mark.parametrize(
    ("text", "copies"), [("one_peer_exponential", 1), ("torus", 2), ("ring", 2)]
)
def test_extra_memory(text: str, copies: int) -> None:
    """One copy of the parameters for one-peer rounds, at most two for others of any degree."""

    def body(group: ProcessGroup) -> float:
        model = nn.Linear(64, 64, bias=False)
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, text, process_group=group)
        for _ in range(3):
            optimizer.step()
        gossip._worker.mixer.drain()
        held = [*gossip._worker.mixer._inboxes, *gossip._worker.network.transport._spare.values()]
        copies = sum(tensor.numel() for tensor in held) / 64**2
        gossip.close()
        assert not gossip._worker.mixer._inboxes
        assert not gossip._worker.network.transport._spare
        return copies

    assert set(run_ranks(8, body)) == {copies}


def test_neighbours_are_received_around_the_circle() -> None:
    """Each sender is first in line at one receiver only, so no link idles."""

    def body(group: ProcessGroup) -> list[int]:
        model = make_model()
        gossip = decentralize(model, sgd(model), "ring", process_group=group)
        senders = gossip._worker.network.transport._role_in(ring(4)).senders
        gossip.close()
        return senders

    assert run_ranks(4, body) == [[1, 3], [2, 0], [3, 1], [0, 2]]


def test_a_connection_carries_parameters_one_way() -> None:
    """Each TCP connection has data in one direction: requests do not queue behind data."""
    before = tcp_traffic()

    def body(group: ProcessGroup) -> dict[str, tuple[int, int]]:
        model = nn.Linear(512, 512)
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group, order="atc")
        optimizer.step()
        gossip.gather(0)  # all have sent and received
        traffic = tcp_traffic() if group.rank() == 0 else {}
        gossip.gather(0)  # nobody closes before that
        gossip.close()
        return traffic

    traffic, *_ = run_ranks(4, body)
    own = [both for end, both in traffic.items() if end not in before]
    megabyte = 4 * 512 * 512
    assert sum(received > megabyte for _, received in own) >= 8  # by twos; the first model by three
    assert max(min(both) for both in own) < megabyte / 10


def tcp_traffic() -> dict[str, tuple[int, int]]:
    """Return the bytes sent and received on every TCP connection of this process."""
    traffic: dict[str, tuple[int, int]] = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or no connection
            connection = socket.socket(fileno=int(link.name))
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            finally:
                connection.detach()  # it is Gloo's
            # tcpi_bytes_acked and tcpi_bytes_received
            traffic[str(link.readlink())] = struct.unpack("=QQ", info[120:136])
    return traffic


def test_two_gossips_on_one_group_do_not_meet() -> None:
    """Two models in one process, each with its own gossip, do not interfere."""

    def body(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        models = [make_model(), make_model()]
        optimizers = [sgd(model) for model in models]
        gossips = [
            decentralize(model, optimizer, "ring", process_group=group)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        for step in range(4):
            for shift, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                loss_of(model, group.rank(), step + 100 * shift).backward()
                optimizer.step()
        for gossip in gossips:
            gossip.close()
        return vector_of(models[0]), vector_of(models[1])

    def alone(group: ProcessGroup, shift: int) -> Tensor:
        model = make_model()
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, group.rank(), step + 100 * shift).backward()
            optimizer.step()
        gossip.close()
        return vector_of(model)

    together = run_ranks(4, body)
    for shift in (0, 1):
        for pair, vector in zip(together, run_ranks(4, partial(alone, shift=shift)), strict=True):
            assert torch.equal(pair[shift], vector)


def test_a_peer_that_does_not_come_is_named_in_time() -> None:
    """A wait times out with who waited, for whom and for what, and the culprit."""
    all_raised = threading.Barrier(5)

    def body(group: ProcessGroup) -> str:
        model = make_model()
        optimizer = sgd(model)
        limit = timedelta(seconds=1)
        gossip = decentralize(model, optimizer, "exponential", process_group=group, timeout=limit)
        if group.rank() == 2:
            all_raised.wait(30)  # silent until nobody waits for it any more
            gossip.close()
            return ""
        with pytest.raises(ExchangeError) as caught:
            take_steps(model, optimizer, group.rank(), 2)
        all_raised.wait(30)
        before = vector_of(model)
        for call in (optimizer.step, gossip.consensus_distance):
            with pytest.raises(ExchangeError):  # for ever: what has arrived is not to be used
                call()
        gossip.close()
        assert caught.value.culprit == 2
        assert torch.equal(before, vector_of(model))
        assert not optimizer._optimizer_step_pre_hooks
        return str(caught.value)

    for rank, message in enumerate(run_ranks(5, body)):
        words = rf"rank {rank} at step 1 waits for (bucket 0 from )?rank \d.*: rank 2 is gone or "
        assert rank == 2 or re.search(words, message), message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topology": "torrus"}, "did you mean 'torus'"),
        ({"topology": ring(5)}, "must be on 1 workers, got one on 5"),
        ({"order": "abc"}, "order must be one of awc, atc, got 'abc'"),
        ({"gossip_steps": 2}, "awc mixes once per step, got gossip_steps=2; use algorithm='atc'"),
        ({"order": "atc", "gossip_steps": 0}, "gossip_steps must be at least 1, got 0"),
        ({"buffers": "none"}, "buffers must be one of average, local, mix, got 'none'; "),
        ({"buffers": "averaged"}, "did you mean 'average'"),
        ({"bucket_mb": 0}, "bucket_mb must be above 0, got 0"),
        ({"timeout": timedelta(0)}, "timeout must be above 0, got 0:00:00"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    """They raise before anything is sent, with the required and the given value."""
    arguments: dict[str, Any] = {"topology": "ring", **options}

    def body(group: ProcessGroup) -> None:
        model = make_model()
        with pytest.raises(UserError, match=words):
            decentralize(model, sgd(model), process_group=group, **arguments)

    run_ranks(1, body)


def test_sixteen_bit_workers_average_exactly() -> None:
    """Equal bf16 workers have distance 0 and an average equal to each of them."""

    def body(group: ProcessGroup) -> tuple[float, bool]:
        model = nn.Linear(50, 40).bfloat16()
        gossip = decentralize(model, sgd(model), "ring", process_group=group)
        before = vector_of(model)
        distance = gossip.consensus_distance()
        with gossip.averaged():
            same = torch.equal(before, vector_of(model))
        gossip.close()
        return distance, same

    assert run_ranks(5, body) == [(0.0, True)] * 5


def test_averaging_does_not_inflate_parameters() -> None:
    """A thousand all-reduced rounds of equal workers change their norm by less than 1e-6."""

    def body(group: ProcessGroup) -> float:
        model = nn.Linear(30, 30)
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "complete", process_group=group, order="atc")
        before = vector_of(model).norm()
        for _ in range(1000):
            optimizer.step()
        gossip.close()
        return float(vector_of(model).norm() / before - 1)

    assert all(abs(drift) < 1e-6 for drift in run_ranks(3, body))


def test_saving_a_part_after_the_end_saves_that_part(tmp_path: Path) -> None:
    """Parameters have left their buckets, so the file of a head has the size of a head."""

    def body(group: ProcessGroup) -> int:
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
        decentralize(model, sgd(model), "ring", process_group=group).finalize()
        path = tmp_path / f"head-{group.rank()}.pt"
        torch.save(model[1].state_dict(), path)
        return path.stat().st_size

    assert max(run_ranks(2, body)) < 10_000


def test_training_more_parameters_later_is_refused() -> None:
    """Unfrozen or added parameters would not be mixed, so the next step raises."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        layers = list(model.children())
        layers[0].requires_grad_(False)
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        layers[0].requires_grad_(True)
        with pytest.raises(UserError, match="got 2 unfrozen and 0 added since; close"):
            optimizer.step()
        layers[0].requires_grad_(False)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(UserError, match="got 0 unfrozen and 1 added since; close"):
            optimizer.step()
        gossip.close()

    run_ranks(2, body)


def test_a_closure_that_is_called_twice_is_refused() -> None:
    """A second call, as in SAM, needs gradients at other points; reusing the first is wrong."""

    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return closure()

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = Twice(model.parameters(), lr=0.1)
        gossip = decentralize(model, optimizer, "ring", process_group=group)
        with pytest.raises(UserError, match="once per step, got a second call"):
            optimizer.step(lambda: loss_of(model, 0, 0))
        gossip.close()

    run_ranks(1, body)


def test_models_that_cannot_gossip_are_refused() -> None:
    """Each with its reason: gossiping already, uninitialized, tied by memory, not dense."""

    def body(group: ProcessGroup) -> None:
        def refused(model: nn.Module, words: str) -> None:
            with pytest.raises(UserError, match=words):
                decentralize(model, sgd(model), "ring", process_group=group)

        model = make_model()
        gossip = decentralize(model, sgd(model), "ring", process_group=group)
        refused(model, "can gossip once, got 0.weight")
        gossip.close()
        decentralize(model, sgd(model), "ring", process_group=group).close()

        refused(nn.LazyLinear(3), "must have a shape, got weight, which is not initialized")
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight.data = first.weight.data
        refused(nn.Sequential(first, second), "tied parameters must be one object, got 1.weight")
        loose = nn.Linear(4, 4)
        loose.weight.data = torch.zeros(4, 8)[:, ::2]
        refused(loose, "without gaps or overlap, got weight")

    run_ranks(1, body)


def test_an_optimizer_of_another_model_is_refused() -> None:
    """The parameters that it trains would never be mixed."""

    def body(group: ProcessGroup) -> None:
        model, other = make_model(), make_model()
        with pytest.raises(UserError, match="4 foreign and 4 trainable parameters"):
            decentralize(model, sgd(other), "ring", process_group=group)
        with pytest.raises(UserError, match="got LBFGS"):
            decentralize(model, LBFGS(model.parameters()), "ring", process_group=group)

    run_ranks(1, body)


class Wrapper(torch.optim.Optimizer):
    """An optimizer without hooks that calls the step of another, like Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def test_a_wrapper_without_hooks_is_refused() -> None:
    """Its step would not mix; the error names the optimizer to pass."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        with pytest.raises(UserError, match=r"got Wrapper, .* as optimizer\.optimizer"):
            decentralize(model, Wrapper(sgd(model)), "ring", process_group=group)

    run_ranks(1, body)


def test_without_a_process_group_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The most common first mistake: several processes, and no init_process_group."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = make_model()
    with pytest.raises(UserError, match=r"init_process_group\(\) under torchrun"):
        decentralize(model, sgd(model), "ring")


@pytest.mark.parametrize(
    ("kind", "workers", "algorithm", "advice"),
    [
        (AdamW, 4, "awc", "gossamer.optim.SmoothAdamW.like(optimizer)"),
        (Adam, 4, "atc", "gossamer.optim.SmoothAdam.like(optimizer)"),
        (Adam, 2, "atc", ""),
        (AccumAdamW, 4, "awc", "AccumAdamW learns less per step where the exchange is overlapped"),
        (partial(AccumAdamW, window=3), 2, "awc", "AccumAdamW learns less per step where"),
        (partial(AccumAdamW, window=1), 4, "awc", ""),
        (AccumAdamW, 4, "atc", ""),
        (SmoothAdamW, 4, "awc", ""),
        (SGD, 4, "awc", ""),
    ],
)
def test_adam_is_told_what_it_loses(
    kind: Any, workers: int, algorithm: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank logs once what to do; nothing is logged for what loses nothing."""

    def body(group: ProcessGroup) -> None:
        model = make_model()
        optimizer = kind(model.parameters(), lr=0.1)
        decentralize(model, optimizer, process_group=group, algorithm=algorithm).close()

    with caplog.at_level(logging.INFO):
        run_ranks(workers, body)
    assert caplog.text.count("docs/adam.md") == bool(advice)
    assert advice in caplog.text


def test_what_a_rank_opens_follows_from_its_neighbours() -> None:
    """Four times the ranks add two levels of broadcast and gather per rank, not 12 peers."""

    def body(group: ProcessGroup) -> int:
        model = nn.Linear(2, 2)
        gossip = decentralize(model, sgd(model), "ring", process_group=group)
        gossip.gather(0)  # all are connected
        opened = len(os.listdir("/proc/self/fd"))
        gossip.gather(0)  # and all have counted
        gossip.close()
        return opened

    def opened_by_each(num_ranks: int) -> float:
        before = len(os.listdir("/proc/self/fd"))
        return (max(run_ranks(num_ranks, body)) - before) / num_ranks

    assert opened_by_each(16) <= opened_by_each(4) + 7


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7, 8, 9])
def test_all_ranks_gather_every_row_in_the_order_of_ranks(num_ranks: int) -> None:
    """For any number of ranks, power of two or not, and several gathers in flight."""

    def body(group: ProcessGroup) -> None:
        detector = FailureDetector(NoticeBoard(group, timedelta(seconds=20)))
        network = Network(group, detector, torch.device("cpu"))
        own = torch.arange(3.0) + 10 * group.rank()
        begun = [network.collectives.begin_gather_rows(factor * own, "rows") for factor in (1, 2)]
        expected = torch.arange(3.0) + 10 * torch.arange(num_ranks)[:, None]
        for factor, collect in enumerate(begun, start=1):
            assert torch.equal(collect(), factor * expected)
        network.close()

    run_ranks(num_ranks, body)


def test_a_gather_in_flight_ends_before_its_connections() -> None:
    """close() waits for it: a thread in Gloo must not outlive the interpreter."""

    def body(group: ProcessGroup) -> list[int]:
        model = nn.Linear(2, 2)
        gossip = decentralize(model, sgd(model), "ring", process_group=group)
        time.sleep(0.3 * group.rank())
        collect = gossip._worker.begin_gather(group.rank(), "a test")
        gossip.close()
        return collect()

    assert run_ranks(3, body) == [[0, 1, 2]] * 3


def test_a_closed_gossip_holds_no_descriptors() -> None:
    """File descriptors are closed even if the user keeps the handle."""

    def body(group: ProcessGroup) -> Gossip:
        model = nn.Linear(2, 2)
        gossip = decentralize(model, sgd(model), "ring", process_group=group)
        gossip.close()
        return gossip

    run_ranks(2, body)  # what the first one leaves, others do not add
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    handles = run_ranks(2, body)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(handles) == 2


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_neighbours_connect_when_they_first_exchange(order: str) -> None:
    """A schedule without a period opens gathers' peers at the start, others when needed."""
    num_steps, schedule = 4, parse("random_matching", 8)

    def body(group: ProcessGroup) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        gossip = decentralize(model, optimizer, schedule.name, process_group=group, order=order)
        lanes = gossip._worker.network._connections._lanes
        ahead = set(lanes)
        for _ in range(num_steps):
            optimizer.step()
        with gossip.drained():
            needed = set(lanes)
        gossip.close()
        return ahead, needed

    # Under awc step 0 mixes nothing, and the last step has begun the exchange of the next.
    steps = range(1, num_steps + 1) if order == "awc" else range(num_steps)
    for rank, (ahead, needed) in enumerate(run_ranks(8, body)):
        assert ahead == {
            lane for d in (1, 2, 4) for lane in (((rank + d) % 8, rank), (rank, (rank - d) % 8))
        }
        partners = {schedule.round(t).neighbours(rank).sends.workers.item() for t in steps}
        assert needed == ahead | {lane for p in partners for lane in ((rank, p), (p, rank))}


def test_the_end_of_one_rank_does_not_disturb_others_that_connect() -> None:
    """Two ranks can connect late after a third has closed: it waits for neither."""
    alone, pair = from_matrix(np.eye(3)), from_matrix([[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]])

    def body(group: ProcessGroup) -> bool:
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        schedule = Schedule(3, 100, lambda step: pair if step == 2 else alone)
        gossip = decentralize(model, optimizer, schedule, process_group=group, order="atc")
        for _ in range(2):
            optimizer.step()
        if group.rank() == 1:
            time.sleep(1.5)  # more than a rank waits before it looks at the others
        if group.rank() > 0:
            optimizer.step()
        gossip.close()
        return True

    assert all(run_ranks(3, body))
