#!/usr/bin/env bash
# Starts a run on this node with torchrun and says how it ended.
#
#   scripts/train.sh experiment=demo optim.lr=1e-3
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/train.sh run.id=q1 experiment=qwen3_30b_a3b   # likewise on node 1
#
# Arguments go to trainer.train unchanged. Settings are environment variables: NPROC, NNODES, NODE_RANK, MASTER_ADDR,
# MASTER_PORT, RDZV_ID, OMP_NUM_THREADS, MAX_RESTARTS, STOP_GRACE, PYTHON. Those not given are printed with the value
# chosen and the reason. DRY_RUN=1 prints the torchrun command and stops.
#
# Signals: SIGUSR1, SIGTERM, SIGHUP and Ctrl-C ask every worker to save at the next step boundary and exit; a second
# Ctrl-C kills them. Exit code, from status.json and torchrun: 0 finished, 75 preempted (start it again with the same run
# id and it resumes), 2 a mistake in the config or the data, 1 anything else.
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/devices.sh
source "$root/scripts/devices.sh"

readonly EXIT_CONFIG=2 EXIT_PREEMPTED=75

say() { printf 'train.sh: %s\n' "$*" >&2; }

# default NAME VALUE REASON: sets a variable that is not set yet, and lets the first node say so.
default() {
  [ -n "${!1:-}" ] && return
  printf -v "$1" '%s' "$2"
  [ "${NODE_RANK:-0}" != 0 ] || say "$1=$2 ($3)"
}

