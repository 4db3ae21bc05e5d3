"""Preloaded by the fork server of runs, so that it dies with the runner.

By itself a fork server ends when its pipe to the runner is closed, but it does not notice that
during its imports, nor as long as one of its children lives.
"""

from __future__ import annotations

import signal

from gossamer.lifeline import end_with_parent

end_with_parent(signal.SIGKILL)
