"""Speed of whole training steps: our trainer and torchtitan's, alternately, in one invocation.

    python scripts/bench_train.py --model qwen3 --nproc 2                     needs GPUs
    python scripts/bench_train.py --model qwen3 --nproc 2 model.moe.backend=grouped_mm     overrides for our side
    python scripts/bench_train.py --dry-run                                   tiny sizes on CPUs, our side only

Both sides train the same architecture (a *_bench experiment; equal parameter counts are tested) on tokens of Python's
standard library: bf16 compute on fp32 masters, torch.compile, FSDP2, all ranks in EP, forced balance, no activation
checkpointing unless --activation-checkpoint asks for it. torchtitan runs where its version 0.2.2 can be imported
(scripts/torchtitan_baseline.py); otherwise the table and the file say why not. Each figure is the median of the log
lines after the first, which holds compilation.

The result goes into benchmarks/train_CARD.json, one entry per model; absolute times drift between machines, so compare
ratios of one file entry only. Exit code: 0 done, 1 a run failed (its last lines are shown), 2 wrong usage.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_results import probe, result_file, stamp, write_result
from scripts.train_speed import Row, measure, read_ours, read_torchtitan, summarise, table
from trainer.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "scripts" / "torchtitan_baseline.py"
EXPERIMENTS = {"qwen3": "qwen3_30b_a3b_bench", "deepseek_v3": "deepseek_v3_16b_bench"}
# What torchtitan's flavor does otherwise than our experiment: its Qwen3 attends to the whole sequence and has no
# auxiliary loss; its DeepSeek-V3 masks documents, as our runs do by default.
LIKE_TORCHTITAN = {
    "qwen3": ["data.document_mask=false", "model.moe.aux_loss=0.0"],
    "deepseek_v3": ["data.document_mask=true"],
}
# --dry-run: the same program in seconds on a CPU.
TINY = [
    *("model.vocab_size=4096", "model.dim=32", "model.ffn_dim=64", "model.attention.num_heads=2"),
    *("model.attention.num_kv_heads=1", "model.attention.head_dim=16", "model.attention.kv_lora_rank=16"),
    *("model.attention.qk_nope_head_dim=16", "model.attention.qk_rope_head_dim=8", "model.attention.v_head_dim=16"),
    *("model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.expert_dim=16"),
    *("precision.recipe=fp32", "parallel.compile=false"),
    # A tokenizer of the whole library takes a minute to train.
    *('data.train.stdlib.paths=["stdlib:[a-m]*.py"]', "data.tokenizer_vocab_size=512"),
]
# Layers of 8 fit a GPU with this much memory; 6 fit 80 GB.
GIB_FOR_8_LAYERS = 100
SHOWN_LINES = 30
TORCHRUN_REPORT = "] failed (exitcode: "
# After SIGTERM torchrun gives its workers 30 seconds.
GRACE_SECONDS = 45


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    machine = probe(arguments.dry_run)
    try:
        settle(arguments, machine)
        out = result_file(arguments, "train", machine["card"], "runs")
        baseline = find_baseline(arguments)
        with contextlib.ExitStack() as stack:
            work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_train_")))
            rows = run_all(arguments, Path(work).resolve(), "torchtitan" in baseline)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {**describe(arguments, machine), "baseline": baseline, **summarise(rows)}
    if out is not None:
        write_result(out, arguments.model, result, "runs")
        print(f"written: {out}")
    print(table(result))
    return 1 if any(row.error for row in rows) else 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="further settings of our side, key=value")
    parser.add_argument("--model", choices=tuple(EXPERIMENTS), default="qwen3")
    parser.add_argument("--layers", type=int, help="default: 8, or 6 on GPUs with less than 100 GiB")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--local-batch", type=int, default=4, help="sequences per GPU and step")
    parser.add_argument("--activation-checkpoint", choices=("none", "full"), default="none", help="of both sides")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--log-every", type=int, default=5, help="steps per figure; the first of them is left out")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side")
    parser.add_argument("--nproc", type=int, help="processes; default: all GPUs")
    parser.add_argument("--baseline", choices=("auto", "require", "skip"), default="auto")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="default: benchmarks/train_CARD.json; none for a dry run")
    parser.add_argument("--work", type=Path, help="keep logs and runs in this folder (default: a temporary one)")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on 2 CPU processes, our side only")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.dry_run:
        arguments.seq_len, arguments.local_batch, arguments.steps, arguments.log_every = 64, 1, 6, 2
        arguments.layers, arguments.nproc = arguments.layers or 2, arguments.nproc or 2
    if arguments.steps % arguments.log_every or arguments.steps < 2 * arguments.log_every:
        parser.error(f"--steps must be a multiple of --log-every={arguments.log_every}, and at least twice it")
    if min(arguments.repeats, arguments.local_batch, arguments.seq_len, arguments.timeout) <= 0:
        parser.error("--repeats, --local-batch, --seq-len and --timeout must be positive")
    return arguments


def settle(arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    """Fill in what depends on the machine.

    Raises:
        ValueError: fewer GPUs than processes.
    """
    if arguments.dry_run:
        machine.update(card="cpu", memory_gib=None, gpus=0)
        return
    if not machine["gpus"]:
        raise ValueError("no GPU found; --dry-run tries the program on CPUs")
    arguments.nproc = arguments.nproc or machine["gpus"]
    if arguments.nproc > machine["gpus"]:
        raise ValueError(f"--nproc={arguments.nproc}: there are {machine['gpus']} GPUs")
    arguments.layers = arguments.layers or (8 if machine["memory_gib"] >= GIB_FOR_8_LAYERS else 6)


def find_baseline(arguments: argparse.Namespace) -> dict[str, str]:
    """{"torchtitan": version}, or {"skipped": reason}.

    Raises:
        ValueError: --baseline=require, and it cannot run.
    """
    if arguments.baseline == "skip":
        return {"skipped": "--baseline=skip"}
    if arguments.dry_run:
        return {"skipped": "torchtitan's trainer needs GPUs"}
    done = subprocess.run([sys.executable, str(BASELINE), "--check"], capture_output=True, text=True, check=False)
    answer = (done.stdout.strip() or done.stderr.strip() or "no answer").splitlines()[-1]
    if done.returncode == 0:
        return {"torchtitan": answer}
    if arguments.baseline == "require":
        raise ValueError(f"--baseline=require: {answer}")
    return {"skipped": answer}


# ---- running


def run_all(arguments: argparse.Namespace, work: Path, with_baseline: bool) -> list[Row]:
    """Every repeat of every side, alternately. A side that failed once is not tried again."""
    work.mkdir(parents=True, exist_ok=True)
    commands = {"ours": ours_command(arguments, work)}
    if with_baseline:
        tokens = work / "tokens.npy"
        commands["torchtitan"] = theirs_command(arguments, tokens, prepare_tokens(arguments, tokens))
    rows: list[Row] = []
    for repeat in range(1, arguments.repeats + 1):
        for side in [*commands]:
            print(f"{side} {repeat}/{arguments.repeats} ...", flush=True)
            row = run_once(arguments, work, side, repeat, commands[side])
            rows.append(row)
            if row.error is not None:
                print(f"error: {side} {row.error}", file=sys.stderr, flush=True)
                del commands[side]
    return rows


def ours_command(arguments: argparse.Namespace, work: Path) -> list[str]:
    """Our trainer, but for its run.id."""
    return [
        *torchrun(arguments.nproc),
        *("-m", "trainer.train", f"experiment={EXPERIMENTS[arguments.model]}"),
        *(TINY if arguments.dry_run else []),
        f"model.num_layers={arguments.layers}",
        f"train.seq_len={arguments.seq_len}",
        f"train.micro_batch_size={arguments.local_batch}",
        f"train.global_batch_size={arguments.local_batch * arguments.nproc}",
        f"train.steps={arguments.steps}",
        f"train.log_every={arguments.log_every}",
        f"parallel.ep={arguments.nproc}",
        f"parallel.activation_checkpoint={arguments.activation_checkpoint}",
        *LIKE_TORCHTITAN[arguments.model],
        *("logging.console=plain", f"run.root={work / 'runs'}"),
        *arguments.overrides,
    ]


def theirs_command(arguments: argparse.Namespace, tokens: Path, eos_id: int) -> list[str]:
    """torchtitan's trainer on the same sizes and tokens."""
    return [
        *torchrun(arguments.nproc),
        *(str(BASELINE), f"--model={arguments.model}", f"--layers={arguments.layers}"),
        *(f"--seq-len={arguments.seq_len}", f"--local-batch={arguments.local_batch}"),
        *(f"--steps={arguments.steps}", f"--log-every={arguments.log_every}"),
        f"--activation-checkpoint={arguments.activation_checkpoint}",
        *(f"--tokens={tokens}", f"--eos-id={eos_id}"),
    ]


