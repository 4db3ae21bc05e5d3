"""Seconds to a loss on slow links: real training, with compute emulated for the rest of a batch.

`python -m benchmarks.race --rate 300mbit`

Ours are gossip as it is by default (one-peer exponential, overlapped) with AccumAdamW, in full and
in few bits; and in four bits without overlap, which learns as much per step as all-reduce does.
"""
