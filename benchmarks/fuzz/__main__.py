"""Try malformed inputs, and report those that are neither accepted nor rejected with an error.

    python -m benchmarks.fuzz                      100,000 inputs of ten kinds
    python -m benchmarks.fuzz profiles --count 500
    python -m benchmarks.fuzz --seed 1             others

An input must be accepted, or rejected with a UserError: a traceback, a warning, a run time of more
than 20 seconds or a partially written file is a failure, with exit code 1. Needs no network and no
root.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from benchmarks.fuzz.hunt import hunt
from benchmarks.fuzz.kinds import KINDS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--count", type=int, default=100_000, help="inputs of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="which inputs")
    given = parser.parse_args()
    if unknown := {*given.kinds} - KINDS.keys():
        parser.error(f"kinds must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    chosen = {name: KINDS[name] for name in given.kinds or KINDS}
    shares, failed = sum(kind.share for kind in chosen.values()), False
    for name, kind in chosen.items():
        began = time.monotonic()
        found = hunt(kind, -(-given.count * kind.share // shares), given.seed)
        failed = failed or bool(found.failures)
        line = {
            "kind": name,
            "tried": found.tried,
            "refused": found.refused,
            "failures": len(found.failures),
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(line), flush=True)
        for failure in found.failures.values():
            print(f"{failure.where}\ngiven {failure.given}\n{failure.trace}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
