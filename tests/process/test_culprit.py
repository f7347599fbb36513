"""The path to a part that cannot travel is found, and the search always ends."""

from __future__ import annotations

import threading

from zerogpu.process.culprit import find_culprit


def holds_lock(value: object) -> bool:
    """Whether a lock is somewhere in `value`; stands for a failing pickler."""
    seen: set[int] = set()

    def search(part: object) -> bool:
        if id(part) in seen:
            return False
        seen.add(id(part))
        if type(part) is type(threading.Lock()):
            return True
        if isinstance(part, dict):
            return any(map(search, part.values()))
        if isinstance(part, (list, tuple, set)):
            return any(map(search, part))
        if getattr(part, "__closure__", None):
            return any(search(cell.cell_contents) for cell in part.__closure__ if cell_has_value(cell))
        return any(map(search, getattr(part, "__dict__", {}).values()))

    return search(value)


def cell_has_value(cell: object) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class Thing:
    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


def test_the_path_goes_through_dictionaries_sequences_attributes_and_closures() -> None:
    lock = threading.Lock()
    value = {"a": [1, Thing(handler=lambda: lock)]}
    path, part = find_culprit(value, holds_lock)
    assert path == " → ['a'] → [1] → .handler → variable 'lock'"
    assert part is lock


def test_the_value_itself_has_no_path() -> None:
    lock = threading.Lock()
    assert find_culprit(lock, holds_lock) == ("", lock)


def test_a_value_none_of_whose_parts_fails_is_itself_the_culprit() -> None:
    thing = Thing(a=1)
    assert find_culprit(thing, lambda part: part is thing) == ("", thing)


def test_a_cycle_ends_the_search() -> None:
    first, second = Thing(), Thing()
    first.other, second.other = second, first
    path, _ = find_culprit(first, lambda part: isinstance(part, Thing))
    assert path == " → .other"


def test_a_variable_without_a_value_is_passed_over() -> None:
    def outer() -> object:
        def inner() -> object:
            return later, lock

        lock = threading.Lock()
        if not lock:
            later = 1
        return inner

    assert find_culprit(outer(), holds_lock)[0] == " → variable 'lock'"


def test_a_part_in_a_set_is_named_by_number() -> None:
    thing = Thing(lock=threading.Lock())
    assert find_culprit({thing}, holds_lock)[0] == " → [0] → .lock"
