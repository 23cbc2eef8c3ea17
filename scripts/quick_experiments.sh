#!/usr/bin/env bash
# Run experiments quickly, one after the other, and keep what they measured for the pictures of docs/experiments.md:
#
#   scripts/quick_experiments.sh                  # those that have a picture
#   scripts/quick_experiments.sh budget h2o       # by name
#   MACHINE=epyc-2-cores scripts/quick_experiments.sh && python scripts/pictures.py
#
# Writes docs/benchmarks/DATE-experiment-NAME-MACHINE.json. Finished runs of speed are kept in quick-runs.jsonl under
# the system's folder for temporary files: after Ctrl-C, the same command goes on after them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
machine=${MACHINE:-$("$python" -c 'import platform, os; print(f"{platform.machine()}-{os.cpu_count()}-cores")')}
points=${TMPDIR:-/tmp}/triforce-quick-runs.jsonl
names=("$@")
if [ ${#names[@]} -eq 0 ]; then
    read -r -a names <<<"$(cd scripts && PYTHONPATH=.. "$python" -c \
        'import experiment_charts; print(*dict.fromkeys(each.experiment for each in experiment_charts.CHARTS))')"
fi
for name in "${names[@]}"; do
    resume=()
    grep -qE '^  kind: (quality|attention|heavy-hitters)' "experiments/$name.yaml" || resume=(--points "$points")
    "$python" -m triforce_cli experiment "$name" --quick --json "${resume[@]}" >"docs/benchmarks/.$name.part"
    sed "s#$points#runs.jsonl#" "docs/benchmarks/.$name.part" >"docs/benchmarks/$(date +%F)-experiment-$name-$machine.json"
    rm "docs/benchmarks/.$name.part"
done
