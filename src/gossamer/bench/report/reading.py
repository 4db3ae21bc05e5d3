"""Read an experiment's folder for a report; unchanged files are cached."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import polars as pl

from gossamer.bench.analysis import Analysis, analyse_tables
from gossamer.bench.analysis.links import on_links
from gossamer.bench.analysis.tabulate import RunRows, join, rows_of
from gossamer.bench.analysis.timed import timed
from gossamer.bench.clock import Clock, make_clocks
from gossamer.bench.experiment import Experiment, load
from gossamer.bench.matrix import Skipped
from gossamer.bench.norms import summarise_norms
from gossamer.bench.planned import UNKNOWN, PlannedRuns, read_planned
from gossamer.bench.store import Stamps, Store
from gossamer.errors import UserError
from gossamer.files import read_bounded
from gossamer.records import Started

_log = logging.getLogger(__name__)

_MOST_STEPS = 60
"""The most steps of a run whose norms are shown."""

NO_NORMS = pl.DataFrame(
    schema={
        "run_id": pl.String,
        "step": pl.Int64,
        "tensor": pl.String,
        **dict.fromkeys(
            ("least", "lower_quartile", "median", "upper_quartile", "largest"), pl.Float64
        ),
    }
)
"""The table of norms of runs that stored none."""


class Problem(NamedTuple):
    """A run without a result, or with only part of it."""

    run_id: str
    workload: str
    workers: int | None
    method: str
    seed: int | None
    status: str
    reason: str


class Results(NamedTuple):
    """What a folder holds."""

    name: str
    """Of the experiment."""

    text: str
    """Content of its file; empty if there is none."""

    analysis: Analysis
    counts: dict[str, int]
    """Runs by status; ``to do``: planned runs that have no file."""

    problems: list[Problem]
    skipped: list[Skipped]
    """Impossible combinations, such as a torus of 7 workers."""

    foreign: int
    """Runs in the folder that do not belong to the experiment; they are left out."""

    remark: str
    """Why the planned runs of the experiment are unknown; empty if they are known."""

    specs: dict[str, dict[str, Any]]
    """By run."""

    environments: list[tuple[dict[str, str], int]]
    """Each distinct environment, and the number of its runs."""

    norms: pl.DataFrame
    """Quantiles of norms over workers, one row per run, step and tensor; a subset of the steps
    where there are many."""

    clock: str
    """How seconds are modelled, or why they are not; empty without a link or a profile."""

    @property
    def missing(self) -> int:
        """The number of runs without a result yet."""
        return self.counts.get("to do", 0) + self.counts.get("unfinished", 0)


class _Kept(NamedTuple):
    stamps: Stamps
    rows: RunRows | None
    damage: str
    environment: dict[str, str]
    norms: pl.DataFrame


@final
class Reader:
    """Reads a folder; a file that has not changed is not read again."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "runs").is_dir():
            raise UserError(
                f"a report needs an experiment's folder, which has a folder 'runs'; got {folder}; "
                "make one with gossamer bench run"
            )
        self._store = Store(folder)
        self._kept: dict[str, _Kept] = {}
        self._clocks: list[Clock] = []
        self._clock_text = ""
        """Content of the experiment's file when the clocks were made."""

    def stamps(self) -> dict[str, Stamps]:
        """Return the time and size of each file, which change when it does."""
        return self._store.stamps()

    def read(self) -> Results:
        """Return the current content of the folder."""
        experiment, plan, name, text, remark = self._experiment()
        clock = self._read_clock(experiment)
        self._refresh({run.id: run.parts for run in plan.runs} if plan else {})
        if plan and self._kept and not self._kept.keys() & {run.id for run in plan.runs}:
            remark = "its file plans none of the runs in the folder, so another version made them"
            plan = None
        planned = {run.id: run.method for run in plan.runs} if plan else {}
        chosen = {
            run_id: kept for run_id, kept in self._kept.items() if not planned or run_id in planned
        }
        targets = experiment.by_workload("target") if experiment else {}
        found = [kept.rows for kept in chosen.values() if kept.rows]
        found = _in_order(found, list(planned))
        first = self._clocks[0] if self._clocks else None
        rows = [timed(of_run, first) for of_run in found]
        several = self._clocks if len(self._clocks) > 1 else []
        links = on_links(found, several, planned, targets)
        analysis = analyse_tables(join(rows, planned, targets), links)
        counts = Counter(analysis.all_runs["status"].to_list())
        counts["damaged"] += sum(kept.rows is None for kept in chosen.values())
        counts["to do"] = len(planned.keys() - chosen.keys())
        skipped = plan.skipped if plan else []
        counts["skipped"] += len(skipped)
        return Results(
            name=name,
            text=text,
            analysis=analysis,
            counts={status: count for status, count in counts.items() if count},
            problems=_problems(analysis, chosen),
            skipped=skipped,
            foreign=len(self._kept) - len(chosen),
            remark=remark,
            specs={row.run["run_id"]: row.run["spec"] for row in rows},
            environments=_environments(list(chosen.values())),
            norms=pl.concat([NO_NORMS, *(kept.norms for kept in chosen.values())]),
            clock=clock,
        )

    def _read_clock(self, experiment: Experiment | None) -> str:
        """Make the clocks of the experiment; return their description for the page."""
        text = experiment.text if experiment else ""
        if experiment is None or text != self._clock_text:
            self._clocks, self._clock_text = [], ""
        if experiment is None:
            return ""
        try:
            self._clocks = self._clocks or make_clocks(experiment)
        except UserError as error:
            return f"unknown, because {error}"
        self._clock_text = text
        return self._clocks[0].described if self._clocks else ""

    def _refresh(self, planned: Mapping[str, Mapping[str, str]]) -> None:
        stamps = self.stamps()
        self._kept = {run_id: kept for run_id, kept in self._kept.items() if run_id in stamps}
        for run_id, stamp in stamps.items():
            if run_id in self._kept and self._kept[run_id].stamps == stamp:
                continue
            try:
                story = self._store.read(run_id)
            except UserError:  # renamed since stamps(); the next refresh finds it
                continue
            first = story.records[0] if story.records else None
            environment = first.environment if isinstance(first, Started) else {}
            rows = rows_of(story, planned.get(run_id))
            norms = self._norms(run_id) if story.ended else NO_NORMS
            self._kept[run_id] = _Kept(stamp, rows, story.damage, environment, norms)

    def _norms(self, run_id: str) -> pl.DataFrame:
        path = self._store.norms_path(run_id)
        if not path.is_file():
            return NO_NORMS
        try:
            norms = summarise_norms(path, _MOST_STEPS)
        except UserError as error:
            _log.warning("%s", error)
            return NO_NORMS
        return norms.select(pl.lit(run_id).alias("run_id"), pl.all())

    def _experiment(self) -> tuple[Experiment | None, PlannedRuns | None, str, str, str]:
        path = self._store.experiment_path
        fallback = self._store.folder.resolve().name
        if not path.exists():
            return None, None, fallback, "", f"{path.name} is not in the folder"
        try:
            experiment = load(path)
            plan = read_planned(self._store, experiment)
            return experiment, plan, experiment.name, experiment.text, "" if plan else UNKNOWN
        except UserError as error:
            with contextlib.suppress(OSError):
                text = read_bounded(path, 2**20).decode(errors="replace")
                return None, None, fallback, text, str(error)
            return None, None, fallback, "", str(error)


