#!/usr/bin/env bash
# Runs train.py or decode.py on all workers of the slice. When the slice is
# taken away (spot), it is created again and the same command goes on: train.py
# resumes from its last checkpoint, which must lie on TPU_DISK (~/runs).
#
#   tpu/run.sh train.py --config configs/smollm2_eagle3.py \
#       --config.features=online --config.batch_size=16 \
#       --config.data="('../runs/train.jsonl',)" \
#       --config.heldout="('../runs/heldout.jsonl',)" --config.out=../runs/a
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=tpu/slice.sh
source "$here/slice.sh"

[[ $# -gt 0 ]] || fail "no command: give train.py or decode.py and its flags"
case "$1" in
  train.py | decode.py) ;;
  *) fail "$1 is not train.py or decode.py" ;;
esac
[[ "$1" != train.py || -n "$TPU_DISK" || "$TPU_SPOT" != 1 ]] || fail \
  "TPU_DISK is not set: a run on spot capacity needs a bucket to resume from"
printf -v command "%q " ../venv/bin/python "$@"

while true; do
  status=0
  on_all_workers "cd eagle_jax && $command" || status=$?
  [[ $status -ne 0 ]] || exit 0
  state="$(node_state)"
  if [[ "$state" == READY && $status -ne 143 ]]; then
    exit "$status" # the command's own failure
  fi
  echo "slice $TPU_NAME is ${state:-gone}: setting it up again"
  "$here/setup.sh"
done
