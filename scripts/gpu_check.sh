#!/usr/bin/env bash
# The real thing on a machine with a CUDA device and vLLM, in under ten minutes: the
# region pinned (memfd, huge pages, file), transfers byte-exact both ways, a prefix that
# survives a restart of the engine, and a short timing against vLLM's own region. Prints
# one table.
#
# Usage: scripts/gpu_check.sh [--dry-run | --rehearse] [--only STEP...]
#   --dry-run    name the steps and what they need; run nothing
#   --rehearse   the same steps on vLLM's CPU platform, with the host worker
#   --only STEP  some of the steps
#   PYTHON       the python that has vLLM   default: python3 on the PATH
# Nothing is installed: this checkout is used as it is.
#
# Exit status: 0 all passed, 1 something failed, 77 skipped (no CUDA device, no vLLM).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
skip() {
    echo "gpu_check: skipped: $1"
    exit 77
}
command -v "$python" >/dev/null || skip "'$python' is not on the PATH; set PYTHON"

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-INFO}"
if [ "${1-}" != --dry-run ]; then
    "$python" -c 'from importlib.util import find_spec; raise SystemExit(not find_spec("vllm"))' ||
        skip "$python has no vllm"
    if [ "${1-}" != --rehearse ]; then
        "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' ||
            skip "torch sees no CUDA device"
    fi
    for module in numpy psutil pydantic rich typer xxhash; do
        "$python" -c "import $module" 2>/dev/null || {
            echo "gpu_check: $python cannot import $module: $python -m pip install $module" >&2
            exit 1
        }
    done
fi
exec "$python" scripts/_gpu_check.py "$@"
