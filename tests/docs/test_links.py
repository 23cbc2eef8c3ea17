"""Every link in the documentation leads somewhere: files and headings of this repository; web addresses by syntax."""

import re
import unicodedata
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.paths import ROOT

TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def links(text):
    """Return the targets of all Markdown links and pictures outside of code."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "code", FENCE.sub("", text)))


def anchors(text):
    """Return the anchors that a code host gives the headings of a page."""
    found = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *$", FENCE.sub("", text), re.MULTILINE):
        kept = [c for c in heading.lower() if c in " -_" or unicodedata.category(c)[0] in "LNM"]
        found.add("".join(kept).replace(" ", "-"))
    return found


def problem(page, target):
    """Return what is wrong with a link, or None."""
    if "://" in target:
        address = urlsplit(target)
        good = address.scheme == "https" and re.fullmatch(r"[\w.-]+\.\w+", address.netloc)
        return None if good else "not an https address"
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.exists():
        return "no such file"
    if not file.is_relative_to(ROOT):
        return "outside of the repository"
    if anchor and anchor not in anchors(file.read_text("utf-8")):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = {target: problem(page, target) for target in links(page.read_text("utf-8"))}
    assert {target: why for target, why in broken.items() if why} == {}


def test_broken_links_are_found():
    page = ROOT / "README.md"
    text = "[a](docs/none.md) ![b](docs/cli.md#no-such) [c](http://x.org) [d](../../etc/passwd)\n"
    text += "```\n[e](code)\n```\n`[f](code)`"
    found = [problem(page, target) for target in links(text)]
    assert found[:3] == ["no such file", "no such heading", "not an https address"] and len(found) == 4 and found[3]
    assert anchors("## `triforce cache`: a & b\n") == {"triforce-cache-a--b"}


def test_every_page_and_picture_is_linked():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in links(page.read_text("utf-8"))
        if "://" not in target
    }
    wanted = {Path(page) for page in (ROOT / "docs").glob("*.md")} | set((ROOT / "docs" / "images").glob("*.svg"))
    assert wanted <= linked


def test_source_files_that_pages_name_are_there():
    tops = ("offload", "triforce_cli", "tests", "scripts", "examples")
    there = [f"/{path.relative_to(ROOT)}" for top in tops for path in (ROOT / top).rglob("*.*")]
    pages = "".join(page.read_text("utf-8") for page in PAGES if page.parent.name == "docs")
    names = {name.lstrip("/") for name in re.findall(r"[\w/]*\w+\.(?:py|tsv|c|h)\b", pages)}
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in there)] == []
    assert len(names) > 100
