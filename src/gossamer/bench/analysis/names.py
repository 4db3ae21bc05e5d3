"""What runs are called: the setting that they are compared in, and the method.

A *facet* is a value of what an experiment varies for every method alike, such as the sharding or
the batch size. It is a part of the setting: methods compete within one, and never across.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.registry import shorten

_NO_FACETS = {"workload", "workers", "method", "topology", "engine", "seed"}
"""Fields that are told in other ways; a topology may follow the scale or the epochs, as Ada's."""

_ALWAYS_FACETS = ("sharding",)
"""Fields that say what is learnt, and not how: a facet even where a method sets them."""


def facet_names(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each run the fields that make its setting, such as ``sharding=iid, lr=0.1``.

    These are fields in which runs of one method differ at one scale of a workload: what a method
    sets itself it sets alike. A field that follows from others, as steps per epoch do from the
    batch size, is left out.
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
    """Return the workload of each run, without its folder where that tells them apart, and its
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
    """Return the method of each run, and that it is on processes where others are simulated."""
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
    """Return whether a field differs among runs that have other fields alike."""
    seen: dict[str, str] = {}
    for spec in specs:
        group = repr([spec.get(other) for other in alike])
        if seen.setdefault(group, repr(spec.get(name))) != repr(spec.get(name)):
            return True
    return False


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shorten(str(value))
