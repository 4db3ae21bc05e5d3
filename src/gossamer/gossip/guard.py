"""A guard over the parameters that gossip: that they stay what is mixed, and what is being sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.gossip.instances import instances_of
from gossamer.gossip.shards import is_sharded, locals_of, reshard, sharded_modules

_GUARDED: set[int] = set()
"""The ids of parameters that a gossip mixes, and keeps alive until close(). Not an attribute of
theirs, which would be pickled with them."""


def is_guarded(parameter: Tensor) -> bool:
    """Whether a gossip already mixes a parameter."""
    return id(parameter) in _GUARDED


def held_by(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return all parameters of these optimizers."""
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]


@final
class Guard:
    """Notices parameters that are no longer what is mixed, or no longer what is being sent.

    Sees a replaced parameter, replaced storage, and every change that autograd sees. A change
    through ``.data`` has no trace. Until it is released, no other gossip gets these parameters.
    Shards are sent as copies, so their storage may be any.

    Args:
        model: what owns the parameters.
        optimizers: what trains them.
        trained: the parameters that are mixed.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], trained: Sequence[Tensor]
    ) -> None:
        self._optimizers = optimizers
        self._num_held = len(held_by(optimizers))
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = [names[id(p)] for p in trained]
        self._trained = trained
        self._slots = [
            (vars(module)["_parameters"], name, parameter, f"{prefix}.{name}".lstrip("."))
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._sharded = sharded_modules(model)
        self._in_place = [p for p in trained if not is_sharded(p)]
        self._addresses = [p.data_ptr() for p in self._in_place]
        self._versions: list[int] = []
        self.renew()
        _GUARDED.update(map(id, trained))

    def release(self) -> None:
        """Let another gossip have the parameters."""
        _GUARDED.difference_update(map(id, self._trained))

    def renew(self) -> None:
        """Take the parameters as they are now for what is being sent."""
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [p._version for p in locals_of(self._trained)]

    def check_trained(self) -> None:
        """Raise where parameters are trained that are not mixed: workers would drift apart."""
        added = len(held_by(self._optimizers)) - self._num_held
        unfrozen = sum(parameter.requires_grad for parameter in self._frozen)
        if added or unfrozen:
            raise UserError(
                "parameters must be trainable and in the optimizer when decentralize() is called, "
                f"got {unfrozen} unfrozen and {added} added since; close() this gossip and call "
                "decentralize() again"
            )
        reshard(self._sharded)  # or modules may hold whole parameters
        replaced = [path for owner, name, p, path in self._slots if owner.get(name) is not p]
        if not replaced:
            addresses = [p.data_ptr() for p in self._in_place]
            if addresses == self._addresses:
                return
            pairs = zip(addresses, self._addresses, self._names, strict=True)
            replaced = [name for now, then, name in pairs if now != then]
        raise UserError(
            "parameters must stay in the storage that is sent, got a replaced "
            f"{replaced[0]} (by .to(), load_state_dict(assign=True) or an assignment); "
            "close() before that and call decentralize() again after it"
        )

    def check_unchanged(self) -> None:
        """Raise where parameters changed while they were being sent."""
        versions = self._current_versions()
        if versions == self._versions:
            return
        changed = next(i for i, then in enumerate(self._versions) if versions[i] != then)
        name = self._names[changed]
        if stranger := _other_optimizer_of(self._trained[changed], self._optimizers):
            raise UserError(
                "every optimizer that trains the model must be passed to decentralize(), got a "
                f"changed {name}, which is in an optimizer {type(stranger).__name__} that was not; "
                "pass all of them, as in decentralize(model, [first, second])"
            )
        raise UserError(
            "parameters must not change between two steps, because they are being sent, got a "
            f"changed {name}; change them inside `with gossip.drained(keep_changes=True):`, "
            "or `with gossip.drained():` to have them put back"
        )


def _other_optimizer_of(parameter: Tensor, known: Sequence[Optimizer]) -> Optimizer | None:
    """Return an optimizer that trains a parameter and is none of these, nor a wrapper of one."""
    for other in instances_of(Optimizer):
        related = any(each is ours for each in (other, *vars(other).values()) for ours in known)
        if not related and any(held is parameter for held in held_by([other])):
            return other
    return None
