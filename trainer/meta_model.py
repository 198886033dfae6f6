"""A run's model without memory, and its dtypes: what planning and building both begin with."""

import torch

from trainer.config import Config
from trainer.models.transformer import Transformer

# precision.recipe -> dtype of the parameters (the masters that the optimizer updates), dtype of forward and backward.
DTYPES = {
    "bf16": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
    # What trainer/precision.py does not convert is as in bf16.
    "mxfp8": (torch.float32, torch.bfloat16),
    "fp8_blockwise": (torch.float32, torch.bfloat16),
}


def meta_model(config: Config, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model without memory: for counting, planning, and as the start of every layout."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return Transformer(config.model)
    finally:
        torch.set_default_dtype(previous)
