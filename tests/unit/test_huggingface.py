"""Hugging Face folders: equal logits, loss and gradients after import, equal bytes after export, faults by name.

The folders are written by `transformers` from tiny random models, in several files each. CASES 45, 47, 48.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.transformers_models import (
    COMMON,
    DENSE,
    FAMILIES,
    E,
    K,
    KeepDouble,
    V,
    build_reference,
    byte_tokenizer,
    convert,
)
from trainer.compose import compose
from trainer.hf_config import choose_family, config_json, differences, model_config
from trainer.hf_families import FAMILIES as FORMATS
from trainer.hf_source import FOLDER, keep_source, kept_source, open_source
from trainer.hf_upcycle import upcycled_config
from trainer.huggingface import Export, export_model, load_source, named_tensors
from trainer.models.families import FAMILIES as PUBLISHED
from trainer.models.families import load_family
from trainer.models.transformer import Transformer
from trainer.peers import Peers

PEERS = Peers()
ALL = [*FAMILIES, *DENSE]
EXPERTS_PREFIX = "model.layers.1.mlp.experts"


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def write_folder(folder: Path, name: str, dtype: torch.dtype):
    """A folder of several files by `transformers`; its model, and our config."""
    reference, config = build_reference(name, dtype)
    reference.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return reference, config


def imported(folder: Path, config, dtype: torch.dtype) -> Transformer:
    model = Transformer(config).to(dtype)
    load_source(open_source(folder), model, config, PEERS)
    return model


def export(folder: Path, model: Transformer, config, kept=None, **options):
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    return export_model(folder, model, Export(config, shapes, kept, **options), PEERS)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit(folder: Path, change) -> Path:
    """Rewrites the file that holds layer 1's router; `change` gets its tensors. Returns the file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"]["model.layers.1.mlp.gate.weight"]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    kept = {name: file for name, file in index["weight_map"].items() if file != path.name}
    index["weight_map"] = kept | dict.fromkeys(tensors, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


# ---- the model


@pytest.mark.parametrize("name", ALL)
def test_logits_loss_and_gradients_after_import(tmp_path, name):
    """1e-10 in fp64, 1e-5 in fp32, against the same weights in fp64; 40 tokens leave the window (7) and YaRN's
    original length (16)."""
    write_folder(tmp_path / "hf", name, torch.float32)
    reference, config = build_reference(name, torch.float64)
    tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, dims=1)
    with KeepDouble():
        logits = reference(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    expected = convert(reference, config, gradients=True)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        ours = imported(tmp_path / "hf", config, dtype)
        out = ours(tokens, labels_BS=labels)
        out.loss_sum.backward()
        assert error(ours(tokens).logits_BSV, logits) < bound
        assert error(out.loss_sum, loss) < bound
        for parameter, tensor in ours.named_parameters():
            assert error(tensor.grad, expected[parameter]) < bound, parameter


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_export_writes_the_same_files(tmp_path, name, dtype):
    """Every byte of every file, from fp32 masters: names, dtypes, shapes, values, order, index and config."""
    _, config = write_folder(tmp_path / "hf", name, dtype)
    (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
    keep_source(open_source(tmp_path / "hf"), tmp_path / FOLDER)
    export(tmp_path / "out", imported(tmp_path / "hf", config, torch.float32), config, kept_source(tmp_path))
    assert files(tmp_path / "out") == files(tmp_path / "hf")


@pytest.mark.parametrize("name", ALL)
def test_transformers_opens_model_and_tokenizer(tmp_path, monkeypatch, name):
    """Names, files and config.json by our own choice, as no source tells; fp32, so the bound is that of fp32 logits."""
    import transformers

    tokenizer = byte_tokenizer()
    monkeypatch.setattr("tests.transformers_models.V", tokenizer.vocab_size)
    monkeypatch.setitem(COMMON, "vocab_size", tokenizer.vocab_size)
    _, config = write_folder(tmp_path / "hf", name, torch.float32)
    ours = imported(tmp_path / "hf", config, torch.float32)
    export(tmp_path / "out", ours, config, tokenizer=tokenizer, dtype=torch.float32, max_file_bytes=60_000)
    text = "def add(a, b):\n    return a + b  # and so on\n"
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(text, return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [tokenizer.encode(text)] and tokens.shape[1] > 40
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        assert error(theirs(tokens).logits, ours(tokens).logits_BSV) < 1e-5


def test_experts_stacked_in_the_file(tmp_path):
    """As `transformers` 5 holds them in memory: (E, 2F, D) and (E, D, F)."""
    _, config = write_folder(tmp_path / "hf", "qwen3_moe", torch.float32)
    expected = imported(tmp_path / "hf", config, torch.float32)
    tensors = {}
    for path in sorted((tmp_path / "hf").glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        maps = {kind: [tensors.pop(f"{prefix}.{e}.{kind}_proj.weight") for e in range(E)] for kind in FORMS}
        pairs = zip(maps["gate"], maps["up"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}.down_proj"] = torch.stack(maps["down"])
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    actual = imported(tmp_path / "hf", config, torch.float32)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], tensor), name
    keep_source(open_source(tmp_path / "hf"), tmp_path / FOLDER)
    export(tmp_path / "out", actual, config, kept_source(tmp_path))
    assert files(tmp_path / "out") == files(tmp_path / "hf")


FORMS = ("gate", "up", "down")


def test_no_more_than_one_expert_is_held(tmp_path):
    """Of a stack of experts, one matrix at a time is read or written: the largest is embedding and head, (V, D)."""
    _, config = write_folder(tmp_path / "hf", "gpt_oss", torch.float32)
    model = Transformer(config)
    read = load_source(open_source(tmp_path / "hf"), model, config, PEERS)
    written = export(tmp_path / "out", model, config)
    assert read.largest <= V * config.dim * 4
    assert written.largest <= V * config.dim * 4
    assert math.prod(model.layers["0"].moe.experts.w_gate_up.shape) > V * config.dim


# ---- config.json


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_survive_config_json(name):
    """Every model in configs/model finds a format, and comes back as it was."""
    config = load_family(name)
    if name == "deepseek_v3_16b":  # softmax scores, and a balancing bias, which DeepSeek-V2 did not have
        assert choose_family(config, FORMATS).model_types == ("deepseek_v2",)
    family = choose_family(config, FORMATS)
    back, notes = model_config(config_json(config, family), family)
    assert differences(config, back, family) == [] and notes == []


def test_unknown_keys_are_reported(tmp_path):
    write_folder(tmp_path / "hf", "qwen3_moe", torch.float32)
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw | {"frobnicate": 3}))
    source = open_source(tmp_path / "hf")
    assert len(source.notes) == 1 and "frobnicate=3" in source.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "frob"}, "model_type='frob' is not known here; known: .*mixtral"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act='gelu' is not supported"),
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "type 'dynamic' is not supported"),
        ({"mlp_only_layers": [1]}, "dense layers must be the first"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by 'awq'"),
    ],
)
def test_config_mistakes(tmp_path, change, message):
    write_folder(tmp_path / "hf", "qwen3_moe", torch.float32)
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "hf")


