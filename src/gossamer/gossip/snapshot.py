"""One rank's state as a safetensors file, with everything that is not a tensor as JSON inside.

Nothing in the file is executed when it is read. A state is what ``state_dict()`` returns: dicts
with keys that are strings or integers, lists, tuples, tensors, numbers, strings and None, nested.
It is read back exactly: tuples stay tuples, floats are exact, tensors keep dtype and strides.

In the JSON a list is a list, and what JSON cannot express is an object with its kind as key:
``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"tensor": name}``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, TypeAlias, cast, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

from gossamer.errors import UserError
from gossamer.files import open_regular
from gossamer.gossip.buckets import is_dense

StateDict: TypeAlias = dict[str, Any]
Place: TypeAlias = tuple[object, ...]

_STRUCTURE = "structure.json"
"""Name of the tensor of bytes that holds the JSON; the metadata of safetensors is too small."""

_RESERVED = ("__metadata__", _STRUCTURE)

_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}

_DTYPES = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64),
}
"""The dtypes of safetensors."""


class DamagedError(Exception):
    """A file does not hold what was written."""


def write(path: Path, state: StateDict) -> int:
    """Write a state to a file, with fsync; return its checksum."""
    tensors = _tensors_of(state)
    path.unlink(missing_ok=True)  # an existing path may be a pipe or a symbolic link
    try:
        save_file(tensors, path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        return checksum_of(path)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)  # a partial file would only use disk space
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,  # safetensors has errno only in its message
            f"a state of {sum(tensor.nbytes for tensor in tensors.values()):,} bytes must "
            f"be written to {path}, got {error}; free disk space, or choose another folder",
        ) from error


def read(path: Path, checksum: int) -> Any:
    """Return the state in a file, on the CPU.

    Raises:
        DamagedError: the checksum differs, or the file does not hold a state.
        OSError: it cannot be read.
    """
    found = checksum_of(path)
    if found != checksum:
        raise DamagedError(f"{path} must have the checksum {checksum:015x}, got {found:015x}")
    try:
        # Not memory-mapped: tensors must outlive the file, and be aligned as torch allocates them.
        return _state_of(load_file(path, backend="pread"))
    except OSError:
        raise
    except Exception as error:  # safetensors, JSON and torch raise anything on a foreign file
        raise DamagedError(
            f"{path} must hold a state, and cannot be read: {type(error).__name__}: {error}"
        ) from error


def to_bytes(state: StateDict) -> bytes:
    """Return the contents that ``write`` would give a file."""
    return save(_tensors_of(state))


def from_bytes(data: bytes) -> Any:
    """Return the state that ``to_bytes`` serialized, on the CPU."""
    return _state_of(load(data))


def _tensors_of(state: StateDict) -> dict[str, Tensor]:
    """Return a state as tensors that safetensors can write."""
    packer = _Packer()
    structure = json.dumps(packer.pack(state, ())).encode()
    packer.tensors[_STRUCTURE] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
    return _disjoint(packer.tensors)


def _state_of(tensors: dict[str, Tensor]) -> Any:
    return _unpack(json.loads(tensors.pop(_STRUCTURE).numpy().tobytes()), tensors)


def _equally(state: StateDict) -> Callable[[Place], float]:
    return lambda path: 1.0


def average(
    states: Iterable[StateDict],
    weight_of: Callable[[StateDict], Callable[[Place], float]] = _equally,
) -> StateDict:
    """Return the mean of all workers' states, which may be read one after the other.

    Floating-point and complex tensors are averaged in double precision. Everything else is the
    first worker's.

    Args:
        states: one per worker.
        weight_of: returns, for a worker's state, the weight of each tensor by its path.
    """
    remaining = iter(states)
    first = next(remaining)
    shapes = _shapes_in(first)
    weights = weight_of(first)
    averaged = {
        path: tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
        for path, tensor in _tensors_in(first)
        if tensor.is_floating_point() or tensor.is_complex()
    }
    totals = {path: weights(path) for path in averaged}
    sums = {path: tensor.mul(totals[path]) for path, tensor in averaged.items()}
    for num, state in enumerate(remaining, 1):
        _check_alike(shapes, _shapes_in(state), num)
        weights = weight_of(state)
        for path, tensor in _tensors_in(state):
            if path in sums:
                sums[path].add_(tensor.to(sums[path].dtype), alpha=weights(path))
                totals[path] += weights(path)
    for path, tensor in _tensors_in(first):
        if path in sums:
            tensor.copy_(sums.pop(path).div_(totals[path]))
    return first


def checksum_of(path: Path) -> int:
    """Return 60 bits of a file's digest, which fit in the integer that ranks gather."""
    with open_regular(path) as file:
        return int(hashlib.file_digest(cast("Any", file), "blake2b").hexdigest()[:15], 16)


