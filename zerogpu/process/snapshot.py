"""Snapshot: which objects existed when the app was forked, so that they travel by reference.

A fork keeps every object at its address. A table made just before it, from address to object, therefore
names the same object on both sides, and a model in the arguments costs as much as an integer.

What is in the table:

- modules, tensors, compiled graphs and decorated functions (`Task`), wherever they live;
- functions and classes that pickle cannot find by name, and context variables;
- *handles*: objects that hold a module or tensor (pipelines), that have decorated methods, or that a
  global of the app's own code or a variable of a decorated function names (processors, tokenizers).

A reference stands for the object **as it was**. A tensor written to since, a handle whose attributes or
slots changed since, or a function whose variables were bound anew travels by value instead, and so does a
handle with a part that could change unseen (an array, a random generator). Three things stay references
although they may have changed: modules (`WeightWatch` warns), classes, and parts that no pickle can hold.

Nothing here may run code of the objects it looks at, and an odd object must not break the snapshot: types
are read through `type`'s own descriptors, and what raises all the same travels by value.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import itertools
import os
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .parts import (
    BY_REFERENCE,
    OWN,
    Layout,
    Parts,
    attributes_of,
    function_state,
    identical,
    is_by_reference,
    library_of,
    module_of,
    mro,
    namespace_of,
    qualname_of,
    tensor_state,
)

__all__ = ["BY_REFERENCE", "Snapshot", "app_globals", "snapshot_number"]

_VALUE_MODULES = frozenset(
    {"_io", "_thread", "array", "asyncio", "builtins", "collections", "datetime", "decimal", "enum"}
    | {"fractions", "io", "multiprocessing", "numpy", "pandas", "pathlib", "queue", "re", "scipy"}
    | {"socket", "sqlite3", "threading", "uuid"}
)
"""Libraries whose objects are values, or belong to one process and must not seem to be shared."""

_OWN_MODULES = OWN + "."

_numbers = itertools.count(1)
_tables: weakref.WeakValueDictionary[int, Snapshot] = weakref.WeakValueDictionary()


class Snapshot:
    """The objects that exist now, as a table that a fork will share.

    Args:
        tasks: the decorated functions; what they name can be passed by reference.
        context: the context variables that functions start with; none by default.

    Attributes:
        placed: the tensors that are on a device, as the app sees them.
        watch: the `WeightWatch` of this snapshot, which knows modules as they were.
        answers: set in a worker, whose results have to show what it did to modules.
    """

    def __init__(self, tasks: Iterable[Any] = (), context: contextvars.Context | None = None) -> None:
        self.number = next(_numbers)
        self.modules = frozenset(sys.modules)
        self.context = context if context is not None else contextvars.Context()
        self.watch: Any = None
        self.answers = False
        self._entries: dict[int, _Entry] = {}
        frozen = gc.get_freeze_count()
        if frozen:  # frozen objects are not among gc.get_objects()
            gc.unfreeze()
        collects = gc.isenabled()
        gc.disable()  # what is made here is kept: to look for garbage in between only costs time
        self.placed: list[weakref.ref[Any]] = []
        try:
            scan = _Scan(self._entries)
            scan.run(tasks)
            self.placed = scan.placed
        finally:
            if collects:
                gc.enable()
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
        if entry is None or entry.get() is not obj:
            return None
        try:
            return id(obj) if entry.unchanged(obj) and not self._differs_here(obj) else None
        except Exception:  # noqa: BLE001 - an odd object: its value is safe
            return None

    def instances(self, kind: type) -> list[Any]:
        """The objects of the table that are instances of `kind` and still exist."""
        found = (entry.get() for entry in self._entries.values())
        return [obj for obj in found if issubclass(type(obj), kind)]

    def _differs_here(self, obj: object) -> bool:
        """Whether an object to be returned holds a module that this worker has changed."""
        if self.watch is None or not self.answers:
            return False
        torch = sys.modules.get("torch")
        if torch is None:
            return False
        held = (obj, *Layout(type(obj)).values(obj))
        return any(self.watch.differs(each) for each in held if issubclass(type(each), torch.nn.Module))

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

    __slots__ = ("_same", "_state", "get")

    def __init__(
        self, obj: object, state: Any = None, same: Callable[[Any, Any], bool] | None = None
    ) -> None:
        self.get: Callable[[], Any]
        try:
            self.get = weakref.ref(obj)
        except TypeError:
            self.get = lambda: obj
        self._state = state
        self._same = same

    def unchanged(self, obj: object) -> bool:
        return self._same is None or self._same(obj, self._state)


def _same_function(function: Any, state: tuple[Any, ...]) -> bool:
    return identical(function_state(function), state)


def _same_tensor(tensor: Any, state: tuple[int, ...]) -> bool:
    return tensor_state(tensor) == state


def _same_parts(obj: object, state: tuple[Parts, tuple[type, type]]) -> bool:
    return Parts.of(obj, state[1]) == state[0]


class _Scan:
    """One pass over the live objects that fills a table."""

    def __init__(self, entries: dict[int, _Entry]) -> None:
        self._entries = entries
        self.placed: list[weakref.ref[Any]] = []
        torch = sys.modules.get("torch")
        nothing = type("Nothing", (), {})
        self._heavy: tuple[type, type] = (torch.nn.Module, torch.Tensor) if torch else (nothing, nothing)
        # By address, as a metaclass may have a hash of its own; kept so that no address is used again.
        self._kinds: dict[int, Callable[[Any], None] | None] = {}
        self._kept: list[type] = []

    def run(self, tasks: Iterable[Any]) -> None:
        for obj in gc.get_objects():
            kind = type(obj)
            try:
                add = self._kinds[id(kind)]
            except KeyError:
                add = self._remember(kind)
            if add is not None:
                try:  # noqa: SIM105 - suppress() would cost more than the look
                    add(obj)
                except Exception:  # noqa: BLE001 - an odd object travels by value
                    pass
        named = itertools.chain(_named_by_the_app(), *map(_named_by_function, tasks))
        for obj in {id(obj): obj for obj in named}.values():
            with contextlib.suppress(Exception):
                if type(obj) is object:  # a sentinel: nothing but its identity
                    self._add(obj)
                elif id(obj) not in self._entries and _may_be_handle(type(obj)):
                    self._add_handle(obj)

    def _remember(self, kind: type) -> Callable[[Any], None] | None:
        try:
            add = self._adder(kind)
        except Exception:  # noqa: BLE001 - an odd class: its instances travel by value
            add = None
        self._kept.append(kind)
        self._kinds[id(kind)] = add
        return add

    def _adder(self, kind: type) -> Callable[[Any], None] | None:
        """What to do with objects of this type; None for most, which travel by value."""
        if issubclass(kind, types.FunctionType):
            return self._add_function
        if issubclass(kind, type):
            return self._add_class
        if issubclass(kind, self._heavy[1]):
            return self._add_tensor
        if issubclass(kind, (self._heavy[0], contextvars.ContextVar)):
            return self._add
        if is_by_reference(kind):
            return self._add
        if not _may_be_handle(kind):
            return None
        if any(_is_decorated(value) for cls in mro(kind) for value in attributes_of(cls).values()):
            return self._add_handle
        # Objects of the standard library are many, and none of them is a pipeline.
        if library_of(kind) in sys.stdlib_module_names:
            return None
        return functools.partial(self._add_if_holder, Layout(kind))

    def _add(self, obj: object) -> None:
        self._entries[id(obj)] = _Entry(obj)

    def _add_function(self, function: types.FunctionType) -> None:
        module = function.__module__
        if module == "__main__" or (
            "<" in function.__qualname__ and not (type(module) is str and module.startswith(_OWN_MODULES))
        ):
            self._entries[id(function)] = _Entry(function, function_state(function), _same_function)

    def _add_class(self, cls: type) -> None:
        if module_of(cls) == "__main__" or "<" in qualname_of(cls):
            self._add(cls)

    def _add_tensor(self, tensor: Any) -> None:
        if hasattr(type(tensor), "_plain_class"):
            self.placed.append(weakref.ref(tensor))
        state = tensor_state(tensor)
        if state is not None:
            self._entries[id(tensor)] = _Entry(tensor, state, _same_tensor)

    def _add_if_holder(self, layout: Layout, obj: object) -> None:
        for value in layout.values(obj):
            kind = type(value)  # never isinstance: a lazy proxy would run code to answer that
            if issubclass(kind, self._heavy) or (
                (kind is list or kind is tuple or kind is dict)
                and len(value) < 100
                and any(issubclass(type(v), self._heavy) for v in _elements(value))
            ):
                self._add_handle(obj)
                return

    def _add_handle(self, obj: object) -> None:
        heavy = self._heavy
        parts = Parts.of(obj, heavy)
        if parts is not None:
            self._entries[id(obj)] = _Entry(obj, (parts, heavy), _same_parts)


def _is_decorated(value: object) -> bool:
    function = value.__func__ if issubclass(type(value), (classmethod, staticmethod)) else value  # type: ignore[attr-defined]
    return type(function) is types.FunctionType and "__zerogpu__" in vars(function)


def _may_be_handle(kind: type) -> bool:
    """Whether instances of this type can be handles; False for values, code and the runtime's own."""
    if issubclass(kind, (type, types.ModuleType, BaseException)):
        return False
    library = library_of(kind)
    return library not in ("", OWN) and library not in _VALUE_MODULES and not _is_plain_data(kind)


def _is_plain_data(kind: type) -> bool:
    return issubclass(
        kind, (int, float, complex, str, bytes, list, tuple, dict, set, frozenset, types.FunctionType)
    )


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
    found.extend(getattr(function, "__defaults__", None) or ())
    found.extend((getattr(function, "__kwdefaults__", None) or {}).values())
    return found if bound is None else [*found, bound]


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(os.path.join(folder, "") for folder in folders)


def _named_by_the_app() -> list[Any]:
    return [value for _, value in app_globals()]


def app_globals() -> list[tuple[str, Any]]:
    """The globals of all modules that are not installed libraries, by name; without ``__spec__`` and such."""
    libraries = _library_folders()
    found: list[tuple[str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == OWN:
            continue
        if not issubclass(type(module), types.ModuleType):
            continue
        names = namespace_of(module)
        file = names.get("__file__")
        if name == "__main__" or (type(file) is str and not file.startswith(libraries)):
            found.extend((key, value) for key, value in names.items() if not _is_special(key))
    return found


def _is_special(name: object) -> bool:
    return type(name) is str and name.startswith("__") and name.endswith("__")
