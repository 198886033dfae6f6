"""What can be found wrong with a run before it has a folder: in a second, because torch is not imported.

Only --check imports it, and only for what names modules of the model or asks for GPUs; a run comes to that by itself.
"""

import dataclasses
from collections.abc import Sequence

from moe.config import LOW_PRECISION
from trainer.check_exchange import check_device
from trainer.check_inputs import check_inputs
from trainer.config import Config
from trainer.layout import fit_layout
from trainer.run import check_run_folder, new_run_id, resolve_run_id


def look_ahead(config: Config, overrides: Sequence[str], world_size: str, *, check: bool) -> str:
    """Check sizes for so many processes, and files; with `check` also what a run finds out when it starts.

    That is what its folder says, if it is there (rank 0 of a run looks when no other process can write there), what
    the device can do, and which modules are meant. Returns what to tell.

    Raises:
        ValueError, FileNotFoundError, PermissionError: what a person has to mend.
    """
    if not world_size.isdecimal() or int(world_size) < 1:
        raise ValueError(f"WORLD_SIZE={world_size} must be the number of processes; unset it for one")
    parallel = fit_layout(config, int(world_size))
    check_inputs(config, overrides)
    if check:
        run = dataclasses.replace(config.run, id=resolve_run_id(config) or new_run_id())
        settled = dataclasses.replace(config, parallel=parallel, run=run)
        check_run_folder(settled, overrides)
        _check_device(settled)
        _check_linears(settled)
    processes = "1 process" if int(world_size) == 1 else f"{world_size} processes"
    return f"no mistake found in config and files, for {processes}"


def _check_device(config: Config) -> None:
    """Refuse what the devices of this machine cannot do. A run for another one says so by `cluster`."""
    if config.cluster.name != "auto":
        return
    try:
        check_device(config, "cpu")
    except ValueError:
        from torch.cuda import is_available  # late: it takes seconds

        if not is_available():
            raise


def _check_linears(config: Config) -> None:
    """Refuse a pattern that matches no linear: asked of the model itself, which takes no memory here."""
    if config.precision.recipe not in LOW_PRECISION or not config.precision.linears:
        return
    from trainer.meta_model import meta_model  # late: as above
    from trainer.precision import what_converts

    what_converts(meta_model(config), config.precision)