# argument KEY DEFAULT "$@": the value of the last KEY=value among the overrides, without its quotes.
argument() {
  local key=$1 value=$2 word
  shift 2
  for word in "$@"; do
    case $word in "$key="*) value=${word#*=} ;; esac
  done
  value=${value#[\"\']}
  printf '%s' "${value%[\"\']}"
}

# Prints the comment at the top of this file.
usage() { sed -n '2,/^[^#]/{ s/^# \{0,1\}//p }' "${BASH_SOURCE[0]}"; }

# whole LEAST NAME...: refuses settings that are no whole numbers, or less.
whole() {
  local least=$1 name
  shift
  for name in "$@"; do
    [[ ${!name} =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "${!name}" -ge "$least" ] && continue
    say "$name=${!name} must be a whole number, at least $least"
    exit "$EXIT_CONFIG"
  done
}

choose_settings() {
  local gpus
  gpus=$(count_gpus)
  default NNODES 1 "one node unless told otherwise"
  if [ "$NNODES" = 1 ]; then
    default NODE_RANK 0 "the only node"
  else
    default NODE_RANK "${SLURM_NODEID:-0}" "this node's place; node 0 hosts the rendezvous"
  fi
  if [ "$gpus" -gt 0 ]; then
    default NPROC "$gpus" "one process per GPU"
  else
    default NPROC 2 "no GPU here: the fewest processes that exchange anything"
  fi
  whole 1 NNODES NPROC
  whole 0 NODE_RANK
  if [ "$NODE_RANK" -ge "$NNODES" ]; then
    say "NODE_RANK=$NODE_RANK must be less than NNODES=$NNODES: nodes are numbered from 0"
    exit "$EXIT_CONFIG"
  fi
  default OMP_NUM_THREADS "$(($(nproc) / NPROC > 0 ? $(nproc) / NPROC : 1))" "the cores shared among the processes"
  default MAX_RESTARTS 0 "a failed run ends; whoever started it decides whether it is worth another try"
  default STOP_GRACE 30 "seconds a worker gets to end by itself once torchrun is gone"
  whole 1 OMP_NUM_THREADS
  whole 0 MAX_RESTARTS STOP_GRACE
  if [ -x "$root/.venv/bin/python" ]; then
    default PYTHON "$root/.venv/bin/python" "the checkout's environment"
  else
    default PYTHON python3 "no .venv in the checkout"
  fi
  choose_run_id "$@"
  choose_rendezvous
}

choose_run_id() {
  run_id=$(argument run.id "" "$@")
  if [ -n "$run_id" ] && [ "$run_id" != null ]; then
    return
  elif [ -n "${SLURM_JOB_ID:-}" ]; then
    default SLUICEGATE_RUN_ID "$SLURM_JOB_ID" "the job's id, which a requeue keeps: the run resumes by itself"
  elif [ "$NNODES" -gt 1 ] && [ -z "${SLUICEGATE_RUN_ID:-}" ]; then
    say "several nodes need one run id: give run.id=NAME or SLUICEGATE_RUN_ID=NAME, the same on each node"
    exit "$EXIT_CONFIG"
  else
    default SLUICEGATE_RUN_ID "$(date +%Y%m%d-%H%M%S)-$$" "a new run; give run.id=NAME to resume one"
  fi
  export SLUICEGATE_RUN_ID
  run_id=$SLUICEGATE_RUN_ID
}

choose_rendezvous() {
  if [ "$NNODES" -gt 1 ]; then
    if [ -z "${MASTER_ADDR:-}" ]; then
      say "NNODES=$NNODES needs MASTER_ADDR, the address of node 0 that the other nodes reach"
      exit "$EXIT_CONFIG"
    fi
    default MASTER_PORT 29500 "torchrun's usual port; choose another when two jobs share node 0"
    endpoint=$MASTER_ADDR:$MASTER_PORT
  else
    # Port 0: the store takes a free one, so runs on one machine never collide.
    endpoint=localhost:0
  fi
  default RDZV_ID "$run_id" "one rendezvous per run"
}

# Writes the command into the array `command`.
build_command() {
  local is_host=false
  [ "$NODE_RANK" != 0 ] || is_host=true
  if [ -n "${TORCHRUN:-}" ]; then
    read -ra command <<<"$TORCHRUN"
  else
    command=("$PYTHON" -m torch.distributed.run)
  fi
  command+=(
    --nnodes "$NNODES" --nproc-per-node "$NPROC" --max-restarts "$MAX_RESTARTS"
    --rdzv-backend c10d --rdzv-id "$RDZV_ID" --rdzv-endpoint "$endpoint" --rdzv-conf "is_host=$is_host"
    -m trainer.train "$@"
  )
}

# --- signals ---------------------------------------------------------------------------------------------------------
# torchrun dies of SIGUSR1 and leaves its workers behind, and on SIGTERM it gives them 30 seconds. So it runs in a
# process group of its own, ignores SIGUSR1, and only the workers, its children, get the signals sent here.

agent=''            # torchrun's process id
checker=''          # that of the look at config and files before it
undelivered=''      # set while a worker is not ready for a signal that is due
interrupts=0
declare -A wanted=() delivered=()

workers() {
  [ -n "$agent" ] || return 0
  grep -ls "^PPid:[[:space:]]*$agent\$" /proc/[0-9]*/status | cut -d / -f 3
}

# A worker that is still importing would die of the signal: it is due once the worker has installed a handler.
catches() {
  local mask
  mask=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null)
  [ -n "$mask" ] && (((0x$mask >> ($(kill -l "$2") - 1)) & 1))
}

deliver() {
  local signal worker reached
  undelivered=''
  if [ "$interrupts" -ge 2 ]; then
    stop_at_once
    return
  fi
  for signal in "${!wanted[@]}"; do
    reached=0
    for worker in $(workers); do
      if [ -z "${delivered[$worker.$signal]:-}" ]; then
        catches "$worker" "$signal" && kill -s "$signal" "$worker" 2>/dev/null || continue
        delivered[$worker.$signal]=1
      fi
      reached=$((reached + 1))
    done
    [ "$reached" -ge "$NPROC" ] || undelivered=1
  done
}

stop_at_once() {
  local living
  living=$(workers)
  if [ -n "$living" ]; then
    # shellcheck disable=SC2086
    kill -s KILL $living 2>/dev/null
  elif [ -n "$agent" ]; then
    # It may wait for other nodes and have no workers.
    kill -s "$([ "$interrupts" = 2 ] && echo TERM || echo KILL)" "$agent" 2>/dev/null
  fi
}

request_stop() {
  wanted[$1]=1
  # Delivered by the waiting loop: a trap may run at any line.
  undelivered=1
  say "SIG$1: asking the workers to save at the next step boundary and exit"
}

interrupt() {
  interrupts=$((interrupts + 1))
  if [ "$interrupts" = 1 ]; then
    request_stop TERM
    say "press Ctrl-C again to stop at once, without saving"
  else
    undelivered=1
    [ "$interrupts" != 2 ] || say "stopping at once"
  fi
}

start_agent() {
  launch=$run_id.$$.$RANDOM
  # Job control gives torchrun its own process group; an ignored signal stays ignored across exec.
  set -m
  (
    trap '' USR1
    exec env SLUICEGATE_LAUNCH="$launch" SLUICEGATE_EXIT_FILE="$exit_file" OMP_NUM_THREADS="$OMP_NUM_THREADS" \
      PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "${command[@]}"
  ) </dev/null &
  agent=$!
  set +m
}

# await CHILD ASIDE: waits for it through any number of traps, and leaves its exit code in `code`. ASIDE is asked in
# between; while it returns 0 it is asked again first.
await() {
  local again
  while :; do
    "$2" && continue
    wait "$1" 2>/dev/null
    code=$?
    kill -0 "$1" 2>/dev/null || break
  done
  # A trap may have cut the wait short just as the child ended; then its own code is still to be had.
  wait "$1" 2>/dev/null
  again=$?
  [ "$again" = 127 ] || code=$again
}

deliver_due() {
  [ -n "$undelivered" ] || return 1
  sleep 0.3
  deliver
  kill -0 "$agent" 2>/dev/null
}

stop_checker() {
  [ "$interrupts" -lt 2 ] || kill -s KILL "$checker" 2>/dev/null
  return 1
}

# Workers outlive a torchrun that was killed. They carry the launch's name in their environment.
leftovers() { grep -lzs "^SLUICEGATE_LAUNCH=$launch\$" /proc/[0-9]*/environ | cut -d / -f 3 || true; }

stop_leftovers() {
  local started=$SECONDS signal=TERM left
  while left=$(leftovers) && [ -n "$left" ]; do
    if [ -n "$signal" ]; then
      say "torchrun is gone but processes" $left "are not: SIG$signal to them"
      # shellcheck disable=SC2086
      kill -s "$signal" $left 2>/dev/null
    elif [ $((SECONDS - started)) -gt $((STOP_GRACE + 10)) ]; then
      say "processes" $left "do not end"
      return
    fi
    sleep 0.3
    # Asked once, then killed once its grace is over.
    if [ -n "$signal" ] && [ "$signal" = TERM ]; then
      signal=''
    elif [ $((SECONDS - started)) -ge "$STOP_GRACE" ]; then
      signal=KILL
    fi
  done
}

# --- how it ended ----------------------------------------------------------------------------------------------------

# Prints "state exit_code" of status.json; nothing while there is none.
read_status() {
  "$PYTHON" -c '
import json, sys
try:
    status = json.load(open(sys.argv[1]))
except FileNotFoundError:
    sys.exit()
print(status.get("state"), status.get("exit_code"))' "$status_file"
}

# An attempt that could not begin has put back what was there; of others, attempt and time differ.
status_stamp() { cat "$status_file" 2>/dev/null; }

# A mistake is told before there is a torchrun to bury it. Of several nodes each would have to find it, or the others
# would wait for that one; and a torchrun of somebody's own may run elsewhere. There the workers look, as they do anyway.
check_first() {
  local word
  [ "$NNODES" = 1 ] && [ -z "${TORCHRUN:-}" ] || return 0
  for word in "$@"; do
    # What stops by itself.
    case $word in --check | --cfg* | -c | --help | -h | --multirun | -m) return 0 ;; esac
  done
  # As rank 0, with what torchrun gives it; in a group that Ctrl-C does not reach.
  set -m
  (
    trap '' USR1
    exec env -u SLUICEGATE_EXIT_FILE RANK=0 LOCAL_RANK=0 WORLD_SIZE="$NPROC" LOCAL_WORLD_SIZE="$NPROC" \
      MASTER_ADDR=localhost MASTER_PORT=0 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" \
      "$PYTHON" -m trainer.train --check "$@"
  ) </dev/null >/dev/null 2>"$exit_file" &
  checker=$!
  set +m
  await "$checker" stop_checker
  if [ "$interrupts" -ge 2 ]; then
    rm -f "$exit_file"
    exit 1
  elif [ "$code" = "$EXIT_CONFIG" ]; then
    cat "$exit_file" >&2
    rm -f "$exit_file"
    exit "$EXIT_CONFIG"
  fi
  # Whatever else went wrong, the workers will say it.
  : >"$exit_file"
}

