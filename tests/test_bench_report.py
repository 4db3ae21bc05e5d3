from __future__ import annotations

import io
import json
import math
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console
from typer.testing import CliRunner

from gossamer.bench.analysis import Analysis, analyse
from gossamer.bench.report.figures import figures, method_styles
from gossamer.bench.report.reading import Reader
from gossamer.bench.report.style import styles
from gossamer.bench.report.watch import Watch
from gossamer.bench.report.writing import images, write_figures, write_report, write_tables
from gossamer.bench.store import Story
from gossamer.cli.bench import bench_app
from gossamer.cli.summary import summary_table
from gossamer.errors import UserError
from gossamer.records import Step
from tests.browser import Page, browser, needs_browser
from tests.stories import spec_of, story_of, write

METHODS = ("C_complete", "D_complete", "D_lattice(k=6)", "D_exponential", "D_torus", "D_ring")
EVIL = "D_ring <b onmouseover=alert(1)></script>"

TEXT = """
name = "synthetic"
workload = "digits-mlp"
workers = [16, 36]
methods = ["C_complete", "D_complete", "D_lattice(k=6)", "D_exponential", "D_torus", "D_ring"]
seeds = [0, 1, 2]
run = { epochs = 6, steps_per_epoch = 10, log_every = 5 }
"""


def synthetic(scales: tuple[int, ...] = (16, 36), seeds: int = 3) -> list[Story]:
    """Methods in the order of METHODS get worse, dispersion larger, and both with scale."""
    noise = [0.0, 0.003, -0.002, 0.001, -0.001, 0.002]
    return [
        story_of(
            spec_of(method, workers, seed),
            lambda step, end=0.95 - place / 50 - workers / 1000 + noise[(seed + place) % 6]: (
                end * (1 - math.exp(-step / 10))
            ),
            spread=0.01 * 2**place + noise[seed % 5],
            step_bytes=1e5 / (1 + place),
        )
        for workers in scales
        for place, method in enumerate(METHODS)
        for seed in range(seeds)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment and its report."""
    place = tmp_path_factory.mktemp("experiment") / "done"
    write(place, synthetic(), TEXT)
    write_report(place)
    return place


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser for all tests of this file."""
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class Cells(HTMLParser):
    """The numbers in a page's tables: table, attributes of the row, column, value and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any], str, float, str]] = []
        self.findings: list[dict[str, Any]] = []
        self._table, self._row, self._cell = "", dict[str, Any](), dict[str, Any]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember where in the page we are."""
        given = {name.removeprefix("data-"): value or "" for name, value in attrs}
        if tag == "table":
            self._table = given.get("table", "")
        if tag == "tr":
            self._row = given
        if tag == "td":
            self._cell = given if "value" in given else {}
        if "rho" in given:
            self.findings.append(given)

    def handle_data(self, data: str) -> None:
        """Store the first text of a cell."""
        if self._cell:
            value = float(self._cell["value"])
            self.found.append((self._table, self._row, self._cell["column"], value, data))
            self._cell = {}


def cell_of(analysis: Analysis, table: str, row: dict[str, Any], column: str) -> float:
    """Return the expected value of a cell, from the table that it names."""
    frame: pl.DataFrame = getattr(analysis, {"effects": "observations"}.get(table, table))
    if table == "effects":
        for name in ("observation", "method", "phase", "measure"):
            frame = frame.filter(pl.col(name).eq_missing(pl.lit(row[name] or None)))
    if table == "observations":
        frame = frame.filter(
            pl.col("observation") == "dispersion",
            pl.col("measure") == column,
            pl.col("phase") == row["phase"],
        )
        column = "rho"
    if table == "scores":
        frame = frame.filter(pl.col("cost") == row["cost"], pl.col("method") == row["method"])
        return frame[column].item()
    workers = pl.col("workers")
    frame = frame.filter(
        workers == int(row["workers"]) if row.get("workers") else workers.is_null(),
        pl.col("workload") == row["workload"],
    )
    if row.get("method"):
        frame = frame.filter(pl.col("method") == row["method"])
    assert len(frame) == 1
    return frame[column][0]


def plain(text: str) -> float:
    """Return a number as it was written: 1.23 MB, −0.5."""
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "s": 1}
    number, _, unit = text.strip().replace("−", "-").replace(",", "").partition(" ")
    return float(number) * units.get(unit, 1)


