"""What README, CONTRIBUTING and docs/ say is so: every block of code and every command on them.

A page is walked from top to bottom in a folder of its own. Python runs on four ranks, commands run
as they stand. What cannot run in a test has a row in ELSEWHERE, and its arguments are parsed, so
that a renamed option or file is found. A command without a row is run.
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
from argparse import ArgumentParser
from collections.abc import Callable, Generator
from importlib import import_module, util
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch.distributed as dist
import typer
from torch.distributed.run import get_args_parser

from gossamer.bench import expand
from gossamer.bench.experiment import parse as parse_experiment
from gossamer.cli import app
from gossamer.gossip import Gossip
from gossamer.runtime_model import links, measure, write_profile
from gossamer.runtime_model.presets import from_data_sheet
from tests import stories
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

RANKS = 4
CI = "continuous integration runs it: .ci/run"

# The first words of commands that are parsed and not run: what runs them, or why nothing does.
ELSEWHERE = {
    "make demo": CI,
    "make docs": CI,
    "make lint": CI,
    "make test": CI,
    "make format": "changes the sources",
    "make setup": "every other target of the Makefile needs it",
    "pip install": "changes the environment; make setup installs the package the same way",
    "gossamer bench run": "takes minutes: tests/test_bench_runner.py runs smaller experiments",
    "gossamer bench watch": "serves until it is ended: tests/test_bench_report.py",
    "gossamer lab": "needs root: tests/test_lab_cluster.py",
    "python -m benchmarks": "takes minutes, or root",
    "sbatch": "Slurm is not here: test_the_slurm_script_starts_two_agents runs the script",
    "torchrun --nnodes 2": "needs two nodes: tests/test_bench_runner.py starts two agents on one",
    "torchrun --nproc-per-node 4 -m gossamer profile": "tests/test_runtime_model_measure.py",
}

# Options that make a command short enough for a test.
SHORTENED = {
    "gossamer bench expand": ["--no-estimate"],
    "gossamer plan": ["--workers", "8", "--topology", "ring"],
}

# What a test has in the place of more workers, epochs, GPUs and nodes.
SMALLER = {
    '"cuda"': '"cpu"',
    "1008": "16",
    "EPOCHS = ": "EPOCHS = 3 or ",  # measure() takes 35 steps
    "--nproc-per-node 2": "--nproc-per-node 1",
}

# What a reader's script has before a block, by words of the block.
PRELUDES = {
    "in batches": "batches = [(torch.randn(16, 2, 64), torch.zeros(16, 2, dtype=torch.long))]",
    "in loader": "loader = []",
    "worker_seed(": "seed, rank, step = 0, 1, 2",
    "Centralized(": "optimizer = lambda params: torch.optim.SGD(params, lr=0.1)",
    "make_optimizer": "make_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)",
    "[muon, adamw]": """
muon, adamw = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
closure = lambda: model(torch.ones(1, 64)).sum()
""",
    "perturb(model)": """
perturb = lambda model: None
loss = lambda model: model(torch.ones(1, 64)).sum()
""",
    "init_device_mesh(": """
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
num_nodes, gpus = 2, 2
""",
    "SummaryWriter(": "SummaryWriter = lambda folder: mock.Mock()",
    "train_one_step(": """
NUM_STEPS, train_one_step = 3, lambda step: optimizer.step()
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
""",
    "Sketch(": """
from gossamer.consensus import Sketch, sketch_distance, sketch_error
parameters, groups = list(model.parameters()), [0, 0, 1, 1]
tensors = [torch.stack([p, 2 * p]).detach() for p in parameters]
sketches_nm = Sketch().sketch_stacked(tensors, groups).sum(1).numpy()
""",
    "parse_control(": """
import numpy as np
from gossamer.consensus import Observation, bind, parse_control
from gossamer.topology import parse
schedule, step = parse("ring", 4), 0
observation = Observation(step=0, lr=0.1, sketches=np.eye(4))
""",
    'Store(Path("results/digits"))': """
from tests.stories import spec_of, story_of, write
if dist.get_rank() == 0:
    write(Path("results/digits"), [story_of(spec_of("D_ring"), 0.9)])
