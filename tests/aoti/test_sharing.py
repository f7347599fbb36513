"""Graphs in files: written here and read here, and what `spaces` and `aokit` write and read."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import shutil
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zerogpu
from zerogpu import (
    aoti_blocks_load,
    aoti_compile_and_save,
    aoti_load,
    aoti_load_call_source,
    aoti_load_from_package_dir,
    aoti_patch,
)
from zerogpu.aoti import foreign, stand_in, trial
from zerogpu.aoti.apply import remove_graphs

SIZE = 6


class Scaled(nn.Module):
    """Depends on sizes, strides, a number and whether a mask is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("shift", torch.randn(SIZE), persistent=False)

    def forward(self, x: torch.Tensor, factor: float = 2.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(x) * factor + self.shift
        return y if mask is None else y * mask


class Model(nn.Module):
    _repeated_blocks = ("Scaled",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * SIZE).reshape(4, SIZE)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Scaled().eval(), (torch.ones(4, SIZE),))


@pytest.fixture(scope="module")
def saved(exported: torch.export.ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "package"
    aoti_compile_and_save(folder, exported)
    aoti_compile_and_save(folder, exported, submodule="blocks.0")
    return folder


@pytest.fixture
def peers(saved: Path, tmp_path: Path) -> Path:
    """What the peers write: the same archive, and nothing beside it."""
    (tmp_path / "root").mkdir()
    shutil.copyfile(saved / "root" / "package.pt2", tmp_path / "root" / "package.pt2")
    return tmp_path


@pytest.fixture
def module() -> Scaled:
    return Scaled().eval()


def test_the_layout_is_the_peers_with_a_manifest_beside(saved: Path) -> None:
    files = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    assert files == [
        "root/manifest.json",
        "root/package.pt2",
        "submodules/blocks.0/manifest.json",
        "submodules/blocks.0/package.pt2",
    ]


def test_torchs_own_loader_reads_it(saved: Path, module: Scaled, x: torch.Tensor) -> None:
    loaded = torch._inductor.aoti_load_package(str(saved / "root" / "package.pt2"))
    weights = {**module.state_dict(), "shift": module.shift}
    loaded.load_constants(weights, check_full_update=True, user_managed=True)
    torch.testing.assert_close(loaded(x), module(x))


def test_a_module_is_served_from_a_folder_under_its_guard(
    saved: Path, module: Scaled, x: torch.Tensor
) -> None:
    want = module(x), module(torch.ones(9, SIZE)), module(x, 3.0)
    (handle,) = aoti_patch(module, saved / "root")
    torch.testing.assert_close(module(x), want[0])
    assert handle.last == "graph"
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        torch.testing.assert_close(module(torch.ones(9, SIZE)), want[1])
    with pytest.warns(RuntimeWarning, match="factor"):
        torch.testing.assert_close(module(x, 3.0), want[2])
    assert handle.last == "eager"


class Subtracting(Scaled):
    def forward(self, x: torch.Tensor, factor: float = 2.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x) * factor - self.shift


def test_a_model_that_computes_something_else_with_the_same_weights_stays_eager(
    saved: Path, x: torch.Tensor
) -> None:
    other = Subtracting().eval()
    want = other(x)
    (handle,) = aoti_patch(other, saved / "root")
    with pytest.warns(RuntimeWarning, match="computes something else"):
        torch.testing.assert_close(other(x), want)
    torch.testing.assert_close(other(x + 1), Subtracting.forward(other, x + 1))
    assert handle.last == "eager"


def test_a_folder_serves_the_module_and_its_parts(saved: Path, tmp_path: Path, x: torch.Tensor) -> None:
    shutil.copytree(saved / "submodules", tmp_path / "submodules")
    model = Model().eval()
    want = model(x)
    (handle,) = aoti_load_from_package_dir(model, tmp_path)
    torch.testing.assert_close(model(x), want)
    assert handle.counters == {"graph": 1}


def test_of_a_list_every_item_is_served(saved: Path, tmp_path: Path, x: torch.Tensor) -> None:
    shutil.copytree(saved / "root", tmp_path / "submodules" / "blocks")
    model = Model().eval()
    want = model(x)
    handles = aoti_load_from_package_dir(model, tmp_path)
    torch.testing.assert_close(model(x), want)
    assert [handle.counters["graph"] for handle in handles] == [1, 1, 1]


def test_an_empty_folder_is_an_error(tmp_path: Path, module: Scaled) -> None:
    with pytest.raises(FileNotFoundError, match=r"root/package\.pt2"):
        aoti_load_from_package_dir(module, tmp_path)


def test_a_repository_may_be_a_local_folder(
    saved: Path, module: Scaled, x: torch.Tensor, tmp_path: Path
) -> None:
    shutil.copytree(saved / "root", tmp_path / "package" / "root")
    want = module(x)
    (handle,) = aoti_load(module, str(tmp_path))
    torch.testing.assert_close(module(x), want)
    assert handle.last == "graph"
    seen = []
    aoti_load(module, str(tmp_path), aoti_loader=lambda *arguments: seen.append(arguments))
    assert seen == [(module, str(tmp_path / "package"))]


@pytest.mark.parametrize("variant", [None, "small"])
def test_blocks_are_served_by_the_graph_of_their_class(
    saved: Path, tmp_path: Path, x: torch.Tensor, variant: str | None
) -> None:
    shutil.copytree(saved / "root", tmp_path / ("Scaled.small" if variant else "Scaled"))
    (tmp_path / ("config.small.json" if variant else "config.json")).write_text('{"kernels": null}')
    model = Model().eval()
    want = model(x)
    handles = aoti_blocks_load(model, str(tmp_path), variant)
    torch.testing.assert_close(model(x), want)
    assert [handle.last for handle in handles] == ["graph"] * 3


def test_blocks_that_are_not_named_or_not_there_are_errors(tmp_path: Path, module: Scaled) -> None:
    with pytest.raises(TypeError, match="_repeated_blocks"):
        aoti_blocks_load(module, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"Scaled/package\.pt2"):
        aoti_blocks_load(Model(), str(tmp_path))


def loader(module: nn.Module, folder: str) -> None:
    aoti_load_from_package_dir(module, folder)


def test_the_source_of_a_call_makes_that_call(saved: Path, tmp_path: Path, x: torch.Tensor) -> None:
    shutil.copytree(saved / "root", tmp_path / "package" / "root")
    assert aoti_load_call_source("pipe.unet", "me/graphs", "v1") == (
        "zerogpu.aoti_load(\n    module=pipe.unet,\n    repo_id='me/graphs',\n    revision='v1',\n)"
    )
    source = aoti_load_call_source("module", str(tmp_path), aoti_loader=loader)
    assert source.startswith(inspect.getsource(loader))
    module = Scaled().eval()
    names = {"module": module, "zerogpu": zerogpu, "nn": nn}
    exec(source, {**names, "aoti_load_from_package_dir": aoti_load_from_package_dir})
    assert "forward" in vars(module)


@pytest.mark.parametrize("damage", ["library", "truncated", "manifest", "key", "torch"])
def test_a_damaged_package_or_one_of_another_torch_leaves_the_module_eager(
    saved: Path, tmp_path: Path, module: Scaled, x: torch.Tensor, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROGPU_CACHE_DIR", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(saved / "root", tmp_path / "root"))
    archive, manifest = folder / "package.pt2", folder / "manifest.json"
    archive.chmod(0o644)
    manifest.chmod(0o644)
    if damage == "library":
        with (
            zipfile.ZipFile(saved / "root" / "package.pt2") as before,
            zipfile.ZipFile(archive, "w") as after,
        ):
            for name in before.namelist():
                content = before.read(name)
                after.writestr(name, content[:-1] + b"?" if name.endswith(".so") else content)
    elif damage == "truncated":
        archive.write_bytes(archive.read_bytes()[:1000])
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        data = json.loads(manifest.read_text())
        data.update(
            {"key": {"key": "../../escape"}, "torch": {"machine": {**data["machine"], "torch": "1.0"}}}[
                damage
            ]
        )
        manifest.write_text(json.dumps(data))
    want = module(x)
    with pytest.warns(RuntimeWarning, match="Scaled stays eager"):
        assert aoti_patch(module, folder) == []
    assert torch.equal(module(x), want)


# -- packages that say nothing about themselves ----------------------------------------------------------


def test_a_foreign_package_serves_what_agrees_with_eager(
    peers: Path, module: Scaled, x: torch.Tensor
) -> None:
    calls = [(x,), (x + 1,), (x, 2.0)]
    want = [module(*call) for call in calls]
    (handle,) = aoti_load_from_package_dir(module, peers)
    for call, expected in zip(calls, want, strict=True):
        torch.testing.assert_close(module(*call), expected)
        assert handle.last == "graph"
    assert handle.counters["compared"] == 2  # the third is another form: it names a number


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (torch.ones(9, SIZE),),
        lambda x: (torch.ones(2, SIZE),),
        lambda x: (torch.randn(SIZE, 4).T,),
        lambda x: (x, 3.0),
        lambda x: (x, 2.0, torch.full((SIZE,), 0.5)),
        lambda x: (x.unsqueeze(0),),
    ],
    ids=["more rows", "fewer rows", "strides", "number", "mask", "dimensions"],
)
def test_a_foreign_package_never_serves_what_it_was_not_compiled_for(
    peers: Path, module: Scaled, x: torch.Tensor, call
) -> None:
    arguments = call(x)
    want = module(*arguments)
    (handle,) = aoti_load_from_package_dir(module, peers)
    module(x)
    for _ in range(2):
        torch.testing.assert_close(module(*arguments), want)
        assert handle.last == "eager"


