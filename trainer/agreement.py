"""Do all ranks have the same settings, and read the same data? Nothing else would notice that they do not.

Ranks that share a sequence (tp, cp) would each take their part of another one, data ranks would count past each other's
samples, and held-out sets of different lengths would have ranks wait for each other until the timeout. It happens where
nodes have copies of their own, and one is older or not complete.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from trainer.changes import leaves, within
from trainer.config import Config
from trainer.data import EvalSet, TrainLoader
from trainer.hf_config import HF_PREFIX
from trainer.peers import Peers, by_rank
from trainer.tokenizer import Tokenizer

# Settings that decide what is computed, and what all ranks do together. Others, such as paths, may differ by node.
ALIKE = (
    "model", "train", "parallel", "precision", "comms", "optim", "guard", "checkpoint", "profile", "debug", "run.seed",
    "data.document_mask", "data.eval_samples", "data.invalid_utf8", "data.empty_files",
)  # fmt: skip
# Of these paths, the kind.
KINDS = {"checkpoint.resume": ("auto", "never"), "checkpoint.init_from": (None,)}


def check_same_settings(peers: Peers, config: Config) -> None:
    """Compare settings that decide what is computed. Collective.

    Raises:
        ValueError: on every rank, naming the first that differs, who has what, and what to do.
    """
    mine = {key: _said(key, value) for key, value in leaves(asdict(config)) if within(key, ALIKE)}
    _check(peers, mine, "start every node with the same command line, code and configs/")


def check_same_data(
    peers: Peers, tokenizer: Tokenizer, loader: TrainLoader | None, eval_sets: Iterable[EvalSet]
) -> None:
    """Compare what was read. Collective.

    Raises:
        ValueError: as `check_same_settings`.
    """
    mine = {"data.tokenizer": f"{tokenizer.vocab_size} entries, digest {tokenizer.digest.hex()[:8]}"}
    if loader is not None:
        mine |= {f"data.train.{name}": said for name, said in loader.contents.items()}
        mine["the order of data.train (weights)"] = loader.fingerprint[:8]
    mine |= {f"data.eval.{batches.name}": batches.contents for batches in eval_sets}
    _check(peers, mine, "give every node the same files, on a shared file system or as equal copies")


def _said(key: str, value: Any) -> str:
    if key not in KINDS or value in KINDS[key]:
        return repr(value)
    return "a Hugging Face folder" if str(value).startswith(HF_PREFIX) else "a path"


def _check(peers: Peers, mine: dict[str, str], advice: str) -> None:
    of_ranks = peers.gather(mine)
    with peers.together(doers=1):
        # One that a rank lacks is one that differs.
        for what in dict.fromkeys(key for found in of_ranks for key in found):
            told = {rank: found.get(what, "nothing") for rank, found in enumerate(of_ranks)}
            if len(set(told.values())) > 1:
                raise ValueError(f"{what} is not the same on every rank ({by_rank(told)}): {advice}, and start again")
