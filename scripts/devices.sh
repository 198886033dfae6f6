# shellcheck shell=bash
# Sourced by the launchers: how many GPUs a process started here would see.

# Prints the number of usable NVIDIA GPUs. It asks no Python: importing torch costs seconds.
count_gpus() {
  if ! command -v nvidia-smi >/dev/null 2>&1; then
    echo 0
  elif [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    # Schedulers and users hand out devices by this list; an empty one hides them all.
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true
  else
    nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
  fi
}
