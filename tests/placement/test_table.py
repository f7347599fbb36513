"""Every form that names "cuda" is accepted, on a host with devices and on one without."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zerogpu.placement.placed import is_placed

from . import layouts, table
from .table import Row

ROWS = [*table.ROWS, *layouts.ROWS]

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


@rows
@pytest.mark.usefixtures("sim")
def test_with_devices_a_result_is_where_it_would_be(row: Row) -> None:
    result = row.make()
    assert str(result.device) == row.device
    on_device = row.device != "cpu"
    assert is_placed(result) is on_device
    assert (result.is_cuda, result.is_cpu) == (on_device, not on_device)
    assert result.get_device() == (int(row.device[-1]) if on_device else -1)
    assert (row.device in repr(result)) is on_device
    assert repr(result).startswith(("tensor(", "Parameter containing:\ntensor("))


@rows
@pytest.mark.usefixtures("cpu")
def test_without_devices_a_result_is_an_ordinary_tensor(row: Row) -> None:
    result = row.make()
    assert type(result) in (torch.Tensor, torch.nn.Parameter)
    assert str(result.device) == "cpu"


@rows
def test_both_compute_the_same(row: Row, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("cpu")
    expected = plain(row.make())
    request.getfixturevalue("sim")
    result = row.make()
    assert result.dtype == expected.dtype
    assert result.stride() == expected.stride()
    assert torch.equal(plain(result), expected)


@pytest.mark.usefixtures("sim")
def test_it_is_the_same_in_any_thread() -> None:
    with ThreadPoolExecutor(1) as executor:
        for row in ROWS:
            assert str(executor.submit(row.make).result().device) == row.device
    threading.Thread(target=lambda: None).start()
