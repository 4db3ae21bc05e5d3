"""Environment variables that ``gossamer launch`` sets for workers, beside those of torchrun."""

from __future__ import annotations

JOINS = "GOSSAMER_JOIN"
"""Set for a worker that joins a running job, to one of the values below."""

RETURNED = "returned"
"""The worker is a restart of one that has ended."""

NEW = "new"
"""The worker is additional: its rank did not exist when the job started."""
