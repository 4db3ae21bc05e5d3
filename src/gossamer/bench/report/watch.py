"""Serve the page while runs are in progress: a read-only HTTP server on loopback.

Work is bounded. If nothing in the folder has changed, a request costs one listing of it. Otherwise
the changed files are read at most every few seconds, and for at most a tenth of the time, however
many pages are open.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final
from urllib.parse import parse_qs, urlsplit

from gossamer.bench.report.page import content, render
from gossamer.bench.report.reading import Reader
from gossamer.errors import UserError

_REST = 10
"""A refresh is followed by this many times its own length without one."""


@final
class _Answers:
    """The page and its content, rendered on request when the cached ones are out of date."""

    def __init__(self, folder: Path, refresh_s: float) -> None:
        self._reader = Reader(folder)
        self._refresh_s = refresh_s
        self._lock = threading.Lock()
        self._stamps: Any = None
        self._due = 0.0
        self._made: dict[str, bytes] = {}
        self._tag = ""

    def get(self, name: str) -> tuple[bytes, str]:
        """Return the page ("") or its content, and the tag of that content."""
        with self._lock:
            now = time.monotonic()
            if now >= self._due:
                stamps = self._reader.stamps()
                if stamps != self._stamps:
                    self._make()
                    self._stamps = stamps
                spent = time.monotonic() - now
                self._due = time.monotonic() + max(self._refresh_s / 2, _REST * spent)
            return self._made[name], self._tag

    def _make(self) -> None:
        results = self._reader.read()
        made = content(results)
        body = {"html": str(made["html"]), "data": json.loads(made["data"])}
        self._made = {
            "": render(results, self._refresh_s, made).encode(),
            "content": json.dumps(body).encode(),
        }
        self._tag = f'"{blake2b(self._made["content"], digest_size=8).hexdigest()}"'


@final
class Watch:
    """A server of one folder's page.

    Args:
        folder: where the records are.
        port: 0 for a free one.
        refresh_s: how often an open page polls.
    """

    def __init__(self, folder: Path, port: int = 0, refresh_s: float = 5.0) -> None:
        token = secrets.token_urlsafe(24)
        answers = _Answers(folder, refresh_s)

        class Handler(_Handler):
            pass

        Handler.token, Handler.answers = token, answers
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(
                f"--port must be free, got {port}: {error.strerror}; leave it out to use any"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/?token={token}"

    def serve(self) -> None:
        """Serve until interrupted, or until ``close`` is called from another thread."""
        try:
            self._server.serve_forever()
        finally:
            self._server.server_close()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0
    """Seconds after which an idle connection is closed: its thread would block forever."""

    token: str
    answers: _Answers

    def do_GET(self) -> None:
        """Send the page, its content, or an error."""
        place = urlsplit(self.path)
        given = parse_qs(place.query).get("token", [""])[0]
        # Against DNS rebinding: under another host name a foreign page could read this one.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost") or not secrets.compare_digest(
            given.encode(), self.token.encode()
        ):
            self._answer(403, b"open the address that gossamer bench watch printed\n", "text/plain")
            return
        name = place.path.strip("/")
        if name not in ("", "content"):
            self._answer(404, b"there is no such page\n", "text/plain")
            return
        body, tag = self.answers.get(name)
        if name and self.headers.get("If-None-Match") == tag:
            self._answer(304, b"", "application/json", tag)
            return
        self._answer(200, body, "application/json" if name else "text/html; charset=utf-8", tag)

    def _answer(self, status: int, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log: the address contains the token."""
