"""Profiles from data-sheet numbers.

Peak rates are the vendors': dense, half precision with tensor cores where a GPU has them. The
fraction that a job reaches is its efficiency, which is not in a data sheet.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from gossamer.errors import UserError, nearest
from gossamer.rates import parse_rate
from gossamer.runtime_model.profile import Bucket, Link, Network, Profile

FIRST_BUCKET_BYTES = 1024**2
BUCKET_BYTES = 25 * 1024**2
"""DDP's defaults: the first bucket is small, so that communication begins early."""

MAX_PARAMETERS = 5e10
"""The largest model whose buckets fit in a profile."""

_ADAM_BYTES = 28
"""Per parameter of 4 bytes: gradient, moments and parameter read, all but the first written."""

_MIX_BYTES = 12
"""Per parameter of 4 bytes: own and neighbour's read, own written."""


class Gpu(NamedTuple):
    """What a data sheet says of a GPU."""

    flops: float
    memory_bytes_s: float
    link: Link
    """To other GPUs of its node."""


_PCIE3 = Link(bits_s=12e9 * 8, latency_s=10e-6)
_PCIE4 = Link(bits_s=24e9 * 8, latency_s=10e-6)

GPUS: dict[str, Gpu] = {
    "t4": Gpu(65e12, 300e9, _PCIE3),
    "v100": Gpu(125e12, 900e9, Link(bits_s=150e9 * 8, latency_s=5e-6)),
    "a10": Gpu(125e12, 600e9, _PCIE4),
    "a40": Gpu(150e12, 696e9, _PCIE4),
    "l40s": Gpu(362e12, 864e9, _PCIE4),
    "a100": Gpu(312e12, 1555e9, Link(bits_s=300e9 * 8, latency_s=5e-6)),
    "h100": Gpu(989e12, 3350e9, Link(bits_s=450e9 * 8, latency_s=5e-6)),
}

# From slow to fast.
LINKS: dict[str, Link] = {
    "1gbit": Link(bits_s=1e9, latency_s=50e-6),
    "10gbit": Link(bits_s=10e9, latency_s=30e-6),
    "25gbit": Link(bits_s=25e9, latency_s=20e-6),
    "100gbit": Link(bits_s=100e9, latency_s=10e-6),
    "200gbit": Link(bits_s=200e9, latency_s=5e-6),
    "400gbit": Link(bits_s=400e9, latency_s=5e-6),
}


def from_data_sheet(
    gpu: str,
    link: str,
    *,
    parameters: float,
    flops: float,
    workers: int,
    workers_per_node: int,
    efficiency: float = 0.3,
    variance: float = 0.0,
) -> Profile:
    """Return the profile of a job that has not been measured.

    Parameters and gradients have 4 bytes, the optimizer is Adam, and the backward pass takes twice
    the forward pass, spread over buckets by their size.

    Args:
        gpu: a name in GPUS.
        link: the rate of each node's link to the others, such as ``25gbit``.
        parameters: how many are trained.
        flops: operations of one worker in one forward and backward pass; about 6 per parameter and
            token for a transformer.
        workers: how many workers the batch is for.
        workers_per_node: how many share a node and its link.
        efficiency: fraction of the GPU's peak that the job reaches.
        variance: of the normalized compute time; 0.0017 for images and 0.0134 for sentences have
            been measured (arXiv:2410.11998).
    """
    if gpu not in GPUS:
        raise UserError(f"a gpu must be one that is known, got {gpu!r}; {nearest(gpu, GPUS)}")
    chosen, between = GPUS[gpu], link_of(link)
    limits = {
        "parameters": (parameters, 1, MAX_PARAMETERS),
        "flops": (flops, 1, 1e20),
        "variance": (variance, 0, 100),
        "efficiency": (efficiency, 1e-3, 1),
        "workers": (workers, 1, 2**20),
        "workers per node": (workers_per_node, 1, 2**20),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise UserError(f"{name} must be from {least:g} to {most:g}, got {value}; see --help")
    compute_s = flops / (chosen.flops * efficiency)
    sizes = bucket_sizes(round(parameters) * 4)
    return Profile(
        name=f"{parameters / 1e6:.3g} M parameters on {gpu}, {workers_per_node} per node, {link}",
        workers=workers,
        forward_s=compute_s / 3,
        buckets=tuple(
            Bucket(
                num_bytes=size,
                backward_s=compute_s * 2 / 3 * size / sum(sizes),
                update_s=size / 4 * _ADAM_BYTES / chosen.memory_bytes_s,
            )
            for size in sizes
        ),
        mix_s=parameters * _MIX_BYTES / chosen.memory_bytes_s,
        variance=variance,
        network=Network(
            workers_per_node=workers_per_node,
            inside=chosen.link,
            between=between,
            all_reduce="hierarchical",
        ),
        environment={"source": "data sheets"},
    )


def from_seconds(compute_s: float, link: Link, num_bytes: int) -> Profile:
    """Return the profile of a job of which only the step time is known.

    The backward pass takes twice the forward pass, spread over buckets by their size; updates and
    mixing take no extra time. Every worker is on its own node.

    Args:
        compute_s: of a step without communication.
        link: between any two workers.
        num_bytes: of the parameters.
    """
    sizes = bucket_sizes(num_bytes)
    return Profile(
        name=f"{num_bytes / 1e6:.3g} MB of parameters, {compute_s:g} s per step",
        workers=1,
        forward_s=compute_s / 3,
        buckets=tuple(
            Bucket(num_bytes=size, backward_s=compute_s * 2 / 3 * size / num_bytes, update_s=0.0)
            for size in sizes
        ),
        mix_s=0.0,
        network=Network(inside=link, between=link),
        environment={"source": "stated"},
    )


def link_of(rate: str) -> Link:
    """Return a link of a rate such as ``300mbit``, with the latency of the next slower of LINKS.

    >>> link_of("300mbit")
    Link(bits_s=300000000.0, latency_s=5e-05)
    """
    bits_s = parse_rate(rate)
    slower = [link for link in LINKS.values() if link.bits_s <= bits_s]
    return Link(bits_s=bits_s, latency_s=[LINKS["1gbit"], *slower][-1].latency_s)


def bucket_sizes(num_bytes: int) -> list[int]:
    """Return the sizes of DDP's buckets: a small one first, then equal ones."""
    rest = num_bytes - FIRST_BUCKET_BYTES
    if rest <= 0:
        return [num_bytes]
    count = math.ceil(rest / BUCKET_BYTES)
    edges = [FIRST_BUCKET_BYTES + rest * i // count for i in range(count + 1)]
    return [FIRST_BUCKET_BYTES, *(b - a for a, b in itertools.pairwise(edges))]
