"""Placed tensors: what the main process has instead of tensors on a device.

A placed tensor is an ordinary CPU tensor whose class says that it is on ``cuda:<index>``. It computes on
the CPU, its results are placed like itself, and mixing it with a CPU tensor raises what CUDA would raise.
Placing a tensor switches its class where it stands: the object, its views, ties and autograd flags stay.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "SPECIAL",
    "Placed",
    "PlacedTensor",
    "PlacedWrapper",
    "check_devices",
    "check_generator",
    "in_memory",
    "index_of",
    "is_placed",
    "is_wrapper",
    "parts_of",
    "place",
    "place_all",
    "placed_class",
    "plain_class",
    "sees_to_itself",
    "showing_memory",
    "showing_memory_now",
    "take_off",
    "tensors_in",
    "without_us",
]

_CPU = torch.device("cpu")
_ATTRIBUTES = re.compile(r"(.*?)((?:, (?:size|dtype|layout|nnz|names)=.*)?\))", re.DOTALL)
"""A tensor as text: what comes before the device, and what after it."""

_showing = threading.local()


@contextlib.contextmanager
def showing_memory() -> Iterator[None]:
    """Within, in this thread, placed tensors say where their memory is: on the CPU."""
    before = getattr(_showing, "memory", False)
    _showing.memory = True
    try:
        yield
    finally:
        _showing.memory = before


_repr: Any = torch.Tensor.__repr__

without_us = torch._C.DisableTorchFunctionSubclass
"""A context in which placed tensors are to torch the CPU tensors that they are."""


def showing_memory_now() -> bool:
    """Whether this thread is inside `showing_memory`."""
    return getattr(_showing, "memory", False)


class Placed:
    """Mixed into a tensor class, makes its instances say that they are on a device."""

    _placed_on = 0

    @property
    def device(self) -> torch.device:
        return _CPU if showing_memory_now() else torch.device("cuda", self._placed_on)

    @property
    def is_cuda(self) -> bool:
        return not showing_memory_now()

    @property
    def is_cpu(self) -> bool:
        return showing_memory_now()

    def get_device(self) -> int:
        return -1 if showing_memory_now() else self._placed_on


class PlacedWrapper(Placed):
    """Of a tensor that only stands for others, which are placed like itself; `wrappers` has its answers."""


class PlacedTensor(Placed):
    """Of an ordinary tensor: behaves as if on the device."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        with without_us():
            result = func(*args, **kwargs)
        if device is None or torch.device(device).type == "cuda":
            if not _follows_cpu_tensor(func, args):
                place_all(result, index, others)
        elif is_placed(result):  # what was asked to be elsewhere, and torch saw no need to copy
            return result.cpu()
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with without_us():
            plain = self.detach()  # type: ignore[attr-defined]
            plain.__class__ = torch.Tensor
            text = _repr(plain, tensor_contents=tensor_contents)
        data, rest = _ATTRIBUTES.fullmatch(text).groups()  # type: ignore[union-attr]
        if self.grad_fn is not None:  # type: ignore[attr-defined]
            rest = f"{rest[:-1]}, grad_fn=<{self.grad_fn.name()}>)"  # type: ignore[attr-defined]
        elif self.requires_grad:  # type: ignore[attr-defined]
            rest = f"{rest[:-1]}, requires_grad=True)"
        title = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        return f"{title}{data}, device='{self.device}'{rest}"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)  # type: ignore[attr-defined]

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _no_numpy(self)


@functools.cache
def placed_class(plain: Any) -> type:
    """The class of placed tensors that are otherwise of class `plain`."""
    mixin = PlacedWrapper if hasattr(plain, "__tensor_flatten__") else PlacedTensor
    return type(plain.__name__, (mixin, plain), {"__module__": plain.__module__, "_plain_class": plain})


def plain_class(tensor: Any) -> type:
    """The class that `tensor` has when it is not placed."""
    kind: type = getattr(type(tensor), "_plain_class", type(tensor))
    return kind


def is_placed(obj: object) -> bool:
    """Whether `obj` is a placed tensor."""
    return issubclass(type(obj), Placed)


def index_of(tensor: Any) -> int:
    """The index of the device that a placed tensor is on."""
    return int(tensor._placed_on)


def place(tensor: Any, index: int) -> Any:
    """Put a CPU tensor on device `index`, where it stands; returns it."""
    if is_wrapper(tensor):
        inner = [place(part, index) for part in parts_of(tensor)]
        if not all(map(is_placed, inner)):
            return tensor
        if not is_placed(tensor):
            kind: Any = type(tensor)
            tensor.__class__ = placed_class(kind)
    elif not is_placed(tensor):
        if tensor.device.type != "cpu" or _is_virtual(tensor):
            return tensor  # meta and fake tensors have nothing to place
        kind = type(tensor)
        tensor.__class__ = placed_class(kind)
    if tensor._placed_on != index:
        tensor._placed_on = index
    return tensor


