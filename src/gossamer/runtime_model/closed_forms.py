"""Iteration times without variance, with equal buckets and workers.

f: forward, B: backward of a bucket, θ: its update, c: its exchange, b: how many buckets.
The recursion reduces to them, and tests compare the two; use them for insight.
"""

from __future__ import annotations


def bucket_wise_s(*, f: float, b: int, B: float, theta: float, c: float) -> float:
    """Return max(f + b(B + θ), b·c, c + θ): compute-, link- or single-bucket-bound.

    >>> bucket_wise_s(f=1.0, b=4, B=0.5, theta=0.1, c=1.0)
    4.0
    """
    return max(f + b * (B + theta), b * c, c + theta)


def whole_step_s(*, f: float, b: int, B: float, theta: float, c: float) -> float:
    """Return max(f + b·B, b·c) + b·θ: the link is idle during the update."""
    return max(f + b * B, b * c) + b * theta


def after_update_s(*, f: float, b: int, B: float, theta: float, c: float) -> float:
    """Return f + b(B + θ + c): nothing overlaps."""
    return f + b * (B + theta + c)


def in_backward_s(*, f: float, b: int, B: float, theta: float, c: float) -> float:
    """Return f + max(B + b·c, b·B + c) + b·θ: C overlaps with all but the first bucket's B."""
    return f + max(B + b * c, b * B + c) + b * theta
