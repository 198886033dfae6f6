#!/usr/bin/env bash
# Everything worth knowing about a node in under 9 minutes: links, parity, speed, scaling. See scripts/bench_node.py.
#   scripts/bench_node.sh                 all GPUs (2, 4 or 8)
#   scripts/bench_node.sh --dry-run       tiny sizes on 2 CPU processes
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$root/scripts/bench_node.py" "$@"