# Ends with the exit code that the run's own word and torchrun's code together mean.
conclude() {
  local state='' worker_code='' mistake='' seen=''
  # What an earlier attempt wrote says nothing about this one.
  if [ "$(status_stamp)" != "$stamp_before" ]; then
    read -r state worker_code <<<"$(read_status)"
  fi
  # Evaluations write no status.
  if [ "$code" = 0 ] && [ "$(head -n 1 "$exit_file" 2>/dev/null)" = "$EXIT_PREEMPTED" ]; then
    rm -f "$exit_file"
    say "the evaluation of run $run_id was stopped; the same command begins it anew"
    exit "$EXIT_PREEMPTED"
  fi
  # A mistake in the config is found before the run has a folder.
  [ -n "$worker_code" ] && [ "$worker_code" != None ] || worker_code=$(head -n 1 "$exit_file" 2>/dev/null)
  # Not what an attempt before a restart left there.
  [ "$worker_code" != "$EXIT_CONFIG" ] || mistake=$(tail -n +2 "$exit_file" 2>/dev/null)
  rm -f "$exit_file"
  case $state in
    # Torchrun's code speaks for every process: one may have failed after rank 0 wrote that the run is finished.
    finished) [ "$code" != 0 ] || exit 0 ;;
    preempted) say "run $run_id was stopped and saved; the same command with run.id=$run_id goes on"; exit "$EXIT_PREEMPTED" ;;
  esac
  [ "$code" != 0 ] || exit 0
  if [ "$state" = finished ]; then
    say "run $run_id finished its steps, but a process failed on the way out (torchrun: $code); see the errors above"
  elif [ -n "$mistake" ]; then
    # Once more, below torchrun's traceback.
    say "run $run_id stopped because of a mistake: $mistake"
  else
    [ ! -e "$status_file" ] || seen=" and $status_file"
    say "run $run_id failed (torchrun: $code); see the first error above$seen"
  fi
  [ "$worker_code" != "$EXIT_CONFIG" ] || exit "$EXIT_CONFIG"
  exit 1
}

case ${1:-} in
  -h | --help)
    usage
    echo "Settings of a run: python -m trainer.train --help"
    exit 0
    ;;
esac

# From here on a signal waits for its workers, even one that comes before they exist.
trap 'request_stop USR1' USR1
trap 'request_stop TERM' TERM HUP
trap interrupt INT

choose_settings "$@"
status_file=$(argument run.root runs "$@")/$run_id/status.json
build_command "$@"
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exit_file=$(mktemp) || {
  say "no temporary file can be made: is TMPDIR=${TMPDIR:-/tmp} a folder to write to?"
  exit 1
}
check_first "$@"
stamp_before=$(status_stamp)
start_agent
await "$agent" deliver_due
stop_leftovers
conclude
