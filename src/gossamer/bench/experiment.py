"""An experiment as a value, read from a strict TOML file.

name = "digits"
workload = "digits-mlp"
workers = [8, 32]
methods = ["C_complete", "D_ring", { name = "held", method = "D_ring", control = "auto" }]
seeds = [0, 1]
run = { epochs = 5 }            # fields of every run
axes = { batch_size = [8, 16] } # fields that take several values
tune = { lr = [0.1, 0.2, 0.4] } # the same trials for every method, which then runs at its best rate

[[include]]                     # more runs; keys that are missing are as above
engine = "distributed"
workers = 4

[[exclude]]                     # leave out all runs that have these values
method = "D_ring"
workers = 8
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from gossamer.bench.strict import validated
from gossamer.errors import UserError, nearest
from gossamer.files import read_bounded
from gossamer.rates import parse_rate

_Item = TypeVar("_Item")

_MOST_BYTES = 2**20
"""The largest file that is read."""

_MOST_LEVELS = 10


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Several = Annotated[list[_Item], BeforeValidator(_listed), Field(min_length=1)]
"""One value or a list of them."""


Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Method(BaseModel):
    """A method, its name in reports, and further fields that it sets in its runs."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    method: str

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        return {"name": given, "method": given} if isinstance(given, str) else given

    @property
    def fields(self) -> dict[str, Any]:
        """The further fields that it sets."""
        return dict(self.model_extra or {})


class Budget(_Strict):
    """The most that every run may spend. The recipe's steps limit it in any case."""

    bytes_mb: PositiveFloat | None = None
    """Megabytes sent by the average worker."""

    train_s: PositiveFloat | None = None
    """Measured seconds in training steps."""

    modelled_s: PositiveFloat | None = None
    """Seconds that the runtime model predicts for the steps, in the job of ``profile``."""

    profile: str | None = None
    """A file of ``gossamer profile``; its path is relative to the experiment's folder."""

    @model_validator(mode="after")
    def _check(self) -> Budget:
        if (self.modelled_s is None) != (self.profile is None):
            raise UserError(
                "modelled_s and profile must be given together, got one of them; add the other, or "
                "remove both"
            )
        return self


class Tune(_Strict):
    """Learning rates that every method tries; its runs then use the best.

    A trial holds out a part of the training samples and is evaluated on it. While the best rate of
    any method is at the edge of the grid, the grid is extended for all methods, in the same ratio.
    """

    lr: list[PositiveFloat] = Field(max_length=64)
    seeds: Several[Seed] = [1000, 1001]
    """Seeds of the trials; the runs that are compared have the experiment's own."""

    validation: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training samples that trials are evaluated on."""

    extensions: int = Field(default=4, ge=0, le=32)
    """The most rates that are added on each side of the grid."""

    @model_validator(mode="after")
    def _check(self) -> Tune:
        if len(self.lr) < 2 or any(a >= b for a, b in itertools.pairwise(self.lr)):
            raise UserError(
                f"tune.lr must be at least two rates in increasing order, got "
                f"{self.lr}; write for example lr = [0.03, 0.1, 0.3]"
            )
        if len({*self.seeds}) < len(self.seeds):
            raise UserError(f"tune.seeds must be distinct, got {self.seeds}; remove the duplicates")
        return self


class Block(_Strict):
    """A set of runs: the Cartesian product of all keys with several values."""

    workload: Several[str]
    engine: Several[Literal["simulated", "distributed"]] = ["simulated"]
    workers: Several[PositiveInt]
    methods: Several[Method]
    seeds: Several[Seed] = [0]
    run: dict[str, Any] = {}
    """Fields of ``RunSpec`` for every run."""

    axes: dict[str, Several[Any]] = {}
    """Fields of ``RunSpec``, each with the values that it takes."""

    budget: Budget = Budget()
    tune: Tune | None = None

    @model_validator(mode="after")
    def _check(self) -> Block:
        if self.tune and (shared := {*self.seeds} & {*self.tune.seeds}):
            raise UserError(
                f"seeds and tune.seeds must have no seed in common, got {sorted(shared)} in both: "
                "results on the trials' seeds would be biased; change one of them"
            )
        return self

    @property
    def num_points(self) -> int:
        """The number of combinations, including trials."""
        listed = [self.workload, self.engine, self.workers, self.methods, self.seeds]
        runs = math.prod(map(len, [*listed, *self.axes.values()]))
        trials = len(self.tune.lr) * len(self.tune.seeds) if self.tune else 0
        return runs + runs // len(self.seeds) * trials


class Experiment(Block):
    """An experiment: which runs are compared, and how they are run and timed."""

    name: str = Field(pattern=r"^[\w-][\w.-]*$", max_length=100)
    """Also the name of its folder of records, so it must not start with a dot: that would be a
    hidden folder or a parent."""

    include: list[dict[str, Any]] = []
    exclude: list[dict[str, Several[Any]]] = []
    skip_impossible: bool = False
    """Leave out and list impossible combinations, such as a torus of 7; by default they are an
    error."""

    timeout_s: PositiveFloat | None = None
    """The time limit of one run."""

    norms_mb: NonNegativeFloat = 50.0
    """Disk space for the norms of one run, at most; 0 stores none."""

    link: Annotated[list[str], BeforeValidator(_listed)] = []
    """Links between nodes, such as ``300mbit``, for which the runtime model predicts the time of
    runs. Curves and tables use the first."""

    profile: str = ""
    """A file of ``gossamer profile``: the job whose time is modelled. Relative to ``folder``."""

    compute_s: PositiveFloat | dict[str, PositiveFloat] | None = None
    """Instead of a profile: seconds of a step without communication, one value for all workloads
    or one for each."""

    target: float | dict[str, float] | None = None
    """The metric to reach, one for all workloads or one for each; by default the workload's."""

    folder: str = ""
    """The folder that paths of profiles and plug-ins are relative to; itself relative to the folder
    of the file, which is the default."""

    text: str = ""
    """The content of the file, with ``folder`` made absolute: it is stored beside the runs."""

    @model_validator(mode="after")
    def _check_clock(self) -> Experiment:
        for rate in self.link:
            parse_rate(rate)
        if len({*self.link}) < len(self.link):
            raise UserError(f"links must be distinct, got {self.link}; remove the duplicates")
        given = [bool(self.profile), self.compute_s is not None]
        if all(given) or (self.link and not any(given)):
            raise UserError(
                "modelled time needs the compute time of a step, from either profile or compute_s, "
                f"got {'both' if all(given) else 'neither'}; write for example compute_s = 0.05"
            )
        if self.compute_s is not None and not self.link:
            raise UserError('compute_s needs a link, got none; write for example link = "300mbit"')
        return self

    @property
    def workloads(self) -> list[str]:
        """The workloads of all runs."""
        return list(dict.fromkeys(name for block in self.blocks for name in block.workload))

    def by_workload(self, key: str) -> dict[str, Any]:
        """Return the value of a key for each workload; a single value is for all."""
        value = getattr(self, key)
        if not isinstance(value, dict):
            return {} if value is None else dict.fromkeys(self.workloads, value)
        for name in value:
            if name not in self.workloads:
                raise UserError(
                    f"{key} must name workloads of the experiment, got {name!r}; "
                    f"{nearest(name, self.workloads)}"
                )
        return value

    @property
    def blocks(self) -> list[Block]:
        """The experiment's own block, and one for each ``[[include]]``."""
        own = {key: value for key, value in self if key in Block.model_fields}
        return [validated(Block, own, self.name)] + [
            validated(Block, _merged(own, more), f"[[include]] {number} of {self.name}")
            for number, more in enumerate(self.include, start=1)
        ]


