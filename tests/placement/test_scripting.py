"""Scripted modules: loaded to a device, called without tensors, copied."""

from __future__ import annotations

import copy
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zerogpu.placement.placed import is_placed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
usefixtures = pytest.mark.usefixtures


class Doubling(nn.Module):
    """Has a parameter, a buffer in a part, and a method that gets no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2)

    def forward(self) -> torch.Tensor:
        return self.weight * 2


ONES = torch.ones(2)


class Constant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + ONES


def archive(module: Any, device: str = "cpu") -> io.BytesIO:
    """A saved module; `device` is where the tensors were on the host that saved it."""
    file, made = io.BytesIO(), io.BytesIO()
    torch.jit.save(module, file)
    old, new = (b"X" + len(text).to_bytes(4, "little") + text.encode() for text in ("cpu", device))
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, content.replace(old, new) if name.endswith(".pkl") else content)
    made.seek(0)
    return made


def scripted() -> Any:
    return torch.jit.script(Doubling())


def places(module: Any) -> set[str]:
    return {str(tensor.device) for tensor in (*module.parameters(), *module.buffers())}


@usefixtures("sim")
@pytest.mark.parametrize("where", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_a_module_is_loaded_to_a_device(where: Any) -> None:
    module = torch.jit.load(archive(scripted()), map_location=where)
    expected = "cuda:1" if where == "cuda:1" else "cuda:0"
    assert places(module) == {expected}
    assert str(module().device) == expected
    assert torch.equal(module().cpu(), torch.full((2,), 2.0))


@usefixtures("sim")
def test_a_file_is_loaded_to_a_device(tmp_path: Path) -> None:
    scripted().save(str(tmp_path / "module.pt"))
    assert places(torch.jit.load(tmp_path / "module.pt", "cuda")) == {"cuda:0"}
    assert places(torch.load(tmp_path / "module.pt", "cuda", weights_only=False)) == {"cuda:0"}
    assert places(torch.jit.load(tmp_path / "module.pt")) == {"cpu"}
    (tmp_path / "other.pt").write_bytes(b"no archive")
    with pytest.raises(RuntimeError, match="archive"):
        torch.jit.load(tmp_path / "other.pt")


@usefixtures("sim")
def test_a_module_is_loaded_where_it_was_saved() -> None:
    assert places(torch.jit.load(archive(scripted(), "cuda:1"))) == {"cuda:1"}
    assert places(torch.jit.load(archive(scripted()))) == {"cpu"}
    assert places(torch.jit.load(archive(scripted(), "cuda:0"), map_location="cpu")) == {"cpu"}


@usefixtures("sim")
def test_constants_of_a_device_are_read() -> None:
    traced = torch.jit.trace(Constant(), torch.ones(2))
    module = torch.jit.load(archive(traced, "cuda:0"))
    assert str(module(torch.ones(2, device="cuda")).device) == "cuda:0"


@usefixtures("cpu")
def test_without_devices_a_module_is_loaded_to_the_cpu() -> None:
    for module in (
        torch.jit.load(archive(scripted()), map_location="cuda"),
        torch.jit.load(archive(scripted(), "cuda:0")),
    ):
        assert places(module) == {"cpu"}
        assert not is_placed(module())


@usefixtures("sim")
def test_a_result_without_tensors_to_start_from_is_where_the_module_is() -> None:
    assert str(scripted().cuda()().device) == "cuda:0"
    assert str(scripted()().device) == "cpu"
    assert str(scripted().cuda().cpu()().device) == "cpu"
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2))).cuda()
    assert str(module(torch.ones(2, device="cuda")).device) == "cuda:0"


@usefixtures("sim")
def test_a_copy_is_where_the_module_is() -> None:
    module = scripted().cuda()
    assert places(copy.deepcopy(module)) == {"cuda:0"}
    assert places(copy.deepcopy(scripted())) == {"cpu"}
