"""Training for as long as one likes, while workers are killed, stalled and cut off, and come back.

    python -m benchmarks.soak --minutes 30
    python -m benchmarks.soak --accuracy --seeds 5

``job`` starts workers by ``gossamer launch`` and reads what they note, ``worker`` is what each of
them runs, ``faults`` is what happens to them.
"""
