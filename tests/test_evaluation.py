"""Evaluations: many models as one, equal ones once, a part of the samples on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from gossamer import records, workloads
from gossamer.engine import RunSpec, run, simulated
from gossamer.engine.distributed import train_rank
from gossamer.engine.evaluation import TestSamples
from gossamer.records import Evaluation
from gossamer.workloads import Data, Workload
from gossamer.workloads.evaluation import MeanMetric, accuracy, next_token_loss
from tests.pool import ProcessPool

EMBEDDED = ("quadratic", "digits-mlp", "digits-cnn", "stdlib-gpt")


def spec(workload: str = "digits-mlp", **options: object) -> RunSpec:
    usual = {"workload": workload, "workers": 4, "epochs": 2, "steps_per_epoch": 3}
    return RunSpec.model_validate({**usual, "topology": "ring", **options})


def evaluations(of: RunSpec) -> list[Evaluation]:
    return [record for record in run(of) if isinstance(record, Evaluation)]


def trained(of: RunSpec) -> Any:
    """Return the simulated engine's workers after two steps."""
    workers = simulated._Virtual(of, None)
    samples = workers.draw(0)
    for batch in range(2):
        workers.step(samples[:, batch], of.lr)
    return workers


def one_pass(model: nn.Module, workload: Workload, data: Data) -> float:
    """Return the metric as it is defined, over all test samples at once."""
    chosen = torch.arange(len(data.test_targets))
    targets = data.test_targets[chosen]
    with torch.no_grad():
        if workload.name == "quadratic":
            points = data.train_inputs[torch.arange(workload.num_train)]
            at_best = (model.get_buffer("scale") * (points.mean(0) - points)).square().sum(
                1
            ).mean() / 2
            return float(model(points).square().sum(1).mean() / 2 - at_best)
        outputs = model(data.test_inputs[chosen])
        if workload.name == "stdlib-gpt":
            return float(next_token_loss(outputs, targets) / torch.log(torch.tensor(2.0)))
        return float((outputs.argmax(1) == targets).double().mean())


@pytest.mark.parametrize("name", EMBEDDED)
def test_replicas_together_are_as_one_by_one(name: str) -> None:
    """Each metric is that of the worker's own module, and of all samples in one pass."""
    last = name != "stdlib-gpt"  # whose samples take seconds
    workers = trained(spec(name, batch_size=2, evaluate_samples=96))
    metrics = workers.evaluate([0, 2, 3], last)
    workload, data = workloads.find(name), workers._tests.data(last)
    assert metrics.samples == (None if last else 96)
    for worker, metric in metrics.replicas.items():
        model = workers._sim.worker(worker).eval()
        assert metric == pytest.approx(workload.evaluate(model, data), rel=1e-6)
        assert metric == pytest.approx(one_pass(model, workload, data), rel=1e-5)
    average = workers._sim.average().eval()
    assert metrics.average == pytest.approx(workload.evaluate(average, data), rel=1e-6)
    assert len({metrics.average, *metrics.replicas.values()}) > 1


def test_an_evaluation_leaves_workers_as_they_were() -> None:
    """Parameters and buffers stay what they are, also where a forward pass changes buffers."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 10)
            self.register_buffer("passes", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return self.linear(x)

    workers = trained(spec())
    sim = simulated.Simulation(
        Counting(), nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.1), 4, "ring"
    )
    sim.step(torch.randn(4, 2, 64), torch.randint(10, (4, 2)))
    workers._sim = workers.mixing = sim
    before = {n: t.clone() for w in range(4) for n, t in sim.tensors(w).items()}
    assert workers.evaluate([0, 1], last=True).replicas.keys() == {0, 1}
    after = {n: t for w in range(4) for n, t in sim.tensors(w).items()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def counted(monkeypatch: pytest.MonkeyPatch, metric: Callable[[Workload], Any]) -> list[int]:
    """Give digits-mlp another metric; return where calls of models are counted."""
    calls: list[int] = []
    usual = workloads.find("digits-mlp")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                calls.append(len(x))
            return self.linear(x)

    other = dataclasses.replace(usual, make_model=Model, evaluate=metric(usual))
    monkeypatch.setitem(workloads.WORKLOADS, "digits-mlp", lambda: other)
    return calls


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("fields", "models"),
    [
        ({"topology": "centralized"}, 1),
        ({"topology": "complete", "order": "atc"}, 1),
        ({"topology": "ring"}, 5),
        ({"topology": "ring", "evaluate_replicas": 2}, 3),
        ({"topology": "ring", "evaluate_replicas": 0}, 1),
    ],
)
def test_equal_models_are_evaluated_once(
    fields: dict[str, Any], models: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of Centralized, and after an exact average; a metric of one's own is asked as seldom."""

    def metric(usual: Workload) -> Any:
        return (lambda model, data: accuracy()(model, data)) if own else usual.evaluate

    calls = counted(monkeypatch, metric)
    evaluated = evaluations(spec(**fields))
    assert calls == [297] * models * len(evaluated)
    assert all(len(e.replicas) == fields.get("evaluate_replicas", 4) for e in evaluated)


