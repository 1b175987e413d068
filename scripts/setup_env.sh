#!/usr/bin/env bash
# Make (or bring up to date) a virtual environment with this package and the real
# vLLM for CPUs. Usage: scripts/setup_env.sh [EXTRAS], default EXTRAS: cpu.
# VTO_ENV names the environment's folder (default: .venv beside this checkout).
# Prints the path of its python on the last line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras="${1:-cpu}"
env_dir="${VTO_ENV:-$PWD/.venv}"
python="$env_dir/bin/python"

find_python() {
    local candidate
    for candidate in python3.12 python3.11 python3.10 python3; do
        # A version manager's shim may be on PATH without the version behind it.
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; raise SystemExit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup_env: no Python 3.10 to 3.13 found on PATH" >&2
    return 1
}

if [ ! -x "$python" ]; then
    base="$(find_python)"
    "$base" -m venv "$env_dir" || {
        echo "setup_env: '$base -m venv' failed; on Debian: apt-get install python3-venv" >&2
        exit 1
    }
fi

# Installing again costs a minute, so it is done only when what decides the
# outcome has changed.
stamp="$env_dir/.vto-installed"
want="$extras $(sha256sum pyproject.toml scripts/setup_env.sh | sha256sum) $PWD"
if ! grep -qxF "$want" "$stamp" 2>/dev/null; then
    echo "setup_env: installing .[$extras] into $env_dir (some minutes the first time)" >&2
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" \
        2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) >&2
    # vLLM's text models need none of these, and a build that does not match the
    # installed torch makes `import transformers` fail.
    for module in torchvision torchaudio torchcodec; do
        if "$python" -m pip --disable-pip-version-check show --quiet "$module" 2>/dev/null &&
            ! "$python" -c "import $module" >/dev/null 2>&1; then
            echo "setup_env: removing $module: it does not match the installed torch" >&2
            "$python" -m pip uninstall --quiet --yes "$module" >&2
        fi
    done
    echo "$want" >>"$stamp"
fi
echo "$python"
