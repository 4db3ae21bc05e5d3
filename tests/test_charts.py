from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.charts.page import save
from gossamer.charts.theme import DARK, LIGHT, Colors, template
from gossamer.picture import draw
from gossamer.runtime_model.page import write_page
from gossamer.runtime_model.plan import make_plan
from gossamer.topology import one_peer_exponential
from tests.browser import browser, needs_browser
from tests.test_runtime_model_plan import transformer


def write_picture(path: Path) -> None:
    save(draw(one_peer_exponential(8)), path)


def write_plan(path: Path) -> None:
    write_page(make_plan(transformer(), [8], topologies=["ring"]), path)


PAGES: dict[str, tuple[Callable[[Path], None], int]] = {
    "picture": (write_picture, 1),
    "plan": (write_plan, 4),
}


def rgb(color: str) -> str:
    """Return a colour of the form #rrggbb as a browser tells it."""
    return f"rgb({', '.join(str(int(color[place : place + 2], 16)) for place in (1, 3, 5))})"


@needs_browser
def test_pages_open_offline_on_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    """As the report: no word on the console, no request but for the file, every figure drawn; at
    390 points nothing is wider than the screen; letters are light where the reader's page is dark,
    also after a change of colours while the page is open.
    """
    with browser(tmp_path / "profile") as page:
        for name, (write, num_figures) in PAGES.items():
            path = tmp_path / f"{name}.html"
            write(path)
            page.events.clear()
            page.open(path.as_uri(), width=390, dark=True)
            page.visit()
            assert page.complaints == []
            asked = {url for url in page.requests if not url.startswith(("about:", "data:"))}
            assert asked == {path.as_uri()}
            drawn = "document.querySelectorAll('[data-figure] .main-svg:first-child').length"
            assert page.run(drawn) == num_figures
            assert page.run("document.documentElement.scrollWidth") <= 390
            letters = "getComputedStyle(document.querySelector('.plot g[class$=tick] text')).fill"
            assert page.run(letters) == rgb(DARK["soft"])
            light, soft = {"name": "prefers-color-scheme", "value": "light"}, rgb(LIGHT["soft"])
            page.call("Emulation.setEmulatedMedia", features=[light])
            page.wait_for(f"{letters} === '{soft}'", 10)


@pytest.mark.parametrize("colors", [LIGHT, DARK])
def test_a_template_is_one_that_plotly_takes(colors: Colors) -> None:
    """A word that plotly does not know would be dropped by a browser without a word."""
    objects = pytest.importorskip("plotly.graph_objects")
    objects.layout.Template(template(colors))