# - Every number is that of a table


def test_every_number_on_the_page_is_that_of_its_table(folder: Path) -> None:
    """Cells carry the table's value to the last bit, and show it rounded to three digits or
    more.
    """
    html = (folder / "report.html").read_text()
    analysis = Reader(folder).read().analysis
    checked = set[str]()
    for table, row, column, value, text in Cells(html).found:
        if table == "crossovers":
            assert value in analysis.crossovers["at"].to_list()
        else:
            assert value == cell_of(analysis, table, row, column), (table, row, column)
        tolerance = 0.005 if table == "observations" else abs(value) * 0.005 + 1e-12
        assert plain(text) == pytest.approx(value, abs=tolerance)
        checked.add(table)
    own = {"verdicts", "summary", "observations", "effects", "crossovers", "targets", "scores"}
    assert checked == own


def test_the_findings_are_rows_of_the_table(folder: Path) -> None:
    """The three cards show the correlations over all scales."""
    analysis = Reader(folder).read().analysis
    pooled = analysis.observations.filter(pl.col("workers").is_null(), pl.col("method").is_null())
    found = Cells((folder / "report.html").read_text()).findings
    assert len(found) == 2  # of two scales nothing can be told
    for card in found:
        row = (float(card["rho"]), float(card["p"]), int(card["units"]))
        assert row in list(pooled.select("rho", "p", "units").iter_rows())


def test_the_figures_draw_the_tables(folder: Path) -> None:
    """Points of the scatter are runs, ends of curves are final results, to six digits."""
    analysis = Reader(folder).read().analysis
    html = (folder / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html)
    assert found
    drawn = json.loads(found[1])["figures"]
    assert set(drawn) == {
        *("scale", "learning", "loss", "connections", "dispersion"),
        *("dispersion-by-step", "distance", "bytes", "target", "profile"),
    }

    def traces(name: str, **choice: str) -> list[dict[str, Any]]:
        return [t for t in drawn[name]["traces"] if t["meta"]["choice"] == choice]

    runs = analysis.runs.filter(pl.col("workers") == 36, pl.col("method") == "D_torus")
    (points,) = [
        trace
        for trace in traces("dispersion", measure="gini", phase="early")
        if trace["meta"]["workers"] == 36 and trace["meta"]["method"] == "D_torus"
    ]
    by_run = analysis.dispersion_by_run.filter(pl.col("phase") == "early").join(runs, on="run_id")
    assert points["x"] == pytest.approx(by_run["gini"].to_list(), rel=1e-5)
    assert points["y"] == pytest.approx(runs["final"].to_list(), rel=1e-5)
    ends = {
        trace["meta"]["method"]: trace["y"][-1]
        for trace in traces("learning", show="average")
        if trace["meta"]["workers"] == 36 and "fill" not in trace
    }
    results = analysis.summary.filter(pl.col("workers") == 36).select("method", "final")
    final = dict(results.iter_rows())
    assert ends == pytest.approx(final, rel=1e-5)


def test_a_distance_of_zero_has_a_mark_below_all_others() -> None:
    """Steps after which workers are equal are marked at the edge of the axis, and not left out."""
    stories: list[Story] = []
    for seed in range(2):
        story = story_of(spec_of("local_sgd(every=10)", seed=seed), 0.9, spread=0.2)
        records = [
            record.model_copy(update={"distance": 0.0 if record.step % 10 == 0 else 0.2})
            if isinstance(record, Step)
            else record
            for record in story.records
        ]
        stories.append(Story(story.run_id, records))
    stories.append(story_of(spec_of("D_ring"), 0.9, spread=0.04))
    drawn = {figure.name: figure for figure in figures(analyse(stories))}
    own = [t for t in drawn["distance"].traces if t["meta"]["method"] != "D_ring"]
    apart, equal = (trace for trace in own if "fill" not in trace)
    assert (apart["x"], apart["y"]) == (list(range(5, 61, 10)), [0.2] * 6)
    assert (equal["x"], equal["y"]) == (list(range(10, 61, 10)), [0.01] * 6)
    assert equal["mode"] == "markers+text"
    assert "Ξ = 0" in equal["hovertemplate"]
    assert all(min(t["y"]) > 0.01 for t in drawn["distance"].traces if t is not equal)


