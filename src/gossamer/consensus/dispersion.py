"""How unequal replicas are: four measures of the spread of a norm over workers.

DBench records the L2 norm of every parameter tensor on every replica just before averaging; these
are the statistics it reports. The last axis of every array is the replicas, so the same code takes
``[W]`` of one tensor, ``[T, W]`` of all tensors, and scalars gathered from ranks.

Norms are non-negative. Where all are zero, and for one worker, every measure is 0.

Reference: Xie et al., Scaling up data parallelism (https://arxiv.org/abs/2509.12213).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.topology.arrays import FloatArray


class Dispersion(NamedTuple):
    """The four measures, each with the shape of the norms without their last axis."""

    gini: FloatArray
    index_of_dispersion: FloatArray
    coefficient_of_variation: FloatArray
    quartile_coefficient: FloatArray


def dispersion(norms: npt.ArrayLike) -> Dispersion:
    """Return all four measures of norms ``[..., W]``.

    >>> dispersion([1.0, 1.0, 3.0, 3.0]).coefficient_of_variation.item()
    0.5
    """
    return Dispersion(
        gini(norms),
        index_of_dispersion(norms),
        coefficient_of_variation(norms),
        quartile_coefficient(norms),
    )


def tensor_norms(tensors: Sequence[Tensor]) -> FloatArray:
    """Return the L2 norms ``[T, W]`` of stacked tensors ``[W, ...]``, in double precision.

    A rank passes ``tensor.unsqueeze(0)`` and gathers; the simulator passes its stacked tensors.
    """
    with torch.no_grad():
        norms = [
            torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=torch.float64)
            for tensor in tensors
        ]
        return torch.stack(norms).cpu().numpy()


def check_interval(norms_every: int) -> int:
    """Return the steps between two measurements of norms, after a check."""
    if norms_every < 0:
        raise UserError(f"norms_every must be at least 0, got {norms_every}; 0 measures nothing")
    return norms_every


def gini(norms: npt.ArrayLike) -> FloatArray:
    """Return Σ_i Σ_j |a_i − a_j| / (2 n² μ), from 0 (equal) to 1 − 1/n (one has all).

    With a sorted, Σ_i Σ_j |a_i − a_j| = 2 Σ_i (2i − n − 1) a_i, i from 1.

    >>> gini([0.0, 0.0, 0.0, 1.0]).item()
    0.75
    """
    a = np.sort(_checked(norms), axis=-1)
    n = a.shape[-1]
    # Relative to the smallest: rounding of large equal norms must not count as inequality.
    spread = (a - a[..., :1]) @ (2.0 * np.arange(1, n + 1) - n - 1)
    return _ratio(spread, n**2 * a.mean(axis=-1))


def index_of_dispersion(norms: npt.ArrayLike) -> FloatArray:
    """Return σ²/μ, with σ² the variance over all n workers.

    >>> index_of_dispersion([1.0, 3.0]).item()
    0.5
    """
    a = _checked(norms)
    return _ratio(a.var(axis=-1), a.mean(axis=-1))


def coefficient_of_variation(norms: npt.ArrayLike) -> FloatArray:
    """Return σ/μ.

    >>> coefficient_of_variation([1.0, 3.0]).item()
    0.5
    """
    a = _checked(norms)
    return _ratio(a.std(axis=-1), a.mean(axis=-1))


def quartile_coefficient(norms: npt.ArrayLike) -> FloatArray:
    """Return (Q3 − Q1)/(Q3 + Q1), with quartiles interpolated linearly.

    >>> quartile_coefficient([1.0, 2.0, 3.0, 4.0, 5.0]).item()
    0.3333333333333333
    """
    low, high = np.quantile(_checked(norms), [0.25, 0.75], axis=-1)
    return _ratio(high - low, high + low)


def _checked(norms: npt.ArrayLike) -> FloatArray:
    a = np.asarray(norms, dtype=np.float64)
    if a.ndim == 0 or a.shape[-1] == 0:
        raise UserError(
            f"dispersion needs at least one worker in the last axis, got shape {a.shape}; "
            "give an array [..., workers]"
        )
    if np.any(a < 0):
        raise UserError(
            f"dispersion needs norms, which are not negative, got {a.min()}; "
            "pass the L2 norm of each tensor on each replica"
        )
    return a


def _ratio(part: FloatArray, whole: FloatArray) -> FloatArray:
    """Return part / whole, and 0 where the denominator is 0; NaN stays NaN."""
    part, whole = np.asarray(part), np.asarray(whole)
    return np.divide(part, whole, out=np.zeros_like(part), where=whole != 0)
