"""What checkpoint.resume means at a first start, and at the next ones of the same command."""

from pathlib import Path

import pytest

from tests.unit.checkpoint_toys import checkpointer, trained
from trainer import checkpoint_files as files
from trainer.checkpoint import Checkpointer
from trainer.checkpoint_files import IncompleteCheckpointError
from trainer.resume import resolve_resume
from trainer.way_back import NOTE, own_name


def test_resume_setting(tmp_path: Path) -> None:
    own, other = tmp_path / "own" / "checkpoints", tmp_path / "other"
    said: list[str] = []
    assert resolve_resume("auto", own, said.append) is None and not said
    model, optimizer = trained()
    saver = checkpointer(own)
    saver.save(1, model, optimizer, {})
    saver.save(2, model, optimizer, {})
    checkpointer(other / "checkpoints").save(7, model, optimizer, {})
    assert resolve_resume("auto", own, said.append) == own / "step_00000002" and not said
    assert resolve_resume(str(own / "step_00000001"), own) == own / "step_00000001"
    assert resolve_resume(str(other), own) == other / "checkpoints" / "step_00000007"
    assert resolve_resume("never", own, said.append) is None and "2 checkpoints" in said[0]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        resolve_resume(str(tmp_path / "nowhere"), own)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        resolve_resume(str(tmp_path), own)
    (own / "step_00000001" / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match="no complete checkpoint"):
        resolve_resume(str(own / "step_00000001"), own)


class Run:
    """One run's checkpoints, attempts on it, and what they were told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def path(self, step: int) -> str:
        return str(self.folder / files.step_name(step))

    def attempt(self, resume: str, *steps: int, words: str = "", keep_last: int = 0) -> str | None:
        """Resume, load, save at `steps`; the name of what it went on from."""
        model, optimizer = trained()
        saver = checkpointer(self.folder, self.said, resume=resume, keep_last=keep_last)
        command = [f"checkpoint.resume={resume}", words]
        path = saver.resume_path(command)
        if path is not None:
            saver.load(path, model, optimizer)
            saver.began(command)
        for step in steps:
            saver.save(step, model, optimizer, {})
        saver.close()
        return path and path.name

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("step_*"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "own" / "checkpoints")
    run.attempt("auto", 1, 2, 3)
    run.said.clear()
    return run


def test_a_way_back_is_taken_once_by_the_same_command(run: Run) -> None:
    back = run.path(1)
    assert run.attempt(back) == "step_00000001"
    assert "went back to step_00000001: step_00000002, step_00000003 were saved after it" in run.said[-1]
    # Ended before it has saved anything: there is nothing newer on its branch.
    assert run.attempt(back, 2) == "step_00000001"
    assert run.attempt(back, 3, 4) == "step_00000002"
    assert "same command went back to" in run.said[-1] and "goes on from its own step_00000002" in run.said[-1]
    assert run.attempt(back) == run.attempt("auto") == "step_00000004"
    assert run.attempt(back, words="optim.lr=1") == "step_00000001", "another try"
    assert run.attempt(back, 2, words="optim.lr=1") == "step_00000001"
    assert run.attempt(back, words="optim.lr=1") == "step_00000002"
    (run.folder / NOTE).unlink()
    assert run.attempt(back, words="optim.lr=1") == "step_00000001", "what the message says"


def test_latest_is_of_the_branch_that_is_trained(run: Run) -> None:
    run.attempt(run.path(1))
    assert files.latest_checkpoint(run.folder) == Path(run.path(1)), "before anything is saved on it, too"
    run.attempt("auto", 2)
    (run.folder / "latest").unlink()
    assert run.attempt("auto") == "step_00000002"
    (Path(run.path(2)) / "manifest.json").unlink()
    assert run.attempt("auto") == "step_00000001", "step 3 was left behind, though it is newer"


def test_back_to_a_branch_that_was_left(run: Run) -> None:
    run.attempt(run.path(1), 2)
    assert run.attempt(run.path(3)) == "step_00000003"
    assert "step_00000002 were saved after it" in run.said[-1]
    (run.folder / "latest").unlink()
    assert run.attempt("auto") == "step_00000003"


def test_what_a_restart_needs_is_kept_and_what_was_left_goes_first(run: Run) -> None:
    run.attempt(run.path(1), 4, keep_last=2)
    assert run.names() == ["step_00000001", "step_00000004"]
    run.attempt(run.path(1), 5, 6, keep_last=2)
    assert run.names() == ["step_00000001", "step_00000005", "step_00000006"]


def test_a_kill_between_latest_and_the_note_goes_back_once_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("trainer.resume.WentBack", kill)
        run.attempt(run.path(1))
    assert files.latest_checkpoint(run.folder) == Path(run.path(1))
    assert run.attempt(run.path(1)) == "step_00000001"


def test_a_load_that_fails_leaves_the_run_where_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("another optimizer")

    monkeypatch.setattr(Checkpointer, "load", fail)
    with pytest.raises(ValueError, match="another optimizer"):
        run.attempt(run.path(1))
    assert files.latest_checkpoint(run.folder) == Path(run.path(3)) and not (run.folder / NOTE).exists()


def test_who_only_looks_takes_the_path_and_notes_nothing(run: Run) -> None:
    run.attempt(run.path(1), 4)
    before = (run.folder / NOTE).read_bytes()
    assert resolve_resume(run.path(1), run.folder) == Path(run.path(1))
    assert (run.folder / NOTE).read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"to": 3, "words": [], "left": {}}'])
def test_a_damaged_note_is_none(run: Run, text: str) -> None:
    (run.folder / NOTE).write_text(text)
    assert run.attempt(run.path(1)) == "step_00000001"
    assert run.attempt("auto", 2) == "step_00000001"


def test_never_goes_on_from_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.attempt("never", 1) is None
    assert run.attempt("never") == "step_00000001"
    assert "checkpoint.resume=never was where this same command began" in run.said[-1]


def test_an_archived_checkpoint_with_a_link_to_it_is_a_way_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "checkpoints")
    run.attempt("auto", 1, 2)
    archived = (run.folder / files.step_name(1)).rename(tmp_path / "archived")
    (run.folder / files.step_name(1)).symlink_to(archived)
    assert own_name(run.path(1), run.folder) == files.step_name(1)
    assert own_name(f"{run.folder}/./{files.step_name(2)}/", run.folder) == files.step_name(2)
    assert own_name(str(archived), run.folder) is None
