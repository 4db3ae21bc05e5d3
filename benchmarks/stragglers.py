"""What could be gained if a step did not wait for a message that is late: a model of step times.

    python -m benchmarks.stragglers

Worker i begins step t at T_i(t) and computes for c_i(t); the message of its peer j, which is begun
with j's step (``awc``), arrives at T_j(t) + m. It waits for that, or mixes without, at most so many
times in a row:

    T_i(t + 1) = max(T_i(t) + c_i(t), T_j(t) + m)      or      T_i(t) + c_i(t)

Peers are those of ``one_peer_exponential``. Compute times are normal with mean 1 and a variance;
one host may be slower than the others by a factor, and every worker may pause now and then. Printed
are the time per step of the slowest worker, of which all must take as many, and the share of
messages that were not mixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

_VARIANCE = 0.0134
"""Of a transformer's compute time, from arXiv:2410.11998."""

_STEPS = 2000


@dataclass(frozen=True)
class Setting:
    """A cluster, and what a step does on it."""

    num_workers: int
    message: float
    """How long a message takes, in mean steps."""

    slow: float = 1.0
    """By how much one host is slower."""

    pause: float = 0.0
    """How long a worker pauses, once in a hundred steps."""

    most_skipped: int = 0
    """How many messages in a row a worker mixes without; 0 to wait."""


def play(setting: Setting, seed: int = 0) -> tuple[float, float]:
    """Return the time per step of the slowest worker, and the share of messages skipped."""
    generator = np.random.default_rng(seed)
    num = setting.num_workers
    pace = np.ones(num)
    pace[0] = setting.slow
    begun, in_a_row, skipped = np.zeros(num), np.zeros(num, int), 0
    for step in range(_STEPS):
        compute = pace * np.maximum(generator.normal(1, _VARIANCE**0.5, num), 0.1)
        compute += setting.pause * (generator.random(num) < 0.01)
        distance = 2 ** (step % (num.bit_length() - 1))
        arrives = np.roll(begun, distance) + setting.message
        ready = begun + compute
        skips = (arrives > ready) & (in_a_row < setting.most_skipped)
        in_a_row = np.where(skips, in_a_row + 1, 0)
        skipped += int(skips.sum())
        begun = np.where(skips, ready, np.maximum(ready, arrives))
    return float(begun.max()) / _STEPS, skipped / _STEPS / num


def main() -> None:
    """Print the table."""
    print("| workers | message | slow host | pauses | waits | skips 1 | skips 4 | never waits |")
    print("|---|---|---|---|---|---|---|---|")
    others = ((1.0, 0.0), (1.3, 0.0), (2.0, 0.0), (1.0, 10.0))
    for num, message, (slow, pause) in product((4, 16, 64), (0.3, 0.9), others):
        setting = Setting(num, message, slow, pause)
        results = [play(replace(setting, most_skipped=most)) for most in (0, 1, 4, _STEPS)]
        cells = [f"{time:.3f} ({share:.0%})" for time, share in results[1:]]
        print(
            f"| {num} | {message} | × {slow} | {pause:g} | {results[0][0]:.3f} "
            f"| {' | '.join(cells)} |"
        )


if __name__ == "__main__":
    main()
