"""The training of ``benchmarks.simulation`` in JAX: the same models, update and mixing.

A worker's loss is written once, in JAX's functions and under torch's names of parameters. Its
gradient is compiled for all workers by ``jax.vmap``, which computes them together, and by
``jax.lax.map``, which computes one after the other; the rest of the step is the same for both:

    x ← W x                       the ring
    m ← 0.9 m + g,  x ← x - 0.01 m

Everything is one compiled function that donates its arguments, as ours are updated in place. JAX
gets as many threads as torch: import this module after torch's number of threads is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from gossamer import Simulation
from gossamer.topology import Round

os.environ["PJRT_NPROC"] = str(torch.get_num_threads())  # read when JAX creates its threads

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax import lax  # pyright: ignore[reportMissingImports]

Arrays: TypeAlias = dict[str, Any]
Forward: TypeAlias = Callable[[Arrays, Arrays, Any], tuple[Any, Arrays]]
"""From one worker's parameters, statistics and inputs to logits and new statistics."""

HEADS, LAYERS = 2, 2
EPSILON, KEPT = 1e-5, 0.9
"""Of normalization layers: added to a variance; the weight of old running statistics in a step."""

AGREEING_STEPS = 3
TOLERANCE = 1e-4, 1e-5
"""Tolerances after these steps in single precision: relative and absolute."""


@final
class JaxTraining:
    """Workers that train repeatedly on the same batch.

    Args:
        name: of the model, in ``FORWARD``.
        model: what every worker starts from.
        inputs: of all workers.
        targets: of all workers.
        round: circulant: the weights depend only on the distance of workers.
        way: ``jax_vmap`` or ``jax_map``.
    """

    def __init__(
        self, name: str, model: nn.Module, inputs: Tensor, targets: Tensor, round: Round, way: str
    ) -> None:
        workers = len(inputs)

        def stacked(tensor: Tensor) -> Any:
            return jnp.array(np.stack([tensor.detach().numpy()] * workers))

        self.parameters = {n: stacked(p) for n, p in model.named_parameters()}
        """All workers' by name, [W, ...]."""
        self._momentum = {n: jnp.zeros_like(p) for n, p in self.parameters.items()}
        self._statistics = {n: stacked(b) for n, b in model.named_buffers() if b.dim()}
        self._batch = jnp.array(inputs.numpy()), jnp.array(targets.numpy())
        gradients = WAYS[way](_loss_and_gradient(FORWARD[name]))
        self._step = jax.jit(_step_of(gradients, _shifts(round)), donate_argnums=(0, 1, 2))

    def step(self) -> Any:
        """Take a step; return each worker's loss before it, [W]."""
        self.parameters, self._momentum, self._statistics, losses = jax.block_until_ready(
            self._step(self.parameters, self._momentum, self._statistics, *self._batch)
        )
        return losses


def ways_that_agree(
    name: str, model: nn.Module, sim: Simulation, inputs: Tensor, targets: Tensor
) -> dict[str, Callable[[], object]]:
    """Return a step of each way, after a check that they agree with the simulation.

    Args:
        name: of the model.
        model: what every worker starts from.
        sim: has taken no step yet; it takes some.
        inputs: of all workers.
        targets: of all workers.
    """
    round = sim.schedule.round(0)
    trainings = {way: JaxTraining(name, model, inputs, targets, round, way) for way in WAYS}
    for _ in range(AGREEING_STEPS):
        losses = sim.step(inputs, targets).numpy()
        for way, training in trainings.items():
            np.testing.assert_allclose(training.step(), losses, *TOLERANCE, err_msg=way)
    for way, training in trainings.items():
        for name, own in sim.parameters.items():
            # Compare norms: of a million numbers a few always differ by more than the tolerance.
            difference = float(np.linalg.norm(training.parameters[name] - own.numpy()))
            relative, absolute = TOLERANCE
            allowed = relative * float(own.norm()) + absolute * own.numel() ** 0.5
            assert difference <= allowed, f"{way} differs in {name}: {difference} > {allowed}"
    return {way: training.step for way, training in trainings.items()}


def _loss_and_gradient(forward: Forward) -> Callable[..., Any]:
    def loss(parameters: Arrays, statistics: Arrays, x: Any, y: Any) -> tuple[Any, Arrays]:
        logits, statistics = forward(parameters, statistics, x)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
        return -chosen.mean(), statistics

    return jax.value_and_grad(loss, has_aux=True)


