"""The memory that a batch really takes, in a process of its own."""

import json
import subprocess
import sys

import pytest

from tests.support.command import COMMAND, environment
from tests.support.models import make_hf_model, make_tokenizer
from tests.support.paths import DATA

MIB = 2**20
TOKENS, SLACK = 2350, 12  # of a prompt; MiB by which two runs may differ anyway
MEASURE = """import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
sys.exit(code)"""


@pytest.mark.long
@pytest.mark.parametrize("cache", ["--cache", "--no-cache"])
@pytest.mark.skipif(sys.platform != "linux", reason="maximum RSS is in KB on Linux alone")
def test_six_sequences_one_after_the_other_take_the_memory_of_one(tmp_path, cache):
    """32 KB of keys and values a token; a second sequence, kept for the next one, would take 73 MiB more.

    With the prompt cache, blocks that are saved and restored take up to six blocks of 4 MiB more.
    """
    model = make_hf_model("llama", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
    model.config.max_position_embeddings = 4096
    model.save_pretrained(tmp_path / "model")
    make_tokenizer(alphabet=None).save_pretrained(tmp_path / "model")
    text = (DATA / "moby-dick-opening.txt").read_text("utf-8")

    def peak(count, cache):
        lines = [{"id": key, "prompt": text[100 * key :][:TOKENS], "raw": True} for key in range(count)]
        file = tmp_path / f"{count}.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        options = ("--memory", "120MiB", "--dtype", "float32", "-n", "4", "--temperature", "0", "--quiet", cache)
        command = [sys.executable, "-c", MEASURE, *COMMAND, "generate", "--batch", file, *options]
        env = environment(tmp_path, tmp_path / "model")
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stderr
        return int(result.stdout)

    buffers = 24 if cache == "--cache" else 0
    found, bound = peak(6, cache), peak(1, "--no-cache") + buffers + SLACK
    assert found <= bound
