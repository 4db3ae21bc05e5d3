"""Gossamer: decentralized data-parallel training for PyTorch.

Workers mix parameters with a few neighbours on a communication graph instead of
all-reducing gradients. A communication round is a value (``gossamer.topology.Round``);
everything else reads it.
"""

__version__ = "0.1.0.dev0"
