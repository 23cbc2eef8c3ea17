#!/usr/bin/env bash
# Checks triforce on a CUDA GPU in under 10 minutes: builds the native kernel, runs the tests marked cuda under torch's
# sanitizer, a long prefill, and the steps of every level at 128K tokens, each beside its prediction. Leaves JSON and a
# Markdown table in FOLDER, and prints the table last. docs/gpu.md says what is in it.
#
#   scripts/check_gpu.sh [FOLDER]                     default: docs/benchmarks
#   scripts/check_gpu.sh --call 1 FOLDER              one of five calls of at most 10 minutes: all that can be checked
#   scripts/check_gpu.sh --device cpu FOLDER          a rehearsal: everything at a small size, without a GPU
#   scripts/check_gpu.sh --device cpu --bare FOLDER   the same as if only the packages below were installed
#
# Needs torch (with Triton), transformers, safetensors, psutil and numpy in $PYTHON (else .venv's python, else python3),
# gcc for the native kernel, and pytest for the tests. Installs and downloads nothing. Exit code 1: no GPU, a part failed
# or took too long, something ran slower than it could, or a measurement is more than 25 % from its prediction.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
command -v "$python" >/dev/null || {
    echo "error: no Python found" >&2
    echo "hint: give one that has torch: PYTHON=/path/to/python $0" >&2
    exit 1
}
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/scripts/check_gpu.py" "$@"
