"""The consensus distance Ξ: exact, bounded from one exchange, and estimated from a sketch.

Ξ² = (1/n) Σ_i ‖x_i − x̄‖². Exactly, it needs all parameters in one place. Θ² = (1/n) Σ_i ‖(Wx)_i −
x_i‖² needs one exchange and bounds Ξ. A sketch is a random projection to a few hundred floats that
preserves norms in expectation: one small all-gather shares those of all workers, and as the map is
linear, W times the sketches are the sketches after a round W, so Ξ after any rounds can be computed
before anything is sent.
"""

# n, W: workers, N: elements of a tensor, m: floats in a sketch

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.errors import UserError
from gossamer.topology import Round
from gossamer.topology.arrays import FloatArray
from gossamer.topology.spectrum import mixing_parameter

_ROWS = 128
"""Rows of a block of signs: with 509 columns, signs and sums stay in the processor's cache."""

_BLOCKS_PER_SUM = 64
"""Blocks accumulated in float32 before the partial sum is added to a float64: bounds rounding."""


@torch.no_grad()
def consensus_distance(tensors: Iterable[Tensor]) -> float:
    """Return Ξ = √((1/n) Σ_i ‖x_i − x̄‖²), where x_i is row i of all tensors [n, ...].

    >>> consensus_distance([torch.tensor([[0.0, 3.0], [2.0, 3.0]])])
    1.0
    """
    # A variance, and not a norm of differences: it needs no copy of all workers, and is as exact
    # as in double precision where workers are close.
    variances = (tensor.var(0, correction=0).sum(dtype=torch.float64) for tensor in tensors)
    return math.sqrt(sum(map(float, variances)))


def theta(x_nN: FloatArray, round: Round) -> float:
    """Return Θ = √((1/n) Σ_i θ_i²) with θ_i = ‖Σ_j W_ij x_j − x_i‖: how far a round moves workers.

    Each θ_i is local to worker i after the exchange; Θ costs one scalar all-reduce.
    """
    return _root_mean_square(round.mixed(x_nN) - x_nN)


class Bounds(NamedTuple):
    """An interval that contains the consensus distance."""

    low: float
    high: float


def bounds(theta: float, round: Round) -> Bounds:
    """Return the bounds Θ/2 ≤ Ξ ≤ Θ/(1 − √(1 − p)) that the displacement Θ of a round implies.

    With d the deviation from the mean, Wd − d is at most 2‖d‖ long and at least ‖d‖ − ‖Wd‖; so it
    holds for every round that conserves the mean and has p > 0, symmetric or not.
    """
    p = mixing_parameter(round)  # raises where the round does not conserve the mean
    if p <= 1e-12:
        raise UserError(
            f"Θ bounds the distance only where one round brings all workers closer (p > 0), got "
            f"{round!r} with p = 0: a matching can leave Θ at zero while pairs are far apart; "
            "use the sketch, or a round with p > 0"
        )
    return Bounds(theta / 2, theta / (1 - np.sqrt(1 - p)))


