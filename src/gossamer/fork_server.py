"""What the server that forks runs imports first: it ends with the runner, and at once.

By itself it would end when nobody can ask it for a process any more. It would not notice while it
imports, nor as long as one of its processes goes on.
"""

from __future__ import annotations

import signal

from gossamer.lifeline import end_with_parent

end_with_parent(signal.SIGKILL)
