#!/usr/bin/env bash
# What setup.sh and run.sh share: settings of a slice, and calls about it.
# Settings come from the environment:
#   TPU_NAME   name of the slice and of its queued resource (required)
#   TPU_ZONE   such as us-east5-b (required)
#   TPU_TYPE   such as v6e-8, v5litepod-16, v5p-128 (required)
#   TPU_IMAGE  runtime; default: by the type
#   TPU_SPOT   1 (default) = spot capacity, 0 = on demand
#   TPU_DISK   gs://bucket, mounted at ~/runs of every worker; needed to resume
#              after a pre-emption
set -euo pipefail

fail() {
  echo "${0##*/}: $*" >&2
  exit 2
}

for name in TPU_NAME TPU_ZONE TPU_TYPE; do
  [[ -n "${!name:-}" ]] || fail "$name is not set: see tpu/README.md"
done
TPU_SPOT="${TPU_SPOT:-1}"
TPU_DISK="${TPU_DISK:-}"
[[ -z "$TPU_DISK" || "$TPU_DISK" == gs://* ]] ||
  fail "TPU_DISK $TPU_DISK must start with gs://"
command -v gcloud >/dev/null ||
  fail "gcloud is not installed: https://cloud.google.com/sdk/docs/install"

case "$TPU_TYPE" in
  v6e-*) image=v2-alpha-tpuv6e ;;
  v5litepod-*) image=v2-alpha-tpuv5-lite ;;
  v5p-*) image=v2-alpha-tpuv5 ;;
  *) fail "TPU_TYPE $TPU_TYPE is not v6e-N, v5litepod-N or v5p-N" ;;
esac
TPU_IMAGE="${TPU_IMAGE:-$image}"

# State of the queued resource: ACTIVE, WAITING_FOR_RESOURCES, SUSPENDED, ...;
# empty where there is none.
queued_state() {
  gcloud compute tpus queued-resources describe "$TPU_NAME" \
    --zone "$TPU_ZONE" --format "value(state.state)" 2>/dev/null || true
}

# State of the machines themselves: READY, PREEMPTED, ...; empty: none.
node_state() {
  gcloud compute tpus tpu-vm describe "$TPU_NAME" \
    --zone "$TPU_ZONE" --format "value(state)" 2>/dev/null || true
}

# Run a command on every worker of the slice.
on_all_workers() {
  gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone "$TPU_ZONE" \
    --worker all --command "$1"
}
