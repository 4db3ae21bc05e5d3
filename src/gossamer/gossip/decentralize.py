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

import atexit
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from gossamer.errors import UserError
from gossamer.gossip.buckets import flatten_, is_dense, unflatten_
from gossamer.gossip.mixer import Mixer
from gossamer.gossip.transport import ExchangeError, Transport
from gossamer.topology import Round, Schedule, parse, static

_log = logging.getLogger(__name__)

_MARK = "_gossamer"
"""Attribute of a parameter that a gossip mixes."""

_EXIT_WAIT_S = 30.0
"""How long a process that ends without close() stays for its peers."""

_EXIT_WAIT_AFTER_ERROR_S = 3.0

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
    timeout: timedelta = timedelta(minutes=30),
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
        buffers: running statistics of normalization layers are ``"average"``: local, and averaged
            by ``averaged()`` and ``finalize()``; ``"local"``: never touched; or ``"mix"``: mixed
            at every step, as parameters are. Other buffers stay as they are.
        bucket_mb: size of a bucket in megabytes.
        timeout: how long a message may take from when it is begun, the peers' computation included.

    Returns:
        A handle to average, to measure consensus, and to end it.
    """
    group = process_group if process_group is not None else _default_group()
    schedule = _to_schedule(topology, group.size())
    trained = _trained(model, optimizer)
    statistics = _statistics(model)
    chosen_order: _Order = _choose(_ORDERS, order, "order")(gossip_steps)
    policy: _BufferPolicy = _choose(_BUFFERS, buffers, "buffers")
    _check_positive("bucket_mb", bucket_mb, bucket_mb > 0)
    _check_positive("timeout", timeout, timeout > timedelta(0))

    period = schedule.period or 0
    rounds = map(schedule.round, range(period)) if period <= _MOST_ROUNDS_WITH_GROUPS else ()
    transport = Transport(group, trained[0].device, timeout=timeout, rounds=rounds)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            transport.broadcast_(tensor)
        buckets = flatten_(trained, bucket_mb)
        changing = flatten_(statistics, bucket_mb) if policy.mixed else []
    return Gossip(
        optimizer,
        schedule,
        chosen_order,
        Mixer(buckets, transport, changing),
        transport,
        _Tensors(
            trained=trained,
            flattened=[*trained, *statistics] if policy.mixed else trained,
            buckets=buckets,
            statistics=statistics if policy.averaged else [],
            frozen=[p for p in model.parameters() if not p.requires_grad],
        ),
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


class _BufferPolicy(NamedTuple):
    """What happens to running statistics."""

    averaged: bool
    """In ``averaged()`` and ``finalize()``."""

    mixed: bool
    """At every step."""


_BUFFERS: dict[str, _BufferPolicy] = {
    "average": _BufferPolicy(averaged=True, mixed=False),
    "local": _BufferPolicy(averaged=False, mixed=False),
    "mix": _BufferPolicy(averaged=True, mixed=True),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensors:
    """What a gossip looks after."""

    trained: Sequence[Tensor] = ()
    """Parameters that are mixed: views of the buckets."""

    flattened: Sequence[Tensor] = ()
    """All tensors that live in buckets: those, and statistics that are mixed with them."""

    buckets: Sequence[Tensor] = ()
    statistics: Sequence[Tensor] = ()
    """Buffers that are averaged with them."""

    frozen: Sequence[Tensor] = ()
    """Parameters that must stay untrained."""


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
        tensors: _Tensors,
    ) -> None:
        self.schedule = schedule
        self.num_steps = 0
        """Optimizer steps taken so far."""
        self._order = order
        self._mixer = mixer
        self._transport = transport
        self._tensors = tensors
        self._num_parameters = _count_parameters(optimizer)
        for parameter in tensors.trained:
            setattr(parameter, _MARK, True)
        # - Hooks
        untraced: Any = torch.compiler.disable  # where a user compiles the optimizer's step
        self._hooks = [
            optimizer.register_step_pre_hook(untraced(self._before_step)),
            optimizer.register_step_post_hook(untraced(self._after_step)),
        ]
        # Also what keeps this object until close(): its tensors are on the wire.
        atexit.register(self._leave)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far in rounds and averages."""
        return self._transport.bytes_sent

    @property
    def messages_sent(self) -> int:
        """Messages that this rank has sent so far; an all-reduce of g ranks counts as 2(g − 1)."""
        return self._transport.messages_sent

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """Give the model the exact average of all workers; restore it bit for bit at the end.

        A collective call. Needs one more copy of the parameters while it lasts.
        """
        self._mixer.wait()
        tensors = [*self._tensors.buckets, *self._tensors.statistics]
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
        squared = torch.zeros(1, dtype=torch.float64, device=self._tensors.buckets[0].device)
        for flat in self._tensors.buckets:
            mean = flat.float() if flat.element_size() == 2 else flat.clone()
            self._transport.average_(mean)
            squared += torch.linalg.vector_norm(mean.sub_(flat), dtype=torch.float64) ** 2
        self._transport.average_(squared)
        return float(squared.sqrt())

    def finalize(self) -> None:
        """End gossip and leave the exact average in every rank's model. A collective call."""
        self._mixer.wait()
        self._average_()
        self.close()

    def close(self) -> None:
        """End gossip: wait for what is in flight, remove every hook, free all memory.

        Parameters stay as they are, in storage of their own again.
        """
        atexit.unregister(self._leave)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            self._mixer.close()
            self._transport.close()
        finally:
            tensors, self._tensors = self._tensors, _Tensors()
            unflatten_(tensors.flattened)
            for parameter in tensors.trained:
                delattr(parameter, _MARK)

    @torch.no_grad()
    def _average_(self) -> None:
        for flat in self._tensors.buckets:
            self._transport.average_(flat)
        statistics = self._tensors.statistics
        if statistics:
            # Many and small: one message for all of them.
            joined = torch.cat([buffer.flatten() for buffer in statistics])
            self._transport.average_(joined)
            sizes = [buffer.numel() for buffer in statistics]
            for buffer, part in zip(statistics, joined.split(sizes), strict=True):
                buffer.copy_(part.view_as(buffer))

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._check_parameters(optimizer)
        args, kwargs = _evaluate_closure(args, kwargs)
        self._order.before_step(self._mixer)
        return args, kwargs

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._order.after_step(self._mixer, self.schedule, self.num_steps)
        self.num_steps += 1

    def _leave(self) -> None:
        """At the end of a process that did not call close(): give peers what they wait for.

        Also where an exception ends it, for a shorter time: a thread that is woken in Gloo while
        the interpreter shuts down would abort the process.
        """
        if self._mixer.in_flight:
            raised = hasattr(sys, "last_value")
            _log.warning("gossip was not closed; waiting for the exchange in flight")
            waiter = threading.Thread(target=_wait_quietly, args=(self._mixer,), daemon=True)
            waiter.start()
            waiter.join(_EXIT_WAIT_AFTER_ERROR_S if raised else _EXIT_WAIT_S)
        self._transport.keep_connections()

    def _check_parameters(self, optimizer: Optimizer) -> None:
        """Raise where parameters are trained that are not mixed: workers would drift apart."""
        added = _count_parameters(optimizer) - self._num_parameters
        unfrozen = sum(parameter.requires_grad for parameter in self._tensors.frozen)
        if added or unfrozen:
            raise UserError(
                "parameters must be trainable and in the optimizer when decentralize() is called, "
                f"got {unfrozen} unfrozen and {added} added since; close() this gossip and call "
                "decentralize() again"
            )


