"""The interface of an algorithm: what a step does with rounds, around the optimizer's update.

An algorithm is written once and run by both engines. It operates on a ``StepContext``: on a rank,
the tensors of its worker; in a simulation, those of all workers stacked, [W, ...]. So its code must
be elementwise, tensor by tensor. Around the update of step t an engine calls

    before_update(context, t)    after the backward pass
    after_update(context, t)     before the next forward pass

An exchange is started, and finished at once or before the next update; x ← W x happens when it is
finished. All state that an algorithm carries from step to step is in ``tracked``, ``kept`` and the
weight, which engines save, load and reset.
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
"""How many rounds of a schedule are checked before the first step; later ones as they come."""


class StepContext(Protocol):
    """What a step operates on. Lists of tensors have one per parameter, in the same order."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters, to be changed in place."""
        ...

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients that the update will use, to be changed in place.

        Zeros if the loss did not depend on a parameter: another worker's may have.
        """
        ...

    def memory(self, name: str) -> Sequence[Tensor]:
        """Return a state of ``tracked`` or ``kept``; zeros initially."""
        ...

    def weights(self) -> Sequence[Tensor]:
        """Return the worker's weight, one tensor per parameter that broadcasts with it."""
        ...

    def reset_weight(self) -> None:
        """Set the worker's weight to 1."""
        ...

    def learning_rates(self) -> Sequence[float]:
        """Return the learning rate of each parameter."""
        ...

    def optimizer_state(self, name: str) -> Sequence[Tensor]:
        """Return a state tensor of the optimizer for each parameter, to be changed in place."""
        ...

    def rounds(self, step: int) -> Sequence[Round]:
        """Return the rounds of a step, in order. With a control, call it once per step."""
        ...

    def resumed_rounds(self, step: int) -> Sequence[Round]:
        """Return the rounds of a step again, after a state was loaded or parameters changed."""
        ...

    def start(self, round: Round, step: int, state: str = PARAMETERS) -> None:
        """Start to exchange a state, which must not change until the exchange is finished.

        Parameters may be in flight until the next step, all others until the end of this one.

        Args:
            round: who mixes with whom.
            step: the step that will finish it.
            state: the parameters, and with them the weight, or one of ``tracked``.
        """
        ...

    def finish(self, state: str = PARAMETERS) -> None:
        """Wait for the exchange of a state, and mix it; does nothing if none was started."""
        ...


