#!/usr/bin/env bash
# Measures what a new user meets first, in one run of a few minutes on an otherwise idle machine: the start, a busy machine,
# a document that was read before, a missing file, repetition in the default model's answers, and the README's length.
#
#   scripts/bench_first_minute.sh [BOOK ...]    default: examples/frankenstein.txt; further books count for repetition alone
#
# Uses $PYTHON, else .venv's python.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${PYTHON:-$root/.venv/bin/python}"
books=("$@")
[ ${#books[@]} -gt 0 ] || books=("$root/examples/frankenstein.txt")
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

echo "== start and refusal (wanted: at most 1.0 s more than import torch; a missing file without torch)"
"$python" scripts/bench_startup.py --rounds 5
echo "== beside a busy process (wanted: at most 1.5 times the quiet figure)"
"$python" scripts/bench_busy.py
echo "== a prompt of 31,872 tokens restored from disk (wanted: at most 1.0 s)"
"$python" scripts/bench_prompts.py --synthetic 31872 --repeats 3
echo "== repeated 8-grams with the default model's own settings"
"$python" scripts/bench_repetition.py "${books[@]}" --settings "temperature=0.3 repetition_penalty=1.1 dry_multiplier=0.8" "temperature=0.6"
echo "== README.md (wanted: at most 200 lines)"
wc -l README.md
