#!/usr/bin/env bash
# The run behind `make train`: experiment=demo on all GPUs, or on 2 processes where there are none.
# NPROC=N chooses otherwise; further arguments are overrides: scripts/demo.sh train.steps=50
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/devices.sh
source "$root/scripts/devices.sh"

# As in configs/experiment/demo.yaml; the experts divide themselves among the processes (configs/parallel/ep.yaml).
batch=8
micro_batch=4

gpus=$(count_gpus)
if [ -z "${NPROC:-}" ]; then
  NPROC=$((gpus > 0 ? gpus : 2))
fi
export NPROC
# Whole micro-batches on each process: the batch grows where they do not divide it.
step=$((NPROC * micro_batch))
batch=$(((batch + step - 1) / step * step))
exec "$root/scripts/train.sh" experiment=demo train.global_batch_size="$batch" "$@"
