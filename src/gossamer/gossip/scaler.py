"""A GradScaler whose ranks agree: a step is skipped on all of them or on none."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.gossip.gossip import Gossip, worker_of


@final
class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for training in float16 with gossip.

    Where one rank finds an infinity in its gradients, every rank skips the step and lowers its
    scale. Each step therefore waits for one number from every rank; bfloat16 needs no scaler.

    Args:
        gossip: whose ranks agree.
        **options: as torch's, such as ``init_scale``.
    """

    skips_on_all_ranks: ClassVar[bool] = True
    """What the hook of a step asks a scaler for; torch's own has no such thing."""

    def __init__(self, gossip: Gossip, **options: Any) -> None:
        super().__init__(gossip.device.type, **options)
        self._worker = worker_of(gossip)

    # Both ways of torch's step, with and without a fused optimizer, look for infinities here.
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