def test_the_loss_is_drawn_over_steps() -> None:
    """The mean and the worst worker's loss, as recorded."""
    (loss,) = [f for f in figures(analyse([story_of(spec_of("D_ring"), 0.9)])) if f.name == "loss"]
    mean, worst = loss.traces
    assert mean["y"] == pytest.approx([1 / step for step in mean["x"]], rel=1e-5)
    assert worst["y"] == pytest.approx([2 / step for step in mean["x"]], rel=1e-5)
    assert worst["meta"]["choice"] == {"show": "worst_loss"}


def test_the_verdict_names_the_winner_and_its_cost() -> None:
    """At both scales centralized training is best here, and the page says so."""
    analysis = analyse(synthetic())
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary_table(analysis))
    said = console.export_text()
    assert "on 16 and 36 workers C_complete is best" in said
    gap = analysis.verdicts.filter(pl.col("workers") == 36)["better"][0]
    assert f"D_complete, is {abs(gap):.4g} behind C_complete" in said
    assert "Seen: replicas that differ more go with a worse result" in said


# - Partial, failed, damaged, foreign


def test_partial_results_give_a_partial_report(tmp_path: Path) -> None:
    """It shows how many runs are missing, which failed and why, and which are impossible."""
    stories = synthetic()
    failed = story_of(spec_of("D_ring", 36, 2), 0.5, status="diverged")
    going = story_of(spec_of("D_ring", 36, 1), 0.5, status=None)
    text = TEXT.replace("[16, 36]", "[16, 36, 7]") + "skip_impossible = true\n"
    write(tmp_path / "x", [*stories[:24], failed, going], text)
    (tmp_path / "x" / "runs" / f"{stories[25].run_id}.jsonl").write_text("not a record\n")
    results = write_report(tmp_path / "x")
    counts = {"done": 24, "diverged": 1, "unfinished": 1, "damaged": 1, "to do": 24, "skipped": 3}
    assert results.counts == counts
    html = (tmp_path / "x" / "report.html").read_text()
    assert "Partial results." in html
    assert "25 runs have no result yet" in html
    assert "the loss was nan" in html
    assert "line 1 cannot be read" in html
    assert "torus" in html.partition("skipped</span>")[2]


def test_nothing_done_yet_is_a_report_too(tmp_path: Path) -> None:
    """During the first run the page says that there is no verdict."""
    write(tmp_path / "x", [story_of(spec_of("D_ring", 16), 0.5, status=None)], TEXT)
    write_report(tmp_path / "x")
    assert "No verdict: no run is done yet" in (tmp_path / "x" / "report.html").read_text()


def test_runs_of_another_experiment_are_left_out(tmp_path: Path) -> None:
    """Runs that the experiment no longer has must not be compared with those that it has."""
    other = story_of(spec_of("D_ring", 16, 9), 0.99)
    write(tmp_path / "x", [*synthetic(), other], TEXT)
    results = Reader(tmp_path / "x").read()
    assert (results.foreign, len(results.analysis.runs)) == (1, 36)


def test_runs_of_another_version_can_still_be_looked_at(tmp_path: Path) -> None:
    """If no run has an id of the current experiment, all are shown, with a note."""
    write(tmp_path / "x", synthetic((64,)), TEXT)
    results = Reader(tmp_path / "x").read()
    assert (results.foreign, results.counts) == (0, {"done": 18})
    assert "another version" in results.remark


