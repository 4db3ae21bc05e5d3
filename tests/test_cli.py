from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from rich.console import Console
from typer.main import get_command

from gossamer import __version__
from gossamer.bench.experiment import parse
from gossamer.bench.matrix import expand
from gossamer.bench.store import Store
from gossamer.cli import app, main
from gossamer.cli import lab as lab_verb
from gossamer.cli.names import TABLES, names
from gossamer.cli.terminal import track
from gossamer.lab.verify import Measurement
from gossamer.records import Ended, Started
from gossamer.runtime_model.presets import GPUS, LINKS
from gossamer.topology import CATALOGUE
from gossamer.workloads import WORKLOADS
from gossamer.workloads.sources import DATA_SETS

REPOSITORY = Path(__file__).parents[1]


class Done(NamedTuple):
    """The exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def gossamer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process, with everything that a process would print."""

    def run(*arguments: str, columns: int = 120, **environment: str) -> Done:
        with monkeypatch.context() as here:
            here.setattr(sys, "argv", ["gossamer", *arguments])
            for name, value in {"COLUMNS": str(columns), **environment}.items():
                here.setenv(name, value)
            capsys.readouterr()
            with pytest.raises(SystemExit) as exit:
                main()
        said = capsys.readouterr()
        return Done(int(exit.value.code or 0), said.out, said.err)

    return run


# - Topology


def test_the_catalogue_is_a_table(gossamer: Run) -> None:
    """Every entry that exists on 16 workers has a row; p of the ring is in it."""
    result = gossamer("topology", "-n", "16")
    assert result.returncode == 0
    assert all(name in result.stdout for name in CATALOGUE)
    assert "0.0989" in result.stdout


def test_a_table_that_is_piped_is_whole(gossamer: Run) -> None:
    """In a pipe no cell is truncated or wrapped, however narrow the terminal."""
    narrow, wide = (gossamer("topology", "-n", "16", columns=n).stdout for n in (40, 200))
    assert "one_peer_exponential" in narrow
    assert "…" not in narrow
    assert narrow.count("│") == wide.count("│")


def test_what_does_not_exist_on_so_many_workers_is_said(gossamer: Run) -> None:
    """On seven workers the table says why there is no torus."""
    result = gossamer("topology", "-n", "7")
    assert result.returncode == 0
    assert "no torus: torus needs" in result.stdout


def test_one_topology_shows_its_first_rounds(gossamer: Run) -> None:
    """For one name: its summary, and the messages of each round."""
    result = gossamer("topology", "one_peer_ring", "-n", "4")
    assert "round 0" in result.stdout
    assert "round 1" in result.stdout
    assert "round 2" not in result.stdout


def test_a_name_alone_uses_the_arguments_of_its_example(gossamer: Run) -> None:
    """Without arguments ada uses and shows those of its example."""
    assert "ada(k0=10, gamma=0.02" in gossamer("topology", "ada").stdout


def test_json_lines_hold_the_same_facts(gossamer: Run) -> None:
    """One object per topology, for scripts."""
    lines = gossamer("topology", "-n", "16", "--json").stdout.splitlines()
    facts = {entry["name"]: entry for entry in map(json.loads, lines)}
    assert len(facts) == len(CATALOGUE)
    assert facts["ring"]["degree"] == 2
    assert facts["one_peer_exponential"]["rounds_to_consensus"] == 4
    assert facts["ring"]["rounds_to_consensus"] is None
    assert facts["ring"]["bytes_sent"] == 2 * 4 * 25.6e6


def test_bytes_follow_the_size_of_the_model(gossamer: Run, tmp_path: Path) -> None:
    """Two copies of a million parameters are 8 MB; a picture does not disturb the JSON."""
    arguments = ("topology", "ring", "--params", "1e6")
    row = next(line for line in gossamer(*arguments).stdout.splitlines() if "ring" in line)
    assert " 8 " in row
    lines = gossamer(*arguments, "--json", "--html", str(tmp_path / "x.html")).stdout.splitlines()
    assert [json.loads(line)["bytes_sent"] for line in lines] == [8e6]