dist.barrier()
""",
}

# Python that is compiled, and of which only the imports are run, by words of the block.
NOT_RUN = {
    "with Cluster(": "needs root: tests/test_lab_cluster.py",
    "stack(parameters of models)": "is written in words: tests/reference.py is the code",
}

FRESH = """
import torch, gossamer
import torch.distributed as dist
from pathlib import Path
from torch import nn
from unittest import mock
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss, evaluate = nn.functional.cross_entropy, lambda model: model(torch.zeros(1, 64))
"""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_holds(page: str, pool: ProcessPool, tmp_path: Path) -> None:
    """Every block does what the page says, in order, in one folder."""
    sheet = from_data_sheet(
        "a40", "25gbit", parameters=65e6, flops=1e12, workers=8, workers_per_node=4
    )
    write_profile(sheet, tmp_path / "profile.json")
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
    pool.run(forget)
    if own_python:  # the page changed the package
        run_in_changed_repository("\n".join(own_python), tmp_path)


# - Blocks


def run_python(block: Block, folder: Path, pool: ProcessPool) -> None:
    if block.title:
        copy_in(block.title, folder)
        (folder / block.title).write_text(block.text)
    elif any(words in block.text for words in NOT_RUN):
        with contextlib.suppress(SyntaxError):
            imports = [node for node in ast.parse(block.text).body if is_import(node)]
            exec(compile(ast.Module(imports, []), "<page>", "exec"), {})
    else:
        pool.run(run_on_rank, block.text, folder)


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


NAMES: dict[str, Any] = {}
"""In a process of the pool: what the blocks of a page have in common."""


def run_on_rank(text: str, folder: Path) -> None:
    """Run a block with a model and optimizer of its own; it may use the names of those before."""
    if gossip := NAMES.get("gossip"):
        gossip.close()
    gossips = re.search(r"\bgossip\b", text) and not re.search(r"gossip = |as gossip", text)
    start = [FRESH, *(code for words, code in PRELUDES.items() if words in text)]
    start += ["gossip = gossamer.decentralize(model, optimizer)"] if gossips else []
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), quick_links():
        exec("\n".join(start), NAMES)
        exec(compile(smaller(text), "<page>", "exec"), NAMES)


@contextlib.contextmanager
def quick_links() -> Generator[None]:
    """Measure links and hooks in less time; how well is not asked here."""
    with mock.patch.object(links, "_WINDOW_S", 0.004), mock.patch.object(measure, "_TINY_STEPS", 3):
        yield


def smaller(text: str) -> str:
    for words, others in SMALLER.items():
        text = text.replace(words, others)
    return text


def forget() -> None:
    """End what the blocks of a page left behind."""
    if isinstance(gossip := NAMES.get("gossip"), Gossip):
        gossip.close()
    NAMES.clear()


def run_in_changed_repository(text: str, folder: Path) -> None:
    places = [str(folder / "src"), str(folder)]
    result = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def read_experiment(block: Block, folder: Path, pool: ProcessPool) -> None:
    """An experiment lies in the file of its name from then on."""
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
        check_arguments(words, folder)
        if row_of(words) is None:
            RUNNERS[words[0]](words, folder, pool)


def check_text(block: Block, folder: Path, pool: ProcessPool) -> None:
    """Output and layouts of files: no command hides among them."""
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


def row_of(words: list[str]) -> str | None:
    """Return the row of ELSEWHERE that a command has."""
    return next((row for row in ELSEWHERE if " ".join(words).startswith(row)), None)


def run_gossamer(words: list[str], folder: Path, pool: ProcessPool) -> None:
    text = " ".join(words)
    extra = [
        option for row, options in SHORTENED.items() if text.startswith(row) for option in options
    ]
    if words[1:3] == ["bench", "report"] and not Path(words[3]).exists():
        runs = [stories.spec_of(method) for method in ("C_complete", "D_ring")]
        stories.write(Path(words[3]), [stories.story_of(spec, 0.9) for spec in runs])
    with contextlib.redirect_stdout(io.StringIO()):
        typer.main.get_command(app).main([*words[1:], *extra], standalone_mode=False)


def run_torchrun(words: list[str], folder: Path, pool: ProcessPool) -> None:
    options = get_args_parser().parse_args(words[1:])
    assert options.nproc_per_node == str(RANKS)
    printed = pool.run(run_script, folder / options.training_script)
    assert "accuracy" in printed[0]


def run_script(path: Path) -> str:
    """Run a script in the process group that is there; return what it prints."""
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.chdir(path.parent),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        quick_links(),
    ):
        exec(compile(smaller(path.read_text()), path, "exec"), {"__name__": "__main__"})
    return output.getvalue()


def run_program(words: list[str], folder: Path, pool: ProcessPool) -> None:
    subprocess.run(words, cwd=folder, check=True)


RUNNERS: dict[str, Callable[[list[str], Path, ProcessPool], None]] = {
    "gossamer": run_gossamer,
    "torchrun": run_torchrun,
    "cp": run_program,
    "rm": run_program,
}

# - Arguments


def check_arguments(words: list[str], folder: Path) -> None:
    """Fail where a command has an option, a target or a file that does not exist."""
    assert words[0] in CHECKS, f"no check and no runner for the command {words}"
    CHECKS[words[0]](words[1:], folder)


def check_gossamer(arguments: list[str], folder: Path) -> None:
    if "--" in arguments:
        inner = arguments[arguments.index("--") + 1 :]
        check_arguments([Path(inner[0]).name, *inner[1:]], folder)
    parse_only(typer.main.get_command(app), arguments)


def parse_only(command: Any, arguments: list[str]) -> None:
    """Parse arguments as a command does, and do nothing."""
    for each in walk(command):
        each.callback = lambda **given: None
    try:
        command.main(arguments, prog_name="gossamer", standalone_mode=False)
    except SystemExit as error:
        pytest.fail(f"{arguments} ends with {error}")


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
    else:
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
    own = getattr(module, "app", None)
    if own is None:
        own = typer.Typer()
        own.command()(module.main)
    parse_only(typer.main.get_command(own), arguments)


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
    "rm": check_nothing,
    "sbatch": check_nothing,
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_exist(page: str) -> None:
    """A verb, an option, a module, a target or a file that a sentence names is there."""
    for words in inline_commands(page, {"gossamer", "torchrun", "python", "make", "pip"}):
        try:
            check_arguments(words, REPOSITORY)
        except Exception as error:
            # A sentence may name a verb without what it needs.
            if type(error).__name__ != "MissingParameter":
                raise AssertionError(f"{page}: {' '.join(words)}: {error}") from error


@pytest.mark.parametrize(
    "command",
    [
        "gossamer topology --wrokers 16",
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


def test_each_row_says_what_is_so() -> None:
    """Rows of tables are used; what continuous integration is said to run, it runs; tests exist."""
    blocks = [block for page in PAGES for block in blocks_of(page)]
    shell = [block.text for block in blocks if block.language == "sh" and not block.title]
    rows = {row_of(words) for text in shell for words in commands_in(text)}
    assert set(ELSEWHERE) <= rows
    python = "\n".join(block.text for block in blocks if block.language == "python")
    assert not [words for words in PRELUDES if words not in python]
    script = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert all(row in script for row, reason in ELSEWHERE.items() if reason == CI)
    named = re.findall(r"tests/\w+\.py", " ".join((*ELSEWHERE.values(), *NOT_RUN.values())))
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


SRUN = '#!/bin/bash\nfor node in 0 1; do "$@" & done\nwait -n && wait -n\n'


def test_the_slurm_script_starts_two_agents(tmp_path: Path) -> None:
    """With srun as a loop over two nodes, both on this machine, their ranks train together."""
    block = next(block for block in blocks_of("docs/multinode.md") if block.title.endswith("batch"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        text = smaller(block.text).replace("29400", str(free.getsockname()[1]))
    for name, script in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    places = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    result = subprocess.run(
        ["bash", "-c", text],
        env=os.environ | slurm | {"PATH": os.pathsep.join(places)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("test accuracy") == 1
