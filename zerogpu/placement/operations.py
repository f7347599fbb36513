"""Operations on placed tensors: the devices of a call are checked as on CUDA, and its results are placed."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .placed import (
    PlacedTensor,
    index_of,
    is_placed,
    is_wrapper,
    no_numpy,
    place,
    sees_to_itself,
    showing_memory_now,
    without_us,
)

__all__ = [
    "SPECIAL",
    "check_devices",
    "check_generator",
    "computing",
    "place_all",
    "tensors_in",
]

_MIXING = frozenset(
    {"__get__", "__set__", "__getitem__", "__setitem__", "index", "index_put", "index_put_", "copy_"}
    | {"set_", "new_tensor", "pack_padded_sequence", "tensor_split", "ctc_loss", "result_type", "can_cast"}
    | {"view_as", "expand_as", "reshape_as", "is_same_size", "is_set_to", "swap_tensors"}
    | {"lstm", "gru", "rnn_tanh", "rnn_relu"}
    | {"_nested_view_from_jagged", "_nested_view_from_buffer", "_nested_from_padded"}
    | {"_has_compatible_shallow_copy_type", "multi_head_attention_forward", "backward", "grad"}
)
"""Functions that take tensors of several devices, or whose parts see to it themselves."""

_INDEXING = frozenset({"__getitem__", "__setitem__", "index", "index_put", "index_put_"})

Special = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
SPECIAL: dict[Any, Special] = {}
"""By function: what a placed tensor does instead. `casting` adds its own."""


class _Computing(threading.local):
    index: int | None = None


computing = _Computing()
"""In each thread, the index of the device whose tensors an operation is computing with; None in none."""


def _function(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """`PlacedTensor.__torch_function__`."""
    kwargs = kwargs or {}
    if not all(map(_yields_to_us, types)):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            check_devices(func, args, kwargs)
        return NotImplemented  # torchao's tensors and the like know better what to do
    special = SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    index, others = check_devices(func, args, kwargs)
    device = kwargs.get("device")
    before, computing.index = computing.index, index
    try:
        with without_us():
            result = func(*args, **kwargs)
    finally:
        computing.index = before
    if device is None or torch.device(device).type == "cuda":
        if not _follows_cpu_tensor(func, args):
            place_all(result, index, others)
    elif is_placed(result):  # what was asked to be elsewhere, and torch saw no need to copy
        return result.cpu()
    return result


PlacedTensor.__torch_function__ = classmethod(_function)  # type: ignore[attr-defined]


@functools.cache
def _yields_to_us(kind: Any) -> bool:
    return issubclass(kind, PlacedTensor) or not sees_to_itself(kind)


# -- devices of a call -----------------------------------------------------------------------------------


def tensors_in(values: Any) -> Iterator[Any]:
    """The tensors among values, and in the lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def check_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, list[Any]]:
    """The index of the placed arguments' device, and the arguments that are not placed.

    Raises:
        RuntimeError: they are on several devices, and `func` needs one; numbers in CPU tensors may go
            anywhere, as on CUDA.
    """
    index, others = None, []
    mixes = showing_memory_now() or _is_one_of(_MIXING, func)
    for tensor in tensors_in(itertools.chain(args, kwargs.values())):
        if not is_placed(tensor):
            others.append(tensor)
        elif index is None:
            index = index_of(tensor)
        elif index_of(tensor) != index and not mixes:
            raise _mixed(index, tensor, func)
    if index is not None and not mixes:
        for tensor in others:
            if tensor.dim() > 0 and tensor.device.type == "cpu":
                raise _mixed(index, tensor, func)
    if not showing_memory_now():
        check_generator(kwargs.get("generator"), index is not None)
        _check_indices(func, args)
    return index or 0, others


def check_generator(generator: Any, on_device: bool) -> None:
    """A generator draws for its own device only.

    Raises:
        RuntimeError: it is of the other one.
    """
    kinds = ("cpu", "cuda")
    if generator is not None and generator.device.type != kinds[on_device]:
        raise RuntimeError(
            f"Expected a '{kinds[on_device]}' device type for generator but found '{generator.device.type}'"
        )


def _check_indices(func: Any, args: tuple[Any, ...]) -> None:
    indexed = len(args) > 1 and not is_placed(args[0]) and _is_one_of(_INDEXING, func)
    if indexed and any(map(is_placed, tensors_in(args[1:2]))):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )


def _mixed(index: int, other: Any, func: Any) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:{index} and {other.device}! (when checking the arguments of "
        f"{getattr(func, '__name__', func)}: "
        f"one of shape {tuple(other.shape)} is on {other.device})"
    )


def _is_one_of(names: frozenset[str], func: Any) -> bool:
    return getattr(func, "__name__", "") in names


# -- results ---------------------------------------------------------------------------------------------


def place_all(result: Any, index: int, others: list[Any]) -> None:
    """Place the tensors of a result, except arguments that were not placed and come back."""
    for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in((result,)):
        if (not is_placed(tensor) or is_wrapper(tensor)) and not any(tensor is other for other in others):
            place(tensor, index)


def _follows_cpu_tensor(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a result is on the CPU, where the first argument is: ``cpu.view_as(placed)``."""
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and not is_placed(first) and _is_one_of(_MIXING, func)


# -- functions that mean something else on a device ------------------------------------------------------


def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("force"):
        return args[0].detach().cpu().numpy()
    raise no_numpy(args[0])


def _first_only(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes and lengths of packed sequences are on the CPU, also on CUDA."""
    with without_us():
        result = func(*args, **kwargs)
    place(result[0], index_of(args[0]))
    return result


_functions: Any = torch._C._VariableFunctions
SPECIAL.update(
    {
        torch.Tensor.numpy: _numpy,
        _functions._pack_padded_sequence: _first_only,
        _functions._pad_packed_sequence: _first_only,
        torch.Tensor.__array__: _numpy,
        torch.Tensor.is_pinned: lambda func, args, kwargs: False,
        torch.Tensor.get_device: lambda func, args, kwargs: index_of(args[0]),
    }
)
