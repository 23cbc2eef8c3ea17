# shellcheck shell=bash
# Sourced by the other scripts: `set_up NAME` leaves an environment with the project installed at $venv.
# NAME is "demo", or "test" for the test extras too. Messages go to stderr: stdout belongs to the caller.

unset CDPATH # with it, cd would print the folder
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0

# The newest torch that is tested.
readonly torch_requirement="torch==2.13.0"
readonly cpu_builds="https://download.pytorch.org/whl/cpu"

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $1"
    say "hint: $2"
    exit 1
}

# is_new_enough PYTHON: 3.10 or newer
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

version_of() { "$1" -c 'import sys; print(sys.version)' 2>/dev/null || true; }

# The environment works, and has the interpreter that PYTHON names, if it is set.
is_wanted() {
    is_new_enough "$venv/bin/python" || return 1
    [[ -z "${PYTHON:-}" || "$(version_of "$PYTHON")" == "$(version_of "$venv/bin/python")" ]]
}

# pip is installed last: without it, the creation was interrupted.
has_pip() { "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

make_venv() {
    local python="${PYTHON:-python3}" output
    command -v "$python" >/dev/null ||
        fail "there is no $python" "install Python 3.10 or newer, or give its path: PYTHON=/path/to/python3 $0"
    is_new_enough "$python" ||
        fail "$python is $("$python" --version 2>&1), not Python 3.10 or newer" "name a newer one: PYTHON=python3.12 $0"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments" "install its venv module (Debian, Ubuntu: apt install python3-venv)"
    output="$("$python" -m venv --clear "$venv" 2>&1)" || {
        say "$output"
        fail "cannot make $venv" "see the lines above; the folder must be writable"
    }
}

# What an installation depends on. The path is part of it: an editable installation and its scripts contain it.
fingerprint() {
    {
        version_of "$venv/bin/python"
        printf '%s\n' "$root" "$torch_requirement"
        # The kernel is built by the installation: an edited or pulled source would be tested in its old build.
        cat "$root"/{pyproject.toml,setup.py} "$root"/offload/kernels/native/*.[ch]
    } | cksum
}

stamp_of() { printf '%s' "$venv/installed-for-$1"; }

is_installed() {
    [[ -f "$(stamp_of "$1")" && "$(cat "$(stamp_of "$1")")" == "$(fingerprint)" ]]
}

# Written last and moved into place, so that an interrupted installation has no stamp.
write_stamp() {
    fingerprint >"$venv/stamp.partial"
    mv -f "$venv/stamp.partial" "$(stamp_of "$1")"
}

# Another index was chosen: pip asks that one alone.
has_own_index() { [[ -n "${PIP_INDEX_URL:-}" || -n "$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null)" ]]; }

has_nvidia_gpu() { [[ -e /dev/nvidia0 || -e /dev/dxg ]] || command -v nvidia-smi >/dev/null; } # dxg: in WSL

# torch is installed before the rest. Its CPU build takes 0.8 GB on disk, its CUDA build with NVIDIA's libraries 5 GB.
install_torch() {
    local build="${TORCH:-}"
    if [[ -z "$build" ]] && { has_nvidia_gpu || [[ "$(uname -s)" != Linux ]] || has_own_index; }; then build=default; fi
    if [[ "$build" == "" || "$build" == cpu ]]; then
        say "No NVIDIA GPU was found: torch's CPU build, 200 MB to download. TORCH=default takes the usual build."
        if pip_install --retries 1 --index-url "$cpu_builds" "$torch_requirement"; then return; fi
        say "It cannot be fetched from there; pip's own index has a build, too."
    fi
    pip_install "$torch_requirement"
}

pip_install() { "$venv/bin/python" -m pip install "${quiet[@]}" "$@" >&2; }

install_project() {
    local extras="$1" quiet=(--quiet)
    if [[ -t 2 ]]; then quiet=(); fi # on a terminal pip shows its progress
    rm -f "$(stamp_of demo)" "$(stamp_of test)"
    say "Installing into $venv, once: some minutes, and 1.2 GB on disk, 6 GB with torch for CUDA."
    pip_install "pip>=21.3" || pip_failed # older ones cannot install in editable mode from pyproject.toml alone
    install_torch || pip_failed
    (cd "$root" && pip_install --editable ".$extras") || pip_failed
}

pip_failed() { fail "pip could not install the project" "see its lines above; run this again to try once more"; }

set_up() {
    local name="$1" extras=""
    if is_wanted && is_installed "$name"; then return; fi
    if ! { is_wanted && has_pip; }; then make_venv; fi
    if [[ "$name" == test ]]; then extras="[test]"; fi
    install_project "$extras"
    write_stamp demo # the test environment includes the demo's
    write_stamp "$name"
}
