"""The progress of tuning, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape

from gossamer.bench.tuning import Study, TunedMethod, study_names
from gossamer.cli.terminal import show


def show_studies(studies: Sequence[Study]) -> None:
    """Print a line for each setting that is tuned: its rates, and each method's best."""
    for name, study in zip(study_names(studies), studies, strict=True):
        rates = [rate.lr for rate in study.methods[0].rates]
        added = len(rates) - len(study.given)
        trials = f"{len(rates)} rates × {len(study.seeds)} seeds for each method"
        how_far = f"{trials}, {added} of the rates added" if added else trials
        show(escape(f"tuning {name}: {how_far}; {'; '.join(_best(study))}"))


def _best(study: Study) -> Iterator[str]:
    if not study.over:
        left = sum(rate.quality is None for method in study.methods for rate in method.rates)
        yield f"{left} rates of methods are left to try; more runs follow"
        return
    for method in study.methods:
        yield f"{method.name} {method.best:g}{_remark(method)}"


def _remark(method: TunedMethod) -> str:
    if method.diverged:
        return " (diverged at every rate)"
    return f" (the {method.edge} rate)" if method.edge else ""
