"""A chat as it is written for a GPU: a language model, mapped to the device when it is loaded."""

import os

import gradio as gr
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from zerogpu import gpu

folder = os.environ["MODEL_FOLDER"]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.float32).eval()
writer = pipeline("text-generation", model=folder, tokenizer=tokenizer, device="cuda")


@gpu(duration=60)
@torch.inference_mode()
def answer(question: str) -> str:
    inputs = tokenizer(question, return_tensors="pt").to("cuda")
    output = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    return tokenizer.decode(output[0])


@gpu
def go_on(text: str) -> str:
    return writer(text, max_new_tokens=5, do_sample=False)[0]["generated_text"]


demo = gr.Interface(answer, "text", "text")

if __name__ == "__main__":
    demo.launch()
