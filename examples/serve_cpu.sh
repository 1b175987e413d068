#!/usr/bin/env bash
# usage: serve_cpu.sh MODEL [KV_DIR] [vllm arguments]
#
# One engine on a CPU machine. Prefill is slow on CPUs, so a cached prefix saves most here.
# KV_DIR is ~/.cache/vllm-kv unless given.
#   KV_CPU   size of the CPU pool, default 4GiB
#   KV_DISK  bound on KV_DIR, default 50GiB
#   VLLM_CPU_KVCACHE_SPACE     GiB of vLLM's own KV cache, default 4
#   OMP_NUM_THREADS            threads of the model, default: all cores
#   VLLM_CPU_OMP_THREADS_BIND  cores they are bound to, default nobind
set -euo pipefail

die() {
    echo "${0##*/}: $1; --help says more" >&2
    exit 2
}
directory() { # NAME VALUE: its absolute path, fit for JSON
    case "$2" in
    "" | -*) die "$1 is missing" ;;
    *[\"\\]*) die "$1: $2 holds a quote or a backslash" ;;
    esac
    [ ! -e "$2" ] || [ -d "$2" ] || die "$1: $2 is not a directory"
    realpath -m -- "$2"
}

case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
"" | -*) die "MODEL is missing" ;;
esac
model="$1"
shift
kv_dir="$HOME/.cache/vllm-kv"
if [[ "${1:--}" != -* ]]; then
    kv_dir="$1"
    shift
fi
kv_dir="$(directory KV_DIR "$kv_dir")"

# vLLM reserves one more core a rank when a connector is configured; binding the
# threads yourself keeps the others for the model.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-4}"
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"

# `python3 -m` because the `vllm` command of the CPU wheel looks for a
# distribution named `vllm`, which that wheel does not bring.
exec python3 -m vllm.entrypoints.openai.api_server --model "$model" --shutdown-timeout 30 "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${KV_CPU:-4GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-50GiB}"'"}
        ]}}'
