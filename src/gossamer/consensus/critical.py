"""The critical consensus distance Γ: how far apart workers may be at no cost in convergence.

Γ² = η σ²/(L n) + ‖∇f(x̄)‖²/(8 L²). Workers within Γ of each other converge as fast as with exact
averages, in theory; so Ξ/Γ is the fraction of that budget in use. σ², ‖∇f‖ and L are estimated
online, from sketches of gradients and of the points they were taken at, as a pure update of a small
state.

The estimate of L is the curvature along the path, which is at most the L of the theorem, and the
theorem is about SGD: read Γ as an order of magnitude, with the interval that comes with it.

Reference: Kong et al., Consensus control (https://arxiv.org/abs/2102.04828).
"""

# n: workers, m: floats in a sketch

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np

from gossamer.errors import UserError
from gossamer.topology.arrays import FloatArray


def critical_distance(
    *, lr: float, sigma2: float, lipschitz: float, num_workers: int, gradient_norm: float
) -> float:
    """Return Γ = √(η σ²/(L n) + ‖∇f(x̄)‖²/(8 L²)).

    Args:
        lr: the learning rate η.
        sigma2: variance σ² = E‖g_i − ∇f‖² of one worker's gradient.
        lipschitz: how fast the gradient changes, L.
        num_workers: n.
        gradient_norm: ‖∇f(x̄)‖ at the mean of the workers.

    >>> critical_distance(lr=0.1, sigma2=40.0, lipschitz=2.0, num_workers=2, gradient_norm=0.0)
    1.0
    """
    if lipschitz <= 0 or min(lr, sigma2, gradient_norm) < 0 or num_workers < 1:
        raise UserError(
            "the critical distance needs lipschitz > 0, num_workers >= 1 and no negative "
            f"value, got lr={lr}, sigma2={sigma2}, lipschitz={lipschitz}, "
            f"num_workers={num_workers}, gradient_norm={gradient_norm}; check the estimates"
        )
    noise = lr * sigma2 / (lipschitz * num_workers)
    return math.sqrt(noise + gradient_norm**2 / (8 * lipschitz**2))


@final
@dataclass(frozen=True, slots=True)
class Smoothed:
    """An exponential moving average with bias correction, and its standard error.

    With each value v, weight ← d·weight + (1 − d) and total ← d·total + (1 − d)·v; the mean is
    their ratio, which corrects for the start at zero as Adam does.
    """

    decay: float = 0.9
    """Decay d of the old average at each new value: 0.9 averages about 10 values."""

    weight: float = 0.0
    total: float = 0.0
    total_of_squares: float = 0.0

    def add(self, value: float) -> Smoothed:
        """Return the average with one more value."""
        new = 1 - self.decay
        return Smoothed(
            self.decay,
            self.decay * self.weight + new,
            self.decay * self.total + new * value,
            self.decay * self.total_of_squares + new * value**2,
        )

    @property
    def mean(self) -> float:
        """The average so far; 0 before the first value."""
        return self.total / self.weight if self.weight else 0.0

    @property
    def mean_of_squares(self) -> float:
        """The average of squares."""
        return self.total_of_squares / self.weight if self.weight else 0.0

    @property
    def share(self) -> float:
        """One over the effective number of independent values in the average."""
        if not self.weight:
            return math.inf
        # Σ w²/(Σ w)² of weights (1 − d)dⁱ, with dᵏ = 1 − weight after k values.
        return (1 - self.decay) * (2 - self.weight) / ((1 + self.decay) * self.weight)

    @property
    def error(self) -> float:
        """The standard error of the mean, for independent values."""
        return _root((self.mean_of_squares - self.mean**2) * self.share)


class Critical(NamedTuple):
    """An estimate of Γ, its interval, and the estimates it is computed from."""

    distance: float
    low: float
    """Γ with every part two standard errors off, in the direction that makes Γ small."""

    high: float
    """The same, in the direction that makes it large."""

    sigma2: float
    gradient_norm: float
    lipschitz: float


