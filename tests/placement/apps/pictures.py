"""A picture generator as it is written for a GPU: a diffusion pipeline, half precision, a seed."""

import os

import gradio as gr
import numpy as np
import torch
from diffusers import DDPMPipeline

from zerogpu import gpu

device = "cuda" if torch.cuda.is_available() else "cpu"
pipe = DDPMPipeline.from_pretrained(os.environ["MODEL_FOLDER"], torch_dtype=torch.float32)
pipe.enable_model_cpu_offload()
pipe.to("cuda")
pipe.set_progress_bar_config(disable=True)


@gpu(duration=60)
def paint(seed: int) -> np.ndarray:
    generator = torch.Generator("cuda").manual_seed(seed)
    return pipe(num_inference_steps=2, generator=generator, output_type="np").images[0]


demo = gr.Interface(paint, "number", "image")

if __name__ == "__main__":
    demo.launch()
