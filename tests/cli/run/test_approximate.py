"""`--approximate`: a lossy run says so everywhere, and is refused where an exact one was asked for."""

import pytest

from offload.settings.methods import APPROXIMATIONS
from tests.support.command import STATISTICS, assert_error, done

PROMPT = ("generate", "Once upon a time " * 40, "-n", "8", "--temperature", "0", "--raw")
SMALL = ("--budget", "64", "--set", "sink=2", "--set", "window=16")


@pytest.mark.parametrize("mode", APPROXIMATIONS)
def test_a_lossy_run_says_so(triforce, mode):
    result = triforce(*PROMPT, *SMALL, "--json", "--approximate", mode)
    last = done(result.stdout)
    assert (last["exact"], last["approximate"], last["method"]) == (False, mode, "ar")
    assert last["settings"]["approximate"] == mode
    assert f"--approximate {mode} changes the answer" in result.stderr
    assert result.stderr.count("warning: ") == 1
    statistics = result.stderr.splitlines()[-1]
    assert STATISTICS.search(statistics) and f"approximate ({mode})" in statistics
    assert last["cached_tokens"] == 0


@pytest.mark.long
def test_a_prompt_beyond_the_context_is_read_and_nothing_of_it_is_kept_on_disk(triforce, tmp_path):
    text = "the cat and the dog " * 900
    wanted = ("-n", "4", "--raw", *SMALL, "--json")
    assert_error(triforce("generate", text, *wanted), 2, "leaves no room in the model's context")
    more = {"TRIFORCE_CACHE": "1"}  # for exact runs
    result = triforce("generate", text, *wanted, "--approximate", "h2o", env=more)
    assert result.returncode == 0, result.stderr
    assert done(result.stdout)["prompt_tokens"] > 2048
    assert done(result.stdout)["new_tokens"] > 0
    stretched = triforce("generate", text, *wanted, "--approximate", "h2o", "--extend-context")
    assert stretched.returncode == 0 and "YaRN" not in stretched.stderr
    assert not list((tmp_path / "home").rglob("prompts/*"))
    again = triforce("generate", text, *wanted, "--approximate", "h2o", env=more)
    assert done(again.stdout)["restored_tokens"] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--verify",), ("--verify compares with exact decoding", "leave one of the two out")),
        (("--dry-run",), ("--dry-run plans exact decoding",)),
        (("--method", "triforce"), ("h2o decodes plainly, and the method is triforce", "leave --method out")),
        (("--offload", "stream"), ("--offload stream offloads keys and values",)),
        (("--link", "1"), ("--link 1.0 offloads keys and values",)),
        (("--disk", "."), ("--disk . offloads keys and values",)),
        (("--approximate", "h20"), ("approximate is 'h20'", "streaming-llm, h2o")),
    ],
)
def test_refused_with_flags_that_need_exact_answers(triforce, more, words):
    assert_error(triforce(*PROMPT, *SMALL, "--approximate", "h2o", *more), 2, *words)


def test_no_profile_chooses_it(triforce, written):
    path = written({"name": "mine", "description": "", "device": "cpu", "gpus": 0, "options": {"approximate": "h2o"}})
    assert_error(triforce(*PROMPT, "--profile", path), 2, "approximate", "options")
    plain = written({"name": "mine", "description": "", "device": "cpu", "gpus": 0, "options": {"method": "lookup"}})
    result = triforce(*PROMPT, *SMALL, "--profile", plain, "--approximate", "h2o", "--json")
    assert done(result.stdout)["method"] == "ar"
