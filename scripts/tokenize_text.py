"""Write text as token shards, which runs then memory-map (data source kind `tokens`).

    python scripts/tokenize_text.py --output shards --tokenizer my_tokenizer 'corpus/**/*.txt'
    python -m trainer.train data=tokens data.train.tokens.paths=[shards] data.tokenizer=shards

The tokenizer is copied into the folder, so that shards and tokenizer stay together. The folder appears when all of it
is written. Exit code: 0 done, 2 a mistake in the arguments or the data.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.config import DataConfig, SourceConfig
from trainer.token_cache import tokenise_source
from trainer.tokenizer import load_tokenizer

# What messages call the one source, and the flags of settings that are named otherwise.
SOURCE = "data.train.text"
FLAGS = {"tokenizer_vocab_size": "--vocab-size", "paths": "paths"}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse itself exits with 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="tokenize_text.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", help="globs of files; for --kind huggingface folders, files or a hub name")
    parser.add_argument("--output", required=True, type=Path, help="folder to create")
    parser.add_argument("--tokenizer", required=True, help="folder or tokenizer.json, or `train`: a BPE of this text")
    parser.add_argument("--vocab-size", type=int, default=4096, help="entries of a tokenizer that is trained")
    parser.add_argument("--kind", choices=("text", "huggingface", "sft"), default="text")
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="files to leave out; repeatable")
    parser.add_argument(
        "--hash-range",
        nargs=2,
        type=float,
        default=[0.0, 1.0],
        metavar=("FROM", "TO"),
        help="part of the documents kept",
    )
    parser.add_argument("--split", default="train", help="huggingface: which split")
    parser.add_argument("--column", default="text", help="huggingface: the column of text")
    parser.add_argument("--prompt-field", default="prompt", help="sft: JSON field")
    parser.add_argument("--response-field", default="response", help="sft: JSON field")
    parser.add_argument("--invalid-utf8", choices=("error", "skip"), default="error")
    parser.add_argument("--empty-files", choices=("error", "skip"), default="error")
    parser.add_argument("--shard-tokens", type=int, default=1 << 28, help="tokens per file, about")
    return parser.parse_args(argv)


def build_data_config(args: argparse.Namespace, cache_dir: str) -> DataConfig:
    """The arguments as the data section of a run with one training source, `text`."""
    source = SourceConfig(
        kind=args.kind,
        paths=args.paths,
        exclude=args.exclude,
        hash_range=args.hash_range,
        split=args.split,
        column=args.column,
        prompt_field=args.prompt_field,
        response_field=args.response_field,
    )
    return DataConfig(
        train={"text": source},
        tokenizer=args.tokenizer,
        tokenizer_vocab_size=args.vocab_size,
        cache_dir=cache_dir,
        invalid_utf8=args.invalid_utf8,
        empty_files=args.empty_files,
    )


def write_shards(args: argparse.Namespace) -> dict[str, int]:
    """Tokenise to a folder beside --output, then rename it; returns what was counted."""
    if args.output.exists():
        raise ValueError(f"--output: {args.output} exists already: name a new folder, or remove it first")
    if args.shard_tokens < 1:
        raise ValueError(f"--shard-tokens: {args.shard_tokens} is less than 1")
    building = args.output.with_name(args.output.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        data = build_data_config(args, str(building / "cache"))
        tokenizer = load_tokenizer(data)
        counts = tokenise_source(data.train["text"], data, tokenizer, building, SOURCE, args.shard_tokens)
        shutil.rmtree(building / "cache", ignore_errors=True)
        tokenizer.save(building)
        building.rename(args.output)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return counts


def in_flags(message: str) -> str:
    """A message about settings of a run in words of this command: `data.empty_files=skip` is --empty-files skip."""

    def flag(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        written = FLAGS.get(name, f"--{name.replace('_', '-')}")
        return f"{written} {value}" if value else written

    # Not within the path of a file, nor as one: paths are told in quotes where they could be mistaken.
    begin = r"(?<![\w./'-])"
    message = re.sub(rf"{begin}{re.escape(SOURCE)}: ", "", message)
    known = "|".join(("tokenizer_vocab_size", "tokenizer", "invalid_utf8", "empty_files"))
    fields = rf"(?:{re.escape(SOURCE)}|data(?=\.(?:{known})\b))"
    return re.sub(rf"{begin}{fields}\.(?P<name>\w+)(?:=(?P<value>\w+))?", flag, message)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse_arguments(argv)
    try:
        counts = write_shards(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"tokenize_text.py: {in_flags(str(error))}", file=sys.stderr)
        return 2
    print(f"{args.output}: " + ", ".join(f"{value} {name}" for name, value in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
