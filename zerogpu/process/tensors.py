"""How tensors travel: their storage as one buffer, their shape beside it, without torch's own pickling.

torch pickles a tensor by saving its storage to a file in memory, which copies it twice. Here a dense CPU
storage goes out of band like a numpy array's memory, once per message however many tensors view it. A
tensor on another device travels as a CPU copy. Sparse, quantised and nested tensors keep torch's way.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any, cast

__all__ = ["is_tensor", "reduce_tensor"]


def is_tensor(obj: object) -> bool:
    """Whether `obj` is a tensor; False, at no cost, when torch was never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def reduce_tensor(tensor: Any, memories: dict[int, Any]) -> tuple[Any, ...] | None:
    """The pickle reduction of a tensor or Parameter; None where torch's own has to serve.

    Args:
        tensor: any tensor.
        memories: the storages of the message so far, by address; tensors that share one stay tied.
    """
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested:
        return None
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.untyped_storage().nbytes() > 2 * plain.nbytes:  # a small view: not its whole base
        plain = plain.clone(memory_format=torch.contiguous_format)
    geometry = (plain.dtype, plain.storage_offset(), tuple(plain.size()), plain.stride())
    parameter = isinstance(tensor, torch.nn.Parameter)
    memory = memories.setdefault(plain.untyped_storage().data_ptr(), _Memory(plain))
    return _rebuild_tensor, (memory, geometry, tensor.requires_grad, parameter)


class _Memory:
    """The memory under a CPU tensor; pickles as one buffer and arrives as a storage."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        storage = self._tensor.untyped_storage()
        if storage.nbytes() == 0:
            return _rebuild_storage, (b"",)
        array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        return _rebuild_storage, (pickle.PickleBuffer(memoryview(cast(Any, array))),)


def _rebuild_storage(buffer: Any) -> Any:
    import torch

    view = memoryview(buffer)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _rebuild_tensor(storage: Any, geometry: tuple[Any, ...], requires_grad: bool, parameter: bool) -> Any:
    import torch

    dtype, offset, size, stride = geometry
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
