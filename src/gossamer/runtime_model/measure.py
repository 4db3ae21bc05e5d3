"""Measure a training loop: two lines in a user's script, or a built-in workload.

Hooks record when passes, gradients and updates begin and end; the loop is unchanged. After some
steps the times of all ranks are gathered and rank 0 writes the profile.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer
from torch.utils.hooks import RemovableHandle

from gossamer.engine.batches import Batches
from gossamer.engine.spec import RunSpec
from gossamer.errors import UserError
from gossamer.gossip import Gossip, decentralize
from gossamer.optim.local_adam import LocalAdam
from gossamer.runtime_model.links import measure_network
from gossamer.runtime_model.presets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from gossamer.runtime_model.profile import (
    TRANSFORMER_ADAM,
    Bucket,
    Hooks,
    Profile,
    write_profile,
)

_log = logging.getLogger(__name__)

_MOST_FACTORS = 2000
_PASSES = 5
_WARMUP = 5
_TINY_STEPS = 40


def measure(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | Path,
    *,
    steps: int = 30,
    warmup: int = _WARMUP,
    name: str = "",
    process_group: ProcessGroup | None = None,
) -> None:
    """Measure the training loop around this model, and write its profile.

    A collective: every rank must call it, after the optimizer is built and before ``decentralize``.
    The links are measured in the call, compute during the following ``warmup + steps`` optimizer
    steps. Then rank 0 writes the file, the hooks are removed and training continues.

    Args:
        model: what is trained, in DDP or not; the loop calls it, or a wrapper of it.
        optimizer: its optimizer; or several, which each take one step per step of training.
        path: where rank 0 writes the profile.
        steps: how many steps are measured.
        warmup: steps before those.
        name: what the profile is called; by default the class of the model.
        process_group: the ranks that take part; by default all.
    """
    if steps < 2 or warmup < 1:
        raise UserError(
            f"a profile needs 2 steps and 1 of warm-up, got {steps} and {warmup}; "
            "30 and 5 are the default"
        )
    group = _group(process_group)
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UserError("a profile needs a model that trains, got one without trainable parameters")
    network, pairs = measure_network(group, _workers_per_node(group.size()), trained[0].device)
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "platform": platform.machine(),
        "backend": str(dist.get_backend(group)),
    }
    draft = {
        "name": name or type(model).__name__,
        "kind": kind_of(model, optimizer),
        "workers": group.size(),
        "network": network,
        "hooks": _measure_hooks(group, trained[0].device),
        "pairs": pairs,
        "environment": environment,
    }
    _Stopwatch(model, optimizer, trained, warmup, steps, partial(_finish, group, draft, Path(path)))


def kind_of(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> str:
    """Return which of ``profile.KINDS`` a model and its optimizer are; an empty string for others.

    A transformer has an ``nn.MultiheadAttention``, or a module with "Attention" in its class name.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    attends = any(
        isinstance(module, nn.MultiheadAttention) or "Attention" in type(module).__name__
        for module in model.modules()
    )
    by_adam = all(isinstance(each, Adam | LocalAdam) for each in optimizers)
    return TRANSFORMER_ADAM if attends and by_adam else ""


@final
@dataclass(slots=True)
class _StepTimes:
    """When the parts of one step began and ended."""

    previous_end: float
    forward_start: float = 0.0
    forward_end: float = 0.0
    ready: dict[int, float] = field(default_factory=dict[int, float])
    """When each parameter's gradient was complete."""

    called: float = 0.0
    """When the optimizer's step was called, before any other hook."""

    update_start: float = 0.0
    update_end: float = 0.0
    under_ddp: bool = False
    """Whether the time before the call includes waiting for an all-reduce."""