def _evaluate_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run ``optimizer.step(closure)``'s closure now, so that gradients are those of unmixed x."""
    optimizer, *rest = args
    closure: Callable[[], Any] | None = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        losses = [closure()]

    def evaluated() -> Any:
        if not losses:
            raise UserError(
                "an optimizer must evaluate its closure once per step, got a second call, which "
                "would need gradients at points that other workers do not know; use SGD or Adam"
            )
        return losses.pop()

    return (optimizer, *rest[1:]), {**kwargs, "closure": evaluated}


def _wait_quietly(mixer: Mixer) -> None:
    with contextlib.suppress(ExchangeError):
        mixer.wait()


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


def _trained(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters to mix, after all checks that need no communication."""
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "decentralize takes the place of DistributedDataParallel, got a model wrapped in it; "
            "pass the model itself"
        )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    known = {id(p) for p in named.values()}
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    strangers = sum(id(p) not in known for p in held)
    if not named or strangers:
        raise UserError(
            "the optimizer must hold parameters of the model, and the model trainable ones, got "
            f"{strangers} foreign and {len(named)} trainable parameters; "
            "build the optimizer from this model's parameters()"
        )
    if isinstance(optimizer, LBFGS):
        raise UserError(
            "an optimizer must take one gradient per step, got LBFGS, which evaluates the closure "
            "again at points that other workers do not know; use SGD or Adam"
        )
    devices = sorted({str(p.device) for p in named.values()})
    if len(devices) > 1:
        raise UserError(
            f"all parameters must be on one device, got {devices}; move the model to one of them"
        )
    addresses: set[int] = set()
    for name, parameter in named.items():
        _check_parameter(name, parameter, addresses)
    return list(named.values())


def _check_parameter(name: str, parameter: Tensor, addresses: set[int]) -> None:
    if hasattr(parameter, _MARK):
        raise UserError(
            f"a parameter can gossip once, got {name}, which already does; close() the first gossip"
        )
    if isinstance(parameter, UninitializedParameter):
        raise UserError(
            f"parameters must have a shape, got {name}, which is not initialized; "
            "run the model once before decentralize()"
        )
    if not is_dense(parameter):
        raise UserError(
            f"parameters must occupy their memory without gaps or overlap, got {name} with shape "
            f"{tuple(parameter.shape)} and strides {parameter.stride()}; assign a contiguous copy"
        )
    if parameter.numel() and parameter.data_ptr() in addresses:
        raise UserError(
            f"tied parameters must be one object, got {name}, which shares the memory of another; "
            "assign the parameter itself, as in a.weight = b.weight"
        )
    addresses.add(parameter.data_ptr())


def _statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics of normalization layers."""
    layers = (module for module in model.modules() if isinstance(module, _NormBase))
    buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    return [buffer for buffer in buffers if buffer.is_floating_point()]


def _count_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _choose(table: dict[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise UserError(f"{what} must be one of {', '.join(table)}, got {name!r}")
    return table[name]


def _check_positive(name: str, value: object, positive: bool) -> None:
    if not positive:
        raise UserError(f"{name} must be above 0, got {value}; leave it out for the default")
