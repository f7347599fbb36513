"""Settings: environment variables, `configure`, and what wins."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import zerogpu
from zerogpu import config
from zerogpu.config import Settings

GOOD: list[tuple[str, str, Any]] = [
    ("device", "cpu", "cpu"),
    ("device", " AUTO ", "auto"),
    ("device", "Sim", "sim"),
    ("device", "cuda", "cuda"),
    ("sim_devices", "4", 4),
    ("sim_memory", "2GiB", 2 * 2**30),
    ("sim_memory", "1000", 1000),
    ("slots", "3", 3),
    ("keep_warm", "0.5", 0.5),
    ("keep_warm", "0", 0.0),
    ("grace", "2", 2.0),
    ("max_queue", "7", 7),
    ("queue_timeout", "1e3", 1000.0),
    ("isolation", "Call", "call"),
    ("cache_dir", "/some/folder", Path("/some/folder")),
    ("cache_limit", "2 GiB", 2 * 2**30),
    ("arena_dir", "/some/folder", Path("/some/folder")),
]
BAD: list[tuple[str, str, str]] = [
    ("device", "tpu", "one of auto, cuda, cpu, sim"),
    ("sim_devices", "0", "a whole number of at least 1"),
    ("sim_memory", "much", "bytes, or a size"),
    ("sim_memory", "0", "bytes, or a size"),
    ("slots", "0", "a whole number of at least 1"),
    ("slots", "-1", "a whole number of at least 1"),
    ("slots", "1.5", "a whole number of at least 1"),
    ("slots", "", "a whole number of at least 1"),
    ("keep_warm", "-1", "a number of at least 0"),
    ("keep_warm", "nan", "a number of at least 0"),
    ("grace", "inf", "a number of at least 0"),
    ("grace", "soon", "a number of at least 0"),
    ("max_queue", "-1", "a whole number of at least 0"),
    ("queue_timeout", "-0.1", "a number of at least 0"),
    ("isolation", "thread", "one of worker, call"),
    ("cache_dir", " ", "the path of a folder"),
    ("arena_dir", "", "the path of a folder"),
]


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    config._configured.clear()
    monkeypatch.setattr(config, "_reported", set())
    for field in fields(Settings):
        monkeypatch.delenv(f"ZEROGPU_{field.name.upper()}", raising=False)


def test_the_defaults_hold_when_nothing_is_set() -> None:
    assert config.read() == Settings()
    assert config.read().keep_warm == 10
    assert config.read().grace == 5
    assert config.read().slots == 1


def test_every_setting_can_be_set() -> None:
    assert {name for name, _, _ in GOOD} == {field.name for field in fields(Settings)}
    assert set(config._PARSERS) == {field.name for field in fields(Settings)}


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_an_environment_variable_sets_it(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(f"ZEROGPU_{name.upper()}", text)
    assert getattr(config.read(), name) == value


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_configure_sets_it_and_wins(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    for _, other, _ in (good for good in GOOD if good[0] == name):
        monkeypatch.setenv(f"ZEROGPU_{name.upper()}", other)
        zerogpu.configure(**{name: text})
        assert getattr(config.read(), name) == value
        zerogpu.configure(**{name: value})
        assert getattr(config.read(), name) == value


@pytest.mark.parametrize(("name", "text", "expected"), BAD)
def test_a_bad_environment_variable_is_an_error_that_says_what_is_expected(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str
) -> None:
    variable = f"ZEROGPU_{name.upper()}"
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable}={text!r} is not valid: expected {expected}"):
        config.read()


@pytest.mark.parametrize(("name", "text", "expected"), BAD)
def test_a_bad_value_in_code_is_an_error_and_changes_nothing(name: str, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={text!r}.* is not valid: expected {expected}"):
        zerogpu.configure(**{"cache_dir": "/else", "grace": 3, name: text})
    assert config.read() == Settings()


@pytest.mark.parametrize("value", [None, [], object(), True])
def test_a_value_of_another_type_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match="slots"):
        zerogpu.configure(slots=value)
    with pytest.raises(ValueError, match="grace"):
        zerogpu.configure(grace=value)
    with pytest.raises(ValueError, match="cache_dir"):
        zerogpu.configure(cache_dir=value)


def test_an_unknown_name_in_code_names_the_near_one() -> None:
    with pytest.raises(TypeError, match="no setting 'keep_warn'; did you mean keep_warm"):
        zerogpu.configure(keep_warn=3)
    with pytest.raises(TypeError, match="no setting 'zebra'; there are: device, slots"):
        zerogpu.configure(zebra=3)


def test_an_unknown_variable_warns_once_and_names_the_near_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGPU_KEEPWARM", "3")
    with pytest.warns(UserWarning, match="ZEROGPU_KEEPWARM is not a setting.*did you mean ZEROGPU_KEEP_WARM"):
        assert config.read() == Settings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.read() == Settings()


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("ZEROGPU_CACHE_DIR", "~/graphs")
    assert config.read().cache_dir == Path("/home/somebody/graphs")


def test_a_bad_variable_is_an_error_of_going_live_and_of_a_startup_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZEROGPU_SLOTS", "many")
    with pytest.raises(ValueError, match="ZEROGPU_SLOTS='many'"):
        zerogpu.start()
    with pytest.raises(ValueError, match="ZEROGPU_SLOTS='many'"):
        zerogpu.gpu(lambda: 1)()
    monkeypatch.setenv("ZEROGPU_SLOTS", "2")
    zerogpu.start()
    assert zerogpu.status()["slots"] == 2
