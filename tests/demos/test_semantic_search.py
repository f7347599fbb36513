"""The semantic search demo as a module: what it finds, and that its graph agrees with eager."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import ModuleType

import gradio as gr
import pytest
import torch

import zerogpu

APP = Path(__file__).parents[2] / "demos" / "semantic_search" / "app.py"
# The first test pays for compiling the encoder; the session's tests share the graph.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def app(graph_cache: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGPU_CACHE_DIR", str(graph_cache))
        patch.setenv("HF_HUB_OFFLINE", "1")
        spec = importlib.util.spec_from_file_location("semantic_search_app", APP)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        zerogpu.start()
        yield module
        zerogpu.shutdown()


def found(page: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<q>(.*?)</q>", page)]


@pytest.mark.parametrize(
    ("query", "word", "rank"),
    [
        ("Which creature has several hearts?", "octopus", 1),
        ("animals that find their way home", "Pigeons", 1),
        ("Who first climbed the highest mountain?", "Everest", 1),
        ("a disease that humans got rid of", "Smallpox", 1),
        ("Why do trees change colour at the end of summer?", "chlorophyll", 1),
        ("plants that eat insects", "Venus flytrap", 3),
        ("software written before there were computers", "Ada Lovelace", 3),
        ("a storm on another planet", "Great Red Spot", 3),
    ],
)
def test_a_question_finds_its_sentence_among_the_first(
    app: ModuleType, query: str, word: str, rank: int
) -> None:
    sentences = found(app.search(query, app.LIBRARY, None))
    assert any(word in sentence for sentence in sentences[:rank]), sentences


def test_results_come_best_first(app: ModuleType) -> None:
    page = app.search("How is bread made?", app.LIBRARY, None)
    scores = [float(score) for score in re.findall(r"<b>(.*?)</b>", page)]
    assert len(scores) == app.RESULTS
    assert scores == sorted(scores, reverse=True)


def test_a_query_is_served_by_the_graph(app: ModuleType) -> None:
    for query in ("whales", "a question that is a good deal longer than the first one was"):
        assert "Served by graph" in app.search(query, app.LIBRARY, None)


def test_the_graph_computes_what_the_eager_module_computes(app: ModuleType) -> None:
    queries = ["How do bees tell each other where to find flowers?", "ice"]
    eager = app.Encoder(app.AutoModel.from_pretrained(app.get_model_path())).eval()
    tokens = app.tokenizer(queries, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = eager(tokens["input_ids"], tokens["attention_mask"])
    vectors = app.embed_library(queries)
    assert torch.linalg.norm(vectors - expected) / torch.linalg.norm(expected) < 1e-5


def test_a_sentence_has_the_same_vector_alone_and_padded_in_a_batch(app: ModuleType) -> None:
    short, long = "ice", "Ice floats because water expands when it freezes, unlike most liquids."
    alone, together = app.embed_library([short]), app.embed_library([short, long])
    assert torch.linalg.norm(alone[0] - together[0]) < 1e-5


def test_a_pasted_text_is_indexed_in_steps_and_can_be_searched(app: ModuleType) -> None:
    text = "The parcel is in the cellar. " * app.BATCH + "My aunt lives in Lisbon!\nShe paints."
    *steps, (status, pasted) = list(app.index(text))
    shown = [re.findall(r"([\d,]+) of", step[0])[0] for step in steps]
    assert shown == ["32", "34"]
    assert status == "Ready: 34 sentences."
    assert found(app.search("Portugal", app.PASTED, pasted))[0] == "My aunt lives in Lisbon!"


def test_a_sentence_longer_than_the_model_reads_is_cut(app: ModuleType) -> None:
    assert app.embed_library(["very " * 1000 + "long"]).shape == (1, 384)


def test_markup_in_a_pasted_text_is_shown_as_text(app: ModuleType) -> None:
    *_, (_, pasted) = app.index("<script>alert(1)</script>")
    page = app.search("script", app.PASTED, pasted)
    assert "<script>" not in page
    assert found(page) == ["<script>alert(1)</script>"]


def test_what_cannot_be_searched_is_an_error_with_a_title_and_advice(app: ModuleType) -> None:
    cases = [
        (lambda: app.search("  ", app.LIBRARY, None), "Nothing to search for", "Type a question"),
        (lambda: app.search("ice", app.PASTED, None), "No text yet", "press Index"),
        (lambda: list(app.index(" \n ")), "Nothing to index", "Paste"),
    ]
    for call, title, advice in cases:
        with pytest.raises(gr.Error, match=advice) as caught:
            call()
        assert caught.value.title == title


def test_the_library_is_large_varied_and_free_of_repetition(app: ModuleType) -> None:
    assert 250 <= len(app.library) <= 400
    assert len(set(app.library)) == len(app.library)
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in app.library)
