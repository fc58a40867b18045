#!/bin/sh
# What Prometheus would read of a replica, by curl. Usage: metrics.sh [METRICS]
set -eu
curl --silent --show-error --fail "http://${1:-localhost:50054}/metrics" |
    grep -E '^(vllm:(num_requests_running|num_requests_waiting|lora_requests_info|generation_tokens_total)|loraplex_)'