def test_json_says_what_is_missing(gossamer: Run) -> None:
    """A script learns why there is no torus of seven."""
    lines = map(json.loads, gossamer("topology", "-n", "7", "--json").stdout.splitlines())
    assert "prime" in next(line for line in lines if line["name"] == "torus")["reason"]


def test_long_lists_are_cut(gossamer: Run) -> None:
    """A thousand neighbours are printed as a count."""
    result = gossamer("topology", "complete", "-n", "1008")
    assert "(1007 in all)" in result.stdout
    assert len(result.stdout.splitlines()) < 200


def test_a_graph_that_does_not_change_is_shown_once(gossamer: Run) -> None:
    """Ada's first rounds are one lattice; its description stands above it."""
    result = gossamer("topology", "ada", "--rounds", "8")
    assert result.stdout.count("receives from") == 1
    assert "thins out" in result.stdout


def test_a_topology_that_moves_the_mean_can_be_looked_at(gossamer: Run) -> None:
    """Uniform weights on a star have rounds, and no p."""
    result = gossamer("topology", "star(weights=uniform)", "-n", "6")
    assert result.returncode == 0
    assert "–" in result.stdout


# - Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("topology torrus", "did you mean 'torus'?"),
        ("topology lattice(k=3)", "even k"),
        ("topology ring -n 0", "at least one worker, got 0"),
        ("topology -n 0", "at least one worker, got 0"),
        ("topology ring --png x.gif", "--png writes a .png file, got 'x.gif'"),
        ("topology ring --html x.png", "--html writes a .html file, got 'x.png'"),
        ("topology ring --html text/x.html", "cannot write text/x.html: "),
        ("topolgy", "Did you mean 'topology'? (see gossamer --help)"),
        ("bench rum", "Did you mean 'run'? (see gossamer bench --help)"),
        ("topology --worker 4", "--workers) (see gossamer topology --help)"),
        ("topology -n four", "a valid integer"),
        ("demo --jobs 0", "'--jobs': Input should be greater than or equal to 1"),
        ("plan", "Missing argument 'profile' (see gossamer plan --help)"),
        ("plan missing.json", "got missing.json: No such file or directory; write one with"),
        ("plan folder", "got folder: Is a directory"),
        ("plan text", "must hold what gossamer profile writes"),
        ("profile", "got neither; write for example"),
        ("profile --gpu a100 --steps 5", "takes no --steps, which is for a workload"),
        ("profile digits-mlp --link 25gbit", "takes no --link, which is for a --gpu"),
        ("profile --gpu a10O", "did you mean 'a10'?"),
        ("profile --gpu a100 --out folder", "cannot write folder: Is a directory"),
        ("profile --gpu a100 --out text/p.json", "cannot write text/p.json: "),
        ("bench expand missing.toml", "got missing.toml: No such file or directory; docs/dbench"),
        ("bench expand folder", "got folder: Is a directory"),
        ("bench expand text", "text must be valid TOML, got "),
        ("bench expand binary", "got binary: not UTF-8"),
        ("bench run small.toml --out text", "cannot read or write text"),
        ("bench run small.toml --data-dir none", "--data-dir must be a folder, got none"),
        ("bench status folder", "got folder; make one with gossamer bench run"),
        ("bench report folder", "got folder; make one with gossamer bench run"),
        ("data cifra", "did you mean 'cifar10'?"),
        ("lab --rate 1gbit --json", "got no --verify; write for example --verify --json"),
    ],
)
def test_mistakes_are_one_line_with_a_suggestion(
    gossamer: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    words: str,
) -> None:
    """Exit code 2, one line on stderr however narrow, nothing on stdout and nothing of our code."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text").write_text("neither = = TOML nor JSON")
    Path("binary").write_bytes(bytes(range(256)))
    Path("small.toml").write_text(SMALL)
    result = gossamer(*arguments.split(), columns=40)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    if "ring" not in arguments:  # a table, before the picture that cannot be written
        assert result.stdout == ""


SMALL = """
name = "small"
workload = "digits-mlp"
workers = 4
methods = ["C_complete", "D_ring"]
run = { epochs = 1 }
"""


def test_a_topology_that_a_plan_cannot_use_is_named(
    gossamer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the reason."""
    monkeypatch.chdir(tmp_path)
    assert gossamer("profile", "--gpu", "a100").returncode == 0
    result = gossamer("plan", "profile.json", "--topology", "rign")
    assert result.returncode == 2
    assert "did you mean 'ring'?" in result.stderr


