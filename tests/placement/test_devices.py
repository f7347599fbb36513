"""Which kind of device is in force, which devices there are, and who may find them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from zerogpu.config import Settings
from zerogpu.errors import CUDAInMainError, ZeroGPUError
from zerogpu.placement import blame, devices, nvml, visible
from zerogpu.placement.properties import FIELDS, DeviceProperties, architectures, properties

from .nvml import GIB, Card, use

A, B, C = Card("GPU-aaaa-1"), Card("GPU-bbbb-2", total=80 * GIB), Card("GPU-bbcc-3")
DIVIDED = Card("GPU-dddd-4", instances=["MIG-1111-x", "MIG-2222-x"])


class TestTheKind:
    def test_auto_is_cuda_where_the_driver_lists_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, A)
        assert devices.choose(Settings()) == "cuda"

    @pytest.mark.parametrize("fails", ["Driver Not Loaded", ""])
    def test_auto_is_cpu_without_a_device(self, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
        use(monkeypatch, fails=fails)
        assert devices.choose(Settings()) == "cpu"

    def test_auto_is_cpu_where_torch_is_not_built_for_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, A)
        monkeypatch.setattr(torch.version, "cuda", None)
        assert devices.choose(Settings()) == "cpu"

    def test_auto_is_cpu_without_the_management_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, A)
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert devices.choose(Settings()) == "cpu"

    def test_cpu_and_sim_ask_no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, A)
        assert devices.choose(Settings(device="cpu")) == "cpu"
        devices.forget()
        assert devices.choose(Settings(device="sim")) == "sim"

    @pytest.mark.parametrize(
        ("break_", "missing"),
        [
            (lambda patch: patch.setattr(torch.version, "cuda", None), "build without CUDA"),
            (lambda patch: patch.setitem(sys.modules, "pynvml", None), "nvidia-ml-py"),
            (
                lambda patch: use(patch, fails="Driver Not Loaded"),
                "driver does not answer (Driver Not Loaded)",
            ),
            (lambda patch: use(patch), "lists no device"),
            (lambda patch: patch.setenv("CUDA_VISIBLE_DEVICES", "7"), "='7' selects none .*GPU-aaaa-1"),
        ],
    )
    def test_cuda_without_a_device_says_what_is_missing(
        self, monkeypatch: pytest.MonkeyPatch, break_: object, missing: str
    ) -> None:
        use(monkeypatch, A)
        break_(monkeypatch)  # type: ignore[operator]
        with pytest.raises(ZeroGPUError, match=missing.replace("(", r"\(").replace(")", r"\)")):
            devices.choose(Settings(device="cuda"))

    def test_the_choice_is_made_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, A)
        assert devices.choose(Settings()) == "cuda"
        use(monkeypatch)
        assert devices.choose(Settings()) == "cuda"
        assert devices.devices()[0].uuid == A.uuid

    @pytest.mark.parametrize(
        "later", [{"device": "cpu"}, {"device": "cuda"}, {"device": "sim", "sim_devices": 3}]
    )
    def test_a_setting_that_contradicts_the_choice_in_use_is_an_error(self, later: dict[str, object]) -> None:
        devices.choose(Settings(device="sim"))
        with pytest.raises(ZeroGPUError, match="already uses 'sim'"):
            devices.choose(Settings(**later))  # type: ignore[arg-type]
        assert devices.choose(Settings()) == "sim", "auto fits whatever was chosen"

    def test_devices_before_a_choice_are_an_error(self) -> None:
        with pytest.raises(ZeroGPUError, match="choose"):
            devices.devices()

    def test_the_build_of_torch_is_known_before_torch_is_imported(self) -> None:
        code = "import sys; from zerogpu.placement import devices; print(devices.torch_cuda()); "
        code += "assert 'torch' not in sys.modules; import torch; print(torch.version.cuda)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        before, after = done.stdout.split()
        assert before == after


class TestTheDevices:
    def test_sim_has_as_many_as_were_set(self) -> None:
        devices.choose(Settings(device="sim", sim_devices=3, sim_memory=2 * GIB))
        found = devices.devices()
        assert [device.index for device in found] == [0, 1, 2]
        assert len({device.uuid for device in found}) == 3
        assert devices.memory(found[2]) == (2 * GIB, 2 * GIB)

    def test_the_cpu_is_one_device_named_as_such(self) -> None:
        devices.choose(Settings(device="cpu"))
        (host,) = devices.devices()
        assert host.name.startswith("CPU")
        free, total = devices.memory(host)
        assert 0 < free <= total

    def test_real_ones_are_as_the_driver_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = use(monkeypatch, A, B)
        devices.choose(Settings())
        first, second = devices.devices()
        assert (first.uuid, first.name, first.capability) == (A.uuid, "NVIDIA H200", (9, 0))
        assert first.total_memory == A.total - 100 * 2**20, "without what the driver keeps for itself"
        assert devices.memory(second) == (B.total - GIB - 100 * 2**20, second.total_memory)
        assert nvml.reading(first.uuid, "utilization") == 37
        assert driver.open == 0, "no handle of the library may be open at a fork"

    def test_a_broken_board_does_not_hide_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, Card("GPU-lost", broken=True), B)
        devices.choose(Settings())
        assert [device.uuid for device in devices.devices()] == [B.uuid]

    def test_a_device_that_the_driver_lost_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, A)
        devices.choose(Settings())
        use(monkeypatch, B)
        with pytest.raises(ZeroGPUError, match=r"GPU-aaaa-1 cannot be asked: .*Not Found"):
            devices.memory(devices.devices()[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [A.uuid, B.uuid, C.uuid, *DIVIDED.instances]),
        ("0", [A.uuid]),
        ("2,0", [C.uuid, A.uuid]),
        (" 1 , 2", [B.uuid, C.uuid]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [A.uuid]),
        ("0,9,1", [A.uuid]),
        ("1gpu,2x", [B.uuid, C.uuid]),
        ("0,0", []),
        ("none", []),
        ("0,no,1", [A.uuid]),
        ("GPU-bbcc-3,GPU-aaaa-1", [C.uuid, A.uuid]),
        ("GPU-a", [A.uuid]),
        ("GPU-bb", []),
        ("GPU-zz,0", []),
        ("MIG-2222-x", ["MIG-2222-x"]),
        ("MIG-2222-x,MIG-1111-x", ["MIG-2222-x", "MIG-1111-x"]),
        ("3", ["MIG-1111-x"]),
        ("GPU-dddd", ["MIG-1111-x"]),
    ],
)
def test_the_variable_selects_and_orders_as_in_cuda(
    monkeypatch: pytest.MonkeyPatch, text: str | None, expected: list[str]
) -> None:
    use(monkeypatch, A, B, C, DIVIDED)
    boards, _ = nvml.boards()
    assert [part.uuid for part in visible.select(boards, text)] == expected


class TestHiding:
    @pytest.mark.parametrize("text", [None, "", "1", "GPU-aaaa-1"])
    def test_what_the_user_wrote_is_kept(self, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
        if text is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        devices.hide()
        devices.hide()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
        assert visible.written() == text
        visible.restore()
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == text

    def test_a_program_started_by_the_app_finds_what_the_user_wrote(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        devices.hide()
        code = "from zerogpu.placement import visible; print(visible.written())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "1,0"

    def test_what_someone_sets_after_hiding_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        devices.hide()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        assert visible.written() == "2"

    def test_hidden_devices_are_still_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, A, B)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        devices.hide()
        assert devices.choose(Settings()) == "cuda"
        assert [device.uuid for device in devices.devices()] == [B.uuid]

    def test_a_worker_finds_its_own_device_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, A, DIVIDED)
        devices.choose(Settings())
        devices.hide()
        devices.select(devices.devices()[2])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-2222-x"
        assert "_ZEROGPU_VISIBLE_DEVICES" not in os.environ


class TestProperties:
    def test_a_program_of_its_own_asks_torch_with_the_device_shown(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked = _torch_that_knows(tmp_path / "site", monkeypatch)
        use(monkeypatch, A, B)
        devices.choose(Settings())
        devices.hide()
        second = devices.devices()[1]
        found = properties(second, tmp_path / "cache")
        assert (found.name, found.warp_size, found.uuid) == ("a name", 32, "the uuid")
        assert asked.read_text().split() == [B.uuid]
        assert properties(second, tmp_path / "cache") == found
        assert architectures(second, tmp_path / "cache") == ["sm_90"]
        assert asked.read_text().split() == [B.uuid], "asked once"

    def test_the_answer_is_kept_for_the_next_start(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked = _torch_that_knows(tmp_path / "site", monkeypatch)
        use(monkeypatch, A)
        devices.choose(Settings())
        from zerogpu.placement import properties as module

        found = properties(devices.devices()[0], tmp_path)
        module._known.clear()
        assert properties(devices.devices()[0], tmp_path) == found
        (file,) = (tmp_path / "devices").iterdir()
        file.write_text("{broken")
        module._known.clear()
        assert properties(devices.devices()[0], tmp_path) == found
        assert len(asked.read_text().split()) == 2, "asked again only after the file was broken"

    def test_what_torch_says_on_failure_is_told(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        use(monkeypatch, A)
        devices.choose(Settings())
        with pytest.raises(ZeroGPUError, match=r"torch cannot use NVIDIA H200 \(GPU-aaaa-1\): \w+Error: "):
            properties(devices.devices()[0], tmp_path)  # this machine has no such device

    def test_made_up_devices_have_every_field_of_the_real_object(self, tmp_path: Path) -> None:
        devices.choose(Settings(device="sim", sim_memory=GIB))
        found = properties(devices.devices()[0], tmp_path)
        real = getattr(torch._C, "_CudaDeviceProperties", None)
        wanted = {name for name in dir(real) if not name.startswith("_")} if real else set(FIELDS)
        assert wanted <= set(vars(found))
        assert set(FIELDS) >= wanted, "this torch has fields that made-up devices answer with 0"
        assert (found.total_memory, found.major, found.minor) == (GIB, 8, 0)
        assert not hasattr(found, "no_such_field")
        assert isinstance(found, DeviceProperties)
        assert "simulated" in repr(found)


def _torch_that_knows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch for other programs, which notes for which device it was asked."""
    asked = folder / "asked"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(
        textwrap.dedent(f"""
        import os
        class Found:
            name, warp_size, uuid = "a name", 32, type("U", (), {{"__str__": lambda s: "the uuid"}})()
        class cuda:
            def get_device_properties(index):
                with open({json.dumps(str(asked))}, "a") as file:
                    print(os.environ["CUDA_VISIBLE_DEVICES"], file=file)
                return Found()
            get_arch_list = lambda: ["sm_90"]
        """)
    )
    monkeypatch.syspath_prepend(str(folder))
    return asked


class TestWhoStartedCuda:
    @pytest.mark.parametrize(
        ("path", "shown"),
        [
            ("/x/site-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so", "onnxruntime (lib.*)"),
            ("/x/site-packages/nvidia/cu13/lib/libcudart.so.13", "torch"),
            ("/usr/lib/libcudart.so.12", "libcudart.so.12"),
        ],
    )
    def test_a_loaded_library_is_named_with_its_package(self, path: str, shown: str) -> None:
        assert blame._DRIVER.search(path)
        assert re.fullmatch(shown.replace("(", r"\(").replace(")", r"\)"), blame._package(path))

    def test_nobody_is_blamed_where_nobody_did(self) -> None:
        blame.check_untouched()

    def test_torch_is_blamed_when_it_was_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "_initialized", True)
        with pytest.raises(CUDAInMainError, match=r"torch had started CUDA before zerogpu.*on_worker_start"):
            blame.check_untouched()

    def test_an_open_driver_is_noticed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        device = tmp_path / "nvidia-uvm"
        device.touch()
        monkeypatch.setattr(blame, "_DRIVER_OPEN", str(device))
        with device.open(), pytest.raises(CUDAInMainError, match="something in it has started CUDA"):
            blame.check_untouched()
        blame.check_untouched()
