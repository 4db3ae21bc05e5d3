"""Results of an experiment as a printed table and as a small file.

    python -m benchmarks.evidence results/adam-stdlib-gpt --out evidence/adam-stdlib-gpt.csv
    python -m benchmarks.evidence evidence/adam-stdlib-gpt.csv
    python -m benchmarks.evidence evidence/wire-digits-cnn.csv --field wire

Records of an experiment take megabytes; its conclusions need one row per run. A run's specification
follows from the experiment and the results of its trials, so a row has only its id, its result, and
fields for readers: ``experiments/NAME.toml`` belongs to ``evidence/NAME.csv``. A row whose id is
not in the experiment is an error: the experiment was edited since.

Prints, for every setting, each method at its best rate, and its paired difference from all-reduce
in the same setting: in percent of a loss, in the metric itself where more is better. With
``--field``, the difference from the method that has the defaults of these fields and is otherwise
the same: from ``ring`` in full precision for ``ring`` in 8 bits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import polars as pl
import typer

from benchmarks.claims import claims
from gossamer.bench import experiment as experiments
from gossamer.bench.analysis import MEASURES, PHASES
from gossamer.bench.analysis.observations import phase_dispersion, run_dispersion
from gossamer.bench.analysis.statistics import Interval, Noise, interval, noise, p_value
from gossamer.bench.analysis.tabulate import RunRows, join, rows_of
from gossamer.bench.matrix import expand
from gossamer.bench.store import Store
from gossamer.bench.tuning import is_trial
from gossamer.engine import CENTRALIZED, RunSpec
from gossamer.errors import UserError, nearest
from gossamer.files import write_atomic
from gossamer.records import RESULTS, Started

_EXPERIMENTS = Path(__file__).parents[1] / "experiments"

_OF_METHOD = {
    *("method", "lr", "seed", "validation_share", "topology", "algorithm", "every", "control"),
    *("gossip_steps", "optimizer", "optimizer_options", "outer_lr", "outer_momentum"),
    *("wire", "fragments"),
}
"""Fields in which runs of one setting differ."""

_FACTS = (
    *("megabytes", "connections", "train_s"),
    *(f"{phase} {measure}" for phase in PHASES for measure in MEASURES),
)
"""What is stored of a run besides its result, if known: megabytes sent by a worker, neighbours per
step, seconds in steps, and the dispersion of norms over replicas in each third of training."""

_MOST_STEPS = 60
"""The most steps that are stored of a run."""

_FEW_SEEDS = 4
"""With at least so many seeds the noise of a difference is estimated from itself."""


class Result(NamedTuple):
    """The result of one run."""

    spec: RunSpec
    final: float | None
    """The final metric of the average model; None if it diverged."""

    commit: str
    date: str
    facts: Mapping[str, float] = MappingProxyType({})
    """By the names of ``_FACTS``."""

    @property
    def is_trial(self) -> bool:
        """Whether it is a trial of a learning rate."""
        return is_trial(self.spec.model_dump())


def read(path: Path) -> list[Result]:
    """Return the results in a folder of ``gossamer bench run``, or in a file of this command."""
    return _from_file(path) if path.suffix == ".csv" else _from_records(Store(path))


def _from_records(store: Store) -> list[Result]:
    if not store.experiment_path.is_file():
        raise UserError(
            f"a folder must be the --out of gossamer bench run, got {store.folder} without "
            f"{store.experiment_path.name}; pass another folder"
        )
    results: list[Result] = []
    for run_id, stamps in store.stamps().items():
        story = store.read(run_id)
        started, rows = next(iter(story.records), None), rows_of(story)
        if rows is None or not isinstance(started, Started) or rows.run["status"] not in RESULTS:
            typer.echo(f"run {run_id} has not ended and is left out", err=True)
            continue
        ended = datetime.fromtimestamp(max(when for _, when, _ in stamps) / 1e9, UTC)
        results.append(
            Result(
                RunSpec.model_validate(started.spec),
                rows.run["final"],
                started.environment.get("commit", ""),
                ended.date().isoformat(),
                _facts(rows),
            )
        )
    return results


def _facts(rows: RunRows) -> dict[str, float]:
    """Return what is stored of a run besides its result."""
    run = rows.run
    known = {
        "megabytes": run["bytes_sent"] / 1e6,
        "connections": run["connections"],
        "train_s": run["train_s"],
    }
    for row in run_dispersion(phase_dispersion(join([rows], {}))).iter_rows(named=True):
        known |= {f"{row['phase']} {measure}": row[measure] for measure in MEASURES}
    return {name: _rounded(known[name]) for name in _FACTS if known.get(name) is not None}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _from_file(path: Path) -> list[Result]:
    experiment = experiments.load(_EXPERIMENTS / f"{path.stem}.toml")
    rows = {
        row["run_id"]: row
        for row in pl.read_csv(path, infer_schema_length=None).iter_rows(named=True)
    }
    trials = {run_id: row["final"] for run_id, row in rows.items() if row["kind"] == "trial"}
    specs = {spec.id: spec for spec in expand(experiment, trials).runs}
    if unknown := rows.keys() - specs.keys():
        raise UserError(
            f"{path} must hold runs of {experiment.name}, got {len(unknown)} of {len(rows)} that "
            f"are not, such as {min(unknown)}; the experiment was edited since: run it again"
        )
    return [
        Result(
            specs[run_id],
            row["final"],
            row["commit"],
            row["date"],
            {name: row[name] for name in _FACTS if row.get(name) is not None},
        )
        for run_id, row in rows.items()
    ]


def varied(results: Sequence[Result]) -> list[str]:
    """Return the fields in which settings differ."""
    specs = [result.spec.model_dump() for result in results]
    names = [name for name in RunSpec.model_fields if name not in _OF_METHOD]
    return [name for name in names if len({str(spec[name]) for spec in specs}) > 1]


def write(results: Sequence[Result], path: Path) -> None:
    """Write results, one per row, sorted by setting, method, rate and seed."""
    fields = varied(results)
    known = [name for name in _FACTS if any(name in result.facts for result in results)]
    rows = [
        {
            "run_id": result.spec.id,
            **{name: getattr(result.spec, name) for name in (*fields, "method", "lr", "seed")},
            "kind": "trial" if result.is_trial else "final",
            "final": None if result.final is None else _rounded(result.final),
            **{name: result.facts.get(name) for name in known},
            "commit": result.commit,
            "date": result.date,
        }
        for result in results
    ]
    ordered = pl.DataFrame(rows, infer_schema_length=None).sort(
        *fields, "method", "kind", "lr", "seed"
    )
    write_atomic(path, ordered.write_csv)


def write_steps(folder: Path, path: Path) -> None:
    """Write the consensus distance and the target at a few steps of runs with a control."""
    tables: list[pl.DataFrame] = []
    for story in Store(folder).stories():
        rows = rows_of(story)
        if rows is None or rows.run["control"] == "plain" or not len(rows.steps):
            continue
        few = rows.steps.gather_every(math.ceil(len(rows.steps) / _MOST_STEPS))
        numbers = few.select("step", pl.col("lr", "distance", "target").round_sig_figs(4))
        spec = rows.run["spec"]
        tables.append(
            numbers.select(
                pl.lit(spec["method"]).alias("method"), pl.lit(spec["seed"]).alias("seed"), pl.all()
            )
        )
    if not tables:
        raise UserError(f"--steps needs runs with a control, got none in {folder}; leave it out")
    ordered = pl.concat(tables).sort("method", "seed", "step")
    write_atomic(path, ordered.write_csv)


class Compared(NamedTuple):
    """A method in a setting, and its difference from the reference."""

    setting: tuple[Any, ...]
    method: str
    runs: list[Result]
    gap: Interval | None
    """In percent of a loss, in the metric itself where more is better; None for the reference."""

    p: float | None
    unit: str


def compare(
    results: Sequence[Result], fields: Sequence[str] = (), method: str = ""
) -> list[Compared]:
    """Return every setting and method, all-reduce first, with its difference from the reference.

    The reference is all-reduce; with ``fields``, the method that has their defaults; or the method
    with the name ``method``.
    """
    final = [result for result in results if not result.is_trial and result.final is not None]
    axes = varied(final)
    rows: list[Compared] = []
    for setting in sorted({_setting(result.spec, axes) for result in final}):
        own = [result for result in final if _setting(result.spec, axes) == setting]
        known = _noise(own)
        for _, name in sorted({(r.spec.topology != CENTRALIZED, r.spec.method) for r in own}):
            runs = [result for result in own if result.spec.method == name]
            chosen = (r for r in own if _is_reference(r.spec, runs[0].spec, fields, method))
            rows.append(Compared(setting, name, runs, *_gap(runs, _by_seed(chosen), known)))
    return rows


def table(results: Sequence[Result], fields: Sequence[str] = (), method: str = "") -> str:
    """Return the result of ``compare`` as Markdown."""
    axes = varied([result for result in results if not result.is_trial])
    beside = method or ("the default" if fields else "all-reduce")
    heads = [*axes, "method", "rate", "seeds", "mean", f"from {beside}", "95 % interval", "p"]
    rows = [
        [*row.setting, row.method, _rate(row.runs), len(row.runs), *_cells(row)]
        for row in compare(results, fields, method)
    ]
    return "\n".join([_line(heads), f"|{'---|' * len(heads)}", *map(_line, rows)])


def _is_reference(spec: RunSpec, of: RunSpec, fields: Sequence[str], method: str) -> bool:
    """Return whether a run belongs to the reference of another run's method."""
    if spec.method == of.method:
        return False
    if method:
        return spec.method == method
    if not fields:
        return spec.topology == CENTRALIZED
    defaults = {name: RunSpec.model_fields[name].default for name in fields}
    plain = of.model_copy(update={**defaults, "method": spec.method, "seed": spec.seed})
    return spec == plain


