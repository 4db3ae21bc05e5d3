"""Draw the figures of docs/topology.md and docs/control.md: `python docs/figures.py`.

The second page's are of the runs in results/control; `gossamer bench run experiments/control.toml`
makes them. Chromium draws.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from gossamer import picture
from gossamer.bench import Store
from gossamer.bench.analysis import analyse
from gossamer.bench.report.writing import write_figures
from gossamer.charts.page import save
from gossamer.topology import CATALOGUE, parse
from gossamer.topology.catalogue import example

IMAGES = Path(__file__).parent / "images"
RUNS = Path(__file__).parents[1] / "results" / "control"
WORKERS = 8


def main() -> None:
    """Write the figures into docs/images."""
    catalogue = [parse(example(name), WORKERS) for name in CATALOGUE]
    save(picture.gallery(catalogue), IMAGES / "topologies.svg")
    with TemporaryDirectory() as folder:
        write_figures(analyse(Store(RUNS).stories()), Path(folder))
        for name in ("distance", "decisions", "learning"):
            shutil.copy(f"{folder}/{name}-digits-mlp-32.svg", IMAGES / f"control_{name}.svg")


if __name__ == "__main__":
    main()