def torchrun(nproc: int) -> list[str]:
    """torchrun on this node, with this interpreter."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]


def prepare_tokens(arguments: argparse.Namespace, file: Path) -> int:
    """Write the training tokens of our experiment, as many as the run needs, as one int32 array; returns the id that
    ends each document."""
    import numpy as np

    from trainer.compose import compose
    from trainer.sources import documents
    from trainer.tokenizer import load_tokenizer

    data = compose([f"experiment={EXPERIMENTS[arguments.model]}"]).data
    tokenizer = load_tokenizer(data)
    needed = arguments.steps * arguments.local_batch * arguments.nproc * arguments.seq_len + 1
    found = (
        document.text
        for name, source in data.train.items()
        for document in documents(source, data, f"data.train.{name}", Counter())
    )
    ids: list[int] = []
    while len(ids) < needed and (texts := list(islice(found, 64))):
        for encoded in tokenizer.encode_batch(texts, special_tokens=False):
            ids += [*encoded, tokenizer.eos_id]
    np.save(file, np.asarray(ids, dtype=np.int32))
    return tokenizer.eos_id


def run_once(arguments: argparse.Namespace, work: Path, side: str, repeat: int, command: list[str]) -> Row:
    """Run one side and read what it reported."""
    log, name = work / f"{side}_{repeat}.log", f"{side}-{arguments.model}-{repeat}"
    start = time.monotonic()
    failure = run_process(
        [*command, f"run.id={name}"] if side == "ours" else command, log, arguments.timeout, on_cpu=arguments.dry_run
    )
    seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    if failure is None:
        try:
            lines = read_ours(read_metrics(work / "runs" / name)) if side == "ours" else read_torchtitan(text)
            return measure(side, repeat, seconds, lines, arguments.log_every)
        except (ValueError, OSError) as error:
            failure = str(error)
    return Row(side, repeat, seconds, error=f"{failure}; the last lines of its output:\n{last_lines(text)}")


def last_lines(text: str) -> str:
    """The end of a program's output, without what torchrun adds after a failure: 30 lines that name no cause."""
    own = text.partition(TORCHRUN_REPORT)[0].splitlines()
    if TORCHRUN_REPORT in text:
        own = own[:-1]  # the beginning of torchrun's own line
    return "\n".join(f"    {line}" for line in own[-SHOWN_LINES:])


def run_process(command: list[str], log: Path, timeout: float, *, on_cpu: bool = False) -> str | None:
    """Run to the end, output into `log`; returns what went wrong, or None."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with open(log, "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"was stopped after {timeout:.0f} seconds (--timeout)"
        finally:
            stop(process)
    return None if code == 0 else f"ended with code {code}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun if it still runs. Its workers are in sessions of their own: it must be let end them itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def describe(arguments: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """What was measured, where, and with which code."""
    return {
        "model": arguments.model,
        "layers": arguments.layers,
        "seq_len": arguments.seq_len,
        "local_batch": arguments.local_batch,
        "steps": arguments.steps,
        "log_every": arguments.log_every,
        "activation_checkpoint": arguments.activation_checkpoint,
        "world_size": arguments.nproc,
        "overrides": [*LIKE_TORCHTITAN[arguments.model], *arguments.overrides],
        **stamp(arguments, machine),
    }


if __name__ == "__main__":
    sys.exit(main())
