"""Both engines run the same specification and yield the same records."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from gossamer import records
from gossamer.engine import RunSpec, run
from gossamer.engine.distributed import RunError, train_rank
from gossamer.errors import UserError
from gossamer.records import Ended, Evaluation, Started, Step
from tests.pool import ProcessPool


def spec(**options: object) -> RunSpec:
    usual = {"workload": "digits-mlp", "workers": 4, "epochs": 2, "steps_per_epoch": 6}
    return RunSpec.model_validate({**usual, "log_every": 3, "dtype": "float64", **options})


def on_ranks(text: str) -> list[str]:
    """Train as one rank of a pool."""
    return [records.to_line(record) for record in train_rank(RunSpec.model_validate_json(text))]


@pytest.mark.parametrize(
    "options",
    [
        {"topology": "ring"},
        {"topology": "one_peer_ring", "order": "atc"},
        {"topology": "centralized"},
        {"topology": "ring", "control": "adaptive(s=0.05)"},
        {"topology": "complete", "every": 3, "order": "atc", "outer_lr": 0.7},
        {"topology": "ada(k0=4, gamma=2)", "lr_scaling": "linear", "lr_follows_graph": True},
        {"topology": "ring", "max_steps": 8},
        {"topology": "ring", "control": "adaptive(s=0.05)", "clip_norm": 0.5},
        {"topology": "centralized", "clip_norm": 0.5},
        {"topology": "ring", "optimizer": "accum_adamw", "lr": 0.01},
        {"topology": "centralized", "optimizer": "accum_adamw", "lr": 0.01},
        {"topology": "ring", "optimizer": "smooth_adamw", "lr": 0.01},
    ],
)
def test_both_engines_yield_the_same_records(options: dict[str, str], pool: ProcessPool) -> None:
    """Losses, distances, bytes and accuracies agree, to rounding, in record after record."""
    virtual = list(run(spec(**options)))
    lines = pool.run(on_ranks, spec(**options).model_dump_json())
    real = list(map(records.from_line, lines[0]))
    assert [record.kind for record in virtual] == [record.kind for record in real]
    for one, other in zip(virtual, real, strict=True):
        if isinstance(one, Step):
            assert isinstance(other, Step)
            for field in ("loss", "worst_loss", "distance", "theta"):
                assert getattr(other, field) == pytest.approx(getattr(one, field), abs=1e-10)
            assert other.dispersion.keys() == one.dispersion.keys()
            for name, spread in one.dispersion.items():
                assert other.dispersion[name] == pytest.approx(spread, abs=1e-10)
            assert other.target == pytest.approx(one.target, abs=1e-10)
            assert (other.rounds, other.degree) == (one.rounds, one.degree)
            # Buckets are sent with the padding that aligns their parameters.
            assert other.bytes_sent == pytest.approx(one.bytes_sent, rel=1e-2)
            assert (other.step, other.epoch, other.lr) == (one.step, one.epoch, one.lr)
        if isinstance(one, Evaluation):
            assert isinstance(other, Evaluation)
            assert (other.average, other.replicas) == (one.average, one.replicas)


def test_a_run_tells_its_story_in_order() -> None:
    """Started, steps at their interval, an evaluation per epoch, and the end."""
    story = list(run(spec()))
    assert [record.kind for record in story] == [
        *("started", "step", "step", "evaluation", "step", "step", "evaluation", "ended"),
    ]
    first, last = story[0], story[-1]
    assert isinstance(first, Started)
    assert RunSpec.model_validate(first.spec).id == first.run_id == spec().id
    assert isinstance(last, Ended)
    assert (last.status, last.steps) == ("done", 12)


@pytest.mark.parametrize(
    ("limit", "steps"),
    [({"max_steps": 5}, 5), ({"max_bytes": 6.5e5}, 5), ({"max_train_s": 1e-6}, 1)],
)
def test_a_budget_ends_a_run_at_the_step_that_reaches_it(
    limit: dict[str, float], steps: int
) -> None:
    """Its last step is recorded, the model evaluated, and the rate has come down by then."""
    story = list(run(spec(topology="ring", order="atc", log_every=100, **limit)))
    step, evaluation, end = story[-3:]
    assert isinstance(step, Step)
    assert isinstance(evaluation, Evaluation)
    assert isinstance(end, Ended)
    assert (step.step, evaluation.step, end.steps, end.status) == (steps, steps, steps, "done")
    if steps > 1:
        assert step.lr < 0.25 * spec().lr


@pytest.mark.parametrize(
    ("order", "control", "degrees"),
    [
        ("awc", "plain", [6, 2, 2, 2]),  # of the next step
        ("awc", "ada_consensus(plain)", [6, 2, 2, 2]),
        ("atc", "plain", [6, 6, 2, 2]),  # of the step that was taken
        ("atc", "repeat(plain)", [6, 6, 2, 2]),
    ],
)
def test_records_tell_the_rounds_that_were_chosen_last(
    order: str, control: str, degrees: list[int]
) -> None:
    """With a control and without; Ada's graph changes after six steps, three per record."""
    ada = spec(workers=8, topology="ada(k0=6, gamma=4)", order=order, control=control)
    assert [step.degree for step in run(ada) if isinstance(step, Step)] == degrees


