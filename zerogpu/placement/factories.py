"""Functions that make tensors: ``torch.zeros(device="cuda")`` and all others that take a device.

Two layers. Whatever reaches torch's dispatcher with "cuda", from C++ or through a name that was imported
long ago, ends in the two allocating operations, which answer here (`register`). Functions that ask CUDA
before they dispatch, a device given as a number and ``pin_memory`` need a wrapper (`accepting`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch.utils._device import DeviceContext, _device_constructors

from .casting import to
from .meaning import cuda_index, meaning
from .operations import check_generator
from .placed import index_of, is_placed, is_wrapper, place, showing_memory, without_us
from .wrappers import rebuilt

__all__ = ["constructors", "fake_of_real", "in_device_context", "methods", "register", "start_context"]

_SHARING = frozenset(
    {"as_tensor", "asarray", "sparse_coo_tensor"}
    | {f"sparse_{kind}_tensor" for kind in ("compressed", "csr", "csc", "bsr", "bsc")}
)
"""Constructors that may return the memory they were given: what goes to another device is copied."""

_OTHERS = (
    *("empty_like", "full_like", "normal", "ones_like"),
    *("rand_like", "randint_like", "randn_like", "zeros_like"),
    *("_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
)
"""Functions that take a device and are not on torch's list."""
_DATA: dict[str, tuple[int, str]] = {
    "tensor": (0, "data"),
    "nested_tensor": (0, "tensor_list"),
    "sparse_coo_tensor": (1, "values"),
    **{f"sparse_{kind}_tensor": (2, "values") for kind in ("compressed", "csr", "csc", "bsr", "bsc")},
}
"""Constructors that follow a tensor that they are given, unless they are told where to: its place and name.
torch asks those tensors themselves only in constructors that may return them."""

_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")

_FAKE = _TorchDispatchModeKey.FAKE

_CONSTRUCTORS = frozenset(_device_constructors())
"""torch's own list, taken before anything is replaced: it is computed from the functions as they are."""


def accepting(original: Any) -> Any:
    """A wrapper of a constructor that understands devices, wherever it runs."""

    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        data: Any = None if position is None else _data(position, args, kwargs)
        if device is None and is_placed(data):
            device = data.device
        elif device is None and meaning.default is not None:
            device = _default_for(original, args)
        if device is None and "pin_memory" not in kwargs and kwargs.get("generator") is None:
            return original(*args, **kwargs)
        if not meaning.accepted:
            return original(*args, **kwargs)
        kwargs.pop("pin_memory", None)  # memory is pinned where the device is
        index = cuda_index(device)
        if meaning.placed and not torch._C._len_torch_function_stack():  # which may still name a device
            check_generator(kwargs.get("generator"), index is not None)
        if index is None:
            made = original(*args, **kwargs)
            if device is not None and is_placed(made):
                return to(made, device)
            elsewhere = kwargs.get("device") is not None and is_placed(data)
            return made.clone() if shares and elsewhere else made
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return original(*args, **{**kwargs, "device": meaning.traced(index)})
        kwargs["device"] = torch.device("cpu")
        with without_us():
            made = original(*args, **kwargs)
        if not meaning.placed or is_placed(made):
            return made
        copies = shares and not (is_placed(data) and index_of(data) == index)
        return to(made, torch.device("cuda", index)) if copies else place(made, index)

    name = getattr(original, "__name__", "")
    position = _DATA.get(name)
    shares = name in _SHARING
    return construct


