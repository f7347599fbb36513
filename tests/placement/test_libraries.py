"""What libraries do with devices: each of them, by each of its ways, on a simulated device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import activated
from .models import save_diffusion_pipeline, save_language_model


def library(name: str) -> Any:
    """Imported when a test runs: at collection it would fill the process that all tests snapshot."""
    return pytest.importorskip(name)


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library("transformers")
    folder = tmp_path_factory.mktemp("language")
    save_language_model(folder)
    return folder


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library("diffusers")
    folder = tmp_path_factory.mktemp("diffusion")
    save_diffusion_pipeline(folder)
    return folder


@pytest.fixture(params=["sim", "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """What "cuda" is called where it arrives."""
    activated(device=request.param)
    return "cuda:0" if request.param == "sim" else "cpu"


def devices(module: Any) -> set[str]:
    return {str(tensor.device) for tensor in module.state_dict().values()}


def load(folder: Path, **options: Any) -> Any:
    return library("transformers").AutoModelForCausalLM.from_pretrained(folder, **options)


def ids() -> torch.Tensor:
    return torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    "device_map", ["cuda", {"": 0}, {"": "cuda:0"}, 0, torch.device("cuda"), "auto"], ids=repr
)
def test_device_maps(language: Path, device: str, device_map: Any) -> None:
    library("accelerate")
    model = load(language, device_map=device_map)
    assert devices(model) == {device}
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())
    assert str(model.generate(ids().to("cuda"), max_new_tokens=2).device) == device


def test_a_model_is_saved_and_loaded(language: Path, device: str, tmp_path: Path) -> None:
    model = load(language, dtype=torch.bfloat16).to("cuda")
    model.save_pretrained(tmp_path)
    again = load(tmp_path, device_map="cuda")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight.cpu(), model.lm_head.weight.cpu())


@pytest.mark.parametrize("where", [{"device": "cuda"}, {"device": 0}, {"device_map": "auto"}], ids=repr)
def test_a_pipeline(language: Path, device: str, where: dict[str, Any]) -> None:
    library("accelerate")
    pipe = library("transformers").pipeline("text-generation", model=str(language), **where)
    assert str(pipe.model.device) == device
    assert pipe("w1 w2", max_new_tokens=2, do_sample=False)[0]["generated_text"].startswith("w1 w2")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", 0])
def test_safetensors(language: Path, device: str, name: Any, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    loaded = load_file(language / "model.safetensors", device=name)
    assert {str(tensor.device) for tensor in loaded.values()} == {device}
    save_file(loaded, tmp_path / "again.safetensors")
    with safe_open(tmp_path / "again.safetensors", "pt", device=name) as file:
        assert str(file.get_tensor("lm_head.weight").device) == device


def test_lora_is_attached_saved_loaded_and_merged(language: Path, device: str, tmp_path: Path) -> None:
    config = library("peft").LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    adapted = library("peft").get_peft_model(load(language, device_map="cuda"), config)
    adapted.save_pretrained(tmp_path)
    again = library("peft").PeftModel.from_pretrained(load(language, device_map="cuda"), tmp_path)
    assert devices(again) == {device}
    expected = again(ids().cuda()).logits.cpu()
    merged = again.merge_and_unload()
    assert devices(merged) == {device}
    assert torch.allclose(merged(ids().cuda()).logits.cpu(), expected, atol=1e-4)


def test_accelerate_dispatches(language: Path, device: str) -> None:
    with library("accelerate").init_empty_weights():
        model = library("transformers").LlamaForCausalLM(
            library("transformers").AutoConfig.from_pretrained(language)
        )
    model.tie_weights()
    model = library("accelerate").load_checkpoint_and_dispatch(model, language, device_map="auto")
    assert devices(model) == {device}
    assert str(model(ids().to("cuda")).logits.device) == device


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("cuda"),
        lambda pipe: pipe.to("cuda", torch.float16),
        lambda pipe: pipe.enable_model_cpu_offload(),
        lambda pipe: pipe.enable_sequential_cpu_offload(),
    ],
    ids=["to", "half", "offload", "sequential"],
)
@pytest.mark.filterwarnings("ignore:.*cpu_offload:UserWarning")
def test_a_diffusion_pipeline(diffusion: Path, device: str, move: Callable[[Any], Any]) -> None:
    pipe = library("diffusers").DDPMPipeline.from_pretrained(diffusion)
    move(pipe)
    pipe.set_progress_bar_config(disable=True)
    assert str(pipe.device) == device
    assert devices(pipe.unet) == {device}
    if pipe.unet.dtype == torch.float32:
        seed = torch.Generator("cuda").manual_seed(1)
        assert pipe(num_inference_steps=2, generator=seed, output_type="np").images.shape == (1, 8, 8, 3)


def test_a_diffusion_pipeline_is_mapped(diffusion: Path, device: str) -> None:
    assert (
        str(library("diffusers").DDPMPipeline.from_pretrained(diffusion, device_map="cuda").device) == device
    )


def test_offloading_says_once_that_it_does_nothing(diffusion: Path, device: str) -> None:
    pipe = library("diffusers").DDPMPipeline.from_pretrained(diffusion)
    with pytest.warns(UserWarning, match=r"enable_model_cpu_offload\(\) does nothing under zerogpu"):
        pipe.enable_model_cpu_offload()
