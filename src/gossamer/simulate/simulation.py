"""W workers of decentralized training in one process, as stacked tensors.

One step is the specification that a distributed run is equal to, worker by worker: the gradient of
every worker at its own parameters, then what the algorithm does around the optimizer's update
(``gossamer.algorithms``), which ranks execute from the same description.
"""

# W: workers, N: numbers per worker

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms import parse_algorithm
from gossamer.consensus import (
    Decision,
    NormSteps,
    Policy,
    Target,
    chooses_rounds,
    consensus_distance,
    make_round_source,
    tensor_norms,
)
from gossamer.errors import UserError
from gossamer.nonfinite import check_limit
from gossamer.normalization import rule_of
from gossamer.optim import with_num_workers
from gossamer.simulate.clipping import check_clip_norm, clip_each_
from gossamer.simulate.gradients import Loss
from gossamer.simulate.meter import StackedMeter
from gossamer.simulate.mixing import check_round
from gossamer.simulate.replicas import Replicas
from gossamer.simulate.stacked_context import StackedContext
from gossamer.simulate.template import make_template
from gossamer.simulate.update import MakeOptimizer, is_elementwise, make_update
from gossamer.simulate.workers import AllWorkers
from gossamer.topology import Round, Schedule, as_schedule
from gossamer.topology.arrays import FloatArray
from gossamer.wire import Packing, parse_wire


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
        order: another spelling of the algorithms ``"awc"`` and ``"atc"``.
        algorithm: what a step does with rounds: ``"awc"``, the default, mixes while the gradient is
            computed, ``"atc"`` after the update; others are in ``algorithms.ALGORITHMS``.
        every: steps from one exchange to the next under awc and atc.
        gossip_steps: how often ``"atc"`` mixes per step, each time with the step's round.
        control: how far apart workers may be and what is done about it, as in ``decentralize``.
        buffers: running statistics of normalization layers are ``"average"``: each worker's own,
            averaged by ``average()``; ``"local"``: each worker's own, worker 0's in
            ``average()``; or ``"mix"``: mixed at every step, as parameters are.
        wire: the wire format of parameters, as in ``decentralize``.
        fragments: of which each exchange is one in turn, as in ``decentralize``.
        bucket_mb: size of a bucket in megabytes, as in ``decentralize``, by default, too: a message
            is of one.
        dtype: of parameters, and of floating-point inputs.
        seed: of random numbers in forward passes; see ``worker_seed``.
        memory_gb: most memory for parameters, gradients, optimizer state and activations; by
            default what is free. Workers are computed in chunks that keep to it.
        gradients: ``"vmap"`` computes workers together, ``"loop"`` one after the other;
            ``"auto"`` takes what should be faster, by what the first step keeps in memory. They
            agree to rounding.
        clip_norm: the ``max_norm`` of ``clip_grad_norm_`` on every rank; 0 clips nothing.
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
        order: str = "",
        *,
        algorithm: str = "",
        every: int = 1,
        gossip_steps: int = 1,
        control: str | Policy | Target = "plain",
        buffers: str = "average",
        wire: str = "fp32",
        fragments: int = 1,
        bucket_mb: float | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        memory_gb: float | None = None,
        gradients: str = "auto",
        clip_norm: float = 0.0,
        norms_every: int = 0,
        nonfinite_rounds: int = 10,
    ) -> None:
        self._algorithm = parse_algorithm(algorithm, order)
        given = as_schedule(topology, workers)
        self.schedule = self._algorithm.adapt(given, every, fragments)
        self.num_steps = 0
        """Steps taken so far."""
        make_source = make_round_source(
            control, self.schedule, self._algorithm, gossip_steps, every, fragments
        )
        rule = rule_of(buffers)
        self._algorithm.check_statistics(mixed=rule.mixed)
        self._algorithm.check_precision([torch.empty(0, dtype=dtype)])
        format = parse_wire(wire)
        exchanged = self._algorithm.adapt(given)
        format.check(self._algorithm, exchanged, rounds_are_chosen=chooses_rounds(control))
        check_limit(nonfinite_rounds)
        check_clip_norm(clip_norm)
        self._clip_norm = clip_norm
        optimizer = with_num_workers(optimizer, workers)

        # - One worker
        template = make_template(model, loss, optimizer, workers, dtype, seed, memory_gb, gradients)
        size_mb = format.bucket_mb if bucket_mb is None else bucket_mb
        packing = Packing([*template.trained.values()], size_mb, fragments, every)
        elementwise = is_elementwise(optimizer, template.trained.values())
        if self._algorithm.reads_optimizer and not elementwise:
            raise UserError(
                f"{self._algorithm.name} needs an elementwise optimizer, got one that depends on "
                "whole tensors or their shapes, of which a simulation has one per worker; use "
                "algorithm='atc', or train on processes"
            )

        # - All workers
        weighted = self._algorithm.weighted
        self._replicas = Replicas(
            template.model, template.trained, workers, rule, weighted=weighted
        )
        self._parameters = self._replicas.parameters
        self._gradients = template.gradients
        self._update = make_update(optimizer, list(self._parameters.values()), elementwise)
        self._algorithm.check_optimizers([self._update.optimizer])
        self._meter = StackedMeter(self._parameters, self._update.optimizer)
        self._source = make_source(self._meter)
        self._context = StackedContext(
            self._replicas,
            self._update,
            self._algorithm,
            self._source,
            format,
            packing,
            self._algorithm.most_nonfinite(nonfinite_rounds),
        )
        self._norm_steps = NormSteps(self.schedule, self._algorithm.overlaps, norms_every)
        self.last_norms: FloatArray | None = None
        """L2 norms [T, W] of every parameter tensor of every worker, after an update and before it
        is mixed, as DBench correlates them; of the last step that measured them."""
        self.norms_step = 0
        """How many steps had been taken with the one that ``last_norms`` is of; 0 for none."""

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
        """The control's last decision: rounds, the estimated distance and its target."""
        return self._source.decision

    @property
    def bytes_sent(self) -> npt.NDArray[np.float64]:
        """Bytes that each worker would have sent so far, [W]."""
        return self._context.bytes_sent

    @property
    def messages_sent(self) -> npt.NDArray[np.int64]:
        """Messages that each worker would have sent so far, [W]."""
        return self._context.messages_sent

    @property
    def left_out(self) -> npt.NDArray[np.int64]:
        """In how many rounds each worker was left out because its parameters were not finite."""
        return self._context.left_out

    @property
    def undecoded(self) -> npt.NDArray[np.int64]:
        """How many buckets of others each worker could not decode, and so did not mix with."""
        return self._context.undecoded

    @property
    def mean_moved(self) -> int:
        """How many of those rounds moved the mean of the others, as asymmetric weights do."""
        return self._context.mean_moved

    def step(self, inputs: Any, targets: Any, round: Round | None = None) -> Tensor:
        """Train all workers for one step.

        Args:
            inputs: a tensor [W, B, ...] for ``model(x)``, a tuple of them for ``model(*x)``, or a
                dict for ``model(**x)``.
            targets: what the loss gets as its second argument, with the same leading dimension.
            round: overrides the schedule's round of this step, under awc and atc.

        Returns:
            Each worker's loss before the step, [W].
        """
        if round is not None:
            self._check_given(round)
        losses = self._gradient(inputs, targets)
        if self._clip_norm:
            clip_each_(self._parameters.values(), self._clip_norm)
        self._context.given = round
        self._source.before_update(self.num_steps)
        with torch.no_grad():
            self._algorithm.before_update(self._context, self.num_steps)
        self._update.step()
        if self.num_steps in self._norm_steps:
            norms_TW = tensor_norms([*self._parameters.values()])
            self.last_norms = norms_TW / self._replicas.weight.numpy(force=True)
            self.norms_step = self.num_steps + 1
        with torch.no_grad():
            self._algorithm.after_update(self._context, self.num_steps)
        self._context.refuse_unfinished()
        self.num_steps += 1
        return losses

    def _check_given(self, round: Round) -> None:
        check_round(round, self.num_workers)
        if not self._algorithm.plain or not round.keeps_consensus:
            raise UserError(
                "a round for one step needs awc or atc, and rows that sum to one, got "
                f"{self._algorithm.name}; give the simulation a Schedule"
            )

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
            del computed  # its gradients must not live on while the next chunk is computed
        replicas.drop_gradients(self._parameters.keys() - used)
        return losses_W

    def consensus_distance(self) -> float:
        """Return Ξ, with Ξ² = (1/W) Σ_i ‖x̄ − x_i‖², over all parameters."""
        return consensus_distance(self._parameters.values())

    def sketches(self) -> FloatArray:
        """Return a sketch of every worker's parameters, [W, m], which estimates distances."""
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
        """Return the state; references, as in torch.

        A run resumed from it is bit-identical if it has memory for as large chunks.
        """
        return {
            "num_steps": self.num_steps,
            **self._replicas.state_dict(),
            "optimizer": self._update.state_dict(),
            "gradients": self._gradients.state_dict(),
            "control": self._source.state_dict(),
            "algorithm": self._context.state_dict(),
            "norms_step": self.norms_step,
            "last_norms": None if self.last_norms is None else torch.from_numpy(self.last_norms),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a simulation that was built with the same arguments."""
        self._replicas.load_state_dict(state)
        self._context.load_state_dict(state["algorithm"])
        self._update.load_state_dict(state["optimizer"])
        self._gradients.load_state_dict(state["gradients"])
        self.num_steps = state["num_steps"]
        self.norms_step, norms = state.get("norms_step", 0), state.get("last_norms")
        self.last_norms = None if norms is None else norms.numpy()
        self._source.load_state_dict(state["control"], self.num_steps)
        if self.num_steps > 0:
            self._algorithm.resume(self._context, self.num_steps)
