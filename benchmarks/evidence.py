"""Results of an experiment as a printed table and as a small file.

    python -m benchmarks.evidence results/adam-stdlib-gpt --out evidence/adam-stdlib-gpt.csv
    python -m benchmarks.evidence evidence/adam-stdlib-gpt.csv
    python -m benchmarks.evidence evidence/wire-digits-cnn.csv --field wire
    python -m benchmarks.evidence evidence/adam-stdlib-gpt*.csv --pooled --reference "gossip, AdamW"

Records of an experiment take megabytes; its conclusions need one row per run. A run's specification
follows from the experiment and the results of its trials, so a row has only its id, its result, and
fields for readers: ``experiments/NAME.toml`` belongs to ``evidence/NAME.csv``. A row whose id is
not in the experiment is an error: the experiment was edited since.

Prints, for every setting, each method at its best rate, and its paired difference from all-reduce
in the same setting: in percent of a loss, in the metric itself where more is better. With
``--field``, the difference from the method that has the defaults of these fields and is otherwise
the same: from ``ring`` in full precision for ``ring`` in 8 bits. With ``--pooled``, one row per
method for all settings together that it shares with the reference, seed by seed: rows are
comparable where they have as many settings.
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

from benchmarks.claims import Kept, claims, markdown, of_fewer
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

_OWN_NOISE = 3
"""With at least so many seeds the noise of a difference is estimated from itself. With fewer, or
where seeds do not differ, as accuracies on few samples may, it is estimated from all methods of a
setting, which is right as far as their noise is alike."""


_EQUAL = 1e-9
"""Differences that deviate by less are equal."""


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
    return {name: rounded(known[name]) for name in _FACTS if known.get(name) is not None}


def rounded(value: float) -> float:
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


def counted(results: Iterable[Result]) -> list[Result]:
    """Return the runs that are no trials and have a result."""
    return [result for result in results if not result.is_trial and result.final is not None]


def kept(results: Iterable[Result]) -> list[Kept]:
    """Return the runs that count, as ``benchmarks.claims`` takes them."""
    return [(run.spec, run.final, run.facts) for run in counted(results) if run.final is not None]


def varied(results: Sequence[Result]) -> list[str]:
    """Return the fields in which settings differ: also the rate, if methods have several of it."""
    specs = [result.spec.model_dump() for result in results]
    of_method = _OF_METHOD - {"lr"} if _have_several_rates(results) else _OF_METHOD
    names = [name for name in RunSpec.model_fields if name not in of_method]
    return [name for name in names if len({str(spec[name]) for spec in specs}) > 1]


def _have_several_rates(results: Iterable[Result]) -> bool:
    """Return whether two runs that count differ in nothing but their rate."""
    final = [str(r.spec.model_dump(exclude={"lr"})) for r in results if not r.is_trial]
    return len({*final}) < len(final)


def write(results: Sequence[Result], path: Path) -> None:
    """Write results, one per row, sorted by setting, method, rate and seed."""
    fields = varied(results)
    known = [name for name in _FACTS if any(name in result.facts for result in results)]
    rows = [
        {
            "run_id": result.spec.id,
            **{name: getattr(result.spec, name) for name in (*fields, "method", "lr", "seed")},
            "kind": "trial" if result.is_trial else "final",
            "final": None if result.final is None else rounded(result.final),
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

    The reference is all-reduce, of several in a setting the best; with ``fields``, the method that
    has their defaults; or the method with the name ``method``.
    """
    final = counted(results)
    axes = varied(final)
    rows: list[Compared] = []
    for setting, own in _by_setting(final, axes).items():
        known = _noise(own)
        reference = method if method or fields else _best_all_reduce(own)
        for _, name in sorted({(r.spec.topology != CENTRALIZED, r.spec.method) for r in own}):
            runs = [result for result in own if result.spec.method == name]
            chosen = (r for r in own if _is_reference(r.spec, runs[0].spec, fields, reference))
            rows.append(Compared(setting, name, runs, *_gap(runs, _by_seed(chosen), known)))
    return rows


def table(results: Sequence[Result], fields: Sequence[str] = (), method: str = "") -> str:
    """Return the result of ``compare`` as Markdown."""
    axes = varied(counted(results))
    beside = method or ("the default" if fields else "all-reduce")
    heads = [*axes, "method", "rate", "seeds", "mean", f"from {beside}", "95 % interval", "p"]
    rows = [
        [*row.setting, row.method, _rate(row.runs), len(row.runs), *_cells(row)]
        for row in compare(results, fields, method)
    ]
    return markdown(heads, rows)


