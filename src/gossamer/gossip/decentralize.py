"""The public verb: parse and check what one rank was given, compare it across ranks, connect."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from importlib import metadata

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Adam, Optimizer

from gossamer.algorithms import PARAMETERS, name_of_numbers, parse_algorithm
from gossamer.consensus import NormSteps, Policy, Target, make_round_source, name_of
from gossamer.gossip import preconditions
from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.gossip import Gossip
from gossamer.gossip.guard import Guard
from gossamer.gossip.handshake import (
    MOST_ROUNDS_COMPARED,
    declining_on_error,
    facts_about,
    facts_about_bits,
    facts_about_shards,
    rounds_digest,
    shake_hands,
)
from gossamer.gossip.left_out import LeftOut
from gossamer.gossip.mixer import Mixer
from gossamer.gossip.model_state import ModelState
from gossamer.gossip.network import Network
from gossamer.gossip.notices import NoticeBoard
from gossamer.gossip.rank_context import RankContext
from gossamer.gossip.rank_meter import RankMeter
from gossamer.gossip.replica import Replica
from gossamer.gossip.shards import local, locals_of
from gossamer.gossip.step import Step
from gossamer.gossip.within import Within
from gossamer.gossip.worker import Worker
from gossamer.gossip.wrapper_watch import WrapperWatch
from gossamer.nonfinite import check_limit
from gossamer.normalization import rule_of
from gossamer.optim import auto_window, tell_num_workers
from gossamer.topology import Round, Schedule, as_schedule
from gossamer.wire import Packing, parse_wire

_log = logging.getLogger(__name__)

_ONE_REPLICA = (
    "; ranks within a node hold one replica: wrap the model in DDP, which makes it the same on all "
    "of them, before decentralize()"
)

_ADVICE = (
    "%s on each worker's own small batch learns less per step than on averaged gradients; "
    "gossamer.optim.AccumAdam%s.like(optimizer) with algorithm='atc' makes up for it (docs/adam.md)"
)


def decentralize(  # noqa: PLR0913 - one keyword per option
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    topology: str | Round | Schedule = "one_peer_exponential",
    *,
    process_group: ProcessGroup | DeviceMesh | None = None,
    within: ProcessGroup | DeviceMesh | None = None,
    algorithm: str = "",
    order: str = "",
    every: int = 1,
    gossip_steps: int = 1,
    control: str | Policy | Target = "plain",
    buffers: str = "average",
    wire: str = "fp32",
    fragments: int = 1,
    bucket_mb: float = 25.0,
    norms_every: int = 0,
    nonfinite_rounds: int = 10,
    timeout: timedelta = timedelta(minutes=30),
) -> Gossip:
    """Make the training loop around this model and optimizer decentralized.

    A collective call: every rank of the group makes it, with the same arguments, which is checked
    before anything is sent. Parameters and buffers become rank 0's. From then on
    ``optimizer.step()`` mixes parameters with neighbours.

    Args:
        model: its trainable parameters move into flat buckets; names, shapes and ties stay. Shards
            of ``fully_shard`` stay where they are, and are copied.
        optimizer: any torch optimizer over those parameters, or several, which each take one step
            per step of training.
        topology: a string such as ``"lattice(k=4)"``, a Round, or a Schedule. Rounds of a Schedule
            without a period are compared across ranks at every step.
        process_group: the ranks that take part, as a group or a mesh of one dimension; by default
            all, and without any initialized one this process alone, where no launcher has started
            others. With DDP or FSDP2 inside a node: the ranks with this rank's place in each node.
        within: with DDP inside a node, the ranks that it connects: each then exchanges its slice of
            the parameters, so that a node sends one copy of the model and not one per rank.
        algorithm: what a step does with rounds: ``"awc"``, the default, hides the exchange behind
            the next step's computation; ``"atc"`` mixes after the update and waits for it; others
            are in ``gossamer.algorithms.ALGORITHMS``.
        order: another spelling of the algorithms ``"awc"`` and ``"atc"``.
        every: steps from one exchange to the next under awc and atc; with ``"complete"`` and atc,
            local SGD.
        gossip_steps: how often ``"atc"`` mixes per step, each time with the step's round.
        control: how far apart workers may be and what is done about it, such as
            ``"constant(c=0.25)"`` or ``"auto"``; see ``gossamer.consensus``.
        buffers: running statistics of normalization layers are ``"average"``: local, and averaged
            by ``averaged()`` and ``finalize()``; ``"local"``: never touched; or ``"mix"``: mixed
            at every step, as parameters are. Other buffers stay as they are.
        wire: what of parameters travels: ``"fp32"``, all as they are; ``"bf16"``; or
            ``"modulo(bits=8)"`` and 4, a quarter and an eighth of it; see ``gossamer.wire``.
        fragments: under awc and atc an exchange is of one of so many parts of the parameters, in
            turn: as many bytes less at a time.
        bucket_mb: size of a bucket in megabytes.
        norms_every: once in so many steps ``last_norms`` is measured, at the last of them that the
            schedule mixes; 0 for never.
        nonfinite_rounds: a rank whose parameters are not finite is left out of rounds, and after so
            many in a row it raises; 0 for never.
        timeout: how long a message may take from when it is begun, the peers' computation included.

    Returns:
        A handle to average, to measure consensus, to save, and to end it.
    """
    preconditions.check_positive("timeout", timeout, timeout > timedelta(0))
    group = preconditions.to_group(process_group, model)
    board = NoticeBoard(group, timeout)
    with declining_on_error(board):
        node = Within(preconditions.to_within(within, model, group), timeout)
    # - Parse and check
    with declining_on_error(board, *node.boards):
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        chosen = parse_algorithm(algorithm, order)
        given = as_schedule(topology, group.size())
        schedule, exchanged = chosen.adapt(given, every, fragments), chosen.adapt(given)
        chosen.check_optimizers(optimizers)
        preconditions.check_wrapper(model, group)
        trained = preconditions.trained_parameters(model, optimizers)
        make_source = make_round_source(control, schedule, chosen, gossip_steps, every, fragments)
        rule = rule_of(buffers)
        chosen.check_statistics(mixed=rule.mixed)
        chosen.check_precision(trained)
        format = parse_wire(wire)
        format.check(chosen, exchanged)
        preconditions.check_device(format, trained[0].device)
        packing = Packing([*locals_of(trained)], bucket_mb, fragments, every)
        norm_steps = NormSteps(schedule, chosen.overlaps, norms_every)
        check_limit(nonfinite_rounds)
        limit = chosen.most_nonfinite(nonfinite_rounds)
        # A string means the same on all ranks; a function need not.
        compares_rounds = isinstance(topology, Schedule) and schedule.period is None
        facts = {
            "the version of gossamer": metadata.version("gossamer"),
            "topology": schedule.name,
            "the digest of its rounds": rounds_digest(exchanged),
            "how rounds are compared": "at every step" if compares_rounds else "at the start",
            "algorithm": repr(chosen),
            "gossip_steps": str(gossip_steps),
            "control": name_of(control),
            "buffers": buffers,
            "wire": repr(format),
            "fragments": str(fragments),
            "bucket_mb": str(bucket_mb),
            "norms_every": str(norms_every),
            "nonfinite_rounds": str(nonfinite_rounds),
            "the number of optimizers": str(len(optimizers)),
            "the number of ranks within a node": str(node.size),
            **facts_about(model),
        }
    # - Compare with all ranks; first within the node, for who differs there must tell all nodes
    with declining_on_error(board):
        for inner in node.boards:
            shake_hands(inner, facts | facts_about_bits(model), _ONE_REPLICA)
    shake_hands(board, facts | facts_about_shards(model))
    # - Connect, and become rank 0's
    detector = FailureDetector(board)
    detector.watch()
    with detector.leaving_on_error(), torch.no_grad():
        network = Network(group, detector, trained[0].device, rounds=_rounds_to_connect(exchanged))
        node.open(trained[0].device)
        for tensor in map(local, (*model.parameters(), *model.buffers())):
            if tensor.numel():
                network.collectives.broadcast_(tensor)
        replica = Replica(model, trained, rule, packing.bucket_mb, chosen, node)
        # - Put the step together, and hook it up
        mixers: dict[str, Mixer] = {}
        num_tags = 0
        for state, buckets in replica.exchanged.items():
            exact = replica.exact if state == PARAMETERS else ()
            changing = replica.changing if state == PARAMETERS else ()
            sent = [*buckets, *exact, *changing]
            mixers[state] = Mixer(
                buckets,
                network,
                LeftOut(
                    name_of_numbers(state),
                    sent,
                    network.rank,
                    limit,
                    detector,
                    network.telemetry,
                    node,
                ),
                format,
                exact=exact,
                changing=changing,
                first_tag=num_tags,
                compares_rounds=compares_rounds,
            )
            num_tags += len(sent)
        for each in optimizers:
            tell_num_workers(each, group.size())
            if isinstance(each, Adam) and network.rank == 0 and auto_window(network.size) > 1:
                decoupled = each.defaults.get("decoupled_weight_decay")
                _log.info(_ADVICE, type(each).__name__, "W" if decoupled else "")
        meter = RankMeter(
            trained,
            optimizers,
            network.collectives,
            replica.weight,
            node if replica.is_sharded else None,
        )
        source = make_source(meter)
        guard = Guard(model, optimizers, trained)
        wrappers = WrapperWatch(trained, group)
        everywhere = model.named_parameters(remove_duplicate=False)  # tied ones under all names
        names = [name for name, p in everywhere if any(p is own for own in trained)]
        context = RankContext(trained, names, chosen, optimizers, replica, mixers, source, packing)
        step = Step(optimizers, chosen, context, guard, wrappers, meter, norm_steps)
        model_state = ModelState(model, network.rank, network.size)
        worker = Worker(replica, step, context.mixer, network, model_state, node)
        return Gossip(schedule, source, meter, worker)


def _rounds_to_connect(schedule: Schedule) -> Iterable[Round]:
    """Return the rounds whose groups are worth a process group each, which costs sockets.

    Schedules with a longer period average in groups by messages.
    """
    period = schedule.period or 0
    return map(schedule.round, range(period)) if period <= MOST_ROUNDS_COMPARED else ()
