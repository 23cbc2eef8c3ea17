"""`--data`: texts of a folder, of JSON lines or of a hub's data set as prompts."""

import json
import sys
from types import SimpleNamespace

import pytest

from offload.errors import FetchError, PromptError, SettingsError
from triforce_cli.bench.benchmark import BenchRequest
from triforce_cli.bench.prompts import BenchPrompt, open_prompts
from triforce_cli.input.dataset import DataText, check_dataset, read_dataset

BOOK = "the cat and the dog and the cat and the dog and " * 8
SMALL = ("--new", "4", "--repeats", "1", "--temperature", "0", "--methods", "ar")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text(BOOK)
    (folder / "b.txt").write_text("too short")
    (folder / "notes.md").write_text("no text of the data set")
    lines = [{"text": BOOK.upper(), "question": "Who is it?"}]
    lines.append({"document": {"text": BOOK}, "question": {"text": "Where?"}, "answers": []})
    (folder / "more" / "c.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return folder


def test_texts_and_questions_are_read(data):
    assert read_dataset(str(data), pytest.fail) == [
        DataText("a.txt", BOOK),
        DataText("b.txt", "too short"),
        DataText("more/c.jsonl:1", BOOK.upper(), "Who is it?"),
        DataText("more/c.jsonl:2", BOOK, "Where?"),
    ]
    assert [each.name for each in read_dataset(str(data / "more" / "c.jsonl"), pytest.fail)] == [
        "c.jsonl:1",
        "c.jsonl:2",
    ]


def test_a_hubs_data_set_is_fetched(data, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return data

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert len(read_dataset("someone/books", pytest.fail)) == 4
    read_dataset("someone/books:test/*.jsonl", pytest.fail)
    assert [options["allow_patterns"] for _, options in asked] == [["*.txt", "*.jsonl", "*.parquet"], ["test/*.jsonl"]]
    assert {(name, options["repo_type"]) for name, options in asked} == {("someone/books", "dataset")}

    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(FetchError, match=r"no folder someone/books here, and the hub cannot be reached .*: no network"):
        read_dataset("someone/books", pytest.fail)


def test_rows_of_parquet_files(tmp_path):
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    rows = [{"document": {"text": BOOK}, "question": {"text": "Who?"}, "answers": ["a"]}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "test.parquet")
    assert read_dataset(str(tmp_path), pytest.fail) == [DataText("test.parquet:1", BOOK, "Who?")]


def test_a_damaged_parquet_file_is_one_clear_error(tmp_path, monkeypatch):
    class ArrowInvalid(ValueError):
        pass

    def opened(file):
        raise ArrowInvalid("Parquet magic bytes not found in footer.\nEither the file is corrupted or")

    modules = {"pyarrow": {"ArrowException": ArrowInvalid}, "pyarrow.parquet": {"ParquetFile": opened}}
    for name, values in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**values))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(PromptError, match=r"a\.parquet cannot be read as a Parquet file: .* in footer\.$"):
        read_dataset(str(tmp_path), pytest.fail)


@pytest.mark.parametrize("line", ["{}", '{"text": " "}', "[1]", "{", '{"text": 5}', '{"text": "a", "question": 5}'])
def test_what_is_no_text_is_one_clear_error(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(PromptError, match=r"a\.jsonl(:1|, line 1) (has no text|is no JSON)"):
        read_dataset(str(tmp_path), pytest.fail)


def test_what_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(PromptError, match="has no texts"):
        read_dataset(str(tmp_path), pytest.fail)
    for source in ("none.jsonl", "./none", "pg19/test.jsonl", "pg19/a.txt", "pg19/a.parquet", "a/b/c", "/none/x"):
        with pytest.raises(SettingsError, match="there is no data set"):
            check_dataset(source)
    check_dataset("owner/name")


def test_a_context_shortens_the_text_and_not_the_question(triforce_here, data, tmp_path):
    args = ("bench", "--data", data, *SMALL, "--context", "60,90", "--json", "--points", tmp_path / "runs.jsonl")
    code, out, err = triforce_here(*args)
    assert code == 0, err
    prompts = json.loads(out)["prompts"]
    assert [each["name"] for each in prompts] == ["a.txt", "more/c.jsonl:1", "more/c.jsonl:2"]  # b.txt is too short
    assert {each["tokens"] for each in prompts} == {90}
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [line["prompt_tokens"] for line in lines] == [60, 90] * 3
    answer = triforce_here("bench", "--data", data, *SMALL, "--context", "90", "--prompts", "1", "--json")
    assert [each["name"] for each in json.loads(answer.stdout)["prompts"]] == ["a.txt"]
    for more, words in (
        ((BOOK, "--context", "60"), "--data takes its prompts from a data set alone"),
        (("--context", "10,60"), "--context 10 has no room for the question of more/c.jsonl:1"),
        (("--context", "1500"), "no text of the data set is long enough"),
    ):
        code, out, err = triforce_here("bench", "--data", data, *SMALL, *more)
        assert (code, out) == (2, "") and words in err, err


def test_texts_that_are_too_short_are_told():
    def opened(texts, context, excerpts, command="bench"):
        warnings = []
        named = [(str(number), text) for number, text in enumerate(texts)]
        request = SimpleNamespace(command=command)
        asked = BenchRequest(request, named, None, {}, context, excerpts, 1, is_dataset=True)
        return len(list(open_prompts(asked, tokenizer, warnings.append))), warnings

    tokenizer = SimpleNamespace(encode=lambda text, special_tokens: list(map(ord, text)))
    short, long = "abc", "abcdefgh"
    assert opened([short, long, long], (8,), 2) == (2, [])
    told = "2 of the 3 prompts asked for: 1 text is too short for a context of 8 tokens"
    assert opened([short, long, long], (8,), 3) == (2, [told])
    told = "1 of the 9 prompts asked for: the data set has 3 texts and 2 texts are too short for a context of 8 tokens"
    assert opened([short, long, short], (8,), 9) == (1, [told])
    with pytest.raises(PromptError, match="for a context of 9 tokens: the longest has 8 tokens") as refused:
        opened([long, short], (9,), 2)
    assert refused.value.hint == "use a smaller --context, or give a data set with longer texts"
    with pytest.raises(PromptError) as refused:
        opened([long, short], (9,), 2, "experiment")
    assert refused.value.hint == "give a data set with longer texts"


def test_the_question_stays_at_the_end():
    prompt = BenchPrompt("a", [1, 2, 3, 4, 8, 9], {2: [[1, 2, 3, 4, 8, 9], [5, 6, 7, 0, 8, 9]]}, 2)
    assert prompt.first(None) == prompt.first(6) == [1, 2, 3, 4, 8, 9] and prompt.first(4) == [1, 2, 8, 9]
    assert prompt.sequences(2, 3) == [[1, 8, 9], [5, 8, 9]]
