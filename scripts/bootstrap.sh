#!/usr/bin/env bash
# Makes .venv ready: a Python 3.12, every package of requirements.lock, regrasp itself (editable)
# and its LeRobot plugin; and the system's GL libraries where this user may install them.
# Safe to run again: it does only what is missing.
#   scripts/bootstrap.sh
#   REGRASP_PYTHON=/path/to/python3.12 scripts/bootstrap.sh   # to choose the interpreter
#   REGRASP_SYSTEM_PACKAGES=0 scripts/bootstrap.sh            # to leave the system alone
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
TOOLS=.venv-tools
PLUGIN=lerobot_policy_regrasp # a distribution of its own, because LeRobot finds plugins by that name
STAMP=$VENV/.regrasp-stamp
GL_PACKAGES="libegl1 libgl1 libgles2 libegl-mesa0 libgl1-mesa-dri libosmesa6"
TEST_PACKAGES="chromium"

say() { printf 'bootstrap: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

# --- the system's packages: rendering without a display, and a browser for the report's test ----
missing_packages() {
    local name
    for name in $GL_PACKAGES $TEST_PACKAGES; do
        case "$(dpkg-query -W -f='${Status}' "$name" 2>/dev/null || true)" in
            *" installed") ;;
            *) printf '%s ' "$name" ;;
        esac
    done
}

system_packages() {
    if [ "${REGRASP_SYSTEM_PACKAGES:-1}" = 0 ]; then
        return
    fi
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        say "not a Debian system: rendering needs its EGL or OSMesa libraries (Debian names:" \
            "$GL_PACKAGES), and the report's test a chromium"
        return
    fi
    local missing command
    missing=$(missing_packages)
    if [ -z "$missing" ]; then
        return
    fi
    command="apt-get install -y --no-install-recommends $missing"
    if [ "$(id -u)" != 0 ]; then
        say "system packages are missing; as root: apt-get update && $command"
        return
    fi
    say "installing $missing"
    # A machine whose packages come some other way still gets its Python environment.
    if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive $command >/dev/null; }; then
        say "WARNING: could not install $missing; rendering may fail until this works: $command"
    fi
}

# --- uv and a Python 3.12 that really runs (a pyenv shim can exist and not run) -----------------
find_uv() {
    if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
        command -v uv
        return
    fi
    if ! "$TOOLS/bin/uv" --version >/dev/null 2>&1; then
        local python
        python=$(command -v python3 || command -v python) ||
            fail "neither uv nor python3 is on PATH; install one of them"
        say "installing uv into $TOOLS"
        PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --disable-pip-version-check --upgrade \
            --target "$TOOLS" uv >&2 ||
            fail "'$python -m pip install uv' failed; install uv yourself and run this again"
    fi
    printf '%s\n' "$PWD/$TOOLS/bin/uv"
}

is_python312() {
    [ -n "$1" ] && "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python() {
    local uv=$1 candidate
    if [ -n "${REGRASP_PYTHON:-}" ]; then
        is_python312 "$REGRASP_PYTHON" || fail "REGRASP_PYTHON=$REGRASP_PYTHON is no Python 3.12"
        printf '%s\n' "$REGRASP_PYTHON"
        return
    fi
    for candidate in \
        "$(command -v python3.12 || true)" \
        "$(command -v python3 || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python \
        "$("$uv" python find --no-python-downloads 3.12 2>/dev/null || true)"; do
        if is_python312 "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "no Python 3.12 here; asking uv for one"
    if "$uv" python install 3.12 >&2; then
        "$uv" python find 3.12
        return
    fi
    fail "no Python 3.12 found on PATH, under pyenv or by uv, and uv could not download one;" \
        "install it (python3.12, or 'pyenv install 3.12') or set REGRASP_PYTHON"
}

# --- the environment ----------------------------------------------------------------------------
fingerprint() {
    { pwd && cat requirements.lock pyproject.toml $PLUGIN/pyproject.toml scripts/bootstrap.sh; } |
        sha256sum
}

python_environment() {
    if is_python312 "$VENV/bin/python" && [ "$(fingerprint)" = "$(cat $STAMP 2>/dev/null)" ]; then
        return
    fi
    local uv python
    uv=$(find_uv)
    if ! is_python312 "$VENV/bin/python"; then
        python=$(find_python "$uv")
        say "creating $VENV with $python"
        rm -rf "$VENV"
        "$uv" venv --quiet --python "$python" "$VENV"
    fi
    rm -f "$STAMP"
    say "installing requirements.lock (about 3 GB to download the first time)"
    VIRTUAL_ENV=$PWD/$VENV "$uv" pip install --quiet -r requirements.lock
    # setuptools is in the lock, so that building needs nothing that is not pinned.
    VIRTUAL_ENV=$PWD/$VENV "$uv" pip install --quiet --no-deps --no-build-isolation \
        -e . -e "./$PLUGIN"
    fingerprint >"$STAMP"
    say "ready: $VENV/bin/regrasp --help"
}

system_packages
python_environment
