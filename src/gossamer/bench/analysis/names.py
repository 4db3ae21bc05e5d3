"""Names of runs: the setting in which they are compared, and the method.

A *facet* is a value of a field that an experiment varies for all methods, such as the sharding or
the batch size. It is part of the setting: methods are compared within a setting, never across.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.registry import shorten

_NO_FACETS = {"workload", "workers", "method", "topology", "engine", "seed"}
"""Fields that are not facets; a topology may follow from the scale or the epochs, as Ada's."""

_ALWAYS_FACETS = ("sharding",)
"""Fields of the task rather than the method: a facet even where a method sets them."""


def facet_names(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the facets of each run, such as ``sharding=iid, lr=0.1``.

    Facets are the fields in which runs of one method differ at one scale of a workload; a field
    that the method itself sets is the same in all of them. A field that follows from others, such
    as steps per epoch from the batch size, is left out.
    """
    chosen = {spec["workload"]: list[str]() for spec in specs}
    for workload, fields in chosen.items():
        own = [spec for spec in specs if spec["workload"] == workload]
        everything = dict.fromkeys(name for spec in own for name in spec)
        for name in everything:
            alike = ("workers", *(() if name in _ALWAYS_FACETS else ("method",)), *fields)
            if name not in _NO_FACETS and _varies(own, name, alike):
                fields.append(name)
    return [
        ", ".join(f"{name}={_short(spec.get(name))}" for name in chosen[spec["workload"]])
        for spec in specs
    ]


def setting_names(specs: Sequence[Mapping[str, Any]], facets: Sequence[str]) -> list[str]:
    """Return the workload of each run, without its folder if that is unambiguous, and its
    facet.
    """
    names = {spec["workload"] for spec in specs}
    times = Counter(map(shorten, names))
    workloads = [
        short if times[short := shorten(name)] == 1 else name
        for name in (spec["workload"] for spec in specs)
    ]
    return [
        f"{workload}, {facet}" if facet else workload
        for workload, facet in zip(workloads, facets, strict=True)
    ]


def method_names(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the method of each run, with ", distributed" if other runs of it are simulated."""
    engines: dict[str, set[str]] = {}
    for spec in specs:
        engines.setdefault(spec["method"], set()).add(spec["engine"])
    return [
        f"{spec['method']}, distributed"
        if spec["engine"] == "distributed" and len(engines[spec["method"]]) > 1
        else spec["method"]
        for spec in specs
    ]


def _varies(specs: Sequence[Mapping[str, Any]], name: str, alike: Sequence[str]) -> bool:
    """Return whether a field differs among runs whose other fields are equal."""
    seen: dict[str, str] = {}
    for spec in specs:
        group = repr([spec.get(other) for other in alike])
        if seen.setdefault(group, repr(spec.get(name))) != repr(spec.get(name)):
            return True
    return False


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shorten(str(value))
