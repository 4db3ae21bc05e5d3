"""The site that `make docs` builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import browser, needs_browser
from tests.pages import PAGES, REPOSITORY

# A build reads all of the package: a loaded machine takes its time.
pytestmark = pytest.mark.timeout(150)

pytest.importorskip("mkdocs", reason="mkdocs not installed; pip install 'gossamer[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a link that leads nowhere fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=140, check=False
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    """Pages, the sources that they link to, and what is made at the build: verbs, docstrings."""
    names = [Path(page).stem for page in PAGES if page.startswith("docs/")]
    assert all((site / f"{name}.html").is_file() for name in names)
    assert "def " not in (site / "tutorial.html").read_text()
    assert "DistributedDataParallel" in (site / "source/examples/ddp.py.html").read_text()
    assert "--per-node" in (site / "command_line.html").read_text()
    assert "Decentralize the training loop of a model" in (site / "api.html").read_text()


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    """Scripts, styles and images are the site's own."""
    loads = re.compile(r"<(?:script|img|link rel=\"(?:stylesheet|icon)\")[^>]*https?://")
    assert not [path for path in site.rglob("*.html") if loads.search(path.read_text())]


@needs_browser
def test_it_opens_from_a_folder_and_searches(site: Path, tmp_path: Path) -> None:
    """Without a server: no requests but for files, no complaints, and search finds a page."""
    with browser(tmp_path) as page:
        page.call("Page.navigate", url=(site / "index.html").as_uri())
        page.wait_for("location.protocol === 'file:' && document.readyState === 'complete'")
        page.run(
            "(() => { const toggle = document.querySelector('#__search');"
            " toggle.checked = true; toggle.dispatchEvent(new Event('change'));"
            " const box = document.querySelector('[data-md-component=search-query]');"
            " box.focus(); box.value = 'Slurm'; box.dispatchEvent(new Event('keyup')); })()"
        )
        found = "document.querySelector('.md-search-result__list').innerText"
        page.wait_for(f"{found}.includes('Several nodes')")
        assert all(url.startswith(("file:", "data:", "about:")) for url in page.requests)
        assert not page.complaints
