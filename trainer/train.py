"""The training program.

    torchrun --nproc-per-node N -m trainer.train experiment=NAME key=value ...
    python -m trainer.train ...            one process

Workers exit 0 when the run is finished or was asked to stop (status.json tells which), 2 for a mistake in config or
data, 1 otherwise. The run itself is trainer/trainer.py.
"""

import faulthandler
import os
import sys
from collections.abc import Sequence

from trainer.install_check import check_one_root


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of the program; ends the process with its exit code."""
    # Before anything of ours is imported, of which some might be somebody else's.
    try:
        check_one_root()
    except RuntimeError as error:
        raise SystemExit(f"error: {error}") from None
    from trainer.check_inputs import check_inputs
    from trainer.compose import config_from_command_line, exit_with_mistake
    from trainer.layout import fit_layout

    config, line = config_from_command_line(sys.argv[1:] if argv is None else argv)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    # The run settles them again, where it knows its processes.
    try:
        fit_layout(config, num_ranks)
        check_inputs(config)
    except (ValueError, FileNotFoundError) as error:
        exit_with_mistake(error)
    if line.check:
        print(f"no mistake found; a run of {num_ranks} process(es) could start")
        raise SystemExit(0)
    # Importing torch takes seconds, and a mistake should not.
    from parallel.process_group import process_group
    from trainer.trainer import run

    with process_group(config.parallel.timeout_seconds) as device:
        code = run(config, line.overrides, device)
    raise SystemExit(code)


if __name__ == "__main__":
    if sys.stderr is not None:
        # Otherwise a crash in native code leaves no more than the number of a signal.
        faulthandler.enable()
    main()
