"""Synthetic runs with known answers, for tests of analysis and report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gossamer.bench.methods import fields_of
from gossamer.bench.store import Store, Story
from gossamer.engine import RunSpec
from gossamer.engine.parts import with_algorithm
from gossamer.records import Ended, Evaluation, Record, Spread, Started, Status, Step

TENSORS = ("0.weight", "0.bias")
NUM_STEPS, LOG_EVERY, STEPS_PER_EPOCH = 60, 5, 10
PARAMETER_BYTES = 30_000
ENVIRONMENT = {"gossamer": "0", "commit": "abc", "torch": "2", "python": "3.11", "threads": "1"}

Curve = Callable[[int], float]
"""A value by step."""


def spec_of(method: str, workers: int = 8, seed: int = 0, **fields: Any) -> RunSpec:
    """Return the specification of a run of 60 steps; ``D_x`` is the topology x under atc."""
    own: dict[str, Any] = {"topology": "centralized"}
    if method.startswith("D_"):
        own = {"topology": method.removeprefix("D_"), "algorithm": "atc"}
    if method.startswith("local_sgd"):
        own = fields_of(method, workers, 1)
    common: dict[str, Any] = {
        "workload": "digits-mlp",
        "workers": workers,
        "method": method,
        "seed": seed,
        "epochs": NUM_STEPS // STEPS_PER_EPOCH,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "log_every": LOG_EVERY,
    }
    return RunSpec.model_validate(common | with_algorithm(own) | with_algorithm(fields))


def story_of(
    spec: RunSpec,
    accuracy: Curve | float,
    *,
    spread: float = 0.1,
    step_bytes: float = 1e3,
    tensors: Sequence[str] = TENSORS,
    status: Status | None = "done",
) -> Story:
    """Return a run whose average model has the given accuracy.

    Replicas are 0.01 and 0.03 below the average. The dispersion of tensor number i is
    (i + 1) × spread in all measures, of a centralized run none.

    Args:
        spec: what is run.
        accuracy: by step.
        spread: of the first tensor.
        step_bytes: sent by the average worker in a step.
        tensors: their names.
        status: of its end; None for a run that goes on and is half done.
    """
    value = accuracy if callable(accuracy) else lambda step: accuracy
    mixing = spec.topology != "centralized"
    spreads = {
        name: Spread(*[(number + 1) * spread] * 4) for number, name in enumerate(tensors) if mixing
    }
    last = NUM_STEPS if status == "done" else NUM_STEPS // 2
    records: list[Record] = [
        Started(
            run_id=spec.id,
            spec=spec.model_dump(),
            environment=ENVIRONMENT,
            parameter_bytes=PARAMETER_BYTES,
        )
    ]
    for step in range(LOG_EVERY, last + 1, LOG_EVERY):
        spent: dict[str, Any] = {"bytes_sent": step * step_bytes, "train_s": step / 100}
        epoch = (step - 1) // STEPS_PER_EPOCH
        records.append(
            Step(
                step=step,
                epoch=epoch,
                lr=0.1,
                loss=1 / step,
                worst_loss=2 / step,
                distance=spread if mixing else 0.0,
                theta=spread / 2 if mixing else 0.0,
                dispersion=spreads,
                rounds=1,
                degree=spec.schedule.round(0).degree if mixing else spec.workers - 1,
                target=None,
                **spent,
            )
        )
        if step % STEPS_PER_EPOCH == 0:
            average = value(step)
            own = {0: average - 0.01, 1: average - 0.03} if mixing else {0: average}
            records.append(
                Evaluation(step=step, epoch=epoch, average=average, replicas=own, **spent)
            )
    if status is not None:
        why = "" if status == "done" else "the loss was nan"
        records.append(Ended(status=status, reason=why, steps=last, train_s=last / 100))
    return Story(spec.id, records)


def write(folder: Path, stories: Iterable[Story], text: str = "") -> Store:
    """Write runs as a runner would; one that goes on keeps the name of a part."""
    store = Store(folder)
    (folder / "runs").mkdir(parents=True)
    if text:
        store.experiment_path.write_text(text)
    for story in stories:
        ending = "jsonl" if story.ended else "1.part"
        lines = "".join(record.model_dump_json() + "\n" for record in story.records)
        (folder / "runs" / f"{story.run_id}.{ending}").write_text(lines)
    return store