def _line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _setting(spec: RunSpec, fields: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(spec, name) for name in fields)


def _by_seed(results: Iterable[Result]) -> dict[int, float]:
    return {r.spec.seed: r.final for r in results if r.final is not None}


def _rate(runs: Sequence[Result]) -> str:
    rates = sorted({run.spec.lr for run in runs})
    return " to ".join(f"{rate:g}" for rate in dict.fromkeys((rates[0], rates[-1])))


def _noise(runs: Sequence[Result]) -> Noise | None:
    """Return the noise of all methods of a setting over their common seeds, if these are few.

    For a loss it is the noise of its logarithm, because differences are relative.
    """
    by_method: dict[str, list[Result]] = {}
    for run in runs:
        by_method.setdefault(run.spec.method, []).append(run)
    results = [_by_seed(own) for own in by_method.values()]
    shared = sorted(set[int].intersection(*map(set, results)))
    if not 1 < len(shared) < _FEW_SEEDS:
        return None
    as_compared = float if runs[0].spec.make_workload().higher_is_better else math.log
    return noise([[as_compared(own[seed]) for seed in shared] for own in results])


def _gap(
    runs: Sequence[Result], reference: dict[int, float], known: Noise | None
) -> tuple[Interval | None, float | None, str]:
    """Return the paired difference from the reference, its p and its unit."""
    own = _by_seed(runs)
    more_is_better = runs[0].spec.make_workload().higher_is_better
    unit = "" if more_is_better else " %"
    differences = [
        own[seed] - reference[seed] if more_is_better else 100 * (own[seed] / reference[seed] - 1)
        for seed in sorted(own.keys() & reference.keys())
    ]
    if not differences:
        return None, None, unit
    if len(differences) >= _FEW_SEEDS:
        known = None
    elif known is not None and not more_is_better:
        known = known._replace(variance=100**2 * known.variance)
    return interval(differences, known), p_value(differences, known), unit


