"""What a person sees of a run: a progress bar on a terminal, plain lines anywhere else, and log.txt in any case.

`rich` is imported only for the bar.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

Values = Mapping[str, Any]


class Console(Protocol):
    """Where a run tells its progress."""

    def say(self, text: str) -> None:
        """One message."""
        ...

    def progress(self, step: int, values: Values) -> None:
        """The metrics of a step."""
        ...

    def close(self) -> None:
        """Nothing more will be told."""
        ...


def open_console(mode: str, total_steps: int, log_path: Path, stream: TextIO | None = None) -> Console:
    """The console for `logging.console`: auto (a bar if `stream` is a terminal, else plain), plain or none."""
    out: TextIO = stream or sys.stdout  # type: ignore[assignment]
    if mode == "auto" and out.isatty():
        return BarConsole(total_steps, log_path, out)
    return PlainConsole(total_steps, log_path, None if mode == "none" else out)


def describe(values: Values) -> str:
    """The metrics that a person follows, in one line; those that do not apply are left out."""
    texts = [
        ("loss", "train/loss", "{:.4f}"),
        ("grad", "train/grad_norm", "{:.3g}"),
        ("lr", "train/lr", "{:.3g}"),
        ("tok/s", "perf/tokens_per_second", "{:,.0f}"),
        ("mfu", "perf/mfu", "{:.1%}"),
        ("mem", "perf/peak_memory_gib", "{:.1f} GiB"),
        ("load", "moe/load_max_over_mean", "{:.2f}"),
    ]
    return "  ".join(
        f"{label} {form.format(values[name])}" for label, name, form in texts if values.get(name) is not None
    )


def duration(seconds: float) -> str:
    """3725 -> 1:02:05, 65 -> 1:05."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class PlainConsole:
    """One line per message, flushed; `stream` None writes log.txt alone."""

    def __init__(self, total_steps: int, log_path: Path, stream: TextIO | None) -> None:
        self._total_steps = total_steps
        self._stream = stream
        self._log = open(log_path, "a", encoding="utf-8", buffering=1)

    def say(self, text: str) -> None:
        """One message, to log.txt with its time and to the stream."""
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
        if self._stream is not None:
            try:
                print(text, file=self._stream, flush=True)
            except BrokenPipeError:
                # The reader of a pipe has gone; a run does not end with it. Python would flush it again at its end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
                self._stream = None

    def progress(self, step: int, values: Values) -> None:
        """The metrics of a step, in one line; nothing for an evaluation, which has its own message."""
        if values.get("train/loss") is None:
            return
        self.say(f"step {step}/{self._total_steps}  {describe(values)}{self._left(step, values)}")

    def close(self) -> None:
        """Close log.txt."""
        self._log.close()

    def _left(self, step: int, values: Values) -> str:
        step_seconds = values.get("perf/step_seconds")
        return "" if step_seconds is None else f"  left {duration((self._total_steps - step) * step_seconds)}"


class BarConsole(PlainConsole):
    """A bar that stays at the bottom of a terminal; messages scroll above it."""

    def __init__(self, total_steps: int, log_path: Path, stream: TextIO) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(total_steps, log_path, None)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        # Transient: once it ends, the last thing on the screen is the last message.
        self._bar = Progress(*columns, console=RichConsole(file=stream), transient=True)
        self._task = self._bar.add_task("", total=total_steps)
        self._bar.start()

    def say(self, text: str) -> None:
        """One message above the bar."""
        super().say(text)
        self._bar.console.print(text, markup=False, highlight=False)

    def progress(self, step: int, values: Values) -> None:
        """Move the bar; the line goes to log.txt alone."""
        if values.get("train/loss") is None:
            return
        super().say(f"step {step}/{self._total_steps}  {describe(values)}")
        self._bar.update(self._task, completed=step, description=describe(values))

    def close(self) -> None:
        """Take the bar away and close log.txt."""
        self._bar.stop()
        super().close()
