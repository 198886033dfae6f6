"""Sampling text from a model: one token at a time, the whole context through the model each time.

There is no key/value cache: this shows what a run has learnt, it does not serve. Every rank runs the same tokens with
the same random numbers, so it works in any layout, and every rank gets the text.
"""

import math

import torch
from torch import Tensor, nn

from trainer.tokenizer import Tokenizer


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    max_context: int = 1024,
    device: torch.device | None = None,
) -> str:
    """Continue `prompt`; returns prompt and continuation. Stops early at the end-of-document token.

    Args:
        temperature: 0 always takes the likeliest token.
        top_p: sample among the likeliest tokens that together have this probability.
        max_context: only the last so many tokens are seen.

    Raises:
        ValueError: for a temperature that is negative or not finite, or top_p outside (0, 1].
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and not negative.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1.")
    device = device or torch.device("cpu")
    # The same draws on every rank and device.
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    first = len(ids) if prompt else 0
    was_training = model.training
    sequence = getattr(model, "sequence", None)
    unit = 1 if sequence is None else sequence.unit
    model.eval()
    for _ in range(max_new_tokens):
        context = ids[-max_context:]
        # No token sees what comes after it, so a tail that makes the sequence divide changes nothing.
        tail = [tokenizer.eos_id] * (-len(context) % unit)
        logits_BSV = model(torch.tensor([context + tail], device=device)).logits_BSV
        # Ids that pad the vocabulary stand for nothing.
        logits_V = logits_BSV[0, len(context) - 1, : tokenizer.vocab_size]
        token = sample_token(logits_V.cpu(), temperature, top_p, generator)
        if token == tokenizer.eos_id and len(ids) > first:
            break
        ids.append(token)
    model.train(was_training)
    return tokenizer.decode([token for token in ids if token != tokenizer.eos_id])


def sample_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw one token id; nucleus sampling (arXiv:1904.09751)."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.double()
    # The highest becomes 0, which no temperature, however small, divides to infinity.
    probabilities, order = torch.softmax((logits_V - logits_V.max()) / temperature, -1).sort(descending=True)
    # A token stays while those before it have not yet reached top_p: the likeliest always does.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
