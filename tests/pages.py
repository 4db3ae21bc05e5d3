"""The pages of the documentation as data: fenced blocks, commands, and changes to files."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import final

REPOSITORY = Path(__file__).parents[1]
_DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in _DOCS)]

_FENCED = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_PREFIX = re.compile(r"(sudo )?(nice -n -?\d+ )?(\.venv/bin/)?")


@final
@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    """The file that it is the whole of, where it is one."""

    text: str

    @property
    def changed_file(self) -> str:
        """The file that a diff changes; empty for one that only shows a change."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("--- ") if first.startswith("--- ") else ""


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [Block(*found) for found in _FENCED.findall((REPOSITORY / page).read_text())]


def commands_in(text: str) -> list[list[str]]:
    """Return the commands of a shell block as words, without comments, sudo and .venv/bin/.

    >>> commands_in("sudo .venv/bin/gossamer topology -n 16  # all of them")
    [['gossamer', 'topology', '-n', '16']]
    """
    lines = [_PREFIX.sub("", line, count=1) for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def inline_commands(page: str, programs: set[str]) -> list[list[str]]:
    """Return what a page quotes within a sentence that is a command of one of these programs."""
    text = _FENCED.sub("", (REPOSITORY / page).read_text())
    quoted = [_PREFIX.sub("", code, count=1) for code in _INLINE.findall(text)]
    return [
        shlex.split(code) for code in quoted if code.partition(" ")[0] in programs and " " in code
    ]


def apply_diff(block: Block, folder: Path) -> None:
    """Change a file under a folder as a diff says; it is copied there first if it is missing.

    Parts of the diff are separated by lines of ``@@``. Each must fit in exactly one place.
    """
    path = folder / block.changed_file
    copy_in(block.changed_file, folder)
    text = path.read_text()
    for part in re.split(r"^@@\n", block.text.partition("\n")[2], flags=re.MULTILINE):
        lines = [line or " " for line in part.splitlines()]
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert f"\n{text}".count(f"\n{before}") == 1, f"{path} must have once:\n{before}"
        text = f"\n{text}".replace(f"\n{before}", f"\n{after}").removeprefix("\n")
    path.write_text(text)


def copy_in(name: str, folder: Path) -> None:
    """Copy the repository's folder that has a file, unless a folder of that name is there."""
    top = Path(name).parts[0]
    if (REPOSITORY / top).is_dir() and not (folder / top).exists():
        shutil.copytree(
            REPOSITORY / top, folder / top, ignore=shutil.ignore_patterns("__pycache__")
        )
