"""All live objects of a class: finds wrappers and optimizers that hold a given parameter."""

from __future__ import annotations

import gc
from typing import TypeVar

Kind = TypeVar("Kind")


def instances_of(kind: type[Kind]) -> list[Kind]:
    """Return every live object of a class or its subclasses, in a pass over all objects.

    By their types, which are few: ``isinstance`` on each object would take four times as long, and
    could run the object's own code.
    """
    objects = gc.get_objects()
    kinds = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in kinds] if kinds else []