def _data(position: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that a constructor follows: the one at its `position`, or the first of a list there."""
    place_in, name = position
    data = args[place_in] if len(args) > place_in else kwargs.get(name)
    if name == "tensor_list" and isinstance(data, (list, tuple)) and data:
        data = data[0]
    return data


def _default_for(original: Any, args: tuple[Any, ...]) -> str | None:
    """The default device of `torch.set_default_tensor_type`, for what follows no tensor and no context."""
    follows = any(isinstance(arg, torch.Tensor) for arg in args) or torch._C._len_torch_function_stack()
    return "cuda" if _is_constructor(original) and not follows else None


@functools.cache
def constructors() -> dict[tuple[Any, str], Any]:
    """The wrappers, by owner and name."""
    found = {}
    owners = [torch, torch.fft]
    for owner in owners:
        for name in dir(owner):
            value = getattr(owner, name)
            if getattr(value, "__hash__", None) and callable(value) and _is_constructor(value):
                found[owner, name] = accepting(value)
    for name in _OTHERS:
        found[torch, name] = accepting(getattr(torch, name))
    nested: Any = torch._C._nested  # type: ignore[attr-defined]
    found[nested, "nested_tensor"] = accepting(nested.nested_tensor)
    return found


def _is_constructor(value: Any) -> bool:
    try:
        return value in _CONSTRUCTORS
    except TypeError:
        return False


@functools.cache
def methods() -> dict[str, Any]:
    """The wrappers of ``Tensor.new_...``, by name."""
    return {name: accepting(getattr(torch._C.TensorBase, name)) for name in _NEW}


def in_device_context(
    self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """What ``with torch.device(...)`` does with each function that is called in it."""
    kwargs = kwargs or {}
    if _is_constructor(func):
        if kwargs.get("device") is None:
            kwargs["device"] = self.device
        func = _wrapper_of(func)
    return func(*args, **kwargs)


_start_context: Any = DeviceContext.__init__


def start_context(self: Any, device: Any) -> None:
    """`DeviceContext.__init__`, as in `torch.set_default_device(0)`: CPU builds refuse a number."""
    _start_context(self, torch.device("cuda", device) if type(device) is int else device)


@functools.cache
def _wrappers() -> dict[Any, Any]:
    return {wrapper.__wrapped__: wrapper for wrapper in constructors().values()}


def _wrapper_of(func: Any) -> Any:
    return _wrappers().get(func, func)


_from_real_tensor: Any = FakeTensorConverter.from_real_tensor


def fake_of_real(*args: Any, **kwargs: Any) -> Any:
    """`FakeTensorConverter.from_real_tensor`: what a program is traced with stands for a placed tensor."""
    if not meaning.simulated:
        return _from_real_tensor(*args, **kwargs)
    converter, mode, tensor, *rest = args
    with showing_memory():
        if is_placed(tensor) and is_wrapper(tensor):
            tensor = rebuilt(tensor, lambda part: part)
        return _from_real_tensor(converter, mode, tensor, *rest, **kwargs)


# -- the dispatcher --------------------------------------------------------------------------------------


def _empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, **options: Any) -> Any:
    made = torch.ops.aten.empty.memory_format(
        size, dtype=dtype, layout=layout, device="cpu", memory_format=options.get("memory_format")
    )
    return _settle(made, device)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _settle(torch.ops.aten.empty_strided(size, stride, dtype=dtype, device="cpu"), device)


def _on_cpu(operation: Any) -> Callable[..., Any]:
    def call(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Any:
        return _settle(operation(*args, device="cpu", **kwargs), device)

    return call


def _settle(made: Any, device: Any) -> Any:
    index = cuda_index(torch.device("cuda") if device is None else device)
    return place(made, index) if meaning.placed and index is not None else made


def register() -> Any:
    """Answer the dispatcher's allocations on CUDA; the result ends it when it is destroyed."""
    aten = torch.ops.aten
    new_library: Any = torch.library.Library
    library = new_library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a CUDA build has kernels of its own there
        library.impl("empty.memory_format", _empty, "CUDA")
        library.impl("empty_strided", _empty_strided, "CUDA")
        library.impl("tril_indices", _on_cpu(aten.tril_indices.default), "CUDA")
        library.impl("triu_indices", _on_cpu(aten.triu_indices.default), "CUDA")
    return library
