"""The CUDA backends of the inner attention against the written-out formula in fp64 on the same bf16 inputs.

Norm-wise tolerances: bf16 keeps 8 bits, so one rounding is 2e-3 to 4e-3; outputs and gradients of the kernels carry a
few roundings: 1e-2.
"""

import pytest
import torch

from trainer.models.config import AttentionConfig, ModelConfig
from trainer.models.inner_attention import InnerAttention, plan_sequences, reference_attention, sdpa_attention
from trainer.models.transformer import Transformer

pytestmark = pytest.mark.gpu

B, S = 2, 512
TOLERANCE = 1e-2
# name: query heads, key/value heads, head dim of q and k, of v
SHAPES = {"gqa": (8, 2, 128, 128), "gpt_oss": (8, 2, 64, 64), "mla": (4, 4, 192, 128), "tiny": (2, 1, 20, 12)}


def error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def random_inputs(shape, *, sinks, dtype=torch.bfloat16):
    H, G, D, V = shape
    torch.manual_seed(0)
    tensors = [torch.randn(B, S, n, d, device="cuda", dtype=dtype) for n, d in ((H, D), (G, D), (G, V))]
    tensors.append(torch.linspace(-1, 6, H, device="cuda", dtype=dtype) if sinks else None)
    return [None if t is None else t.requires_grad_() for t in tensors]


def document_ids():
    ids = torch.zeros(B, S, dtype=torch.int64)
    ids[0, 100:] = 1
    ids[0, 101:] = 2
    ids[0, 400:] = -1
    ids[1, 300:] = 1
    return ids.cuda()


def with_gradients(function, tensors):
    for tensor in tensors:
        if tensor is not None:
            tensor.grad = None
    out = function(*tensors)
    torch.manual_seed(1)
    (out * torch.randn(out.shape, device="cuda", dtype=torch.float32)).sum().backward()
    return [out.detach(), *(t.grad for t in tensors if t is not None)]


def expected_results(tensors, ids, window, scale):
    plan = plan_sequences(
        torch.zeros(B, S, 1, device="cuda"),
        AttentionConfig(backend="reference", sliding_window=window),
        document_ids_BS=ids,
    )
    mask = plan.window_mask_B1SS if window else plan.mask_B1SS
    doubled = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    return with_gradients(lambda q, k, v, sinks: reference_attention(q, k, v, sinks, mask, scale), doubled)


@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "packed"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_varlen_equals_reference(shape, window, sinks, packed):
    tensors = random_inputs(SHAPES[shape], sinks=sinks)
    ids = document_ids() if packed else None
    config = AttentionConfig(backend="varlen", sliding_window=window)
    plan = plan_sequences(torch.zeros(B, S, 1, device="cuda", dtype=torch.bfloat16), config, document_ids_BS=ids)
    inner = InnerAttention(0.11, window)
    actual = with_gradients(lambda *t: inner(*t, plan), tensors)
    expected = expected_results(tensors, ids, window, 0.11)
    for name, a, e in zip(("out", "dq", "dk", "dv", "dsinks"), actual, expected, strict=False):
        assert a.dtype == torch.bfloat16
        # A sink's gradient is one sum over all rows of both signs: it cancels, so roundings weigh more.
        assert error(a, e) < (3e-2 if name == "dsinks" else TOLERANCE), name


@pytest.mark.parametrize("bound", [None, 8])
@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "packed"])
def test_varlen_in_chunks_equals_reference(packed, bound):
    """Chunks of 96 tokens that restart with each document; with a bound on the documents and without."""
    tensors = random_inputs(SHAPES["gqa"], sinks=False)
    ids = document_ids() if packed else None
    x = torch.zeros(B, S, 1, device="cuda", dtype=torch.bfloat16)
    config = AttentionConfig(backend="varlen", chunk_size=96)
    plan = plan_sequences(x, config, document_ids_BS=ids, max_documents=bound)
    inner = InnerAttention(0.11, 0, 96)
    actual = with_gradients(lambda *t: inner(*t, plan), tensors)
    masks = plan_sequences(x, AttentionConfig(backend="reference", chunk_size=96), document_ids_BS=ids)
    doubled = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected = with_gradients(
        lambda q, k, v, _: reference_attention(q, k, v, None, masks.chunk_mask_B1SS, 0.11), doubled
    )
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert error(a, e) < TOLERANCE, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
def test_sdpa_equals_reference(shape, packed):
    tensors = random_inputs(SHAPES[shape], sinks=False)
    ids = document_ids() if packed else None
    plan = plan_sequences(torch.zeros(B, S, 1, device="cuda"), AttentionConfig(backend="sdpa"), document_ids_BS=ids)
    actual = with_gradients(lambda q, k, v, _: sdpa_attention(q, k, v, plan.mask_B1SS, 0.11), tensors)
    for a, e in zip(actual, expected_results(tensors, ids, 0, 0.11), strict=True):
        assert error(a, e) < TOLERANCE


