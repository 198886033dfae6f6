"""A run: build, loop, close.

This is the only file that sees everything; what a part does is written in that part (and how an attempt ends, in
trainer/attempt.py):

    config    trainer/compose.py       data   trainer/data.py         model   trainer/models/transformer.py
    layout    parallel/parallelize.py  step   trainer/step.py         state   trainer/checkpoint.py
"""

import time
from contextlib import closing
from pathlib import Path

import torch

from comms.symmetric_memory import NoRoomError
from parallel.mesh import build_mesh
from trainer.agreement import check_same_data
from trainer.banner import describe_layout, describe_run, describe_sources
from trainer.build import build_model, choose_expert_tiles
from trainer.changes import check_architecture
from trainer.checkpoint import Checkpointer
from trainer.checkpoint_files import find_checkpoint
from trainer.config import Config
from trainer.data import build_eval_sets, build_train_loader
from trainer.evaluate import EvalResult, evaluate
from trainer.garbage import Garbage, collected_together
from trainer.generate import generate
from trainer.guard import FAILED, NonFinitePolicy, RoomCheck, Stopped, StopSignal
from trainer.hf_config import HF_PREFIX
from trainer.hf_run import export_run, inherit_source, start_from
from trainer.metrics import RunMetrics
from trainer.optim import build_optimizer, learning_rate, set_learning_rate
from trainer.peers import Peers
from trainer.profiler import StepProfiler
from trainer.run import RunFolder
from trainer.settle import total_steps
from trainer.step import StepResult, train_step
from trainer.tokenizer import load_tokenizer

# Length of the sample that a finished run prints.
SAMPLE_TOKENS = 128
# Nodes that each tokenise a large text are ready hours apart. Of a rank that is killed the others know at once.
READING_SECONDS = 24 * 3600


