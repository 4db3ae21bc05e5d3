"""The variable by which ``gossamer launch`` tells a worker that it joins a running job."""

from __future__ import annotations

JOINS = "GOSSAMER_JOIN"
"""Set only for a worker that joins a running job, to one of the values below."""

RETURNED = "returned"
"""The worker was started before, and failed."""

NEW = "new"
"""The worker was not part of the job at its start."""
