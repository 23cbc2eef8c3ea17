"""Flags, environment and profiles: which one counts, and which values are refused."""

import json
import os
import re
from dataclasses import replace

from offload.settings.config import Sampling
from tests.support.command import assert_error
from triforce_cli.options.settings import resolve


def test_wrong_use(triforce, tmp_path):
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))
    assert_error(triforce("generate", "--prompt-file", str(tmp_path / "missing.txt")), 2, "missing.txt")
    assert_error(triforce("generate", "--prompt-file", str(tmp_path / "empty.txt")), 2, "empty")
    assert_error(triforce("generate", "--prompt-file", str(tmp_path / "data.bin")), 2, "data.bin")
    assert_error(triforce("generate"), 2)
    assert_error(triforce("generate", "hi", "--temperatur", "1"), 2, "--temperature")
    assert_error(triforce("generate", "hi", "--temperature", "-1"), 2, "temperature is -1")
    assert_error(triforce("generate", "hi", "--top-p", "nan"), 2, "top-p")
    assert_error(triforce("generate", "hi", "--set", "dry_base=0.5"), 2, "dry-base is 0.5", "from 1 to 100")
    assert_error(triforce("generate", "hi", "--set", "frequency_penalty=3"), 2, "frequency-penalty is 3", "-2 to 2")
    assert_error(triforce("generate", "hi", "--max-new-tokens", "0"), 2, "max-new-tokens")
    assert_error(triforce("generate", "hi", "--max-new-tokens", "many"), 2, "max-new-tokens is 'many'")
    assert_error(triforce("generate", "hi", "--stop", ""), 2, "stop")
    assert_error(triforce("generate", "hi", "--kernel", "avx"), 2, "kernel is 'avx'", "portable")
    assert_error(triforce("generate", "hi", "--raw", "--system", "x"), 2, "contradict")
    assert_error(triforce("generate", "hi", "--raw", "--think", "off"), 2, "no chat template, which --think needs")
    assert_error(triforce("generate", "hi", "--raw", "--show-thinking"), 2, "--show-thinking has no effect")
    assert_error(triforce("generate", "hi", "--think", "hard"), 2, "--think 'hard' is not one of on, off, auto")
    assert_error(triforce("generate", "hi", "--quiet", "--verbose"), 2, "contradict")
    assert_error(triforce("generat"), 2, "generat")
    assert_error(triforce("generate", "hi", env={"TRIFORCE_SEED": "x"}), 2, "TRIFORCE_SEED")


def test_wrong_use_of_names_and_numbers(triforce):
    assert_error(triforce("generate", "--prompt-file", ""), 2, "empty")
    assert_error(triforce("generate", "hi", "--threads", "100000000"), 2, "threads")
    assert_error(triforce("generate", "hi", "--profile", "~nobody-here/x.yaml"), 2, "~nobody-here")
    assert_error(triforce("generate", "hi", env={"TRIFORCE_HOME": "~nobody-here/x"}), 2, "TRIFORCE_HOME")
    assert_error(triforce("generate", "hi", "--system", os.fsdecode(b"caf\xe9")), 2, "--system", "UTF-8")


def test_profiles_that_do_not_work(triforce, tmp_path):
    wrong = tmp_path / "mine.yaml"
    wrong.write_text("name: mine\ndescription: x\ndevice: cpu\nhots: {}\n")
    assert_error(triforce("generate", "hi", "--gpu", "rtx-4900"), 2, "rtx-4900", "rtx-4090")
    assert_error(triforce("generate", "hi", "--profile", str(wrong)), 2, "hots", "host")


def test_settings_are_resolved_flag_environment_profile_default(triforce, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\ndescription: x\ndevice: cpu\noptions: {top_k: 5, top_p: 0.5, min_p: 0.1}\n")
    args = ("generate", "hi", "-n", "2", "--json", "--profile", str(mine))
    env = {"TRIFORCE_TOP_K": "6", "TRIFORCE_TOP_P": "0.6"}
    result = triforce(*args, "--top-k", "7", "-vv", env=env)
    settings = json.loads(result.stdout.splitlines()[-1])["settings"]
    assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (7, 0.6, 0.1)
    assert {
        "top-k: 7 (flag)",
        "top-p: 0.6 (environment)",
        "min-p: 0.1 (profile mine)",
        "context: 2048 (model)",
        "cache-limit: 20.00 GiB (default)",
        "gamma1: not set (default)",
    } <= set(result.stderr.splitlines())
    assert re.search(r"^seed: \d+ \(random\)$", result.stderr, re.M)


def test_penalties_come_from_flags_the_environment_and_profiles(triforce, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\ndescription: x\ndevice: cpu\noptions: {dry_multiplier: 0.5, no_repeat_ngram: 4}\n")
    args = ("generate", "hi", "-n", "2", "--json", "--profile", str(mine), "--set", "presence_penalty=0.5")
    result = triforce(*args, env={"TRIFORCE_DRY_ALLOWED_LENGTH": "3"})
    settings = json.loads(result.stdout.splitlines()[-1])["settings"]
    names = ("dry_multiplier", "no_repeat_ngram", "presence_penalty", "dry_allowed_length", "frequency_penalty")
    assert [settings[name] for name in names] == [0.5, 4, 0.5, 3, 0]


def test_a_given_temperature_of_0_replaces_the_models_own_sampling():
    model = Sampling(temperature=0.3, dry_multiplier=0.8, repetition_penalty=1.1)
    assert settings_with(temperature=0).sampling(model) == Sampling(temperature=0)
    given = settings_with(temperature=0, dry_multiplier=0.5)
    assert given.sampling(model) == Sampling(temperature=0, dry_multiplier=0.5)
    assert settings_with(temperature=0.9).sampling(model) == replace(model, temperature=0.9)
    assert settings_with().sampling(replace(model, temperature=0)) == replace(model, temperature=0)


def settings_with(**values):
    return resolve(values, dict.fromkeys(values, "flag"), "cpu")
