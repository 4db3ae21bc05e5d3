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

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import LBFGS, Optimizer

from gossamer.errors import UserError
from gossamer.gossip.buckets import flatten_
from gossamer.gossip.mixer import Mixer
from gossamer.gossip.transport import Transport
from gossamer.topology import Round, Schedule, parse, static

_MOST_ROUNDS_WITH_GROUPS = 64
"""Schedules with a longer period average in groups by messages: a process group costs sockets."""


def decentralize(  # noqa: PLR0913 - one keyword per option
    model: nn.Module,
    optimizer: Optimizer,
    topology: str | Round | Schedule = "one_peer_exponential",
    *,
    process_group: ProcessGroup | None = None,
    order: str = "awc",
    gossip_steps: int = 1,
    buffers: str = "average",
    bucket_mb: float = 25.0,
    timeout: timedelta = timedelta(minutes=5),
) -> Gossip:
    """Make the training loop around this model and optimizer decentralized.

    A collective call: every rank of the group makes it, with the same arguments. Parameters and
    buffers become rank 0's. From then on ``optimizer.step()`` mixes parameters with neighbours.

    Args:
        model: its trainable parameters move into flat buckets; names, shapes and ties stay.
        optimizer: any torch optimizer over those parameters.
        topology: a text such as ``"lattice(k=4)"``, a Round, or a Schedule.
        process_group: the ranks that take part; by default all.
        order: ``"awc"`` hides the exchange behind the next step's computation; ``"atc"`` mixes
            after the update and waits for it.
        gossip_steps: how often ``"atc"`` mixes per step, each time with the step's round.
        buffers: floating-point buffers, such as BatchNorm's statistics, are ``"average"``: local,
            and averaged by ``averaged()`` and ``finalize()``; ``"local"``: never touched; or
            ``"mix"``: mixed at every step, as parameters are.
        bucket_mb: size of a bucket in megabytes.
        timeout: how long any single wait for a peer may take.

    Returns:
        A handle to average, to measure consensus, and to end it.
    """
    group = process_group if process_group is not None else _default_group()
    schedule = _to_schedule(topology, group.size())
    parameters = _trainable(model, optimizer)
    statistics = [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]
    chosen_order: _Order = _choose(_ORDERS, order, "order")(gossip_steps)
    averaged, mixed = _choose(_BUFFERS, buffers, "buffers")
    _check_positive("bucket_mb", bucket_mb, bucket_mb > 0)
    _check_positive("timeout", timeout, timeout > timedelta(0))

    period = schedule.period or 0
    rounds = map(schedule.round, range(period)) if period <= _MOST_ROUNDS_WITH_GROUPS else ()
    transport = Transport(group, parameters[0][1].device, timeout=timeout, rounds=rounds)
    buckets = flatten_(parameters, bucket_mb)
    changing = flatten_(statistics, bucket_mb) if mixed else []
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    for tensor in (*(bucket.flat for bucket in buckets), *frozen, *model.buffers()):
        transport.broadcast_(tensor)
    return Gossip(
        optimizer,
        schedule,
        chosen_order,
        Mixer(buckets, transport, changing),
        transport,
        parameters=[bucket.flat for bucket in buckets],
        buffers=[tensor for _, tensor in statistics] if averaged else [],
    )


class _Order(Protocol):
    """When mixing happens around an optimizer's step."""

    def before_step(self, mixer: Mixer) -> None: ...

    def after_step(self, mixer: Mixer, schedule: Schedule, step: int) -> None: ...


@final
class _AdaptWhileCombine:
    def __init__(self, gossip_steps: int) -> None:
        if gossip_steps != 1:
            raise UserError(
                f"awc mixes once per step, while the gradient is computed, got gossip_steps="
                f"{gossip_steps}; use order='atc', or a denser topology"
            )

    def before_step(self, mixer: Mixer) -> None:
        if mixer.in_flight:
            mixer.finish()

    def after_step(self, mixer: Mixer, schedule: Schedule, step: int) -> None:
        mixer.start(schedule.round(step + 1))


@final
class _AdaptThenCombine:
    def __init__(self, gossip_steps: int) -> None:
        _check_positive("gossip_steps", gossip_steps, gossip_steps > 0)
        self._gossip_steps = gossip_steps

    def before_step(self, mixer: Mixer) -> None:
        pass

    def after_step(self, mixer: Mixer, schedule: Schedule, step: int) -> None:
        for _ in range(self._gossip_steps):
            mixer.start(schedule.round(step))
            mixer.finish()


_ORDERS: dict[str, Callable[[int], _Order]] = {
    "awc": _AdaptWhileCombine,
    "atc": _AdaptThenCombine,
}

_BUFFERS: dict[str, tuple[bool, bool]] = {
    # averaged at evaluation, mixed at every step
    "average": (True, False),
    "local": (False, False),
    "mix": (True, True),
}


