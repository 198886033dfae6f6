"""Hugging Face folders into run folders and back.

    python scripts/convert_hf.py config  HF_FOLDER [--output my_configs/model/NAME.yaml]
    python scripts/convert_hf.py import  HF_FOLDER RUN_FOLDER
    python scripts/convert_hf.py upcycle HF_FOLDER RUN_FOLDER --experts 8 --top-k 2 [--noise 0.1]
    python scripts/convert_hf.py export  RUN_FOLDER HF_FOLDER

`config` writes the model's settings, for `--config-dir my_configs model=NAME`. `import` makes a run folder at step 0,
to start from (checkpoint.init_from=RUN_FOLDER) or to generate with. `upcycle` copies a dense model's feed-forwards into
experts. `export` takes a run's folder, its id, or one of its checkpoints. Large models go faster with several
processes: torchrun --nproc-per-node N scripts/convert_hf.py ...

Exit codes: 0 ok, 1 an import's checkpoint could not be written (a full disk) or a process was lost on the way, 2 a
mistake in the arguments or the files.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from trainer.peers import Peers

DTYPES = ("float32", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the script; returns its exit code."""
    arguments = parse_arguments(argv)
    if arguments.command == "config":
        return print_config(arguments)
    if arguments.command == "export":
        from trainer.run import find_folder

        try:
            arguments.source = find_folder(arguments.source)
        except FileNotFoundError as error:
            # Before torch is imported, which takes seconds; under torchrun by one voice.
            if os.environ.get("RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr)
            return 2
    from parallel.process_group import process_group
    from trainer.hf_convert import NotWrittenError
    from trainer.peers import LostRankError, Peers

    with process_group(1800):
        peers = Peers()
        try:
            notes = convert(arguments, peers)
        except (ValueError, OSError, NotWrittenError, LostRankError) as error:
            if peers.rank == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            return 1 if isinstance(error, RuntimeError) else 2
        finally:
            peers.close()
    if peers.rank == 0:
        print("\n".join([*notes, f"wrote {arguments.target}"]))
    return 0


def convert(arguments: argparse.Namespace, peers: "Peers") -> list[str]:
    """Do what was asked for; returns lines for the user."""
    import torch

    from trainer import hf_convert

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    if arguments.command == "import":
        return hf_convert.import_folder(arguments.source, arguments.target, peers, dtype).notes
    if arguments.command == "upcycle":
        return hf_convert.upcycle_folder(
            arguments.source,
            arguments.target,
            peers,
            num_experts=arguments.experts,
            top_k=arguments.top_k,
            noise=arguments.noise,
            seed=arguments.seed,
            dtype=dtype,
        ).notes
    size = int(arguments.max_file_gb * 1e9)
    return hf_convert.export_folder(arguments.source, arguments.target, peers, dtype=dtype, max_file_bytes=size).notes


def print_config(arguments: argparse.Namespace) -> int:
    """The model's settings as YAML, and on stderr what is not taken over."""
    from omegaconf import OmegaConf

    from trainer.hf_source import open_source

    try:
        source = open_source(arguments.source)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = OmegaConf.to_yaml(OmegaConf.structured(source.config))
    if arguments.output is None:
        print(text, end="")
    elif arguments.output.exists():
        print(f"error: {arguments.output} is there already; remove it, or name another file", file=sys.stderr)
        return 2
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
        print(f"wrote {arguments.output}")
    for note in source.notes:
        print(note, file=sys.stderr)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, parsed."""
    parser = argparse.ArgumentParser(
        prog="convert_hf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="the model settings of a Hugging Face folder, as YAML")
    config.add_argument("source", type=Path, help="a Hugging Face folder")
    config.add_argument("--output", type=Path, help="a file to write; default: print")
    _add_conversion(commands, "import", "a Hugging Face folder becomes a run folder")
    upcycle = _add_conversion(commands, "upcycle", "a dense Hugging Face folder becomes a Mixture of Experts")
    upcycle.add_argument("--experts", type=int, required=True, help="experts of each layer")
    upcycle.add_argument("--top-k", type=int, required=True, help="experts of each token")
    upcycle.add_argument("--noise", type=float, default=0.0, help="added to the experts, as a multiple of init_std")
    upcycle.add_argument("--seed", type=int, default=0, help="of routers and noise")
    export = _add_conversion(commands, "export", "a run, or one of its checkpoints, becomes a Hugging Face folder")
    export.add_argument("--max-file-gb", type=float, default=5.0, help="size of one file, where no source tells")
    return parser.parse_args(argv)


def _add_conversion(commands: "argparse._SubParsersAction", name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text)
    command.add_argument("source", type=Path)
    command.add_argument("target", type=Path, help="a folder that does not exist yet")
    command.add_argument("--dtype", choices=DTYPES, help="of the weights; default: the source's")
    return command


if __name__ == "__main__":
    sys.exit(main())