def test_another_model_than_the_runs(tmp_path):
    """A wrong family, or other settings: refused with the settings that differ."""
    write_folder(tmp_path / "hf", "qwen3_moe", torch.float32)
    _, config = build_reference("deepseek_v3", torch.float32)
    with pytest.raises(ValueError, match=r"qwen3_moe.*model\.attention\.kind=mla \(there gqa\)"):
        load_source(open_source(tmp_path / "hf"), Transformer(config), config, PEERS)
    _, config = build_reference("qwen3_moe", torch.float32)
    config.moe.top_k = K + 1
    with pytest.raises(ValueError, match=rf"model\.moe\.top_k={K + 1} \(there {K}\)"):
        load_source(open_source(tmp_path / "hf"), Transformer(config), config, PEERS)


# ---- faults


def test_case_45_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    """Nothing stays random, nothing is dropped."""
    _, config = write_folder(tmp_path / "hf", "qwen3_moe", torch.float32)

    def damage(tensors):
        tensors["model.layers.1.mlp.router.weight"] = tensors.pop("model.layers.1.mlp.gate.weight")
        some = next(name for name in tensors if name.startswith(EXPERTS_PREFIX))
        tensors[some] = tensors[some].T.contiguous()
        damage.transposed = some

    edit(tmp_path / "hf", damage)
    with pytest.raises(ValueError) as caught:
        imported(tmp_path / "hf", config, torch.float32)
    text = str(caught.value)
    assert "1 tensors missing: model.layers.1.mlp.gate.weight" in text
    assert "1 tensors unexpected: model.layers.1.mlp.router.weight" in text
    assert f"1 tensors of another shape: {damage.transposed}" in text


