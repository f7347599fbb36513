"""Garbage goes before a snapshot; a second snapshot soon after does not look for it everywhere again."""

from __future__ import annotations

import gc
import weakref

import pytest

from zerogpu.process.garbage import collect_garbage


class Knot:
    """An object that only a full collection frees: part of a cycle, and old."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> None:
    gc.unfreeze()
    collect_garbage(thorough=True)


def old_knot() -> weakref.ref[Knot]:
    knot = Knot()
    gc.collect()  # moves it to the oldest generation
    return weakref.ref(knot)


def test_a_thorough_collection_frees_old_garbage() -> None:
    knot = old_knot()
    collect_garbage(thorough=True)
    assert knot() is None


def test_a_quick_collection_frees_young_garbage_only() -> None:
    young, old = weakref.ref(Knot()), old_knot()
    collect_garbage(thorough=True)
    young, old = weakref.ref(Knot()), old_knot()
    collect_garbage(thorough=False)
    assert young() is None
    assert old() is not None
    collect_garbage(thorough=True)
    assert old() is None


def test_a_collection_is_full_again_after_many_new_objects() -> None:
    knot = old_knot()
    kept = [[] for _ in range(len(gc.get_objects()) // 10)]
    collect_garbage(thorough=False)
    assert knot() is None
    assert kept


def test_a_collection_is_full_where_python_does_not_count() -> None:
    knot = old_knot()
    gc.disable()
    try:
        collect_garbage(thorough=False)
    finally:
        gc.enable()
    assert knot() is None
