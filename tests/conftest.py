from __future__ import annotations

from hypothesis import settings

# One seed for everyone: a failure here is a failure on every machine.
settings.register_profile("gossamer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gossamer")