def test_fewer_experts_than_the_config(tmp_path):
    _, config = write_folder(tmp_path / "hf", "mixtral", torch.float32)
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw | {"num_local_experts": E + 2}))
    config.moe.num_experts = E + 2
    with pytest.raises(ValueError, match=rf"missing: .*experts\.{E}\.w1\.weight"):
        imported(tmp_path / "hf", config, torch.float32)


def test_case_45_nan_in_the_file_is_not_taken_for_a_weight(tmp_path):
    """The sentinel is NaN, so a file that holds it cannot be told from a tensor that was never filled."""
    _, config = write_folder(tmp_path / "hf", "qwen3_moe", torch.float32)
    path = edit(tmp_path / "hf", lambda tensors: tensors["model.layers.1.mlp.gate.weight"].fill_(float("nan")))
    text = rf"1 tensors .* NaN in .*: \S+router.weight \(from model.layers.1.mlp.gate.weight in {path.name}\)"
    with pytest.raises(ValueError, match=text):
        imported(tmp_path / "hf", config, torch.float32)


def test_truncated_and_missing_files(tmp_path):
    write_folder(tmp_path / "hf", "qwen3_moe", torch.float32)
    path = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(ValueError, match=rf"{path.name} is truncated: tensor \S+ ends 5 bytes beyond"):
        open_source(tmp_path / "hf")
    path.write_bytes(data[:30])
    with pytest.raises(ValueError, match=rf"{path.name} is truncated: 30 bytes"):
        open_source(tmp_path / "hf")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{path.name} is missing; \S+ has \d+ tensors in it: model"):
        open_source(tmp_path / "hf")


def test_unknown_dtype(tmp_path):
    write_folder(tmp_path / "hf", "qwen3_moe", torch.float32)
    path = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F33"', 1))
    with pytest.raises(ValueError, match=rf"{path.name}: tensor \S+ has the unknown dtype F33"):
        open_source(tmp_path / "hf")


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    """Neither under the final name nor under the temporary one."""
    _, config = build_reference("qwen3_moe", torch.float32)
    model = Transformer(config)
    monkeypatch.setattr("trainer.huggingface.write_part", lambda part, pieces, writer: None)
    with pytest.raises(RuntimeError, match="0 bytes of tensors were written, the model has"):
        export(tmp_path / "out", model, config)
    assert list(tmp_path.iterdir()) == []


def test_export_does_not_overwrite(tmp_path):
    _, config = build_reference("qwen3_moe", torch.float32)
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out exists"):
        export(tmp_path / "out", Transformer(config), config)


def test_a_bias_without_a_place_is_told_of(tmp_path):
    _, config = build_reference("qwen3_moe", torch.float32)
    config.moe.expert_bias = True
    model = Transformer(config)
    for name, tensor in model.state_dict().items():
        tensor.fill_(0.5 if name.startswith("layers.1.") else 0.0)
    notes = export(tmp_path / "out", model, config).notes
    assert any("no place for layers.1.moe.expert_bias" in note for note in notes)
    assert any("layers.1.moe.expert_bias is not zero" in note for note in notes)
    assert not any("layers.2.moe.expert_bias is not zero" in note for note in notes)
    notes = load_source(open_source(tmp_path / "out"), model, config, PEERS).notes
    assert any("start anew (zeros): layers.1.moe.expert_bias" in note for note in notes)
    assert not model.layers["1"].moe.expert_bias.any()


