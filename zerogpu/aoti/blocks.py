"""Repeated blocks: a model of N equal layers is compiled once, and each layer gets a binding of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["Target", "find_blocks", "targets_of"]

_SHARE = 0.5
"""Least share of a module's weights that blocks must hold to be compiled instead of the whole."""

Target = list[str]
"""Names of submodules that one set of graphs serves; ``""`` is the module itself."""


def targets_of(module: torch.nn.Module, blocks: Any) -> list[Target]:
    """What of a module is compiled.

    Args:
        module: the module.
        blocks: ``"auto"`` takes repeated blocks where they hold most of the weights, else the module;
            False or None the module; a list of class names the blocks of these classes.

    Raises:
        ValueError: no submodule is of one of the classes.
    """
    if blocks is None or blocks is False:
        return [[""]]
    if blocks == "auto":
        found = find_blocks(module)
        parts = [module.get_submodule(name) for group in found for name in group]
        return found if _size(parts) >= _SHARE * _size([module]) > 0 else [[""]]
    classes = [blocks] if isinstance(blocks, str) else list(blocks)
    found = []
    for wanted in classes:
        names = [name for name, part in module.named_modules() if type(part).__name__ == wanted]
        if not names:
            known = sorted({type(part).__name__ for part in module.modules()})
            raise ValueError(
                f"no part of {type(module).__name__} is a {wanted!r}; there are {', '.join(known)}"
            )
        found += _by_form(module, names)
    return found


def find_blocks(module: torch.nn.Module) -> list[Target]:
    """Groups of submodules that are equal but for their weights' values.

    Classes that the module's code names in ``_repeated_blocks``, as diffusers does, else the items of
    ModuleLists and Sequentials.
    """
    named = {name for part in module.modules() for name in getattr(part, "_repeated_blocks", None) or ()}
    if named:
        names = [name for name, part in module.named_modules() if type(part).__name__ in named]
        return [group for group in _by_form(module, names) if group]
    return list(_lists(module, ""))


def _lists(module: torch.nn.Module, prefix: str) -> Iterator[Target]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            items = dict(child.named_children())
            groups = [group for group in _by_form(child, list(items)) if len(group) > 1]
            yield from ([f"{path}.{index}" for index in group] for group in groups)
            for index in items.keys() - {index for group in groups for index in group}:
                yield from _lists(items[index], f"{path}.{index}.")
        else:
            yield from _lists(child, f"{path}.")


def _by_form(module: torch.nn.Module, names: Sequence[str]) -> list[Target]:
    """Group submodules with weights by class and form of their weights."""
    groups: dict[Any, Target] = {}
    for name in names:
        part = module.get_submodule(name)
        tensors = [*part.named_parameters(), *part.named_buffers()]
        if tensors:
            form = (type(part), tuple((key, tuple(t.shape), t.dtype) for key, t in tensors))
            groups.setdefault(form, []).append(name)
    return list(groups.values())


def _size(modules: Sequence[torch.nn.Module]) -> int:
    tensors = {id(tensor): tensor for module in modules for tensor in module.parameters()}
    return sum(tensor.numel() for tensor in tensors.values())
