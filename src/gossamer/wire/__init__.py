"""What travels between workers: one file and one row of a table each, used by both engines."""

from gossamer.wire.buckets import Packing, bucket_indices
from gossamer.wire.catalogue import WIRE_REGISTRY, WIRES, parse_wire
from gossamer.wire.differences import Differences
from gossamer.wire.outbox import UNDECODED, Outbox, load_outboxes
from gossamer.wire.wire import Arrival, Codec, Fate, Wire

__all__ = [
    "UNDECODED",
    "WIRES",
    "WIRE_REGISTRY",
    "Arrival",
    "Codec",
    "Differences",
    "Fate",
    "Outbox",
    "Packing",
    "Wire",
    "bucket_indices",
    "load_outboxes",
    "parse_wire",
]