def pooled_table(results: Sequence[Result], method: str = "") -> str:
    """Return each method's paired difference from the reference over all settings, as Markdown.

    Seeds are the units: settings share them, and may share runs of the reference.
    """
    final = counted(results)
    if len({_more_is_better([run]) for run in final}) > 1:
        raise UserError(
            "--pooled needs settings of one kind, got losses, whose differences are in percent, "
            "and metrics; pass files of one kind"
        )
    differences: dict[str, list[dict[int, float]]] = {}
    for own in _by_setting(final, varied(final)).values():
        reference = method or _best_all_reduce(own)
        by_seed = _by_seed(r for r in own if r.spec.method == reference)
        for name in {r.spec.method for r in own} - {reference}:
            runs = [result for result in own if result.spec.method == name]
            if pairs := _differences(runs, by_seed):
                differences.setdefault(name, []).append(pairs)
    if not differences:
        raise UserError(
            f"--pooled needs methods with seeds of {method or 'all-reduce'} in the same setting, "
            "got none; name another method with --reference"
        )
    heads = ["method", "settings", "seeds", f"from {method or 'all-reduce'}", "95 % interval"]
    unit = "" if _more_is_better(final) else " %"
    rows: list[list[Any]] = []
    for name, settings in sorted(differences.items()):
        seeds = set.intersection(*({*pairs} for pairs in settings))
        means = [statistics.fmean(pairs[seed] for pairs in settings) for seed in sorted(seeds)]
        ends, mean = "–", "–"
        if means:
            gap = interval(means)
            mean, ends = f"{gap.mean:+.2f}{unit}", _ends(gap, ".2f")
        rows.append([name, len(settings), len(seeds), mean, ends])
    return markdown(heads, rows)


def dispersion_table(results: Sequence[Result]) -> str:
    """Return the coefficient of variation of norms over replicas, from the smallest, as Markdown.

    It is the mean over tensors and seeds, in each third of training.
    """
    names = [f"{phase} coefficient_of_variation" for phase in PHASES]
    gossiping = [r for r in counted(results) if r.facts.keys() >= {*names}]
    if not gossiping:
        raise UserError("--dispersion needs runs whose norms were recorded, got none; leave it out")
    axes = varied(gossiping)
    cells: dict[tuple[Any, ...], list[Result]] = {}
    for run in gossiping:
        cells.setdefault((*_setting(run.spec, axes), run.spec.method), []).append(run)
    means = {
        key: [statistics.fmean(run.facts[name] for run in runs) for name in names]
        for key, runs in cells.items()
    }
    ordered = sorted(means, key=lambda key: (key[:-1], means[key][0]))
    heads = [*axes, "method", *PHASES]
    rows = [[*key, *(f"{mean:.2g}" for mean in means[key])] for key in ordered]
    return markdown(heads, rows)


def _best_all_reduce(runs: Sequence[Result]) -> str:
    """Return the name of all-reduce, of several that with the best mean; empty without any."""
    results: dict[str, list[float]] = {}
    for run in runs:
        if run.spec.topology == CENTRALIZED and run.final is not None:
            results.setdefault(run.spec.method, []).append(run.final)
    best = max if _more_is_better(runs) else min
    return best(results, key=lambda name: statistics.fmean(results[name]), default="")


def _is_reference(spec: RunSpec, of: RunSpec, fields: Sequence[str], method: str) -> bool:
    """Return whether a run belongs to the reference of another run's method."""
    if spec.method == of.method:
        return False
    if method or not fields:
        return spec.method == method
    defaults = {name: RunSpec.model_fields[name].default for name in fields}
    plain = of.model_copy(update={**defaults, "method": spec.method, "seed": spec.seed})
    return spec == plain


def _setting(spec: RunSpec, fields: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(spec, name) for name in fields)


