"""W replicas of a model as stacked tensors: worker i's is row i of each."""

# W: workers

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.errors import UserError
from gossamer.nonfinite import measured_norms
from gossamer.normalization import StatisticsRule, running_statistics
from gossamer.simulate.coded import CodedBucket
from gossamer.simulate.gradients import ChunkGradients
from gossamer.simulate.mixing import mix_
from gossamer.simulate.workers import NamedTensors
from gossamer.topology import Round
from gossamer.topology.arrays import FloatArray


@final
class Replicas:
    """All workers' parameters, gradients and buffers.

    Args:
        model: what every worker starts from.
        trained: its parameters that are trained, by name; all others stay the model's.
        num_workers: how many.
        rule: what happens to running statistics.
        weighted: whether parameters carry a weight, as in push-sum.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        num_workers: int,
        rule: StatisticsRule,
        *,
        weighted: bool = False,
    ) -> None:
        self._model = model
        self._rule = rule
        self.num_workers = num_workers
        self.parameters = {n: nn.Parameter(_stack(p, num_workers)) for n, p in trained.items()}
        """[W, ...] by name; their gradients are stacked, too."""
        self.buffers = {n: _stack(b, num_workers) for n, b in model.named_buffers()}
        """[W, ...] by name."""
        self._statistics = {name: self.buffers[name] for name in running_statistics(model)}
        self.weighted = weighted
        self.weight = torch.ones(num_workers, dtype=torch.float64)
        """The push-sum weight of each worker, [W]; ones where parameters are not weighted."""

    def gradient_memory(self) -> NamedTensors:
        """Return the stacked memory of gradients by name, which is reused in every step."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    def keep(self, computed: ChunkGradients) -> set[str]:
        """Store a chunk's gradients and replaced buffers; return the names of used parameters."""
        into = computed.chunk.into
        used: set[str] = set()
        for name, grad in computed.gradients.items():
            if grad is None:  # some other worker may have used it
                into[name].zero_()
                continue
            used.add(name)
            if grad is not into[name]:  # where a kernel has not written it already
                into[name].copy_(grad.to_dense() if grad.is_sparse else grad)
        for name, new in computed.replaced.items():
            self.buffers[name][computed.chunk.index] = new
        return used

    def drop_gradients(self, names: set[str]) -> None:
        """Set gradients to None: as in torch, an optimizer then skips these parameters."""
        for name in names:
            self.parameters[name].grad = None

    @property
    def statistics_bytes(self) -> float:
        """Bytes of one worker's statistics, where they are mixed."""
        mixed = self._statistics.values() if self._rule.mixed else ()
        return sum(s.nbytes for s in mixed) / self.num_workers

    def statistics_to_send(self) -> list[Tensor]:
        """Return copies of the statistics to send: forward passes change them meanwhile."""
        return [s.clone() for s in self._statistics.values()] if self._rule.mixed else []

    def mix(
        self,
        round: Round,
        whole: Sequence[Tensor],
        coded: Sequence[CodedBucket] = (),
        sent: Sequence[Tensor] = (),
    ) -> FloatArray:
        """Mix parameters with a round, and statistics where they are mixed.

        Workers whose parameters are not finite are left out. Returns the norms of all workers
        before mixing, [W], NaN for those.

        Args:
            round: on as many workers.
            whole: parameters that are sent without a codec.
            coded: buckets of the others.
            sent: statistics as neighbours receive them; by default the current ones.
        """
        norms_W = self.measured_norms(sent)
        away = _not_finite(norms_W)
        for bucket in coded:
            bucket.mix_(round, away)
        if not away:
            self._mix(round, whole, sent)
            return norms_W
        statistics = self._statistics.values() if self._rule.mixed else ()
        with _put_back(away, [*whole, *statistics], sent):
            self._mix(round.without(away), whole, sent)
        return norms_W

    def mix_state(
        self, state: Sequence[Tensor], round: Round, coded: Sequence[CodedBucket] = ()
    ) -> FloatArray:
        """Mix a state shaped like the parameters; workers where it is not finite are left out.

        Returns its norms before mixing, [W], NaN for those.
        """
        norms_W = measured_norms(state)
        away = _not_finite(norms_W)
        for bucket in coded:
            bucket.mix_(round, away)
        whole = state if not coded else []
        with _put_back(away, whole):
            for tensor in whole:
                mix_(tensor, round.without(away) if away else round)
        return norms_W

    def measured_norms(self, sent: Sequence[Tensor] = ()) -> FloatArray:
        """Return the L2 norm of all that each worker would send, [W]; NaN where not finite."""
        statistics = (sent or self._statistics.values()) if self._rule.mixed else ()
        return measured_norms([*self.parameters.values(), *statistics])

    def _mix(self, round: Round, whole: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        for parameter in whole:
            mix_(parameter, round)
        if self.weighted:
            mix_(self.weight, round)
        if self._rule.mixed:
            own_W = torch.from_numpy(round.self_weights.copy())
            statistics = list(self._statistics.values())
            for now, before in zip(statistics, sent or statistics, strict=True):
                # (W s)_i, except that a worker's own weight applies to its current value, which
                # forward passes have changed since the send.
                own = own_W.to(now).view(-1, *[1] * (now.dim() - 1))
                change = (now - before).mul_(own)
                mix_(before, round)
                now.copy_(before + change)

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        """Return the L2 norm of every parameter tensor of every worker: name to [W]."""
        return {
            name: torch.linalg.vector_norm(p.flatten(1), dim=1)
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def average(self) -> nn.Module:
        """Return a plain module with the mean of all workers' parameters."""
        model = self.worker(0)
        statistics = self._statistics if self._rule.averaged else {}
        _fill(model, ((name, self._mean(stacked)) for name, stacked in self.parameters.items()))
        _fill(model, ((name, stacked.mean(0)) for name, stacked in statistics.items()))
        return model

    def _mean(self, stacked: Tensor) -> Tensor:
        if not self.weighted:
            return stacked.mean(0)
        share_W = (self.weight / self.weight.sum()).to(stacked.dtype)
        return torch.tensordot(share_W, stacked, dims=1)

    @torch.no_grad()
    def worker(self, worker: int) -> nn.Module:
        """Return a plain module with one worker's parameters and buffers."""
        own = self.tensors(worker)
        model = copy.deepcopy(self._model)
        _fill(model, own.items())
        return model

    @torch.no_grad()
    def tensors(self, worker: int) -> dict[str, Tensor]:
        """Return one worker's parameters and buffers by name: views, no copies."""
        if not 0 <= worker < self.num_workers:
            raise UserError(
                f"worker must be in 0..{self.num_workers - 1}, got {worker}; "
                f"this simulation has {self.num_workers}"
            )
        stacked = {**self.parameters, **self.buffers}
        return {name: tensor[worker] for name, tensor in stacked.items()}

    @torch.no_grad()
    def all_equal(self) -> bool:
        """Return whether all replicas are equal bit for bit, parameters and buffers."""
        # Comparing two rows settles most cases without a pass over all memory.
        return all(
            torch.equal(stacked[0], stacked[-1])
            and torch.equal(stacked, stacked[:1].expand_as(stacked))
            for stacked in (*self.parameters.values(), *self.buffers.values())
        )

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers; references, as in torch."""
        parameters = {name: p.detach() for name, p in self.parameters.items()}
        return {"parameters": parameters, "buffers": dict(self.buffers)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of replicas of the same model on as many workers."""
        for own, saved in ((self.parameters, "parameters"), (self.buffers, "buffers")):
            shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
            given = {name: tuple(tensor.shape) for name, tensor in state[saved].items()}
            if shapes != given:
                raise UserError(
                    f"a state must have the {saved} of this simulation, {shapes}, got {given}; "
                    "build the simulation with the model and workers that the state is of"
                )
            for name, tensor in own.items():
                tensor.copy_(state[saved][name])


def _not_finite(norms_W: FloatArray) -> list[int]:
    return np.flatnonzero(np.isnan(norms_W)).tolist()


@contextlib.contextmanager
def _put_back(
    workers: list[int], mixed: Sequence[Tensor], sent: Sequence[Tensor] = ()
) -> Generator[None]:
    """Set rows of workers to zero in a block, and restore them at its end.

    In a matrix product 0 · NaN is NaN: a weight of zero does not keep others finite.
    """
    with torch.no_grad():
        kept = [tensor[workers] for tensor in mixed]
        for tensor in (*mixed, *sent):
            tensor[workers] = 0
        yield
        for tensor, own in zip(mixed, kept, strict=True):
            tensor[workers] = own


def _stack(tensor: Tensor, num_workers: int) -> Tensor:
    shape = (num_workers, *tensor.shape)
    return tensor.detach().expand(shape).clone(memory_format=torch.contiguous_format)


def _fill(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors into a model, one by one, so that at most one extra copy is alive."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in named:
        own[name].copy_(tensor)
