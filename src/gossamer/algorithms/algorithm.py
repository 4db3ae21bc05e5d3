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

from torch import Tensor
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.topology import Round, Schedule, in_turns, spaced

PARAMETERS = "parameters"

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
                raise UserError(
                    f"{self.name} needs rounds whose rows sum to one, got another at step {step} "
                    f"of {schedule.name}; use algorithm='push_sum', which takes them"
                )
        return spaced(in_turns(adapted, fragments), every)

    def adapt_schedule(self, schedule: Schedule) -> Schedule:
        """Return the rounds that it makes of a schedule's; refuse those that it cannot use."""
        return schedule

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse optimizers that it does not work with."""
        return

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

    def restart(self, context: StepContext) -> None:
        """Forget what was kept, where it is of other members: all states are zero again.

        Parameters are then where training goes on from, and the weight is 1.
        """
        for name in (*self.tracked, *self.kept):
            for tensor in context.memory(name):
                tensor.zero_()
        context.reset_weight()


def name_of_numbers(state: str) -> str:
    """Return what messages call the numbers of a state, a plural."""
    return PARAMETERS if state == PARAMETERS else f"numbers of {state!r}"


def state_of(optimizers: Iterable[Optimizer], parameter: Tensor, name: str) -> Tensor:
    """Return a tensor like a parameter that one of its optimizers keeps under a name."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {}).get(name)
        if isinstance(state, Tensor) and state.shape == parameter.shape:
            return state
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    raise UserError(
        f"the optimizer must keep a {name!r} for every parameter, got {kinds}, which has none for "
        "some; name one that it has, such as exp_avg of AdamW or momentum_buffer of SGD"
    )


def mix(context: StepContext, round: Round, step: int, state: str = PARAMETERS) -> None:
    """Exchange a state and mix it, now."""
    context.start(round, step, state)
    context.finish(state)
