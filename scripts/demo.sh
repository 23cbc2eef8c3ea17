#!/usr/bin/env bash
# Installs triforce into .venv, fetches the embedded model and reads the opening of Frankenstein with it.
#
#   scripts/demo.sh                                  a summary
#   scripts/demo.sh "Who writes these letters?"      your own question (first argument)
#   scripts/demo.sh --temperature 0 --verbose        any option of `triforce generate`
#   PYTHON=python3.12 scripts/demo.sh                use that interpreter
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

question="Summarize the text above in a few sentences."
if [[ $# -gt 0 && "$1" != -* ]]; then
    question="$1"
    shift
fi

set_up demo
# The model is fetched on its first use. stdin is closed, because triforce would wait for a prompt on it.
"$venv/bin/triforce" generate --prompt-file "$root/examples/frankenstein-opening.txt" --max-new-tokens 200 \
    "$question" "$@" </dev/null
say ""
say "Now your own book:  source $venv/bin/activate && triforce summarize book.txt"
