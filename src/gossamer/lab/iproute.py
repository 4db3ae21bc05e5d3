"""Calls of `ip` and `tc`, and their failures as errors for a user.

Every failure is a UserError: after `check_machine` the remaining causes are a kernel that lacks a
module or a container without the privilege, and both are for the user to change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from gossamer.errors import UserError

_TIMEOUT_S = 30.0
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux"}
_UNKNOWN_PART = re.compile(
    r"Unknown device type|kind is unknown|classifier not found|not supported", re.IGNORECASE
)


def check_machine() -> None:
    """Raise a UserError that says what is missing where this machine cannot run a lab."""
    if os.geteuid() != 0:
        raise UserError(
            f"a lab must be run as root to make network namespaces, got user id {os.geteuid()}; "
            "run it with sudo"
        )
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise UserError(
                f"a lab needs the program {tool!r}, found none on PATH; install {package}"
            )


def configure(tool: str, namespace: str, lines: Sequence[str], *, needs: str = "") -> None:
    """Run a batch of commands in a namespace.

    Args:
        tool: `ip` or `tc`.
        namespace: where to run them.
        lines: its commands, without the tool's name.
        needs: the kernel module that they rely on, for the error.
    """
    run(tool, "-n", namespace, "-batch", "-", lines=lines, needs=needs)


def run(tool: str, *arguments: str, lines: Sequence[str] = (), needs: str = "") -> str:
    """Call a tool and return what it printed."""
    done = subprocess.run(
        [tool, *arguments],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split())
    if _UNKNOWN_PART.search(said):
        raise UserError(
            f"a lab needs a kernel with {needs or 'network namespaces'}, {tool} said: {said}; "
            "load its module (modprobe) or use another kernel"
        )
    raise UserError(
        f"a lab must be allowed to change its network, `{tool} {' '.join(arguments)}` said: "
        f"{said}; in a container, start it with --privileged"
    )
