"""Strategies for inputs that are nearly valid, and for others that are not.

Most are mutations of a valid input in a few places, because an input that is wrong everywhere fails
at the first check. No string names a plug-in, because that would execute code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from gossamer.runtime_model.presets import from_data_sheet
from gossamer.topology import CATALOGUE
from tests.stories import spec_of, story_of

# - Numbers and strings

EDGES = [0, 64, 250, 251, 2**14, 2**17, 2**17 + 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30]

integers = st.one_of(
    st.integers(-3, 40), st.sampled_from([*EDGES, *(-edge for edge in EDGES)]), st.integers()
)
floats = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-300, 1e300, 1.7e308, 5e-324, 0.5, 1.0]),
    st.floats(0, 2),
)
long_digits = st.integers(1, 5000).map(lambda count: "9" * count)
words = st.text(st.characters(exclude_characters=":", exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(st.none(), st.booleans(), integers, floats, words)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def broken(draw: Callable[..., Any], whole: str) -> str:
    """Return a string with a piece cut out, doubled, or replaced by another."""
    if not whole or draw(st.integers(0, 3)) == 0:
        return whole
    start = draw(st.integers(0, len(whole) - 1))
    end = draw(st.integers(start, min(len(whole), start + 12)))
    piece = draw(st.one_of(st.just(""), st.just(whole[start:end] * 3), words, long_digits))
    return whole[:start] + piece + whole[end:]


_NEAR: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: integers,
    float: floats,
    str: words,
}


@st.composite
def changed(draw: Callable[..., Any], valid: Any) -> Any:
    """Return JSON with one value replaced, taken away or added, at a random depth."""
    if isinstance(valid, dict) and valid and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(valid)))
        match draw(st.integers(0, 5)):
            case 0:
                return {name: value for name, value in valid.items() if name != key}
            case 1:
                return valid | {draw(words): draw(scalars)}
            case _:
                return valid | {key: draw(changed(valid[key]))}
    if isinstance(valid, list) and valid and draw(st.integers(0, 4)):
        place = draw(st.integers(0, len(valid) - 1))
        return [*valid[:place], draw(changed(valid[place])), *valid[place + 1 :]]
    near = _NEAR.get(type(valid), values)
    return draw(st.one_of(near, near, values))


def nested(levels: int) -> str:
    """Return brackets within brackets."""
    return "[" * levels + "]" * levels


deep = st.integers(1, 20_000).map(nested)

# - Topologies

_arguments = st.one_of(
    st.integers(0, 12).map(str),
    st.floats(0, 1).map(str),
    integers.map(str),
    floats.map(str),
    st.sampled_from(["uniform", "metropolis", "true", "None", "ring", "(1, 2)", "[1]", "'x'"]),
    long_digits,
    words,
)
_keys = st.sampled_from(
    ["k", "p", "seed", "every", "weights", "eta", "k0", "gamma", "steps_per_epoch", "pairs", "x"]
)


@st.composite
def topology_strings(draw: Callable[..., Any]) -> str:
    """Return a call of a topology, with its example's arguments or others."""
    name = draw(st.sampled_from(sorted(CATALOGUE)))
    given = [CATALOGUE[name].example] if draw(st.integers(0, 3)) else []
    for key in draw(st.lists(_keys, max_size=2, unique=True)):
        given.append(f"{key}={draw(_arguments)}")
    text = f"{name}({', '.join(filter(None, given))})"
    return draw(st.one_of(st.just(text), broken(text), deep.map(lambda inner: f"{name}({inner})")))


_few = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16, 27, 32])
topologies = st.tuples(st.one_of(topology_strings(), words), st.one_of(_few, _few, integers))

# - Rates and layouts