@final
class Sketch:
    """A seeded random projection of all parameters of a worker to a few floats.

    (Sx)_k = Σ s_e x_e over the elements e ≡ k (mod m) of the concatenated tensors, with a random
    sign s_e each, so E‖Sx‖² = ‖x‖² exactly, whatever x. Signs come from one small table of hashed
    bits: each block of elements reads it from an offset and with a sign of its own, hashed from the
    seed and the block's index. Memory is O(m), not O(parameters), and the result is bit-identical
    however the parameters are split into tensors.

    Args:
        size: floats in a sketch, m. A prime, as the default is, shares no factor with the width of
            a layer: otherwise a column of a weight matrix would fall on few floats.
        seed: must be the same on all workers that are compared.
    """

    def __init__(self, size: int = 509, seed: int = 0) -> None:
        if size < 1 or seed < 0:
            raise UserError(
                f"a sketch needs a size of at least 1 and a seed of at least 0, got size={size}, "
                f"seed={seed}; size=509 estimates within a few percent"
            )
        self.size, self.seed = size, seed
        self._block = _ROWS * size
        bits = _hash(seed, stream=0, count=2 * self._block) >> np.uint64(63)
        self._signs = torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64))
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def sketch(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sketch [m] of one worker, in double precision."""
        return self.sketch_stacked([tensor.unsqueeze(0) for tensor in tensors])[0]

    @torch.no_grad()
    def sketch_stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return sketches [W, m] of stacked tensors [W, ...]: row w is worker w's sketch."""
        first = tensors[0]
        num_workers = first.shape[0]
        flat = [tensor.reshape(num_workers, -1) for tensor in tensors]
        num_elements = sum(x_WN.shape[1] for x_WN in flat)
        offsets, flips = self._draw_blocks(-(-num_elements // self._block))
        table = self._table(first.device, _precision(tensors))
        num_rows = min(_ROWS, -(-num_elements // self.size))
        # One sum per sign of a block; only at the end are rows of it added to the m floats.
        sums_Wb = table.new_zeros(num_workers, num_rows * self.size)
        sketch_Wm = torch.zeros(num_workers, self.size, dtype=torch.float64, device=first.device)

        def collect() -> None:
            rows = sums_Wb.view(num_workers, num_rows, self.size)
            sketch_Wm.add_(rows.sum(1, dtype=torch.float64))
            sums_Wb.zero_()

        end = 0
        for x_WN in flat:
            first_element, end = end, end + x_WN.shape[1]
            for block in range(first_element // self._block, -(-end // self._block)):
                origin = block * self._block
                low, high = max(first_element, origin), min(end, origin + self._block)
                signs = table[offsets[block] + low - origin : offsets[block] + high - origin]
                part = x_WN[:, low - first_element : high - first_element]
                sums_Wb[:, low - origin : high - origin].addcmul_(part, signs, value=flips[block])
                if high % (_BLOCKS_PER_SUM * self._block) == 0:
                    collect()
        collect()
        return sketch_Wm

    def _draw_blocks(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Return where each block starts in the table of signs, and the block's own sign."""
        bits = _hash(self.seed, stream=1, count=num_blocks)
        offsets = (bits >> np.uint64(1)) % np.uint64(self._block)
        return offsets.tolist(), (1 - 2 * (bits & np.uint64(1)).astype(np.int64)).tolist()

    def _table(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = (device, dtype)
        if key not in self._tables:
            self._tables[key] = self._signs.to(device, dtype)
        return self._tables[key]


def sketch_distance(sketches_nm: FloatArray) -> float:
    """Return √((1/n) Σ_i ‖Sx_i − Sx̄‖²), the estimate of Ξ from the sketches of all workers.

    Each is compared with the mean sketch: the difference of mean squares, mean‖Sx‖² − ‖Sx̄‖², would
    suffer cancellation where workers are close.
    """
    return _root_mean_square(sketches_nm - sketches_nm.mean(axis=0))


def sketch_error(sketches_nm: FloatArray) -> float:
    """Return the relative standard error of ``sketch_distance``, √(1/(2·m·r)).

    r = (Σλ)²/Σλ² counts the directions in which workers deviate, from 1 to n − 1, with λ the
    eigenvalues of the Gram matrix of the deviations, both estimated from the sketches.
    """
    deviation_nm = sketches_nm - sketches_nm.mean(axis=0)
    gram_nn = deviation_nm @ deviation_nm.T
    total = float(np.trace(gram_nn))
    if total == 0:
        return 0.0
    directions = total**2 / float(np.sum(gram_nn**2))
    return float(np.sqrt(1 / (2 * sketches_nm.shape[1] * directions)))


def _root_mean_square(x_nN: FloatArray) -> float:
    """Return √((1/n) Σ_i ‖x_i‖²)."""
    return float(np.linalg.norm(x_nN) / np.sqrt(len(x_nN)))


def _precision(tensors: Sequence[Tensor]) -> torch.dtype:
    wrong = [tensor.dtype for tensor in tensors if not tensor.is_floating_point()]
    if wrong:
        raise UserError(
            f"a sketch needs real floating-point tensors, got {wrong[0]}; leave such tensors out"
        )
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def _hash(seed: int, stream: int, count: int) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for each of 0..count − 1: splitmix64, the same on every machine."""
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    start = mix(np.array([2 * seed + stream + 1], dtype=np.uint64) * golden)
    return mix(start + np.arange(1, count + 1, dtype=np.uint64) * golden)
