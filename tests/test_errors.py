"""The errors: one sentence each, a title for the page, and all of them public."""

from __future__ import annotations

import inspect
import pickle

import pytest

import zerogpu
from zerogpu import errors
from zerogpu.errors import GPUCancelled, ZeroGPUError

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]
ERRORS = [cls for cls in CLASSES if cls is not GPUCancelled]


def test_all_of_them_are_public() -> None:
    assert {cls.__name__ for cls in CLASSES} == set(errors.__all__)
    for cls in CLASSES:
        assert getattr(zerogpu, cls.__name__) is cls
        assert cls.__name__ in zerogpu.__all__


@pytest.mark.parametrize("cls", CLASSES)
def test_each_says_in_one_sentence_when_it_is_raised(cls: type[BaseException]) -> None:
    first = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    assert first.startswith("Raised ")
    assert first.endswith(".")
    assert ". " not in first


@pytest.mark.parametrize("cls", ERRORS)
def test_each_is_a_zerogpu_error_with_a_title_of_its_own(cls: type[ZeroGPUError]) -> None:
    assert issubclass(cls, ZeroGPUError)
    assert "title" in vars(cls)
    assert [other.title for other in ERRORS].count(cls.title) == 1


def test_a_cancel_cannot_be_swallowed_by_except_exception() -> None:
    assert issubclass(GPUCancelled, BaseException)
    assert not issubclass(GPUCancelled, Exception)
    assert not issubclass(GPUCancelled, ZeroGPUError)


@pytest.mark.parametrize("cls", CLASSES)
def test_each_can_travel_between_processes(cls: type[BaseException]) -> None:
    again = pickle.loads(pickle.dumps(cls("why", 3)))
    assert type(again) is cls
    assert again.args == ("why", 3)


def test_an_error_that_python_has_a_class_for_is_of_that_class_too() -> None:
    assert issubclass(errors.NotPicklableError, TypeError)
    assert issubclass(errors.CUDAInMainError, RuntimeError)