def test_a_foreign_package_follows_the_modules_weights(peers: Path, module: Scaled, x: torch.Tensor) -> None:
    (handle,) = aoti_load_from_package_dir(module, peers)
    module(x)
    module.linear.weight = nn.Parameter(torch.zeros(SIZE, SIZE))
    torch.testing.assert_close(module(x), (module.linear.bias * 2 + module.shift).expand(4, SIZE))
    assert handle.last == "graph"
    module.linear = nn.Linear(SIZE, SIZE, bias=False)
    torch.testing.assert_close(module(x), module.linear(x) * 2 + module.shift)
    assert handle.last == "eager"


def test_a_foreign_package_with_other_weights_stays_eager(peers: Path, x: torch.Tensor) -> None:
    other = nn.Linear(SIZE, SIZE)
    aoti_load_from_package_dir(other, peers)
    want = nn.functional.linear(x, other.weight, other.bias)
    with pytest.warns(RuntimeWarning, match="Linear.forward runs eagerly.*package.pt2"):
        torch.testing.assert_close(other(x), want)


def test_a_foreign_package_that_crashes_costs_nothing(
    peers: Path, module: Scaled, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZEROGPU_CACHE_DIR", str(tmp_path / "cache"))

    def crash(self: foreign._Bound, inputs: list[torch.Tensor]) -> None:
        ctypes.string_at(0)

    (handle,) = aoti_load_from_package_dir(module, peers)
    monkeypatch.setattr(foreign._Bound, "run", crash)
    with pytest.warns(RuntimeWarning, match="SIGSEGV"):
        module(x)
    assert handle.last == "eager"


def test_something_else_is_no_package(tmp_path: Path, module: Scaled, x: torch.Tensor) -> None:
    for content in (b"", b"nothing of the kind"):
        (tmp_path / "package.pt2").write_bytes(content)
        with pytest.warns(RuntimeWarning, match="stays eager"):
            assert aoti_patch(module, tmp_path) == []
    with zipfile.ZipFile(tmp_path / "package.pt2", "w") as empty:
        empty.writestr("readme", "no graph")
    with pytest.warns(RuntimeWarning, match="holds no compiled graph"):
        aoti_patch(module, tmp_path)


def test_a_child_of_fork_binds_a_foreign_package_anew(peers: Path, module: Scaled, x: torch.Tensor) -> None:
    (handle,) = aoti_load_from_package_dir(module, peers)
    module(x)
    inherited = vars(module)["forward"]._bound

    def work() -> bool:
        module(x)
        own = vars(module)["forward"]._bound
        return own is not inherited and inherited in stand_in._inherited and handle.last == "graph"

    assert trial.attempt(work) is True
    assert vars(module)["forward"]._bound is inherited


def test_applying_graphs_anew_removes_foreign_ones_too(peers: Path, module: Scaled) -> None:
    aoti_load_from_package_dir(module, peers)
    remove_graphs(module)
    assert "forward" not in vars(module)


def test_removing_puts_the_eager_method_back(peers: Path, module: Scaled) -> None:
    (handle,) = aoti_load_from_package_dir(module, peers)
    handle.remove()
    handle.remove()
    assert "forward" not in vars(module)


class TestTrial:
    def test_its_result_is_that_of_the_work(self) -> None:
        assert trial.attempt(lambda: True) is True
        assert trial.attempt(lambda: False) is False

    def test_what_the_work_raises_is_no_success(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert trial.attempt(lambda: 1 / 0) is False

    def test_a_crash_is_named(self) -> None:
        with pytest.raises(trial.Crashed, match="SIGKILL"):
            trial.attempt(lambda: os.kill(os.getpid(), signal.SIGKILL))

    def test_what_hangs_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trial, "_PATIENCE", 0.3)
        with pytest.raises(trial.Crashed, match="did not end"):
            trial.attempt(lambda: signal.pause() is None)

    def test_parallel_operations_work_in_it(self) -> None:
        torch.ones(500, 500) @ torch.ones(500, 500)
        assert trial.attempt(lambda: bool((torch.ones(500, 500) @ torch.ones(500, 500)).eq(500).all()))
