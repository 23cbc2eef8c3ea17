"""`triforce summarize` in this process on a tiny model: prompts, headings, ranges, and too long documents."""

import json
from itertools import pairwise

import pytest

from triforce_cli.summarize.instructions import AnswerStyle, Template, load_templates

GREEDY = ("--temperature", "0", "-n", "12")
STORY = "The cat sat on the mat. {document} and {instruction} are words in braces.\n\n" * 4


@pytest.fixture
def triforce(triforce_here):
    return triforce_here


@pytest.fixture
def story(tmp_path):
    def write(name="story.txt", text=STORY):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def events(out):
    return [json.loads(line) for line in out.splitlines()]


def refused(result, *words, code=2):
    assert (result[0], result[1]) == (code, ""), result
    lines = result[2].splitlines()
    error = next(number for number, line in enumerate(lines) if line.startswith("error: "))
    assert lines[error + 1 :] and all(line.startswith("hint: ") for line in lines[error + 1 :])
    for word in words:
        assert word in result[2]
    return True


def test_one_file_gives_the_text_alone_as_generate_would(triforce, story):
    code, out, err = triforce("summarize", story(), *GREEDY)
    assert code == 0, err
    assert len(err.splitlines()) == 1
    prompt = load_templates().document.filled(STORY, AnswerStyle().instruction())
    assert out == triforce("generate", prompt, *GREEDY)[1].rstrip("\n") + "\n"


def test_the_document_comes_first_and_is_filled_in_literally():
    templates = load_templates()
    for template in (templates.document, templates.part, templates.notes):
        filled = template.filled("<{instruction} {document}>", "Do {document}.")
        assert filled.index("<{instruction} {document}>") < filled.index("Do {document}.")
        assert filled.endswith("Do {document}.")
    assert templates.document.filled("x", "y").startswith("x")
    assert Template("a {document} b {other}").filled("x", "y") == "a x b {other}"


def test_the_instruction_contains_the_options():
    said = AnswerStyle("200", True, "the sea", "German").instruction()
    for word in ("200 words", '"- "', "the sea", "German", "Summarize"):
        assert word in said
    asked = AnswerStyle(focus="money").instruction("Who pays?")
    assert "Who pays?" in asked and "money" in asked and "Summarize" not in asked
    assert (
        AnswerStyle("short").new_tokens
        < AnswerStyle().new_tokens
        < AnswerStyle("long").new_tokens
        < AnswerStyle("900 words").new_tokens
    )
    note = AnswerStyle("short", True, "the sea").note_taking()
    assert "the sea" in note and '"- "' not in note
    assert "Who pays?" in AnswerStyle().note_taking("Who pays?")


def test_a_second_question_reads_the_question_only(triforce, story):
    questions = ("--question", "Who sat?", "--question", "Where did it sit, and on which of the many mats?")
    code, out, err = triforce("summarize", story(), *questions, *GREEDY, "--json")
    assert code == 0, err
    kinds = [event["type"] for event in events(out)]
    assert kinds.count("section") == kinds.count("done") == 2
    assert kinds[0] == "section" and kinds[-1] == "done"
    first, second = (event for event in events(out) if event["type"] == "done")
    assert second["prompt_tokens"] > first["prompt_tokens"] > 250
    begins = [event["done"] for before, event in pairwise(events(out)) if before["type"] == "section"]
    assert begins[0] == 0
    assert begins[1] > 250 and second["prompt_tokens"] - begins[1] < 100  # so much was there, and is not read again
    assert [event["question"] for event in events(out) if event["type"] == "section"] == list(questions[1::2])


def test_headings_for_several_files_and_questions(triforce, story):
    a, b = story("a.txt", "One cat."), story("b.md", "Two dogs.")
    texts = [triforce("summarize", path, *GREEDY, "-q")[1] for path in (a, b)]
    code, out, _ = triforce("summarize", a, b, *GREEDY, "-q")
    assert code == 0
    assert out == f"# {a}\n\n{texts[0]}\n# {b}\n\n{texts[1]}"
    asked = ("--question", "Who?", "--question", "Why?")
    lines = triforce("summarize", a, b, *asked, *GREEDY, "-q")[1].splitlines()
    assert [line for line in lines if line.startswith(("# ", "## "))] == [
        f"# {a}",
        "## Who?",
        "## Why?",
        f"# {b}",
        "## Who?",
        "## Why?",
    ]
    assert triforce("summarize", a, *asked, *GREEDY, "-q")[1].startswith("## Who?\n\n")


