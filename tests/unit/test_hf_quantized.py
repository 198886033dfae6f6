"""Quantized Hugging Face folders: dequantised as `transformers` does it, whatever slice is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.transformers_models import build_reference
from trainer.hf_quantized import dequantize_mxfp4
from trainer.hf_source import FOLDER, keep_source, kept_source, open_source
from trainer.huggingface import Export, export_model, load_source, named_tensors
from trainer.models.transformer import Transformer
from trainer.peers import Peers

PEERS = Peers()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def loaded(folder: Path, config) -> tuple[dict[str, torch.Tensor], list[str]]:
    model = Transformer(config)
    moved = load_source(open_source(folder), model, config, PEERS)
    return model.state_dict(), moved.notes


def quantize_mxfp4(folder: Path, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Replaces gpt-oss's experts by random blocks and scales; returns the values that they mean."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, meant = stored(folder), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, M, N = tensors.pop(name).shape
        assert M % 32 == 0
        blocks = torch.randint(0, 256, (E, N, M // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, (E, N, M // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert meant[name].shape == (E, M, N)
    rewrite(folder, tensors, {"quant_method": "mxfp4"})
    return meant


def quantize_fp8(folder: Path, block: int) -> dict[str, torch.Tensor]:
    """Replaces DeepSeek's matrices in the layers by e4m3 and one factor per block; returns the values meant, fp32."""
    tensors, meant = stored(folder), {}
    for name, tensor in list(tensors.items()):
        if tensor.ndim != 2 or "layers" not in name or name.endswith("gate.weight"):
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        scales = torch.rand(rows, columns) * 0.01 + 1e-3
        wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: tensor.shape[0], : tensor.shape[1]]
        tensors[name] = (tensor / wide).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        meant[name] = tensors[name].float() * wide
    rewrite(folder, tensors, {"quant_method": "fp8", "weight_block_size": [block, block]})
    return meant


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))


def round_trip(folder: Path, config, tmp_path: Path) -> dict[str, torch.Tensor]:
    model = Transformer(config)
    load_source(open_source(folder), model, config, PEERS)
    keep_source(open_source(folder), tmp_path / FOLDER)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    export_model(tmp_path / "out", model, Export(config, shapes, kept_source(tmp_path)), PEERS)
    return stored(tmp_path / "out")


def test_mxfp4_values():
    """0x21: low half first. Code 1 is 0.5, code 2 is 1.0, code 9 is -0.5; the scale byte 128 doubles."""
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0], blocks[0, 15] = 0x21, 0x9F
    values = dequantize_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8))
    assert values.shape == (32,)
    assert values[:2].tolist() == [1.0, 2.0] and values[-2:].tolist() == [-12.0, -1.0]


def test_gpt_oss_mxfp4(tmp_path, monkeypatch):
    """Values bit-equal to those of `transformers`; export writes them in bf16, which holds them exactly."""
    monkeypatch.setattr("tests.transformers_models.F", 32)
    reference, config = build_reference("gpt_oss", torch.bfloat16)
    folder = tmp_path / "hf"
    reference.save_pretrained(folder)
    meant = quantize_mxfp4(folder, torch.Generator().manual_seed(0))
    weights, _ = loaded(folder, config)
    gate_up = meant["model.layers.1.mlp.experts.gate_up_proj"].float()
    ours = weights["layers.1.moe.experts.w_gate_up"]
    assert torch.equal(ours[:, 0], gate_up[..., 0::2].transpose(1, 2))
    assert torch.equal(ours[:, 1], gate_up[..., 1::2].transpose(1, 2))
    down = meant["model.layers.1.mlp.experts.down_proj"].float()
    assert torch.equal(weights["layers.1.moe.experts.w_down"], down.transpose(1, 2))
    name = "model.layers.1.mlp.experts.down_proj"
    part = open_source(folder).tensors().read(name, [(2, 3), (5, 19), (7, 9)])
    assert torch.equal(part, meant[name][2:3, 5:19, 7:9].float())
    exported = round_trip(folder, config, tmp_path)
    for name, value in meant.items():
        assert exported[name].dtype == torch.bfloat16 and torch.equal(exported[name], value), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("block", [128, 16])
def test_deepseek_fp8(tmp_path, block):
    """Products in fp32, bit for bit; blocks of 16 cut the tiny matrices, the published 128 covers them."""
    reference, config = build_reference("deepseek_v3", torch.bfloat16)
    folder = tmp_path / "hf"
    reference.save_pretrained(folder)
    meant = quantize_fp8(folder, block)
    weights, _ = loaded(folder, config)
    prefix = "model.layers.1.mlp.experts.3."
    ours = weights["layers.1.moe.experts.w_gate_up"][3]
    assert torch.equal(ours[0], meant[f"{prefix}gate_proj.weight"])
    assert torch.equal(ours[1], meant[f"{prefix}up_proj.weight"])
    assert torch.equal(weights["layers.1.moe.experts.w_down"][3], meant[f"{prefix}down_proj.weight"])
    assert torch.equal(weights["layers.0.attention.wkv_b.weight"], meant["model.layers.0.self_attn.kv_b_proj.weight"])
    exported = round_trip(folder, config, tmp_path)
    for name, value in meant.items():
        assert torch.equal(exported[name], value.to(torch.bfloat16)), name


def test_a_slice_touches_half_blocks(tmp_path):
    """What a rank reads begins anywhere in a block."""
    reference, _ = build_reference("deepseek_v3", torch.bfloat16)
    reference.save_pretrained(tmp_path)
    meant = quantize_fp8(tmp_path, 8)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    part = open_source(tmp_path).tensors().read(name, [(5, 19), (7, 9)])
    assert torch.equal(part, meant[name][5:19, 7:9])


def test_fp8_without_scales(tmp_path):
    reference, _ = build_reference("deepseek_v3", torch.bfloat16)
    reference.save_pretrained(tmp_path)
    quantize_fp8(tmp_path, 16)
    tensors = stored(tmp_path)
    del tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor \S+o_proj.weight: there is no \S+_scale_inv"):
        open_source(tmp_path)