_numbers = st.one_of(
    st.integers(0, 12).map(str), integers.map(str), floats.map(str), long_digits, words
)
_units = st.sampled_from(["kbit", "mbit", "gbit", "Gbit", "tbit", "", " mbit", "bit"])
_good_rates = st.builds(
    lambda number, unit: f"{number:.3f}{unit}",
    *(st.floats(0.5, 2000), st.sampled_from(["kbit", "mbit", "gbit"])),
)
rates = st.one_of(_good_rates, st.builds(lambda a, b: f"{a}{b}", _numbers, _units), words)
layouts = st.one_of(
    st.builds(
        lambda nodes, workers, inside, between: f"{nodes}x{workers}:{inside}/{between}",
        *(st.integers(1, 9) | _numbers, st.integers(1, 9) | _numbers, rates, rates),
    ),
    broken("2x4:10gbit/1gbit"),
    words,
)
switches = st.tuples(st.integers(1, 4) | integers, st.lists(rates, max_size=4).map(",".join))

# - Experiments

_EXPERIMENT: dict[str, Any] = {
    "name": "x",
    "workload": "quadratic",
    "workers": [2, 4],
    "methods": ["C_complete", {"name": "a", "method": "D_ring", "control": "auto"}],
    "seeds": [0],
    "run": {"epochs": 1, "batch_size": 4, "optimizer": "sgd(momentum=0.9)"},
    "axes": {"lr": [0.1, 0.2]},
    "budget": {"bytes_mb": 1.0},
    "include": [{"workers": 8}],
    "exclude": [{"method": "a", "workers": 4}],
    "skip_impossible": True,
    "timeout_s": 5.0,
}
_TUNED = {name: _EXPERIMENT[name] for name in ("name", "workload", "workers", "methods")} | {
    "tune": {"lr": [0.1, 0.2], "seeds": [5], "extensions": 1}
}


def _toml(value: Any) -> str:
    match value:
        case dict():
            pairs = ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items())
            return f"{{ {pairs} }}"
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case None:
            return "2020-01-01"
        case str():
            return json.dumps(value).replace("\x7f", "\\u007f")
        case bool():
            return str(value).lower()
        case _:
            return str(value)


def _document(fields: Any) -> str:
    if not isinstance(fields, dict):
        return _toml(fields)
    return "\n".join(f"{json.dumps(key)} = {_toml(value)}" for key, value in fields.items())


_documents = st.one_of(changed(_EXPERIMENT), changed(_TUNED)).map(_document)
experiments = st.one_of(
    _documents,
    _documents.flatmap(broken),
    deep.map(lambda inner: f"{_document(_TUNED)}\naxes = {{ lr = {inner} }}"),
    words,
)

# - Profiles

_PROFILE = from_data_sheet(
    "a40", "25gbit", parameters=3e7, flops=1e12, workers=8, workers_per_node=4, variance=0.01
).model_dump(mode="json")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


profiles = st.one_of(
    changed(_PROFILE).map(_json),
    changed(_PROFILE).map(json.dumps).flatmap(broken).map(str.encode),
    deep.map(str.encode),
    st.binary(max_size=40),
)

# - Records

_LINES = [
    record.model_dump(mode="json") for record in story_of(spec_of("D_ring", workers=4), 0.5).records
]


@st.composite
def stories(draw: Callable[..., Any]) -> bytes:
    """Return the file of a run in which some lines are others."""
    lines = [json.dumps(line) for line in _LINES]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        other = st.one_of(changed(_LINES[place]).map(json.dumps), broken(lines[place]), deep)
        lines[place] = draw(other)
    return "\n".join([*lines, ""]).encode()


# - Checkpoints

_CHECKSUMS = st.lists(st.integers(0, 16**15 - 1).map("{:015x}".format), max_size=4)
manifests = st.one_of(
    st.builds(
        lambda version, checksums: _json({"version": version, "checksums": checksums}),
        st.just(1) | scalars,
        _CHECKSUMS | values,
    ),
    changed({"version": 1, "checksums": ["0" * 15]}).map(_json),
    deep.map(str.encode),
    st.binary(max_size=40),
)
structures = st.recursive(
    st.one_of(scalars, st.just({"tensor": "a"}), st.just({"tensor": "b", "strides": [1]})),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(
            lambda kind, content: {kind: content},
            st.sampled_from(["dict", "tuple", "OrderedDict", "Counter", "tensor", "x"]),
            st.lists(st.tuples(st.text(max_size=3) | integers, inner).map(list), max_size=3)
            | inner,
        ),
    ),
    max_leaves=8,
)
"""The description of the state that a part holds."""
