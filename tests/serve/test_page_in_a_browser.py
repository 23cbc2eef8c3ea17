"""The page at / in a real browser: Chromium without a window, driven by playwright."""

import json
import os
import re
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.models import make_hf_model, make_tokenizer
from tests.support.serving import connected, opened_model, serve_options, serving
from tests.support.waiting import until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

BOOK = "the house of the king, the house of the queen, " * 7 + "café\n"
QUESTION = "Whose house is the house of the king?"
playwright.expect.set_options(timeout=30_000)  # milliseconds
pause = {"seconds": 0.0}  # that the server takes after each event
going = threading.Event()  # it goes on
going.set()


@contextmanager
def held():
    """Hold the server after its next event; yield what lets one more through."""
    going.clear()
    try:
        yield lambda: (going.set(), going.clear())
    finally:
        going.set()


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
def drafting(tmp_path_factory):
    """A server whose model drafts with every token, never ends by itself, and runs on the native kernel."""
    folder = tmp_path_factory.mktemp("page") / "tiny"
    make_hf_model("llama", seed=5, head_dim=32, eos_token_id=None).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    opened = opened_model(folder, method="lookup", prefill_chunk=16)
    assert opened.model.kernel != "off"
    engine = opened.model.load()
    generate_batch = engine.generate_batch

    def paced(requests, parallel):
        for event in generate_batch(requests, parallel):
            yield event
            time.sleep(pause["seconds"])
            going.wait(60)

    engine.generate_batch = paced
    with serving(opened, engine, serve_options("a-key-of-this-test-0123")) as found:
        yield found


@pytest.fixture
def page(browser, drafting):
    """The page, open, with the key; what it asks of others, logs as an error, or keeps fails the test."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
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


def drop(page, name, data):
    """Drop a file onto the page, as a browser tells it."""
    make = (
        "([name, data]) => { const all = new DataTransfer(); "
        "all.items.add(new File([new Uint8Array(data)], name)); return all; }"
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": page.evaluate_handle(make, [name, list(data)])})


def recorded(page):
    """Return the requests for answers, as the page sends them."""
    found = []
    page.on("request", lambda each: found.append(each.post_data_json) if each.url.endswith("completions") else None)
    return found


def answered(page, turn):
    """Wait for the end of an answer; return its facts."""
    facts = page.locator(".turn").nth(turn).locator(".facts span")
    playwright.expect(facts).to_be_visible()
    playwright.expect(page.locator("#ask")).to_be_enabled()
    return facts.text_content()


def test_a_conversation_about_a_dropped_file(page, drafting):
    """Paced: a browser that waits for a busy machine would see the end of a quick answer at once."""
    playwright.expect(page.locator("#model")).to_have_text("tiny, up to 512 tokens")
    requests, status = recorded(page), page.locator("#status")
    drop(page, "book.pdf", b"\x89PNG\r\n\x1a\n")
    playwright.expect(status).to_have_class("error")
    playwright.expect(status).to_contain_text("book.pdf is not a PDF")
    drop(page, "book.txt", BOOK.encode("cp1252"))
    playwright.expect(page.locator("#name")).to_have_text("book.txt")
    playwright.expect(page.locator("#size")).to_have_text(re.compile(rf"^{len(BOOK)} characters, \d+ tokens$"))
    playwright.expect(status).to_have_text("book.txt is not UTF-8; read as cp1252, the best guess")
    playwright.expect(status).not_to_have_class("error")
    page.evaluate(
        """() => { window.lengths = [];
        const look = () => lengths.push(document.querySelector("#thread .markdown")?.textContent.length || 0);
        new MutationObserver(look).observe(document.getElementById("thread"), { childList: true, subtree: true }); }"""
    )
    with held() as one_more:
        ask(page, QUESTION, 40)
        while len(set(page.evaluate("lengths"))) <= 3:  # piece by piece
            assert page.locator("#ask").is_disabled(), "the answer has ended"
            one_more()
            page.wait_for_timeout(50)  # milliseconds
    assert re.fullmatch(r"40 tokens · .* a second · .* a verification · prompt \d+, .*cut off.*", answered(page, 0))
    with connected(drafting) as client:
        headers = {"authorization": "Bearer a-key-of-this-test-0123"}
        body = requests[0] | {"stream": False, "stream_options": {}}
        found = client.post("/v1/chat/completions", json=body, headers=headers).json()
    first = found["choices"][0]["message"]["content"]
    assert requests[0]["messages"] == [{"role": "user", "content": f"{BOOK}\n\n{QUESTION}"}]
    page.locator(".facts button").click()
    playwright.expect(page.locator(".facts button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == first
    page.locator("summary", has_text="Accepted drafts").click()
    (row,) = page.locator(".rates tr").all()
    pair, rate, _ = (cell.text_content() for cell in row.locator("td").all())
    assert pair in found["statistics"][0]["acceptance"] and re.fullmatch(r"\d+ %", rate)
    assert 0 <= row.locator("meter").evaluate("meter => meter.value") <= 1

    page.fill("#tokens", "5")
    page.locator("#question").press_sequentially("And")
    page.evaluate(
        """() => document.getElementById("question").dispatchEvent(new KeyboardEvent("keydown",
        { key: "Enter", isComposing: true, bubbles: true, cancelable: true }))"""
    )
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#question") == "And\n" and len(requests) == 1
    page.keyboard.type("then?")
    page.keyboard.press("Enter")
    cached = re.search(r"prompt (\d+), of them (\d+) cached", answered(page, 1))
    assert int(cached[2]) > 255 and int(cached[2]) < int(cached[1])
    assert [each["content"] for each in requests[1]["messages"][1:]] == [first, "And\nthen?"]
    page.click("#new")
    playwright.expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Who?", 5)
    answered(page, 0)
    assert requests[2]["messages"] == [{"role": "user", "content": f"{BOOK}\n\nWho?"}]


def test_stop_ends_the_answer_and_an_error_is_cleared_by_the_next_question(page, drafting, monkeypatch):
    """The first answer would take half a minute."""
    monkeypatch.setitem(pause, "seconds", 0.05)
    status = page.locator("#status")
    playwright.expect(page.locator("#stop")).to_be_disabled()
    ask(page, "Once", 450)
    playwright.expect(page.locator(".markdown")).to_have_text(re.compile(r"\S\S"))
    page.click("#stop")
    playwright.expect(status).to_have_text("stopped")
    assert answered(page, 0).endswith("stopped")
    until(lambda: drafting.engine.num_running == 0)
    monkeypatch.setitem(pause, "seconds", 0.0)
    page.click("#new")
    ask(page, "Once more", 600)
    playwright.expect(status).to_have_text(re.compile("both together may have 512"))
    playwright.expect(status).to_have_class("error")
    playwright.expect(page.locator("#question")).to_have_value("Once more")  # to be sent again
    page.fill("#key", "another-key-0123456789")
    page.click("#ask")
    playwright.expect(status).to_have_text("no API key that is known")
    page.fill("#key", "a-key-of-this-test-0123")
    with held():
        ask(page, "Once", 40)
        playwright.expect(status).to_have_text(re.compile("waiting|reading|answering"))
        playwright.expect(status).not_to_have_class("error")
    assert answered(page, 0).startswith("40 tokens")


HOSTILE = (
    """# A *title*

