"""Backward passes through placed tensors: code of the app that runs in one sees placed gradients.

The engine itself computes with ordinary CPU tensors, whatever the backward pass began with. What it hands
to Python (hooks of tensors and modules, ``Function.backward``, what that saved) is placed at this entry, as
another tensor over the same memory: the engine's own may go on to a tensor on the CPU. Which gradients to
place, and where, is known from the tensors that they belong to. Checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, Function, FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import BackwardHook

from .operations import SPECIAL, computing, tensors_in
from .placed import (
    Placed,
    index_of,
    is_placed,
    is_wrapper,
    place,
    showing_memory_now,
    with_history,
    without_us,
)

__all__ = ["apply_function", "replacements", "wrap_hooks"]

Places = tuple[int | None, ...]
"""The index of each tensor's device; None for one that is not placed, and for what is no tensor."""


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement of what hands gradients and saved tensors to the app."""
    yield Function, "apply", classmethod(apply_function)
    yield FunctionCtx, "save_for_backward", _save_for_backward
    yield BackwardCFunction, "saved_tensors", property(_saved_tensors)
    yield BackwardCFunction, "apply", _run_backward
    if _apply_boxed is not None:
        yield BackwardCFunction, "apply_boxed", _run_boxed
    yield BackwardHook, "setup_input_hook", _setup_input_hook
    yield BackwardHook, "setup_output_hook", _setup_output_hook
    yield BackwardHook, "_pack_with_none", _pack_with_none
    yield saved_tensors_hooks, "__enter__", _enter_saving


def _places_of(values: Iterable[Any]) -> Places | None:
    """Where values are; None if none of them is placed."""
    for value in values:
        if isinstance(value, Placed):
            return tuple(index_of(value) if is_placed(value) else None for value in values)
    return None


def _shown(tensor: Any, index: int | None) -> Any:
    """What the app sees of a tensor of the engine's whose place is `index`."""
    if index is None or not isinstance(tensor, torch.Tensor) or is_wrapper(tensor) or showing_memory_now():
        return tensor
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor  # stands for others, in a way that knows no class of ours
    return place(with_history(tensor), index)


def _all_shown(values: Iterable[Any], places: Places | None) -> tuple[Any, ...]:
    return tuple(values) if places is None else tuple(map(_shown, values, places))


def _given_back(values: Any) -> Any:
    """What the engine gets from the app, as the CPU tensors that it computes with."""
    if isinstance(values, (tuple, list)):
        return tuple(map(_given_back, values))
    return with_history(values) if is_placed(values) and not is_wrapper(values) else values


# -- where it starts -------------------------------------------------------------------------------------


def _unasked(function: Any) -> Any:
    """A function of torch that does not ask its arguments' classes what to do instead."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_backward_of_all = _unasked(torch.autograd.backward)
_grad = _unasked(torch.autograd.grad)


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`torch.autograd.backward`, and `torch.Tensor.backward`, which has a name of its own for one thing."""
    if "gradient" in kwargs:
        kwargs["grad_tensors"] = kwargs.pop("gradient")
    _backward_of_all(*args, **kwargs)