@final
class _Packer:
    """Separates a state into tensors by name, and JSON that refers to these names."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}

    def pack(self, value: Any, path: Place) -> Any:
        """Return the JSON of the value at a path."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value) in (Tensor, nn.Parameter):
            return self._pack_tensor(value, path)
        if type(value) in (list, tuple):
            items = [self.pack(item, (*path, place)) for place, item in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if type(value) in (dict, OrderedDict, Counter):
            packed: dict[str, Any] = {type(value).__name__: self._pack_pairs(value, path)}
            # The state of a model has the versions of its modules.
            if attributes := getattr(value, "__dict__", {}):
                packed["attributes"] = self._pack_pairs(attributes, path)
            return packed
        raise UserError(
            "a state must hold tensors, numbers, strings, None, and dicts, lists and tuples of "
            f"them, got {type(value).__name__} at {_name_of(path)}; convert it in the object's "
            "state_dict() and load_state_dict()"
        )

    def _pack_pairs(self, mapping: dict[Any, Any], path: Place) -> list[list[Any]]:
        for key in mapping:
            if type(key) not in (str, int):
                raise UserError(
                    "the keys of a state must be strings or integers, got "
                    f"{key!r} at {_name_of(path)}; convert it in the object's state_dict() and "
                    "load_state_dict()"
                )
        return [[key, self.pack(value, (*path, key))] for key, value in mapping.items()]

    def _pack_tensor(self, tensor: Tensor, path: Place) -> dict[str, Any]:
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            raise UserError(
                "a tensor in a state must be dense and of a dtype that safetensors supports, got "
                f"{tensor.dtype}, {tensor.layout} on {tensor.device} at {_name_of(path)}; convert "
                "it in the object's state_dict() and load_state_dict()"
            )
        packed: dict[str, Any] = {}
        if not tensor.is_contiguous() and is_dense(tensor):
            packed["strides"] = [*tensor.stride()]
        # Tied tensors are written once, and are tied again when they are read.
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        identity = (*view, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else path
        if identity not in self._names:
            self._names[identity] = name = self._unused(_name_of(path))
            self.tensors[name] = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return {"tensor": self._names[identity], **packed}

    def _unused(self, name: str) -> str:
        while name in self.tensors or name in _RESERVED:
            name += "'"
        return name


def _name_of(path: Place) -> str:
    """Return a path as a name in ASCII, which every reader of safetensors accepts.

    >>> _name_of(("model", "0.weight"))
    'model.0.weight'
    """
    return ".".join(map(str, path)).encode("ascii", "backslashreplace").decode()


def _disjoint(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with a copy of each that overlaps another: safetensors rejects those."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        start = tensor.data_ptr()
        if start < end:
            tensors[name] = tensor.clone()
        end = max(end, start + tensor.nbytes)
    return tensors


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(packed, list):
        return [_unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind, content = next(iter(packed.items()))
    if kind == "tensor":
        return _with_strides(tensors[content], packed.get("strides"))
    made = _CONTAINERS[kind](_unpack(content, tensors))
    if "attributes" in packed:
        vars(made).update(_unpack(packed["attributes"], tensors))
    return made


def _with_strides(tensor: Tensor, strides: list[int] | None) -> Tensor:
    if strides is None:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _tensors_in(value: Any, path: Place = ()) -> Generator[tuple[Place, Tensor]]:
    """Yield each tensor of a state with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, (*path, key))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _tensors_in(item, (*path, place))


def _shapes_in(state: StateDict) -> dict[Place, str]:
    return {path: str([*tensor.shape]) for path, tensor in _tensors_in(state)}


def _check_alike(first: dict[Place, str], other: dict[Place, str], worker: int) -> None:
    for path in {**first, **other}:
        here, there = first.get(path, "absent"), other.get(path, "absent")
        if here != there:
            raise UserError(
                f"the workers to average must hold the same tensors, got {_name_of(path)} {here} "
                f"on worker 0 and {there} on worker {worker}; continue on the number of workers "
                "that was saved"
            )
