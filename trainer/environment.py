"""What an attempt of a run ran on and with: versions, commit, host and devices."""

import datetime
import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchtitan", "torchao", "triton", "hydra-core", "omegaconf", "numpy", "tokenizers", "wandb")
# Names of variables that tell where a run came from; values of others are not recorded, they may be secrets.
RECORDED_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_NNODES", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


def describe_environment(world_size: int) -> dict[str, Any]:
    """Versions, commit, host and devices of this process, for environment.json."""
    import torch  # late: the command line is checked before torch is loaded

    root = Path(__file__).resolve().parent.parent
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("sluicegate", *PACKAGES)},
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        "world_size": world_size,
        "code": str(root),
        "commit": _git(root, "rev-parse", "HEAD"),
        "modified_files": (_git(root, "status", "--porcelain", "--untracked-files=no") or "").splitlines(),
        "argv": sys.argv,
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *words: str) -> str | None:
    """Output of a git command on the checkout; None for an installed package or without git."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
