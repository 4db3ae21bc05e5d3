"""A soak test: long training while workers are killed, stalled and cut off, and join again.

    python -m benchmarks.soak --minutes 30
    python -m benchmarks.soak --accuracy --seeds 5

``job`` starts workers by ``gossamer launch`` and reads their files, ``worker`` is the program of
each of them, ``faults`` causes the faults and measures the recovery.
"""
