from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.topology import CATALOGUE


def gossamer(*arguments: str, columns: int = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "gossamer", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": str(columns)},
        timeout=55,
        check=False,
    )


def test_the_catalogue_is_a_table() -> None:
    """Every entry that exists on 16 workers has a row; p of the ring is in it."""
    result = gossamer("topology", "-n", "16")
    assert result.returncode == 0
    assert all(name in result.stdout for name in CATALOGUE)
    assert "0.0989" in result.stdout


def test_what_does_not_exist_on_so_many_workers_is_said() -> None:
    """On seven workers the table says why there is no torus."""
    result = gossamer("topology", "-n", "7")
    assert result.returncode == 0
    assert "no torus: torus needs" in result.stdout


def test_one_topology_shows_its_first_rounds() -> None:
    """For one name: its facts, and who hears whom, round by round."""
    result = gossamer("topology", "one_peer_ring", "-n", "4")
    assert "round 0" in result.stdout
    assert "round 1" in result.stdout
    assert "round 2" not in result.stdout


def test_a_name_alone_uses_the_arguments_of_its_example() -> None:
    """Looking at ada needs no arguments; the ones used are shown."""
    assert "ada(k0=10, gamma=0.02" in gossamer("topology", "ada").stdout


def test_json_lines_hold_the_same_facts() -> None:
    """One object per topology, for scripts."""
    lines = gossamer("topology", "-n", "16", "--json").stdout.splitlines()
    facts = {entry["name"]: entry for entry in map(json.loads, lines)}
    assert len(facts) == len(CATALOGUE)
    assert facts["ring"]["degree"] == 2
    assert facts["one_peer_exponential"]["rounds_to_consensus"] == 4
    assert facts["ring"]["rounds_to_consensus"] is None
    assert facts["ring"]["bytes_sent"] == 2 * 4 * 25.6e6


def test_bytes_follow_the_size_of_the_model(tmp_path: Path) -> None:
    """Two copies of a million parameters are 8 MB; a picture does not disturb the JSON."""
    arguments = ("topology", "ring", "--params", "1e6")
    row = next(line for line in gossamer(*arguments).stdout.splitlines() if "ring" in line)
    assert " 8 " in row
    lines = gossamer(*arguments, "--json", "--html", str(tmp_path / "x.html")).stdout.splitlines()
    assert [json.loads(line)["bytes_sent"] for line in lines] == [8e6]


def test_json_says_what_is_missing() -> None:
    """A script learns why there is no torus of seven."""
    lines = map(json.loads, gossamer("topology", "-n", "7", "--json").stdout.splitlines())
    assert "prime" in next(line for line in lines if line["name"] == "torus")["missing"]


def test_long_lists_are_cut() -> None:
    """A thousand neighbours are a number, not a screen full of them."""
    result = gossamer("topology", "complete", "-n", "1008")
    assert "(1007 in all)" in result.stdout
    assert len(result.stdout.splitlines()) < 200


def test_a_graph_that_does_not_change_is_shown_once() -> None:
    """Ada's first rounds are one lattice; its description stands above it."""
    result = gossamer("topology", "ada", "--rounds", "8")
    assert result.stdout.count("receives from") == 1
    assert "thins out" in result.stdout


def test_a_topology_that_moves_the_mean_can_be_looked_at() -> None:
    """Uniform weights on a star have rounds, and no p."""
    result = gossamer("topology", "star(weights=uniform)", "-n", "6")
    assert result.returncode == 0
    assert "–" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torrus"], "did you mean 'torus'?"),
        (["lattice(k=3)"], "even k"),
        (["ring", "-n", "0"], "at least one worker, got 0"),
        (["-n", "0"], "at least one worker, got 0"),
        (["ring", "--png", "x.gif"], "--png writes a .png file, got 'x.gif'"),
        (["ring", "--html", "x.png"], "--html writes a .html file, got 'x.png'"),
    ],
)
def test_mistakes_are_one_line_without_a_traceback(arguments: list[str], words: str) -> None:
    """Exit code 2, the explanation on stderr, nothing of our code."""
    result = gossamer("topology", *arguments, columns=400)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "verb",
    [
        *([], ["topology"], ["demo"], ["data"], ["lab"]),
        *(["bench", verb] for verb in ("expand", "run", "status", "report", "watch")),
    ],
    ids=" ".join,
)
def test_help_reads(verb: list[str]) -> None:
    """Help says what a verb does; each verb has an example."""
    result = gossamer(*verb, "--help")
    assert result.returncode == 0
    assert not verb or "xample" in result.stdout
