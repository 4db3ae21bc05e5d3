"""Whether what a command names is there: options, verbs, files, modules, targets and extras.

Arguments are parsed by what parses them, and nothing is done.
"""

from __future__ import annotations

import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import pytest
import typer
from torch.distributed.run import get_args_parser

from gossamer.cli import app
from tests.pages import REPOSITORY


def check_arguments(words: list[str], folder: Path) -> None:
    """Fail where a command has an option, a target or a file that does not exist."""
    assert words[0] in CHECKS, f"no check and no runner for the command {words}"
    CHECKS[words[0]](words[1:], folder)


def check_gossamer(arguments: list[str], folder: Path) -> None:
    if "--" in arguments:
        inner = arguments[arguments.index("--") + 1 :]
        check_arguments([Path(inner[0]).name, *inner[1:]], folder)
    for word in (word for word in arguments if word.endswith(".toml")):
        assert (folder / word).is_file(), f"there is no experiment {word}"
    parse_only(typer.main.get_command(app), arguments)


def parse_only(command: Any, arguments: list[str]) -> None:
    """Parse arguments as a command does, and do nothing."""
    for each in walk(command):
        each.callback = lambda **given: None
        for parameter in (one for one in each.params if one.callback is not None):
            parameter.callback = end_where_given  # --install-completion would install
    try:
        command.main(arguments, prog_name="gossamer", standalone_mode=False)
    except SystemExit as error:
        pytest.fail(f"{arguments} ends with {error}")


def end_where_given(context: Any, parameter: Any, given: Any) -> None:
    if given:
        raise typer.Exit


def walk(command: Any) -> list[Any]:
    return [
        command,
        *(leaf for child in getattr(command, "commands", {}).values() for leaf in walk(child)),
    ]


def check_torchrun(arguments: list[str], folder: Path) -> None:
    options = get_args_parser().parse_args(arguments)
    if options.module:
        check_python(["-m", options.training_script, *options.training_script_args], folder)
    else:
        check_python([options.training_script, *options.training_script_args], folder)


def check_python(arguments: list[str], folder: Path) -> None:
    if arguments[0] != "-m":
        known = {"train.py"}  # stands for the reader's own
        assert arguments[0] in known or (folder / arguments[0]).is_file(), f"no {arguments[0]}"
    elif arguments[1] == "gossamer":
        check_gossamer(arguments[2:], folder)
    elif arguments[1].startswith("benchmarks."):
        check_benchmark(arguments[1], arguments[2:])


class Parsed(Exception):
    """Arguments were read, and nothing has been done."""


def check_benchmark(name: str, arguments: list[str]) -> None:
    found = util.find_spec(name)
    assert found is not None, f"there is no module {name}"
    module = import_module(f"{name}.__main__" if found.submodule_search_locations else name)
    if hasattr(module, "argparse"):
        parse = ArgumentParser.parse_args

        def parse_and_end(parser: ArgumentParser) -> NoReturn:
            raise Parsed(parse(parser, arguments))

        with mock.patch.object(ArgumentParser, "parse_args", parse_and_end), pytest.raises(Parsed):
            module.main()
        return
    parse_only(typer.main.get_command(own_app(module)), arguments)


def own_app(module: ModuleType) -> typer.Typer:
    """Return what parses the arguments of a benchmark that is written with typer."""
    if (own := getattr(module, "app", None)) is not None:
        return own
    made = typer.Typer()
    made.command()(module.main)
    return made


def check_make(arguments: list[str], folder: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in arguments:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no {target}"


def check_pip(arguments: list[str], folder: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\[(.+?)\]", " ".join(arguments)):
        assert extra in project["optional-dependencies"], f"there is no extra {extra}"


def check_nothing(arguments: list[str], folder: Path) -> None:
    """Of programs that are not ours."""


CHECKS: dict[str, Callable[[list[str], Path], None]] = {
    "gossamer": check_gossamer,
    "torchrun": check_torchrun,
    "python": check_python,
    "make": check_make,
    "pip": check_pip,
    "cp": check_nothing,
    "jq": check_nothing,
    "rm": check_nothing,
    "sbatch": check_nothing,
}
