#!/usr/bin/env bash
# Runs the tests that need no GPU, in two processes side by side: many of them wait, for processes that start and for
# signals that arrive. Words go to pytest: bash scripts/test.sh -k parity
#
# Shown is one process as it goes, then the whole output of the other, and last the sum of both. Exit code 0: nothing
# failed in either.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1
export OMP_NUM_THREADS=1
python=.venv/bin/python
folder=$(mktemp -d) || exit 1
beside=
trap '[ -z "$beside" ] || kill "$beside" 2>/dev/null; rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM

# Of the whole programs these go there: both then take about as long.
moved=(tests/e2e/test_layouts.py tests/e2e/test_huggingface.py tests/e2e/test_demo.py)

# Each remembers for --lf what failed in its own folders. Words come before the folders: -k, --durations.
"$python" -m pytest -o cache_dir=.pytest_cache/distributed "$@" tests/distributed "${moved[@]}" >"$folder/beside" 2>&1 &
beside=$!
"$python" -m pytest -o cache_dir=.pytest_cache/others "${moved[@]/#/--ignore=}" "$@" tests/unit tests/e2e | tee "$folder/here"
here=${PIPESTATUS[0]}
wait "$beside"
there=$?
beside=
cat "$folder/beside"

counts=$(tail -qn 1 "$folder/here" "$folder/beside" | grep -oE '[0-9]+ (passed|failed|error|skipped|xfailed|xpassed)' |
  awk '{ sum[$2] += $1 } END { for (what in sum) printf "%s%d %s", (n++ ? ", " : ""), sum[what], what }')
echo "tests: ${counts:-none were run}, in $SECONDS s"
# 5: nothing was selected there.
[ "$here" = 5 ] && [ "$there" != 5 ] && here=0
[ "$there" = 5 ] && there=0
exit $((here > there ? here : there))
