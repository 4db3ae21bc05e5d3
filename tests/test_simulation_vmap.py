"""vmap by functorch's private names, and by the public API if a version of torch lacks one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from gossamer import Simulation
from gossamer.simulate import Centralized, functorch, gradients, template
from gossamer.simulate.vmap import PublicVmap
from tests import tasks
from tests.tasks import ALL_TASKS, Task

WORKERS = 6
FUNCTORCH = "torch._C._functorch"
PRIVATE = [
    *((FUNCTORCH, "CVmapInterpreterPtr"), (FUNCTORCH, "TransformType")),
    *((FUNCTORCH, "_add_batch_dim"), (FUNCTORCH, "_remove_batch_dim")),
    *((FUNCTORCH, "_unwrap_batched"), (FUNCTORCH, "maybe_current_level")),
    *((FUNCTORCH, "_vmap_increment_nesting"), (FUNCTORCH, "_vmap_decrement_nesting")),
    *((FUNCTORCH, "peek_interpreter_stack"), (FUNCTORCH, "pop_dynamic_layer_stack")),
    *((FUNCTORCH, "push_dynamic_layer_stack"),),
    ("torch._functorch.predispatch", "lazy_load_decompositions"),
]


def anew(module: ModuleType) -> ModuleType:
    """Return a second import of a module, beside the existing one."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_anew", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def lacking(home: str, name: str, found: Any = None) -> ModuleType:
    """Return what computes gradients as imported by a torch that lacks a name, or has another."""
    with pytest.MonkeyPatch.context() as patch:
        if found is None:
            patch.delattr(f"{home}.{name}")
        else:
            patch.setattr(f"{home}.{name}", found)
        patch.delitem(sys.modules, functorch.__name__)
        patch.delattr(gossamer.simulate, "functorch")
        return anew(gradients)


@pytest.mark.parametrize(("home", "name"), PRIVATE)
def test_a_torch_that_lacks_a_name_takes_public_ones(home: str, name: str) -> None:
    """Whichever of the private names is gone, the import falls back to the public API."""
    assert lacking(home, name).FunctorchVmap is None


@pytest.mark.parametrize("name", ["CVmapInterpreterPtr", "TransformType"])
def test_a_torch_whose_names_mean_others_takes_public_ones(name: str) -> None:
    """A name without the attributes that are used counts as missing."""
    assert lacking(FUNCTORCH, name, found=object).FunctorchVmap is None


def test_this_torch_has_all_names() -> None:
    """With this torch the private names are used."""
    assert anew(gradients).FunctorchVmap is functorch.FunctorchVmap


def test_private_names_are_in_one_module() -> None:
    """No other module of the package uses private names of functorch."""
    source = Path(gossamer.__file__).parent
    having = {path.name for path in source.rglob("*.py") if "_functorch" in path.read_text()}
    assert having == {"functorch.py"}


class Inside(nn.Module):
    """A transform of torch.func inside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Map over samples."""
        return torch.vmap(self.linear)(x)


TASKS = ALL_TASKS | {
    "transformer with dropout": Task(lambda: tasks.transformer(dropout=0.3), tasks.tokens),
    "deep LSTM with dropout": Task(
        lambda: tasks.Tokens(4, nn.LSTM(4, 4, 2, batch_first=True, dropout=0.4)), tasks.tokens
    ),
}


def train(kind: Any, task: Task, method: str = "vmap") -> tuple[Any, list[Tensor]]:
    """Return a simulation after some steps, and all their losses."""
    options: dict[str, Any] = {"gradients": method, "dtype": torch.float64}
    sim = kind(task.make(), task.loss, lambda p: SGD(p, lr=0.1), WORKERS, **options)
    return sim, [sim.step(*tasks.batches(task, WORKERS, step)) for step in range(4)]


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulations use only the public API."""
    without = lacking(FUNCTORCH, "_add_batch_dim")
    monkeypatch.setattr(template, "WorkerGradients", without.WorkerGradients)


@pytest.mark.parametrize("kind", [Simulation, Centralized])
@pytest.mark.parametrize("name", TASKS)
def test_public_names_compute_the_same(
    name: str, kind: Any, request: pytest.FixtureRequest
) -> None:
    """Losses, parameters and statistics, with kernels and dropout masks; workers go together."""
    task = TASKS[name]
    expected, losses = train(kind, task)
    request.getfixturevalue("public")
    sim, own = train(kind, task)
    assert isinstance(sim._gradients._gradients._vmap, PublicVmap)
    assert sim.state_dict()["gradients"]["chunk"] == WORKERS
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(own, losses, **close)
    torch.testing.assert_close(sim.parameters, expected.parameters, **close)
    torch.testing.assert_close(sim.average().state_dict(), expected.average().state_dict(), **close)


@pytest.mark.parametrize("names", ["private", "public"])
def test_a_transform_inside_of_the_model_runs_in_a_loop(
    names: str, request: pytest.FixtureRequest
) -> None:
    """Kernels support one dimension of workers; the warning names the layer and the user's line."""
    if names == "public":
        request.getfixturevalue("public")
    task = Task(Inside, tasks.vectors)
    with pytest.warns(UserWarning, match=r"layer 'linear' .* transform of torch\.func") as caught:
        sim, losses = train(Simulation, task)
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    expected, alone = train(Simulation, task, "loop")
    torch.testing.assert_close(losses, alone, rtol=0, atol=0)
    torch.testing.assert_close(sim.parameters, expected.parameters, rtol=0, atol=0)


def test_a_warning_of_memory_names_the_users_line() -> None:
    """Not a line of Gossamer, at any depth of the call."""
    task = ALL_TASKS["mlp"]
    sim = Simulation(task.make(), task.loss, SGD, WORKERS, gradients="vmap")
    held = 2 * sum(p.nbytes for p in sim.parameters.values())
    sim = Simulation(
        task.make(), task.loss, SGD, WORKERS, gradients="vmap", memory_gb=(held + 20) / 1e9
    )
    with pytest.warns(UserWarning, match="activations of one worker") as caught:
        sim.step(*tasks.batches(task, WORKERS, 0))
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