class Trainer:
    """Everything one attempt needs, and the loop over it."""

    def __init__(self, config: Config, folder: RunFolder, device: torch.device, peers: Peers) -> None:
        self.config, self.folder, self.peers = config, folder, peers
        torch.use_deterministic_algorithms(config.debug.deterministic)
        self.mesh = mesh = build_mesh(config.parallel, device)
        self.total_steps = total_steps(config)
        self.metrics = RunMetrics(config, folder, mesh, self.total_steps)
        self.step = 0
        self.metrics.say(
            f"{describe_run(config, folder, mesh)}\nreading the data (text that is new is tokenised first)"
        )
        with closing(Peers(READING_SECONDS)) as patient, patient.together():
            self.tokenizer = load_tokenizer(config.data)
            rank, size = mesh.batch_rank, mesh.batch_size
            # An evaluation may have other data, or none, to train on.
            self.loader = None if config.train.eval_only else build_train_loader(config, self.tokenizer, rank, size)
            self.eval_sets = build_eval_sets(config, self.tokenizer, rank, size)
        check_same_data(peers, self.tokenizer, self.loader, self.eval_sets.values())
        self.tell_data()
        self.model = build_model(config, mesh)
        for said in describe_layout(config, mesh, self.model):
            self.metrics.say(said)
        choose_expert_tiles(self.model, config, mesh)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.checkpointer = Checkpointer(
            folder.path / "checkpoints",
            config.checkpoint,
            seed=config.run.seed,
            notify=self.metrics.say,
        )
        self.stop = StopSignal(device)
        self.may_update = NonFinitePolicy(config.guard, self.metrics.say)
        self.room = RoomCheck(peers)
        self.profiler = StepProfiler(config.profile, folder.path, self.metrics.say)
        self.restore()
        if config.train.eval_only:
            self.check_evaluable()

    def tell_data(self) -> None:
        """Say what was read."""
        train = {} if self.loader is None else self.loader.counts
        held_out = {name: batches.counts for name, batches in self.eval_sets.items()}
        for said in describe_sources(train, held_out):
            self.metrics.say(said)

    def check_evaluable(self) -> None:
        """Raises ValueError where an evaluation-only run has no weights or no text."""
        if self.restored_from is None:
            raise ValueError(
                "train.eval_only=true needs weights: name a run that has a checkpoint (run.id), or give "
                "checkpoint.init_from=PATH"
            )
        if not self.eval_sets:
            raise ValueError("train.eval_only=true but data.eval names no held-out set")

    def restore(self) -> None:
        """Continue from a checkpoint, start from given weights, or start anew; say which."""
        if self.folder.notice:
            self.metrics.say(self.folder.notice)
        # An evaluation looks at the checkpoint that is named, whatever else the run has.
        words = None if self.loader is None else self.folder.overrides
        path = self.checkpointer.resume_path(words)
        init_from = self.config.checkpoint.init_from or ""
        self.restored_from: Path | None = None
        if path is None and init_from.startswith(HF_PREFIX):
            self.start_from_hugging_face(Path(init_from.removeprefix(HF_PREFIX)))
            return
        self.restored_from = self.weights_folder(path)
        if self.restored_from is not None:
            self.check_architecture(self.restored_from, refuse=path is not None or self.loader is None)
        if path is not None and self.loader is not None:
            extra = self.checkpointer.load(path, self.model, self.optimizer)
            self.step = int(extra["step"])
            self.loader.load_state_dict(extra["data"])
            self.metrics.resume(extra)
            self.total_steps = total_steps(self.config, self.step, self.metrics.tokens(self.step))
            self.metrics.say(f"continuing from {path} at step {self.step}")
            self.checkpointer.began(self.folder.overrides)
        elif self.restored_from is not None:
            extra = self.checkpointer.load_weights(self.restored_from, self.model)
            if self.loader is None:
                self.step = int(extra["step"])
                self.metrics.count_from(extra)
            self.check_tokenizer(extra.get("tokenizer"))
            self.metrics.say(f"weights of step {extra['step']} from {self.restored_from}")
            if self.loader is not None:
                step_folder = self.restored_from
                self.peers.from_rank0(lambda: inherit_source(step_folder, self.folder.path))

    def start_from_hugging_face(self, path: Path) -> None:
        """The weights of a Hugging Face folder; what export needs of it is kept in the run's folder."""
        self.restored_from = path
        keep_in = None if self.config.train.eval_only else self.folder.path
        moved, digest = start_from(path, self.model, self.config.model, keep_in, self.peers)
        for note in moved.notes:
            self.metrics.say(note)
        self.check_tokenizer(digest)
        self.metrics.say(f"weights from {path}")

    def export(self) -> None:
        """Write the model as `<run>/hf`, for Hugging Face's `transformers`."""
        with self.metrics.pause():
            moved = export_run(self.folder.path, self.model, self.config.model, self.tokenizer, self.peers)
        for note in moved.notes:
            self.metrics.say(note)

    def weights_folder(self, resume: Path | None) -> Path | None:
        """The step folder that the weights come from: where this run goes on, else checkpoint.init_from."""
        init_from = self.config.checkpoint.init_from
        if init_from is None:
            return resume
        if resume is not None:
            self.metrics.say(f"checkpoint.init_from={init_from} is not used: the weights are those of {resume}")
            return resume
        return self.peers.from_rank0(lambda: find_checkpoint(init_from, self.metrics.say))

    def check_architecture(self, step_folder: Path, *, refuse: bool) -> None:
        """Weights mean nothing in another architecture: refused, or, where they are a start for a new run, told."""
        notice = self.peers.from_rank0(lambda: check_architecture(self.config, step_folder, refuse=refuse))
        if notice:
            self.metrics.say(notice)

    def check_tokenizer(self, digest: str | None) -> None:
        """Weights mean nothing with another vocabulary: an evaluation refuses it, a new run is told."""
        if digest in (None, self.tokenizer.digest.hex()):
            return
        text = (
            f"the weights of {self.restored_from} were trained with another tokenizer than data.tokenizer="
            f"{self.config.data.tokenizer} gives here"
        )
        if self.config.train.eval_only:
            raise ValueError(f"{text}; set data.tokenizer to the folder `tokenizer` of the run that wrote them")
        self.metrics.say(f"warning: {text}")

    def train(self) -> str:
        """Train to the end, or to the next step boundary after a stop signal: `finished` or `preempted`."""
        config, metrics = self.config, self.metrics
        # So that the run can be used without its data. Not before a resumed run has found its data unchanged.
        self.peers.from_rank0(lambda: self.tokenizer.save(self.folder.path / "tokenizer"))
        metrics.begin(self.step)
        with collected_together(config.train.gc_every) as garbage, self.profiler.ended(self.step + 1):
            if not self.take_steps(garbage):
                return "preempted"
        self.check_room()
        self.checkpointer.wait()
        if config.checkpoint.export_hf:
            self.export()
        self.show_result()
        return "finished"

    def take_steps(self, garbage: Garbage) -> bool:
        """All steps that are left; False where a signal stopped them, after the checkpoint was saved."""
        config, metrics = self.config, self.metrics
        first, begin = self.step + 1, time.monotonic()
        while self.step < self.total_steps:
            if self.peers.rank == 0:
                self.profiler.before(self.step + 1, is_first=self.step + 1 == first)
            result, lr = self.train_one_step()
            self.profiler.after(self.step)
            last = self.step == self.total_steps
            results = self.evaluate() if self.is_due(config.train.eval_every, last) else {}
            if last or results or self.step % config.train.log_every == 0:
                metrics.log(self.step, result, lr, results)
            elif self.step == first:
                # On a slow machine the first figures may be minutes away.
                took, every = time.monotonic() - begin, config.train.log_every
                when = f"every {every} steps (train.log_every) and at the end, step {self.total_steps}"
                metrics.say(f"step {first} took {took:.1f} s; figures come {when}")
            garbage.after_step()
            signal = self.stop.agree(self.checkpointer.failed)
            if signal == FAILED:
                self.checkpointer.wait()
                raise RuntimeError("a checkpoint could not be saved on another rank; see its message")
            if signal or self.is_due(config.checkpoint.every, last):
                self.save()
            if signal and not last:
                metrics.event("stop", step=self.step, signal=signal)
                same = f"the same command with run.id={config.run.id}"
                metrics.say(f"{signal}: saved step {self.step} and stopped; {same} continues the run")
                self.checkpointer.wait()
                return False
        return True

    def train_one_step(self) -> tuple[StepResult, float]:
        """One optimizer step: its figures, and the learning rate it used."""
        assert self.loader is not None
        lr = learning_rate(self.step, self.config.optim, self.total_steps)
        set_learning_rate(self.optimizer, lr)
        with self.metrics.waiting_for_data():
            batches = self.loader.next_step()
        result = train_step(self.model, self.optimizer, batches, self.mesh, self.config, self.may_update)
        # Of the step before: by now that is known without a wait.
        self.check_room()
        self.room.note(result.no_room)
        self.step += 1
        self.tell_compiled()
        return result, lr

    def tell_compiled(self) -> None:
        """Once, what the compiler has overlapped, where it was asked to; RuntimeError if it is nothing."""
        if said := self.model.async_tp.check_compiled():
            self.metrics.say(said)

    def check_room(self) -> None:
        """Raises NoRoomError where rows or pairs of the last step found no room; its update was then left out."""
        try:
            self.room.check()
        except NoRoomError:
            self.step -= 1
            raise

    def is_due(self, every: int | None, last: bool) -> bool:
        """Every so many steps and at the end; 0 means only at the end, None never."""
        if every is None:
            return False
        return last or (every > 0 and self.step % every == 0)

    def evaluate(self) -> dict[str, EvalResult]:
        """Evaluate every held-out set and tell the results."""
        with self.metrics.pause():
            mask, bytes_V = self.config.data.document_mask, self.tokenizer.bytes_per_token
            # Within a training the next step boundary is where a signal counts.
            watched = (lambda batches: batches) if self.loader is not None else self.stop.until_stopped
            results = {
                name: evaluate(self.model, watched(batches), self.mesh, bytes_V, mask)
                for name, batches in self.eval_sets.items()
            }
        self.check_room()
        self.room.check_now()
        for name, result in results.items():
            bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.3f} bits per byte"
            self.metrics.say(f"step {self.step}  held-out set '{name}': loss {result.loss:.4f}{bits}")
        return results

    def evaluate_only(self) -> str:
        """Evaluate the weights that were restored, and nothing else: `finished`, or `preempted` by a stop signal."""
        try:
            self.metrics.log_eval(self.step, self.evaluate())
        except Stopped as signal:
            self.metrics.event("stop", step=self.step, signal=str(signal))
            same = f"the same command with run.id={self.config.run.id}"
            self.metrics.say(f"{signal}: stopped within the evaluation, no result is kept; {same} begins it anew")
            return "preempted"
        self.tell_compiled()
        return "finished"

    def save(self) -> None:
        """Save a checkpoint of this step."""
        assert self.loader is not None
        self.check_room()
        with self.metrics.pause():
            extra = {
                "step": self.step,
                "tokens": self.metrics.tokens(self.step),
                "data": self.loader.state_dict(),
                "tokenizer": self.tokenizer.digest.hex(),
                **self.metrics.state(),
            }
            self.checkpointer.save(self.step, self.model, self.optimizer, extra)
        self.metrics.event("checkpoint", step=self.step)

    def show_result(self) -> None:
        """A sample, if one is asked for, and where everything lies."""
        prompt = self.config.train.sample_prompt
        if prompt is not None:
            text = generate(
                self.model,
                self.tokenizer,
                prompt,
                max_new_tokens=SAMPLE_TOKENS,
                seed=self.config.run.seed,
                max_context=self.config.train.seq_len,
                device=self.mesh.device,
            )
            self.metrics.say(f"sample of {SAMPLE_TOKENS} tokens after {prompt!r}:\n{text}")
        path = self.folder.path
        latest = self.checkpointer.latest()
        self.metrics.say(
            f"finished at step {self.step}\n"
            f"  metrics     {path / 'metrics.jsonl'}\n"
            f"  config      {path / 'config.yaml'}\n"
            f"  checkpoint  {latest or 'none (checkpoint.every=null)'}"
            + (f"\n  for transformers  {path / 'hf'}" if self.config.checkpoint.export_hf else "")
        )

    def close(self, exit_code: int) -> None:
        """Stop the threads and flush the files. After a failure the first error is the one that counts."""
        if self.loader is not None:
            self.loader.close()
        try:
            self.checkpointer.close()
        except RuntimeError as error:
            if exit_code == 0:
                raise
            self.metrics.say(str(error))
        finally:
            self.metrics.close(exit_code)
            # Last: when another rank has failed, torchrun sends SIGTERM at once, and the reason must still be told.
            self.stop.restore()
