"""A GradScaler that skips a step on all ranks or on none."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.gossip.gossip import Gossip, worker_of


@final
class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for training in float16 with gossip.

    If one rank finds infinities in its gradients, every rank skips the step and lowers its scale.
    So each step gathers one integer from every rank; bfloat16 needs no scaler.

    Args:
        gossip: the handle whose ranks skip steps together.
        **options: those of torch's, such as ``init_scale``.
    """

    skips_on_all_ranks: ClassVar[bool] = True
    """Checked by the hook of a step; torch's own GradScaler does not have it."""

    def __init__(self, gossip: Gossip, **options: Any) -> None:
        super().__init__(gossip.device.type, **options)
        self._worker = worker_of(gossip)

    # torch's step checks for infinities here, with and without a fused optimizer.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here = any(map(bool, found.values()))
        anywhere = any(self._worker.gather_in_step(int(here), "GradScaler's step"))
        for flag in found.values():
            flag.fill_(float(anywhere))
        return found

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if any(map(bool, optimizer_state["found_inf_per_device"].values())):
            self._worker.step.skip(optimizer)
            return None
        return optimizer.step(*args, **kwargs)
