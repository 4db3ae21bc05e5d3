"""W workers of decentralized training in one process, as stacked tensors.

One step is the specification that a distributed run is equal to, worker by worker:

    awc (adapt while combine)              atc (adapt then combine)
    1. gradient at x_t                     1. gradient at x_t
    2. mix x_t with W_t                    2. optimizer step
    3. optimizer step                      3. mix with W_t, as often as asked

    x_{t+1} = Opt(W_t x_t; g(x_t))         x_{t+1} = W_t Opt(x_t; g(x_t))

All workers start equal, so awc's step 0 has nothing to mix.
"""

# W: workers, N: numbers per worker

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.consensus import (
    Control,
    Decision,
    Gathered,
    Sketch,
    Target,
    check_interval,
    consensus_distance,
    planner,
    tensor_norms,
)
from gossamer.errors import UserError
from gossamer.simulate.batches import check_workers, select
from gossamer.simulate.gradients import Evaluate, Loss, Part, PerWorker
from gossamer.simulate.memory import room
from gossamer.simulate.mixing import check_round, mix_
from gossamer.simulate.update import (
    MakeOptimizer,
    is_elementwise,
    make_update,
    state_bytes,
    trained_parameters,
)
from gossamer.statistics import policy_of, running_statistics
from gossamer.topology import Round, Schedule, as_schedule
from gossamer.topology.round import FloatArray