@final
class Gossip:
    """A training loop that gossips; made by ``decentralize``.

    Between two steps under awc the parameters are what is being sent, so they must not change;
    ``averaged()`` takes care of that by itself.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        order: _Order,
        mixer: Mixer,
        transport: Transport,
        *,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        self.schedule = schedule
        self.step = 0
        """Optimizer steps taken so far."""
        self._order = order
        self._mixer = mixer
        self._transport = transport
        self._parameters = parameters
        self._buffers = buffers
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far, averages and broadcasts included."""
        return self._transport.bytes_sent

    @property
    def messages_sent(self) -> int:
        """Messages that this rank has sent so far; an all-reduce of g ranks counts as 2(g − 1)."""
        return self._transport.messages_sent

    @contextmanager
    def averaged(self) -> Generator[None]:
        """Give the model the exact average of all workers; restore it bit for bit at the end.

        A collective call. Needs one more copy of the parameters while it lasts.
        """
        self._mixer.wait()
        tensors = [*self._parameters, *self._buffers]
        with torch.no_grad():
            saved = [tensor.clone() for tensor in tensors]
        try:
            self._average_()
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, saved, strict=True):
                    tensor.copy_(before)

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return Ξ, with Ξ² = (1/n) Σ_i ‖x̄ − x_i‖², over all parameters. A collective call."""
        self._mixer.wait()
        squared = torch.zeros(1, dtype=torch.float64, device=self._parameters[0].device)
        for flat in self._parameters:
            mean = flat.clone()
            self._transport.average_(mean)
            squared += mean.sub_(flat).double().square().sum()
        self._transport.average_(squared)
        return float(squared.sqrt())

    def finalize(self) -> None:
        """End gossip and leave the exact average in every rank's model. A collective call."""
        self._mixer.wait()
        self._average_()
        self.close()

    def close(self) -> None:
        """End gossip: remove every hook, keep the parameters as they are."""
        self._mixer.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._transport.close()

    @torch.no_grad()
    def _average_(self) -> None:
        for flat in self._parameters:
            self._transport.average_(flat)
        if self._buffers:
            # Many and small: one message for all of them.
            joined = torch.cat([buffer.flatten() for buffer in self._buffers])
            self._transport.average_(joined)
            sizes = [buffer.numel() for buffer in self._buffers]
            for buffer, part in zip(self._buffers, joined.split(sizes), strict=True):
                buffer.copy_(part.view_as(buffer))

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = _evaluate_closure(args, kwargs)
        self._order.before_step(self._mixer)
        return args, kwargs

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._order.after_step(self._mixer, self.schedule, self.step)
        self.step += 1


def _evaluate_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run ``optimizer.step(closure)``'s closure now, so that gradients are those of unmixed x."""
    optimizer, *rest = args
    closure: Callable[[], Any] | None = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (optimizer,), {**kwargs, "closure": lambda: loss}


def _default_group() -> ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "decentralize needs a process group, and none is initialized; call "
            "torch.distributed.init_process_group() under torchrun, or pass process_group="
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _to_schedule(topology: str | Round | Schedule, num_workers: int) -> Schedule:
    if isinstance(topology, str):
        return parse(topology, num_workers)
    schedule = static(topology) if isinstance(topology, Round) else topology
    if schedule.num_workers != num_workers:
        raise UserError(
            f"the topology must be on the {num_workers} ranks of the process group, got one on "
            f"{schedule.num_workers} workers; build it for {num_workers}"
        )
    return schedule


def _trainable(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """Return the named parameters to mix, after a check that the optimizer holds no others."""
    parameters: list[tuple[str, Tensor]] = [
        (name, p) for name, p in model.named_parameters() if p.requires_grad
    ]
    known = {id(p) for _, p in parameters}
    strangers = sum(
        id(p) not in known and p.requires_grad
        for group in optimizer.param_groups
        for p in group["params"]
    )
    if not parameters or strangers:
        raise UserError(
            "the optimizer must hold parameters of the model, and the model trainable ones, got "
            f"{strangers} foreign and {len(parameters)} trainable parameters; "
            "build the optimizer from this model's parameters()"
        )
    if isinstance(optimizer, LBFGS):
        raise UserError(
            "an optimizer must take one gradient per step, got LBFGS, which evaluates the closure "
            "again at points that other workers do not know; use SGD, Adam or another"
        )
    devices = {p.device for _, p in parameters}
    if len(devices) > 1:
        raise UserError(
            f"all parameters must be on one device, got {sorted(map(str, devices))}; "
            "move the model to one of them"
        )
    return parameters


def _choose(table: dict[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise UserError(f"{what} must be one of {', '.join(table)}, got {name!r}")
    return table[name]


def _check_positive(name: str, value: object, positive: bool) -> None:
    if not positive:
        raise UserError(f"{name} must be above 0, got {value}; leave it out for the default")
