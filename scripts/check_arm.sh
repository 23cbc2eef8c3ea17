#!/usr/bin/env bash
# Compiles the native kernel for 64-bit ARM, runs all of its functions there at every level under qemu, compares the
# results with those of this processor's portable level (tests/kernels/native/levels.c), and prints OK or fails.
#
#   scripts/check_arm.sh
#
# Needs gcc and Debian's packages gcc-aarch64-linux-gnu and qemu-user, or their like: half a minute. An emulator says
# nothing about speed.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

readonly cross="${CROSS:-aarch64-linux-gnu}" levels=(portable neon bf16)
readonly flags=(-std=gnu11 -O2 -pthread -Wno-psabi "$root/tests/kernels/native/levels.c" -lm)

for tool in gcc "$cross-gcc" qemu-aarch64; do
    command -v "$tool" >/dev/null || fail "there is no $tool" "install gcc, gcc-aarch64-linux-gnu and qemu-user"
done
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
gcc "${flags[@]}" -o "$work/here"
"$cross-gcc" "${flags[@]}" -static -o "$work/arm"
"$work/here" write portable >"$work/expected"
for level in "${levels[@]}"; do
    qemu-aarch64 "$work/arm" check "$level" <"$work/expected" >&2 || fail "the level $level is wrong" "see above"
done
say "OK: the levels ${levels[*]} have the results of this processor's portable level"
