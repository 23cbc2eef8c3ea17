"""The examples of docs/library.md run, one after the other, as a reader would try them."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FIRST, *OTHERS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text("utf-8"), re.DOTALL)
SAYS = {  # what an example's output must match, by a part of its code
    "东京": "东京是日本的首都。🗼🎉",
    "stop=": r" (eos|stop|length)\n$",
    "session.ask": r"\n.+\n",
    "llm.batch": r"(?m)^1 (eos|length) ",
    "temprature": r"did you mean temperature\?",
    "Prefilled(": r"passes over all keys and values",
    "resident_layers": ".",
    "logprobs": r"(?m)^\(\d+,.*\) \[-",
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory, embedded_model_dir):
    """The names of the first example, which the others go on from, in a folder with a short book."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("library"))
        opening = (ROOT / "examples" / "frankenstein-opening.txt").read_text("utf-8")
        Path("book.txt").write_text(opening[:300], "utf-8")
        names = {}
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(FIRST, names)
        assert output.getvalue().strip()
        yield names


@pytest.mark.parametrize("example", OTHERS, ids=lambda example: re.sub(r"[^a-z]+", " ", example)[:40])
def test_an_example_of_the_library_runs(shell, example, capsys):
    exec(example, shell)
    output = capsys.readouterr().out
    (said,) = (said for part, said in SAYS.items() if part in example)
    assert re.search(said, output)


def test_each_kind_of_example_is_there():
    assert len(OTHERS) == len(SAYS)
