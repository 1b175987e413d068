#!/usr/bin/env bash
# One engine on a CPU machine. Usage: examples/serve_cpu.sh MODEL [KV_DIR] [more vllm arguments]
# Prefill is slow on CPUs, so a cached prefix saves most here.
set -euo pipefail
model="${1:?usage: $0 MODEL [KV_DIR] [more vllm arguments]}"
kv_dir="${2:-$HOME/.cache/vllm-kv}"
shift $(($# < 2 ? $# : 2))

# vLLM reserves one more core a rank when a connector is configured; binding the
# threads yourself keeps the others for the model. KVCACHE_SPACE is in GiB.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-4}"
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"

# `python -m` because the `vllm` command of the CPU wheel looks for a
# distribution named `vllm`, which that wheel does not bring.
exec python3 -m vllm.entrypoints.openai.api_server --model "$model" "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${KV_CPU:-4GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-50GiB}"'"}
        ]}}'
