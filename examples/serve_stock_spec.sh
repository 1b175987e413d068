#!/usr/bin/env bash
# Our disk tier in vLLM's own tiering spec (GPUs only: vLLM's spec refuses the CPU
# platform). The tier cannot see the model there, so a cache that is to survive a
# restart needs a cache_namespace that you change with the weights.
# Usage: examples/serve_stock_spec.sh MODEL KV_DIR NAMESPACE [more vllm arguments]
set -euo pipefail
model="${1:?usage: $0 MODEL KV_DIR NAMESPACE [more vllm arguments]}"
kv_dir="${2:?usage: $0 MODEL KV_DIR NAMESPACE [more vllm arguments]}"
namespace="${3:?usage: $0 MODEL KV_DIR NAMESPACE [more vllm arguments]}"
shift 3
exec vllm serve "$model" "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": '"${KV_CPU_BYTES:-34359738368}"',
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-500GiB}"'",
           "cache_namespace": "'"$namespace"'"}
        ]}}'
