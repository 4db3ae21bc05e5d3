"""What ``gossamer launch`` tells the workers that it starts, beside torchrun's variables."""

from __future__ import annotations

JOINS = "GOSSAMER_JOIN"
"""The variable of a worker that comes when others train already; what it is set to follows."""

RETURNED = "returned"
"""It was started before, and has ended."""

NEW = "new"
"""It is one more than there were at the start."""
