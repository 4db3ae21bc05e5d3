"""Seconds to a loss on slow links: real training, with compute emulated for the rest of a batch.

`python -m benchmarks.race --rate 300mbit`
"""
