"""The only code that moves parameters between processes."""

from gossamer.gossip.decentralize import Gossip, decentralize
from gossamer.gossip.transport import ExchangeError

__all__ = ["ExchangeError", "Gossip", "decentralize"]
