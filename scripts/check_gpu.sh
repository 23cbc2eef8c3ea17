#!/usr/bin/env bash
# Checks and measures triforce on a CUDA GPU in six steps (scripts/check_gpu.py): at most seven minutes.
#   scripts/check_gpu.sh [--only 2,5]          all steps or some; the table is printed last
#   scripts/check_gpu.sh --device cpu          a rehearsal without a GPU, in miniature
#   WHEELS=folder scripts/check_gpu.sh         first install wheels of a folder, for this run alone
#   MISSING=gguf,uvicorn scripts/check_gpu.sh  run as if these modules were missing
# Needs torch with Triton and pytest in $PYTHON (else .venv's python, else python3). Downloads nothing.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
extra="$(mktemp -d)" && trap 'rm -rf "$extra"' EXIT
if [[ -n "${WHEELS:-}" ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$extra" "$WHEELS"/*.whl
fi
printf 'import sys\nsys.modules.update(dict.fromkeys("%s".split(",")))\n' "${MISSING:-}" >"$extra/sitecustomize.py"
if ! PYTHONPATH="$extra" "$python" -c 'import platformdirs' 2>/dev/null; then # it is asked for two folders alone
    printf 'import pathlib\nuser_cache_path = user_config_path = pathlib.Path("%s").joinpath\n' "$extra" >"$extra/platformdirs.py"
    echo 'sys.modules.pop("platformdirs", None)' >>"$extra/sitecustomize.py"
fi
PYTHONPATH="$extra:$root${PYTHONPATH:+:$PYTHONPATH}" "$python" "$root/scripts/check_gpu.py" "$@"
