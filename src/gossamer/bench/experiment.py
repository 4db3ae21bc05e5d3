"""An experiment as a value, read from a strict TOML file.

name = "digits"
workload = "digits-mlp"
workers = [8, 32]
methods = ["C_complete", "D_ring", { name = "held", method = "D_ring", control = "auto" }]
seeds = [0, 1]
run = { epochs = 5 }            # fields of every run
axes = { batch_size = [8, 16] } # fields that take several values
tune = { lr = [0.1, 0.2, 0.4] } # the same trials for every method, and its best rate for its runs

[[include]]                     # more runs; what is not given is as above
engine = "distributed"
workers = 4

[[exclude]]                     # runs left out: all that have these values
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
"""Of a file."""

_MOST_LEVELS = 10


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Several = Annotated[list[_Item], BeforeValidator(_listed), Field(min_length=1)]
"""One value or a list of them."""


Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Method(BaseModel):
    """A method, what reports call it, and other fields that it sets in its runs."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    method: str

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        return {"name": given, "method": given} if isinstance(given, str) else given

    @property
    def fields(self) -> dict[str, Any]:
        """What it sets besides."""
        return dict(self.model_extra or {})


class Budget(_Strict):
    """What every run may spend; by default the steps of its recipe, which always limit it."""

    bytes_mb: PositiveFloat | None = None
    """Megabytes sent by the average worker."""

    train_s: PositiveFloat | None = None
    """Measured seconds in training steps."""

    modelled_s: PositiveFloat | None = None
    """Seconds that steps would take in the job of ``profile``, by the runtime model."""

    profile: str | None = None
    """A file of ``gossamer profile``; its path is from the experiment's folder."""

    @model_validator(mode="after")
    def _check(self) -> Budget:
        if (self.modelled_s is None) != (self.profile is None):
            raise UserError(
                "modelled_s and profile go together, got one of them; add the other, or take both "
                "away"
            )
        return self


