"""What an algorithm is: what a step does with rounds, around the optimizer's update.

An algorithm is written once and executed by both engines. It sees a ``StepContext``: on a rank the
tensors of its worker, in a simulation those of all workers stacked, [W, ...]. So its code is
elementwise, tensor by tensor, and reads like the paper. Around the update of step t an engine calls

    before_update(context, t)    after the gradient
    after_update(context, t)     before the next forward pass

An exchange is started, and finished at once or before the next update: x ← W x happens where it is
finished. Everything that an algorithm keeps from step to step is in ``tracked``, ``kept`` and the
weight, which engines save, load and restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.topology import Round, Schedule, in_turns, spaced

PARAMETERS = "parameters"

_LEAST_BITS = 32

_ROUNDS_CHECKED = 64
"""Of a schedule, before the first step; where there are more, the others as they come."""


class StepContext(Protocol):
    """What a step works on. Lists of tensors have one per parameter, in one order."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters themselves, to be changed in place."""
        ...

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients that the update will use, to be changed in place.

        Zeros where the loss did not depend on a parameter: other workers' may have.
        """
        ...

    def memory(self, name: str) -> Sequence[Tensor]:
        """Return a state of ``tracked`` or ``kept``; zeros at the beginning."""
        ...

    def weights(self) -> Sequence[Tensor]:
        """Return the worker's weight, for each parameter one that broadcasts with it."""
        ...

    def reset_weight(self) -> None:
        """Let the worker's weight be 1 again."""
        ...

    def learning_rates(self) -> Sequence[float]:
        """Return the rate that each parameter is updated with."""
        ...

    def optimizer_state(self, name: str) -> Sequence[Tensor]:
        """Return tensors that the optimizer keeps for each parameter, to be changed in place."""
        ...

    def rounds(self, step: int) -> Sequence[Round]:
        """Return what a step mixes with, in this order; once per step where a control decides."""
        ...

    def resumed_rounds(self, step: int) -> Sequence[Round]:
        """Return what ``rounds`` returned, after a state was loaded or parameters changed."""
        ...

    def start(self, round: Round, step: int, state: str = PARAMETERS) -> None:
        """Begin to exchange a state, which must not change until it is finished.

        Parameters may be in flight until the next step, all others until the end of this one.

        Args:
            round: who mixes with whom.
            step: the step that will finish it.
            state: the parameters, and with them the weight, or one of ``tracked``.
        """
        ...

    def finish(self, state: str = PARAMETERS) -> None:
        """Wait for the exchange of a state, and mix it; nothing where none was started."""
        ...


