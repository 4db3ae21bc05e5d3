"""Detection of parameters that were replaced, added or changed behind the back of gossip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import UserError
from gossamer.gossip.instances import instances_of
from gossamer.gossip.shards import is_sharded, locals_of, reshard, sharded_modules

_GUARDED: set[int] = set()
"""The ids of parameters that a gossip mixes, which it keeps alive until close(). Not an attribute
of the parameters, because that would be pickled with them."""


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
    """Detects parameters that gossip no longer mixes, and changes while parameters are in flight.

    It detects a replaced parameter, replaced storage, and every change that increments autograd's
    version counter; a change through ``.data`` does not. Until it is released, no other gossip may
    have these parameters. Shards are sent as copies, so their storage may be replaced.

    Args:
        model: the owner of the parameters.
        optimizers: the optimizers that train them.
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
        """Allow another gossip to have the parameters."""
        _GUARDED.difference_update(map(id, self._trained))

    def renew(self) -> None:
        """Record the current versions as the ones in flight."""
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [p._version for p in locals_of(self._trained)]

    def check_trained(self) -> None:
        """Raise if parameters are trained but not mixed: workers would drift apart in them."""
        added = len(held_by(self._optimizers)) - self._num_held
        unfrozen = sum(parameter.requires_grad for parameter in self._frozen)
        if added or unfrozen:
            raise UserError(
                "parameters must be trainable and in the optimizer when decentralize() is called, "
                f"got {unfrozen} unfrozen and {added} added since; close() this gossip and call "
                "decentralize() again"
            )
        # After a forward pass FSDP2 may leave unsharded parameters in modules' slots, which would
        # be taken for replaced ones.
        reshard(self._sharded)
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
        """Raise if parameters changed while they were in flight."""
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
            "or `with gossip.drained():` to have them restored"
        )


def _other_optimizer_of(parameter: Tensor, known: Sequence[Optimizer]) -> Optimizer | None:
    """Return an optimizer that holds a parameter, other than the known ones and their wrappers."""
    for other in instances_of(Optimizer):
        related = any(each is ours for each in (other, *vars(other).values()) for ours in known)
        if not related and any(held is parameter for held in held_by([other])):
            return other
    return None
