"""One W&B run per run of ours, however often it is requeued.

The W&B id is kept in `<run>/wandb/run_id`, and in every checkpoint for the case that this folder is lost. W&B drops
values of steps that it has passed, so `step` is a metric of its own and the axis of all others. Offline, every attempt
leaves a folder `wandb/offline-run-*` with the same id: `wandb sync` them in their order.
"""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint_files import EXTRA, latest_checkpoint, write_durably
from trainer.config import WandbConfig


class WandbRun:
    """The W&B side of a run, on rank 0. With mode `disabled` it does nothing and imports nothing."""

    def __init__(self, folder: Path, config: WandbConfig, run_id: str, settings: Mapping[str, Any]) -> None:
        """Raises: ValueError: W&B cannot be started (not installed, not logged in, no network)."""
        self.id: str | None = None
        self._run: Any = None
        if config.mode == "disabled":
            return
        self.id = wandb_id(folder)
        try:
            self._run = _start(folder, config, run_id, self.id, settings)
        except Exception as error:
            without = "offline or disabled" if config.mode == "online" else "disabled"
            log_in = "log in with `wandb login`, set WANDB_API_KEY, or " if config.mode == "online" else ""
            # What W&B says may have lines of its own.
            said = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"W&B cannot be started with logging.wandb.mode={config.mode}: {said}; {log_in}set "
                f"logging.wandb.mode={without}"
            ) from error

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a line's numbers, with null for what does not apply. Arrays stay in the file."""
        if self._run is not None:
            scalar = int | float | None
            self._run.log({name: value for name, value in record.items() if isinstance(value, scalar)})

    def close(self, exit_code: int) -> None:
        """Finish the W&B run with the exit code of ours."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)


def _start(folder: Path, config: WandbConfig, run_id: str, wandb_id: str, settings: Mapping[str, Any]) -> Any:
    import wandb

    run = wandb.init(
        mode=config.mode,  # type: ignore[arg-type]
        project=config.project,
        entity=config.entity,
        name=config.name or run_id,
        tags=config.tags or None,
        id=wandb_id,
        resume="allow",
        dir=str(folder),
        config=dict(settings),
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def wandb_id(folder: Path) -> str:
    """The W&B id of the run in `folder`; drawn and written down when there is none yet."""
    path = folder / "wandb" / "run_id"
    if path.is_file() and (known := path.read_text().strip()):
        return known
    found = _id_in_checkpoint(folder) or secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, f"{found}\n".encode())
    return found


def _id_in_checkpoint(folder: Path) -> str | None:
    checkpoint = latest_checkpoint(folder / "checkpoints", lambda _: None)
    if checkpoint is None:
        return None
    return json.loads((checkpoint / EXTRA).read_bytes()).get("wandb_run_id")
