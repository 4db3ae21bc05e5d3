"""The public verb: hooks that turn an optimizer's step into a step of decentralized training.

The user's loop stays as it is. Around ``optimizer.step()``, at step t:

    awc (adapt while combine)              atc (adapt then combine)
    1. finish the exchange of x_t, mix     1. optimizer step
    2. optimizer step                      2. exchange and mix, as often as asked
    3. start the exchange of x_{t+1}

    x_{t+1} = Opt(W_t x_t; g(x_t))         x_{t+1} = W_t Opt(x_t; g(x_t))

Under awc the exchange has the whole next forward and backward pass to hide in, and the gradient was
taken at the unmixed parameters. All workers start equal, so awc's step 0 has nothing to mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib import metadata

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gossamer.consensus import Control, Target, check_interval, name_of, planner
from gossamer.errors import UserError
from gossamer.gossip import parameters
from gossamer.gossip.agreement import agree, decline
from gossamer.gossip.buckets import flatten_
from gossamer.gossip.bulletin import Bulletin
from gossamer.gossip.handle import Gossip, Tensors
from gossamer.gossip.meter import RankMeter
from gossamer.gossip.mixer import Mixer
from gossamer.gossip.orders import ORDERS
from gossamer.gossip.transport import Transport
from gossamer.statistics import policy_of, running_statistics
from gossamer.topology import Round, Schedule, as_schedule
from gossamer.topology.round import digest_of

_MOST_ROUNDS_WITH_GROUPS = 64
"""Schedules with a longer period average in groups by messages: a process group costs sockets."""

_ROUNDS_COMPARED = 16
"""How many rounds of a schedule without a period all ranks compare at the start."""


def decentralize(  # noqa: PLR0913 - one keyword per option
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    topology: str | Round | Schedule = "one_peer_exponential",
    *,
    process_group: ProcessGroup | DeviceMesh | None = None,
    order: str = "awc",
    gossip_steps: int = 1,
    control: str | Control | Target = "plain",
    buffers: str = "average",
    bucket_mb: float = 25.0,
    norms_every: int = 0,
    timeout: timedelta = timedelta(minutes=30),
) -> Gossip:
    """Make the training loop around this model and optimizer decentralized.

    A collective call: every rank of the group makes it, with the same arguments, which is checked
    before anything is sent. Parameters and buffers become rank 0's. From then on
    ``optimizer.step()`` mixes parameters with neighbours.

    Args:
        model: its trainable parameters move into flat buckets; names, shapes and ties stay.
        optimizer: any torch optimizer over those parameters, or several, which each take one step
            per step of training.
        topology: a text such as ``"lattice(k=4)"``, a Round, or a Schedule. Rounds of a Schedule
            without a period are compared across ranks at every step.
        process_group: the ranks that take part, as a group or a mesh of one dimension; by default
            all. With DDP inside a node: the ranks with this rank's place in each node.
        order: ``"awc"`` hides the exchange behind the next step's computation; ``"atc"`` mixes
            after the update and waits for it.
        gossip_steps: how often ``"atc"`` mixes per step, each time with the step's round.
        control: how far apart workers may be and what is done about it, such as
            ``"constant(c=0.25)"`` or ``"auto"``; see ``gossamer.consensus``.
        buffers: running statistics of normalization layers are ``"average"``: local, and averaged
            by ``averaged()`` and ``finalize()``; ``"local"``: never touched; or ``"mix"``: mixed
            at every step, as parameters are. Other buffers stay as they are.
        bucket_mb: size of a bucket in megabytes.
        norms_every: every so many steps ``last_norms`` is measured; 0 for never.
        timeout: how long a message may take from when it is begun, the peers' computation included.

    Returns:
        A handle to average, to measure consensus, to save, and to end it.
    """
    _check_positive("timeout", timeout, timeout > timedelta(0))
    group = _to_group(process_group)
    bulletin = Bulletin(group, timeout)
    try:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        schedule = as_schedule(topology, group.size())
        parameters.check_wrapper(model, group)
        trained = parameters.trained(model, optimizers)
        make_plan = planner(control, schedule, order, gossip_steps)
        policy = policy_of(buffers)
        _check_positive("bucket_mb", bucket_mb, bucket_mb > 0)
        check_interval(norms_every)
        # A text means the same on all ranks; a function need not.
        compares_rounds = isinstance(topology, Schedule) and schedule.period is None
        facts = {
            "the version of gossamer": metadata.version("gossamer"),
            "topology": schedule.name,
            "the digest of its rounds": _digest_of(schedule),
            "how rounds are compared": "at every step" if compares_rounds else "at the start",
            "order": order,
            "gossip_steps": str(gossip_steps),
            "control": name_of(control),
            "buffers": buffers,
            "bucket_mb": str(bucket_mb),
            "norms_every": str(norms_every),
            "the number of optimizers": str(len(optimizers)),
            **parameters.facts_about(model),
        }
    except Exception as error:
        decline(bulletin, error)
        raise
    agree(bulletin, facts)
    bulletin.watch()

    with bulletin.leaving_on_error(), torch.no_grad():
        period = schedule.period or 0
        rounds = map(schedule.round, range(period)) if period <= _MOST_ROUNDS_WITH_GROUPS else ()
        transport = Transport(group, bulletin, trained[0].device, rounds=rounds)
        for tensor in (*model.parameters(), *model.buffers()):
            transport.broadcast_(tensor)
        statistics = list(running_statistics(model).values())
        buckets = flatten_(trained, bucket_mb)
        changing = flatten_(statistics, bucket_mb) if policy.mixed else []
    meter = RankMeter(trained, optimizers, transport)
    return Gossip(
        optimizers,
        schedule,
        ORDERS[order],
        make_plan(meter),
        meter,
        Mixer(buckets, transport, bulletin, changing, compares_rounds=compares_rounds),
        transport,
        bulletin,
        parameters.Guard(model, optimizers, trained),
        Tensors(
            trained=trained,
            flattened=[*trained, *statistics] if policy.mixed else trained,
            buckets=buckets,
            statistics=statistics if policy.averaged else [],
        ),
        norms_every,
    )


def _to_group(process_group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise UserError(
                f"a mesh must have one dimension, got {process_group.ndim}; pass the part along "
                "which replicas differ, as in mesh['replica']"
            )
        return process_group.get_group()
    if process_group is not None:
        return process_group
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "decentralize needs a process group, and none is initialized; call "
            "torch.distributed.init_process_group() under torchrun, or pass process_group="
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _digest_of(schedule: Schedule) -> str:
    """Return a short text that differs where rounds do, as far as all ranks compare them."""
    num_rounds = min(schedule.period or _ROUNDS_COMPARED, _MOST_ROUNDS_WITH_GROUPS)
    return digest_of(map(schedule.round, range(num_rounds)))[:8]


def _check_positive(name: str, value: object, positive: bool) -> None:
    if not positive:
        raise UserError(f"{name} must be above 0, got {value}; leave it out for the default")
