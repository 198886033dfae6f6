"""The training program.

    torchrun --nproc-per-node N -m trainer.train experiment=NAME key=value ...
    python -m trainer.train ...            one process

Workers exit 0 when the run is finished or was asked to stop (status.json tells which), 2 for a mistake in config or
data, 1 otherwise. The run itself is trainer/trainer.py.
"""

import sys
from collections.abc import Sequence

from trainer.compose import config_from_command_line
from trainer.install_check import check_one_root


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of the program; ends the process with its exit code."""
    config, overrides = config_from_command_line(sys.argv[1:] if argv is None else argv)
    # Not before: importing torch takes seconds, and a typo should not.
    from parallel.process_group import process_group
    from trainer.trainer import run

    check_one_root()
    with process_group(config.parallel.timeout_seconds) as device:
        code = run(config, overrides, device)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
