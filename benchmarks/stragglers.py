"""A model of step times: the gain if a step did not wait for late messages.

    python -m benchmarks.stragglers

Worker i begins step t at T_i(t) and computes for c_i(t). The message of its peer j, sent at the
beginning of j's step (``awc``), arrives at T_j(t) + m. Worker i waits for it, or skips it, at most
a given number of times in a row:

    T_i(t + 1) = max(T_i(t) + c_i(t), T_j(t) + m)      or      T_i(t) + c_i(t)

Peers are those of ``one_peer_exponential``. Compute times are normal with mean 1 and variance
0.0134; one host may be slower than the others by a factor, and workers may pause at random. It
prints the time per step of the slowest worker, because all take the same number of steps, and the
share of skipped messages.
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
    """A cluster, and how its workers treat late messages."""

    num_workers: int
    message: float
    """How long a message takes, in mean compute times."""

    slow: float = 1.0
    """Factor by which one host is slower."""

    pause: float = 0.0
    """How long a worker pauses, once in a hundred steps."""

    most_skipped: int = 0
    """How many messages in a row a worker may skip; 0 to wait for all."""


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
