"""What can be found wrong with a run before torch is imported, and before it has a folder: in a second."""

import dataclasses
from collections.abc import Sequence

from trainer.check_inputs import check_inputs
from trainer.config import Config
from trainer.layout import fit_layout
from trainer.run import check_run_folder, new_run_id, resolve_run_id


def look_ahead(config: Config, overrides: Sequence[str], world_size: str, *, folder_too: bool) -> str:
    """Check sizes for so many processes, and files; with `folder_too` also what is in the run's folder, if it is there.

    Rank 0 of a run looks into that once more, when no other process can write there. Returns what to tell.

    Raises:
        ValueError, FileNotFoundError, PermissionError: what a person has to mend.
    """
    if not world_size.isdecimal() or int(world_size) < 1:
        raise ValueError(f"WORLD_SIZE={world_size} must be the number of processes; unset it for one")
    parallel = fit_layout(config, int(world_size))
    check_inputs(config, overrides)
    if folder_too:
        settled = dataclasses.replace(config.run, id=resolve_run_id(config) or new_run_id())
        check_run_folder(dataclasses.replace(config, parallel=parallel, run=settled), overrides)
    processes = "1 process" if int(world_size) == 1 else f"{world_size} processes"
    return f"no mistake found in config and files, for {processes}"
