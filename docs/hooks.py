"""What MkDocs does to our pages before it renders them.

A page links to ``../examples/ddp.py``, which works where the repository is browsed. The site has no
such file, so every file outside of docs/ that is linked to becomes a page under ``source/``, and
links lead there. ``<!-- verbs -->`` becomes the reference of the command line. The script by which
the theme searches in pages that are opened as files is ours to serve, not another host's.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from gossamer.cli import app

_REPOSITORY = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_VERBS = "<!-- verbs -->"
_HOSTED, _OWN = "https://unpkg.com/iframe-worker/shim", "javascripts/iframe-worker.js"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that a page links to."""
    unread = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(unread)
    while unread:
        path = unread.pop()
        for link in _LINK.findall((_REPOSITORY / path).read_text()):
            target = _resolve(path, link)
            if target in known or target.startswith("docs/"):
                continue
            known.add(target)
            if (_REPOSITORY / target).is_file():
                files.append(_page_of(target, config))
                unread += [target] if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the pages that the files they name have become."""
    here = page.file.src_uri
    path = here.removeprefix("source/") if here.startswith("source/") else f"docs/{here}"

    def lead(match: re.Match[str]) -> str:
        uri = _uri_of(_resolve(path, match[1]))
        known = files.get_file_from_path(uri) is not None
        return posixpath.relpath(uri, posixpath.dirname(here) or ".") if known else match[0]

    return _LINK.sub(lead, markdown).replace(_VERBS, _verbs())


def on_post_build(*, config: MkDocsConfig) -> None:
    """Have pages load nothing from other hosts."""
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        own = posixpath.relpath(_OWN, path.parent.relative_to(site).as_posix())
        path.write_text(path.read_text().replace(_HOSTED, own))


def _resolve(path: str, link: str) -> str:
    """Return the repository's path that a link in one of its files names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _uri_of(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _page_of(path: str, config: MkDocsConfig) -> File:
    text = (_REPOSITORY / path).read_text()
    if not path.endswith(".md"):
        language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "text")
        text = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{text}````\n"
    return File.generated(config, _uri_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def _verbs() -> str:
    """Return the reference of the command line, one level below a page's title."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="gossamer")
    return get_docs_for_click(obj=command, ctx=context, indent=1, name="gossamer")
