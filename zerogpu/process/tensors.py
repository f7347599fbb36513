"""How tensors travel: their storage as one buffer, their shape beside it, without torch's own pickling.

torch pickles a tensor by saving its storage to a file in memory, which copies it twice. Here a dense CPU
storage goes out of band like a numpy array's memory, once per message however many tensors view it. A
tensor on another device travels as a CPU copy that knows the device, and lands as the receiver's `crossing`
says. Sparse, quantised and nested tensors keep torch's way.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any, cast

__all__ = ["Crossing", "cross_with", "is_tensor", "reduce_tensor"]


class Crossing:
    """What a device means on either side; this one is of a process where all tensors are on the CPU."""

    def leaving(self, tensor: Any) -> int | None:
        """The index, as the main process counts, of the device that `tensor` is on; None for the CPU."""
        return None

    def land_storage(self, storage: Any, index: int) -> Any:
        """Where the memory of a tensor that was on device `index` goes here."""
        return storage

    def land_tensor(self, tensor: Any, index: int) -> Any:
        """What a tensor that was on device `index`, over landed memory, becomes here."""
        return tensor


_crossing = Crossing()


def cross_with(crossing: Crossing) -> None:
    """Say what devices mean in this process."""
    global _crossing
    _crossing = crossing


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
    kind = getattr(type(tensor), "_plain_class", type(tensor))
    if kind not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested:
        return None
    index = _crossing.leaving(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return _reduce(tensor, memories, index)


def _reduce(tensor: Any, memories: dict[int, Any], index: int | None) -> tuple[Any, ...]:
    import torch

    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.untyped_storage().nbytes() > 2 * plain.nbytes:  # a small view: not its whole base
        plain = plain.clone(memory_format=torch.contiguous_format)
    geometry = (plain.dtype, plain.storage_offset(), tuple(plain.size()), plain.stride())
    parameter = isinstance(tensor, torch.nn.Parameter)
    memory = memories.setdefault(plain.untyped_storage().data_ptr(), _Memory(plain, index))
    return _rebuild_tensor, (memory, geometry, tensor.requires_grad, parameter, index)


class _Memory:
    """The memory under a CPU tensor; pickles as one buffer and arrives as a storage."""

    def __init__(self, tensor: Any, index: int | None) -> None:
        self._tensor = tensor
        self._index = index

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        storage = self._tensor.untyped_storage()
        if storage.nbytes() == 0:
            return _rebuild_storage, (b"", self._index)
        array = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
        return _rebuild_storage, (pickle.PickleBuffer(memoryview(cast(Any, array))), self._index)


def _rebuild_storage(buffer: Any, index: int | None) -> Any:
    storage = _storage_over(buffer)
    return storage if index is None else _crossing.land_storage(storage, index)


def _storage_over(buffer: Any) -> Any:
    import torch

    view = memoryview(buffer)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _rebuild_tensor(
    storage: Any, geometry: tuple[Any, ...], requires_grad: bool, parameter: bool, index: int | None
) -> Any:
    import torch

    dtype, offset, size, stride = geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if index is not None:
        tensor = _crossing.land_tensor(tensor, index)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