def _one_after_the_other(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *stacked: lax.map(lambda own: function(*own), stacked)


WAYS: dict[str, Callable[..., Callable[..., Any]]] = {
    "jax_vmap": jax.vmap,
    "jax_map": _one_after_the_other,
}


def _step_of(
    gradients: Callable[..., Any], shifts: list[tuple[int, float]]
) -> Callable[..., tuple[Arrays, Arrays, Arrays, Any]]:
    def step(parameters: Arrays, momentum: Arrays, statistics: Arrays, x: Any, y: Any) -> Any:
        (losses, statistics), grads = gradients(parameters, statistics, x, y)
        momentum = {n: 0.9 * m + grads[n] for n, m in momentum.items()}
        mixed = {
            n: sum(weight * jnp.roll(p, -shift, 0) for shift, weight in shifts)
            for n, p in parameters.items()
        }
        updated = {n: p - 0.01 * momentum[n] for n, p in mixed.items()}
        return updated, momentum, statistics, losses

    return step


def _shifts(round: Round) -> list[tuple[int, float]]:
    """Return (s, weight) with W[i, i + s mod n] = weight for all i."""
    assert round.shifts is not None, "every worker must mix with others at the same distances"
    distances, weights = round.shifts
    return list(zip(distances.tolist(), weights.tolist(), strict=True))


def _linear(p: Arrays, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _mlp(p: Arrays, statistics: Arrays, x: Any) -> tuple[Any, Arrays]:
    return _linear(p, "2", jax.nn.relu(_linear(p, "0", x))), statistics


def _convnet(p: Arrays, statistics: Arrays, x: Any) -> tuple[Any, Arrays]:
    x = x.reshape(-1, 8, 8, 1)  # channels last, which is faster on CPUs
    statistics = dict(statistics)
    for conv, norm in (("1", "2"), ("4", "5")):
        kernel = p[f"{conv}.weight"].transpose(2, 3, 1, 0)
        layout = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(_batch_norm(p, statistics, norm, x))
    x = x.reshape(-1, 2, 4, 2, 4, 32).max((2, 4))
    return _linear(p, "9", x.transpose(0, 3, 1, 2).reshape(-1, 128)), statistics


def _batch_norm(p: Arrays, statistics: Arrays, name: str, x: Any) -> Any:
    """Normalize over all but the channels, which are last; replace the statistics."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    samples = x.size // x.shape[-1]
    new = {"mean": mean, "var": variance * (samples / (samples - 1))}
    for which, value in new.items():
        key = f"{name}.running_{which}"
        statistics[key] = KEPT * statistics[key] + (1 - KEPT) * lax.stop_gradient(value)
    scale = p[f"{name}.weight"] * lax.rsqrt(variance + EPSILON)
    return (x - mean) * scale + p[f"{name}.bias"]


def _lstm(p: Arrays, statistics: Arrays, x: Any) -> tuple[Any, Arrays]:
    biases = p["body.bias_ih_l0"] + p["body.bias_hh_l0"]
    inputs = p["embedding.weight"][x].swapaxes(0, 1) @ p["body.weight_ih_l0"].T + biases
    zeros = jnp.zeros((len(x), p["body.weight_hh_l0"].shape[1]), inputs.dtype)

    def cell(state: Any, gates: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(gates + h @ p["body.weight_hh_l0"].T, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    (h, _), _ = lax.scan(cell, (zeros, zeros), inputs)
    return _linear(p, "head", h), statistics


def _transformer(p: Arrays, statistics: Arrays, x: Any) -> tuple[Any, Arrays]:
    x = p["embedding.weight"][x]
    for layer in (f"body.{i}" for i in range(LAYERS)):
        x = _layer_norm(p, f"{layer}.norm1", x + _attention(p, f"{layer}.self_attn", x))
        hidden = jax.nn.relu(_linear(p, f"{layer}.linear1", x))
        x = _layer_norm(p, f"{layer}.norm2", x + _linear(p, f"{layer}.linear2", hidden))
    return _linear(p, "head", x[:, -1]), statistics


def _attention(p: Arrays, name: str, x: Any) -> Any:
    projected = x @ p[f"{name}.in_proj_weight"].T + p[f"{name}.in_proj_bias"]
    q, k, v = jnp.split(projected.reshape(*x.shape[:2], 3 * HEADS, -1), 3, 2)
    y = jax.nn.dot_product_attention(q, k, v)
    return _linear(p, f"{name}.out_proj", y.reshape(x.shape))


def _layer_norm(p: Arrays, name: str, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    y = (x - mean) * lax.rsqrt(variance + EPSILON)
    return y * p[f"{name}.weight"] + p[f"{name}.bias"]


FORWARD: dict[str, Forward] = {
    "mlp": _mlp,
    "convnet": _convnet,
    "lstm": _lstm,
    "transformer": _transformer,
}