def test_a_part_of_the_samples_on_the_way_and_all_at_the_end() -> None:
    """Records say which; the last evaluation does not depend on it, and training neither."""
    (part, last), (whole, last_of_all) = (
        evaluations(spec(evaluate_samples=num)) for num in (100, 0)
    )
    assert (part.samples, last.samples, whole.samples) == (100, None, None)
    assert (last.average, last.replicas) == (last_of_all.average, last_of_all.replicas)
    assert (part.average * 100) == pytest.approx(round(part.average * 100))
    assert evaluations(spec(evaluate_samples=9999))[0].samples is None


def test_the_part_is_the_same_in_all_runs_and_is_read_when_asked_for() -> None:
    """Whatever the seed and the method; samples that are files are not read before."""

    class Files:
        read: ClassVar[list[int]] = []

        def __len__(self) -> int:
            return 50

        def __getitem__(self, chosen: torch.Tensor) -> torch.Tensor:
            self.read.extend(chosen.tolist())
            return chosen.float()

    data = Data(Files(), Files(), Files(), torch.arange(50))
    others: list[dict[str, Any]] = [{}, {"seed": 5, "topology": "centralized"}]
    parts = [
        TestSamples(spec(evaluate_samples=7, **fields), data).data(last=False) for fields in others
    ]
    assert not Files.read
    numbers = [part.test_samples for part in parts if part.test_samples is not None]
    assert torch.equal(*numbers)
    assert len(set(numbers[0].tolist())) == len(parts[0].test_inputs) == 7
    assert torch.equal(parts[0].test_targets[torch.tensor([1, 3])], numbers[0][[1, 3]])
    assert parts[0].test_inputs[torch.tensor([2])] == numbers[0][2]
    assert Files.read == [numbers[0][2]]
    again = parts[0].with_tests(torch.tensor([6, 0]))
    assert again.test_samples is not None
    assert torch.equal(again.test_samples, numbers[0][[6, 0]])


def on_ranks(text: str) -> list[str]:
    """Train as one rank of a pool."""
    return [records.to_line(record) for record in train_rank(RunSpec.model_validate_json(text))]


@pytest.mark.parametrize("topology", ["ring", "centralized"])
@pytest.mark.parametrize("name", ["quadratic", "digits-mlp"])
def test_ranks_evaluate_as_the_simulation_does(name: str, topology: str, pool: ProcessPool) -> None:
    """Each takes a part of the average model's samples, and there may be none for some."""
    of = spec(name, topology=topology, dtype="float64", evaluate_samples=3, evaluate_replicas=2)
    real = [records.from_line(line) for line in pool.run(on_ranks, of.model_dump_json())[0]]
    for one, other in zip(
        evaluations(of), (r for r in real if isinstance(r, Evaluation)), strict=True
    ):
        assert other.samples == one.samples
        assert other.average == pytest.approx(one.average, abs=1e-10)
        assert other.replicas == pytest.approx(one.replicas, abs=1e-10)


def test_ids_know_the_samples_only_where_a_run_asks_for_others() -> None:
    """Runs of before there was a choice keep their ids, and their records can be read."""
    assert spec("digits-mlp", epochs=10, steps_per_epoch=25).id == "0af7343446606ed1"
    assert RunSpec(workload="fashion-mnist-cnn", workers=4, topology="ring").id == (
        "85f4bc809147e98a"
    )
    assert spec(evaluate_samples=5).id != spec().id
    assert spec("digits-cnn", evaluate_samples=75).id == spec("digits-cnn").id
    line = (
        '{"kind":"evaluation","step":1,"epoch":0,"average":0.5,"replicas":{"0":0.5},'
        '"bytes_sent":0.0,"train_s":0.1}'
    )
    old = records.from_line(line)
    assert isinstance(old, Evaluation)
    assert old.samples is None


def test_sums_of_parts_make_the_metric_of_the_whole() -> None:
    """Totals and counts add up, and a part without samples adds nothing."""

    def parts(data: Data) -> Iterator[Data]:
        for chosen in (torch.arange(5), torch.arange(0), torch.arange(5, 80)):
            yield data.with_tests(chosen)

    workload = workloads.find("stdlib-gpt")
    metric, model = workload.evaluate, workload.make_model().eval()
    data = workload.load().with_tests(torch.arange(80))
    assert isinstance(metric, MeanMetric)
    sums = [metric.sums([model], torch.float32, part) for part in parts(data)]
    total, num = sum(totals[0] for totals, _ in sums), sum(num for _, num in sums)
    assert sums[1] == ([0.0], 0)
    assert metric.finish(total, num) == pytest.approx(metric(model, data), rel=1e-6)
