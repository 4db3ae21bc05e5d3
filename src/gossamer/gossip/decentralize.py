"""The entry point: validate one rank's arguments, compare them across ranks, connect."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from importlib import metadata

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gossamer.algorithms import parse_algorithm
from gossamer.consensus import Policy, Target, name_of
from gossamer.gossip import late, preconditions
from gossamer.gossip.donation import Donation
from gossamer.gossip.epoch import EpochMaker, Rules, Topology
from gossamer.gossip.epochs import Epochs
from gossamer.gossip.failures import FailureDetector
from gossamer.gossip.gossip import Gossip
from gossamer.gossip.guard import Guard
from gossamer.gossip.handshake import (
    compare_later,
    declining_on_error,
    facts_about,
    facts_about_bits,
    facts_about_optimizers,
    facts_about_shards,
    rounds_digest,
    shake_hands,
)
from gossamer.gossip.membership import Membership
from gossamer.gossip.model_state import ModelState
from gossamer.gossip.network import Network, rounds_to_connect
from gossamer.gossip.replica import Replica
from gossamer.gossip.shards import local, locals_of
from gossamer.gossip.step import Step
from gossamer.gossip.within import Within
from gossamer.gossip.worker import Worker
from gossamer.gossip.wrapper_watch import WrapperWatch
from gossamer.nonfinite import check_limit
from gossamer.normalization import rule_of
from gossamer.optim import tell_num_workers
from gossamer.optim.advice import advice_on
from gossamer.wire import Packing, parse_wire

_log = logging.getLogger(__name__)

_ONE_REPLICA = (
    "; ranks within a node hold one replica: wrap the model in DDP, which makes it the same on all "
    "of them, before decentralize()"
)


def decentralize(  # noqa: PLR0913 - one keyword per option
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    topology: Topology = "one_peer_exponential",
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
    bucket_mb: float | None = None,
    norms_every: int = 0,
    nonfinite_rounds: int = 10,
    on_failure: str = "raise",
    timeout: timedelta = timedelta(minutes=30),
) -> Gossip:
    """Decentralize the training loop of a model and its optimizer.

    A collective call: every rank of the group makes it with the same arguments, which is checked
    before anything is sent. Parameters and buffers are broadcast from rank 0. From then on
    ``optimizer.step()`` mixes parameters with neighbours.

    Args:
        model: its trainable parameters move into flat buckets; names, shapes and ties stay. Shards
            of ``fully_shard`` keep their storage, and are sent as copies.
        optimizer: any torch optimizer over those parameters, or several, each of which takes one
            step per step of training.
        topology: a string such as ``"lattice(k=4)"``, a Round, a Schedule, or a function that
            returns one for a number of workers. Rounds of a Schedule without a period are compared
            across ranks at every step.
        process_group: the ranks that gossip, as a group or a one-dimensional mesh; all ranks by
            default. Without an initialized process group and without a launcher, this process is
            the only worker. With DDP or FSDP2 inside a node: the ranks that have this rank's place
            in each node.
        within: with DDP inside a node, the ranks that DDP connects. Each exchanges its slice of the
            parameters, so that a node sends one copy of the model instead of one per rank.
        algorithm: what a step does with rounds. ``"awc"``, the default, overlaps the exchange with
            the next step's computation; ``"atc"`` mixes after the update and waits for it; others
            are in ``gossamer.algorithms.ALGORITHMS``.
        order: another spelling of the algorithms ``"awc"`` and ``"atc"``.
        every: steps from one exchange to the next under awc and atc; with ``"complete"`` and atc,
            local SGD.
        gossip_steps: how often ``"atc"`` mixes per step, each time with the step's round.
        control: how far apart workers may be, and the policy that enforces it, such as
            ``"constant(c=0.25)"`` or ``"auto"``; see ``gossamer.consensus``.
        buffers: what happens to running statistics of normalization layers. ``"average"``: they
            are local, and averaged by ``averaged()`` and ``finalize()``; ``"local"``: they are
            never averaged; ``"mix"``: they are mixed at every step, like parameters. Other buffers
            are never changed.
        wire: the format that parameters are sent in: ``"fp32"`` sends them unchanged, ``"bf16"``
            rounded, ``"modulo(bits=8)"`` and ``"modulo(bits=4)"`` a quarter and an eighth of the
            bytes; see ``gossamer.wire``.
        fragments: under awc and atc, split the parameters into this many fragments, and exchange
            one of them at a time, in turn. Divides the bytes of an exchange by this number.
        bucket_mb: size of a bucket in megabytes. By default 25, and 4 for a wire format that
            encodes messages, so that one bucket is encoded while another is in flight.
        norms_every: measure ``last_norms`` once in this many steps, at the last of them that the
            schedule mixes; 0 for never.
        nonfinite_rounds: a rank whose parameters are not finite is left out of rounds, and raises
            after this many in a row; 0 for never.
        on_failure: what happens when a worker is lost: ``"raise"`` on all others, with the cause,
            or ``"continue"`` on the survivors, each from its own parameters. The latter needs a
            store outside of the workers, and a topology for any number of workers.
        timeout: how long a message may take after it has been posted, including the time that
            peers still compute.

    Returns:
        A handle to average parameters, measure consensus, save state, and end gossip.
    """
    preconditions.check_positive("timeout", timeout, timeout > timedelta(0))
    survives = preconditions.to_survival(on_failure)
    group = preconditions.to_group(process_group, model)
    board, joins = late.board_of(group, timeout, survives=survives)
    others = () if joins else (board,)
    with declining_on_error(*others):
        node = Within(preconditions.to_within(within, model, group), timeout)
    # - Parse and check
    with declining_on_error(*others, *node.boards):
        num_workers = late.num_at_start(board) if joins else group.size()
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        chosen = parse_algorithm(algorithm, order)
        format = parse_wire(wire)
        rules = Rules(
            topology, chosen, every, gossip_steps, control, norms_every, fragments, format
        )
        schedule, exchanged = rules.schedule(num_workers), rules.exchanged(num_workers)
        chosen.check_optimizers(optimizers)
        preconditions.check_wrapper(model, group)
        trained = preconditions.trained_parameters(model, optimizers)
        rules.check(num_workers)
        rule = rule_of(buffers)
        chosen.check_statistics(mixed=rule.mixed)
        chosen.check_precision(trained)
        preconditions.check_device(format, trained[0].device)
        size_mb = format.bucket_mb if bucket_mb is None else bucket_mb
        packing = Packing([*locals_of(trained)], size_mb, fragments, every)
        rules.norm_steps(schedule)
        check_limit(nonfinite_rounds)
        limit = chosen.most_nonfinite(nonfinite_rounds)
        if survives:
            preconditions.check_survival(topology, group, trained[0], node.size)
        compares_rounds = rules.compares_rounds(schedule)
        facts = {
            "the version of gossamer": metadata.version("gossamer"),
            late.NUM_WORKERS: str(num_workers),
            "topology": schedule.name,
            "the digest of its rounds": rounds_digest(exchanged),
            "how rounds are compared": "at every step" if compares_rounds else "at the start",
            "algorithm": repr(chosen),
            "gossip_steps": str(gossip_steps),
            "control": name_of(control),
            "buffers": buffers,
            "wire": repr(format),
            "fragments": str(fragments),
            "bucket_mb": str(size_mb),
            "norms_every": str(norms_every),
            "nonfinite_rounds": str(nonfinite_rounds),
            "on_failure": on_failure,
            "the number of optimizers": str(len(optimizers)),
            "the number of ranks within a node": str(node.size),
            **facts_about(model),
            **facts_about_optimizers(model, optimizers),
        }
    # - Compare with all ranks. First within the node: a rank that differs there raises, and must
    #   decline in the handshake between nodes, or the other nodes would wait for it.
    with declining_on_error(*others):
        for inner in node.boards:
            shake_hands(inner, facts | facts_about_bits(model), _ONE_REPLICA)
    facts |= facts_about_shards(model)
    compare_later(board, facts) if joins else shake_hands(board, facts)
    # - Connect, and take over the parameters of rank 0, or of a donor
    members = () if joins else tuple(range(board.size))
    membership = Membership(board.store, board.rank, members, timeout) if survives else None
    with contextlib.ExitStack() as stack, torch.no_grad():
        network = None
        if not joins:
            if membership is None:
                detector = FailureDetector(board)
            else:
                heard = partial(membership.heard, 0, members)
                detector = FailureDetector(board, partial(membership.announce, 0), heard)
            detector.watch()
            stack.enter_context(detector.leaving_on_error())
            rounds = rounds_to_connect(exchanged)
            network = Network(group, detector, trained[0].device, rounds=rounds)
            node.open(trained[0].device)
            for tensor in map(local, (*model.parameters(), *model.buffers())):
                if tensor.numel():
                    network.collectives.broadcast_(tensor)
        replica = Replica(model, trained, rule, packing.bucket_mb, chosen, node)
        for each in optimizers:
            tell_num_workers(each, num_workers)
            advice = advice_on(each, num_workers, overlaps=chosen.overlaps)
            if advice and board.rank == 0:
                _log.info(advice)
        # - Assemble the step, and register its hooks
        everywhere = model.named_parameters(remove_duplicate=False)  # tied ones under all names
        own = {*map(id, trained)}
        names = [name for name, parameter in everywhere if id(parameter) in own]
        maker = EpochMaker(rules, trained, names, optimizers, packing, limit, node)
        donation = Donation(model, optimizers)
        epochs = Epochs(maker, replica, membership, board.store, donation, timeout)
        entry = None
        if network is None:
            entry = epochs.join().entry
        else:
            epochs.begin(maker.make(network, replica, schedule, members))
        guard = Guard(model, optimizers, trained)
        wrappers = WrapperWatch(trained, group)
        step = Step(optimizers, chosen, epochs, guard, wrappers, entry)
        model_state = ModelState(model, epochs.current.network.rank, epochs.current.network.size)
        return Gossip(Worker(replica, step, epochs, model_state, node))
