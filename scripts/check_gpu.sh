#!/usr/bin/env bash
# Checks triforce on a CUDA GPU: versions, kernels against fp64, the tests marked cuda, a book by every method.
#
#   scripts/check_gpu.sh                      some minutes; the table is printed last
#   scripts/check_gpu.sh --device cpu         a rehearsal without a GPU
#   scripts/check_gpu.sh kernels tests        some parts
#
# Needs torch with Triton and pytest in $PYTHON (else .venv's python, else python3). Installs and downloads nothing.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/scripts/check_gpu.py" "$@"
