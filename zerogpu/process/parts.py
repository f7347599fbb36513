"""What an object's state is made of: for `snapshot`, which has to see whether an object changed.

Nothing here runs code of the objects it looks at: types are read through `type`'s own descriptors.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import io
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["BY_REFERENCE", "OWN", "Layout", "Parts", "function_state", "identical", "moved", "tensor_state"]

BY_REFERENCE = "__zerogpu_by_reference__"
"""A class with this attribute set to True has instances that never change after they are made."""

_MAX_NODES = 20_000
"""A handle with more parts than this travels by value: comparing it would cost more than sending it."""

OWN = __name__.partition(".")[0]
"""This package. What it keeps of earlier snapshots must not become part of the next: each would be larger."""


_moved: dict[int, int] = {}


def moved(addresses: dict[int, int]) -> None:
    """Tensors have other memory than at the snapshot, with the same content: new addresses to old ones."""
    _moved.update(addresses)


def tensor_state(tensor: Any) -> tuple[int, ...] | None:
    """What changes when a tensor is written to or given other memory; None if that cannot be told."""
    try:
        if hasattr(type(tensor), "__tensor_flatten__"):  # it stands for others, such as torchao's
            states = [tensor_state(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
            return None if None in states else tuple(itertools.chain(*states))  # type: ignore[arg-type]
        address = tensor.data_ptr()
        return (tensor._version, _moved.get(address, address))
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return None  # inference tensors have no version, fakes no memory, those of lazy modules neither yet


def function_state(function: types.FunctionType) -> tuple[Any, ...]:
    """What differs by identity when a function's code, defaults or variables were bound anew."""
    state: list[Any] = [function.__code__, function.__defaults__]
    if function.__kwdefaults__:
        state.extend(itertools.chain.from_iterable(function.__kwdefaults__.items()))
    for cell in function.__closure__ or ():
        try:
            state.append(weakref.ref(cell.cell_contents))  # the same one for the same object
        except TypeError:
            state.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            state.append(tensor_state)
    return tuple(state)


def identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class Parts:
    """The parts of a handle, flattened: equal lists of identical objects mean an unchanged handle.

    The parts are kept alive, so that a new object never takes the address of a remembered one.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._states: list[Any] = []
        self._seen: set[int] = set()
        self._layouts: dict[int, Layout] = {}

    @classmethod
    def of(cls, obj: object, heavy: tuple[type, type]) -> Parts | None:
        """The parts of `obj`; None when a part could change unseen or there are too many."""
        parts = cls()
        return parts if parts._add(obj, heavy) else None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Parts)
            and self._states == other._states
            and identical(self._objects, other._objects)
        )

    __hash__ = None  # type: ignore[assignment]

    def _add(self, obj: object, heavy: tuple[type, type]) -> bool:
        self._objects.append(obj)
        if len(self._objects) > _MAX_NODES:
            return False
        kind = type(obj)
        if kind is str or kind is int or kind is float or kind is bool or obj is None:
            return True
        if issubclass(kind, heavy):
            if issubclass(kind, heavy[1]):
                self._states.append(tensor_state(obj))
                return self._states[-1] is not None
            return True
        if id(obj) in self._seen:
            return True
        self._seen.add(id(obj))
        if kind is types.FunctionType:
            self._objects.extend(function_state(obj))  # type: ignore[arg-type]
            return True
        layout = self._layouts.get(id(kind))
        if layout is None:
            layout = self._layouts[id(kind)] = Layout(kind)
        if layout.unseen:
            return False
        values = layout.parts(obj)
        self._states.append(len(values))
        return all(self._add(value, heavy) for value in values)


_LEAVES: tuple[type, ...] = (
    *(int, float, complex, str, bytes, bool, type(None), type(...), type(NotImplemented), range, slice),
    *(type, types.ModuleType, enum.Enum, types.CodeType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.GenericAlias, type(functools.lru_cache(len))),
)
"""Types whose instances do not change, but for the attributes of subclasses."""

_FIXED = frozenset({"datetime", "decimal", "fractions", "operator", "pathlib", "re", "uuid", "zoneinfo"})
_LOCAL = frozenset({"_ctypes", "_thread", "asyncio", "ctypes", "io", "multiprocessing", "queue"})
_LOCAL |= {"_asyncio", "_io", "_queue", "_socket", "_sqlite3", "socket", "sqlite3", "threading"}
_ENGINES = frozenset({"ctranslate2", "llama_cpp", "onnxruntime", "sentencepiece", "tiktoken", "tokenizers"})
"""Libraries whose objects are immutable values; belong to one process; are loaded once from a file."""

_TORCH_VALUES = frozenset({"device", "dtype", "finfo", "iinfo", "layout", "memory_format", "qscheme"})
_TORCH_VALUES |= {"Event", "ScriptFunction", "Size", "Stream"}
"""Extension types of torch that are values, code or belong to one process."""

_UNSEEN = frozenset({"PIL", "_random", "array", "itertools", "numpy", "pandas", "random", "scipy"})
"""Libraries whose objects change in place without a trace: what holds one travels by value."""

_CONTAINERS: tuple[Any, ...] = (
    *(list, tuple, set, frozenset, collections.OrderedDict, dict, collections.deque),
)


_KNOWN = (*_LEAVES, *_CONTAINERS, functools.partial)


class Layout:
    """Where instances of a type keep their state, and whether some of it cannot be seen from Python."""

    __slots__ = ("_base", "_dict", "_members", "unseen")

    def __init__(self, kind: type) -> None:
        lines = [attributes_of(cls) for cls in mro(kind)]
        found = next((line["__dict__"] for line in lines if "__dict__" in line), None)
        self._dict = found if type(found) is types.GetSetDescriptorType else None
        self._members = [
            value
            for line in lines
            for name, value in line.items()
            if type(value) is types.MemberDescriptorType and not name.endswith("offset__")
        ]
        self._base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        self.unseen = False
        if issubclass(kind, (types.MethodType, types.BuiltinFunctionType)):
            return
        libraries = {library_of(cls) for cls in mro(kind)}
        fixed = library_of(kind) in _FIXED | _LOCAL | {OWN} or is_by_reference(kind)
        if issubclass(kind, (io.BytesIO, io.StringIO, bytearray, memoryview)) or libraries & _UNSEEN:
            self.unseen = True
        elif fixed or issubclass(kind, (type, types.ModuleType)) or any(kind is leaf for leaf in _LEAVES):
            self._dict, self._members = None, []
        else:
            self.unseen = _is_opaque(kind) and not libraries & (_LOCAL | _ENGINES) and _can_be_pickled(kind)

    def values(self, obj: Any) -> list[Any]:
        """The values of the attributes and slots of `obj`, without running code of its class."""
        found: list[Any] = []
        if self._dict is not None:
            found.extend(self._dict.__get__(obj).values())
        for member in self._members:
            try:
                found.append(member.__get__(obj))
            except AttributeError:  # a slot without a value
                found.append(...)
        return found

    def parts(self, obj: Any) -> list[Any]:
        """What a change of `obj` would show in: names and values of attributes, and elements."""
        kind = type(obj)
        if kind is types.MethodType:
            return [obj.__func__, obj.__self__]
        if kind is types.BuiltinFunctionType:
            return [obj.__self__]
        found = self.values(obj)
        if self._dict is not None:
            found.extend(self._dict.__get__(obj))
        if self._base is not None:
            found.extend(self._base.__iter__(obj))
            if issubclass(kind, dict):
                found.extend(dict.values(obj))
        return found


def _is_opaque(kind: type) -> bool:
    """Whether instances have memory beyond their attributes and slots: the state of an extension type."""
    cls: type | None = kind
    while cls is not None and cls is not object:
        if any(cls is known for known in _KNOWN):
            return False
        if library_of(cls) == "torch" and qualname_of(cls) in _TORCH_VALUES:
            return False
        base = _base_of(cls)
        line = attributes_of(cls)
        slots = sum(type(value) is types.MemberDescriptorType for value in line.values())
        slots += ("__dict__" in line) + ("__weakref__" in line)
        if _size_of(cls) > (_size_of(base) if base else 0) + slots * _POINTER:
            return True
        cls = base
    return False


_POINTER = tuple.__itemsize__


def _can_be_pickled(kind: type) -> bool:
    """Whether pickle has a way for instances of an extension type: without one, it refuses them."""
    hooks = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
    lines = [attributes_of(cls) for cls in mro(kind) if cls is not object]
    return kind in copyreg.dispatch_table or any(hook in line for line in lines for hook in hooks)


_of_type: dict[str, Any] = dict(vars(type))
mro: Callable[[type], tuple[type, ...]] = _of_type["__mro__"].__get__
attributes_of: Callable[[type], types.MappingProxyType[str, Any]] = _of_type["__dict__"].__get__
_base_of: Callable[[type], type | None] = _of_type["__base__"].__get__
_size_of: Callable[[type], int] = _of_type["__basicsize__"].__get__
qualname_of: Callable[[type], str] = _of_type["__qualname__"].__get__
namespace_of: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
module_of: Callable[[type], object] = _of_type["__module__"].__get__


def is_by_reference(kind: type) -> bool:
    return (
        next((line[BY_REFERENCE] for line in map(attributes_of, mro(kind)) if BY_REFERENCE in line), 0)
        is True
    )


def library_of(kind: type) -> str:
    """The top-level module of a class; empty where it does not say (proxies compute it per instance)."""
    module = module_of(kind)
    return module.partition(".")[0] if type(module) is str else ""
