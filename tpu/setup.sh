#!/usr/bin/env bash
# Creates a TPU slice through queued resources, waits for it, and installs this
# checkout on all of its workers. Safe to repeat.
#
#   TPU_NAME=eagle TPU_ZONE=us-east5-b TPU_TYPE=v6e-8 tpu/setup.sh
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=tpu/slice.sh
source "$here/slice.sh"

state="$(queued_state)"
# The queue learns of a pre-emption some time after the machines are gone.
[[ "$state" != ACTIVE || "$(node_state)" != PREEMPTED ]] || state=SUSPENDING
case "$state" in
  SUSPENDED | SUSPENDING | FAILED)
    echo "slice $TPU_NAME is $state: removing it"
    gcloud compute tpus queued-resources delete "$TPU_NAME" \
      --zone "$TPU_ZONE" --quiet --force
    state=""
    ;;
esac
if [[ -z "$state" ]]; then
  echo "asking for $TPU_TYPE in $TPU_ZONE"
  options=()
  [[ "$TPU_SPOT" == 1 ]] && options+=(--spot)
  gcloud compute tpus queued-resources create "$TPU_NAME" \
    --node-id "$TPU_NAME" --zone "$TPU_ZONE" \
    --accelerator-type "$TPU_TYPE" --runtime-version "$TPU_IMAGE" \
    "${options[@]}"
fi
until [[ "$state" == ACTIVE ]]; do
  state="$(queued_state)"
  case "$state" in
    ACTIVE) ;;
    FAILED | SUSPENDED) fail "the slice is $state: run setup.sh again" ;;
    *)
      echo "slice $TPU_NAME: ${state:-unknown}"
      sleep "${TPU_POLL:-30}"
      ;;
  esac
done

archive="$(mktemp)"
trap 'rm -f "$archive"' EXIT
git -C "$here/.." archive --format tar.gz -o "$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:eagle_jax.tar.gz" \
  --zone "$TPU_ZONE" --worker all
on_all_workers "set -e
mkdir -p eagle_jax && tar -xzf eagle_jax.tar.gz -C eagle_jax
python3 -m venv venv && venv/bin/pip install -q -U pip
venv/bin/pip install -q -e 'eagle_jax[tpu]'"
if [[ -n "$TPU_DISK" ]]; then
  on_all_workers "set -e
command -v gcsfuse || sudo apt-get install -y -q gcsfuse
mkdir -p runs
mountpoint -q runs || gcsfuse --implicit-dirs ${TPU_DISK#gs://} runs"
fi
echo "slice $TPU_NAME is ready"
