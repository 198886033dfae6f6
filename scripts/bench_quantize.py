"""Speed of every quantizer, in GB/s read and written, beside a plain copy on the same card.

    python scripts/bench_quantize.py                               needs a GPU
    python scripts/bench_quantize.py --rows 131072 --width 2048    other sizes
    python scripts/bench_quantize.py --dry-run                     tiny sizes on the CPU
    python scripts/bench_quantize.py --json                        the result as JSON, on standard output

Inputs are bf16. Every round runs each form a few times in a row; a time is the median over rounds. Bytes are what a
form must read and write once: its inputs, and its outputs with scales and padding. `ratio` is its GB/s over the copy's.

The result goes into benchmarks/quantize_CARD.json, one entry per set of sizes. Exit code: 0 done, 2 wrong usage.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comms.kernels.codec import pack_rows, unpack_rows
from moe.kernels.quantize import pad_groups
from moe.quantize import fp8_rows, fp8_squares, mxfp8_both, mxfp8_columns, mxfp8_rows
from scripts.bench_results import result_file, stamp, write_result

REPEATS = 10

# A form's work, and the tensors it reads.
Form = tuple[Callable[[], Any], list[Tensor]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and show; returns the exit code."""
    arguments = parse_arguments(argv)
    if not arguments.dry_run and not torch.cuda.is_available():
        print("error: no GPU found; --dry-run tries the program on the CPU", file=sys.stderr)
        return 2
    card = "cpu" if arguments.dry_run else torch.cuda.get_device_name()
    try:
        out = result_file(arguments, "quantize", card, "forms")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {**describe(arguments, card), "forms": measure(arguments)}
    if out is not None:
        name = f"{arguments.rows}_{arguments.width}_{arguments.experts}_experts"
        write_result(out, name, result, "forms")
        print(f"written: {out}", file=sys.stderr)
    print(json.dumps(result, allow_nan=False) if arguments.json else table(result))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="bench_quantize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=64, help="groups of the gathered rows (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: benchmarks/quantize_CARD.json; none for a dry run")
    parser.add_argument("--commit", help="commit to note; default: asked from git")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        arguments.rows, arguments.width, arguments.experts, arguments.rounds = 64, 128, 4, 2
    if min(arguments.rows, arguments.width, arguments.experts, arguments.rounds) <= 0:
        parser.error("--rows, --width, --experts and --rounds must be positive")
    if arguments.rows % 32:
        parser.error(f"--rows={arguments.rows} must be a multiple of 32, the rows of one block")
    return arguments


def describe(arguments: argparse.Namespace, card: str) -> dict[str, Any]:
    """What was measured, where, and with which code."""
    return {
        "rows": arguments.rows,
        "width": arguments.width,
        "experts": arguments.experts,
        "rounds": arguments.rounds,
        **stamp(arguments, {"card": card, "torch": torch.__version__, "cuda": torch.version.cuda}),
    }


def forms(arguments: argparse.Namespace) -> dict[str, Form]:
    """What is measured, the copy first."""
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    rows, width, experts = arguments.rows, arguments.width, arguments.experts
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, width, generator=generator, device=device, dtype=torch.bfloat16)
    ends = torch.randint(0, rows + 1, (experts,), generator=generator, device=device, dtype=torch.int32).sort().values
    ends[-1] = rows
    places, _ = pad_groups(torch.randperm(rows, generator=generator, device=device), ends, 32)
    record, coded = pack_rows(x), mxfp8_rows(x)
    return {
        "copy": (x.clone, [x]),
        "mxfp8 rows": (lambda: mxfp8_rows(x), [x]),
        "mxfp8 record": (lambda: pack_rows(x), [x]),
        "record to bf16": (lambda: unpack_rows(record, width, torch.bfloat16), [record]),
        "mxfp8 to bf16": (coded.dequantize, [coded.values, coded.scales]),
        "mxfp8 columns": (lambda: mxfp8_columns(x), [x]),
        "gathered columns": (lambda: mxfp8_columns(x, places), [x, places]),
        "rows and columns": (lambda: mxfp8_both(x), [x]),
        "gathered, both": (lambda: mxfp8_both(x, places), [x, places]),
        "fp8 1 x 128": (lambda: fp8_rows(x), [x]),
        "fp8 128 x 128": (lambda: fp8_squares(x), [x]),
    }


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """{form: microseconds, GB/s, ratio to the copy}."""
    all_forms = forms(arguments)
    sizes = {
        name: sum(map(size_of, tensors(work()))) + sum(map(size_of, read)) for name, (work, read) in all_forms.items()
    }
    times: dict[str, list[float]] = {name: [] for name in all_forms}
    # The first round compiles kernels and warms the card up.
    for measured in [False] + [True] * arguments.rounds:
        for name, (work, _) in all_forms.items():
            seconds = time_once(work, cuda=not arguments.dry_run)
            if measured:
                times[name].append(seconds)
    return speeds(sizes, {name: statistics.median(found) for name, found in times.items()})


def speeds(sizes: dict[str, int], seconds: dict[str, float]) -> dict[str, dict[str, float]]:
    """{form: figures} of bytes moved in so many seconds."""
    rates = {name: sizes[name] / seconds[name] / 1e9 for name in sizes}
    return {
        name: {"us": seconds[name] * 1e6, "gb_per_second": rates[name], "ratio": rates[name] / rates["copy"]}
        for name in sizes
    }


def tensors(result: Any) -> Iterable[Tensor]:
    """The tensors of a result, nested or not."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from tensors(part)


def size_of(x: Tensor) -> int:
    """Bytes of the elements."""
    return x.numel() * x.element_size()


def time_once(work: Callable[[], Any], *, cuda: bool) -> float:
    """Seconds of one run; on a GPU the mean of several, queued behind each other so that launching costs nothing."""
    if not cuda:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()
    start.record()
    for _ in range(REPEATS):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / REPEATS


def table(result: dict[str, Any]) -> str:
    """The result for a person: one line per form."""
    lines = [
        f"{result['rows']} x {result['width']}, {result['experts']} experts, {result['card']}, "
        f"torch {result['torch']}, {result['commit'][:12]}",
        f"{'':18}{'us':>10}{'GB/s':>10}{'ratio':>8}",
    ]
    for name, found in result["forms"].items():
        lines.append(f"{name:18}{found['us']:>10.1f}{found['gb_per_second']:>10.1f}{found['ratio']:>8.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
