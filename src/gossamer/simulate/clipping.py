"""Clipping of stacked gradients, each worker's by its own norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gossamer.errors import UserError

_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``, which ranks call."""


def check_clip_norm(clip_norm: float) -> None:
    """Raise on a negative norm."""
    if not clip_norm >= 0:
        raise UserError(f"clip_norm must be at least 0, got {clip_norm}; 0 clips nothing")


def clip_each_(parameters: Iterable[Tensor], clip_norm: float) -> None:
    """Clip each worker's gradients by their norm over all of its parameters.

    Args:
        parameters: [W, ...] each, with gradients or without.
        clip_norm: the largest norm of one worker.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    # One more dimension, for parameters that are a single number.
    norms_TW = [torch.linalg.vector_norm(grad[..., None].flatten(1), dim=1) for grad in gradients]
    norm_W = torch.linalg.vector_norm(torch.stack(norms_TW), dim=0)
    scale_W = (clip_norm / (norm_W + _EPSILON)).clamp_(max=1.0)
    for grad in gradients:
        grad.mul_(scale_W.view(-1, *[1] * (grad.dim() - 1)))
