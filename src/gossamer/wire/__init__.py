"""Wire formats: how buckets are encoded for sending. One file and one table row each."""

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
