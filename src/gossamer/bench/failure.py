"""The end of a run that raised, as its record says it."""

from __future__ import annotations

import traceback

from gossamer.errors import UserError
from gossamer.records import Ended

_LONGEST_REASON = 4000


def ended_by(error: Exception) -> Ended:
    """Return the record: what a user can cause says what to do, anything else where it happened."""
    if isinstance(error, UserError):
        return Ended(status="error", reason=str(error))
    trace = "".join(traceback.format_exception(error))
    return Ended(status="error", reason=trace[-_LONGEST_REASON:])