def test_without_its_file_an_experiment_is_what_was_run(tmp_path: Path) -> None:
    """The report shows the existing runs, and notes that there may be others."""
    write(tmp_path / "x", synthetic((16,)))
    results = Reader(tmp_path / "x").read()
    assert results.counts == {"done": 18}
    assert "not in the folder" in results.remark


def test_a_folder_without_runs_is_a_user_error(tmp_path: Path) -> None:
    """One line that says what was expected."""
    with pytest.raises(UserError, match="which has a folder 'runs'"):
        write_report(tmp_path)


# - Files


def test_tables_are_written_as_csv_parquet_and_latex(folder: Path, tmp_path: Path) -> None:
    """All of them, equal to the analysis; tables of results also as LaTeX; no other files."""
    analysis = Reader(folder).read().analysis
    write_tables(analysis, tmp_path / "t")
    costs = ("targets", "profiles", "scores")
    printed = {"summary", "differences", "verdicts", "observations", "fits", "graph_ranks"}
    names = {f"{name}.{kind}" for name in analysis._fields for kind in ("csv", "parquet")}
    names |= {f"{name}.tex" for name in (*printed, "crossovers", *costs)}
    assert {path.name for path in (tmp_path / "t").iterdir()} == names
    assert r"D\_torus & False & 3 &" in (tmp_path / "t" / "summary.tex").read_text()
    assert pl.read_parquet(tmp_path / "t" / "runs.parquet").equals(analysis.runs)
    read = pl.read_csv(tmp_path / "t" / "summary.csv")
    assert read["final"].to_list() == analysis.summary["final"].to_list()


