"""Wire formats by name."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.registry import Registry
from gossamer.wire.bf16 import Bf16
from gossamer.wire.fp32 import Fp32
from gossamer.wire.modulo import Modulo
from gossamer.wire.wire import Wire

# A new wire format is one class and one row here.
WIRES: dict[str, Callable[..., Wire]] = {
    "fp32": Fp32,
    "bf16": Bf16,
    "modulo": Modulo,
}

WIRE_REGISTRY: Registry[Wire] = Registry(
    kind="wire",
    table=WIRES,
    group="gossamer.wires",
    example="bf16 or modulo(bits=8)",
    makes=(Wire,),
)


def parse_wire(wire: str) -> Wire:
    """Return the wire format that a string names.

    >>> parse_wire("modulo(bits=4)").num_bytes(1000, itemsize=4)
    532
    """
    return WIRE_REGISTRY.parse(wire).make()