@final
@dataclass(frozen=True, slots=True)
class CriticalState:
    """The state of the online estimate of Γ.

    With g the gradients of n workers and Δ the change of a mean since the previous observation:

        σ²       (1/(n − 1)) Σ_i ‖g_i − ḡ‖²
        ‖∇f‖²    ‖ḡ‖² − σ²/n
        L        Σ⟨Δḡ_t, Δx̄_{t−1}⟩ / Σ⟨Δx̄_t, Δx̄_{t−1}⟩

    The secant ‖Δḡ‖/‖Δx̄‖ would measure noise: that of ḡ is in both. The displacement one observation
    earlier is independent of the noise in Δḡ, and correlated with Δx̄ where training makes progress:
    an instrumental variable. Where it is not, L is lost in noise and the last good L is kept.
    """

    sigma2: Smoothed = Smoothed()
    gradient2: Smoothed = Smoothed()
    # - L; curvature changes slowly and single values are noisy
    rise: Smoothed = Smoothed(decay=0.98)
    run: Smoothed = Smoothed(decay=0.98)
    product: Smoothed = Smoothed(decay=0.98)
    lipschitz: float = 0.0
    lipschitz_error: float = 0.0
    # - The previous observation
    num_workers: int = 0
    point: tuple[float, ...] = ()
    gradient: tuple[float, ...] = ()
    displacement: tuple[float, ...] = ()

    def observe(self, points_nm: FloatArray, gradients_nm: FloatArray) -> CriticalState:
        """Return the state after one more observation.

        Args:
            points_nm: sketches of the parameters at which each worker took its gradient.
            gradients_nm: sketches of those gradients.
        """
        num_workers = len(gradients_nm)
        point, gradient = points_nm.mean(axis=0), gradients_nm.mean(axis=0)
        sigma2 = float(np.sum((gradients_nm - gradient) ** 2)) / max(1, num_workers - 1)
        state = replace(
            self,
            sigma2=self.sigma2.add(sigma2),
            gradient2=self.gradient2.add(float(gradient @ gradient) - sigma2 / num_workers),
            num_workers=num_workers,
            point=tuple(point.tolist()),
            gradient=tuple(gradient.tolist()),
        )
        # Other workers have another mean: the difference of two means would be taken for a step of
        # the path, and bias L.
        if num_workers != self.num_workers:
            return replace(state, displacement=())
        moved = point - np.array(self.point)
        state = replace(state, displacement=tuple(moved.tolist()))
        if not self.displacement:
            return state
        before = np.array(self.displacement)
        rise = float((gradient - np.array(self.gradient)) @ before)
        run = float(moved @ before)
        return replace(
            state,
            rise=self.rise.add(rise),
            run=self.run.add(run),
            product=self.product.add(rise * run),
        )._with_lipschitz()

    def _with_lipschitz(self) -> CriticalState:
        """Return the state with L = rise/run, if that is two standard errors above zero."""
        if self.run.mean == 0:
            return self
        slope = self.rise.mean / self.run.mean
        # Mean of (rise − L·run)²: the residual of the regression.
        residual = (
            self.rise.mean_of_squares
            - 2 * slope * self.product.mean
            + slope**2 * self.run.mean_of_squares
        )
        error = _root(residual * self.run.share) / abs(self.run.mean)
        return replace(self, lipschitz=slope, lipschitz_error=error) if slope > 2 * error else self

    def estimate(self, lr: float) -> Critical | None:
        """Return Γ with its interval, or None before L is known."""
        if self.lipschitz == 0:
            return None

        def gamma(sign: int) -> float:
            """Γ with each part two standard errors towards a larger (1) or a smaller (−1) Γ."""
            return critical_distance(
                lr=lr,
                sigma2=max(0.0, self.sigma2.mean + sign * 2 * self.sigma2.error),
                lipschitz=self.lipschitz - sign * 2 * self.lipschitz_error,
                num_workers=self.num_workers,
                gradient_norm=_root(self.gradient2.mean + sign * 2 * self.gradient2.error),
            )

        return Critical(
            distance=gamma(0),
            low=gamma(-1),
            high=gamma(1),
            sigma2=self.sigma2.mean,
            gradient_norm=_root(self.gradient2.mean),
            lipschitz=self.lipschitz,
        )


def _root(square: float) -> float:
    return math.sqrt(max(0.0, square))
