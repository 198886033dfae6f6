"""One run, one writer: two starts of the same run at once would mix their metrics and replace each other's checkpoints.

Rank 0 holds a file lock in the run's folder for as long as it lives; the kernel gives it back however the process ends.
A start that follows a stop may meet the last one still writing, so it waits a while before it refuses.
"""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

LOCK = ".lock"
# How long a start waits for the run's last process to end.
WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.2


class RunLock:
    """The right to write into one run's folder; given back by `release`, or by the end of the process."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def acquire(self, folder: Path, wait_seconds: float = WAIT_SECONDS) -> None:
        """Take the lock of an existing folder. On a file system without locks there is none to be had, and no error.

        Raises:
            ValueError: another process is still training this run after `wait_seconds`; tells which, and where.
        """
        file = open(folder / LOCK, "a+")
        deadline = time.monotonic() + wait_seconds
        told = False
        while not _try_lock(file):
            if not told:
                print(f"{folder} is in use; waiting up to {wait_seconds:g} s for its process to end", flush=True)
                told = True
            if time.monotonic() >= deadline:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise ValueError(
                    f"{folder} is in use: {holder} is training this run. Wait for it, stop it, or choose another run.id"
                )
            time.sleep(_POLL_SECONDS)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Give the lock back; may be called again, and without one."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True