def test_files_together_are_one_document(triforce, story):
    a, b = story("a.txt", "One cat.\n"), story("b.md", "Two dogs.\n")
    code, out, err = triforce("summarize", a, b, "--together", *GREEDY, "--json")
    assert code == 0, err
    (section,) = (event for event in events(out) if event["type"] == "section")
    assert section == {"type": "section", "document": f"{a}, {b}", "question": None}
    joined = story("joined.txt", f"# {a}\n\nOne cat.\n\n# {b}\n\nTwo dogs.")
    single = events(triforce("summarize", joined, *GREEDY, "--json")[1])
    assert text_of(events(out)) == text_of(single)


def text_of(found):
    return "".join(event["text"] for event in found if event["type"] == "text")


def test_a_range_of_a_document(triforce, story):
    path = story()
    half = triforce("summarize", path, "--from", "10%", "--to", "50%", *GREEDY, "--json")
    whole = triforce("summarize", path, *GREEDY, "--json")
    assert half[0] == whole[0] == 0
    assert "tokens" in half[2] and str(path) in half[2]
    sizes = [events(result[1])[-1]["prompt_tokens"] for result in (half, whole)]
    assert sizes[0] < sizes[1] - 100
    refused(triforce("summarize", path, "--from", "50%", "--to", "10%"), "selects no text", "10%")
    refused(triforce("summarize", path, "--from", "99999"), "99,999", str(path))


def test_a_folder_stands_for_its_texts_which_are_listed(triforce, story, tmp_path):
    for name in ("b.md", "a.txt", "picture.png", ".hidden.txt", "c.EPUB/x.txt"):
        (tmp_path / "books" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / name).write_text("One cat.")
    (tmp_path / "books" / "empty.txt").touch()
    code, out, err = triforce("summarize", tmp_path / "books", *GREEDY, "--json")
    assert code == 0 and err.startswith(f"{tmp_path / 'books'}: 2 files: a.txt, b.md\n")
    assert [event["document"][-5:] for event in events(out) if event["type"] == "section"] == ["a.txt", "/b.md"]
    (tmp_path / "none").mkdir()
    for command in ("summarize", "chat"):
        refused(triforce(command, tmp_path / "none"), "has no text files")


def test_own_templates(triforce, story):
    mine = story("mine.txt", "{document}\n\nIn short: {instruction}")
    code, out, err = triforce("summarize", story(), "--prompt", mine, *GREEDY)
    assert code == 0, err
    prompt = f"{STORY}\n\nIn short: {AnswerStyle().instruction()}"
    assert out.rstrip("\n") == triforce("generate", prompt, *GREEDY)[1].rstrip("\n")
    refused(triforce("summarize", story(), "--prompt", story("no.txt", "{instruction}")), "no.txt", "{document}")
    only = story("only.txt", "{document}\n\nTL;DR:")
    assert triforce("summarize", story(), "--prompt", only, "--raw", *GREEDY)[0] == 0
    refused(triforce("summarize", story(), "--prompt", only, "--question", "Why?"), "--question", "{instruction}")


def test_wrong_use(triforce, story, tmp_path):
    path = story()
    refused(triforce("summarize"), "standard input is empty")
    refused(triforce("summarize", tmp_path / "stroy.txt"), "did you mean", "story.txt")
    refused(triforce("summarize", story("empty.txt", " \n")), "empty.txt")
    refused(triforce("summarize", path, "--length", "tiny"), "'tiny'", "such as 200")
    refused(triforce("summarize", path, "--prompt", "-"), "--prompt takes a template file", "give the file")
    refused(triforce("summarize", path, "--question", " "), "question")
    refused(triforce("summarize", path, "--focus", ""), "--focus")
    refused(triforce("summarize", path, "--verify"), "--temperature 0")
    refused(triforce("summarize", path, "--memory", "1000"), "not enough memory", code=1)
    refused(triforce("summarize", path, "--map-reduce"), "--map-reduce was removed", "read in parts")


def test_a_dry_run_and_verification(triforce, story):
    path = story()
    code, out, err = triforce("summarize", path, "--dry-run", "--json", *GREEDY)
    assert (code, err) == (0, "")
    plan = json.loads(out)["plan"]
    assert plan["fits"] and plan["context"] > 250
    asked = ("--question", "Who?", "--question", "What did it do?")
    code, out, err = triforce("summarize", path, *asked, "--verify", *GREEDY, "--json")
    assert code == 0, err
    assert [event["verify"]["lossless"] for event in events(out) if event["type"] == "done"] == [True, True]


@pytest.mark.parametrize("text", ["\U0001f600 and the cat", "x\n\n\n\n\n and the cat"])
def test_a_piece_without_text_is_refused(triforce_here, tmp_path, text):
    (tmp_path / "x.txt").write_text(text)
    code, out, err = triforce_here("summarize", tmp_path / "x.txt", "--from", 1, "--to", 3, "-n", 4)
    assert (code, out) == (2, ""), err
