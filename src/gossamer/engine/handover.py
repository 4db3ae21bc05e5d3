"""Specifications as they come to another process, which loads the plug-ins they name by itself."""

from __future__ import annotations

from pydantic import ValidationError

from gossamer.engine.spec import RunSpec
from gossamer.errors import UserError


def receive(specification: str, run_id: str, here: str) -> RunSpec:
    """Return the specification that another process planned; its plug-ins are loaded here.

    Args:
        specification: in JSON.
        run_id: what it is called where it was planned, and so which sources it had there.
        here: where or when it is received, for the error: on which rank, or since when.

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
    """Return the error: a run of two sources would be recorded as one of either."""
    return UserError(
        "the source of a plug-in must be the same for all of a run, got another one "
        f"{where}; make the files equal, or start the experiment again"
    )