@final
class _Stopwatch:
    """Hooks that time steps, and remove themselves after the last measured one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        trained: list[Tensor],
        warmup: int,
        steps: int,
        finish: Callable[[list[Tensor], list[_StepTimes]], None],
    ) -> None:
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        self._trained = trained
        self._warmup, self._num_steps, self._finish = warmup, warmup + steps, finish
        atexit.register(self._warn)
        self._synchronize = trained[0].device.type != "cpu"
        self._steps: list[_StepTimes] = []
        self._now = _StepTimes(self._clock())
        self._hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._forward_starts),
            model.register_forward_hook(self._forward_ends),
            self._optimizers[0].register_step_pre_hook(self._step_called),
            self._optimizers[-1].register_step_post_hook(self._update_ends),
        ]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
            for index, parameter in enumerate(trained)
        ]
        self._late: RemovableHandle | None = None

    def _clock(self) -> float:
        if self._synchronize:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _forward_starts(self, *_: Any) -> None:
        if self._done:
            # Not in the step's hook: an optimizer iterates over its hooks while they run.
            for hook in self._hooks:
                hook.remove()
            return
        if not torch.is_grad_enabled():  # an evaluation
            return
        if self._late is None:
            # Registered late, so that it runs after the hook in which gossip waits and mixes.
            self._late = self._optimizers[0].register_step_pre_hook(self._update_starts)
            self._hooks.append(self._late)
        ddp = DistributedDataParallel._get_active_ddp_module()  # pyright: ignore[reportPrivateUsage]
        self._now.under_ddp = ddp is not None or isinstance(self._model, DistributedDataParallel)
        if self._now.forward_start == 0:  # the first of several, where gradients accumulate
            self._now.forward_start = self._clock()

    def _forward_ends(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._now.forward_end = self._clock()

    def _ready(self, index: int, _: Tensor) -> None:
        self._now.ready[index] = self._clock()

    def _step_called(self, *_: Any) -> None:
        self._now.called = self._clock()

    def _update_starts(self, *_: Any) -> None:
        self._now.update_start = self._clock()

    def _update_ends(self, *_: Any) -> None:
        if self._done:
            return
        self._now.update_end = self._clock()
        if self._now.ready and self._now.forward_start:
            self._steps.append(self._now)
        self._now = _StepTimes(self._clock())
        if self._done:
            atexit.unregister(self._warn)
            self._finish(self._trained, self._steps[self._warmup :])

    @property
    def _done(self) -> bool:
        return len(self._steps) == self._num_steps

    def _warn(self) -> None:
        _log.warning(
            "no profile was written: it needs %d steps of the optimizer, warm-up included, got %d; "
            "train for longer, or pass a smaller steps=",
            self._num_steps,
            len(self._steps),
        )


def _finish(
    group: ProcessGroup,
    draft: dict[str, Any],
    path: Path,
    trained: list[Tensor],
    steps: list[_StepTimes],
) -> None:
    """Gather all ranks' times and write the profile; a collective."""
    # Rank 0's buckets on all ranks. Parameters without a gradient come last: they are sent, too.
    ready = steps[-1].ready
    order = sorted(range(len(trained)), key=lambda index: ready.get(index, math.inf))
    chosen = [_assign(order, trained)]
    dist.broadcast_object_list(chosen, group=group, group_src=0)
    parts = chosen[0]
    own = {
        "times": [_times(step, parts) for step in steps],
        "mix_s": _mix_s(sum(p.nbytes for p in trained), trained[0].device),
    }
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    if group.rank() != 0:
        return
    rows = [row for rank in gathered for row in rank["times"]]
    other, forward, update, *backward = (
        statistics.fmean(column) for column in zip(*rows, strict=True)
    )
    factors = _factors([[row[1] + sum(row[3:]) for row in rank["times"]] for rank in gathered])
    sizes = [sum(trained[index].nbytes for index in part) for part in parts]
    profile = Profile(
        **draft,
        forward_s=forward,
        other_s=other,
        buckets=tuple(
            Bucket(num_bytes=size, backward_s=seconds, update_s=update * size / sum(sizes))
            for size, seconds in zip(sizes, backward, strict=True)
        ),
        mix_s=statistics.fmean(rank["mix_s"] for rank in gathered),
        variance=statistics.pvariance(factors),
        factors=tuple(factors[:: -(-len(factors) // _MOST_FACTORS)]),
    )
    write_profile(profile, path)


def _factors(computed: list[list[float]]) -> list[float]:
    """Return the normalized compute time of each rank's steps: mean 1, the variation across ranks.

    A step that is long or short on all ranks, such as the last of an epoch, causes no waiting, so
    times are divided by the mean over ranks of the same step. As that mean includes the rank
    itself, deviations are scaled up by √(n / (n − 1)).
    """
    scale = math.sqrt(len(computed) / (len(computed) - 1))
    factors = [
        max(0.01, 1 + scale * (value / statistics.fmean(of_step) - 1))
        for of_step in zip(*computed, strict=True)
        for value in of_step
    ]
    mean = statistics.fmean(factors)
    return [factor / mean for factor in factors]


def _times(step: _StepTimes, parts: list[list[int]]) -> list[float]:
    """Return other, forward, update, and the backward pass of each bucket."""
    ends = [max(step.ready.get(index, 0.0) for index in part) for part in parts]
    backward: list[float] = []
    before = step.forward_end
    for end in ends:
        backward.append(max(0.0, end - before))
        before = max(before, end)
    # The time after the last gradient is clipping, but under DDP mostly waiting.
    after = 0.0 if step.under_ddp else max(0.0, step.called - before)
    return [
        step.forward_start - step.previous_end + after,
        step.forward_end - step.forward_start,
        step.update_end - (step.update_start or step.called),
        *backward,
    ]


def _assign(order: list[int], trained: list[Tensor]) -> list[list[int]]:
    """Return DDP's buckets: filled in the order of gradients, the first one small."""
    parts: list[list[int]] = [[]]
    size, limit = 0, FIRST_BUCKET_BYTES
    for index in order:
        if size >= limit:
            parts.append([])
            size, limit = 0, BUCKET_BYTES
        parts[-1].append(index)
        size += trained[index].nbytes
    return parts


def _mix_s(num_bytes: int, device: torch.device) -> float:
    own, other = (torch.zeros(num_bytes // 4, device=device) for _ in range(2))
    took: list[float] = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        own.lerp_(other, 0.5)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _measure_hooks(group: ProcessGroup, device: torch.device) -> Hooks:
    """Return the overhead of each method's hooks: CPU time of steps on a tiny model.

    CPU time of the training thread, not wall time: such a step mostly waits for its messages, which
    the model counts already.
    """

    def step_s(wrap: Callable[[nn.Module, Optimizer], nn.Module]) -> float:
        own = nn.Linear(1, 1).to(device)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.0)
        model, inputs = wrap(own, optimizer), torch.ones(1, 1, device=device)
        took: list[float] = []
        for _ in range(_TINY_STEPS):
            began = time.thread_time()
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            took.append(time.thread_time() - began)
        return statistics.median(took)

    def gossiping(model: nn.Module, optimizer: Optimizer) -> nn.Module:
        handles.append(decentralize(model, optimizer, process_group=group))
        return model

    handles: list[Gossip] = []
    alone_s = step_s(lambda model, optimizer: model)
    ddp_s = step_s(lambda model, optimizer: DistributedDataParallel(model, process_group=group))
    gossip_s = step_s(gossiping)
    for handle in handles:
        handle.close()
    return Hooks(ddp_s=max(0.0, ddp_s - alone_s), gossip_s=max(0.0, gossip_s - alone_s))


def _group(process_group: ProcessGroup | None) -> ProcessGroup:
    group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is None or group.size() < 2:
        raise UserError(
            "a profile needs the links between two or more ranks, got "
            f"{'one rank' if group else 'no process group'}; start the script with torchrun or "
            "gossamer lab, and call init_process_group() first"
        )
    return group


def _workers_per_node(size: int) -> int:
    """Return how many consecutive ranks share a node, by torchrun's environment."""
    given = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if given >= size:
        return size
    return given if size % given == 0 else 1


def measure_workload(name: str, path: Path, steps: int) -> None:
    """Train a built-in workload without communication and write its profile; under torchrun."""
    if "RANK" not in os.environ:
        raise UserError(
            "profiling a workload needs several ranks, got one process; start it with torchrun "
            "--nproc-per-node 4 -m gossamer profile ..., or on slow links with gossamer lab -- ..."
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = RunSpec(
        workload=name, workers=dist.get_world_size(), epochs=1, steps_per_epoch=_WARMUP + steps
    )
    workload, model = spec.make_workload(), spec.make_model()
    batches = Batches(spec, [dist.get_rank()])
    optimizer = spec.make_optimizer(model.parameters())
    measure(model, optimizer, path, name=name, steps=steps)
    for step, samples in enumerate(batches.draw(epoch=0)[0]):
        inputs, targets = batches.fetch(samples[None], step)
        optimizer.zero_grad()
        workload.loss(model(inputs[0]), targets[0]).backward()
        optimizer.step()
    dist.barrier()  # a rank that exits first would break connections in use
    dist.destroy_process_group()