def _merged(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment's fields overridden by an include's; tables are merged key by key."""
    tables = {
        key: {**own[key], **value}
        for key, value in more.items()
        if key in ("run", "axes") and isinstance(value, dict)
    }
    return {**own, **more, **tables}


def load(path: Path) -> Experiment:
    """Read an experiment from its file."""
    try:
        text = read_bounded(path, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(
            f"an experiment must be a readable TOML file, got {path}: {why}; "
            "docs/dbench.md shows how to write one"
        ) from None
    return parse(text, path.name, path.parent)


def parse(text: str, where: str, folder: Path | None = None) -> Experiment:
    """Return the experiment that a string describes.

    Args:
        text: TOML.
        where: its name in errors.
        folder: that paths are relative to, unless it has a key ``folder``; by default the
            current folder.
    """
    given = _read_toml(text, where)
    place = (folder or Path.cwd()).resolve()
    if "folder" not in given:
        # Always: the fields that a method returns may contain paths too.
        given["folder"] = str(place)
        text = f"folder = {json.dumps(given['folder'], ensure_ascii=False)}\n{text}"
    elif isinstance(given["folder"], str) and not Path(given["folder"]).is_absolute():
        given["folder"] = str(place / given["folder"])
        text = _with_folder(text, given["folder"], where)
    return validated(Experiment, given | {"text": text}, where)


def _read_toml(text: str, where: str) -> dict[str, Any]:
    try:
        given = tomllib.loads(text)
    except RecursionError:
        given = None
    except ValueError as error:  # TOML's, and those of dates and numbers that Python cannot hold
        raise UserError(f"{where} must be valid TOML, got {error}; correct it") from None
    if given is None or not _is_flat(given, _MOST_LEVELS):
        raise UserError(
            f"{where} must nest tables and lists at most {_MOST_LEVELS} deep, got more; no key of "
            "an experiment needs that"
        )
    return given


def _is_flat(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(each, levels - 1) for each in inner)


def _with_folder(text: str, folder: str, where: str) -> str:
    """Return the experiment's file with an absolute folder, so that it can be stored elsewhere."""
    line = f"folder = {json.dumps(folder, ensure_ascii=False)}"
    changed = re.sub(r"^\s*folder\s*=.*$", lambda _: line, text, count=1, flags=re.MULTILINE)
    if tomllib.loads(changed).get("folder") != folder:
        raise UserError(
            f'{where}: folder must be on a line by itself, such as folder = "plug-ins", got '
            "another spelling; write it above all tables"
        )
    return changed