class Algorithm(ABC):
    """What a step does around its update, and the arguments that are allowed with it.

    A subclass declares in class attributes what it keeps and exchanges; instances hold settings and
    no mutable state.
    """

    name: str
    """Its name in errors and tables; by default that of its class."""

    overlaps: ClassVar[bool] = False
    """Whether an exchange is in flight from one update to the next, overlapped with gradients."""

    tracked: ClassVar[Sequence[str]] = ()
    """States of the parameters' shapes that are exchanged by themselves, once per step."""

    kept: ClassVar[Sequence[str]] = ()
    """States of the parameters' shapes that are local to the worker."""

    scratch: ClassVar[Sequence[str]] = ()
    """The tracked and kept states that are not needed between two steps, and not saved."""

    weighted: ClassVar[bool] = False
    """Whether workers have a scalar weight, initially 1, which is mixed along with the parameters.
    Averages are then Σ wx / Σ w, and columns of rounds have to sum to one, not rows."""

    plain: ClassVar[bool] = False
    """Whether any round is allowed at any step, because only parameters are exchanged. Then
    ``every``, a control and ``join`` are allowed."""

    repeats: ClassVar[bool] = False
    """Whether a step may mix several times."""

    needs_all: ClassVar[bool] = False
    """Whether an invariant holds over the states of all workers, so that leaving one out of a round
    would bias the others for the rest of training: it ends at the first such round."""

    reads_optimizer: ClassVar[bool] = False
    """Whether it uses state tensors of the optimizer."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __repr__(self) -> str:
        # Ranks compare it in the handshake; a dataclass adds its arguments.
        return self.name

    @property
    def acts_before_update(self) -> bool:
        """Whether parameters or gradients change between the backward pass and the update."""
        return type(self).before_update is not Algorithm.before_update

    @property
    def num_exchanges(self) -> float:
        """Mean number of exchanges of the parameters' size per step."""
        return 1 + len(self.tracked)

    # - What it allows

    def adapt(self, schedule: Schedule, every: int = 1, fragments: int = 1) -> Schedule:
        """Return the schedule that it mixes with; raise for arguments that it does not allow.

        Args:
            schedule: the user's schedule.
            every: steps from one exchange to the next.
            fragments: the number of fragments; an exchange is of one of them, in turn.
        """
        if every != 1 and not self.plain:
            raise UserError(
                f"{self.name} exchanges at every step, got every={every}; use algorithm='atc' for "
                "local steps"
            )
        if fragments != 1 and not self.plain:
            raise UserError(
                f"{self.name} exchanges all parameters at once, got fragments={fragments}; use "
                "algorithm='awc' or 'atc'"
            )
        # Checked before local steps are inserted: with many of them, the first 64 rounds could all
        # be local, and nothing would be checked.
        adapted = self.adapt_schedule(schedule)
        for step in range(min(adapted.period or _ROUNDS_CHECKED, _ROUNDS_CHECKED)):
            round = adapted.round(step)
            if not (round.conserves_mean if self.weighted else round.keeps_consensus):
                sums = "columns" if self.weighted else "rows"
                remedy = "topology.pushed" if self.weighted else "algorithm='push_sum'"
                raise UserError(
                    f"{self.name} needs rounds whose {sums} sum to one, got another at step {step} "
                    f"of {schedule.name}; use {remedy}, which allows it"
                )
        return spaced(in_turns(adapted, fragments), every)

    def adapt_schedule(self, schedule: Schedule) -> Schedule:
        """Return a schedule of the rounds that it mixes with; raise for rounds it cannot use."""
        return schedule

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise for optimizers that it does not work with."""
        return

    def check_precision(self, parameters: Iterable[Tensor]) -> None:
        """Raise for parameters whose rounding errors would accumulate in the states it keeps."""
        low = {p.dtype for p in parameters if torch.finfo(p.dtype).bits < _LEAST_BITS}
        if low and self.needs_all:
            raise UserError(
                f"{self.name} keeps sums over all workers, in which rounding errors of "
                f"{', '.join(sorted(map(str, low)))} accumulate; keep parameters in torch.float32 "
                "and compute in torch.autocast, or use algorithm='atc'"
            )

    def check_statistics(self, *, mixed: bool) -> None:
        """Raise for mixed running statistics, which cannot be divided by the worker's weight."""
        if mixed and self.weighted:
            raise UserError(
                f"{self.name} divides parameters by a weight per worker, which running statistics "
                "do not have, got buffers='mix'; use buffers='average'"
            )

    def most_nonfinite(self, rounds: int) -> int:
        """Return the number of rounds in a row that a worker may be left out of before it raises.

        Args:
            rounds: the user's choice; 0 for never.
        """
        return min(rounds, 1) if self.needs_all else rounds

    # - What a step does

    def before_update(self, context: StepContext, step: int) -> None:
        """Run between the backward pass and the update of a step."""
        return

    @abstractmethod
    def after_update(self, context: StepContext, step: int) -> None:
        """Run between the update of a step and the next forward pass."""

    def resume(self, context: StepContext, step: int) -> None:
        """Restart what is in flight before a step, after parameters were loaded or changed."""
        return

    def abandon(self, context: StepContext) -> None:
        """Run after an update whose exchange has failed: parameters stay unmixed.

        Must leave in the parameters what the model computes with; ``restart`` follows.
        """
        return

    def restart(self, context: StepContext) -> None:
        """Reset the states to zero and the weight to 1, because the members have changed.

        Training continues from the current parameters.
        """
        for name in (*self.tracked, *self.kept):
            for tensor in context.memory(name):
                tensor.zero_()
        context.reset_weight()


def unfinished(algorithm: Algorithm, state: str) -> UserError:
    """Return the error for a state other than the parameters that is in flight after a step."""
    return UserError(
        f"only parameters may be in flight from one step to the next, got {state!r} of "
        f"{algorithm.name}; finish it in after_update"
    )


def name_of_numbers(state: str) -> str:
    """Return the name of a state's numbers in messages, a plural."""
    return PARAMETERS if state == PARAMETERS else f"numbers of {state!r}"


def state_of(optimizers: Iterable[Optimizer], parameter: Tensor, name: str) -> Tensor | None:
    """Return a state tensor of a parameter's shape from its optimizer; None before it has one."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {}).get(name)
        if isinstance(state, Tensor) and state.shape == parameter.shape:
            return state
    return None


def states_of(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], name: str
) -> list[Tensor]:
    """Return a state tensor of the optimizers for each parameter, to be changed in place.

    Zeros if a parameter had no gradient yet on this worker: others may have one.
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
    """Return the learning rate of each parameter; 0 for those in no optimizer."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    return [rates.get(id(parameter), 0.0) for parameter in parameters]


def mix(context: StepContext, round: Round, step: int, state: str = PARAMETERS) -> None:
    """Exchange a state and mix it; blocks until that is done."""
    context.start(round, step, state)
    context.finish(state)
