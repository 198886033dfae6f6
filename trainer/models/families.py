"""Named architectures. Their numbers are data in `configs/model/NAME.yaml`, where Hydra finds them too.

This file holds what those files cannot: the sizes each family's authors published, and what they counted.
"""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from trainer.models.config import ModelConfig

MODEL_DIR = Path(__file__).resolve().parents[2] / "configs" / "model"


@dataclass(frozen=True)
class PublishedSize:
    """Parameters in billions, as printed by the authors: as many digits as they gave. What is there for multi-token
    prediction counts in neither figure."""

    total: str
    active: str
    # Authors differ: gpt-oss and DeepSeek leave the input embedding out of `active`, Moonlight leaves embedding and
    # head out of both figures.
    total_leaves_out: tuple[str, ...] = ()
    active_leaves_out: tuple[str, ...] = ()
    # Parameters that the authors count and we do not have: Llama 4's vision encoder.
    total_adds: int = 0


EMBEDDING = ("tok_embeddings",)
EMBEDDING_AND_HEAD = ("tok_embeddings", "head")

FAMILIES: dict[str, PublishedSize] = {
    "qwen3_30b_a3b": PublishedSize("30.5", "3.3"),
    "qwen3_235b_a22b": PublishedSize("235", "22"),
    "mixtral_8x7b": PublishedSize("46.7", "12.9"),
    "mixtral_8x22b": PublishedSize("141", "39"),
    "deepseek_v2_236b": PublishedSize("236", "21", active_leaves_out=EMBEDDING),
    # DeepSeek-V2-Lite's own figures.
    "deepseek_v3_16b": PublishedSize("15.7", "2.4", active_leaves_out=EMBEDDING),
    "deepseek_v3_671b": PublishedSize("671", "37", active_leaves_out=EMBEDDING),
    "moonlight_16b_a3b": PublishedSize("15.29", "2.24", EMBEDDING_AND_HEAD, EMBEDDING_AND_HEAD),
    "kimi_k2": PublishedSize("1.0e3", "32", active_leaves_out=EMBEDDING),
    "gpt_oss_20b": PublishedSize("20.9", "3.6", active_leaves_out=EMBEDDING),
    "gpt_oss_120b": PublishedSize("116.8", "5.1", active_leaves_out=EMBEDDING),
    "olmoe_1b_7b": PublishedSize("6.9", "1.3"),
    "llama4_scout": PublishedSize("109", "17", total_adds=455_178_240),
}


def load_family(name: str) -> ModelConfig:
    """The architecture in `configs/model/NAME.yaml`.

    Raises:
        FileNotFoundError: there is no such family; lists those that exist.
    """
    path = MODEL_DIR / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in MODEL_DIR.glob("*.yaml")))
        raise FileNotFoundError(f"no architecture called {name!r} in {MODEL_DIR}; choose one of: {known}")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(path)))
    assert isinstance(config, ModelConfig)
    return config
