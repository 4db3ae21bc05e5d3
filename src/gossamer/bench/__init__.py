"""DBench: experiments that compare ways to train, a runner that loses nothing, and a report."""

from typing import TYPE_CHECKING, Any

# Lazily: the command line imports this package to say what it can do, without torch.
_WHERE = {
    "Experiment": "experiment",
    "load": "experiment",
    "Matrix": "matrix",
    "expand": "matrix",
    "run_experiment": "runner",
    "Store": "store",
}

if TYPE_CHECKING:
    from gossamer.bench.experiment import Experiment, load
    from gossamer.bench.matrix import Matrix, expand
    from gossamer.bench.runner import run_experiment
    from gossamer.bench.store import Store

__all__ = ["Experiment", "Matrix", "Store", "expand", "load", "run_experiment"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