def _in_order(rows: list[RunRows], planned: list[str]) -> list[RunRows]:
    """Return runs in the order of the experiment, so that methods come in the order of its list."""
    place = {run_id: number for number, run_id in enumerate(planned)}

    def key(row: RunRows) -> tuple[Any, ...]:
        spec = row.run["spec"]
        named = (spec["workload"], spec["workers"], spec["method"], spec["seed"])
        return (place.get(row.run["run_id"], 0), *named)

    return sorted(rows, key=key)


def _problems(analysis: Analysis, chosen: dict[str, _Kept]) -> list[Problem]:
    found = [
        Problem(run_id, "", None, "", None, "damaged", kept.damage or "its first record is missing")
        for run_id, kept in chosen.items()
        if kept.rows is None
    ]
    # A trial that diverged is a result.
    failed = analysis.trials.filter(pl.col("status") != "diverged")
    for row in pl.concat([analysis.runs, failed]).iter_rows(named=True):
        if row["status"] != "done":
            reason = row["damage"] or "".join(row["reason"].strip().splitlines()[-1:])
            if row["status"] == "unfinished":
                reason = f"still running, or interrupted, after step {row['steps']}"
            names = ("run_id", "workload", "workers", "method", "seed", "status")
            found.append(Problem(**{name: row[name] for name in names}, reason=reason))
    return found


def _environments(kept: list[_Kept]) -> list[tuple[dict[str, str], int]]:
    counted = Counter(tuple(sorted(of_run.environment.items())) for of_run in kept)
    return [(dict(items), count) for items, count in counted.most_common() if items]
