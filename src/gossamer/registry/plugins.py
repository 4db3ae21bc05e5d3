"""User-defined parts: ``package.module:name`` and ``path/file.py:name``.

A file is loaded once per process, under its own module name, and its digest is that of the bytes
that were executed. A module is imported as any other; the current folder is searched too, which is
not on the path of console scripts.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any, final

from gossamer.errors import UserError, nearest_in_brackets
from gossamer.registry import calls

_MOST_NAMES = 12
"""The most names of a module listed in an error."""

_loading = threading.RLock()  # ranks can be threads; reentrant: a plug-in may load another
_digests: dict[str, str] = {}
"""When they were loaded: of files by the name of their module, of parts of modules by their own."""


class PlugInError(UserError):
    """A plug-in cannot be loaded, or does not do what one of its kind must."""


@final
@dataclass(frozen=True, slots=True)
class PlugIn:
    """A user-defined part, with the digest of its source when it was loaded."""

    label: str
    """What reports call it, without the folders above its file."""

    part: Any
    digest: str
    """Of its source, and of the version of the distribution that it belongs to."""

    version: str
    """Of that distribution; empty where there is none."""

    @property
    def source(self) -> str:
        """Its digest and version, for records."""
        return f"{self.digest} ({self.version})" if self.version else self.digest


def is_plugin(name: str) -> bool:
    """Return whether a name is that of a plug-in."""
    return ":" in name


def load(name: str) -> PlugIn:
    """Return what a plug-in's name stands for.

    Raises:
        PlugInError: it cannot be loaded; what its own code raised is the cause.
    """
    place, _, attribute = name.rpartition(":")
    with _loading:
        module = _load_file(place) if _is_file(place) else _load_module(place)
    return _take(module, attribute, _shorten(name), None)


def registered(group: str) -> dict[str, Callable[[], PlugIn]]:
    """Return what installed distributions offer in a group of entry points, by name."""
    return _registered(group, tuple(sys.path))


def absolute(text: str, folder: Path) -> str:
    """Return a string in which files of plug-ins do not depend on the current folder.

    Args:
        text: a name, with arguments or without; what cannot be read stays as it is.
        folder: from which its paths are given.

    >>> absolute("repeat(mine.py:target)", Path("/home/me"))
    'repeat(/home/me/mine.py:target)'
    """
    return _renamed(text, lambda name: _absolute(name, folder))


def shorten(text: str) -> str:
    """Return a string without the folders above files of plug-ins.

    >>> shorten("/home/me/graphs.py:chords(k=3)")
    'graphs.py:chords(k=3)'
    """
    return _renamed(text, _shorten)


def _shorten(name: str) -> str:
    return name.rpartition(os.sep)[2] if is_plugin(name) else name


def _renamed(text: str, rename: Callable[[str], str]) -> str:
    if not is_plugin(text):
        return text
    try:
        return str(calls.read(text).renamed(rename))
    except ValueError:  # the lookup will raise
        return text


def _absolute(name: str, folder: Path) -> str:
    place, colon, attribute = name.rpartition(":")
    if not _is_file(place):
        return name
    return f"{folder.absolute() / Path(place).expanduser()}{colon}{attribute}"


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def _load_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    unique = hashlib.blake2b(os.fsencode(path), digest_size=6).hexdigest()
    name = f"gossamer_plugin_{unique}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    try:
        source = path.read_bytes()
    except OSError as error:
        raise PlugInError(
            f"a plug-in must be in a file that can be read, got {place}: {error.strerror}; "
            "correct its path, from the current folder, or in an experiment from that of its file"
        ) from error
    spec = util.spec_from_file_location(name, path)
    if spec is None:
        raise PlugInError(f"a plug-in must be in a file that ends with .py, got {place}; rename it")
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up in it
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(place, error) from error
    _digests[name] = _digest(source)
    return module


def _load_module(name: str) -> ModuleType:
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise PlugInError(
            f"a plug-in is named as package.module:name or path/file.py:name, got {name!r} before "
            "the colon; correct it"
        )
    try:
        if top not in sys.modules and util.find_spec(top) is None:
            if str(Path.cwd()) not in sys.path:
                sys.path.append(str(Path.cwd()))
            importlib.invalidate_caches()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error
        raise PlugInError(
            f"a plug-in's module must be installed or be in {Path.cwd()}, got {name!r}, of which "
            f"there is no {error.name!r}; install it, or name its file: path/file.py:name"
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _failed(place: str, error: BaseException) -> PlugInError:
    return PlugInError(
        f"{place} must be imported without an error, got {described(error)}; correct it"
    )


def described(error: BaseException) -> str:
    """Return what a plug-in raised, and where, in one line."""
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, SyntaxError):  # says itself where
        return what
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what} ({Path(frame.filename).name}, line {frame.lineno})"


def _take(
    module: ModuleType, attribute: str, label: str, offered_by: metadata.Distribution | None
) -> PlugIn:
    try:
        part = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        own = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        ]
        raise PlugInError(
            f"a plug-in must be a name of its module, got {label}"
            f"{nearest_in_brackets(attribute, own)}; choose from "
            f"{', '.join(own[:_MOST_NAMES]) or 'others: it has none of its own'}"
        ) from None
    if module.__name__ in _digests:
        return PlugIn(label, part, _digests[module.__name__], "")
    version = _version(module.__name__.partition(".")[0], offered_by)
    sources = *_sources(module, part), version.encode()
    # Not every way to a module tells its distribution, so one part may have two digests.
    key = f"{module.__name__}:{attribute} {version}"
    digest = _digests.setdefault(key, _digest(*sources))
    return PlugIn(label, part, digest, version)


def _sources(module: ModuleType, part: Any) -> list[bytes]:
    """Return the source of a module, and of that of its package where the part is written."""
    names = [module.__name__, str(getattr(part, "__module__", ""))]
    inside = [name for name in names if name.partition(".")[0] == names[0].partition(".")[0]]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in dict.fromkeys(inside)]
    return [Path(file).read_bytes() for file in files if file and Path(file).is_file()]


def _version(package: str, offered_by: metadata.Distribution | None) -> str:
    if offered_by is not None:
        return f"{offered_by.name} {offered_by.version}"
    names = _distributions(tuple(sys.path)).get(package, [])
    return f"{names[0]} {metadata.version(names[0])}" if names else ""


@cache  # by the places that are searched: reading all distributions takes a while
def _distributions(places: tuple[str, ...]) -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _digest(*sources: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for source in sources:
        digest.update(len(source).to_bytes(8, "big") + source)
    return digest.hexdigest()


@cache
def _registered(group: str, places: tuple[str, ...]) -> dict[str, Callable[[], PlugIn]]:
    return {point.name: _loader(point) for point in metadata.entry_points(group=group)}


def _loader(point: metadata.EntryPoint) -> Callable[[], PlugIn]:
    def load_point() -> PlugIn:
        with _loading:
            module = _load_module(point.module)
        return _take(module, point.attr, point.name, point.dist)

    return load_point
