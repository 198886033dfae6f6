"""What a folder's config.json and files may say: absent keys, wrong types, and Llama 4 as the hub has it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.transformers_models import DENSE, FAMILIES, K, V, build_reference
from trainer.hf_config import differences, family_of, model_config
from trainer.hf_families import FAMILIES as FORMATS
from trainer.hf_source import FOLDER, keep_source, kept_source, open_source
from trainer.huggingface import Export, export_model, load_source, named_tensors
from trainer.models.families import load_family
from trainer.models.transformer import Transformer
from trainer.peers import Peers

PEERS = Peers()


def written_config(folder: Path, name: str) -> dict:
    reference, _ = build_reference(name, torch.float32)
    reference.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", [*FAMILIES, *DENSE])
def test_an_absent_key_means_what_transformers_takes_it_for(tmp_path, name):
    """Or it is refused: never a default of our own."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    raw = written_config(tmp_path, name)
    family = family_of(raw, FORMATS, "config.json")
    understood = 0
    for key in raw.keys() - {"model_type"}:
        without = {k: value for k, value in raw.items() if k != key}
        try:
            ours, _ = model_config(without, family)
            meant = type(AutoConfig.for_model(raw["model_type"])).from_dict(without).to_dict()
        except (ValueError, StrictDataclassError):
            continue
        theirs, _ = model_config(meant, family)
        assert differences(ours, theirs, family) == [], key
        understood += 1
    assert understood > 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "3"}, "config.json: num_hidden_layers='3' is not a whole number"),
        ({"tie_word_embeddings": "false"}, "config.json: tie_word_embeddings='false' is not true or false"),
        ({"num_experts": 8.5}, r"config.json: num_experts=8.5 is not a whole number"),
        ({"num_experts": True}, r"config.json: num_experts=True is not a whole number"),
        ({"rms_norm_eps": "tiny"}, "config.json: rms_norm_eps='tiny' is not a number"),
        ({"hidden_size": [32]}, r"config.json: hidden_size=\[32\] is not a whole number"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json: head_dim cannot be read: ZeroDivisionError"),
        ({"num_hidden_layers": -1}, "config.json: num_hidden_layers=-1 must be from 1"),
        ({"rope_parameters": "yarn"}, "config.json: RoPE scaling 'yarn' is no JSON object"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "attention_factor": 1.0}},
            "config.json: rope_parameters and rope_scaling and rope_theta cannot be read: ZeroDivisionError",
        ),
        ({"num_experts_per_tok": 9}, "config.json describes no model: model.moe.top_k=9 exceeds"),
        ({"num_key_value_heads": 3}, "config.json describes no model: model.attention.num_kv_heads=3 does not divide"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8' is no JSON object"),
        ({"quantization_config": {"weight_block_size": [128]}}, r"weight_block_size=\[128\] is not two whole numbers"),
    ],
)
def test_config_of_wrong_types_is_refused_by_key(tmp_path, change, message):
    raw = written_config(tmp_path, "qwen3_moe")
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[1]", "holds no JSON object")])
def test_config_that_is_no_json_object(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json {message}"):
        open_source(tmp_path)


def test_a_whole_number_may_be_written_with_a_point(tmp_path):
    raw = written_config(tmp_path, "qwen3_moe")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_experts_per_tok": float(K)}))
    assert open_source(tmp_path).config.moe.top_k == K


# ---- Llama 4, which the hub has with eyes


def with_vision(folder: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A tiny Llama4ForConditionalGeneration in several files; that model and the text model in it."""
    import transformers

    text, _ = build_reference("llama4", torch.float32)
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "image_size": 28}
    config = transformers.Llama4Config(text_config=text.config.to_dict(), vision_config=vision)
    config.text_config._attn_implementation = config.text_config._experts_implementation = "eager"
    whole = transformers.Llama4ForConditionalGeneration(config).eval()
    whole.language_model.load_state_dict(text.state_dict())
    whole.save_pretrained(folder, max_shard_size="60KB")
    return whole, text


def test_llama4_of_the_hub_is_read_and_its_text_model_is_written(tmp_path):
    """Logits in fp32, 1e-5; every tensor of the text model comes back to the bit, under the text model's names."""
    import transformers

    whole, text = with_vision(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert source.notes == []
    ours = Transformer(source.config)
    (note,) = load_source(source, ours, source.config, PEERS).notes
    vision = [name for name in whole.state_dict() if not name.startswith("language_model.")]
    assert note.startswith(f"{len(vision)} tensors of") and "(vision; text alone is trained, and exported)" in note
    tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = text(tokens).logits
        assert (ours(tokens).logits_BSV - expected).norm() / expected.norm() < 1e-5

    for name in ("preprocessor_config.json", "generation_config.json"):
        (tmp_path / "hf" / name).write_text("{}")
    keep_source(source, tmp_path / FOLDER)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(ours).items()}
    export_model(tmp_path / "out", ours, Export(source.config, shapes, kept_source(tmp_path)), PEERS)
    beside = {path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("model")}
    assert beside == {"config.json", "generation_config.json"}
    stored = {name: t for path in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(path).items()}
    assert stored.keys() == text.state_dict().keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in text.state_dict().items())
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager"
    )
    assert type(again).__name__ == "Llama4ForCausalLM" and again.config.eos_token_id == text.config.eos_token_id
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)


def test_llama4_of_the_hub_with_a_tensor_missing(tmp_path):
    """Under the name that the file has it by."""
    with_vision(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = "language_model.model.layers.1.feed_forward.router.weight"
    path = tmp_path / index["weight_map"][name]
    path.write_bytes(path.read_bytes().replace(name.encode(), name.replace("router", "rooter").encode()))
    index["weight_map"][name.replace("router", "rooter")] = index["weight_map"].pop(name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_source(tmp_path)
    with pytest.raises(ValueError, match=rf"1 tensors missing: {name}; 1 tensors unexpected: {name[:-13]}rooter"):
        load_source(source, Transformer(source.config), source.config, PEERS)


SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "bos_token_id": 200000,
        "eos_token_id": 200001,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 262144,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}


def test_scout_of_the_hub_is_our_recipe():
    """It names no interval of layers without RoPE: every fourth."""
    family = family_of(SCOUT, FORMATS, "config.json")
    config, notes = model_config(SCOUT, family)
    assert differences(load_family("llama4_scout"), config, family) == [] and notes == []


def test_maverick_has_dense_layers_between_the_others():
    raw = SCOUT | {"text_config": SCOUT["text_config"] | {"interleave_moe_layer_step": 2}}
    with pytest.raises(ValueError, match=r"moe_layers=\[1, 3, .*dense layers between the others are not supported"):
        model_config(raw, family_of(raw, FORMATS, "config.json"))


def test_llama4_without_its_text_config():
    raw = {key: value for key, value in SCOUT.items() if key != "text_config"}
    with pytest.raises(ValueError, match=r"config\.json has no text_config, which a llama4 model needs"):
        model_config(raw, family_of(raw, FORMATS, "config.json"))
