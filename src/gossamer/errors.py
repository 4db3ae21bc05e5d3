"""The exception for errors that a user can cause, and hints for misspelt names."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """An invalid request. The message has what was required, what was given, and what to do.

    The command line prints it in one line, without a traceback; every other exception is a bug and
    keeps its traceback.
    """


class ImpossibleError(UserError):
    """Valid names in an impossible combination, such as a torus of 7 workers."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint: the most similar name, or all names.

    >>> nearest("rign", ["ring", "torus"])
    "did you mean 'ring'?"
    """
    names = list(known)
    return _question(name, names) or f"choose from {', '.join(names)}"


def nearest_in_brackets(name: str, known: Iterable[str]) -> str:
    """Return a hint in brackets; empty if no name is similar.

    >>> nearest_in_brackets("rign", ["ring", "torus"])
    " (did you mean 'ring'?)"
    """
    question = _question(name, known)
    return f" ({question})" if question else ""


def _question(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}?" if match else ""


def quoted(value: object, most: int = 80) -> str:
    """Return the repr of a value for an error, truncated if it is long.

    >>> quoted("ring"), quoted("9" * 400, most=12)
    ("'ring'", "'9999999999… (402 characters)")
    """
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= most else f"{text[: most - 1]}… ({len(text)} characters)"