@needs_browser
def test_figures_are_written_as_images(tmp_path: Path) -> None:
    """One of each kind for each figure; no temporary files are left."""
    analysis = analyse(story_of(spec_of("C_complete", 4, seed), 0.5) for seed in range(2))
    write_figures(analysis, tmp_path / "f")
    names = {f"{name}.{kind}" for name, _ in images(analysis) for kind in ("png", "svg", "pdf")}
    assert {path.name for path in (tmp_path / "f").iterdir()} == names
    assert (tmp_path / "f" / "scale-digits-mlp.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "f" / "scale-digits-mlp.png").read_bytes().startswith(b"\x89PNG")


def test_images_show_each_scale_with_a_legend() -> None:
    """A method is named once, however many of its traces there are."""
    charts = dict(images(analyse(synthetic())))
    learning = charts["learning-digits-mlp-36"]
    named = [trace["name"] for trace in learning["data"] if trace["showlegend"]]
    assert sorted(named) == sorted(METHODS)
    assert learning["layout"]["yaxis"]["title"]["text"] == "accuracy"


def test_the_command_writes_and_says_so(folder: Path, tmp_path: Path) -> None:
    """The page, the tables, and on the terminal the verdict."""
    out, tables, board = tmp_path / "a" / "r.html", tmp_path / "t", tmp_path / "b"
    arguments = ["report", str(folder), "--out", str(out), "--tables", str(tables)]
    result = CliRunner().invoke(bench_app, [*arguments, "--tensorboard", str(board)])
    assert result.exit_code == 0, result.output
    assert out.exists()
    assert (tables / "verdicts.csv").exists()
    assert len(list(board.iterdir())) == 36
    assert "C_complete is best" in result.output


def test_the_verdict_as_json(folder: Path) -> None:
    """For scripts: results and targets by method and scale, verdicts by scale; notes elsewhere."""
    result = CliRunner().invoke(bench_app, ["report", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == sorted(kinds)
    assert {"result", "target", "verdict"} == set(kinds)
    assert lines[-1]["winner"] == "C_complete"
    assert "wrote " in result.stderr


# - Looks


def test_every_method_looks_different() -> None:
    """Up to 330 of them, by colour, dash and symbol; centralized ones are grey."""
    look = styles([f"m{number}" for number in range(330)], ["c"])
    assert len(set(look.values())) == 331
    assert look["c"].color == "#808080"


def test_a_method_has_one_colour_in_all_figures() -> None:
    """Every trace of a method, in every figure, has the method's colour."""
    analysis = analyse(synthetic())
    look = method_styles(analysis.runs)
    for figure in figures(analysis):
        for trace in figure.traces:
            method = trace["meta"]["method"]
            if method:
                assert (trace.get("line") or trace["marker"])["color"] == look[method].color


def test_names_cannot_smuggle_in_a_script(tmp_path: Path) -> None:
    """A method's name is text, in the page, in its data and in plotly's labels."""
    evil = story_of(spec_of("D_ring", 4).model_copy(update={"method": EVIL}), 0.5)
    write(tmp_path / "x", [evil])
    write_report(tmp_path / "x")
    html = (tmp_path / "x" / "report.html").read_text()
    assert "<b onmouseover" not in html
    assert "script>alert" not in html
    drawn = figures(Reader(tmp_path / "x").read().analysis)
    assert all("<b on" not in str(trace.get("hovertemplate")) for f in drawn for trace in f.traces)


# - A thousand runs


@pytest.mark.timeout(240)  # it takes ten seconds of one core, whoever else is on it
def test_a_thousand_runs_make_a_page_that_opens(tmp_path: Path) -> None:
    """Ten methods, scales and seeds, six tensors: curves are thinned, statistics are not."""
    methods = [*METHODS, *(f"D_lattice(k={k})" for k in (4, 8, 10, 12))]
    stories = [
        story_of(
            spec_of(method, workers, seed),
            0.9 - place / 100 - workers / 1000 + seed / 1000,
            spread=0.1 + place,
            tensors=[f"{layer}.weight" for layer in range(6)],
        )
        for workers in (16, 18, 20, 24, 28, 30, 32, 36, 40, 48)
        for place, method in enumerate(methods)
        for seed in range(10)
    ]
    write(tmp_path / "x", stories)
    began = time.process_time()
    results = write_report(tmp_path / "x")
    spent = time.process_time() - began
    size = (tmp_path / "x" / "report.html").stat().st_size
    print(f"1000 runs: {spent:.1f} s of processor time, {size / 1e6:.1f} MB")
    assert results.analysis.observations["runs"].max() == 900
    assert spent < 30
    assert size < 9e6


# - In a browser


@needs_browser
def test_the_page_opens_offline_and_draws(folder: Path, page: Page) -> None:
    """Nothing on the console, no request except for the file itself, and every figure drawn."""
    page.events.clear()
    url = (folder / "report.html").as_uri()
    page.open(url)
    page.visit()
    assert page.complaints == []
    assert [request for request in page.requests if not request.startswith("about:")] == [url]
    drawn = page.run("[...document.querySelectorAll('[data-figure] .main-svg:first-child')].length")
    assert drawn == page.run("document.querySelectorAll('[data-figure]').length") == 10


@needs_browser
def test_the_filter_changes_figures_and_tables(folder: Path, page: Page) -> None:
    """Without a scale and a method their curves, rows and drawings are gone, and come back."""
    page.open((folder / "report.html").as_uri())
    page.visit()

    def shown() -> list[int]:
        return page.run(
            "[document.querySelector('#figure-learning .plot').data.length,"
            " document.querySelector('#figure-scale .plot').data.length,"
            " document.querySelectorAll('#figure-learning .xtick').length > 0,"
            " document.querySelectorAll('[data-table=summary] tbody tr:not([hidden])').length,"
            " document.querySelectorAll('.tile:not([hidden])').length].map(Number)"
        )

    def press(text: str) -> None:
        page.run(
            "[...document.querySelectorAll('#filter .chip')]"
            f".find((chip) => chip.textContent.trim() === '{text}').click()"
        )
        page.visit()

    assert shown() == [24, 6, 1, 12, 10]
    press("16")
    assert shown() == [12, 6, 1, 6, 5]
    press("D_ring")
    assert shown() == [10, 5, 1, 5, 4]
    assert "without=D_ring" in page.run("location.hash")
    page.reload()
    page.visit()
    assert shown() == [10, 5, 1, 5, 4]
    press("all")
    press("16")
    assert shown() == [24, 6, 1, 12, 10]
    page.run("document.querySelector('#figure-learning select').value = 'replicas_worst'")
    page.run("document.querySelector('#figure-learning select').dispatchEvent(new Event('change'))")
    roles = (
        "[...document.querySelector('#figure-learning .plot').data].map(t => t.meta.choice.show)"
    )
    assert set(page.run(roles)) == {"replicas_worst"}


@needs_browser
def test_a_phone_can_use_it(folder: Path, page: Page) -> None:
    """At 360 points nothing but tables is wider than the screen, and figures fit; in the dark,
    text is light.
    """
    page.open((folder / "report.html").as_uri(), width=360, dark=True)
    page.visit()
    assert page.run("document.documentElement.scrollWidth") <= 360
    widest = "Math.max(...[...document.querySelectorAll('.plot')].map((p) => p.clientWidth))"
    assert page.run(widest) <= 360
    heights = "[...document.querySelectorAll('.chip, select')].map((c) => c.offsetHeight)"
    assert min(height for height in page.run(heights) if height) >= 32
    ink = page.run("getComputedStyle(document.querySelector('.plot .xtick text')).fill")
    assert min(map(int, re.findall(r"\d+", ink)[:3])) > 140


# - Live


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Watch, Path]]:
    """A server of a folder in which one run of three is done."""
    write(tmp_path / "x", [story_of(spec_of("D_ring", 16, 0), 0.5)], TEXT)
    server = Watch(tmp_path / "x", refresh_s=0.2)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server, tmp_path / "x"
    server.close()
    thread.join()


def fetch(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_server_refuses_without_the_token(live: tuple[Watch, Path]) -> None:
    """It also rejects other host names and HTTP methods, and serves no other path."""
    url = live[0].url
    assert url.startswith("http://127.0.0.1:")
    assert fetch(url)[0] == 200
    assert fetch(url.partition("?")[0])[0] == 403
    assert fetch(url[:-1] + ("a" if url[-1] != "a" else "b"))[0] == 403
    assert fetch(url, Host="evil.example:80")[0] == 403
    assert fetch(url.replace("/?", "/experiment.toml?"))[0] == 404
    request = urllib.request.Request(url, data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 501
    refused.value.close()


def test_what_has_not_changed_is_not_made_again(live: tuple[Watch, Path]) -> None:
    """The same content has the same tag; a new run gives another."""
    server, folder = live
    url = server.url.replace("/?", "/content?")
    status, body = fetch(url)
    assert (status, json.loads(body).keys()) == (200, {"html", "data"})
    assert fetch(url)[1] == body
    spec = spec_of("D_ring", 16, 1)
    lines = "".join(r.model_dump_json() + "\n" for r in story_of(spec, 0.6).records)
    (folder / "runs" / f"{spec.id}.jsonl").write_text(lines)
    end = time.monotonic() + 45  # it rests for longer where the page took long to make
    while fetch(url)[1] == body:
        assert time.monotonic() < end
        time.sleep(0.1)


@needs_browser
def test_an_open_page_follows_and_keeps_its_filter(live: tuple[Watch, Path], page: Page) -> None:
    """A second method appears in a page that shows only the first scale's; nothing is reloaded."""
    server, folder = live
    page.events.clear()
    page.open(server.url + "#without=D_torus")
    page.run("window.stays = true")
    for method in ("D_torus", "D_complete"):
        spec = spec_of(method, 16, 0)
        lines = "".join(r.model_dump_json() + "\n" for r in story_of(spec, 0.6).records)
        (folder / "runs" / f"{spec.id}.jsonl").write_text(lines)
    rows = "[...document.querySelectorAll('[data-table=summary] tbody tr')]"
    page.wait_for(f"{rows}.length === 3")
    assert page.run(f"{rows}.filter((row) => !row.hidden).length") == 2
    assert page.run("window.stays")
    assert page.complaints == []
