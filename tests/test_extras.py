"""Libraries that only some tasks need."""

from __future__ import annotations

import sys

import pytest

from gossamer.errors import UserError
from gossamer.extras import needed_by


@pytest.mark.parametrize(
    ("module", "named"), [("polars", "polars"), ("PIL", "Pillow"), ("sklearn", "scikit-learn")]
)
def test_a_missing_library_is_named_with_what_installs_it(
    module: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name that it is installed under, also where a part of it was to be imported."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"{module}.datasets", raising=False)
    for statement in (f"import {module}", f"from {module}.datasets import load_digits"):
        with pytest.raises(UserError) as raised, needed_by("this needs", extra="some"):
            exec(statement)
        assert str(raised.value) == (
            f"this needs {named}, which is not installed; pip install 'gossamer[some]'"
        )


def test_other_errors_are_not_about_installation() -> None:
    """A defect of ours keeps its own type and its traceback."""
    with pytest.raises(ZeroDivisionError), needed_by("this needs"):
        raise ZeroDivisionError