# - Help

VERBS: dict[str, Any] = {}
"""Commands by what a user types; groups among them."""


def _collect(command: Any, path: str) -> None:
    VERBS[path] = command
    for name, below in getattr(command, "commands", {}).items():
        _collect(below, f"{path} {name}")


_collect(get_command(app), "gossamer")


def test_a_path_is_not_an_option(gossamer: Run) -> None:
    """In every verb, an option that needs a path rejects an option instead of it."""
    paths = [
        (verb, each.opts[0])
        for verb, command in VERBS.items()
        for each in command.params
        if each.param_type_name == "option" and each.type_descriptor.annotation is Path
    ]
    assert ("gossamer bench report", "--tables") in paths
    assert len(paths) > 10
    for verb, option in paths:
        arguments = ["argument" for each in VERBS[verb].params if each.param_type_name != "option"]
        result = gossamer(*verb.split()[1:], *arguments, option, "--figures")
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: {option} needs a path, got '--figures'")


def examples_in(text: str) -> list[str]:
    return [line.strip()[2:] for line in text.splitlines() if line.strip().startswith("$ ")]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples_of_itself(verb: str) -> None:
    """Each group and verb has examples, and each example is of the verb that shows it."""
    shown = examples_in(VERBS[verb].help)
    assert shown
    assert all(verb in line for line in shown)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", [80, 60])
def test_help_reads(gossamer: Run, verb: str, columns: int) -> None:
    """Examples are one per line at 80 columns, no line breaks at 60, and flags take no value."""
    result = gossamer(*verb.split()[1:], "--help", columns=columns)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert "<bool>" not in result.stdout
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert max(map(len, result.stdout.splitlines())) <= columns
    for line in VERBS[verb].help.splitlines()[1:]:
        assert line.strip() in lines or (columns == 60 and line.startswith("$"))


EXAMPLES = [line for verb in VERBS.values() for line in examples_in(verb.help)]
PAGE = (REPOSITORY / "docs" / "command_line.md").read_text()
IN_PAGE = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if "gossamer" in line and "-completion" not in line  # that one would change a shell's files
]


