from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer import picture
from gossamer.charts.page import save
from gossamer.errors import UserError
from gossamer.topology import complete, one_peer_exponential, parse, ring, spaced, static
from tests.browser import needs_browser
from tests.catalogue import ALL_TOPOLOGIES


def traces_of(figure: Any, kind: str = "") -> list[Any]:
    return [trace for trace in figure.data if trace.type.startswith(kind)]


def test_a_static_graph_is_drawn_once_and_a_cycle_round_by_round() -> None:
    """One matrix for a round that never changes, one per round of a cycle, at most as asked."""

    def num_matrices(figure: Any) -> int:
        return len(traces_of(figure, "heatmap"))

    assert num_matrices(picture.draw(static(ring(8)))) == 1
    assert num_matrices(picture.draw(one_peer_exponential(16), num_rounds=9)) == 4
    assert num_matrices(picture.draw(one_peer_exponential(16), num_rounds=2)) == 2


def test_the_matrix_in_the_picture_is_the_matrix_of_the_round() -> None:
    """What one sees is the weights, row by row."""
    figure = picture.draw(static(ring(6)))
    (heatmap,) = traces_of(figure, "heatmap")
    np.testing.assert_allclose(np.nan_to_num(heatmap.z), ring(6).matrix().toarray(), rtol=1e-6)


def test_a_thousand_workers_are_thinned_and_say_so() -> None:
    """A million weights would not open in a browser: the matrix shrinks and edges are sampled."""
    figure = picture.draw(static(complete(1008)))
    (heatmap,) = traces_of(figure, "heatmap")
    assert len(heatmap.z) <= 200
    assert "of the edges drawn" in str(figure.to_dict()["layout"])
    assert len(str(figure.to_json())) < 5_000_000


def test_the_gallery_shows_every_schedule() -> None:
    """Each schedule has its curve in both charts and its own graph."""
    schedules = [parse(text, 16) for text in ALL_TOPOLOGIES]
    figure = picture.gallery(schedules, steps=5)
    curves = [trace for trace in traces_of(figure) if trace.name]
    assert len(curves) == 2 * len(schedules)
    assert {trace.name for trace in curves} == {s.name.split("(")[0] for s in schedules}
    np.testing.assert_allclose(curves[0].y[0], 1.0)


def test_the_gallery_grows_with_the_catalogue() -> None:
    """More schedules than colours times dashes still have their curves."""
    schedules = [parse("ring", 5)] * 30
    assert len(traces_of(picture.gallery(schedules, steps=2))) > 60


def test_the_costs_in_the_gallery_are_those_of_the_busiest_worker() -> None:
    """On one_peer_ring of three each worker rests every third round: two copies in three rounds."""
    figure = picture.gallery([parse("one_peer_ring", 3)], steps=3)
    by_cost = [trace for trace in traces_of(figure) if trace.name][1]
    np.testing.assert_allclose(by_cost.x, [0, 1, 2, 2])


def test_arrows_point_from_sender_to_receiver() -> None:
    """Worker 0 (at the top) of a directed ring hears worker 1 (to its right): arrows turn left."""
    figure = picture.draw(one_peer_exponential(16), num_rounds=1)
    arrows = next(t for t in traces_of(figure, "scatter") if t.marker.angle is not None)
    first = int(np.argmax(np.asarray(arrows.y)))
    assert np.sin(np.radians(arrows.marker.angle[first])) < 0


def test_a_thumbnail_is_small_and_has_every_edge() -> None:
    """Fifteen links between six workers; of a thousand workers' graph 400 stand for all."""
    small = picture.thumbnail(static(complete(6)), "#123456")
    assert small.count("Q") == 15
    assert 'stroke="#123456"' in small
    large = picture.thumbnail(static(complete(1008)), "#123456")
    assert 300 < large.count("Q") <= 400
    assert len(large) < 40_000


def test_a_thumbnail_shows_the_rounds_of_a_cycle_or_one_step() -> None:
    """Alternating rounds in dashes of their own; of a graph that thins out, that of the step."""
    assert picture.thumbnail(one_peer_exponential(16), "red").count("<path") == 4 + 1
    ada = parse("ada(k0=4, gamma=1, steps_per_epoch=1)", 8)
    edges = [picture.thumbnail(ada, "red", step).count("Q") for step in (0, 5)]
    assert edges == [16, 8]


def test_steps_without_communication_are_passed_over() -> None:
    """Of local SGD the step that averages is drawn, and where nobody ever talks, nobody's."""
    local_sgd = spaced(static(complete(6)), every=8)
    averaging = picture.thumbnail(local_sgd, "red")
    assert averaging.count("Q") == 15
    assert [step for step, _ in picture.first_rounds(local_sgd, 4)] == [7]
    assert [step for step, _ in picture.first_rounds(one_peer_exponential(16), 3)] == [0, 1, 2]
    assert [step for step, _ in picture.first_rounds(static(complete(1)), 4)] == [0]


@needs_browser
def test_an_image_is_written_whole(tmp_path: Path) -> None:
    """A PNG and nothing beside it."""
    path = tmp_path / "deep" / "graph.png"
    save(picture.draw(static(ring(5))), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(path.parent.iterdir()) == [path]


def test_without_a_browser_images_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Chromium: the error names it, and the form that needs none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"install chromium .* or write \.html"):
        save(picture.draw(static(ring(5))), tmp_path / "graph.png")


@pytest.mark.parametrize("name", ["graph.gif", "graph"])
def test_other_kinds_of_file_are_refused(name: str, tmp_path: Path) -> None:
    """The error lists the kinds that exist."""
    with pytest.raises(UserError, match=r"\.html, \.png or \.svg file, got"):
        save(picture.draw(static(ring(5))), tmp_path / name)


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    """A file in the place of a folder gives one sentence, not a traceback."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.html").mkdir()
    for path in (tmp_path / "file" / "graph.html", tmp_path / "folder.html"):
        with pytest.raises(UserError, match="cannot write"):
            save(picture.draw(static(ring(5))), path)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.html"}
