"""The command line: each verb parses its arguments, makes one library call and prints.

Imports are lazy, inside the verbs: torch takes seconds, and --help does not need it.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

import gossamer
from gossamer.cli.bench import bench_app, demo_command
from gossamer.cli.data import data_command
from gossamer.cli.flags import Group, Verb
from gossamer.cli.lab import lab_command
from gossamer.cli.launch import launch_command
from gossamer.cli.plan import plan_command, profile_command
from gossamer.cli.terminal import say, say_error
from gossamer.cli.topology import topology_command
from gossamer.errors import UserError

_EXIT_CODES = """
Exit codes:
0    done
1    a run failed, or a measured rate is off
2    the input is wrong; a line on stderr says what to do
130  interrupted: 128 and the number of the signal
lab has the exit code of the command that it runs.
"""

app = typer.Typer(
    name="gossamer",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXIT_CODES,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"gossamer {gossamer.__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Decentralized data-parallel training for PyTorch.

    Workers mix parameters with a few neighbours instead of
    all-reducing gradients. A training script calls
    gossamer.decentralize; these verbs help to decide on it.

    Examples:
    $ gossamer demo
    $ gossamer topology -n 16
    $ gossamer plan --help
    """


app.command("demo", cls=Verb, rich_help_panel="See it")(demo_command)
app.command("topology", cls=Verb, rich_help_panel="See it")(topology_command)
app.command("profile", cls=Verb, rich_help_panel="Would it pay for a job?")(profile_command)
app.command("plan", cls=Verb, rich_help_panel="Would it pay for a job?")(plan_command)
app.add_typer(bench_app, name="bench", rich_help_panel="Measure")
app.command("data", cls=Verb, rich_help_panel="Measure")(data_command)
app.command("lab", cls=Verb, rich_help_panel="Measure")(lab_command)
app.command("launch", cls=Verb, rich_help_panel="Train")(launch_command)


def main() -> None:
    """Run the command line; a UserError is one line on stderr, without a traceback."""
    try:
        code = app(prog_name="gossamer", standalone_mode=False)
    except UserError as error:
        say_error(str(error))
        sys.exit(2)
    except typer.TyperException as error:  # of the arguments themselves
        if message := error.format_message():  # else help was printed
            say_error(f"{message.rstrip('.')}{_where_to_look(error)}")
        sys.exit(error.exit_code)
    if code == 128 + signal.SIGINT:
        say("interrupted")
    sys.exit(code)


def _where_to_look(error: typer.TyperException) -> str:
    context: typer.Context | None = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context else ""
