"""Libraries that only some tasks need: imported when they are used, and named where missing.

All of the package's are imported through ``needed_by``, but for what goes on without: norms are not
kept where there is no polars.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from gossamer.errors import UserError

_DISTRIBUTIONS = {"PIL": "Pillow", "sklearn": "scikit-learn"}
"""What is installed, where it has another name than what is imported."""


@contextmanager
def needed_by(task: str, extra: str = "bench") -> Generator[None]:
    """Let an import that fails in this block say what to install.

    Args:
        task: who needs the library, with the verb, such as ``"pictures need"``.
        extra: of the package, which brings the library.
    """
    try:
        yield
    except ImportError as error:
        module = (error.name or str(error)).split(".")[0]
        raise UserError(
            f"{task} {_DISTRIBUTIONS.get(module, module)}, which is not installed; "
            f"pip install 'gossamer[{extra}]'"
        ) from error
