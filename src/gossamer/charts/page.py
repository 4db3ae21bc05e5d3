"""Self-contained pages of one file, responsive, in light and dark colours."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.charts.theme import DARK, LIGHT, css, template
from gossamer.errors import UserError
from gossamer.extras import needed_by
from gossamer.files import write_atomic

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from plotly.graph_objects import Figure


def subplots(**layout: Any) -> Figure:
    """Return an empty figure in our theme, by plotly's make_subplots."""
    with needed_by("pictures need"):
        from plotly.subplots import make_subplots
    figure = make_subplots(**layout).update_layout(template=template(LIGHT))
    return figure.update_annotations(font_size=12)  # plotly gives titles of subplots their own


def save(figure: Figure, path: Path) -> None:
    """Write a figure as .html (self-contained), .png or .svg, atomically.

    Images need a Chrome or Chromium on the machine.
    """
    kind = path.suffix.lower()[1:]
    if kind not in ("html", "png", "svg"):
        raise UserError(
            f"a picture is a .html, .png or .svg file, got {path.name!r}; change its suffix"
        )
    if kind == "html":
        data = render("gossamer.charts", "figure.html", {"figure": figure}).encode()
    else:
        with rendering("write .html, which needs no browser"):
            data = figure.to_image(format=kind, scale=2 if kind == "png" else 1)
    write_atomic(path, lambda aside: aside.write_bytes(data))


@contextmanager
def rendering(otherwise: str) -> Generator[None]:
    """Turn plotly's failure to render an image in this block into a UserError.

    Args:
        otherwise: the alternative without a browser.
    """
    try:
        yield
    except (ImportError, RuntimeError, ValueError) as error:
        raise UserError(
            "images are rendered by kaleido in Chrome or Chromium, which failed "
            f"({type(error).__name__}); install chromium and gossamer[bench], or {otherwise}"
        ) from error


def render(package: str, name: str, figures: Mapping[str, Figure], **given: Any) -> str:
    """Return a page with plotly figures, each at the place with its name.

    Args:
        package: of the page's template.
        name: of the template, which extends ``shell.html``.
        figures: by name.
        **given: further variables of the template.
    """
    drawn = {key: json.loads(str(figure.to_json())) for key, figure in figures.items()}
    data = to_script({"figures": drawn})
    return templates(package).get_template(name).render(figures=figures, data=data, **given)


@cache
def templates(package: str) -> Environment:
    """Return the templates of a package, with the shell that they extend."""
    with needed_by("pages need"):
        import jinja2
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(name) for name in (package, "gossamer.charts")]
        ),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    shared: dict[str, Any] = {
        "plotly": Markup(get_plotlyjs()),
        "light": css(LIGHT),
        "dark": css(DARK),
        "themes": to_script({"light": template(LIGHT), "dark": template(DARK)}),
        "connect": "'none'",
    }
    environment.globals.update(shared)
    return environment


def to_script(data: Mapping[str, Any]) -> Markup:
    """Return JSON for a script element, with ``<`` escaped so that it cannot end the element."""
    from markupsafe import Markup

    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
