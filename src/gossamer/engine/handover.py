"""Specifications received from another process; plug-ins are loaded again, and compared."""

from __future__ import annotations

from pydantic import ValidationError

from gossamer.engine.spec import RunSpec
from gossamer.errors import UserError


def receive(specification: str, run_id: str, here: str) -> RunSpec:
    """Return the specification that another process planned; its plug-ins are loaded here.

    Args:
        specification: in JSON.
        run_id: its id where it was planned, which depends on the plug-ins' sources there.
        here: where or when it is received, for the error.

    Raises:
        UserError: a plug-in cannot be loaded here, or has another source.
    """
    try:
        spec = RunSpec.model_validate_json(specification)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            raise cause from error
        raise
    if spec.id != run_id:
        raise other_source(here)
    return spec


def other_source(where: str) -> UserError:
    """Return the error: a run of two versions of a plug-in would be recorded as one of them."""
    return UserError(
        "the source of a plug-in must be the same for all of a run, got another one "
        f"{where}; make the files equal, or restart the experiment"
    )
