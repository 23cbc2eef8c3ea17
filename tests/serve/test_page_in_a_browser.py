"""The page at / in a real browser: Chromium without a window, driven by playwright."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.support.serving import connected, opened_model, serve_options, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

BOOK = "the house of the king, the house of the queen, " * 4
QUESTION = "Whose house is the house of the king?"
playwright.expect.set_options(timeout=30_000)  # milliseconds
pause = {"seconds": 0.0}  # that the server takes after each event


def browser_program(chromium):
    """Return the path of a Chromium or Chrome: the one that is named, playwright's own, or the system's."""
    named = os.environ.get("TRIFORCE_TEST_BROWSER")
    if named:
        return named
    if Path(chromium.executable_path).exists():
        return chromium.executable_path
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as found:
        program = browser_program(found.chromium)
        if program is None:
            pytest.skip("there is no Chromium: see docs/contributing.md")
        # Root has no sandbox; what is shown here is the page of this repository alone.
        options = ["--disable-gpu", *(["--no-sandbox", "--no-zygote"] if os.geteuid() == 0 else [])]
        launched = found.chromium.launch(executable_path=program, args=options)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def drafting(endless):
    """A server whose model drafts with every token."""
    opened = opened_model(endless, method="lookup")
    engine = opened.model.load()
    generate_batch = engine.generate_batch

    def paced(requests, parallel):
        for event in generate_batch(requests, parallel):
            yield event
            time.sleep(pause["seconds"])

    engine.generate_batch = paced
    with serving(opened, engine, serve_options("a-key-of-this-test-0123")) as found:
        yield found


@pytest.fixture
def page(browser, drafting):
    """The page, open, with the key; what it asks of others, logs as an error, or keeps fails the test."""
    context = browser.new_context()
    context.set_default_timeout(30_000)
    opened, requested, errors = context.new_page(), [], []
    opened.on("request", lambda request: requested.append(request.url))
    opened.on("pageerror", lambda error: errors.append(error))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.goto(drafting.url)
    opened.fill("#key", "a-key-of-this-test-0123")
    opened.dispatch_event("#key", "change")
    opened.fill("#temperature", "0")
    yield opened
    assert requested and all(url.startswith((f"{drafting.url}/", "data:,")) for url in requested), requested
    refused = [error for error in errors if "status of 4" not in str(error)]  # the browser's own, of a response
    assert refused == [] and context.cookies() == []
    assert opened.evaluate("localStorage.length + sessionStorage.length") == 0
    context.close()


def ask(page, question, tokens):
    page.fill("#question", question)
    page.fill("#tokens", str(tokens))
    page.click("#ask")


def drop(page, name, text):
    """Drop a file onto the page, as a browser tells it."""
    make = "([name, text]) => { const all = new DataTransfer(); all.items.add(new File([text], name)); return all; }"
    page.dispatch_event("#drop", "drop", {"dataTransfer": page.evaluate_handle(make, [name, text])})


def test_a_dropped_file_is_asked_about_and_the_answer_streams_with_its_rates(page, drafting, monkeypatch):
    """Paced: a browser that waits for a busy machine would see the end of a quick answer at once."""
    monkeypatch.setitem(pause, "seconds", 0.02)
    playwright.expect(page.locator("#model")).to_have_text("tiny, up to 512 tokens")
    drop(page, "book.txt", BOOK)
    playwright.expect(page.locator("#name")).to_have_text("book.txt")
    playwright.expect(page.locator("#size")).to_have_text(f"{len(BOOK)} characters")
    page.evaluate(
        """() => { window.lengths = []; const answer = document.getElementById("answer");
        new MutationObserver(() => lengths.push(answer.textContent.length)).observe(answer, { childList: true }); }"""
    )
    ask(page, QUESTION, 80)
    playwright.expect(page.locator("#status")).to_have_text(re.compile(r"80 tokens · .* a second · .* a verification"))
    playwright.expect(page.locator("#ask")).to_be_enabled()
    body = {"messages": [{"role": "user", "content": f"{BOOK}\n\n{QUESTION}"}], "max_tokens": 80, "temperature": 0}
    with connected(drafting) as client:
        headers = {"authorization": "Bearer a-key-of-this-test-0123"}
        found = client.post("/v1/chat/completions", json=body, headers=headers).json()
    assert page.text_content("#answer") == found["choices"][0]["message"]["content"]
    lengths = page.evaluate("lengths")
    assert len(set(lengths)) > 3 and lengths == sorted(lengths)  # piece by piece
    playwright.expect(page.locator("#rates")).to_be_visible()
    (row,) = page.locator("#rates tr").all()
    pair, rate, _ = (cell.text_content() for cell in row.locator("td").all())
    assert pair in found["statistics"][0]["acceptance"] and re.fullmatch(r"\d+ %", rate)
    assert 0 <= row.locator("meter").evaluate("meter => meter.value") <= 1


def test_the_stop_button_ends_the_answer_and_its_sequence(page, drafting, monkeypatch):
    """The answer would take half a minute."""
    monkeypatch.setitem(pause, "seconds", 0.05)
    playwright.expect(page.locator("#stop")).to_be_disabled()
    ask(page, "Once", 450)
    playwright.expect(page.locator("#answer")).to_have_text(re.compile(r"\S\S"))
    page.click("#stop")
    playwright.expect(page.locator("#status")).to_have_text("stopped")
    playwright.expect(page.locator("#ask")).to_be_enabled()
    end = time.monotonic() + 30
    while drafting.engine.num_running and time.monotonic() < end:
        time.sleep(0.01)
    assert drafting.engine.num_running == 0
    ask(page, "Once", 3)  # and the page goes on
    playwright.expect(page.locator("#status")).to_have_text(re.compile("^3 tokens"))


def test_an_error_is_shown_and_the_next_question_answered(page):
    status = page.locator("#status")
    ask(page, "Once", 600)
    playwright.expect(status).to_have_text(re.compile("both together may have 512"))
    playwright.expect(status).to_have_class("error")
    page.fill("#key", "another-key-0123456789")
    ask(page, "Once", 3)
    playwright.expect(status).to_have_text("no API key that is known")
    page.fill("#key", "a-key-of-this-test-0123")
    ask(page, "Once", 3)
    playwright.expect(status).to_have_text(re.compile("^3 tokens"))
    playwright.expect(status).not_to_have_class("error")
