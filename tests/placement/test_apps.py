"""Apps that were written for a GPU run as they are, on a simulated device and on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .models import QUESTION, save_diffusion_pipeline, save_language_model

APPS = Path(__file__).parent / "apps"

RUN = """
import json, sys
sys.path.insert(0, {apps!r})
import {module} as app
app.demo.launch(prevent_thread_lock=True, quiet=True)
print(json.dumps({calls}), flush=True)
import zerogpu
print(zerogpu.status()["state"], zerogpu.status()["device"], flush=True)
"""


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("language")
    save_language_model(folder)
    return folder


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("diffusion")
    save_diffusion_pipeline(folder)
    return folder


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_a_transformers_app(program, language_model: Path, kind: str) -> None:
    asked = f"({QUESTION!r})"
    calls = f"[app.answer{asked}, app.answer{asked}, app.go_on{asked}, app.model.device.type]"
    source = RUN.format(apps=str(APPS), module="chat", calls=calls)
    app = program(source, ZEROGPU_DEVICE=kind, MODEL_FOLDER=str(language_model))
    first, second, continued, device = json.loads(app.line(90))
    assert first == second
    assert continued.replace(" ", "") == first.replace(" ", "")
    assert len(first.split()) == 8
    assert device == ("cuda" if kind == "sim" else "cpu")
    assert app.line() == f"live {kind}"


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_a_diffusers_app(program, diffusion: Path, kind: str) -> None:
    pictures = "app.paint(1).tolist() == app.paint(1).tolist(), app.paint(2).shape"
    calls = f"[{pictures}, app.pipe.device.type, app.device]"
    source = RUN.format(apps=str(APPS), module="pictures", calls=calls)
    app = program(source, ZEROGPU_DEVICE=kind, MODEL_FOLDER=str(diffusion))
    device = "cuda" if kind == "sim" else "cpu"
    assert json.loads(app.line(90)) == [True, [8, 8, 3], device, device]
    assert app.line() == f"live {kind}"
    if kind == "sim":
        assert any("enable_model_cpu_offload() does nothing" in line for line in app.errors)
