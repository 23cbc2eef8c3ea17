#!/usr/bin/env bash
# Runs the native kernel's tests against builds with AddressSanitizer and UndefinedBehaviorSanitizer, and prints OK or fails.
#
#   scripts/check_sanitizers.sh              all of them
#   scripts/check_sanitizers.sh -k linear    arguments go to pytest
#
# Needs GCC with both runtimes on Linux. Two builds: this processor's levels, and AVX-512 emulated.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# runtime NAME: gcc answers with the bare name where it has no such file.
runtime() {
    local path
    path="$(gcc -print-file-name="$1")"
    [[ "$path" == /* ]] || fail "gcc has no $1" "install the sanitizers of this gcc"
    printf '%s' "$path"
}

# build LIBRARY FLAG...
build() {
    local library="$1"
    shift
    gcc -std=gnu11 -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
        -pthread -fPIC -Wno-psabi "$@" -c "$root/offload/kernels/native/kernel.c" -o "$library.o"
    gcc -shared -fsanitize=address,undefined "$library.o" -lm -o "$library"
}

command -v gcc >/dev/null || fail "there is no gcc" "install gcc; the sanitizer runtimes of other compilers have other names"
# All are preloaded; libstdc++ because ASan must intercept the exceptions that torch throws.
asan="$(runtime libasan.so)"
ubsan="$(runtime libubsan.so)"
cxx="$(runtime libstdc++.so.6)"
set_up test
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
build "$work/kernel.so"
build "$work/emulated.so" -DTRIFORCE_EMULATE

cd "$root"
tests=(tests/kernels/native/test_{attention,tree,rows,pool,score_keys}.py tests/kv_cache/test_block_store.py)
# Python and torch do not free everything at exit, so leaks are not reported. --capture=sys: a report must reach stderr before pytest aborts.
LD_PRELOAD="$asan $ubsan $cxx" OMP_NUM_THREADS=1 \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1 \
    TRIFORCE_TEST_KERNEL="$work/kernel.so" TRIFORCE_TEST_EMULATED="$work/emulated.so" \
    "$venv/bin/python" -m pytest -q --capture=sys "${tests[@]}" "$@" ||
    fail "the kernel's tests fail under the sanitizers" "see the report above"
say "OK: no error found by AddressSanitizer or UndefinedBehaviorSanitizer"