<script>window.hacked = 1</script><img src="https://evil.example/a.png" onerror="window.hacked = 2">
![picture](https://evil.example/b.png) [run](javascript:window.hacked=3) [data](data:text/html,x)
[there](https://example.org/a_(b)?c=d&e) and **bold _both_**, `<b>code</b>`, \\*plain\\* a*b*c 2 * 3 * 4

- one
- two
  1. inner
  2. <iframe src="https://evil.example"></iframe>

```html
<style>@import "https://evil.example/c.css"</style>

**as it is**
```
> said
"""
    + "*" * 3000
    + "[(" * 3000
    + "`" * 3001
)


def test_the_bar_moves_and_an_answer_of_hostile_markdown_runs_and_loads_nothing(page):
    """The fixture sees each request, and each violation of the policy as an error."""
    page.evaluate(
        """() => { window.bar = [];
        new MutationObserver((all) => bar.push(...all.map((each) => each.oldValue))).observe(
        document.getElementById("progress"), { attributeFilter: ["value"], attributeOldValue: true }); }"""
    )
    chunk = {"choices": [{"delta": {"content": HOSTILE}, "finish_reason": "stop"}], "statistics": {"new_tokens": 1}}
    stream = f": prefill 0 0 400\n\n: prefill 0 100 400\n\n: prefill 0 300 400\n\ndata: {json.dumps(chunk)}\n\n"
    stream += "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    ask(page, "<b>Who</b>?", 5)
    answered(page, 0)
    answer = page.locator(".markdown")
    assert page.locator(".question").text_content() == "<b>Who</b>?"
    names = set(answer.evaluate("each => [...each.querySelectorAll('*')].map((one) => one.localName)"))
    assert names == {"h1", "em", "strong", "p", "a", "code", "ul", "ol", "li", "pre", "blockquote"}
    attributes = answer.evaluate("each => [...each.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())")
    assert set(attributes) <= {"href", "title", "target", "rel", "start"}
    links = answer.evaluate("each => [...each.querySelectorAll('a')].map((one) => [one.href, one.rel])")
    safe = "noopener noreferrer"
    assert links == [["https://evil.example/b.png", safe], ["https://example.org/a_(b)?c=d&e", safe]]
    assert (
        answer.locator("pre").text_content().startswith('<style>@import "https://evil.example/c.css"</style>\n\n**as')
    )
    assert answer.locator("li li").count() == 2 and answer.locator("strong em").text_content() == "both"
    assert "*plain* a*b*c 2 * 3 * 4" in answer.text_content() and "<script>" in answer.text_content()
    assert page.evaluate("window.hacked") is None and page.evaluate("bar")[:4] == [None, "0", "0.25", "0.75"]


def test_on_a_narrow_screen_all_is_in_reach_of_the_keyboard_and_named(page):
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    tops = page.locator(".buttons button").evaluate_all("all => all.map((each) => each.getBoundingClientRect().top)")
    assert len(tops) == 3 and len(set(tops)) == 1
    for role, name in (
        *(("textbox", "Question"), ("button", "Ask"), ("button", "Stop"), ("button", "New conversation")),
        *(("spinbutton", "Temperature"), ("spinbutton", "Most tokens"), ("textbox", "API key")),
        *(("log", "Conversation"), ("status", "")),
    ):
        playwright.expect(page.get_by_role(role, name=name, exact=True)).to_have_count(1)
    page.focus("#file")
    reached = [page.evaluate("document.activeElement.id")]
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached == ["file", "question", "ask", "temperature", "tokens", "key"]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        text, back = (sum(map(int, re.findall(r"\d+", each)[:3])) for each in colours)
        assert (text < back) is (scheme == "light") and abs(text - back) > 450
