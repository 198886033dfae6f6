"""The training program.

    torchrun --nproc-per-node N -m trainer.train experiment=NAME key=value ...
    python -m trainer.train ...            one process

Workers exit 0 when the run is finished or was asked to stop (status.json tells which), 2 for a mistake in config or
data, 1 otherwise. The run itself is trainer/attempt.py and trainer/trainer.py.
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
    from trainer.compose import MISTAKES, config_from_command_line, exit_with_mistake, finish
    from trainer.look_ahead import look_ahead

    config, line = config_from_command_line(sys.argv[1:] if argv is None else argv)
    try:
        found = look_ahead(config, line.overrides, os.environ.get("WORLD_SIZE", "1"), check=line.check)
    except MISTAKES as error:
        exit_with_mistake(error)
    if line.check:
        finish(found)
    # Importing torch takes seconds, and a mistake should not.
    from parallel.process_group import process_group
    from trainer.attempt import run

    with process_group(config.parallel.timeout_seconds) as device:
        code = run(config, line.overrides, device)
    raise SystemExit(code)


if __name__ == "__main__":
    if sys.stderr is not None:
        # Otherwise a crash in native code leaves no more than the number of a signal.
        faulthandler.enable()
    main()
