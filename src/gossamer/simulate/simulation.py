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

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.consensus import (
    Decision,
    NormSteps,
    Policy,
    Target,
    consensus_distance,
    make_round_source,
    tensor_norms,
)
from gossamer.nonfinite import ParameterWatch, check_limit
from gossamer.normalization import rule_of
from gossamer.optim import with_num_workers
from gossamer.simulate.clipping import check_clip_norm, clip_each_
from gossamer.simulate.gradients import Loss
from gossamer.simulate.meter import StackedMeter
from gossamer.simulate.mixing import check_round
from gossamer.simulate.replicas import Replicas
from gossamer.simulate.template import bytes_of, make_template
from gossamer.simulate.update import MakeOptimizer, is_elementwise, make_update
from gossamer.simulate.workers import AllWorkers
from gossamer.topology import Round, Schedule, as_schedule
from gossamer.topology.arrays import FloatArray

_log = logging.getLogger(__name__)


@final
class Simulation:
    """Decentralized training of W virtual workers; equal to ``decentralize`` on W ranks.

    Args:
        model: a template, not modified; every worker starts from its parameters and buffers.
        loss: loss(output, target), a scalar: the mean over one worker's batch.
        optimizer: from a list of parameters to any torch optimizer that takes one gradient per
            step, such as ``lambda params: torch.optim.SGD(params, lr=0.1)``.
        workers: how many.
        topology: a string such as ``"lattice(k=4)"``, a Round, or a Schedule.
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
            ``"auto"`` takes what should be faster, by what the first step keeps in memory. They
            agree to rounding.
        clip_norm: what ``torch.nn.utils.clip_grad_norm_`` gets on every rank; 0 clips nothing.
        norms_every: once in so many steps ``last_norms`` is measured, at the last of them that the
            schedule mixes; 0 for never.
        nonfinite_rounds: a worker whose parameters are not finite is left out of rounds, and after
            so many in a row a step raises; 0 for never.
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
        control: str | Policy | Target = "plain",
        buffers: str = "average",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        memory_gb: float | None = None,
        gradients: str = "auto",
        clip_norm: float = 0.0,
        norms_every: int = 0,
        nonfinite_rounds: int = 10,
    ) -> None:
        self.schedule = as_schedule(topology, workers)
        self.num_steps = 0
        """Steps taken so far."""
        make_source = make_round_source(control, self.schedule, order, gossip_steps)
        self._mix_and_update = (
            self._adapt_while_combine if order == "awc" else self._adapt_then_combine
        )
        rule = rule_of(buffers)
        check_limit(nonfinite_rounds)
        check_clip_norm(clip_norm)
        self._clip_norm = clip_norm
        optimizer = with_num_workers(optimizer, workers)

        # - One worker
        template = make_template(model, loss, optimizer, workers, dtype, seed, memory_gb, gradients)
        elementwise = is_elementwise(optimizer, template.trained.values())

        # - All workers
        self._replicas = Replicas(template.model, template.trained, workers, rule)
        self._parameters = self._replicas.parameters
        self._watch = ParameterWatch(
            "worker", range(workers), self._replicas.measured_norms(), nonfinite_rounds, _log
        )
        self._gradients = template.gradients
        self._update = make_update(optimizer, list(self._parameters.values()), elementwise)
        self._next_rounds: tuple[Round, ...] = ()
        """What awc's next step mixes with."""
        self._meter = StackedMeter(self._parameters, self._update.optimizer)
        self._source = make_source(self._meter)
        self._norm_steps = NormSteps(self.schedule, order, norms_every)
        self.last_norms: FloatArray | None = None
        """L2 norms [T, W] of every parameter tensor of every worker, after an update and before it
        is mixed, as DBench correlates them; of the last step that measured them."""
        self.norms_step = 0
        """How many steps had been taken with the one that ``last_norms`` is of; 0 for none."""
        self._copies_sent: npt.NDArray[np.float64] = np.zeros(workers)
        self._messages_sent: npt.NDArray[np.int64] = np.zeros(workers, np.int64)
        self.left_out: npt.NDArray[np.int64] = np.zeros(workers, np.int64)
        """In how many rounds each worker was left out because its parameters were not finite."""
        self.mean_moved = 0
        """How many of those rounds moved the mean of the others: where weights are not
        symmetric."""

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
        return self._source.decision

    @property
    def bytes_sent(self) -> npt.NDArray[np.float64]:
        """Bytes that each worker would have sent so far for its parameters, [W]."""
        return self._copies_sent * (bytes_of(self._parameters.values()) / self.num_workers)

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
        sent = self._replicas.statistics_to_send()
        losses = self._gradient(inputs, targets)
        if self._clip_norm:
            clip_each_(self._parameters.values(), self._clip_norm)
        self._source.before_update(self.num_steps)
        self._mix_and_update(round, sent)
        self.num_steps += 1
        return losses

    def _adapt_while_combine(self, given: Round | None, sent: list[Tensor]) -> None:
        rounds = self._next_rounds if given is None else (given,)
        for round in rounds if self.num_steps > 0 else ():
            self._mix(round, sent)
        self._update_and_measure()
        self._next_rounds = self._source.rounds(self.num_steps + 1)

    def _adapt_then_combine(self, given: Round | None, sent: list[Tensor]) -> None:
        self._update_and_measure()
        for round in self._source.rounds(self.num_steps) if given is None else (given,):
            self._mix(round)

    def _update_and_measure(self) -> None:
        self._update.step()
        if self.num_steps in self._norm_steps:
            self.last_norms = tensor_norms([*self._parameters.values()])
            self.norms_step = self.num_steps + 1

    def _gradient(self, inputs: Any, targets: Any) -> Tensor:
        """Compute each worker's loss and gradient at its own parameters; return the losses."""
        replicas = self._replicas
        workers = AllWorkers(
            self.num_workers,
            replicas.parameters,
            replicas.buffers,
            inputs,
            targets,
            into=replicas.gradient_memory(),
        )
        losses_W = workers.new_losses()
        used: set[str] = set()
        for computed in self._gradients.compute(self.num_steps, workers):
            losses_W[computed.chunk.index] = computed.losses
            used |= replicas.keep(computed)
            del computed  # or its gradients would be held while the next chunk is computed
        replicas.drop_gradients(self._parameters.keys() - used)
        return losses_W

    def _mix(self, round: Round, sent: Sequence[Tensor] = ()) -> None:
        """Mix with a round, statistics as neighbours get them, and count what is sent."""
        finite_W = self._watch.look(self._replicas.mix(round, sent), self.num_steps)
        if not finite_W.all():
            self.left_out += ~finite_W
            self.mean_moved += not round.symmetric
        self._copies_sent += round.copies_sent
        self._messages_sent += round.messages_sent

    def consensus_distance(self) -> float:
        """Return Ξ, with Ξ² = (1/W) Σ_i ‖x̄ − x_i‖², over all parameters."""
        return consensus_distance(self._parameters.values())

    def sketches(self) -> FloatArray:
        """Return a sketch of every worker's parameters, [W, m]: their distances, nearly."""
        return self._meter.begin_parameters()()

    def norms(self) -> dict[str, Tensor]:
        """Return the L2 norm of every parameter tensor of every worker: name to [W]."""
        return self._replicas.norms()

    def average(self) -> nn.Module:
        """Return a plain module with the mean of all workers' parameters."""
        return self._replicas.average()

    def worker(self, worker: int) -> nn.Module:
        """Return a plain module with one worker's parameters and buffers."""
        return self._replicas.worker(worker)

    def tensors(self, worker: int) -> dict[str, Tensor]:
        """Return one worker's parameters and buffers by name: views, no copies."""
        return self._replicas.tensors(worker)

    def all_equal(self) -> bool:
        """Return whether all workers' models are equal bit for bit, as after an exact average."""
        return self._replicas.all_equal()

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to continue; references, as in torch.

        Bit for bit where the later run has memory for as large chunks, to rounding otherwise.
        """
        return {
            "num_steps": self.num_steps,
            **self._replicas.state_dict(),
            "optimizer": self._update.state_dict(),
            "gradients": self._gradients.state_dict(),
            "control": self._source.state_dict(),
            "copies_sent": self._copies_sent.tolist(),
            "messages_sent": self._messages_sent.tolist(),
            "norms_step": self.norms_step,
            "last_norms": None if self.last_norms is None else torch.from_numpy(self.last_norms),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a simulation that was built with the same arguments."""
        self._replicas.load_state_dict(state)
        self._watch.forget_norms()
        self._update.load_state_dict(state["optimizer"])
        self._gradients.load_state_dict(state["gradients"])
        self._copies_sent = np.array(state["copies_sent"])
        self._messages_sent = np.array(state["messages_sent"])
        self.num_steps = state["num_steps"]
        self.norms_step, norms = state.get("norms_step", 0), state.get("last_norms")
        self.last_norms = None if norms is None else norms.numpy()
        self._source.load_state_dict(state["control"], self.num_steps)
        if self.num_steps > 0:
            self._next_rounds = self._source.resume(self.num_steps)
