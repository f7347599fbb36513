"""Snapshot: which objects existed when the app was forked, so that they travel by reference.

A fork keeps every object at its address. A table made just before it, from address to object, therefore
names the same object on both sides, and a model in the arguments costs as much as an integer.

What is in the table:

- modules, tensors, compiled graphs and decorated functions (`Task`), wherever they live;
- functions and classes that pickle cannot find by name, and context variables;
- *handles*: objects that hold a module or tensor (pipelines), that have decorated methods, or that a
  global of the app's own code or a variable of a decorated function names (processors, tokenizers).

A reference stands for the object **as it was**. A tensor written to since, or a handle whose attributes
changed since, travels by value instead, so the receiver never sees an old state by silence.
"""

from __future__ import annotations

import collections
import contextvars
import gc
import itertools
import operator
import os
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["BY_REFERENCE", "Snapshot", "snapshot_number"]

BY_REFERENCE = "__zerogpu_by_reference__"
"""A class with this attribute set to True has instances that never change after they are made."""

_MAX_NODES = 20_000
"""A handle with more parts than this travels by value: comparing it would cost more than sending it."""

_OWN = __name__.partition(".")[0]
"""This package. What it keeps of earlier snapshots must not become part of the next: each would be larger."""

_numbers = itertools.count(1)
_tables: weakref.WeakValueDictionary[int, Snapshot] = weakref.WeakValueDictionary()


class Snapshot:
    """The objects that exist now, as a table that a fork will share.

    Args:
        tasks: the decorated functions; what they name can be passed by reference.
        context: the context variables that functions start with; none by default.
    """

    def __init__(self, tasks: Iterable[Any] = (), context: contextvars.Context | None = None) -> None:
        self.number = next(_numbers)
        self.modules = frozenset(sys.modules)
        self.context = context if context is not None else contextvars.Context()
        self._entries: dict[int, _Entry] = {}
        frozen = gc.get_freeze_count()
        if frozen:  # frozen objects are not among gc.get_objects()
            gc.unfreeze()
        _Scan(self._entries).run(tasks)
        if frozen:
            gc.freeze()
        _tables[self.number] = self

    def holds(self, obj: object) -> bool:
        """Whether `obj` existed at the snapshot and is in the table, changed since or not."""
        entry = self._entries.get(id(obj))
        return entry is not None and entry.get() is obj

    def reference(self, obj: object) -> int | None:
        """The name of `obj` on both sides of the fork; None when it has to travel by value."""
        entry = self._entries.get(id(obj))
        if entry is None or entry.get() is not obj or not entry.unchanged(obj):
            return None
        return id(obj)

    def resolve(self, reference: int) -> Any:
        """The object that `reference` names in this process.

        Raises:
            LookupError: it was deleted here since.
        """
        entry = self._entries.get(reference)
        obj = entry.get() if entry is not None else None
        if obj is None:
            raise LookupError("an object that was passed by reference no longer exists here")
        return obj


def snapshot_number(number: int) -> Snapshot:
    """The snapshot with this number, as far as this process still has it."""
    return _tables[number]


class _Entry:
    """One object of the table: held weakly where possible, with what it takes to see a change."""

    __slots__ = ("_state", "get")

    def __init__(self, obj: object, state: Callable[[Any], bool] | None) -> None:
        self.get: Callable[[], Any]
        try:
            self.get = weakref.ref(obj)
        except TypeError:
            self.get = lambda: obj
        self._state = state

    def unchanged(self, obj: object) -> bool:
        return self._state is None or self._state(obj)


class _Scan:
    """One pass over the live objects that fills a table."""

    def __init__(self, entries: dict[int, _Entry]) -> None:
        self._entries = entries
        torch = sys.modules.get("torch")
        self._module_type: type = torch.nn.Module if torch else type("Nothing", (), {})
        self._tensor_type: type = torch.Tensor if torch else type("Nothing", (), {})
        self._kinds: dict[type, Callable[[Any], None] | None] = {}
        self._heavy: dict[type, bool] = {}

    def run(self, tasks: Iterable[Any]) -> None:
        for obj in gc.get_objects():
            kind = type(obj)
            try:
                add = self._kinds[kind]
            except KeyError:
                add = self._kinds[kind] = self._adder(kind)
            if add is not None:
                add(obj)
        for obj in itertools.chain(_named_by_the_app(), *map(_named_by_function, tasks)):
            if id(obj) not in self._entries and _may_be_handle(type(obj)):
                self._add_handle(obj)

    def _adder(self, kind: type) -> Callable[[Any], None] | None:
        """What to do with objects of this type; None for most, which travel by value."""
        if issubclass(kind, types.FunctionType):
            return self._add_function
        if issubclass(kind, type):
            return self._add_class
        if issubclass(kind, self._tensor_type):
            return self._add_tensor
        if issubclass(kind, (self._module_type, contextvars.ContextVar)):
            return self._add
        if getattr(kind, BY_REFERENCE, False):
            return self._add
        if not _may_be_handle(kind):
            return None
        if any(_is_decorated(value) for cls in kind.__mro__ for value in _values(cls)):
            return self._add_handle
        # Objects of the standard library are many, and none of them is a pipeline.
        return None if _library_of(kind) in sys.stdlib_module_names else self._add_if_holder

    def _add(self, obj: object) -> None:
        self._entries[id(obj)] = _Entry(obj, None)

    def _add_function(self, function: types.FunctionType) -> None:
        if function.__module__ == "__main__" or (
            "<" in function.__qualname__ and not str(function.__module__).startswith(_OWN + ".")
        ):
            self._add(function)

    def _add_class(self, cls: type) -> None:
        if cls.__module__ == "__main__" or "<" in cls.__qualname__:
            self._add(cls)

    def _add_tensor(self, tensor: Any) -> None:
        state = _tensor_state(tensor)
        if state is not None:
            self._entries[id(tensor)] = _Entry(tensor, lambda t: _tensor_state(t) == state)

    def _add_if_holder(self, obj: object) -> None:
        for value in _values(obj):
            if self._is_heavy(type(value)) or (
                type(value) in (list, tuple, dict)
                and len(value) < 100
                and any(self._is_heavy(type(v)) for v in _elements(value))
            ):
                self._add_handle(obj)
                return

    def _is_heavy(self, kind: type) -> bool:
        """By type, never isinstance: a lazy proxy would run code to answer that."""
        heavy = self._heavy.get(kind)
        if heavy is None:
            heavy = self._heavy[kind] = issubclass(kind, (self._module_type, self._tensor_type))
        return heavy

    def _add_handle(self, obj: object) -> None:
        heavy = (self._module_type, self._tensor_type)
        parts = _Parts.of(obj, heavy)
        if parts is not None:
            self._entries[id(obj)] = _Entry(obj, lambda o: _Parts.of(o, heavy) == parts)


