#!/usr/bin/env bash
# Installs triforce with its test extras into .venv, then lints and runs the whole suite.
#
#   scripts/test.sh                          everything that runs daily
#   scripts/test.sh -k cache                 arguments go to pytest; paths are relative to the repository
#   scripts/test.sh -m long                  the rest: run it when a kernel or an architecture changes, and for a release
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

TORCH="${TORCH:-default}" # the build that pip finds, whatever the machine
set_up test
cd "$root"
"$venv/bin/python" -m ruff check .
"$venv/bin/python" -m ruff format --check .
"$venv/bin/lint-imports"
"$venv/bin/python" -m mypy
# Hundreds of processes start: without bytecode each would compile all modules.
export PYTHONDONTWRITEBYTECODE=
# One process per core with one thread each: small models and short-lived processes are slower with more threads.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A test that hangs fails after ten times what the slowest takes; should it hang outside Python, its stack is printed.
ending=(--timeout 600 -o faulthandler_timeout=660)
exec "$venv/bin/python" -m pytest -n auto --maxprocesses 4 --dist worksteal "${ending[@]}" "$@"
