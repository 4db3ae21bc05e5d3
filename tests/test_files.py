"""Files that are atomic: there entirely, or not at all."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from gossamer.errors import UserError
from gossamer.files import write_all_atomic, write_atomic


def test_a_file_appears_with_its_folders_and_nothing_beside_it(tmp_path: Path) -> None:
    """The writer is given another path, and sees the old file until it is done."""
    path = tmp_path / "deep" / "table.csv"
    write_atomic(path, lambda aside: aside.write_text("old"))

    def write(aside: Path) -> None:
        assert aside.suffix == ".csv"
        aside.write_text("new")
        assert path.read_text() == "old"

    write_atomic(path, write)
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyError(), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    """Whatever it raises; what the disk refuses is the user's to mend."""
    path = tmp_path / "page.html"
    path.write_text("old")

    def write(aside: Path) -> None:
        aside.write_text("half")
        raise error

    with pytest.raises(UserError if isinstance(error, OSError) else type(error)):
        write_atomic(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_without_a_number_is_quoted_too(tmp_path: Path) -> None:
    """Writers raise their own OSError, which has words and no strerror."""

    def write(aside: Path) -> None:
        raise OSError("the image is too large")

    with pytest.raises(UserError, match=r"cannot write .*page.html: the image is too large; "):
        write_atomic(tmp_path / "page.html", write)


def test_of_several_files_none_appears_before_all_are_written(tmp_path: Path) -> None:
    """Where the second cannot be written, the first is not there either; the error says where."""
    paths = [tmp_path / "figures" / name for name in ("a.png", "b.png")]

    def write(aside: list[Path], num: int) -> None:
        for path in aside[:num]:
            path.write_text("drawn")
        if num < len(aside):
            raise OSError("the image is too large")

    with pytest.raises(UserError, match=r"cannot write \S*/figures: the image is too large; "):
        write_all_atomic(paths, partial(write, num=1))
    assert list(paths[0].parent.iterdir()) == []
    write_all_atomic(paths, partial(write, num=2))
    assert sorted(paths[0].parent.iterdir()) == paths