@final
class Simulation:
    """Decentralized training of W virtual workers; equal to ``decentralize`` on W ranks.

    Args:
        model: a template, not modified; every worker starts from its parameters and buffers.
        loss: loss(output, target), a scalar: the mean over one worker's batch.
        optimizer: from a list of parameters to any torch optimizer that takes one gradient per
            step, such as ``lambda params: torch.optim.SGD(params, lr=0.1)``.
        workers: how many.
        topology: a text such as ``"lattice(k=4)"``, a Round, or a Schedule.
        order: ``"awc"`` mixes while the gradient is computed, ``"atc"`` after the update.
        gossip_steps: how often ``"atc"`` mixes per step, each time with the step's round.
        control: how far apart workers may be and what is done about it, as in ``decentralize``.
        buffers: running statistics of normalization layers are ``"average"``: each worker's own,
            and averaged by ``average()``; ``"local"``: each worker's own, and worker 0's in
            ``average()``; or ``"mix"``: mixed at every step, as parameters are.
        dtype: of parameters, and of floating-point inputs.
        seed: of what forward passes draw; see ``worker_seed``.
        memory_gb: most memory for parameters, gradients, optimizer state and activations; by
            default what is free. Workers are computed in chunks that keep to it.
        gradients: ``"vmap"`` computes workers together, ``"loop"`` one after the other;
            ``"auto"`` times both in the first steps and keeps the faster. They agree to rounding.
        norms_every: every so many steps ``last_norms`` is measured; 0 for never.
    """

    def __init__(  # noqa: PLR0913 - one keyword per option
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: MakeOptimizer,
        workers: int,
        topology: str | Round | Schedule = "one_peer_exponential",
        order: str = "awc",
        *,
        gossip_steps: int = 1,
        control: str | Control | Target = "plain",
        buffers: str = "average",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        memory_gb: float | None = None,
        gradients: str = "auto",
        norms_every: int = 0,
    ) -> None:
        self.schedule = as_schedule(topology, workers)
        self.num_steps = 0
        """Steps taken so far."""
        make_plan = planner(control, self.schedule, order, gossip_steps)
        self._mix_and_update = (
            self._adapt_while_combine if order == "awc" else self._adapt_then_combine
        )
        self._policy = policy_of(buffers)

        # - One worker
        self._model = copy.deepcopy(model).to(dtype)
        trained = trained_parameters(self._model)
        state = _bytes(self._model.buffers()) + state_bytes(optimizer, trained.values())
        left = room(memory_gb, _bytes(trained.values()), state, num_workers=workers)
        elementwise = is_elementwise(optimizer, trained.values())

        # - All workers
        self._parameters = {name: nn.Parameter(_stack(p, workers)) for name, p in trained.items()}
        self._buffers = {name: _stack(b, workers) for name, b in self._model.named_buffers()}
        self._statistics = [self._buffers[name] for name in running_statistics(self._model)]
        self._update = make_update(optimizer, list(self._parameters.values()), elementwise)
        self._per_worker = PerWorker(
            self._model,
            loss,
            num_workers=workers,
            seed=seed,
            method=gradients,
            room=left,
        )
        self._next_rounds: tuple[Round, ...] = ()
        """What awc's next step mixes with."""
        self._meter = _Meter(self._parameters, self._update.optimizer)
        self._plan = make_plan(self._meter)
        self._norms_every = check_interval(norms_every)
        self.last_norms: FloatArray | None = None
        """L2 norms [T, W] of every parameter tensor of every worker, after an update and before it
        is mixed, as DBench correlates them; of the last step that measured them."""
        self._copies_sent: npt.NDArray[np.float64] = np.zeros(workers)
        self._messages_sent: npt.NDArray[np.int64] = np.zeros(workers, np.int64)

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self.schedule.num_workers

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All workers' parameters by name, [W, ...]: the tensors themselves, no copies."""
        return {name: p.detach() for name, p in self._parameters.items()}

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, for learning-rate schedulers; its settings hold for all workers."""
        return self._update.optimizer

    @property
    def decision(self) -> Decision | None:
        """What the control decided last: rounds, the estimated distance and its target."""
        return self._plan.decision

    @property
    def bytes_sent(self) -> npt.NDArray[np.float64]:
        """Bytes that each worker would have sent so far for its parameters, [W]."""
        return self._copies_sent * (_bytes(self._parameters.values()) / self.num_workers)

    @property
    def messages_sent(self) -> npt.NDArray[np.int64]:
        """Messages that each worker would have sent so far, one bucket for all parameters, [W]."""
        return self._messages_sent.copy()

    def step(self, inputs: Any, targets: Any, round: Round | None = None) -> Tensor:
        """Train all workers for one step.

        Args:
            inputs: a tensor [W, B, ...] for ``model(x)``, a tuple of them for ``model(*x)``, or a
                dict for ``model(**x)``.
            targets: what the loss gets as its second argument, with the same leading dimension.
            round: what to mix with in place of the schedule's round of this step.

        Returns:
            Each worker's loss before the step, [W].
        """
        if round is not None:
            check_round(round, self.num_workers)
        # What neighbours get of statistics that are mixed while forward passes change them.
        sent = [s.clone() for s in self._statistics] if self._policy.mixed else []
        losses = self._gradient(inputs, targets)
        self._plan.before_update(self.num_steps)
        self._mix_and_update(round, sent)
        self.num_steps += 1
        return losses

    def _adapt_while_combine(self, given: Round | None, sent: list[Tensor]) -> None:
        rounds = self._next_rounds if given is None else (given,)
        for round in rounds if self.num_steps > 0 else ():
            self._mix(round, sent)
        self._update_and_measure()
        self._next_rounds = self._plan.rounds(self.num_steps + 1)

    def _adapt_then_combine(self, given: Round | None, sent: list[Tensor]) -> None:
        self._update_and_measure()
        for round in self._plan.rounds(self.num_steps) if given is None else (given,):
            self._mix(round)

    def _update_and_measure(self) -> None:
        self._update.step()
        if self._norms_every and (self.num_steps + 1) % self._norms_every == 0:
            self.last_norms = tensor_norms([*self._parameters.values()])

    def _gradient(self, inputs: Any, targets: Any) -> Tensor:
        """Compute each worker's loss and gradient at its own parameters; return the losses."""
        check_workers(inputs, "inputs", self.num_workers)
        check_workers(targets, "targets", self.num_workers)
        first = next(iter(self._parameters.values()))
        losses_W = torch.empty(self.num_workers, dtype=first.dtype, device=first.device)
        used: set[str] = set()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)

        def backward(index: int | slice, evaluate: Evaluate) -> None:
            leaves = {n: p.detach()[index].requires_grad_() for n, p in self._parameters.items()}
            given = {name: buffer[index] for name, buffer in self._buffers.items()}
            buffers = dict(given)
            x, y = select(inputs, index, first.dtype), select(targets, index, first.dtype)
            into = {n: cast("Tensor", p.grad)[index] for n, p in self._parameters.items()}
            losses = evaluate(Part(leaves, buffers, x, y, into))
            losses_W[index] = losses.detach()
            grads: Any = torch.autograd.grad(
                losses, tuple(leaves.values()), torch.ones_like(losses), allow_unused=True
            )
            for name, grad in zip(leaves, grads, strict=True):
                if grad is None:  # some other worker may have used it
                    into[name].zero_()
                    continue
                used.add(name)
                if grad is not into[name]:
                    into[name].copy_(grad.to_dense() if grad.is_sparse else grad)
            for name, buffer in self._buffers.items():
                # Not before the backward pass, which may need the old ones.
                if buffers[name] is not given[name]:
                    buffer[index] = buffers[name]

        self._per_worker.run(self.num_steps, self._buffers, backward)
        for name in self._parameters.keys() - used:  # as in torch: an optimizer leaves it alone
            self._parameters[name].grad = None
        return losses_W

    def _mix(self, round: Round, sent: Sequence[Tensor] = ()) -> None:
        """Mix all parameters with a round, and statistics where they are mixed.

        Args:
            round: on as many workers.
            sent: statistics as neighbours get them, one per statistic; by default as they are.
        """
        for parameter in self._parameters.values():
            mix_(parameter, round)
        if self._policy.mixed:
            own_W = torch.from_numpy(round.matrix().diagonal())
            for now, before in zip(self._statistics, sent or self._statistics, strict=True):
                # (W s)_i, except that a worker's own weight is on its current value.
                own = own_W.to(now).view(-1, *[1] * (now.dim() - 1))
                change = (now - before).mul_(own)
                mix_(before, round)
                now.copy_(before + change)
        self._copies_sent += round.copies_sent
        self._messages_sent += round.messages_sent

    def consensus_distance(self) -> float:
        """Return Ξ, with Ξ² = (1/W) Σ_i ‖x̄ − x_i‖², over all parameters."""
        return consensus_distance(self._parameters.values())

    def sketches(self) -> FloatArray:
        """Return a sketch of every worker's parameters, [W, m]: their distances, nearly."""
        return self._meter.begin_parameters()()

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        """Return the L2 norm of every parameter tensor of every worker: name to [W]."""
        return {
            name: torch.linalg.vector_norm(p.flatten(1), dim=1)
            for name, p in self._parameters.items()
        }

    def average(self) -> nn.Module:
        """Return a plain module with the mean of all workers' parameters."""
        model = self.worker(0)
        averaged = dict(self._parameters)
        if self._policy.averaged:
            averaged |= {name: self._buffers[name] for name in running_statistics(self._model)}
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, stacked in averaged.items():
                tensors[name].copy_(stacked.mean(0))
        return model

    def worker(self, worker: int) -> nn.Module:
        """Return a plain module with one worker's parameters and buffers."""
        if not 0 <= worker < self.num_workers:
            raise UserError(
                f"worker must be in 0..{self.num_workers - 1}, got {worker}; "
                f"this simulation has {self.num_workers}"
            )
        model = copy.deepcopy(self._model)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, stacked in {**self._parameters, **self._buffers}.items():
                tensors[name].copy_(stacked[worker])
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to continue; references, as in torch.

        Bit for bit where the method of gradients is known, fixed or timed to the end, and the later
        run has memory for as large chunks; to rounding otherwise.
        """
        return {
            "num_steps": self.num_steps,
            "parameters": self.parameters,
            "buffers": dict(self._buffers),
            "optimizer": self._update.state_dict(),
            "gradients": self._per_worker.state_dict(),
            "control": self._plan.state_dict(),
            "copies_sent": self._copies_sent.tolist(),
            "messages_sent": self._messages_sent.tolist(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a simulation that was built with the same arguments."""
        for own, saved in ((self._parameters, "parameters"), (self._buffers, "buffers")):
            shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
            given = {name: tuple(tensor.shape) for name, tensor in state[saved].items()}
            if shapes != given:
                raise UserError(
                    f"a state must have the {saved} of this simulation, {shapes}, got {given}; "
                    "build the simulation with the model and workers that the state is of"
                )
            for name, tensor in own.items():
                tensor.copy_(state[saved][name])
        self._update.load_state_dict(state["optimizer"])
        self._per_worker.load_state_dict(state["gradients"])
        self._copies_sent = np.array(state["copies_sent"])
        self._messages_sent = np.array(state["messages_sent"])
        self.num_steps = state["num_steps"]
        self._plan.load_state_dict(state["control"], self.num_steps)
        if self.num_steps > 0:
            self._next_rounds = self._plan.again(self.num_steps)


@final
class _Meter:
    """Sketches of all workers at once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._sketch = Sketch()

    def begin_parameters(self) -> Gathered:
        return self._measured(list(self._parameters.values()))

    def begin_gradients(self) -> Gathered:
        parameters = self._parameters.values()
        return self._measured(
            [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        )

    def begin_lr(self, about: str) -> Callable[[], float]:
        return lambda: float(self._optimizer.param_groups[0]["lr"])

    def _measured(self, tensors: Sequence[Tensor]) -> Gathered:
        sketches = self._sketch.sketch_stacked(tensors).numpy(force=True)
        return lambda: sketches


def _stack(tensor: Tensor, num_workers: int) -> Tensor:
    shape = (num_workers, *tensor.shape)
    return tensor.detach().expand(shape).clone(memory_format=torch.contiguous_format)


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
