"""DBench: experiments that compare ways to train, a resumable runner, and a report."""

from gossamer.bench.experiment import Experiment, load
from gossamer.bench.matrix import Matrix, expand
from gossamer.bench.runner import run_experiment
from gossamer.bench.store import Store

__all__ = ["Experiment", "Matrix", "Store", "expand", "load", "run_experiment"]