def _cells(row: Compared) -> list[str]:
    mean = f"{statistics.fmean(_by_seed(row.runs).values()):.4g}"
    if row.gap is None:
        return [mean, "–", "–", "–"]
    low, high = (math.nan if end is None else end for end in (row.gap.low, row.gap.high))
    p = "–" if row.p is None else f"{row.p:.2g}"
    return [mean, f"{row.gap.mean:+.2g}{row.unit}", f"{low:+.2g} to {high:+.2g}", p]


def main(
    path: Annotated[
        Path, typer.Argument(help="Folder of gossamer bench run, or file of this command.")
    ],
    out: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    steps: Annotated[
        Path | None, typer.Option(help="Write distances and targets of a folder to this file.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(help="Compare with the method that has this field's default, as wire."),
    ] = None,
    reference: Annotated[
        str, typer.Option(help="Compare with the method of this name.", show_default="all-reduce")
    ] = "",
) -> None:
    """Print the results of an experiment, and write them to a file."""
    fields = field or []
    if unknown := set(fields) - set(RunSpec.model_fields):
        name = min(unknown)
        known = nearest(name, RunSpec.model_fields)
        raise UserError(f"--field must name a field of a run, got {name!r}; {known}")
    results = read(path)
    if not results:
        raise UserError(f"{path} must hold runs that have ended, got none; wait until some have")
    methods = {result.spec.method: None for result in results}
    if reference and reference not in methods:
        raise UserError(
            f"--reference must name a method of {path}, got {reference!r}; "
            f"{nearest(reference, methods)}"
        )
    if out is not None:
        write(results, out)
    if steps is not None:
        write_steps(path, steps)
    print(table(results, fields, reference))
    compared = [
        (result.spec, result.final, result.facts)
        for result in results
        if not result.is_trial and result.final is not None
    ]
    if found := claims(compared):
        print(f"\n{found}")
    seconds = [result.facts["train_s"] for result in results if "train_s" in result.facts]
    if seconds:
        print(f"\n{len(seconds)} runs, {sum(seconds) / 3600:.1f} hours in steps")


if __name__ == "__main__":
    typer.run(main)
