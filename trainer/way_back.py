"""What a run's folder says of the last time that the run went back to an earlier checkpoint of its own.

`checkpoints/went_back.json` is there so that the same command, given again after a stop, does not go back once more and
lose what was trained since; so that the checkpoint that it names is kept for that command; and so that checkpoints of
the branch that was left are not taken for newer ones of the branch that is trained.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NOTE = "went_back.json"


@dataclass(frozen=True)
class WentBack:
    """The contents of the note."""

    # Name of the checkpoint where the branch that is trained begins.
    to: str
    # The command that asked for it, as typed.
    words: list[str]
    # Checkpoints of branches that were left, with the time in their manifest: a later save may have the same name.
    left: dict[str, float]

    def is_left(self, name: str, time: float) -> bool:
        """Whether this save is one of a branch that was left."""
        return self.left.get(name) == time

    def to_json(self) -> bytes:
        """The note's bytes."""
        return json.dumps(asdict(self), indent=1).encode()


def read_note(folder: Path) -> WentBack | None:
    """The note in a `checkpoints/`; None where there is none, or one that nobody can read."""
    try:
        note = WentBack(**json.loads((folder / NOTE).read_bytes()))
        readable = isinstance(note.to, str) and isinstance(note.words, list) and isinstance(note.left, dict)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    return note if readable else None


def goes_back(resume: str, folder: Path, words: Sequence[str]) -> bool:
    """Whether a command asks, by `checkpoint.resume`, for one of this run's checkpoints and has not been there yet."""
    to, note = own_name(resume, folder), read_note(folder)
    return to is not None and (note is None or (note.to, note.words) != (to, list(words)))


def own_name(resume: str, folder: Path) -> str | None:
    """The name of this run's checkpoint that is meant; None where it is not a PATH into this run's `checkpoints/`."""
    if resume in ("auto", "never"):
        return None
    # A step folder may be a link to where it was archived.
    path = Path(resume).absolute()
    for found in (path.resolve(), path.parent.resolve() / path.name):
        if found.parent == folder.resolve():
            return found.name
    return None
