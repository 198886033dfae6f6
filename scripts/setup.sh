#!/usr/bin/env bash
# Makes .venv in this checkout with everything the project and its tests need. Repeating it costs milliseconds.
#
#   PYTHON                  the interpreter to build on (default: the first python3 >= 3.11 found, one with a usable
#                           torch before others)
#   SLUICEGATE_TORCH_INDEX  package index that has the torch you want; `none` takes what pip is configured for
#
# A torch >= 2.11 and < 2.14 that is already installed is reused, with the packages beside it. Otherwise the versions
# of requirements/constraints.txt are installed: torch's CPU build where there is no GPU.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
constraints=$root/requirements/constraints.txt
cpu_index=https://download.pytorch.org/whl/cpu
# shellcheck source=scripts/devices.sh
source "$root/scripts/devices.sh"

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# What the environment depends on; the folder too, since scripts in a .venv carry its absolute path.
fingerprint() {
  { echo "$root"; cat "$root/pyproject.toml" "$constraints" "$root/scripts/setup.sh"; } | sha256sum | cut -d ' ' -f 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints "version folder" of the torch that interpreter $1 would import, if it is in the supported range and fits this
# machine (a CPU build beside a GPU does not). Reads metadata only.
usable_torch() {
  "$1" - "$(count_gpus)" <<'PY' 2>/dev/null
import importlib.metadata, sys
try:
    torch = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
major, minor = (int(part) for part in torch.version.split(".")[:2])
if not (2, 11) <= (major, minor) < (2, 14) or (int(sys.argv[1]) and "+cpu" in torch.version):
    sys.exit(1)
print(torch.version, torch.locate_file(""))
PY
}

choose_python() {
  local found='' candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate" || continue
    if usable_torch "$candidate" >/dev/null; then
      command -v "$candidate"
      return
    fi
    found=${found:-$(command -v "$candidate")}
  done
  [ -n "$found" ] || fail "no Python >= 3.11 found (looked for: ${PYTHON:-python3, python3.13, python3.12, python3.11;" \
    "python3 is $(python3 -V 2>&1 || true)}). Install one, or name it: PYTHON=/path/to/python3.12 make test"
  echo "$found"
}

create_venv() {
  local python torch options=()
  python=$(choose_python)
  if torch=$(usable_torch "$python"); then
    say "reusing torch ${torch%% *} of $python"
    options=(--system-site-packages)
  fi
  say "creating $venv with $("$python" -V)"
  "$python" -m venv "${options[@]}" "$venv" ||
    fail "cannot create $venv with $python (on Debian and Ubuntu: apt install python3-venv)"
  # A virtual environment does not see the packages of another one it was made from: name their folder.
  if [ -n "$torch" ] && ! usable_torch "$venv/bin/python" >/dev/null; then
    echo "${torch#* }" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/reused.pth"
  fi
}

# Keeps what stands beside a reused torch as it is, and pins only what has to be added.
write_reuse_constraints() {
  "$venv/bin/python" - "$constraints" >"$venv/constraints.txt" <<'PY'
import importlib.metadata, sys
def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
pins = [line.strip() for line in open(sys.argv[1]) if "==" in line and not line.startswith("#")]
print(*(pin for pin in pins if not installed(pin.split("==")[0])), sep="\n")
print(*(f"{name}=={version}" for name in ("torch", "triton") if (version := installed(name))), sep="\n")
PY
}

# Prints pip's options that bring torch's CPU build: none where the configured index has it already.
cpu_torch_options() {
  local url
  url=$("$venv/bin/python" -m pip install --quiet --dry-run --no-deps --ignore-installed --report - \
    -c "$constraints" torch 2>/dev/null | "$venv/bin/python" -c \
    'import json, sys; print(json.load(sys.stdin)["install"][0]["download_info"]["url"])' 2>/dev/null || true)
  case $url in
    *+cpu* | *%2Bcpu*) ;;
    *) echo "--extra-index-url $cpu_index" ;;
  esac
}

# --no-compile: Python compiles what is imported; compiling all of torch and transformers takes 20 seconds.
pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --progress-bar off "$@" >>"$venv/setup.log" 2>&1 || {
    tail -n 25 "$venv/setup.log" >&2
    fail "pip failed; its whole output is in $venv/setup.log. Run the same command again once that is mended"
  }
}

# Commands of reused packages belong to the other environment's interpreter; the Makefile wants them in .venv/bin.
add_commands() {
  local missing=() tool
  for tool in ruff lint-imports:import-linter pre-commit; do
    [ -x "$venv/bin/${tool%:*}" ] || missing+=("${tool#*:}")
  done
  [ ${#missing[@]} = 0 ] || pip_install --ignore-installed --no-deps -c "$constraints" "${missing[@]}"
  printf '#!/bin/sh\nexec "%s/bin/python" -m torch.distributed.run "$@"\n' "$venv" >"$venv/bin/torchrun"
  chmod +x "$venv/bin/torchrun"
}

install_packages() {
  local torch='' used=$constraints index=()
  : >"$venv/setup.log"
  pip_install --upgrade pip 'setuptools>=77' -c "$constraints"
  torch=$(usable_torch "$venv/bin/python") || true
  if [ -n "$torch" ] && [[ ${torch#* } != "$venv"* ]]; then
    write_reuse_constraints
    used=$venv/constraints.txt
  elif [ "${SLUICEGATE_TORCH_INDEX:-}" = none ]; then
    :
  elif [ -n "${SLUICEGATE_TORCH_INDEX:-}" ]; then
    index=(--extra-index-url "$SLUICEGATE_TORCH_INDEX")
  elif [ "$(count_gpus)" = 0 ]; then
    read -ra index <<<"$(cpu_torch_options)"
  fi
  say "installing packages (the first time takes a minute or two)"
  pip_install "${index[@]}" -c "$used" --no-build-isolation -e "$root[dev]"
  [ "$used" = "$constraints" ] || add_commands
}

stamp=$venv/.ready
wanted=$(fingerprint)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
rm -f "$stamp"
if ! [ -x "$venv/bin/python" ]; then
  create_venv
elif ! new_enough "$venv/bin/python"; then
  fail "$venv has $("$venv/bin/python" -V 2>&1), but 3.11 or newer is needed: remove that folder and try again"
fi
install_packages
echo "$wanted" >"$stamp"
say "ready: torch $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))') in $venv"
