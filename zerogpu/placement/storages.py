"""Storages: which tensors lie over which memory, and whether that memory may be moved under them.

A storage may move only when every holder of it is known, since whoever is missed would be left with the old
memory: no longer tied to the others, or freed under a raw pointer. The holders that Python shows are the
live tensors, their gradients and the bases of views. Others are noticed by what torch counts:

- a storage with more users than tensors found: a script module, a sparse tensor, a saved activation;
- a tensor with more users than Python, its views and those it is the gradient of: a dlpack export, a graph
  kept for backward, some operations that run in another thread right now (not in-place ones: see `quiet`);
- a storage object with more references than one that nobody keeps: `tensor.untyped_storage()` in a variable;
- a storage that is not resizable: a numpy array shares its memory, or torch does not own it.

Checked with torch 2.13 and 2.14; a test compares each of these counts.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from .placed import is_placed

__all__ = ["LARGE", "Held", "live_storages"]

# torch's own, past what a placed tensor answers: here it is the CPU tensor that it is.
_Base: Any = torch._C.TensorBase
_storage_of, _set_data = _Base.untyped_storage, _Base.data.__set__

LARGE = 64 * 1024
"""Bytes from which a storage is worth a mapping of its own."""


class Held:
    """One CPU storage and all the tensors over it that Python knows.

    Attributes:
        address: where its memory is.
        size: its bytes.
        tensors: the tensors; while this exists, they do.
        expected: for each tensor, by `id`, how many users it has if none is hidden.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address, self.size = storage.data_ptr(), storage.nbytes()
        self.resizable, self.shared = storage.resizable(), storage.is_shared()
        self.tensors: list[torch.Tensor] = []
        self.expected: Counter[int] = Counter()

    def seen_whole(self) -> bool:
        """Whether right now nothing but these tensors uses the storage, and no operation is at work on it."""
        with torch._C.DisableTorchFunction():
            own = _counts(torch.empty(1, device="cpu"))
            users, references = _counts(self.tensors[0])
            if users - own[0] != len(self.tensors) - 1 or references != own[1]:
                return False
            return self.at_rest()

    def at_rest(self) -> bool:
        """Whether right now no operation, nor anything else that Python does not show, uses these tensors."""
        return all(_users_of(tensor) == self.expected[id(tensor)] for tensor in self.tensors)

    def versions(self) -> list[int]:
        """What changes when an operation writes to the storage."""
        return [tensor._version for tensor in self.tensors if not tensor.is_inference()]

    def place(self, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        """Put every tensor over `storage`, with its size, stride and offset; the objects stay the same.

        Returns:
            Tensors over the former memory, which goes with them.

        Raises:
            RuntimeError: torch refuses for one of them, or another thread took a view of the former memory
                meanwhile; all are as they were.
        """
        with torch._C.DisableTorchFunction():
            former = [_alias(tensor, _storage_of(tensor)) for tensor in self.tensors]
            try:
                for tensor in self.tensors:
                    _set_data(tensor, _alias(tensor, storage))
                if not _is_only_of(former):
                    raise RuntimeError("something else came to hold the storage while it was moved")
            except BaseException:
                for tensor, old in zip(self.tensors, former, strict=True):
                    _set_data(tensor, old)
                raise
        return former


def _is_only_of(tensors: list[torch.Tensor]) -> bool:
    """Whether nothing but these tensors, which nobody else knows, uses the storage that they share."""
    users, references = _counts(tensors[0])
    own = _counts(torch.empty(1, device="cpu"))
    return (users - own[0], references) == (len(tensors) - 1, own[1]) and _storage_of(tensors[0]).resizable()


def live_storages() -> list[Held]:
    """The large CPU storages of all live tensors; gc must not have frozen any of them."""
    held: dict[int, Held] = {}
    users: Counter[int] = Counter()
    with torch._C.DisableTorchFunction():
        for tensor, base, grad in _live_tensors():
            users.update(id(other) for other in (base, grad) if other is not None)
            storage = _storage_of(tensor)
            if storage.nbytes() >= LARGE and storage.data_ptr():
                if storage._cdata not in held:
                    held[storage._cdata] = Held(storage)
                held[storage._cdata].tensors.append(tensor)
    for each in held.values():
        each.expected.update({id(tensor): 1 + users[id(tensor)] for tensor in each.tensors})
    return list(held.values())


def _live_tensors() -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """Each live plain tensor with the base it is a view of and its gradient, which gc may not know."""
    waiting = _tensors_of_gc()
    seen: set[int] = set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        try:
            if not _is_plain(tensor):
                continue
            base = tensor._base if tensor._is_view() else None
            grad = tensor.grad if tensor.is_leaf else None
        except (RuntimeError, NotImplementedError):
            continue  # a tensor in name only: its storage, if it has one, shows a hidden user
        waiting += [other for other in (base, grad) if other is not None]
        yield tensor, base, grad


def _tensors_of_gc() -> list[Any]:
    """All tensors among the live objects; types by address, as a metaclass may have a hash of its own."""
    known: dict[int, bool] = {}
    found = []
    for obj in gc.get_objects():
        kind = type(obj)
        address = id(kind)
        if address not in known:
            known[address] = issubclass(kind, torch.Tensor)
        if known[address]:
            found.append(obj)
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of one CPU storage, by size, stride and offset."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and (tensor.device.type == "cpu" or is_placed(tensor))
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not (any(getattr(tensor, "names", ())) or torch._is_functional_tensor(tensor))
        and torch._C._has_storage(tensor)
    )


def _alias(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor like `tensor` over `storage`; an inference tensor only if that is one."""
    with torch.inference_mode(tensor.is_inference()):
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _users_of(tensor: torch.Tensor) -> int:
    return int(tensor._use_count())  # type: ignore[attr-defined]


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Users of a tensor's storage, and references to its Python object, as this function sees them."""
    storage = _storage_of(tensor)
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)