class Algorithm(ABC):
    """What a step does around its update, and what it allows.

    A subclass says in class attributes what it keeps and exchanges; instances hold settings, and
    nothing that changes.
    """

    name: str
    """What errors and tables call it; by default as its class."""

    overlaps: ClassVar[bool] = False
    """Whether an exchange is in flight from one update to the next, while gradients are made."""

    tracked: ClassVar[Sequence[str]] = ()
    """States like the parameters that are exchanged by themselves, once per step."""

    kept: ClassVar[Sequence[str]] = ()
    """States like the parameters that stay with the worker."""

    scratch: ClassVar[Sequence[str]] = ()
    """Those of both that mean nothing between two steps, so that nobody saves them."""

    weighted: ClassVar[bool] = False
    """Whether a number per worker, 1 at the beginning, is mixed with the parameters as they are.
    Averages are then Σ wx / Σ w, and rounds need columns that sum to one, not rows."""

    plain: ClassVar[bool] = False
    """Whether any round may come at any step, for nothing but parameters is exchanged: then
    ``every``, a control and ``join`` are allowed."""

    repeats: ClassVar[bool] = False
    """Whether a step may mix several times."""

    needs_all: ClassVar[bool] = False
    """Whether what workers keep is right only together, so that one who is left out of a round
    would bias the others from then on: training then ends at the first such round."""

    reads_optimizer: ClassVar[bool] = False
    """Whether it asks for tensors that the optimizer keeps."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __repr__(self) -> str:
        # Ranks compare it: a dataclass adds its arguments.
        return self.name

    @property
    def acts_before_update(self) -> bool:
        """Whether parameters or gradients change between the backward pass and the update."""
        return type(self).before_update is not Algorithm.before_update

    @property
    def num_exchanges(self) -> float:
        """How often something of the parameters' size is exchanged in a step, in the mean."""
        return 1 + len(self.tracked)

    # - What it allows

    def adapt(self, schedule: Schedule, every: int = 1, fragments: int = 1) -> Schedule:
        """Return the rounds that it mixes with, step by step; refuse what it does not allow.

        Args:
            schedule: what a user chose.
            every: steps from one exchange to the next.
            fragments: of the parameters, of which each exchange is one in turn.
        """
        if every != 1 and not self.plain:
            raise UserError(
                f"{self.name} exchanges at every step, got every={every}; use algorithm='atc' for "
                "local steps"
            )
        if fragments != 1 and not self.plain:
            raise UserError(
                f"{self.name} exchanges all that it has at once, got fragments={fragments}; use "
                "algorithm='awc' or 'atc'"
            )
        # Before local steps come in between: of few rounds with many of these, none would be seen.
        adapted = self.adapt_schedule(schedule)
        for step in range(min(adapted.period or _ROUNDS_CHECKED, _ROUNDS_CHECKED)):
            round = adapted.round(step)
            if not (round.conserves_mean if self.weighted else round.keeps_consensus):
                sums = "columns" if self.weighted else "rows"
                remedy = "topology.pushed" if self.weighted else "algorithm='push_sum'"
                raise UserError(
                    f"{self.name} needs rounds whose {sums} sum to one, got another at step {step} "
                    f"of {schedule.name}; use {remedy}, which takes them"
                )
        return spaced(in_turns(adapted, fragments), every)

    def adapt_schedule(self, schedule: Schedule) -> Schedule:
        """Return the rounds that it makes of a schedule's; refuse those that it cannot use."""
        return schedule

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse optimizers that it does not work with."""
        return

    def check_precision(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters whose rounding, in every exchange, would add up in what is kept."""
        low = {p.dtype for p in parameters if torch.finfo(p.dtype).bits < _LEAST_BITS}
        if low and self.needs_all:
            raise UserError(
                f"{self.name} keeps sums over all workers, in which the rounding of "
                f"{', '.join(sorted(map(str, low)))} adds up; keep parameters in torch.float32 and "
                "compute in torch.autocast, or use algorithm='atc'"
            )

    def check_statistics(self, *, mixed: bool) -> None:
        """Refuse running statistics that are mixed with weights that are not theirs."""
        if mixed and self.weighted:
            raise UserError(
                f"{self.name} weighs parameters by what each worker has, which running statistics "
                "know nothing of, got buffers='mix'; use buffers='average'"
            )

    def most_nonfinite(self, rounds: int) -> int:
        """Return after how many rounds that a worker is left out of training ends.

        Args:
            rounds: what a user chose; 0 for never.
        """
        return min(rounds, 1) if self.needs_all else rounds

    # - What a step does

    def before_update(self, context: StepContext, step: int) -> None:
        """Come between the backward pass and the update of a step."""
        return

    @abstractmethod
    def after_update(self, context: StepContext, step: int) -> None:
        """Come between the update of a step and the next forward pass."""

    def resume(self, context: StepContext, step: int) -> None:
        """Bring a context to where it is before a step that others led up to."""
        return

    def abandon(self, context: StepContext) -> None:
        """Come after an update whose exchange has failed: parameters stay unmixed.

        They are to be what a model computes with; ``restart`` follows.
        """
        return

    def restart(self, context: StepContext) -> None:
        """Forget what was kept, where it is of other members: all states are zero again.

        Parameters are then where training goes on from, and the weight is 1.
        """
        for name in (*self.tracked, *self.kept):
            for tensor in context.memory(name):
                tensor.zero_()
        context.reset_weight()


def unfinished(algorithm: Algorithm, state: str) -> UserError:
    """Return what to raise where a step leaves a state in flight that is not the parameters."""
    return UserError(
        f"only parameters may be in flight from one step to the next, got {state!r} of "
        f"{algorithm.name}; finish it in after_update"
    )


def name_of_numbers(state: str) -> str:
    """Return what messages call the numbers of a state, a plural."""
    return PARAMETERS if state == PARAMETERS else f"numbers of {state!r}"


def state_of(optimizers: Iterable[Optimizer], parameter: Tensor, name: str) -> Tensor | None:
    """Return a tensor like a parameter that one of its optimizers keeps; none before it does."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {}).get(name)
        if isinstance(state, Tensor) and state.shape == parameter.shape:
            return state
    return None


def states_of(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], name: str
) -> list[Tensor]:
    """Return a tensor that optimizers keep for each parameter, to be changed in place.

    Zeros where a parameter had no gradient yet on this worker: others may have one.
    """
    found = [state_of(optimizers, parameter, name) for parameter in parameters]
    if all(state is None for state in found):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise UserError(
            f"the optimizer must keep {name!r} for parameters, got {kinds}, which keeps it for "
            "none; name one that it keeps, such as exp_avg of AdamW or momentum_buffer of SGD"
        )
    return [
        torch.zeros_like(parameter) if state is None else state
        for parameter, state in zip(parameters, found, strict=True)
    ]


def rates_of(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> list[float]:
    """Return the learning rate of each parameter; 0 for those that no optimizer has."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    return [rates.get(id(parameter), 0.0) for parameter in parameters]


def mix(context: StepContext, round: Round, step: int, state: str = PARAMETERS) -> None:
    """Exchange a state and mix it, now."""
    context.start(round, step, state)
    context.finish(state)
