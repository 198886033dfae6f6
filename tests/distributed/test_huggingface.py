"""Hugging Face folders in every layout: equal logits, loss and gradients, equal files at 1, 2 and 4 processes."""

import hashlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.init import local_box
from parallel.mesh import build_mesh
from parallel.tensor_parallel import sum_shared_gradients
from tests.distributed.harness import run_workers
from tests.transformers_models import COMMON, DENSE, FAMILIES, E, KeepDouble, V, build_reference
from tests.transformers_models import convert as weights_of
from tests.unit.test_hf_quantized import quantize_fp8, quantize_mxfp4, stored
from trainer import hf_convert
from trainer.build import build_model
from trainer.checkpoint import load_weights
from trainer.compose import load_config
from trainer.config import Config, PrecisionConfig
from trainer.hf_source import FOLDER, Source, keep_source, kept_source
from trainer.huggingface import (
    Export,
    Transfer,
    export_model,
    load_source,
    named_tensors,
    open_for_all,
)
from trainer.models.config import ModelConfig
from trainer.models.transformer import Transformer
from trainer.parity import full, named_parameters
from trainer.peers import Peers

# (ranks, layout): expert parallelism, with FSDP over its ranks, FSDP alone, replicas; tensor parallelism alone, with
# whole experts, with experts that are cut.
LAYOUTS = {
    "ep2": (2, ParallelConfig(ep=2)),
    "ep2-fsdp2": (4, ParallelConfig(ep=2)),
    "fsdp4": (4, ParallelConfig()),
    "hsdp": (4, ParallelConfig(dp_replicate=2, ep=2)),
    "tp2": (2, ParallelConfig(tp=2)),
    "tp2-ep2": (4, ParallelConfig(tp=2, ep=2)),
    "tp2-etp2": (4, ParallelConfig(tp=2, etp=2)),
}


@dataclass
class Run:
    """One rank's part of a step: logits and loss of its sequences; on rank 0 every gradient of the whole batch."""

    batch_rank: int
    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def in_layout(folder: str, config: ModelConfig, parallel: ParallelConfig, tokens: torch.Tensor) -> list[Run]:
    """Import and run one step in fp64, then in fp32; export from fp32."""
    mesh = build_mesh(parallel, torch.device("cpu"))
    peers = Peers(60)
    source = open_for_all(folder, peers)
    mine = tokens.chunk(mesh.batch_size)[mesh.batch_rank]
    runs = []
    for recipe in ("fp64", "fp32"):
        model = build_model(Config(model=config, parallel=mesh.config, precision=PrecisionConfig(recipe)), mesh)
        load_source(source, model, config, peers)
        with torch.no_grad():
            logits = model(mine).logits_BSV
        loss = model(mine, labels_BS=mine.roll(-1, dims=1)).loss_sum
        loss.backward()
        sum_shared_gradients(model, mesh)
        gradients = {name: full(parameter.grad) for name, parameter in named_parameters(model)}
        runs.append(Run(mesh.batch_rank, logits, loss.detach(), gradients if mesh.rank == 0 else {}))
    export_beside(source, model, config, peers)
    peers.close()
    return runs


def export_beside(source: Source, model: torch.nn.Module, config: ModelConfig, peers: Peers) -> Transfer:
    """Write `out` beside the folder that a model came from, as a run does that has kept what it needs of it."""
    run = source.folder.parent
    peers.from_rank0(lambda: keep_source(source, run / FOLDER))
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    kept = peers.from_rank0(lambda: kept_source(run))
    return export_model(run / "out", model, Export(config, shapes, kept), peers)


def there_and_back(
    folders: dict[str, ModelConfig], parallel: ParallelConfig
) -> list[tuple[dict[str, str], Transfer, Transfer]]:
    """Import into fp32 masters and export, per folder: checksums of this rank's experts, what was read and written."""
    mesh = build_mesh(parallel, torch.device("cpu"))
    peers = Peers(60)
    found = []
    for folder, config in folders.items():
        model = build_model(Config(model=config, parallel=mesh.config, precision=PrecisionConfig("fp32")), mesh)
        source = open_for_all(folder, peers)
        read = load_source(source, model, config, peers)
        found.append((expert_checksums(model), read, export_beside(source, model, config, peers)))
    peers.close()
    return found