def take_off(tensor: Any) -> Any:
    """Make a placed tensor an ordinary CPU tensor again, where it stands; returns it."""
    if is_placed(tensor):
        for part in parts_of(tensor) if is_wrapper(tensor) else ():
            take_off(part)
        tensor.__dict__.pop("_placed_on", None)
        tensor.__class__ = plain_class(tensor)
    return tensor


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor only stands for others, as torchao's do."""
    return hasattr(type(tensor), "__tensor_flatten__")


def parts_of(wrapper: Any) -> list[Any]:
    """The tensors that a wrapper stands for."""
    return [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]


def in_memory(tensor: Any) -> Any:
    """The ordinary tensor or parameter over the memory of a placed one; any other is itself."""
    if not is_placed(tensor) or is_wrapper(tensor):
        return tensor
    with without_us():
        plain = tensor.detach()
    plain.__class__ = torch.Tensor
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(plain, tensor.requires_grad)
    return plain.requires_grad_(tensor.requires_grad)


# -- devices of a call -----------------------------------------------------------------------------------


def tensors_in(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


_MIXING = frozenset(
    {"__get__", "__set__", "__getitem__", "__setitem__", "index", "index_put", "index_put_", "copy_"}
    | {"set_", "new_tensor", "pack_padded_sequence", "tensor_split", "ctc_loss", "result_type", "can_cast"}
    | {"view_as", "expand_as", "reshape_as", "is_same_size", "is_set_to", "swap_tensors"}
    | {"lstm", "gru", "rnn_tanh", "rnn_relu"}
    | {"_has_compatible_shallow_copy_type", "multi_head_attention_forward", "backward", "grad"}
)
"""Functions that take tensors of several devices, or whose parts see to it themselves."""


def _follows_cpu_tensor(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a result is on the CPU, where the first argument is: ``cpu.view_as(placed)``."""
    first = args[0] if args else None
    mixes = getattr(func, "__name__", "") in _MIXING
    return mixes and isinstance(first, torch.Tensor) and not is_placed(first)


def check_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, list[Any]]:
    """The index of the placed arguments' device, and the arguments that are not placed.

    Raises:
        RuntimeError: they are on several devices, and `func` needs one; numbers in CPU tensors may go
            anywhere, as on CUDA.
    """
    index, others = None, []
    mixes = showing_memory_now() or getattr(func, "__name__", "") in _MIXING
    for tensor in tensors_in(itertools.chain(args, kwargs.values())):
        if not is_placed(tensor):
            others.append(tensor)
        elif index is None:
            index = tensor._placed_on
        elif tensor._placed_on != index and not mixes:
            raise _mixed(index, tensor, func)
    if index is not None and not mixes:
        for tensor in others:
            if tensor.dim() > 0 and tensor.device.type == "cpu":
                raise _mixed(index, tensor, func)
    if not showing_memory_now():
        check_generator(kwargs.get("generator"), index is not None)
        _check_indices(func, args)
    return index or 0, others


@functools.cache
def sees_to_itself(kind: Any) -> bool:
    """Whether a tensor class has an answer of its own to whatever is done, such as torchao's."""
    return any(
        "__torch_dispatch__" in vars(cls)
        or vars(cls).get("__torch_function__", torch._C._disabled_torch_function_impl)
        is not torch._C._disabled_torch_function_impl
        for cls in itertools.takewhile(lambda cls: cls is not torch.Tensor, kind.__mro__)
    )


@functools.cache
def _yields_to_us(kind: Any) -> bool:
    return issubclass(kind, PlacedTensor) or not sees_to_itself(kind)


def _is_virtual(tensor: Any) -> bool:
    """Whether a tensor's class sees to all operations itself, as fake and functional ones do."""
    dispatch = type(tensor).__torch_dispatch__
    return getattr(dispatch, "__func__", dispatch) is not torch._C._disabled_torch_dispatch_impl


def _mixed(index: int, other: Any, func: Any) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:{index} and {other.device}! (when checking the arguments of "
        f"{getattr(func, '__name__', func)}: "
        f"one of shape {tuple(other.shape)} is on {other.device})"
    )


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


_INDEXING = frozenset({"__getitem__", "__setitem__", "index", "index_put", "index_put_"})


def _check_indices(func: Any, args: tuple[Any, ...]) -> None:
    indexed = getattr(func, "__name__", "") in _INDEXING and len(args) > 1 and not is_placed(args[0])
    if indexed and any(map(is_placed, tensors_in(args[1:2]))):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )


def place_all(result: Any, index: int, others: list[Any]) -> None:
    """Place the tensors of a result, except arguments that were not placed and come back."""
    for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in((result,)):
        if (not is_placed(tensor) or is_wrapper(tensor)) and not any(tensor is other for other in others):
            place(tensor, index)


# -- functions that mean something else on a device ------------------------------------------------------

Special = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
SPECIAL: dict[Any, Special] = {}
"""By function: what a placed tensor does instead. `casting` and `saving` add theirs."""


def _no_numpy(tensor: Any) -> TypeError:
    return TypeError(
        f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
        "to host memory first."
    )


def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("force"):
        return args[0].detach().cpu().numpy()
    raise _no_numpy(args[0])


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
        torch.Tensor.get_device: lambda func, args, kwargs: args[0]._placed_on,
    }
)
