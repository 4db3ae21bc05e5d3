"""The only place where a string becomes an object; each module builds on those before it.

calls         parses ``name(argument=value, ...)``
plugins       loads ``package.module:name``, ``path/file.py:name`` and entry points
conversion    converts arguments by annotations
arguments     binds arguments to parameters
part          what a string stands for, bound to its arguments
registry      the table of one kind of part, and its errors
"""

from gossamer.registry import calls
from gossamer.registry.part import Part
from gossamer.registry.plugins import PlugInError, absolute, is_plugin, shorten
from gossamer.registry.registry import Registry

__all__ = ["Part", "PlugInError", "Registry", "absolute", "calls", "is_plugin", "shorten"]