def _gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad`: each gradient is where its input is."""
    outputs, inputs = args
    if kwargs.get("is_grads_batched"):
        with without_us():
            found = func(*args, **kwargs)
    else:
        found = _grad(*args, **kwargs)
    first = next(index_of(tensor) for tensor in tensors_in((outputs, inputs)) if is_placed(tensor))
    return tuple(_landed(grad, given, first) for grad, given in zip(found, inputs, strict=True))


def _landed(grad: Any, given: Any, first: int) -> Any:
    if grad is None:
        return None
    if not isinstance(given, torch.Tensor):  # an edge of the graph, which has no device
        return place(grad, first)
    return place(grad, index_of(given)) if is_placed(given) else _given_back(grad)


# -- hooks of tensors ------------------------------------------------------------------------------------


class _Hook:
    """A tensor's hook, which sees the gradient where the tensor is."""

    def __init__(self, tensor: Any, hook: Any) -> None:
        functools.update_wrapper(self, hook)
        self._hook = hook
        self._tensor = weakref.ref(tensor)
        self._index = index_of(tensor)

    def __call__(self, grad: Any) -> Any:
        tensor = self._tensor()
        index = index_of(tensor) if is_placed(tensor) else None  # it may have moved
        return _given_back(self._hook(_shown(grad, self._index if tensor is None else index)))


def _register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, hook = args
    with without_us():
        return func(tensor, _Hook(tensor, hook))


def wrap_hooks(tensor: Any) -> None:
    """Let the hooks of a tensor that has just been placed see gradients where it is now."""
    with without_us():
        hooks = tensor._backward_hooks
    for key, hook in (hooks or {}).items():
        if not isinstance(hook, _Hook):
            hooks[key] = _Hook(tensor, hook)


# -- functions of the app --------------------------------------------------------------------------------

_applied: Any = vars(Function)["apply"]
_run_backward_of: Any = BackwardCFunction.apply
_apply_boxed: Any = getattr(BackwardCFunction, "apply_boxed", None)
_saved_by: Any = torch._C._FunctionBase.saved_tensors
_hooks_of_saved: Any = torch._C._autograd._top_saved_tensors_default_hooks


def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.Function.apply`, whose backward is to know where its outputs were."""
    before = computing.index
    if _hooks_of_saved(True) is not None:
        computing.index = next((index_of(arg) for arg in args if is_placed(arg)), None)
    try:
        result = _applied.__get__(None, cls)(*args, **kwargs)
    finally:
        computing.index = before
    outputs = result if isinstance(result, tuple) else (result,)
    places = _places_of(outputs)
    if places is not None and torch.is_grad_enabled():
        nodes = (output.grad_fn for output in outputs if is_placed(output))
        node: Any = next(filter(None, nodes), None)
        if node is not None:
            node._placed_outputs = places
    return result


def _run_backward(self: Any, *grads: Any) -> Any:
    places = getattr(self, "_placed_outputs", None)
    return _given_back(_run_backward_of(self, *_all_shown(grads, places)))


def _run_boxed(self: Any, grads: list[Any]) -> Any:
    grads[:] = _all_shown(grads, getattr(self, "_placed_outputs", None))
    return _given_back(_apply_boxed(self, grads))


def _save_for_backward(self: Any, *tensors: Any) -> None:
    places = _places_of(tensors)
    if places is not None:
        self._placed_saved = places
    self.to_save = tensors


def _saved_tensors(self: Any) -> Any:
    """What the engine made of saved tensors may be others than those that were saved."""
    tensors = _saved_by.__get__(self)
    places = getattr(self, "_placed_saved", None)
    if places is None:
        return tensors
    return tuple(
        place(tensor, index) if isinstance(tensor, torch.Tensor) and index is not None else tensor
        for tensor, index in zip(tensors, places, strict=True)
    )


# -- hooks of modules ------------------------------------------------------------------------------------

_setup_input: Any = BackwardHook.setup_input_hook
_setup_output: Any = BackwardHook.setup_output_hook
_pack: Any = BackwardHook._pack_with_none


def _setup_input_hook(self: Any, args: Any) -> Any:
    self._placed_inputs = _places_of(args)
    return _setup_input(self, args)


def _setup_output_hook(self: Any, args: Any) -> Any:
    self._placed_outputs = _places_of(args if isinstance(args, tuple) else (args,))
    return _setup_output(self, args)


def _pack_with_none(self: Any, indices: Any, values: Any, size: int) -> tuple[Any, ...]:
    """The gradients of a module's inputs or outputs, as its hooks see them."""
    inputs = indices is self.input_tensors_index
    return _all_shown(
        _pack(self, indices, values, size), self._placed_inputs if inputs else self._placed_outputs
    )


# -- hooks of what is saved ------------------------------------------------------------------------------


def _enter_saving(self: Any) -> None:
    """`saved_tensors_hooks.__enter__`."""
    pack = self.pack_hook if isinstance(self.pack_hook, torch.fx.GraphModule) else _packing(self.pack_hook)
    torch._C._autograd._push_saved_tensors_default_hooks(pack, self.unpack_hook)


def _packing(hook: Any) -> Any:
    @functools.wraps(hook)
    def pack(tensor: Any) -> Any:
        index = computing.index
        if index is None:
            return hook(tensor)
        computing.index = None
        try:
            with torch._C._EnableTorchFunction():
                return hook(_shown(tensor, index))
        finally:
            computing.index = index

    return pack


SPECIAL.update(
    {
        torch.Tensor.backward: _backward,
        torch.autograd.backward: _backward,
        torch.autograd.grad: _gradients,
        torch.Tensor.register_hook: _register_hook,
    }
)
