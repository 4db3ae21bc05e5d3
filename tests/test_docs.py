"""The code blocks and commands of README, CONTRIBUTING and docs/ work.

The blocks of a page run from top to bottom in one folder. Python runs on four ranks, with smaller
sizes by SMALLER. A command in a block runs, with the options of SHORTENED, unless it has a row in
ELSEWHERE; then only its arguments are parsed, which finds a renamed option or file, and the row
says which test runs it, or why none does. Commands in sentences are parsed, and have a row here or
in SENTENCES.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from gossamer.bench import expand
from gossamer.bench.experiment import parse as parse_experiment
from gossamer.cli import app
from gossamer.runtime_model import write_profile
from gossamer.runtime_model.presets import from_data_sheet
from gossamer.topology import CATALOGUE
from tests import page_ranks, stories
from tests.page_commands import CHECKS, check_arguments
from tests.pages import (
    PAGES,
    REPOSITORY,
    Block,
    apply_diff,
    blocks_of,
    commands_in,
    copy_in,
    inline_commands,
)
from tests.pool import ProcessPool

# Jobs of several processes that each import torch: a loaded machine takes its time.
pytestmark = pytest.mark.timeout(240)

RANKS = 4
CI = "continuous integration runs it: .ci/run"
BLOCKS = "blocks run it"

# The first words of commands that are parsed and not run: what runs them, or why nothing does.
ELSEWHERE = {
    "make demo": CI,
    "make full": CI,
    "make docs": CI,
    "make lint": CI,
    "make package": CI,
    "make test": CI,
    "make format": "changes the sources",
    "make setup": "every other target of the Makefile needs it",
    "pip install": "changes the environment: make package installs into one of its own",
    "gossamer --install-completion": "changes the start-up files of a shell: tests/test_cli.py",
    "gossamer data": "downloads: tests/test_data_files.py",
    "gossamer demo": "make demo runs it",
    "gossamer bench run experiments": "takes minutes: the README's, which is smaller, is run",
    "gossamer bench watch": "serves until it is ended: tests/test_bench_report.py",
    "gossamer lab": "needs root: tests/test_lab_cluster.py",
    "gossamer launch": "tests/test_launch.py",
    "python -m benchmarks": "takes minutes, or root: tests/test_benchmarks.py runs small ones",
    "sbatch": "Slurm is not here: test_the_slurm_script_starts_two_agents runs the script",
    "python examples/nanogpt": "tests/test_nanogpt.py",
    "torchrun --nproc-per-node 4 examples/nanogpt": "tests/test_nanogpt.py",
    "torchrun --nnodes 2": "needs two nodes: tests/test_bench_runner.py starts two agents on one",
    "torchrun --nproc-per-node 4 -m gossamer profile": "tests/test_runtime_model_measure.py",
}

# The same for commands that stand in a sentence, of which many only name a verb.
SENTENCES = {
    "gossamer --help": "tests/test_cli.py",
    "gossamer --show-completion": "depends on the shell: tests/test_cli.py asks as its script does",
    "gossamer bench expand": BLOCKS,
    "gossamer bench report": BLOCKS,
    "gossamer bench run": BLOCKS,
    "gossamer plan": BLOCKS,
    "gossamer profile": BLOCKS,
    "gossamer topology": BLOCKS,
    "python -m gossamer": "tests/test_cli.py",
    "python -m build": "make package and tests/test_package.py",
    "python docs/figures.py": "takes minutes of runs before it: its figures are on the pages",
    "python examples/": "tests/test_examples.py",
}

# Options that make a command short enough for a test.
SHORTENED = {
    "gossamer plan": ["--workers", "8", "--topology", "ring"],
}

# A page that shows this line says where profile.json comes from; the loop after it is the reader's.
MEASURES = 'measure(model, optimizer, "profile.json")'

# Python that is compiled, and of which only the imports are run, by words of the block.
NOT_RUN = {
    "GossipAccelerator(": "starts a process group of its own: tests/test_frameworks.py",
    "GossipStrategy(": "the same",
    "GossipTrainer(": "the same",
    "with Cluster(": "needs root: tests/test_lab_cluster.py",
}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, so that commands cannot change the user's."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_a_page_holds(page: str, pool: ProcessPool, tmp_path: Path) -> None:
    """Every block does what the page says, in order, in one folder."""
    if any(MEASURES in block.text for block in blocks_of(page) if block.language == "python"):
        write_some_profile(tmp_path / "profile.json")
    for folder in ("examples", "experiments"):
        copy_in(folder, tmp_path)
    own_python: list[str] = []
    with contextlib.chdir(tmp_path):
        for block in blocks_of(page):
            assert block.language in HANDLERS, f"{page} has a block in {block.language!r}"
            if block.language == "python" and (tmp_path / "src").exists() and not block.title:
                own_python.append(block.text)
            else:
                HANDLERS[block.language](block, tmp_path, pool)
    pool.run(page_ranks.forget)
    if own_python:  # the page changed the package
        run_in_changed_repository("\n".join(own_python), tmp_path)


# - Blocks


def run_python(block: Block, folder: Path, pool: ProcessPool) -> None:
    if block.title:
        copy_in(block.title, folder)
        (folder / block.title).write_text(block.text)
    elif any(words in block.text for words in NOT_RUN):
        imports = [node for node in ast.parse(block.text).body if is_import(node)]
        exec(compile(ast.Module(imports, []), "<page>", "exec"), {})
    else:
        pool.run(page_ranks.run_block, block.text, folder)


def write_some_profile(path: Path) -> None:
    """Write what a reader's script would, with the lines of the page that measure it."""
    sheet = from_data_sheet(
        "a40", "25gbit", parameters=65e6, flops=1e12, workers=8, workers_per_node=4
    )
    write_profile(sheet, path)


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def run_in_changed_repository(text: str, folder: Path) -> None:
    places = [str(folder / "src"), str(folder)]
    run_command([sys.executable, "-c", text], folder, {"PYTHONPATH": os.pathsep.join(places)})


