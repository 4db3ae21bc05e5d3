"""Seconds to a loss on slow links: real training, with emulated compute of a larger batch.

`python -m benchmarks.race --rate 300mbit`

Gossamer's rows are gossip with its defaults (one-peer exponential, overlapped) and AccumAdamW, in
full precision and in few bits; and in four bits without overlap, which learns as much per step as
all-reduce.
"""
