#!/usr/bin/env python3
"""Photograph the page of a `triforce serve` that runs, as PNG pictures in docs/screenshots.

    triforce serve --port 8765 --temperature 0 &
    TRIFORCE_TEST_BROWSER=.venv/browser/chromium python scripts/page_screenshots.py http://127.0.0.1:8765

A file is dropped, a question asked about it and then another one: wide and light, and 360 pixels wide and dark. Needs
playwright and a Chromium (scripts/fetch_browser.sh).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "examples" / "frankenstein-opening.txt"
QUESTIONS = ("Who writes these letters?", "Name two places that the letters mention, as a Markdown list.")
PATIENCE = 300_000  # milliseconds for an answer


def main() -> None:
    """Make both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "screenshots", metavar="FOLDER")
    args = parser.parse_args()
    with sync_playwright() as found:
        options = ["--no-sandbox", "--no-zygote"] if os.geteuid() == 0 else []
        browser = found.chromium.launch(executable_path=os.environ.get("TRIFORCE_TEST_BROWSER"), args=options)
        page = browser.new_page(viewport={"width": 800, "height": 600}, color_scheme="light")
        page.set_default_timeout(PATIENCE)
        page.goto(args.url)
        page.set_input_files("#file", BOOK)
        page.wait_for_selector("#remove:visible")
        for number, question in enumerate(QUESTIONS):
            _ask(page, question, number)
        page.screenshot(path=args.output / "page.png", full_page=True)
        page.set_viewport_size({"width": 360, "height": 640})
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=args.output / "page-360-dark.png", full_page=True)
        browser.close()


def _ask(page: Page, question: str, number: int) -> None:
    """Ask, and wait for the end of the answer."""
    page.fill("#tokens", "80")
    page.fill("#question", question)
    page.keyboard.press("Enter")
    page.locator(".facts button").nth(number).wait_for()
    page.wait_for_selector("#ask:enabled")


if __name__ == "__main__":
    main()