def run_command(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command with additional variables; return its output."""
    result = subprocess.run(
        command,
        env=os.environ | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def read_experiment(block: Block, folder: Path, pool: ProcessPool) -> None:
    """Write an experiment to the file of its name, and a titled block to the file of its title."""
    if block.title:
        tomllib.loads(block.text)
        (folder / block.title).write_text(block.text)
        return
    experiment = parse_experiment(block.text, "the page")
    assert expand(experiment).runs
    (folder / f"{experiment.name}.toml").write_text(block.text)


def change_file(block: Block, folder: Path, pool: ProcessPool) -> None:
    if block.changed_file:
        apply_diff(block, folder)


def run_shell(block: Block, folder: Path, pool: ProcessPool) -> None:
    if block.title:
        (folder / block.title).write_text(block.text)
        return
    for words in commands_in(block.text):
        first, *others = pipeline(words)
        for part in (first, *others):
            check_arguments(part, folder)
        if row_of(first) is None:
            RUNNERS[first[0]](first, folder, pool)


def check_text(block: Block, folder: Path, pool: ProcessPool) -> None:
    """Check that a block of output contains no command."""
    assert not [words for words in commands_in(block.text) if words[0] in CHECKS]


HANDLERS: dict[str, Callable[[Block, Path, ProcessPool], None]] = {
    "python": run_python,
    "toml": read_experiment,
    "diff": change_file,
    "sh": run_shell,
    "": check_text,
    "text": check_text,
}

# - Commands


def pipeline(words: list[str]) -> list[list[str]]:
    """Return the commands that pipes join; only the first is ours to run."""
    ends = [index for index, word in enumerate(words) if word == "|"]
    starts = [0, *(end + 1 for end in ends)]
    return [words[start:end] for start, end in zip(starts, [*ends, None], strict=True)]


def row_of(words: list[str]) -> str | None:
    """Return the row of ELSEWHERE that a command has."""
    return next((row for row in ELSEWHERE if " ".join(words).startswith(row)), None)


EXPERIMENT = """
name = "small"
workload = "digits-mlp"
workers = 8
methods = ["C_complete", "D_ring"]
run = { epochs = 6, steps_per_epoch = 10, log_every = 5 }
"""


def run_gossamer(words: list[str], folder: Path, pool: ProcessPool) -> None:
    text = " ".join(words)
    extra = [
        option for row, options in SHORTENED.items() if text.startswith(row) for option in options
    ]
    if words[1:3] == ["bench", "run"]:  # it ends with its processes
        run_program([sys.executable, "-m", *words], folder, pool)
        return
    if words[1:3] in (["bench", "report"], ["bench", "status"]) and not Path(words[3]).exists():
        # Of an experiment that ELSEWHERE says takes minutes.
        assert (folder / "experiments" / f"{Path(words[3]).name}.toml").is_file()
        runs = [stories.spec_of(method) for method in ("C_complete", "D_ring")]
        stories.write(Path(words[3]), [stories.story_of(spec, 0.9) for spec in runs], EXPERIMENT)
    with contextlib.redirect_stdout(io.StringIO()):
        typer.main.get_command(app).main([*words[1:], *extra], standalone_mode=False)


def run_torchrun(words: list[str], folder: Path, pool: ProcessPool) -> None:
    options = get_args_parser().parse_args(words[1:])
    assert options.nproc_per_node == str(RANKS)
    printed = pool.run(page_ranks.run_script, folder / options.training_script)
    assert "accuracy" in printed[0]


def run_program(words: list[str], folder: Path, pool: ProcessPool) -> None:
    subprocess.run(words, cwd=folder, check=True)


RUNNERS: dict[str, Callable[[list[str], Path, ProcessPool], None]] = {
    "gossamer": run_gossamer,
    "torchrun": run_torchrun,
    "cp": run_program,
    "rm": run_program,
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_exist(page: str) -> None:
    """Verbs, options, modules, targets and files in sentences exist, and have a row."""
    for words in inline_commands(page, {"gossamer", "torchrun", "python", "make", "pip"}):
        known = row_of(words) or any(" ".join(words).startswith(row) for row in SENTENCES)
        assert known, f"{page}: {' '.join(words)} has no row in ELSEWHERE or SENTENCES"
        try:
            check_arguments(words, REPOSITORY)
        except Exception as error:
            # A sentence may name a verb without what it needs.
            if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                raise AssertionError(f"{page}: {' '.join(words)}: {error}") from error


@pytest.mark.parametrize("page", PAGES)
def test_sudo_is_given_a_path(page: str) -> None:
    """Most systems' sudo resets PATH, and would not find a command of the environment."""
    text = (REPOSITORY / page).read_text()
    started = re.findall(r"sudo (?:nice -n -?\d+ )?(\S+) .*?(?:-- (\S+)|[\n`])", text)
    assert not [name for names in started for name in names if name and "/bin/" not in name]


@pytest.mark.parametrize(
    "command",
    [
        "gossamer topology --wrokers 16",
        "gossamer bench run experiments/nothing.toml",
        "gossamer benhc run x.toml",
        "gossamer lab --rate 1gbit -- gossamer plna",
        "torchrun --ranks 4 examples/ddp.py",
        "torchrun --nproc-per-node 4 examples/nothing.py",
        "python -m benchmarks.topology --nothing 3",
        "python -m benchmarks.faults --nothing 3",
        "python -m benchmarks.nothing",
        "make nothing",
        "pip install '.[nothing]'",
        "curl example.org",
    ],
)
def test_what_does_not_exist_is_found(command: str) -> None:
    """A renamed option, verb, file, module, target or extra, and a program that nothing checks."""
    with pytest.raises((Exception, SystemExit)):  # typer's, argparse's or ours
        check_arguments(commands_in(command)[0], REPOSITORY)


def test_arguments_are_read_and_nothing_is_done(home: Path) -> None:
    """A check of --install-completion does not install it."""
    check_arguments(["gossamer", "--install-completion"], REPOSITORY)
    assert not list(home.iterdir())


def test_each_row_says_what_is_so() -> None:
    """Rows of tables are used; what continuous integration is said to run, it runs; tests exist."""
    blocks = [block for page in PAGES for block in blocks_of(page)]
    shell = [block.text for block in blocks if block.language == "sh" and not block.title]
    rows = {row_of(words) for text in shell for words in commands_in(text)}
    assert set(ELSEWHERE) <= rows
    run = [" ".join(w) for text in shell for w in commands_in(text) if row_of(w) is None]
    said = [row for row, reason in SENTENCES.items() if reason == BLOCKS]
    assert not [row for row in said if not any(text.startswith(row) for text in run)]
    programs = {"gossamer", "python"}
    inline = [" ".join(words) for page in PAGES for words in inline_commands(page, programs)]
    assert not [row for row in SENTENCES if not any(text.startswith(row) for text in inline)]
    python = "\n".join(block.text for block in blocks if block.language == "python")
    assert not [words for words in (*page_ranks.PRELUDES, *NOT_RUN) if words not in python]
    script = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert all(row in script for row, reason in ELSEWHERE.items() if reason == CI)
    reasons = " ".join((*ELSEWHERE.values(), *SENTENCES.values(), *NOT_RUN.values()))
    named = re.findall(r"tests/\w+\.py", reasons)
    assert all((REPOSITORY / name).is_file() for name in named)


# - What a page says beyond its blocks


def test_the_diff_in_the_readme_is_that_of_the_examples() -> None:
    """Lines that it takes away are in examples/ddp.py, lines that it adds in ddp_to_gossip.py."""
    diff = next(block.text for block in blocks_of("README.md") if block.language == "diff")
    sources = {"-": "examples/ddp.py", "+": "examples/ddp_to_gossip.py"}
    for sign, name in sources.items():
        lines = (REPOSITORY / name).read_text().splitlines()
        changed = [line[1:] for line in diff.splitlines() if line.startswith(sign)]
        assert changed
        assert not set(changed) - set(lines)


def test_the_tutorial_comes_to_the_example(tmp_path: Path) -> None:
    """After its first two changes the script is examples/ddp_to_gossip.py but for its topology."""
    shutil.copy(REPOSITORY / "examples" / "ddp.py", tmp_path / "train.py")
    for block in [block for block in blocks_of("docs/tutorial.md") if block.changed_file][:2]:
        apply_diff(block, tmp_path)
    example = (REPOSITORY / "examples" / "ddp_to_gossip.py").read_text()
    example = example.replace(', topology="one_peer_exponential"', "")
    scripts = [text.split('"""', 2)[2] for text in ((tmp_path / "train.py").read_text(), example)]
    assert scripts[0] == scripts[1]


def test_the_page_of_topologies_has_the_catalogue() -> None:
    """Every name has a row in the table of docs/topology.md."""
    table = (REPOSITORY / "docs" / "topology.md").read_text().partition("## The catalogue")[2]
    rows = re.findall(r"^\| (`.+?`) \|", table.partition("\n## ")[0], re.MULTILINE)
    assert set(re.findall(r"`(\w+)", " ".join(rows))) == set(CATALOGUE)


SRUN = '#!/bin/bash\nfor node in 0 1; do "$@" & done\nwait -n && wait -n\n'


def test_the_slurm_script_starts_two_agents(tmp_path: Path) -> None:
    """With srun as a loop over two nodes, both on this machine, their ranks train together."""
    block = next(block for block in blocks_of("docs/multinode.md") if block.title.endswith("batch"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        text = page_ranks.smaller(block.text).replace("29400", str(free.getsockname()[1]))
    for name, script in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    copy_in("examples", tmp_path)
    for path in (tmp_path / "examples").glob("*.py"):
        path.write_text(page_ranks.smaller(path.read_text()))
    places = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    environment = slurm | {"PATH": os.pathsep.join(places)}
    printed = run_command(["bash", "-c", text], tmp_path, environment)
    assert printed.count("test accuracy") == 1
