"""The semantic search demo in a real browser, with everything outside this machine blocked."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import gradio
import pytest

try:
    from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
except ImportError:
    sync_playwright = None

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
STARTUP = 300  # seconds; the first start compiles the encoder
PATIENCE = 30_000  # milliseconds; a call may have to start a worker first

MISSING = ""
if sync_playwright is None:
    MISSING = "playwright is not installed"
elif shutil.which(CHROMIUM) is None:
    MISSING = f"there is no {CHROMIUM}"
REQUIRED = os.environ.get("REQUIRE_BROWSER_TESTS") == "1"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(STARTUP + 120),
    pytest.mark.skipif(bool(MISSING) and not REQUIRED, reason=MISSING or "present"),
]


@dataclass
class Server:
    """The demo in a process of its own, with what it printed."""

    process: subprocess.Popen[str]
    url: str
    output: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Collect the output until the process ends; run in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if "Running on local URL" in line:
                self.ready.set()
        self.ready.set()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> Iterator[Server]:
    if MISSING:
        pytest.fail(f"REQUIRE_BROWSER_TESTS=1, but {MISSING}")
    folder = tmp_path_factory.mktemp("semantic_search")
    port = free_port()
    environment = {
        **os.environ,
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_SERVER_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # the browser needs the cores too
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        "ZEROGPU_CACHE_DIR": str(graph_cache),
    }
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "demos" / "semantic_search" / "app.py")],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = Server(process, f"http://127.0.0.1:{port}")
    reader = threading.Thread(target=server.read, daemon=True)
    reader.start()
    try:
        assert server.ready.wait(STARTUP), "".join(server.output)
        assert process.poll() is None, "".join(server.output)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Playwright makes a new profile folder and removes it.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The demo's page; it can reach nothing but the demo, and any error in its scripts fails."""
    seen = len(server.output)
    errors: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE)
    page.route("**/*", only_local)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.url)
    expect(page.get_by_role("heading", name="Semantic search")).to_be_visible(timeout=PATIENCE)
    yield page
    page.close()
    print("".join(server.output[seen:]))  # pytest shows it when the test failed
    assert errors == []


def only_local(route: Route) -> None:
    if urlsplit(route.request.url).hostname == "127.0.0.1":
        route.continue_()
    else:
        route.abort()


def search(page: Page, query: str) -> None:
    page.get_by_label("Question").fill(query)
    page.get_by_role("button", name="Search").click()


def paste(page: Page, text: str) -> None:
    page.locator("textarea").last.fill(text)
    page.get_by_role("button", name="Index").click()


def test_a_search_shows_ranked_results_served_by_the_graph_in_a_worker(page: Page, server: Server) -> None:
    search(page, "animals that find their way home")
    expect(page.locator(".result")).to_have_count(7, timeout=PATIENCE)
    expect(page.locator(".result").first).to_contain_text("Pigeons find their way home")
    scores = [float(text) for text in page.locator(".result b").all_inner_texts()]
    assert scores == sorted(scores, reverse=True)
    served = page.locator(".served")
    expect(served).to_contain_text("Served by graph")
    worker = re.search(r"worker (\d+)", served.inner_text())
    assert worker is not None
    assert int(worker[1]) != server.process.pid


def test_an_example_is_searched_when_it_is_clicked(page: Page) -> None:
    page.get_by_role("button", name="a disease that humans got rid of").click()
    expect(page.locator(".result").first).to_contain_text("Smallpox", timeout=PATIENCE)


def test_the_page_works_and_looks_right_without_the_outside_world(page: Page) -> None:
    font = page.evaluate("getComputedStyle(document.querySelector('h1')).fontFamily")
    assert "sans-serif" in font
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    question, button = page.get_by_label("Question"), page.get_by_role("button", name="Search")
    for element in (question, button):
        box = element.bounding_box()
        assert box is not None
        assert box["height"] > 20
    question.fill("Who first climbed the highest mountain?")
    question.press("Enter")
    expect(page.locator(".result").first).to_contain_text("Everest", timeout=PATIENCE)


def test_a_pasted_text_is_indexed_and_then_searched(page: Page) -> None:
    paste(page, "The parcel is in the cellar. My aunt lives in Lisbon. The train leaves at nine.")
    expect(page.get_by_text("Ready: 3 sentences.")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("radio", name="Your text")).to_be_checked()
    search(page, "Portugal")
    expect(page.locator(".result").first).to_contain_text("Lisbon", timeout=PATIENCE)
    expect(page.locator(".result")).to_have_count(3)


def test_cancel_ends_a_long_job_and_the_next_call_is_served_at_once(page: Page) -> None:
    sentence = "The harbour of the old town was busy from the first light until long after dark. "
    paste(page, sentence * 8_000)
    expect(page.get_by_text("of 8,000 sentences")).to_be_visible(timeout=PATIENCE)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelled.")).to_be_visible(timeout=PATIENCE)
    # There is one slot: a search is served only because the job has left it.
    search(page, "animals that find their way home")
    expect(page.locator(".result").first).to_contain_text("Pigeons", timeout=PATIENCE)
    expect(page.get_by_text("Cancelled.")).to_be_visible()
    expect(page.get_by_role("radio", name="The library")).to_be_checked()


def test_a_failing_call_shows_its_title_and_its_advice(page: Page) -> None:
    page.get_by_role("button", name="Index").click()
    toast = page.get_by_test_id("toast-body")
    # From version 6 on, Gradio heads a message with its kind and leaves its title out.
    title = "Nothing to index" if gradio.__version__.startswith("5.") else "Error"
    expect(toast).to_contain_text(title, timeout=PATIENCE)
    expect(toast).to_contain_text("Paste the text to index into the box first.")
