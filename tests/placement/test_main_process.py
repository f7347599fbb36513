"""The main process never starts CUDA, whatever an app that was written for a GPU does at module scope."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SIM, CPU = {"ZEROGPU_DEVICE": "sim"}, {"ZEROGPU_DEVICE": "cpu"}

CARD = """
import pathlib, sys
sys.path.insert(0, {root!r})
from tests.placement.nvml import Card, Driver
sys.modules["pynvml"] = Driver(Card("GPU-11111111-1111-1111-1111-111111111111")).module()
"""

APP = """
import json, os, sys, threading, torch
import zerogpu
from zerogpu import gpu

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(300, 300, device="cuda")
        self.register_buffer("table", torch.arange(300, device="cuda"))

def load():
    global other
    other = torch.nn.Linear(3, 3).to("cuda", torch.float16)

model = Net().to(0).eval()
thread = threading.Thread(target=load)
thread.start()
thread.join()
noise = torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
with torch.device("cuda"):
    scale = torch.tensor(2.0)
torch.cuda.manual_seed_all(0)
torch.cuda.empty_cache()
torch.cuda.synchronize()
names = [torch.cuda.get_device_name(), torch.cuda.is_available(), torch.cuda.current_device()]
with torch.no_grad(), torch.autocast("cuda"):
    warm = model.layer(torch.ones(2, 300, device="cuda"))

@gpu
def where():
    return [str(tensor.device) for tensor in (model.layer.weight, model.table, other.weight, noise, scale)]

visible = os.environ["CUDA_VISIBLE_DEVICES"]
zerogpu.start()
print(json.dumps({
    "started": torch.cuda._initialized,
    "visible": visible,
    "devices": [str(t.device) for t in (model.layer.weight, other.weight, noise, scale, warm)],
    "names": names,
    "poisoned": getattr(torch._C, "_cuda_isInBadFork", lambda: False)(),
}), flush=True)
try:
    print(json.dumps(where()), flush=True)
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


@pytest.mark.parametrize("first", ["", "import torch", "import zerogpu", "import transformers"])
@pytest.mark.parametrize(("kind", "device"), [("sim", "cuda:0"), ("cpu", "cpu")])
def test_an_app_for_a_gpu_starts_and_computes(program, kind: str, device: str, first: str) -> None:
    pytest.importorskip(first.removeprefix("import ") or "torch")
    app = program(first + "\n" + textwrap.dedent(APP), ZEROGPU_DEVICE=kind)
    main = json.loads(app.line(60))
    assert main["started"] is False
    assert main["devices"] == [device] * 5
    assert main["visible"] == "-1"
    assert main["names"][1] is (kind == "sim")
    assert json.loads(app.line(60)) == [device] * 5


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of torch with CUDA")
def test_on_a_gpu_host_main_starts_nothing_and_a_worker_says_what_is_missing(program) -> None:
    """Any real start of CUDA would raise here: the build has CUDA, the machine has no driver."""
    app = program(
        CARD.format(root=str(ROOT)) + textwrap.dedent(APP).replace("get_device_name()", "device_count()")
    )
    main = json.loads(app.line(60))
    assert main["started"] is False
    assert main["poisoned"] is False
    assert main["devices"] == ["cuda:0"] * 5
    assert main["names"] == [1, True, 0]
    kind, message = json.loads(app.line(60))
    assert kind == "CUDAInMainError"
    assert "driver" in message


def test_cuda_that_is_asked_for_and_not_there_is_one_clear_error(program) -> None:
    app = program(
        """
        import torch, zerogpu
        try:
            torch.zeros(1, device="cuda")
        except zerogpu.ZeroGPUError as error:
            print(error, flush=True)
        try:
            zerogpu.start()
        except zerogpu.ZeroGPUError as error:
            print(error, flush=True)
        """,
        ZEROGPU_DEVICE="cuda",
    )
    assert "ZEROGPU_DEVICE is cuda, but" in app.line()
    assert "ZEROGPU_DEVICE is cuda, but" in app.line()


def test_configure_names_the_device_until_one_was_used(program) -> None:
    app = program(
        """
        import torch, zerogpu
        zerogpu.configure(device="sim", sim_devices=2)
        print(torch.zeros(1, device="cuda:1").device, torch.cuda.device_count(), flush=True)
        try:
            zerogpu.configure(device="cpu")
        except zerogpu.ZeroGPUError as error:
            print(error, flush=True)
        """
    )
    assert app.line() == "cuda:1 2"
    assert "already uses 'sim'" in app.line()


def test_what_reaches_cuda_all_the_same_names_the_line(program) -> None:
    app = program(
        """
        import torch, zerogpu
        try:
            graph = torch.cuda.CUDAGraph()
        except zerogpu.CUDAInMainError as error:
            print(error, flush=True)
        """,
        ZEROGPU_DEVICE="sim",
    )
    message = app.line()
    assert "app0.py:4" in message
    assert "torch.cuda.CUDAGraph" in message


def test_weights_changed_after_going_live_are_warned_of_and_refreshed(program) -> None:
    app = program(
        """
        import time, torch, warnings, zerogpu
        from zerogpu import gpu
        model = torch.nn.Linear(300, 300).to("cuda")

        @gpu
        def total():
            return round(float(model.weight.sum()))

        zerogpu.start()
        changes = [
            lambda: torch.nn.init.ones_(model.weight),
            lambda: setattr(model.weight, "data", torch.ones(300, 300).cuda() * 2),
            lambda: model.load_state_dict({"weight": torch.ones(300, 300) * 3, "bias": torch.ones(300)}),
        ]
        for change in changes:
            before = total()
            change()
            time.sleep(2)  # a look at all weights may cost only a share of the time
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                same = [total(), total()] == [before, before]
            text = [str(each.message) for each in seen]
            zerogpu.refresh()
            print(len(text), "refresh()" in text[0], same, total(), flush=True)
        """,
        ZEROGPU_DEVICE="sim",
    )
    assert app.line(60) == "1 True True 90000"
    assert app.line(60) == "1 True True 180000"
    assert app.line(60) == "1 True True 270000"


def test_the_note_about_the_cpu_names_the_line_of_the_app(program) -> None:
    app = program(
        "import torch, zerogpu\nmodel = torch.nn.Linear(2, 2)\nmodel.to('cuda')\nprint('done', flush=True)\n"
    )
    assert app.line() == "done"
    app.wait()
    notes = [line for line in app.errors if "UserWarning" in line]
    assert len(notes) == 1
    assert 'app0.py:3: UserWarning: "cuda" means the CPU here' in notes[0]


def test_a_change_of_device_that_is_refused_changes_nothing(program) -> None:
    app = program(
        """
        import torch, zerogpu
        from zerogpu import gpu

        @gpu
        def f():
            return 1

        torch.zeros(1, device="cuda")
        try:
            zerogpu.configure(device="cpu")
        except zerogpu.ZeroGPUError as error:
            print("refused", f(), flush=True)
        """,
        ZEROGPU_DEVICE="sim",
    )
    assert app.line() == "refused 1"
