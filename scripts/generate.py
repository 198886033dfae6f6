"""Continue a text with a trained model.

    python scripts/generate.py runs/RUN_ID --prompt "def main(" [--tokens 200] [--temperature 0.8]

RUN is a run's folder, the id of a run in runs/, or a checkpoint (runs/RUN_ID/checkpoints/step_00000100). One process,
on the first GPU if there is one; the layout that the run was trained with does not matter.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    """Print the continued text; returns the exit code: 0, or 2 for what cannot be read."""
    from trainer.run import find_folder

    arguments = parse_arguments()
    try:
        check_sampling(arguments)
        folder = find_folder(arguments.run)
    except (ValueError, FileNotFoundError) as error:
        return mistake(error)
    # Importing torch takes seconds, and a mistake should not.
    import torch

    from trainer.checkpoint import load_weights, open_checkpoint
    from trainer.compose import load_config
    from trainer.generate import generate
    from trainer.meta_model import meta_model
    from trainer.tokenizer import read_tokenizer

    try:
        # Nothing else is seen for a while.
        print(f"loading {folder}; then up to {arguments.tokens} tokens are drawn (--tokens)", file=sys.stderr)
        stored = open_checkpoint(folder, notify=lambda line: print(line, file=sys.stderr))
        run = stored.path.parent.parent
        config = load_config(run / "config.yaml")
        tokenizer = read_tokenizer(run / "tokenizer")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = meta_model(config).to_empty(device=device)
        load_weights(stored.path, model)
        text = generate(
            model,
            tokenizer,
            arguments.prompt,
            max_new_tokens=arguments.tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
            max_context=config.train.seq_len,
            device=device,
        )
    except (ValueError, FileNotFoundError) as error:
        return mistake(error)
    print(text)
    return 0


def mistake(error: Exception) -> int:
    """Say what a person can mend; returns the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def check_sampling(arguments: argparse.Namespace) -> None:
    """Raises ValueError for numbers that nothing can be drawn with."""
    if not 0 <= arguments.temperature < math.inf:
        raise ValueError(f"--temperature {arguments.temperature}: must be at least 0 and finite, like 0.8")
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"--top-p {arguments.top_p}: must be above 0 and at most 1, like 0.95")
    if arguments.tokens < 0:
        raise ValueError(f"--tokens {arguments.tokens}: must be at least 0")
    if not 0 <= arguments.seed < 2**63:
        raise ValueError(f"--seed {arguments.seed}: must be at least 0 and below 2^63")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Continue a text with a trained model.")
    parser.add_argument("run", type=Path, help="a run's folder, the id of a run in runs/, or a checkpoint")
    parser.add_argument("--prompt", default="", help="the text to continue; empty starts a new document")
    parser.add_argument("--tokens", type=int, default=200, help="at most so many new tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=0.95, help="sample among the likeliest tokens of this total")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
