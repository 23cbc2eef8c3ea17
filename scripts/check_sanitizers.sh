#!/usr/bin/env bash
# Runs the native kernel under the sanitizers of GCC, and prints OK or fails: its tests under AddressSanitizer and
# UndefinedBehaviorSanitizer, and its threads under ThreadSanitizer.
#
#   scripts/check_sanitizers.sh              all of it: about half an hour
#   scripts/check_sanitizers.sh -k linear    arguments go to pytest
#   scripts/check_sanitizers.sh threads      ThreadSanitizer alone: a minute
#
# Needs GCC with the runtimes on Linux. Two builds: this processor's levels, and AVX-512 emulated; the threads' is of the
# portable level, without Python, which is not built for ThreadSanitizer (tests/kernels/native/races.c).
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
    gcc -std=gnu11 -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all \
        -pthread -fPIC -Wno-psabi "$@" -c "$root/offload/kernels/native/kernel.c" -o "$library.o"
    gcc -shared -fsanitize=address,undefined "$library.o" -lm -o "$library"
}

check_threads() {
    runtime libtsan.so >/dev/null
    gcc -std=gnu11 -g -O1 -fsanitize=thread -pthread -Wno-psabi "$root/tests/kernels/native/races.c" -lm -o "$work/races"
    # No suppressions: there is no race to excuse.
    TSAN_OPTIONS=halt_on_error=1 "$work/races" >&2 || fail "the kernel's threads fail under ThreadSanitizer" "see above"
}

command -v gcc >/dev/null || fail "there is no gcc" "install gcc; the sanitizer runtimes of other compilers have other names"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
if [[ "${1:-}" == threads ]]; then
    check_threads
    say "OK: no race found by ThreadSanitizer"
    exit
fi
asan="$(runtime libasan.so)"
ubsan="$(runtime libubsan.so)"
cxx="$(runtime libstdc++.so.6)"
set_up test
build "$work/kernel.so"
build "$work/emulated.so" -DTRIFORCE_EMULATE
cd "$root"
tests=(tests/kernels/native/test_{attention,tree,rows,pool,score_keys,observe,kv_groups,packed_kv,quantized}.py)
tests+=(tests/caches/test_block_store.py)
# libstdc++ is preloaded too: ASan must intercept the exceptions that torch throws. Python and torch do not free
# everything at exit, so leaks are not reported. --capture=sys: a report must reach stderr before pytest aborts.
LD_PRELOAD="$asan $ubsan $cxx" OMP_NUM_THREADS=1 \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1 \
    TRIFORCE_TEST_KERNEL="$work/kernel.so" TRIFORCE_TEST_EMULATED="$work/emulated.so" \
    "$venv/bin/python" -m pytest -q --capture=sys "${tests[@]}" "$@" ||
    fail "the kernel's tests fail under the sanitizers" "see the report above"
check_threads
say "OK: no error found by AddressSanitizer, UndefinedBehaviorSanitizer or ThreadSanitizer"
