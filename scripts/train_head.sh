#!/usr/bin/env bash
# Trains an EAGLE-3 head for the embedded model on books, and measures it on Frankenstein, which is held out.
#
#   scripts/train_head.sh head moby-dick.txt pride-and-prejudice.txt
#   scripts/train_head.sh head *.txt -- --steps 2000     more options of `triforce distill`
#
# Public-domain books are at https://www.gutenberg.org/. Stop it when you like: the same command goes on.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [[ $# -lt 2 ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
output="$1"
shift
data=()
while [[ $# -gt 0 && "$1" != -- ]]; do
    data+=(--data "$1")
    shift
done
set_up demo
exec nice -n 10 "$venv/bin/triforce" distill --output "$output" "${data[@]}" \
    --held-out "$root/examples/frankenstein.txt" "${@:2}"
