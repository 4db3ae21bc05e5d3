"""Gossip inside Accelerate, Lightning and Hugging Face's Trainer, on processes as torchrun's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launched import Call, run_launched

# Each process imports a framework, which takes seconds; a loaded machine takes its time.
pytestmark = pytest.mark.timeout(240)

FRAMEWORKS = ("accelerate", "lightning", "transformers")
EXAMPLES = {
    "accelerate": ("accelerate_prepare", {"EPOCHS": 2}),
    "lightning": ("lightning_strategy", {"EPOCHS": 2}),
    "transformers": ("transformers_trainer", {"STEPS": 12}),
}
MORE: dict[str, list[Call]] = {
    "accelerate": [("resume", ("train_and_resume",))],
    "lightning": [("train_more_ways", ("ways",))],
    "transformers": [("train_more_ways", ("ways",))],
}


def calls_of(framework: str) -> list[Call]:
    name, constants = EXAMPLES[framework]
    return [
        ("train_by_sgd", (False, "ddp")),
        ("train_by_sgd", (True, "gossip")),
        ("train_and_resume", ("train_and_resume",)),
        ("refuse", ("refuse",)),
        ("run_example", (name, (), constants)),
        *MORE[framework],
    ]


# Trainer starts from Accelerate: what both do is looked at with Accelerate every time.
@pytest.fixture(
    scope="module",
    params=["accelerate", "lightning", pytest.param("transformers", marks=pytest.mark.full)],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two ranks answered to each call, for one framework after the other."""
    folder, calls = tmp_path_factory.mktemp(request.param), calls_of(request.param)
    answers = run_launched(f"tests.launched_{request.param}", calls, folder)
    names = [f"{name}{arguments[0]}" if "sgd" in name else name for name, arguments in calls]
    return {"framework": request.param, **dict(zip(names, answers, strict=True))}


def all_equal(tensors: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(tensors[0], tensor) for tensor in tensors)


def test_exact_gossip_is_ddp(results: Any) -> None:
    """SGD, the complete graph and atc come to DDP's parameters, in either framework.

    So data are sharded, losses scaled, gradients accumulated and rates scheduled as with DDP.
    """
    ddp, gossip = results["train_by_sgdFalse"], results["train_by_sgdTrue"]
    assert all_equal(ddp)
    for own, expected in zip(gossip, ddp, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_is_the_same_run(results: Any) -> None:
    """From a checkpoint in the middle, with windows, clipping and awc, bit for bit.

    What a framework saves as its model is the average, which its own validation was of.
    """
    ranks = results["train_and_resume"]
    if results["framework"] == "accelerate":
        for rank, other in zip(ranks, results["resume"], strict=True):
            assert torch.equal(rank["again"], rank["whole"])
            assert torch.equal(other, rank["whole"])
            for file in ("state", "model"):
                assert rank[file].keys() == rank["average"].keys()
                assert all(torch.equal(rank[file][k], v) for k, v in rank["average"].items())
            assert (rank["steps"], rank["kept"]) == (8, ["step-00000004"])
        assert not torch.equal(ranks[0]["whole"], ranks[1]["whole"])  # workers differ
        return
    assert all_equal([rank[name] for rank in ranks for name in ("whole", "resumed")])
    assert all(rank["steps"] == rank["resumed_steps"] for rank in ranks)
    if results["framework"] == "lightning":
        assert ranks[0]["seen"] == ranks[1]["seen"]
        assert ranks[0]["sum_of_saved"] in ranks[0]["seen"]
        replicas = {name for name in ranks[0]["kept"] if name.endswith(".gossip")}
        kept = {name for name in ranks[0]["kept"] if name.endswith(".ckpt")}
        assert replicas == {f"{name}.gossip" for name in kept}
        assert len(kept) == 3  # two of three, and the last
    else:
        assert ranks[0]["losses"][0] == ranks[0]["loss_of_saved"]
        assert all_equal([rank[name] for rank in ranks for name in ("whole", "last")])


def test_training_through_ddp_is_refused(results: Any) -> None:
    """A wrapper that the framework made is found, and a handle that is not there is said to be."""
    for said in results["refuse"]:
        assert "got a forward pass through a DDP wrapper of it" in said[0]
        assert sum("gossip must have been started" in message for message in said) == 1
        if results["framework"] == "transformers":
            assert "DDP and gossip must not connect the same ranks" in said[1]
            assert "got auto_find_batch_size" in said[2]
        elif results["framework"] == "accelerate":
            assert "got 1 models and 0 optimizers" in said[2]
            assert "got 0 models and 1 optimizers" in said[3]


def test_the_example_runs(results: Any) -> None:
    """On two ranks, of which one prints the loss of the average."""
    first, second = results["run_example"]
    assert re.search(r"evaluation loss \d\.\d+", first)
    assert "evaluation loss" not in second


def test_other_ways_to_train(results: Any) -> None:
    """In bfloat16; again after the end; with the best model at the end; to an exception."""
    if results["framework"] == "lightning":
        ranks = results["train_more_ways"]
        for name in ("first", "second"):
            assert all_equal([rank[name] for rank in ranks])
        assert not torch.equal(ranks[0]["first"], ranks[0]["second"])
        assert "rank 1 raised ZeroDivisionError()" in ranks[0]["raised"]
    elif results["framework"] == "transformers":
        ranks = results["train_more_ways"]
        assert all_equal([rank[name] for rank in ranks for name in ("average", "best")])
        assert len(ranks[0]["kept"]) == 1
    else:
        assert all(rank["kept"] == ["step-00000004"] for rank in results["train_and_resume"])


@pytest.mark.parametrize(
    ("framework", "name"),
    [("accelerate", "Accelerator"), ("lightning", "Strategy"), ("transformers", "Trainer")],
)
def test_an_extra_that_is_missing_is_named(framework: str, name: str) -> None:
    """With who needs it and what to install, when the module is imported."""
    program = (
        f"import sys; sys.modules[{framework!r}] = None; import gossamer.frameworks.{framework}"
    )
    if framework == "transformers":  # which brings accelerate
        program = f"import accelerate; {program}"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    expected = f"Gossip{name} needs {framework}, which is not installed; pip install "
    assert expected + f"'gossamer[{framework}]'" in result.stderr


def test_every_framework_has_its_row() -> None:
    """The package has a module for each, and the page a column."""
    folder = Path(__file__).parents[1] / "src" / "gossamer" / "frameworks"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "replicas"}
    assert modules == {*FRAMEWORKS}
