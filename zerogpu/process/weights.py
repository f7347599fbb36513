"""Notices when the main process changes weights that workers have as they were at the snapshot."""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from types import ModuleType
from typing import Any

from .parts import tensor_state
from .snapshot import Snapshot, app_globals

__all__ = ["WeightWatch"]

_SHARE = 50
"""A look may cost at most one part in this many of the time: big models are looked at less often."""


class WeightWatch:
    """Remembers the snapshot's modules, with parameters, buffers and plain attributes, and global tensors.

    It compares identity, memory address and version counter, so it sees in-place operations, assignment
    to ``.data``, ``load_state_dict`` and added or removed submodules; not a write through a numpy view
    or in place through ``.data``, which torch does not count. Of the other attributes it compares
    numbers, strings, None and tuples of these, such as ``training``, unless their name is private.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        torch = sys.modules.get("torch")
        modules = snapshot.instances(torch.nn.Module) if torch else []
        self._known = {id(module): (weakref.ref(module), _state(module)) for module in modules}
        self._tensors = [
            (name, weakref.ref(value), _memory(value))
            for name, value in app_globals()
            if torch and issubclass(type(value), torch.Tensor)
        ]
        self._next = 0.0
        self._reported: set[tuple[str, str]] = set()

    def differs(self, module: Any) -> bool:
        """Whether a module, or one inside it, is not as it was at the snapshot.

        For a worker: a module that it trained is not the one that the main process has.
        """
        return any(
            reference() is not each or state != _state(each)
            for each in module.modules()
            for reference, state in (self._known.get(id(each), _UNKNOWN),)
        )

    def missing(self, function: Any, snapshot: Snapshot) -> str | None:
        """The first global that `function` names and that came to hold a model only after the snapshot."""
        function = inspect.unwrap(getattr(function, "func", function))
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", None)
        if code is None or names is None:
            return None
        for name in code.co_names:
            value = names.get(name)
            where = (str(names.get("__name__")), name)
            if where not in self._reported and _is_model(value) and not snapshot.holds(value):
                self._reported.add(where)
                return str(name)
        return None

    def change(self) -> str | None:
        """The first change since the last look that found one, in words; None when there is none."""
        now = time.monotonic()
        if now < self._next:
            return None
        before = time.thread_time()
        found = self._look() or self._look_at_tensors()
        self._next = now + (time.thread_time() - before) * _SHARE
        return found

    def _look(self) -> str | None:
        for key, (reference, state) in self._known.items():
            module = reference()
            if module is None:
                continue
            current = _state(module)
            if current == state:
                continue
            self._known[key] = (reference, current)
            names = [name for name in {**state, **current} if state.get(name) != current.get(name)]
            return f"{names[0]!r} of {self._path_of(module)}"
        return None

    def _look_at_tensors(self) -> str | None:
        for index, (name, reference, memory) in enumerate(self._tensors):
            tensor = reference()
            if tensor is not None and (current := _memory(tensor)) != memory:
                self._tensors[index] = (name, reference, current)
                return f"the tensor {name!r}"
        return None

    def _path_of(self, module: Any) -> str:
        """The class of the outermost module that holds `module`, and the way down: ``Net.encoder.0``."""
        for reference, _ in self._known.values():
            parent = reference()
            for name, child in (parent._modules if parent is not None else {}).items():
                if child is module:
                    return f"{self._path_of(parent)}.{name}"
        return type(module).__name__


_UNKNOWN: tuple[Any, dict[str, Any]] = (lambda: None, {})

_ATOMS = frozenset({bool, float, int, str, type(None)})


def _state(module: Any) -> dict[str, tuple[Any, ...]]:
    attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
    state: dict[str, tuple[Any, ...]] = {}
    for name, value in attributes.items():
        kind = type(value)
        if name[:1] != "_" and (kind in _ATOMS or (kind is tuple and _ATOMS.issuperset(map(type, value)))):
            state[name] = (kind, value)
    for group in ("_parameters", "_buffers"):
        for name, tensor in attributes.get(group, {}).items():
            if tensor is not None:
                state[name] = (id(tensor), *_memory(tensor))
    for name, child in attributes.get("_modules", {}).items():
        state[name] = (id(child),)
    return state


def _is_model(value: Any) -> bool:
    """Whether a value is a module or tensor, or an object such as a pipeline that has a module."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    heavy = (torch.nn.Module, torch.Tensor)
    if issubclass(type(value), heavy):
        return True
    if issubclass(type(value), (type, ModuleType)):
        return False
    try:  # past the object's own __getattr__, as it might be a lazy proxy
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return False
    return len(attributes) <= 200 and any(
        issubclass(type(each), torch.nn.Module) for each in attributes.values()
    )


def _memory(tensor: Any) -> tuple[int, ...]:
    return tensor_state(tensor) or ()  # fakes have no memory, inference tensors no version