def _by_setting(
    results: Sequence[Result], fields: Sequence[str]
) -> dict[tuple[Any, ...], list[Result]]:
    """Return the runs of each setting, in the order of settings."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for result in sorted(results, key=lambda result: _setting(result.spec, fields)):
        found.setdefault(_setting(result.spec, fields), []).append(result)
    return found


def _by_seed(results: Iterable[Result]) -> dict[int, float]:
    return {r.spec.seed: r.final for r in results if r.final is not None}


def _rate(runs: Sequence[Result]) -> str:
    rates = sorted({run.spec.lr for run in runs})
    return " to ".join(f"{rate:g}" for rate in dict.fromkeys((rates[0], rates[-1])))


def _noise(runs: Sequence[Result]) -> Noise | None:
    """Return the noise of the methods of a setting, over the seeds that they share.

    For a loss it is the noise of its logarithm, because differences are relative. A method that
    has only the first of the seeds, because time ran out, has the noise of the others.
    """
    by_method: dict[str, list[Result]] = {}
    for run in runs:
        by_method.setdefault(run.spec.method, []).append(run)
    results = [own for own in map(_by_seed, by_method.values()) if len(own) > 1]
    seeds = sorted(set.intersection(*({*own} for own in results))) if results else []
    if len(seeds) < 2:
        return None
    as_compared = float if _more_is_better(runs) else math.log
    return noise([[as_compared(own[seed]) for seed in seeds] for own in results])


def _gap(
    runs: Sequence[Result], reference: dict[int, float], known: Noise | None
) -> tuple[Interval | None, float | None, str]:
    """Return the paired difference from the reference, its p and its unit."""
    more_is_better = _more_is_better(runs)
    unit = "" if more_is_better else " %"
    differences = [*_differences(runs, reference).values()]
    if not differences:
        return None, None, unit
    if len(differences) >= _OWN_NOISE and statistics.pstdev(differences) > _EQUAL:
        known = None
    elif known is not None and not more_is_better:
        known = known._replace(variance=100**2 * known.variance)
    return interval(differences, known), p_value(differences, known), unit


def _differences(runs: Sequence[Result], reference: dict[int, float]) -> dict[int, float]:
    """Return by seed what is between a method and the reference."""
    own, more_is_better = _by_seed(runs), _more_is_better(runs)
    return {
        seed: own[seed] - reference[seed]
        if more_is_better
        else 100 * (own[seed] / reference[seed] - 1)
        for seed in sorted(own.keys() & reference.keys())
    }


def _more_is_better(runs: Sequence[Result]) -> bool:
    return runs[0].spec.make_workload().higher_is_better


def _cells(row: Compared) -> list[str]:
    mean = f"{statistics.fmean(_by_seed(row.runs).values()):.4g}"
    if row.gap is None:
        return [mean, "–", "–", "–"]
    p = "–" if row.p is None else f"{row.p:.2g}"
    return [mean, f"{row.gap.mean:+.2g}{row.unit}", _ends(row.gap, ".2g"), p]


def _ends(gap: Interval, digits: str) -> str:
    if gap.low is None or gap.high is None:
        return "–"
    return f"{gap.low:+{digits}} to {gap.high:+{digits}}"


def _of_all(paths: Sequence[Path]) -> list[Result]:
    """Return the results of several folders and files, a run that is in two of them once."""
    results = {result.spec.id: result for path in paths for result in read(path)}
    if not results:
        name = _names(paths)
        raise UserError(f"{name} must hold runs that have ended, got none; wait until some have")
    return list(results.values())


def _names(paths: Sequence[Path]) -> str:
    return " and ".join(map(str, paths))


def _check_fields(fields: Sequence[str]) -> None:
    if unknown := set(fields) - set(RunSpec.model_fields):
        name = min(unknown)
        known = nearest(name, RunSpec.model_fields)
        raise UserError(f"--field must name a field of a run, got {name!r}; {known}")


def main(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders of gossamer bench run, or files of this command.")
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
    graphs: Annotated[
        int, typer.Option(help="Say what would have been seen with so many of the graphs.")
    ] = 0,
    dispersion: Annotated[
        bool,
        typer.Option("--dispersion", help="Print how far replicas differ, by third of training."),
    ] = False,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="Print a row per method for all settings together.")
    ] = False,
) -> None:
    """Print the results of an experiment, and write them to a file."""
    fields = field or []
    _check_fields(fields)
    if len(paths) > 1 and (out is not None or steps is not None):
        raise UserError(f"--out and --steps need one folder or file, got {len(paths)}; write each")
    if pooled and (fields or graphs):
        raise UserError("--pooled compares with one method, got --field or --graphs; leave it out")
    results = _of_all(paths)
    methods = {result.spec.method: None for result in results}
    if reference and reference not in methods:
        raise UserError(
            f"--reference must name a method of {_names(paths)}, got {reference!r}; "
            f"{nearest(reference, methods)}"
        )
    if out is not None:
        write(results, out)
    if steps is not None:
        write_steps(paths[0], steps)
    if pooled or dispersion:
        print(pooled_table(results, reference) if pooled else dispersion_table(results))
        return
    print(table(results, fields, reference))
    if graphs:
        print(f"\n{of_fewer(kept(results), graphs)}")
    elif found := claims(kept(results)):
        print(f"\n{found}")
    seconds = [result.facts["train_s"] for result in results if "train_s" in result.facts]
    if seconds:
        print(f"\n{len(seconds)} runs, {sum(seconds) / 3600:.1f} hours in steps")


if __name__ == "__main__":
    typer.run(main)
