"""Text -> tokens -> packed, sharded, resumable batches.

Shape suffixes: B sequences of one micro-batch on one rank, S sequence length, V vocabulary.

The global sample `i` is a pure function of (run.seed, i): which source it comes from (packing.Mixture), which of that
source's rows it is, and what is in the row (packing.PackedSource). Optimizer step s takes samples
[s * global_batch_size, (s + 1) * global_batch_size); its micro-step m takes the next data_ranks * micro_batch_size of
them, split over the data ranks in order. So neither the number of ranks nor the accumulation changes what a step learns
from, and the position in the data is one number.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import Config, SourceConfig
from trainer.packing import Mixture, PackedSource, Row, empty_row, seed_key
from trainer.prefetch import Prefetcher
from trainer.token_cache import TokenisedSource, open_source
from trainer.tokenizer import Tokenizer, load_tokenizer
from trainer.validate import accumulation_steps

__all__ = ["Batch", "EvalSet", "Tokenizer", "TrainLoader", "build_eval_sets", "build_train_loader", "load_tokenizer"]

PADDING_SAMPLE = -1
# Evaluation sets are cut in one order whatever the run's seed, so that runs compare on the same rows.
EVAL_KEY = 0
# Bounds on the documents of a batch are multiples of this.
DOCUMENTS_STEP = 64


@dataclass
class Batch:
    """One micro-batch of one rank; int64."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor  # the next token; -100 where there is nothing to learn
    positions_BS: torch.Tensor  # restart with every document
    document_ids_BS: torch.Tensor  # 0, 1, ... in a row; -1 is padding
    sample_ids_B: torch.Tensor  # global sample index; -1 for a row of padding

    @property
    def max_documents(self) -> int:
        """A bound on the runs of equal document ids: their number, rounded up so that few different bounds occur."""
        ids = self.document_ids_BS
        runs = ids.shape[0] + int((ids[:, 1:] != ids[:, :-1]).sum())
        return -(-runs // DOCUMENTS_STEP) * DOCUMENTS_STEP

    def to(self, device: torch.device | str) -> "Batch":
        """A copy on `device`; does not wait for the transfer where the memory is pinned."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self.tensors()))

    def pin_memory(self) -> "Batch":
        """A copy in pinned host memory."""
        return Batch(*(tensor.pin_memory() for tensor in self.tensors()))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The fields in order."""
        return self.tokens_BS, self.labels_BS, self.positions_BS, self.document_ids_BS, self.sample_ids_B


def collate(rows: list[Row], sample_ids: list[int]) -> Batch:
    """Stack rows to a batch."""
    fields = [torch.stack([torch.from_numpy(array) for array in arrays]) for arrays in zip(*rows, strict=True)]
    return Batch(*fields, sample_ids_B=torch.tensor(sample_ids, dtype=torch.int64))


class TrainLoader:
    """This rank's batches, step after step, prepared in the background.

    fingerprint: names data and order; equal on all ranks of a healthy run. counts: per source, what was read and
    skipped (documents, tokens, invalid_utf8, empty_files, truncated, samples_per_epoch). contents: per source, what was
    read, in words."""

    def __init__(self, config: Config, opened: dict[str, TokenisedSource], dp_rank: int, dp_size: int) -> None:
        train, seed = config.train, config.run.seed
        assert 0 <= dp_rank < dp_size
        accumulation_steps(train, dp_size)
        self._global_batch_size = train.global_batch_size
        self._micro_batch_size = train.micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._depth = config.data.prefetch
        self._sources = [
            _pack(opened[name], config, seed_key(seed, "source", name), f"data.train.{name}") for name in opened
        ]
        weights = {name: config.data.train[name].weight for name in opened}
        self._mixture = Mixture(weights, seed_key(seed, "train"))
        self.counts = {name: _counts(opened[name], packed) for name, packed in zip(opened, self._sources, strict=True)}
        self.contents = {name: _contents(source) for name, source in opened.items()}
        digests = {name: (opened[name].corpus.digest, weight) for name, weight in weights.items()}
        self.fingerprint = _digest([seed, train.seq_len, config.data.document_mask, digests])
        self._next_sample = 0
        self._prefetcher: Prefetcher[list[Batch]] | None = None
        self._pin_device: int | None = None

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next optimizer step, in order. Raises what reading them raised."""
        if self._prefetcher is None:
            # Not before the first step: by now a restored position and this process's device are known.
            ready = torch.cuda.is_available() and torch.cuda.is_initialized()
            self._pin_device = torch.cuda.current_device() if ready else None
            start, size = self._next_sample, self._global_batch_size
            self._prefetcher = Prefetcher(lambda index: self._read_step(start + index * size), 0, self._depth)
        step = self._prefetcher.get()
        self._next_sample += self._global_batch_size
        return step

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step handed out: JSON-able, equal on all ranks, independent of their number."""
        return {"next_sample": self._next_sample, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ValueError where the data or their order are not the same."""
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                "the training data are not those of the checkpoint (files, weights, tokenizer, run.seed, train.seq_len "
                f"or data.document_mask changed: {state['fingerprint']} is now {self.fingerprint}): restore them, or "
                "start a new run (another run.id) from the weights with checkpoint.init_from=PATH of that checkpoint; "
                "run.allow_changes does not help here"
            )
        self.close()
        self._next_sample = int(state["next_sample"])

    def close(self) -> None:
        """Stop the background thread; next_step starts it again where it stood."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _read_step(self, first_sample: int) -> list[Batch]:
        micro = self._micro_batch_size
        stride = self._dp_size * micro
        last = first_sample + self._global_batch_size
        starts = range(first_sample + self._dp_rank * micro, last, stride)
        return [self._read_batch(list(range(start, start + micro))) for start in starts]

    def _read_batch(self, sample_ids: list[int]) -> Batch:
        places = [self._mixture.locate(sample) for sample in sample_ids]
        batch = collate([self._sources[source].row(index) for source, index in places], sample_ids)
        if self._pin_device is None:
            return batch
        # A thread begins on device 0: pinning there would give every rank a context on that card.
        torch.cuda.set_device(self._pin_device)
        return batch.pin_memory()


class EvalSet:
    """A held-out set, read in order; every data rank gets equally many batches, the last filled up with padding.

    Where data.eval_samples asks for a part, its rows lie evenly over the set: the first ones would be a few files.
    """

    def __init__(self, name: str, source: PackedSource, config: Config, dp_rank: int, dp_size: int) -> None:
        limit = config.data.eval_samples
        self.name = name
        self.num_samples = min(source.num_samples, limit) if limit > 0 else source.num_samples
        self.counts: dict[str, int] = {}
        self.contents = ""
        self._source = source
        self._micro_batch_size = config.train.micro_batch_size
        self._seq_len = config.train.seq_len
        self._dp_rank, self._dp_size = dp_rank, dp_size

    def __len__(self) -> int:
        """Batches on each rank."""
        return -(-self.num_samples // (self._dp_size * self._micro_batch_size))

    def __iter__(self) -> Iterator[Batch]:
        micro = self._micro_batch_size
        for step in range(len(self)):
            start = (step * self._dp_size + self._dp_rank) * micro
            ids = [i if i < self.num_samples else PADDING_SAMPLE for i in range(start, start + micro)]
            yield collate([empty_row(self._seq_len) if i < 0 else self._source.row(self._place(i)) for i in ids], ids)

    def _place(self, sample: int) -> int:
        """The row of the set that is this sample."""
        return sample * self._source.num_samples // self.num_samples


def build_train_loader(config: Config, tokenizer: Tokenizer, dp_rank: int, dp_size: int) -> TrainLoader:
    """Open (tokenise, where nobody has yet) the sources of data.train.

    dp_rank, dp_size: place on the batch axis. Raises ValueError for a mistake in the config or the data, naming the
    field or the file; FileNotFoundError for a missing file."""
    _check_vocabulary(config, tokenizer)
    named = config.data.train
    for name, source in named.items():
        if not source.weight >= 0.0:
            raise ValueError(f"data.train.{name}.weight is {source.weight}: give a number of at least 0")
    opened = {name: _open(config, tokenizer, "train", name, source) for name, source in named.items() if source.weight}
    if not opened:
        raise ValueError("data.train has no source of positive weight: choose data=NAME or set data.train.NAME.paths")
    return TrainLoader(config, opened, dp_rank, dp_size)


def build_eval_sets(config: Config, tokenizer: Tokenizer, dp_rank: int, dp_size: int) -> dict[str, EvalSet]:
    """The sets of data.eval by name; errors as in build_train_loader."""
    _check_vocabulary(config, tokenizer)
    sets: dict[str, EvalSet] = {}
    for name, source in config.data.eval.items():
        opened = _open(config, tokenizer, "eval", name, source)
        packed = _pack(opened, config, seed_key(EVAL_KEY, "eval"), f"data.eval.{name}", keep_tail=True)
        sets[name] = EvalSet(name, packed, config, dp_rank, dp_size)
        sets[name].counts = _counts(opened, packed)
        sets[name].contents = f"{_contents(opened)}, {sets[name].num_samples:,} samples"
    return sets


def _open(config: Config, tokenizer: Tokenizer, part: str, name: str, source: SourceConfig) -> TokenisedSource:
    return open_source(source, config.data, tokenizer, f"data.{part}.{name}")


def _pack(opened: TokenisedSource, config: Config, key: int, where: str, keep_tail: bool = False) -> PackedSource:
    corpus, seq_len = opened.corpus, config.train.seq_len
    packed = PackedSource(corpus, seq_len, key, document_mask=config.data.document_mask, keep_tail=keep_tail)
    if packed.num_samples < 1:
        raise ValueError(
            f"{where} holds {corpus.num_tokens} tokens, less than one sequence of train.seq_len={seq_len}: "
            "give more text or a shorter sequence"
        )
    if not (corpus.label_starts < (corpus.lengths.clip(max=seq_len + 1))).any():
        raise ValueError(f"{where}: every prompt fills train.seq_len={seq_len}, no response is left to learn from")
    return packed


def _counts(opened: TokenisedSource, packed: PackedSource) -> dict[str, int]:
    return {**opened.counts, "truncated": packed.truncated, "samples_per_epoch": packed.num_samples}


def _contents(opened: TokenisedSource) -> str:
    corpus = opened.corpus
    return f"{corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens, digest {corpus.digest[:8]}"


def _check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, more than model.vocab_size="
            f"{config.model.vocab_size}: set model.vocab_size={-(-tokenizer.vocab_size // 64) * 64} or choose another"
        )


def _digest(parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
