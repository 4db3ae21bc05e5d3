"""The theme of all pages and images: colours for CSS and for plotly."""

from __future__ import annotations

from typing import Any, TypeAlias

# Okabe and Ito's palette, distinguishable with every common form of colour blindness; only the
# colours that are visible on white and on black.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
REFERENCE = "#808080"
"""References and annotations; also visible on both."""


# (light, dark); the names are those of the page's CSS variables. In a heat map the largest value
# contrasts most with the card.
_SCHEMES = {
    "paper": ("#f6f7f9", "#12161b"),
    "card": ("#ffffff", "#1a2027"),
    "ink": ("#1c232b", "#e6eaee"),
    "soft": ("#5a6672", "#a3aeb9"),
    "line": ("#dde2e8", "#313a44"),
    "accent": ("#0067a5", "#62b6ee"),
    "good": ("#00664a", "#5fd3ac"),
    "good-paper": ("#e0f3ec", "#10352a"),
    "bad": ("#a13a00", "#ffa36b"),
    "bad-paper": ("#fdeadf", "#43240f"),
    "plain-paper": ("#eceff3", "#262e37"),
    "least-heat": ("#deebf7", "#1d3550"),
    "most-heat": ("#08306b", "#9ecae1"),
}
Colors: TypeAlias = dict[str, str]
LIGHT: Colors = {name: light for name, (light, _) in _SCHEMES.items()}
DARK: Colors = {name: dark for name, (_, dark) in _SCHEMES.items()}


def css(colors: Colors) -> str:
    """Return a scheme as CSS declarations."""
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


def template(colors: Colors) -> dict[str, Any]:
    """Return the plotly template of a scheme, the defaults of all figures."""
    axis = {
        "gridcolor": colors["line"],
        "linecolor": colors["line"],
        "tickcolor": colors["line"],
        "ticks": "outside",
        "ticklen": 4,
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 8},
    }
    titles = {"color": colors["ink"], "size": 12}
    return {
        "layout": {
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": colors["soft"]},
            "title": {"x": 0.02, "font": {"color": colors["ink"], "size": 16}},
            "paper_bgcolor": colors["card"],
            "plot_bgcolor": colors["card"],
            "colorway": list(PALETTE),
            "colorscale": {"sequential": [[0, colors["least-heat"]], [1, colors["most-heat"]]]},
            "xaxis": axis,
            "yaxis": axis,
            "annotationdefaults": {"font": titles},
            "shapedefaults": {"line": {"color": colors["soft"]}},
            "hovermode": "closest",
            "hoverlabel": {
                "bgcolor": colors["card"],
                "bordercolor": colors["line"],
                "font": {"color": colors["ink"]},
                "align": "left",
            },
            "modebar": {
                "bgcolor": "rgba(0,0,0,0)",
                "color": colors["soft"],
                "activecolor": colors["ink"],
            },
        },
        "data": {"bar": [{"marker": {"line": {"color": colors["card"]}}}]},
    }
