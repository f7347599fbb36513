"""Small models with random weights, saved the way real ones are."""

from __future__ import annotations

from pathlib import Path

import torch

QUESTION = "w1 w2 w3"


def save_language_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    words = {f"w{index}": index for index in range(63)} | {"[UNK]": 63}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")
    fast.model_input_names = ["input_ids", "attention_mask"]
    fast.save_pretrained(folder)


def save_diffusion_pipeline(folder: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=10)).save_pretrained(folder)
