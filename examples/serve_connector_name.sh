#!/usr/bin/env bash
# The same with our connector's name, which needs no spec_name line. Not together with
# --kv-offloading-size: that flag makes vLLM replace any connector's name by its own.
# Usage: examples/serve_connector_name.sh MODEL KV_DIR [more vllm arguments]
set -euo pipefail
model="${1:?usage: $0 MODEL KV_DIR [more vllm arguments]}"
kv_dir="${2:?usage: $0 MODEL KV_DIR [more vllm arguments]}"
shift 2
exec vllm serve "$model" "$@" \
    --kv-transfer-config '{
      "kv_connector": "TieredOffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "cpu_bytes_to_use": "'"${KV_CPU:-32GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-500GiB}"'"}
        ]}}'
