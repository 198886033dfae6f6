"""torchtitan's trainer on the architecture of a *_bench experiment: what scripts/bench_train.py compares with.

    torchrun --nproc-per-node 2 scripts/torchtitan_baseline.py --model qwen3 --tokens tokens.npy --eos-id 0
    python scripts/torchtitan_baseline.py --check        print the version found; exit code 1 and why, if unusable

Model, parallelism (FSDP2, all ranks in EP), torch.compile, optimizer and metrics are torchtitan's own; only its
published flavor is cut to fewer layers. Its data loader is replaced by one that reads tokens made beforehand (the
tokens of our run), so that tokenising costs neither side anything. Packages that torchtitan imports on the way but
that this run does not use (`datasets`, `torchdata`, tensorboard) are replaced by empty ones where they are missing.
"""

import argparse
import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

VERSION = "0.2.2"
# model -> (module, name of its table of flavors, the published flavor that is cut)
FLAVORS = {
    "qwen3": ("torchtitan.models.qwen3", "qwen3_args", "30B-A3B"),
    "deepseek_v3": ("torchtitan.models.deepseek_v3", "deepseekv3_args", "16B"),
}
# Imported by torchtitan, unused here: module -> names that are imported from it.
UNUSED = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "torchdata": (),
    "torchdata.stateful_dataloader": ("StatefulDataLoader",),
    "torch.utils.tensorboard": ("SummaryWriter",),
}
# The package whose absence makes an entry of UNUSED fail.
NEEDS = {"torch.utils.tensorboard": "tensorboard"}


def main() -> int:
    """One rank of the baseline run, or with --check the answer whether it can run; returns the exit code."""
    arguments = parse_arguments()
    replaced = replace_missing_packages()
    if arguments.check:
        return check(replaced)
    config = build_config(arguments, int(os.environ["WORLD_SIZE"]))
    register(arguments)

    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    init_logger()
    # Any: its metrics processor is ours.
    trainer: Any = Trainer(config)
    try:
        trainer.train()
    finally:
        trainer.close()
    print(f"peak allocated: {trainer.metrics_processor.peak_gib:.2f}GiB", flush=True)
    torch.distributed.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="torchtitan_baseline.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether torchtitan can be imported")
    parser.add_argument("--model", choices=tuple(FLAVORS), default="qwen3")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--local-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--activation-checkpoint", choices=("none", "full"), default="none")
    parser.add_argument("--tokens", help="int32 .npy file of token ids")
    parser.add_argument("--eos-id", type=int, default=0, help="the id that ends each document")
    arguments = parser.parse_args()
    if not arguments.check and arguments.tokens is None:
        parser.error("--tokens FILE is needed")
    return arguments


def replace_missing_packages() -> list[str]:
    """Put an empty module in the place of each unused package that is not installed; returns their names."""
    replaced: list[str] = []
    for name, attributes in UNUSED.items():
        package = NEEDS.get(name, name.partition(".")[0])
        if package not in replaced:
            if importlib.util.find_spec(package) is not None:
                continue
            replaced.append(package)
        module = types.ModuleType(name)
        # Importers ask for it (`find_spec`) and refuse a module without one.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (), {}))
        sys.modules[name] = module
    return replaced


def check(replaced: list[str]) -> int:
    """Import what the run imports; print `version` and what was replaced, or the reason why it cannot be used."""
    try:
        version = importlib.metadata.version("torchtitan")
        for module, _, _ in FLAVORS.values():
            importlib.import_module(module)
        importlib.import_module("torchtitan.train")
    except ImportError as error:  # PackageNotFoundError is one
        print(f"torchtitan cannot be imported: {error}")
        return 1
    if version != VERSION:
        print(f"torchtitan {version} is installed; this baseline is written for {VERSION}")
        return 1
    print(f"{version} (empty stand-ins for: {', '.join(replaced)})" if replaced else version)
    return 0