def test_multi_token_prediction_and_a_tied_head_are_left_out_aloud(tmp_path):
    """Both are told of on the way in, and again on the way out."""
    _, config = write_folder(tmp_path / "hf", "deepseek_v3", torch.float32)

    def add(tensors):
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)

    edit(tmp_path / "hf", add)
    model = Transformer(config)
    notes = load_source(open_source(tmp_path / "hf"), model, config, PEERS).notes
    assert any("left out (multi-token prediction" in note and "layers.3.eh_proj" in note for note in notes)
    keep_source(open_source(tmp_path / "hf"), tmp_path / FOLDER)
    notes = export(tmp_path / "out", model, config, kept_source(tmp_path)).notes
    assert any("1 tensors of the source are not in the export: model.layers.3.eh_proj.weight" in n for n in notes)

    reference, config = build_reference("qwen3", torch.float32)
    reference.save_pretrained(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "tied" / "model.safetensors")
    notes = load_source(open_source(tmp_path / "tied"), Transformer(config), config, PEERS).notes
    assert notes == [f"1 tensors of {tmp_path / 'tied'} are left out (tied to the embedding): lm_head.weight"]


def test_multi_token_prediction_there_and_back(tmp_path):
    """DeepSeek-V3's names, with its copies of embedding and head; `transformers` opens the rest of the model."""
    _, config = build_reference("deepseek_v3", torch.float32)
    config.mtp.depth = 1
    model = Transformer(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    notes = export(tmp_path / "out", model, config, dtype=torch.float32).notes
    stored = load_file(tmp_path / "out" / "model.safetensors")
    extra = {name.removeprefix("model.layers.3.") for name in stored if name.startswith("model.layers.3.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= extra
    assert {"embed_tokens.weight", "shared_head.head.weight", "mlp.gate.e_score_correction_bias"} <= extra
    assert torch.equal(stored["model.layers.3.shared_head.head.weight"], stored["lm_head.weight"])
    source = open_source(tmp_path / "out")
    assert source.config.mtp.depth == 1 and notes == []
    again = Transformer(config)
    assert load_source(source, again, config, PEERS).notes == []
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    keep_source(source, tmp_path / FOLDER)
    export(tmp_path / "back", again, config, kept_source(tmp_path))
    assert files(tmp_path / "back") == files(tmp_path / "out")


def test_upcycling_mistakes():
    _, dense = build_reference("llama", torch.float32)
    _, sparse = build_reference("mixtral", torch.float32)
    with pytest.raises(ValueError, match="has experts already"):
        upcycled_config(sparse, 8, 2)
    with pytest.raises(ValueError, match="top_k=9 must be from 2"):
        upcycled_config(dense, 8, 9)


def test_convert_hf_says_what_is_wrong(tmp_path, capsys):
    from scripts.convert_hf import main

    assert main(["config", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    write_folder(tmp_path / "hf", "gpt_oss", torch.float32)
    capsys.readouterr()
    assert main(["config", str(tmp_path / "hf"), "--output", str(tmp_path / "c" / "model" / "mine.yaml")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'c' / 'model' / 'mine.yaml'}\n"
    _, config = build_reference("gpt_oss", torch.float32)
    words = ["data=python_stdlib", "data.tokenizer=some/folder", "train.seq_len=64"]
    written = compose([*words, "model=mine"], str(tmp_path / "c")).model
    assert differences(config, written, FORMATS["gpt_oss"]) == []


def test_a_model_no_format_can_express(tmp_path):
    _, config = build_reference("qwen3_moe", torch.float32)
    config.moe.shared_expert_dim = 48
    with pytest.raises(ValueError, match=r"no Hugging Face format .* nearest is \w+.*shared_expert_dim=48"):
        choose_family(config, FORMATS)