def _tensor_state(tensor: Any) -> tuple[int, ...] | None:
    """What changes when a tensor is written to or given other memory; None if that cannot be told."""
    try:
        return (tensor._version, tensor.data_ptr())
    except (RuntimeError, NotImplementedError):  # inference tensors have no version; fakes no memory
        return None


class _Parts:
    """The parts of a handle, flattened: equal lists of identical objects mean an unchanged handle.

    The parts are kept alive, so that a new object never takes the address of a remembered one.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._states: list[Any] = []
        self._seen: set[int] = set()

    @classmethod
    def of(cls, obj: object, heavy: tuple[type, type]) -> _Parts | None:
        """The parts of `obj`; None when a part could change unseen or there are too many."""
        parts = cls()
        return parts if parts._add(obj, heavy) else None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Parts)
            and self._states == other._states
            and len(self._objects) == len(other._objects)
            and all(map(operator.is_, self._objects, other._objects))
        )

    __hash__ = None  # type: ignore[assignment]

    def _add(self, obj: object, heavy: tuple[type, type]) -> bool:
        self._objects.append(obj)
        if len(self._objects) > _MAX_NODES:
            return False
        kind = type(obj)
        if issubclass(kind, heavy):
            if issubclass(kind, heavy[1]):
                self._states.append(_tensor_state(obj))
                return self._states[-1] is not None
            return True
        if id(obj) in self._seen:
            return True
        if issubclass(kind, (list, tuple, set, frozenset, dict, collections.deque)):
            self._seen.add(id(obj))
            elements = [*obj, *obj.values()] if isinstance(obj, dict) else list(obj)  # type: ignore[call-overload]
            self._states.append(len(elements))
            return all(self._add(element, heavy) for element in elements)
        if _library_of(kind) in _UNSEEN:
            return False
        if _may_be_handle(kind):
            self._seen.add(id(obj))
            return all(self._add(value, heavy) for value in _values(obj))
        return not issubclass(kind, (bytearray, memoryview))


_UNSEEN = frozenset({"numpy", "array", "pandas", "scipy"})
"""Libraries whose objects change in place without a trace: what holds one travels by value."""

_VALUE_MODULES = frozenset(
    {"array", "builtins", "collections", "datetime", "decimal", "enum", "fractions", "numpy"}
    | {"pandas", "pathlib", "re", "scipy", "uuid"}
    | {"_io", "_thread", "asyncio", "io", "multiprocessing", "queue", "socket", "sqlite3", "threading"}
)
"""Libraries whose objects are values, or belong to one process and must not seem to be shared."""


def _is_decorated(value: object) -> bool:
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return type(function) is types.FunctionType and "__zerogpu__" in vars(function)


def _may_be_handle(kind: type) -> bool:
    """Whether instances of this type can be handles; False for values, code and the runtime's own."""
    if issubclass(kind, (type, types.ModuleType, BaseException)):
        return False
    library = _library_of(kind)
    return library not in ("", _OWN) and library not in _VALUE_MODULES and not _is_plain_data(kind)


def _library_of(kind: type) -> str:
    """The top-level module of a class; empty where it does not say (proxies compute it per instance)."""
    module = kind.__module__
    return module.partition(".")[0] if isinstance(module, str) else ""


def _is_plain_data(kind: type) -> bool:
    return issubclass(
        kind, (int, float, complex, str, bytes, list, tuple, dict, set, frozenset, types.FunctionType)
    )


def _values(obj: object) -> list[Any]:
    """The values of an object's attributes, without running code of its class."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return []
    return list(attributes.values()) if isinstance(attributes, (dict, types.MappingProxyType)) else []


def _elements(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _named_by_function(task: Any) -> list[Any]:
    """What a decorated function's closure and defaults name."""
    function = getattr(task, "function", None)
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    bound = getattr(function, "__self__", None)
    return [*found, *(getattr(function, "__defaults__", None) or ()), *([bound] if bound else [])]


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(os.path.join(folder, "") for folder in folders)


def _named_by_the_app() -> list[Any]:
    """The values of the globals of modules that are not installed libraries."""
    libraries = _library_folders()
    found: list[Any] = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _OWN:
            continue
        file = getattr(module, "__file__", None)
        if name == "__main__" or (isinstance(file, str) and not file.startswith(libraries)):
            found.extend(vars(module).values())
    return found