@pytest.mark.parametrize("shape", ["gqa", "gpt_oss", "mla"])
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="cuDNN comes first from SM90 on"
)
def test_plain_causal_attention_runs_in_cudnn(shape):
    q, k, v, _ = random_inputs(SHAPES[shape], sinks=False)
    out = sdpa_attention(q, k, v, None, 0.11)
    assert "Cudnn" in out.grad_fn.next_functions[0][0].name()


def test_float32_with_documents_uses_masks():
    tensors = random_inputs(SHAPES["gqa"], sinks=False, dtype=torch.float32)
    config = AttentionConfig(sliding_window=64)
    plan = plan_sequences(torch.zeros(B, S, 1, device="cuda"), config, document_ids_BS=document_ids())
    assert plan.backend == "sdpa"
    inner = InnerAttention(0.11, 64)
    actual = with_gradients(lambda *t: inner(*t, plan), tensors)
    for a, e in zip(actual, expected_results(tensors, document_ids(), 64, 0.11), strict=True):
        assert error(a, e) < 1e-5  # fp32


def test_the_custom_op_is_well_formed():
    """Schema, shapes under tracing, autograd registration."""
    H, T = 4, 256
    q, k, v = (torch.randn(T, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (H, 2, 2))
    sinks = torch.zeros(H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    starts = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for extra in (None, sinks):
        args = (q, k, v, extra, starts, 256, 0.125, 32)
        torch.library.opcheck(torch.ops.sluicegate.flash_varlen.default, args, test_utils=checks)


def dense_model(attention):
    config = ModelConfig(vocab_size=64, dim=128, num_layers=2, num_dense_layers=2, ffn_dim=128, attention=attention)
    torch.manual_seed(0)
    model = Transformer(config).cuda().bfloat16()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1)
    return model


def test_packed_documents_do_not_see_each_other():
    """CASE 39, exact: the kernel works on each document by itself."""
    model = dense_model(AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm="head"))
    tokens = torch.randint(0, 64, (B, S), device="cuda")
    ids = document_ids()
    before = model(tokens, document_ids_BS=ids).logits_BSV
    tokens[0, 101:400] = (tokens[0, 101:400] + 1) % 64
    after = model(tokens, document_ids_BS=ids).logits_BSV
    same = torch.ones(B, S, dtype=torch.bool, device="cuda")
    same[0, 101:400] = False
    assert torch.equal(before[same], after[same]) and not torch.equal(before[~same], after[~same])


def test_a_bound_on_documents_spares_the_synchronisation():
    model = dense_model(AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32))
    tokens, ids = torch.randint(0, 64, (B, S), device="cuda"), document_ids()
    expected = model(tokens, document_ids_BS=ids).logits_BSV
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            model(tokens, document_ids_BS=ids)
        actual = model(tokens, document_ids_BS=ids, max_documents=12).logits_BSV
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["gqa", "sinks", "mla"])
@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
def test_compiled_blocks_are_as_exact_as_eager_ones(kind, packed):
    """Against fp64. Fusion changes where bf16 is rounded, so compiled and eager differ from each other as well."""
    attention = {
        "gqa": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm="head"),
        "sinks": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, bias=True, sinks=True, sliding_window=64),
        "mla": AttentionConfig(kind="mla", num_heads=4, kv_lora_rank=32),
    }[kind]
    model, exact = dense_model(attention), dense_model(attention).double()
    tokens = torch.randint(0, 64, (B, S), device="cuda")
    ids = document_ids() if packed else None

    def loss_and_gradients(model):
        model.zero_grad(set_to_none=True)
        loss = model(tokens, labels_BS=tokens, document_ids_BS=ids).loss_sum
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}

    expected, eager = loss_and_gradients(exact), loss_and_gradients(model)
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, fullgraph=True)
    for name, compiled in loss_and_gradients(model).items():
        assert error(compiled, expected[name]) < 2 * error(eager[name], expected[name]) + TOLERANCE, name
