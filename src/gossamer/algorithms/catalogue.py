"""Algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.algorithms.algorithm import Algorithm
from gossamer.algorithms.atc import AdaptThenCombine
from gossamer.algorithms.awc import AdaptWhileCombine
from gossamer.algorithms.exact_diffusion import D2, ExactDiffusion
from gossamer.algorithms.gradient_tracking import GradientTracking
from gossamer.algorithms.mixed_moments import MixedMoments
from gossamer.algorithms.push_sum import PushSum
from gossamer.algorithms.quasi_global import QuasiGlobal
from gossamer.errors import UserError, nearest
from gossamer.registry import Registry

# A new algorithm is one class and one row here.
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "awc": AdaptWhileCombine,
    "atc": AdaptThenCombine,
    "gradient_tracking": GradientTracking,
    "exact_diffusion": ExactDiffusion,
    "d2": D2,
    "push_sum": PushSum,
    "mixed_moments": MixedMoments,
    "quasi_global": QuasiGlobal,
}

ALGORITHM_REGISTRY: Registry[Algorithm] = Registry(
    kind="algorithm",
    table=ALGORITHMS,
    group="gossamer.algorithms",
    example="awc or gradient_tracking",
    makes=(Algorithm,),
)

DEFAULT = "awc"
ORDERS = ("awc", "atc")
"""The algorithms that ``order`` may name."""


def name_of(algorithm: str, order: str) -> str:
    """Return the name of an algorithm, which may be given as an order.

    Args:
        algorithm: a string, or empty.
        order: ``"awc"`` or ``"atc"``, or empty.
    """
    if order and order not in ORDERS:
        raise UserError(
            f"order must be one of {', '.join(ORDERS)}, got {order!r}; {nearest(order, ORDERS)}, "
            "or name another algorithm by algorithm="
        )
    if algorithm and order and algorithm != order:
        raise UserError(
            "order= is another spelling of algorithm=, so only one may be given, got "
            f"algorithm={algorithm!r} and order={order!r}; leave order out"
        )
    return algorithm or order or DEFAULT


def parse_algorithm(algorithm: str, order: str = "") -> Algorithm:
    """Return the algorithm that a string names; by default awc.

    Args:
        algorithm: a name, with arguments where it has any; or empty.
        order: another spelling of awc and atc.

    >>> parse_algorithm("gradient_tracking").tracked
    ('tracker',)
    """
    return ALGORITHM_REGISTRY.parse(name_of(algorithm, order)).make()