def expert_checksums(model: torch.nn.Module) -> dict[str, str]:
    sums: dict[str, str] = {}
    for name, tensor in named_tensors(model).items():
        if name.endswith("experts.w_down"):
            (first, *_), local = local_box(tensor)
            if local.shape[1:] == tensor.shape[1:]:
                sums |= {f"{name}/{first + index}": checksum(local[index]) for index in range(local.shape[0])}
    return sums


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.detach() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, name) for layout in ("ep2", "tp2") for name in FAMILIES),
        # What four processes add is the same for every family: with biases, and with a dense layer and a shared expert.
        *(("ep2-fsdp2", name) for name in ("gpt_oss", "deepseek_v3")),
    ],
)
def test_a_step_in_a_layout(tmp_path, name, layout):
    """Logits, loss and every gradient, 1e-10 in fp64 and 1e-5 in fp32; the same fp32 files come out.

    The reference runs in fp64, with the same weights. Every batch rank has other sequences; results are sums.
    """
    build_reference(name, torch.float32)[0].save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    reference, config = build_reference(name, torch.float64)
    tokens = torch.randint(0, V, (4, 40), generator=torch.Generator().manual_seed(4))
    with KeepDouble():
        logits = reference(tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens.roll(-1, dims=1).flatten(), reduction="sum"
        )
    loss.backward()
    expected = weights_of(reference, config, gradients=True)
    world, parallel = LAYOUTS[layout]
    results = run_workers(in_layout, world, str(tmp_path / "hf"), config, parallel, tokens)
    for runs, bound in zip(zip(*results, strict=True), (1e-10, 1e-5), strict=True):
        for run in runs:
            assert error(run.logits, logits.chunk(world // parallel.tp)[run.batch_rank]) < bound
        losses = {run.batch_rank: run.loss for run in runs}
        assert error(torch.stack(list(losses.values())).sum(), loss) < bound
        assert runs[0].gradients.keys() == expected.keys()
        for parameter, gradient in runs[0].gradients.items():
            assert error(gradient, expected[parameter]) < bound, parameter
    assert files(tmp_path / "out") == files(tmp_path / "hf")


@pytest.mark.parametrize("layout", ["ep2", "fsdp4", "hsdp", "tp2-ep2", "tp2-etp2"])
def test_case_47_48_every_expert_of_every_rank_arrives_and_is_written(tmp_path, layout):
    """bf16 folders of every family through fp32 masters; each expert arrives as it is in the file, whoever holds it."""
    folders: dict[str, ModelConfig] = {}
    for name in FAMILIES:
        reference, folders[f"{tmp_path}/{name}/hf"] = build_reference(name, torch.bfloat16)
        reference.save_pretrained(tmp_path / name / "hf", max_shard_size="30KB")
    world, parallel = LAYOUTS[layout]
    by_rank = run_workers(there_and_back, world, folders, parallel)
    for name, config, results in zip(FAMILIES, folders.values(), zip(*by_rank, strict=True), strict=True):
        assert files(tmp_path / name / "out") == files(tmp_path / name / "hf"), name
        expected = stored(tmp_path / name / "hf")
        held = [item for sums, _, _ in results for item in sums.items()]
        # With etp=2 no rank has a whole expert.
        experts = E if parallel.etp == 1 else 0
        assert len({key for key, _ in held}) == experts * (config.num_layers - config.num_dense_layers)
        for key, value in held:
            layer, expert = key.split(".")[1], int(key.rpartition("/")[2])
            assert value == checksum(stored_down(expected, layer, expert)), (name, key)
        for _, read, written in results:
            # A share of embedding or head, or one expert's matrix.
            share = max(V * config.dim * 4 // world, 2 * config.dim * config.moe.expert_dim * 4)
            assert max(read.largest, written.largest) <= share, name


def stored_down(tensors: dict[str, torch.Tensor], layer: str, expert: int) -> torch.Tensor:
    """One expert's, (D, F); in Mixtral's files it is w2, in those of gpt-oss and Llama 4 a stack of (F, D)."""
    block = rf"model\.layers\.{layer}\.\w+\.experts"
    (name,) = [n for n in tensors if re.fullmatch(rf"{block}(\.{expert})?\.(down_proj|w2)(\.weight)?", n)]
    return tensors[name].float() if tensors[name].dim() == 2 else tensors[name][expert].T.float()


def test_two_ranks_share_one_expert(tmp_path):
    """More ranks than experts: FSDP cuts gate from up, which alternate in gpt-oss's files."""
    reference, config = build_reference("gpt_oss", torch.bfloat16)
    reference.config.num_local_experts = config.moe.num_experts = config.moe.top_k = 2
    reference.config.num_experts_per_tok = 2
    reference = type(reference)(reference.config).to(torch.bfloat16)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    run_workers(there_and_back, 4, {str(tmp_path / "hf"): config}, ParallelConfig(ep=2))
    assert files(tmp_path / "out") == files(tmp_path / "hf")


def convert(*places: Path) -> None:
    """`import` and `export`, in each of the places."""
    peers = Peers(60)
    for place in places:
        hf_convert.import_folder(place / "hf", place / "run", peers)
        hf_convert.export_folder(place / "run", place / "back", peers, max_file_bytes=30_000)
    peers.close()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_conversion_there_and_back(tmp_path, world):
    """`convert_hf.py import` and `export`: the same files at every number of processes."""
    places = [tmp_path / name for name in ("mixtral", "gpt_oss", "deepseek_v3")]
    for place in places:
        reference, _ = build_reference(place.name, torch.bfloat16)
        reference.save_pretrained(place / "hf", max_shard_size="30KB")
    run_workers(convert, world, *places)
    for place in places:
        assert files(place / "back") == files(place / "hf"), place.name
        assert sorted(path.name for path in place.iterdir()) == ["back", "hf", "run"]


@pytest.mark.parametrize(("name", "world"), [("gpt_oss", 2), ("deepseek_v3", 4)])
def test_quantized_conversion(tmp_path, monkeypatch, name, world):
    """Ranks' shares begin and end within blocks: MXFP4 comes back exact in bf16, fp8 rounded once."""
    monkeypatch.setattr("tests.transformers_models.F", 32)
    reference, _ = build_reference(name, torch.bfloat16)
    reference.save_pretrained(tmp_path / "hf")
    if name == "gpt_oss":
        meant = quantize_mxfp4(tmp_path / "hf", torch.Generator().manual_seed(0))
    else:
        meant = quantize_fp8(tmp_path / "hf", 12)
    run_workers(convert, world, tmp_path)
    written = stored(tmp_path / "back")
    assert len(meant) > 5
    for key, value in meant.items():
        assert torch.equal(written[key], value.to(torch.bfloat16)), key


def convert_watched(folder: str, out: str, back: str) -> list[float]:
    """Memory that no file backs, in MB: most of it above what there was before, on import and on export."""
    peaks: list[float] = []
    peers = Peers(60)
    for work in (
        lambda: hf_convert.import_folder(folder, out, peers),
        lambda: hf_convert.export_folder(out, back, peers, max_file_bytes=50_000_000),
    ):
        before, seen, done = anonymous_megabytes(), [0.0], threading.Event()

        def watch(seen: list[float] = seen, done: threading.Event = done) -> None:
            while not done.wait(0.002):
                seen.append(anonymous_megabytes())

        thread = threading.Thread(target=watch)
        thread.start()
        work()
        done.set()
        thread.join()
        peaks.append(max(seen) - before)
    peers.close()
    return peaks


def anonymous_megabytes() -> float:
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1000


def test_one_process_needs_no_room_for_the_model(tmp_path):
    """A model of 126 MB; measured below 20 MB on import and 21 MB on export: one stack of experts."""
    import transformers

    hf = transformers.Qwen3MoeConfig(
        **{**COMMON, "hidden_size": 256, "num_hidden_layers": 4},
        head_dim=16,
        moe_intermediate_size=640,
        num_experts=16,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    transformers.Qwen3MoeForCausalLM(hf).save_pretrained(tmp_path / "hf", max_shard_size="40MB")
    names = [str(tmp_path / name) for name in ("hf", "run", "back")]
    on_import, on_export = run_workers(convert_watched, 1, *names)[0]
    assert sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")) > 120e6
    assert on_import < 60 and on_export < 80
    assert files(tmp_path / "back") == files(tmp_path / "hf")


def upcycle(folder: str, out: str, noise: float) -> None:
    peers = Peers(60)
    hf_convert.upcycle_folder(folder, out, peers, num_experts=4, top_k=2, noise=noise, seed=7)
    peers.close()


def weights_in(run: Path) -> dict[str, torch.Tensor]:
    model = Transformer(load_config(run / "config.yaml").model).to(torch.float64)
    load_weights(run, model)
    return model.state_dict()


@pytest.mark.parametrize("name", DENSE)
def test_upcycled_first_loss_is_the_dense_one(tmp_path, name):
    """fp64, 1e-10: whatever the routers say, the experts' weights of a token sum to 1."""
    reference, _ = build_reference(name, torch.float64)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    run_workers(upcycle, 2, str(tmp_path / "hf"), str(tmp_path / "run"), 0.0)
    config = load_config(tmp_path / "run" / "config.yaml").model
    assert (config.moe.num_experts, config.moe.top_k, config.num_dense_layers) == (4, 2, 0)
    config.moe.backend = "reference"
    model = Transformer(config).to(torch.float64)
    load_weights(tmp_path / "run", model)
    tokens = torch.randint(0, V, (2, 40), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, dims=1)
    with torch.no_grad(), KeepDouble():
        logits = reference(tokens).logits
        out = model(tokens, labels_BS=labels)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert error(out.loss_sum, expected) < 1e-10
    # Tokens do go to different experts.
    assert (out.tokens_per_expert_LE > 0).sum() > config.num_layers * 2


def test_upcycling_with_noise(tmp_path):
    """Every expert gets its own, of the size that was asked for, the same at any number of processes."""
    reference, _ = build_reference("qwen3", torch.float32)
    reference.save_pretrained(tmp_path / "hf")
    for world in (1, 2):
        run_workers(upcycle, world, str(tmp_path / "hf"), str(tmp_path / f"run-{world}"), 0.5)
    weights, other = weights_in(tmp_path / "run-1"), weights_in(tmp_path / "run-2")
    assert all(torch.equal(weights[name], other[name]) for name in weights)
    stack = weights["layers.1.moe.experts.w_gate_up"]
    noise = stack[:, 0] - reference.state_dict()["model.layers.1.mlp.gate_proj.weight"]
    # 0.5 x initializer_range 0.02; 4 x 768 draws, so the estimate is within a few per cent.
    assert abs(float(noise.std()) / 0.01 - 1) < 0.1
    assert not torch.equal(noise[0], noise[1])
