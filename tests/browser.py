"""A real browser for tests: Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, final

import pytest

needs_browser = pytest.mark.skipif(not shutil.which("chromium"), reason="chromium not installed")

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-quic --remote-debugging-pipe"
)


class BrowserError(Exception):
    """A call of the protocol failed."""


@final
class Page:
    """One tab, and everything that it reported."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest = send, receive, b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(answer["error"]["message"])
                return answer["result"]
            self.events.append(answer)

    def run(self, script: str) -> Any:
        """Return what an expression is in the page, after its promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 40) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(BrowserError):  # the page is being left
                if self.run(script):
                    return
            time.sleep(0.05)
        pytest.fail(f"never true: {script}")

    def reload(self) -> None:
        """Load the page again and wait until it is ready."""
        self.run("document.documentElement.dataset.ready = 'no'")
        self.call("Page.reload")
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    def open(self, url: str, width: int = 1280, *, dark: bool = False) -> None:
        """Open a report and wait until it is ready."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    def visit(self) -> None:
        """Scroll through the page, so that all of it is drawn."""
        self.run(
            "(async () => { for (const card of document.querySelectorAll('[data-figure]')) {"
            " while (!card.dataset.drawn) { card.scrollIntoView();"
            " await new Promise((done) => setTimeout(done, 30)); } } scrollTo(0, 0); })()"
        )

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What was said on the console, and exceptions."""
        bad = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event["method"] in bad]

    @property
    def requests(self) -> list[str]:
        """What the page asked for."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._receive, 1 << 20)
            assert part, "the browser ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser(profile: Path) -> Generator[Page]:
    """Start a browser; end it."""
    its_input, ours_out = os.pipe()
    ours_in, its_output = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4.
    shell = f"exec 3<&{its_input} 4>&{its_output}; exec chromium {_FLAGS} --user-data-dir={profile}"
    process = subprocess.Popen(
        ["bash", "-c", shell],
        pass_fds=(its_input, its_output),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    try:
        page = Page(ours_out, ours_in)
        yield page
        page.call("Page.navigate", url="about:blank")
    finally:
        os.close(ours_out)  # without its commands it ends
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_in)
