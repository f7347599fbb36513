"""``torch.Generator("cuda")`` where there is no device: a CPU generator that says so."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import torch

from .meaning import cuda_index, meaning

__all__ = ["Generator", "PlacedGenerator", "bring_to_device", "generator_of"]

_Generator: Any = torch._C.Generator

_made: weakref.WeakSet[Any] = weakref.WeakSet()
"""The app's own. To look for their holders touches every object of the process, so only if there are any."""


class PlacedGenerator(_Generator):  # type: ignore[misc]
    """A generator of a device of which this process has none. It draws the CPU's numbers."""

    _placed_on = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._placed_on)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (str(self.device), self.initial_seed(), self.get_state())

    def __repr__(self) -> str:
        return f"<torch._C.Generator on {self.device}>"


def generator_of(index: int) -> PlacedGenerator:
    """A generator of device `index`."""
    made = PlacedGenerator("cpu")
    made._placed_on = index
    return made


def bring_to_device() -> None:
    """In a worker that has a device: put a real generator wherever a placed one is held."""
    placed = list(_made)
    if not placed:
        return
    gc.unfreeze()  # frozen holders would not be found
    for each in placed:
        real = _Generator(device="cuda")
        real.manual_seed(each.initial_seed())
        for holder in gc.get_referrers(each):
            _replace(holder, each, real)
    gc.freeze()


def _replace(holder: Any, placed: Any, real: Any) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = real
        return
    if not isinstance(holder, (dict, list)):  # an object, where Python keeps no dict of its attributes
        holder = getattr(holder, "__dict__", None)
    if isinstance(holder, dict):
        holder.update({key: real for key, value in holder.items() if value is placed})
    elif isinstance(holder, list):
        holder[:] = [real if value is placed else value for value in holder]


def _arrive(device: str, seed: int, state: Any) -> Any:
    made = torch.Generator(device)
    made.manual_seed(seed)
    if made.device.type == "cpu" or isinstance(made, PlacedGenerator):
        made.set_state(state)
    return made


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Generator)


class Generator(metaclass=_Kind):
    """`torch.Generator`, with devices that are elsewhere."""

    def __new__(cls, device: Any = "cpu") -> Any:
        index = cuda_index(device)
        if index is None:
            return _Generator(device=device)
        if not meaning.placed:
            return _Generator(device="cpu")
        made = generator_of(index)
        _made.add(made)
        return made
