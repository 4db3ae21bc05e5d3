"""Optional dependencies: imported when they are used, and named in the error if missing.

All optional imports of the package go through ``needed_by``, except where the package works without
the library: norms are not stored if polars is missing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from gossamer.errors import UserError

_DISTRIBUTIONS = {"PIL": "Pillow", "sklearn": "scikit-learn"}
"""Names of distributions that differ from the name of the module."""


@contextmanager
def needed_by(task: str, extra: str = "bench") -> Generator[None]:
    """Turn an ImportError in this block into a UserError that says what to install.

    Args:
        task: the subject and verb of the error, such as ``"pictures need"``.
        extra: the extra of the package that installs the library.
    """
    try:
        yield
    except ImportError as error:
        module = (error.name or str(error)).split(".")[0]
        raise UserError(
            f"{task} {_DISTRIBUTIONS.get(module, module)}, which is not installed; "
            f"pip install 'gossamer[{extra}]'"
        ) from error
