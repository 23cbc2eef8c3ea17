"""`--cache` and `triforce cache`: prompts on disk, and the commands that list and remove them."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from offload.prompt_cache import writer
from offload.prompt_cache.entries import Entry
from offload.prompt_cache.folder import PromptFolder, Stored
from triforce_cli.output.cache_entries import entries_table

BOOK = "It was on a dreary night of November that I beheld the accomplishment of my toils. " * 8  # 600 bytes


@pytest.fixture
def ask(triforce_here, tmp_path, monkeypatch):
    """`ask(question, *flags) -> the events` of one run over the book, greedily, with a cache."""
    book = tmp_path / "book.txt"
    book.write_text(BOOK)
    monkeypatch.delenv("TRIFORCE_CACHE", raising=False)

    def run(question, *flags):
        code, out, err = triforce_here(
            "generate", "-f", book, question, "-n", 5, "--temperature", 0, "--json", *(flags or ("--cache",))
        )
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()], err

    return run


def text(events):
    return "".join(event["text"] for event in events if event["type"] == "text")


def test_a_second_question_reads_the_document_from_disk(ask):
    plain, _ = ask("Who?", "--no-cache")
    first, _ = ask("Who?")
    second, err = ask("Who?")
    assert text(first) == text(second) == text(plain)
    assert not [event for event in first if event["type"] == "cache"]
    (restored,) = (event for event in second if event["type"] == "cache")
    assert set(restored) == {"type", "tokens", "bytes", "seconds"}
    done = second[-1]
    assert done["cached_tokens"] == restored["tokens"] > 500
    assert done["prefilled_tokens"] == done["prompt_tokens"]
    assert f"({restored['tokens']:,} from the cache)" in err
    assert done["settings"]["cache"] is True
    other, _ = ask("When, and in which month of the year did he behold it?")
    assert other[-1]["cached_tokens"] >= 384


def test_prompts_that_take_long_to_read_are_cached_unasked_and_the_statistics_say_so(ask, triforce_here, monkeypatch):
    monkeypatch.setattr(writer, "_QUICK", 1e9)
    assert ask("Who?", "-v")[0][-1]["saved_tokens"] == 0
    assert json.loads(triforce_here("cache", "list", "--json")[1])["entries"] == []
    monkeypatch.setattr(writer, "_QUICK", 0.0)
    events, err = ask("Who?", "-v")
    saved = events[-1]["saved_tokens"]
    assert saved >= 512 and f"({saved} cached for later)" in err
    assert len(json.loads(triforce_here("cache", "list", "--json")[1])["entries"]) == 1


def test_list_prune_and_clear(ask, triforce_here):
    code, out, _ = triforce_here("cache", "list")
    assert (code, "0 B of 20.00 GiB" in out) == (0, True)
    for question in ("When", "When", "Why"):
        ask(f"{question} did he behold the accomplishment of his toils, and what did he say in the end? " * 2)
    (entry,) = json.loads(triforce_here("cache", "list", "--json")[1])["entries"]
    assert entry["prompts"] == 2  # questions on one document are one entry
    assert entry["label"].startswith("It was on a dreary night")
    code, out, _ = triforce_here("cache", "list")
    assert out.splitlines()[1].split()[0] == entry["id"]
    assert "20.00 GiB" in out.splitlines()[-1]
    assert json.loads(triforce_here("cache", "prune", "--older-than", "1h", "--json")[1]) == {
        "type": "cache",
        "removed": 0,
    }
    removed = json.loads(triforce_here("cache", "prune", "--to", "100k", "--json")[1])["removed"]
    assert removed >= entry["size"] - 100_000
    assert triforce_here("cache", "clear")[0] == 2  # nobody to ask
    assert triforce_here("cache", "clear", "--yes")[0] == 0
    assert json.loads(triforce_here("cache", "list", "--json")[1])["entries"] == []


def test_rm_removes_entries_and_keeps_shared_blocks(ask, triforce_here, tmp_path):
    def listed():
        return json.loads(triforce_here("cache", "list", "--json")[1])["entries"]

    ask("When did he behold the accomplishment of his toils?")
    (tmp_path / "book.txt").write_text(BOOK[:300] + "Another book begins like that one and goes on for itself. " * 12)
    ask("Who?")
    first, second = listed()
    refused = triforce_here("cache", "rm", "zz")
    assert (refused[0], refused[1]) == (2, "") and "triforce cache list" in refused[2]
    code, out, _ = triforce_here("cache", "rm", second["id"][:6], "--json")
    assert code == 0
    assert 0 < json.loads(out)["removed"] <= second["size"]
    (left,) = listed()
    assert (left["id"], left["tokens"]) == (first["id"], first["tokens"])
    assert all(os.path.exists(path) for path in first["blocks"])
    assert triforce_here("cache", "rm", first["id"])[0] == 0
    assert listed() == []


@pytest.mark.parametrize("width", [50, 80])
def test_the_list_fits_the_terminal(width):
    block = Stored(Path("/cache/a/000000-abc.safetensors"), 132 * 2**20, 0.0)
    entry = Entry(
        "1b743498", "smollm2-135m", "examples/frankenstein.txt", "bf16", 5888, 2, block.size, 0.0, 0.0, (block,)
    )
    folder = PromptFolder(Path("/home/somebody/.cache/triforce/prompts"))
    lines = entries_table([entry], folder, 7200.0, width).plain.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("1b743498   5,888  132.0 MiB")
    assert ("smollm2-135m" in lines[1]) == (width > 60)
    assert "examples/frank" in lines[1]


def test_the_format_of_keys_and_values_is_shown_where_there_are_several(ask, triforce_here):
    """A quantised prompt is another entry, restored for its format alone, and smaller."""
    ask("Who?")
    assert "bf16" not in triforce_here("cache", "list")[1]
    flags = ("--cache", "--kv", "q8")
    first, again = ask("Who?", *flags)[0], ask("Who?", *flags)[0]
    assert first[-1]["cached_tokens"] == 0 and again[-1]["cached_tokens"] > 500
    assert text(again) == text(first) == text(ask("Who?", "--no-cache", "--kv", "q8")[0])
    found = {entry["kv"]: entry for entry in json.loads(triforce_here("cache", "list", "--json")[1])["entries"]}
    assert set(found) == {"bf16", "q8"} and found["q8"]["size"] < found["bf16"]["size"]
    head, *rows = triforce_here("cache", "list")[1].splitlines()
    assert "kv" in head.split() and [("q8" in row.split(), "bf16" in row.split()) for row in rows[:2]] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("wrong", [("prune", "--older-than", "soon"), ("rm", ""), ()])
def test_wrong_use(triforce_here, wrong):
    assert triforce_here("cache", *wrong)[0] == 2


def test_a_folder_that_others_can_write_to_is_warned_of(ask, tmp_path):
    (folder := tmp_path / "home" / "prompts").mkdir(parents=True)
    folder.chmod(0o777)
    _, err = ask("Who?")
    assert err.count("warning") == 1 and "other users can write to" in err
    folder.chmod(0o755)
    assert "other users" not in ask("Who?")[1]


def test_blocks_of_another_version_are_counted_ignored_and_removed(ask, triforce_here, tmp_path):
    ask("Who?")
    folder = PromptFolder(tmp_path / "home" / "prompts")
    first = next(folder.blocks()).path.parent
    newer = shutil.copytree(first, folder.path / "newer")
    for path in newer.glob("*.safetensors"):
        save_file(load_file(path), path, {"format": "9"})
    assert "warning" not in ask("Where?", "--cache", "-v")[1]
    code, out, _ = triforce_here("cache", "list")
    assert code == 0 and len(out.splitlines()) == 3
    assert re.search(r"prompts, [\d.]+ KiB of it damaged or of another version", " ".join(out.split()))
    assert triforce_here("cache", "prune", "--to", "0")[0] == 0
    assert list(folder.blocks()) == []
