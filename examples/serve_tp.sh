#!/usr/bin/env bash
# Tensor parallelism over several GPUs of one host: cpu_bytes_to_use is for all of
# them together. Usage: examples/serve_tp.sh MODEL KV_DIR TP [more vllm arguments]
set -euo pipefail
model="${1:?usage: $0 MODEL KV_DIR TP [more vllm arguments]}"
kv_dir="${2:?usage: $0 MODEL KV_DIR TP [more vllm arguments]}"
tp="${3:?usage: $0 MODEL KV_DIR TP [more vllm arguments]}"
shift 3
KV_CPU="${KV_CPU:-128GiB}" exec "$(dirname "$0")/serve_gpu.sh" "$model" "$kv_dir" \
    --tensor-parallel-size "$tp" "$@"