@pytest.mark.parametrize("line", sorted({*EXAMPLES, *IN_PAGE}))
def test_examples_are_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example, of help and of the page, is parsed by the verb that it names."""
    called: list[str] = []
    for verb, command in VERBS.items():
        if not hasattr(command, "commands"):
            monkeypatch.setattr(command, "callback", lambda verb=verb, **_: called.append(verb))
    words = shlex.split(line.partition("|")[0])
    arguments = words[words.index("gossamer") + 1 :]
    code = VERBS["gossamer"].main(arguments, prog_name="gossamer", standalone_mode=False)
    assert not code
    assert called or "--help" in arguments
    assert all(line.partition("gossamer")[2].strip().startswith(v[9:]) for v in called)
    for word in arguments:
        assert not word.startswith("experiments/") or (REPOSITORY / word).exists()


def test_examples_run(gossamer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick ones work, one after the other, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(SMALL)
    quick = [
        line
        for verb in ("topology", "profile", "plan", "bench expand")
        for line in examples_in(VERBS[f"gossamer {verb}"].help)
        if line.startswith("gossamer") and "--html" not in line and "experiments/" not in line
    ]
    assert len(quick) == 8
    for line in quick:
        result = gossamer(*shlex.split(line)[1:])
        assert result.returncode == 0, result.stderr
        assert result.stdout or "profile" in line
    assert Path("profile.json").exists()


def test_the_page_has_every_verb() -> None:
    """docs/command_line.md has an example of each, and the exit codes of --help."""
    for verb, command in VERBS.items():
        assert hasattr(command, "commands") or any(line.startswith(verb) for line in IN_PAGE)
    for code in re.findall(r"^\d+", str(VERBS["gossamer"].epilog), re.MULTILINE):
        assert f"| {code} |" in PAGE


def test_the_version_is_the_package_s(gossamer: Run) -> None:
    """--version prints it, and nothing else."""
    assert gossamer("--version") == (0, f"gossamer {__version__}\n", "")


# - Completion


def completed(gossamer: Run, line: str) -> list[str]:
    """Return what a shell would offer for the last word."""
    words = line.split(" ")
    return gossamer(
        _GOSSAMER_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
    ).stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gossamer top", ["topology"]),
        ("gossamer bench re", ["report"]),
        ("gossamer topology --j", ["--json"]),
        ("gossamer topology tor", ["torus"]),
        ("gossamer plan profile.json --topology tor", ["torus"]),
        ("gossamer profile digits", ["digits-mlp", "digits-cnn"]),
        ("gossamer profile --gpu a1", ["a10", "a100"]),
        ("gossamer profile --link 2", ["25gbit", "200gbit"]),
        ("gossamer data c", ["cifar10"]),
        ("gossamer bench run ", ["mine.toml", "experiments/other.toml"]),
        ("gossamer bench run exp", ["experiments/other.toml"]),
        ("gossamer bench run experiments/", ["experiments/other.toml"]),
        ("gossamer bench status res", ["results/mine"]),
        ("gossamer bench report results/", ["results/mine"]),
    ],
)
def test_a_shell_is_offered_what_fits(
    gossamer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]
) -> None:
    """Verbs, options, names, experiments among other TOML files, and folders of records."""
    monkeypatch.chdir(tmp_path)
    for path in ("mine.toml", "experiments/other.toml", "results/mine/experiment.toml"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(SMALL)
    Path("pyproject.toml").write_text("[project]")
    assert completed(gossamer, line) == offered


def test_names_are_those_of_the_tables() -> None:
    """Names parsed from the source are those of the imported tables."""
    tables = {
        "topologies": CATALOGUE,
        "workloads": WORKLOADS,
        "data sets": DATA_SETS,
        "GPUs": GPUS,
        "links": LINKS,
    }
    assert TABLES.keys() == tables.keys()
    assert {name: names(name) for name in TABLES} == {n: list(t) for n, t in tables.items()}


def test_help_and_completion_import_nothing_slow() -> None:
    """Neither torch nor numpy nor what draws is loaded for them."""
    slow = "('torch', 'numpy', 'scipy', 'networkx', 'polars', 'plotly', 'jinja2')"
    code = f"""