def build_config(arguments: argparse.Namespace, world_size: int) -> Any:
    """torchtitan's JobConfig of the run."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.job.dump_folder = tempfile.gettempdir()
    config.model.name, config.model.flavor = arguments.model, "bench"
    config.training.seq_len = arguments.seq_len
    config.training.local_batch_size = arguments.local_batch
    config.training.steps = arguments.steps
    config.parallelism.expert_parallel_degree = world_size
    config.activation_checkpoint.mode = arguments.activation_checkpoint
    config.compile.enable = True
    config.debug.moe_force_load_balance = True
    config.metrics.log_freq = arguments.log_every
    config.metrics.disable_color_printing = True
    # As in the *_bench experiments; they change the loss, not the speed.
    config.optimizer.lr = 3e-4
    config.lr_scheduler.warmup_steps = 2
    # The first step compiles.
    config.comm.init_timeout_seconds = 900
    return config


def register(arguments: argparse.Namespace) -> None:
    """Make flavor `bench` of the model, and let its data be our tokens."""
    from torchtitan.protocols.train_spec import register_train_spec

    module = add_flavor(arguments.model, arguments.layers)
    # Its checkpoint adapter looks for files of published weights; none are loaded.
    spec = dataclasses.replace(
        module.get_train_spec(),
        build_tokenizer_fn=lambda job_config: EndOfDocument(arguments.eos_id),
        build_dataloader_fn=lambda *, dp_world_size, dp_rank, tokenizer, job_config: TokenLoader(
            arguments.tokens, arguments.seq_len, arguments.local_batch, dp_rank, dp_world_size
        ),
        build_metrics_processor_fn=metrics_processor,
        state_dict_adapter=None,
    )
    register_train_spec(arguments.model, spec)


def add_flavor(model: str, num_layers: int) -> types.ModuleType:
    """Add the published widths with `num_layers` layers to the model's flavors; returns the model's module."""
    name, table, published = FLAVORS[model]
    module = importlib.import_module(name)
    flavors = getattr(module, table)
    flavors["bench"] = dataclasses.replace(flavors[published], n_layers=num_layers)
    return module


def metrics_processor(job_config: Any, parallel_dims: Any, model_args: Any) -> Any:
    """torchtitan's, which also keeps the most memory allocated: our runs report that, its own lines the reserved."""
    from torchtitan.components.metrics import MetricsProcessor

    class PeakMemory(MetricsProcessor):
        peak_gib = 0.0

        def log(self, *values: Any, **named: Any) -> None:
            # It resets the counter at the end of each log.
            self.peak_gib = max(self.peak_gib, torch.cuda.max_memory_allocated() / 2**30)
            super().log(*values, **named)

    return PeakMemory(job_config, parallel_dims)


class EndOfDocument:
    """All that the model's attention mask asks of a tokenizer."""

    def __init__(self, eos_id: int) -> None:
        self.eos_id = eos_id


class TokenLoader:
    """Endless batches ({"input": (B, S)}, labels (B, S)) of one data-parallel rank.

    Sequence i is tokens [i*S, i*S + S]; rank r of R takes the sequences r, r + R, r + 2R, ...
    """

    def __init__(self, file: str, seq_len: int, batch_size: int, rank: int, num_ranks: int) -> None:
        tokens = np.load(file, mmap_mode="r")
        self.num_sequences = (len(tokens) - 1) // seq_len
        if self.num_sequences < num_ranks:
            raise ValueError(f"{file} has {len(tokens)} tokens: less than one sequence for each of {num_ranks} ranks")
        self.tokens, self.seq_len, self.batch_size = tokens, seq_len, batch_size
        self.rank, self.num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        index = self.rank
        while True:
            rows: list[Tensor] = []
            for _ in range(self.batch_size):
                start = index % self.num_sequences * self.seq_len
                row = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
                rows.append(torch.from_numpy(row))
                index += self.num_ranks
            batch = torch.stack(rows)
            yield {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()


if __name__ == "__main__":
    sys.exit(main())
