#!/usr/bin/env bash
# Data parallelism: every replica has a CPU pool of its own (cpu_bytes_to_use each)
# and all share one directory on disk, found by each other within refresh_interval.
# Usage: examples/serve_dp.sh MODEL KV_DIR DP [more vllm arguments]
set -euo pipefail
model="${1:?usage: $0 MODEL KV_DIR DP [more vllm arguments]}"
kv_dir="${2:?usage: $0 MODEL KV_DIR DP [more vllm arguments]}"
dp="${3:?usage: $0 MODEL KV_DIR DP [more vllm arguments]}"
shift 3
exec "$(dirname "$0")/serve_gpu.sh" "$model" "$kv_dir" --data-parallel-size "$dp" "$@"
