#!/usr/bin/env bash
# Several hosts without a shared volume: our disk tier first, then vLLM's own p2p tier,
# which fetches from other engines what this host does not have. P2P_CONFIG is the JSON
# object of vLLM's p2p tier (see vLLM's documentation for its keys).
# Usage: P2P_CONFIG='{"type": "p2p", ...}' examples/serve_with_p2p.sh MODEL KV_DIR [more]
set -euo pipefail
model="${1:?usage: $0 MODEL KV_DIR [more vllm arguments]}"
kv_dir="${2:?usage: $0 MODEL KV_DIR [more vllm arguments]}"
shift 2
: "${P2P_CONFIG:?set P2P_CONFIG to the JSON object of the p2p (or obj) tier}"
exec vllm serve "$model" "$@" \
    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "'"${KV_CPU:-32GiB}"'",
        "secondary_tiers": [
          {"type": "odirect_fs", "root_dir": "'"$kv_dir"'", "max_bytes": "'"${KV_DISK:-500GiB}"'"},
          '"$P2P_CONFIG"'
        ]}}'
