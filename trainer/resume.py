"""Which checkpoint `checkpoint.resume` means, at the first start of a command and whenever it is given again.

A job that is requeued, or that torchrun starts anew, has the same command line. So what is asked for there happens
once, and afterwards the command goes on from what it has saved:

    auto              the latest checkpoint of this run, if any
    never             anew; given again, the latest (trainer/run.py refuses it to every other command)
    PATH elsewhere    there; once this run has checkpoints, its own latest
    PATH in this run  back to it, which makes it the latest; given again in the same words, the latest

Of a PATH in this run, other words are another wish: `optim.lr=...` beside it is a second try from the same step.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer import checkpoint_files as files
from trainer.way_back import NOTE, WentBack, goes_back, own_name, read_note

Notify = Callable[[str], None]


def resolve_resume(
    resume: str, folder: Path, notify: Notify = print, *, words: Sequence[str] | None = None
) -> Path | None:
    """The step directory that `checkpoint.resume` means, None for a fresh start. Not collective.

    Args:
        resume: auto, never, or the path of a step folder or run folder.
        folder: this run's `checkpoints/`.
        words: the command line of an attempt that trains; None for who only looks, and takes PATH as it stands.
    """
    if resume == "never" and words is None:
        if old := files.complete_checkpoints(folder, notify):
            notify(f"checkpoint.resume=never: starting afresh although {folder} has {len(old)} checkpoints")
        return None
    if resume in ("auto", "never"):
        if (found := files.latest_checkpoint(folder, notify)) is None:
            files.refuse_to_forget(folder)
        elif resume == "never":
            notify(f"checkpoint.resume=never was where this same command began; it goes on from its own {found.name}")
        return found
    if words is not None and (why := _happened(resume, folder, words)):
        if own := files.latest_checkpoint(folder, notify):
            notify(f"checkpoint.resume={resume} {why}; it goes on from its own {own.name}")
            return own
    return files.find_checkpoint(resume, notify)


def note_way_back(resume: str, folder: Path, words: Sequence[str]) -> str:
    """After a load: if PATH led back to one of this run's own checkpoints, that is the latest from now on.

    Rank 0 only. Returns what to tell: what was left behind; empty if nothing was.
    """
    to = own_name(resume, folder)
    if to is None or not goes_back(resume, folder, words):
        return ""
    left = _left_behind(folder, to)
    # In this order: a kill in between has the command go back to the same checkpoint again, and not on from another.
    files.point_latest(folder / to)
    files.write_durably(folder / NOTE, WentBack(to, list(words), left).to_json())
    if not left:
        return ""
    return f"went back to {to}: {', '.join(sorted(left))} were saved after it; checkpoint.keep_last deletes these first"


def _happened(resume: str, folder: Path, words: Sequence[str]) -> str:
    """Why PATH is no longer to be taken, if this run has something of its own; empty if it is."""
    if own_name(resume, folder) is None:
        return "is where this run began"
    if goes_back(resume, folder, words):
        return ""
    return f"is where this same command went back to (to do so once more, delete {folder / NOTE})"


def _left_behind(folder: Path, to: str) -> dict[str, float]:
    """What was saved after `to`, and what had been left before, unless that is where the run goes back to."""
    saved = {path.name: manifest.time for path, manifest in files.complete_checkpoints(folder, _silent)}
    note = read_note(folder)
    before = {} if note is None or note.is_left(to, saved[to]) else note.left
    return {name: time for name, time in saved.items() if time > saved[to] or before.get(name) == time}


def _silent(_: str) -> None:
    pass