import atexit, sys
from gossamer.cli import main
atexit.register(lambda: print([name for name in {slow} if name in sys.modules]))
main()
"""
    for arguments, environment in (
        (["--help"], {}),
        (["profile", "--help"], {}),
        ([], {"_GOSSAMER_COMPLETE": "complete_bash", "COMP_WORDS": "gossamer topology tor"}),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | environment | {"COMP_CWORD": "2"},
            check=True,
            timeout=50,
        )
        assert done.stdout.splitlines()[-1] == "[]"


# - Output


def test_status_says_in_json_what_became_of_each_run(gossamer: Run, tmp_path: Path) -> None:
    """One object per run: what it is, how it ended, and why."""
    store = Store(tmp_path / "out")
    first, _ = expand(parse(SMALL, "small.toml")).runs
    with store.locked(SMALL):
        started = Started(run_id=first.id, spec=first.model_dump(), environment={})
        store.conclude(started, 1, Ended(status="error", reason="out of memory"))
    result = gossamer("bench", "status", str(tmp_path / "out"), "--json")
    assert result.stderr == ""
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["run", "run"]
    assert [line["status"] for line in lines] == ["error", "to do"]
    assert lines[0]["reason"] == "out of memory"
    assert lines[1]["method"] == "D_ring"
    text = gossamer("bench", "status", str(tmp_path / "out")).stdout
    assert "1 error, 1 to do" in text


def test_status_tells_a_damaged_file_from_an_unfinished_run(gossamer: Run, tmp_path: Path) -> None:
    """One that ends without an end is damaged; one that may still be written is not."""
    store = Store(tmp_path / "out")
    first, second = expand(parse(SMALL, "small.toml")).runs
    with store.locked(SMALL):
        (store.folder / "runs" / f"{first.id}.jsonl").write_text("")
        (store.folder / "runs" / f"{second.id}.1.part").write_text("")
    result = gossamer("bench", "status", str(tmp_path / "out"), "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["status"] for line in lines] == ["damaged", "unfinished"]
    assert "is truncated after line 0" in lines[0]["reason"]
    text = gossamer("bench", "status", str(tmp_path / "out")).stdout
    assert "1 damaged, 1 unfinished" in text
    assert "it will be run again" in text


@pytest.mark.parametrize("as_json", [True, False])
def test_a_rate_that_is_off_is_exit_code_1(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measurements are still printed to stdout; a rate within the tolerance is no error."""
    good = Measurement(source="host0", target="host1", asked_bits_s=100, measured_bits_s=101.0)
    bad = Measurement(source="host1", target="host0", asked_bits_s=100, measured_bits_s=50.0)
    lab_verb._report([good], as_json=as_json)
    assert "error" not in capsys.readouterr().err
    with pytest.raises(typer.Exit) as exit:
        lab_verb._report([good, bad], as_json=as_json)
    assert exit.value.exit_code == 1
    said = capsys.readouterr()
    assert "error: measured rates must be within 5%" in said.err
    if as_json:
        lines = [json.loads(line) for line in said.out.splitlines()]
        assert [line["holds"] for line in lines] == [True, False]
    else:
        assert said.out.splitlines() == [str(good), str(bad)]


def test_long_work_is_a_line_in_a_log_and_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No control characters unless it is a terminal; all items come through in both."""
    assert list(track([1, 2], "measuring")) == [1, 2]
    assert capsys.readouterr() == ("", "measuring\n")
    monkeypatch.setattr(Console, "is_terminal", True)
    assert list(track([1, 2], "measuring")) == [1, 2]
    out, err = capsys.readouterr()
    assert out == ""
    assert "━" in err


# - Real processes

COMMAND = [sys.executable, "-m", "gossamer"]


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Return what a command prints to a terminal."""
    here, there = pty.openpty()
    known = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"} | environment
    with subprocess.Popen([*COMMAND, *arguments], stdout=there, stderr=there, env=known) as child:
        os.close(there)
        said = b""
        try:
            while block := os.read(here, 4096):
                said += block
        except OSError:  # how Linux says that the other side was closed
            pass
        os.close(here)
    assert child.returncode == 0
    return said.decode()


def test_colours_are_for_terminals_that_want_them() -> None:
    """A terminal gets colours, and none under NO_COLOR."""
    assert "\x1b[1;36m" in on_a_terminal("--help")
    assert not re.search(r"\x1b\[[\d;]*3\dm", on_a_terminal("--help", NO_COLOR="1"))


def test_a_reader_that_stops_early_is_no_error() -> None:
    """`gossamer topology | head` ends without a message."""
    child = subprocess.Popen(
        [*COMMAND, "topology", "-n", "16", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout
    child.stdout.close()
    assert child.communicate(timeout=50)[1] == ""
    assert child.returncode == 1


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A runner in the middle of a run."""
    file = tmp_path / "long.toml"
    file.write_text(SMALL.replace("epochs = 1", "epochs = 100000"))
    arguments = ["bench", "run", str(file), "--out", str(tmp_path / "out"), "--jobs", "1"]
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background may have been told to ignore SIGINT, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as runner:
        deadline = time.monotonic() + 50
        while not list(tmp_path.glob("out/runs/*.part")) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield runner
        runner.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_its_exit_code(
    long_run: subprocess.Popen[str], number: signal.Signals
) -> None:
    """Ctrl-C in the middle: one line that says how to continue, and 128 and the signal's number."""
    long_run.send_signal(number)
    out, err = long_run.communicate(timeout=30)
    assert long_run.returncode == 128 + number
    assert out == ""
    assert err.splitlines()[-1] == "interrupted; start it again to resume"
    assert "Traceback" not in err