class Tune(_Strict):
    """Learning rates that every method tries before its runs, which take its best.

    A trial holds back a part of the training samples and is judged by it. While the best rate of a
    method is on the edge of those tried, all methods get one more, in the same ratio.
    """

    lr: list[PositiveFloat] = Field(max_length=64)
    seeds: Several[Seed] = [1000, 1001]
    """Of trials; the experiment's own are for what is compared."""

    validation: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training samples that trials are judged by."""

    extensions: int = Field(default=4, ge=0, le=32)
    """The most rates that are added on each side."""

    @model_validator(mode="after")
    def _check(self) -> Tune:
        if len(self.lr) < 2 or any(a >= b for a, b in itertools.pairwise(self.lr)):
            raise UserError(
                f"tune.lr must be two rates or more, each larger than the one before, got "
                f"{self.lr}; write for example lr = [0.03, 0.1, 0.3]"
            )
        if len({*self.seeds}) < len(self.seeds):
            raise UserError(
                f"tune.seeds must differ, got {self.seeds}; leave out those twice there"
            )
        return self


class Block(_Strict):
    """Runs: the product of all that has several values."""

    workload: Several[str]
    engine: Several[Literal["simulated", "distributed"]] = ["simulated"]
    workers: Several[PositiveInt]
    methods: Several[Method]
    seeds: Several[Seed] = [0]
    run: dict[str, Any] = {}
    """Fields of ``RunSpec`` for every run."""

    axes: dict[str, Several[Any]] = {}
    """Fields of ``RunSpec`` that take each of several values."""

    budget: Budget = Budget()
    tune: Tune | None = None

    @model_validator(mode="after")
    def _check(self) -> Block:
        if self.tune and (shared := {*self.seeds} & {*self.tune.seeds}):
            raise UserError(
                f"what is compared must have other seeds than the trials, got {sorted(shared)} in "
                "seeds and in tune.seeds; change one of them"
            )
        return self

    @property
    def num_points(self) -> int:
        """How many combinations there are, trials included."""
        listed = [self.workload, self.engine, self.workers, self.methods, self.seeds]
        runs = math.prod(map(len, [*listed, *self.axes.values()]))
        trials = len(self.tune.lr) * len(self.tune.seeds) if self.tune else 0
        return runs + runs // len(self.seeds) * trials


class Experiment(Block):
    """What is compared."""

    name: str = Field(pattern=r"^[\w-][\w.-]*$", max_length=100)
    """The folder of its records is called so: no dot comes first, which would lead elsewhere or be
    hidden."""

    include: list[dict[str, Any]] = []
    exclude: list[dict[str, Several[Any]]] = []
    skip_impossible: bool = False
    """Leave out combinations that cannot be, such as a torus of 7, and list them; by default they
    are refused."""

    timeout_s: PositiveFloat | None = None
    """The longest that one run may take."""

    norms_mb: NonNegativeFloat = 50.0
    """The most that the norms of one run may take on the disk; 0 keeps none."""

    link: Annotated[list[str], BeforeValidator(_listed)] = []
    """Links between nodes on which runs are timed by the runtime model, such as ``300mbit``. By the
    first of them curves are drawn."""

    profile: str = ""
    """A file of ``gossamer profile``: the job that is timed so. Its path is from the folder."""

    compute_s: PositiveFloat | dict[str, PositiveFloat] | None = None
    """In place of a profile: seconds of a step without communication, of all workloads or of
    each."""

    target: float | dict[str, float] | None = None
    """The metric that counts as reached, of all workloads or of each; by default their own."""

    folder: str = ""
    """Where paths of profiles and plug-ins start, itself from where the file lies, which it is by
    default."""

    text: str = ""
    """The file, with its folder: it is kept beside the runs and read again."""

    @model_validator(mode="after")
    def _check_clock(self) -> Experiment:
        for rate in self.link:
            parse_rate(rate)
        if len({*self.link}) < len(self.link):
            raise UserError(f"links must differ, got {self.link}; leave out those twice there")
        given = [bool(self.profile), self.compute_s is not None]
        if all(given) or (self.link and not any(given)):
            raise UserError(
                "modelled time takes what a step computes from a profile or from compute_s, got "
                f"{'both' if all(given) else 'neither'}; write for example compute_s = 0.05"
            )
        if self.compute_s is not None and not self.link:
            raise UserError(
                'compute_s goes together with a link, got none; write for example link = "300mbit"'
            )
        return self

    @property
    def workloads(self) -> list[str]:
        """What is trained, in any of its runs."""
        return list(dict.fromkeys(name for block in self.blocks for name in block.workload))

    def by_workload(self, key: str) -> dict[str, Any]:
        """Return a key's value for each workload, where it may be one for all."""
        value = getattr(self, key)
        if not isinstance(value, dict):
            return {} if value is None else dict.fromkeys(self.workloads, value)
        for name in value:
            if name not in self.workloads:
                raise UserError(
                    f"{key} must be of workloads of the experiment, got {name!r}; "
                    f"{nearest(name, self.workloads)}"
                )
        return value

    @property
    def blocks(self) -> list[Block]:
        """The product of the experiment itself, and of what it includes."""
        own = {key: value for key, value in self if key in Block.model_fields}
        return [validated(Block, own, self.name)] + [
            validated(Block, _merged(own, more), f"[[include]] {number} of {self.name}")
            for number, more in enumerate(self.include, start=1)
        ]


def _merged(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return an include's fields over those of the experiment; tables are merged key by key."""
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
        why = error.strerror if isinstance(error, OSError) else "not a text"
        raise UserError(
            f"an experiment must be a TOML file that can be read, got {path}: {why}; "
            "docs/dbench.md shows how to write one"
        ) from None
    return parse(text, path.name, path.parent)


def parse(text: str, where: str, folder: Path | None = None) -> Experiment:
    """Return the experiment that a string describes.

    Args:
        text: TOML.
        where: what errors call it.
        folder: where paths start, unless it says so itself; by default the current folder.
    """
    given = _read_toml(text, where)
    place = (folder or Path.cwd()).resolve()
    if "folder" not in given:
        # Always: what a method returns may have paths, too.
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
        raise UserError(f"{where} must be TOML, got {error}; correct it") from None
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
    """Return an experiment that says where its folder is from wherever it is kept."""
    line = f"folder = {json.dumps(folder, ensure_ascii=False)}"
    changed = re.sub(r"^\s*folder\s*=.*$", lambda _: line, text, count=1, flags=re.MULTILINE)
    if tomllib.loads(changed).get("folder") != folder:
        raise UserError(
            f'{where}: folder must be on a line of its own, as folder = "plug-ins", got it '
            "otherwise; write it so, above all tables"
        )
    return changed
