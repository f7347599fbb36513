"""Mapping: the few calls of the C library that Python's `mmap` does not offer, with errors as OSError.

Python cannot map at a fixed address, and its `mmap` objects keep a descriptor of their own in every fork.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy

__all__ = [
    "PAGE",
    "give_back_freed_memory",
    "map_over",
    "map_private",
    "map_shared",
    "pages",
    "unmap",
    "view",
    "written",
]

PAGE = mmap.PAGESIZE

_MAP_FIXED = 0x10  # the same on every Linux architecture that torch runs on
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61  # Documentation/admin-guide/mm/pagemap.rst


def _library() -> Any:
    # PyDLL keeps the GIL, so that no Python code runs between a look at memory and its replacement.
    library = ctypes.PyDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


_libc: Any = _library() if os.name == "posix" else None


def pages(size: int) -> int:
    """`size` in bytes, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def map_private(fd: int, size: int) -> int:
    """Map the first `size` bytes of a file, copy-on-write; returns the address.

    Raises:
        OSError: no address space, or too many mappings.
    """
    return _map(None, fd, 0, size, mmap.MAP_PRIVATE)


def map_shared(fd: int, offset: int, size: int) -> int:
    """Map a part of a file to be read, its own pages and no copies of them; returns the address.

    Raises:
        OSError: no address space, or too many mappings.
    """
    return _map(None, fd, offset, size, mmap.MAP_SHARED, mmap.PROT_READ)


def map_over(address: int, fd: int, offset: int, size: int) -> None:
    """Replace what is mapped at `address` by a part of a file, copy-on-write.

    Raises:
        OSError: too many mappings; what was there is then still there.
    """
    _map(address, fd, offset, size, mmap.MAP_PRIVATE | _MAP_FIXED)


def _map(
    address: int | None,
    fd: int,
    offset: int,
    size: int,
    flags: int,
    access: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> int:
    found = _libc.mmap(address, size, access, flags | _MAP_NORESERVE, fd, offset)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def unmap(address: int, size: int) -> None:
    """Give a mapping's address range back.

    Raises:
        OSError: the range is in the middle of a mapping and there are too many to split it.
    """
    if _libc.munmap(address, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def view(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """The bytes at `address` as a buffer; it does not keep them alive."""
    return (ctypes.c_char * size).from_address(address)


def written(address: int, size: int) -> bool:
    """Whether a page of this private file mapping was written to, and so is no longer the file's.

    True where the system does not tell. Costs 8 bytes read per page, whether or not it is in memory.
    """
    first, count = address // PAGE, -(-size // PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            entries = numpy.frombuffer(file.read(8 * count), numpy.uint64)
    except OSError:
        return True
    mapped = (entries & numpy.uint64(_PRESENT | _SWAPPED)) != 0
    own = (entries & numpy.uint64(_OF_FILE)) == 0
    return len(entries) != count or bool((mapped & own).any())


def give_back_freed_memory() -> None:
    """Return to the system what was freed, where the C library can: glibc keeps blocks inside its heap."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
