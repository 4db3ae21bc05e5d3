"""Gossamer: decentralized data-parallel training for PyTorch.

Workers mix parameters with a few neighbours on a communication graph instead of
all-reducing gradients. A communication round is a value (``gossamer.topology.Round``);
everything else reads it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.gossip import Checkpoints, Gossip, GradScaler, MemberSampler, decentralize
    from gossamer.simulate import Simulation

__version__ = "0.1.0"
__all__ = [
    "Checkpoints",
    "Gossip",
    "GradScaler",
    "MemberSampler",
    "Simulation",
    "__version__",
    "decentralize",
]

# Imported when first used: ``gossamer topology`` should not wait for torch.
_LAZY = {
    "Checkpoints": "gossamer.gossip",
    "Gossip": "gossamer.gossip",
    "GradScaler": "gossamer.gossip",
    "MemberSampler": "gossamer.gossip",
    "Simulation": "gossamer.simulate",
    "decentralize": "gossamer.gossip",
}
_PACKAGES = (
    *("consensus", "engine", "gossip", "lab", "optim", "records", "runtime_model", "simulate"),
    *("topology", "workloads"),
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"gossamer.{name}")
    raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
