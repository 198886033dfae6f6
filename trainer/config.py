"""The schema of a run: Hydra structured configs, one dataclass per group.

Names here are what scripts, sweeps and users rely on: once released they only grow.
"""

from dataclasses import dataclass, field

from comms.config import CommsConfig
from parallel.config import ParallelConfig
from trainer.models.config import ModelConfig


@dataclass
class RunConfig:
    """Which run this is and where it lives."""

    # [A-Za-z0-9._-]+; null means SLUICEGATE_RUN_ID, SLURM_JOB_ID or TORCHELASTIC_RUN_ID, else a new one.
    id: str | None = None
    root: str = "runs"
    seed: int = 0
    # Settings, or sections, of model, data, optim or train that may differ from the run that is resumed; samples and
    # their order may not, once there is a checkpoint.
    allow_changes: list[str] = field(default_factory=list)


@dataclass
class TrainConfig:
    """How long to train, on what batches, and what to do every so many steps."""

    steps: int = 1000
    # Stop once this many tokens are trained on (rounded up to a whole step); null means steps alone decides.
    max_tokens: int | None = None
    # Batch sizes are in sequences; accumulation is derived.
    global_batch_size: int = 8
    micro_batch_size: int = 1
    seq_len: int = 1024
    log_every: int = 10
    # 0 means: only at the end; null: never.
    eval_every: int | None = 0
    # Only evaluate the checkpoint named by checkpoint.resume or checkpoint.init_from, then stop.
    eval_only: bool = False
    # All ranks collect Python's garbage together after the second step and then after every so many, and only then; 0
    # leaves it to Python, which stops ranks one by one in the middle of steps.
    gc_every: int = 50
    # Text continued and printed at the end of the run; null means no sample.
    sample_prompt: str | None = None


@dataclass
class PrecisionConfig:
    """Number formats of the computation."""

    # bf16 | fp32 | fp64 | mxfp8 | fp8_blockwise
    recipe: str = "bf16"
    # mxfp8: weight gradients as the recipe has them (recipe), or in bf16.
    wgrad: str = "recipe"
    # Dense linears that compute in mxfp8 or fp8_blockwise, beside the routed experts: patterns over module names, like
    # layers.*.attention.wq, *.shared.*, *feed_forward*. No pattern reaches router, embedding or head.
    linears: list[str] = field(default_factory=list)
    # Of those, the ones that stay in bf16: by default the maps of keys and values, and attention's output.
    linears_exclude: list[str] = field(default_factory=lambda: ["*.wk", "*.wv", "*.wkv_a", "*.wkv_b", "*.wo"])


@dataclass
class SourceConfig:
    """One source of documents, for training or for a held-out set."""

    # text (file globs) | huggingface (a local data set folder or hub name) | tokens (shards written by
    # scripts/tokenize_text.py) | sft (prompt/response JSONL)
    kind: str = "text"
    # Globs, folders or names; a list is taken together. `stdlib:` begins a path in Python's own standard library.
    paths: list[str] = field(default_factory=list)
    weight: float = 1.0
    # Globs of files left out of `paths`.
    exclude: list[str] = field(default_factory=list)
    # The part of the documents kept: those whose hash (in [0, 1), of the file's path or the record's words) lies in
    # [from, to). Ranges that do not overlap split the same paths into training and held-out documents.
    hash_range: list[float] = field(default_factory=lambda: [0.0, 1.0])
    # huggingface: split and text column.
    split: str = "train"
    column: str = "text"
    # sft: the JSON fields.
    prompt_field: str = "prompt"
    response_field: str = "response"


@dataclass
class DataConfig:
    """Where documents come from and how they become batches."""

    # Named training sources; sampled in proportion to their weights.
    train: dict[str, SourceConfig] = field(default_factory=dict)
    # Named held-out sets, each evaluated on its own.
    eval: dict[str, SourceConfig] = field(default_factory=dict)
    # Sequences per evaluation set, spread evenly over it; 0 means the whole set.
    eval_samples: int = 0
    # A folder or file in Hugging Face `tokenizers` format, or `train` to train a byte-level BPE on the text sources.
    tokenizer: str = "train"
    # Vocabulary of a tokenizer that is trained.
    tokenizer_vocab_size: int = 4096
    # Tokens, caches and trained tokenizers are kept here, once per node.
    cache_dir: str = "${oc.env:SLUICEGATE_CACHE,.cache/sluicegate}"
    # error | skip
    invalid_utf8: str = "error"
    # error | skip
    empty_files: str = "error"
    # Documents packed into one sequence do not attend to each other and their positions restart.
    document_mask: bool = True
    # Steps of batches prepared ahead of time.
    prefetch: int = 2


@dataclass
class OptimConfig:
    """The optimizer, its schedule and clipping."""

    # adamw | sgd
    name: str = "adamw"
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    # cosine | linear | wsd | constant
    schedule: str = "cosine"
    warmup_steps: int = 100
    # Final learning rate as a part of lr.
    min_lr_ratio: float = 0.1
    # wsd: the part of all steps spent decaying.
    decay_ratio: float = 0.2


@dataclass
class CheckpointConfig:
    """When to save, what to keep, what to start from."""

    # auto | never | PATH of a step folder or a run folder. Whichever it is, the same command given again after a stop
    # goes on from what it has saved.
    resume: str = "auto"
    # Steps between checkpoints; 0 means only at the end, null none at all.
    every: int | None = 500
    keep_last: int = 3
    # A checkpoint whose weights (alone) this run starts from, or hf:PATH of a Hugging Face folder.
    init_from: str | None = None
    # Write the finished model as a Hugging Face folder, <run>/hf.
    export_hf: bool = False
    # Write in the background while training goes on.
    asynchronous: bool = True


@dataclass
class WandbConfig:
    """The W&B run."""

    # disabled | offline | online
    mode: str = "disabled"
    project: str = "sluicegate"
    entity: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class LoggingConfig:
    """Where progress is told; metrics.jsonl is always written."""

    # auto (a progress bar on a terminal) | plain | none
    console: str = "auto"
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class GuardConfig:
    """What to do when training goes wrong."""

    # A non-finite loss or gradient: stop | skip (the update is skipped)
    nonfinite: str = "stop"
    # skip: stop after this many skipped updates in a row.
    max_skipped: int = 3


@dataclass
class ProfileConfig:
    """Which steps of rank 0 to trace with torch.profiler (trainer/profiler.py)."""

    # How many, from step `start` on; 0 means none.
    steps: int = 0
    start: int = 10


@dataclass
class DebugConfig:
    """Aids for finding faults."""

    # Deterministic algorithms everywhere; slower.
    deterministic: bool = False


@dataclass
class ClusterConfig:
    """A description of the hardware for estimates (MFU, plans); it changes nothing in the run."""

    name: str = "auto"
    gpus_per_node: int | None = None
    # Dense bf16 peak of one device; null means looked up by the card's name.
    peak_tflops: float | None = None
    # GiB of one device, as CUDA counts them; null means what the card here has.
    memory_gib: float | None = None


@dataclass
class Config:
    """Everything that one run is told."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    comms: CommsConfig = field(default_factory=CommsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    # Name of the configs/experiment file the run was composed with; filled in by compose.
    experiment: str | None = None