def test_a_run_that_diverges_ends_and_says_so() -> None:
    """Losses that are no longer finite end the run; they are kept as they are."""
    story = list(run(spec(lr=1e200, log_every=1)))
    last, step = story[-1], story[-2]
    assert isinstance(last, Ended)
    assert last.status == "diverged"
    assert isinstance(step, Step)
    read = records.from_line(records.to_line(step))
    assert isinstance(read, Step)
    assert not math.isfinite(read.loss)
    assert "after 1 steps" in last.reason or "after 2 steps" in last.reason


def test_records_survive_their_line_and_others_are_refused() -> None:
    """A line reads back as the record; a newer schema or a foreign line is refused."""
    for record in run(spec(epochs=1)):
        assert records.from_line(records.to_line(record)) == record
    newer = '{"kind": "started", "schema_version": 99, "something": "new"}'
    with pytest.raises(UserError, match="of schema 1 or older, got 99"):
        records.from_line(newer)
    with pytest.raises(UserError, match=r"got '.*' \(step: epoch: Field required\); remove"):
        records.from_line('{"kind": "step", "step": 3}')
    with pytest.raises(UserError, match=r"got 'nonsense' \(Invalid JSON: "):
        records.from_line("nonsense")


def test_a_specification_takes_its_recipe_and_has_an_id() -> None:
    """What is not given comes from the workload; every field that decides a result is in the id."""
    usual = RunSpec(workload="digits-mlp", workers=4)
    assert usual.optimizer == "sgd"
    assert usual.optimizer_options == {"momentum": 0.9, "nesterov": True}
    assert usual.num_steps == 250
    assert usual.lr_at(0) == 0.1
    assert usual.lr_at(125) == pytest.approx(0.05)
    ids = {usual.id} | {
        usual.model_copy(update=change).id
        for change in ({"workers": 5}, {"seed": 1}, {"lr": 0.2}, {"clip_norm": 1.0})
    }
    assert len(ids) == 5
    assert usual.id == "428ccd6ac59243f6"  # fields that came later leave the ids of older records
    assert RunSpec(workload="digits-mlp", workers=4, optimizer="adamw").optimizer_options == {}
    windowed = [spec(optimizer=f"accum_adamw(window={window})") for window in ("4", "auto", "2")]
    assert [each.optimizer_options["window"] for each in windowed] == [4, "auto", 2]
    assert type(windowed[0].optimizer_options["window"]) is int
    assert len({each.id for each in windowed}) == 3
    whole, real = (spec(optimizer_options={"momentum": number}) for number in (0, 0.0))
    assert whole.id == real.id


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workload": "digit-mlp"}, "did you mean 'digits-mlp'"),
        ({"topology": "rign"}, "did you mean 'ring'"),
        (
            {"optimizer": "sdg"},
            r"unknown optimizer 'sdg' \(did you mean 'sgd'\?\); choose from sgd",
        ),
        ({"lr_schedule": "cosin"}, "unknown lr_schedule 'cosin' .*; choose from constant"),
        ({"gossip_steps": 2}, "awc mixes once per step"),
        (
            {"control": "exact", "topology": "centralized"},
            "so it takes no option of gossip, got {'control'",
        ),
        ({"wire": "bf16", "topology": "centralized"}, "got {.wire.: .bf16.}"),
        (
            {"algorithm": "push_sum", "topology": "centralized"},
            "got {'algorithm': 'push_sum'}; leave it out",
        ),
        ({"topology": "local_sgd(every=8)"}, "use .complete. with algorithm=.atc. and every=8"),
        ({"control": "constant(c=0)"}, "needs a finite c > 0"),
        ({"optimizer_options": {"no_such_option": 1.0}}, "must be those of sgd"),
        ({"optimizer_options": 3}, "optimizer_options\n.*valid dictionary"),
        ({"optimizer_options": None}, "optimizer_options\n.*valid dictionary"),
        ({"workload": 5}, "workload\n.*valid string"),
        ({"workers": "four"}, "workers\n.*valid integer"),
        ({"workers": 0}, "greater than or equal to 1"),
        ({"sede": 3}, "sede"),
    ],
)
def test_bad_specifications_are_refused(options: dict[str, object], words: str) -> None:
    """When they are made, with what was required."""
    with pytest.raises((UserError, ValidationError), match=words):
        spec(**options)


def test_a_rank_that_fails_ends_the_run_with_its_words() -> None:
    """The error of a real run shows what a rank said."""
    broken = spec(engine="distributed", workers=2).model_copy(update={"dtype": "no_such"})
    with pytest.raises(RunError, match="no_such"):
        list(run(broken))


def test_ranks_refuse_another_source_than_the_one_that_named_the_run(tmp_path: Path) -> None:
    """A plug-in that is edited before they load it: they say so, and no record is made."""
    file = tmp_path / "graph.py"
    file.write_text("from gossamer.topology import ring as own\n")
    named = spec(engine="distributed", workers=2, topology=f"{file}:own")
    file.write_text("from gossamer.topology import complete as own\n")
    with pytest.raises(UserError, match=r"got another one on rank [01]; make the files equal"):
        next(run(named))
