"""A trace of some steps: what the host and the device did, and what waited for what.

    profile.steps=3 profile.start=10    steps 10 to 12 of rank 0, in RUN/profile/, for https://ui.perfetto.dev

The step before them is profiled, too, so that the profiler is warm, and left out. An attempt that continues after
`profile.start` traces nothing. The steps themselves are slower: do not compare their figures with others.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.config import ProfileConfig


class StepProfiler:
    """Watches the steps of one attempt on this rank."""

    def __init__(self, config: ProfileConfig, folder: Path, say: Callable[[str], None]) -> None:
        """`folder` is that of the run. profile.steps=0 watches nothing."""
        self.first, self.last = config.start, config.start + config.steps - 1
        self.folder, self.say = folder / "profile", say
        self.profiler: profile | None = None
        self.reached = 0

    def before(self, step: int, *, is_first: bool) -> None:
        """Begin, if it is time: a step early, or with the attempt's first step."""
        warm = self.first - step
        if self.first <= self.last and (warm == 1 or (is_first and warm == 0)):
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            steps = schedule(wait=0, warmup=warm, active=self.last - self.first + 1, repeat=1)
            self.profiler = profile(activities=kinds, schedule=steps, on_trace_ready=self._write)
            self.profiler.start()

    def after(self, step: int) -> None:
        """A step is done; the last one is followed by the file."""
        if self.profiler is not None:
            self.reached = step
            self.profiler.step()
            if step == self.last:
                self.close()

    def close(self) -> None:
        """End; the steps that have been traced are written."""
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            profiler.stop()

    @contextmanager
    def ended(self, first: int) -> Generator[None]:
        """Close after the steps of an attempt that begins with `first`, and say so if none of them was traced.

        After a failure the profiler is left as it is: to stop it would wait for the device, which may have failed.
        """
        yield
        self.close()
        if self.first <= self.last and self.reached < self.first:
            self.say(f"no step was traced: an attempt from step {first} on did none from profile.start={self.first}")

    def _write(self, profiler: profile) -> None:
        if self.reached < self.first:
            return
        file = self.folder / f"steps_{self.first}_to_{self.reached}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except OSError as error:
            # No reason to end the run.
            self.say(f"the trace of profile.steps cannot be written: {error}")
        else:
            self.say(f"trace of rank 0: {file}, for https://ui.perfetto.dev")
