"""New weights into a running module: checked by name, shape, dtype and count, then copied in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class WeightTable:
    """What `update` accepts: every parameter and persistent buffer once, under the first name of tied ones.

    The other names of a tied tensor may be given as well, with equal values. Buffers that are derived from the
    configuration (rotary frequencies) are not part of a checkpoint and stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            known = first.setdefault(id(tensor), name)
            if known == name:
                self.tensors[name] = tensor
            else:
                self.aliases[name] = known

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies all weights in place; nothing changes unless every check passes (ValueError)."""
        self._check(tensors)
        with torch.no_grad():
            for name, target in self.tensors.items():
                target.copy_(tensors[self._given(name, tensors)])

    def _given(self, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
        """The name under which a tensor was given: its own, or an alias."""
        if name in tensors:
            return name
        return next((alias for alias, known in self.aliases.items() if known == name and alias in tensors), name)

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        unknown = sorted(set(tensors) - set(self.tensors) - set(self.aliases))
        missing = sorted(name for name in self.tensors if self._given(name, tensors) not in tensors)
        if unknown or missing:
            raise ValueError(
                f"update_weights got {len(tensors)} tensors for the model's {len(self.tensors)}: "
                f"missing {missing[:3] or 'none'}, unknown {unknown[:3] or 'none'}."
            )
        for name, new in tensors.items():
            old = self.tensors[self.aliases.get(name, name)]
            if new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(
                    f"update_weights: {name} is {tuple(new.shape)} {new.dtype}, "
                    f"the model holds {tuple(old.shape)} {old.dtype}."
                )
        for alias, known in self.aliases.items():
            same = alias not in tensors or known not in tensors or tensors[alias] is tensors[known]
            if not same and not torch.equal(tensors[alias], tensors[known]):
                raise ValueError(f"update_weights: {alias} and {known} are tied in the model but differ in the update.")
