"""The only code that moves parameters between processes."""

from gossamer.gossip.bulletin import ExchangeError
from gossamer.gossip.checkpoints import Checkpoints
from gossamer.gossip.decentralize import decentralize
from gossamer.gossip.handle import Gossip
from gossamer.gossip.scaler import GradScaler
from gossamer.gossip.stats import Stats

__all__ = ["Checkpoints", "ExchangeError", "Gossip", "GradScaler", "Stats", "decentralize"]
