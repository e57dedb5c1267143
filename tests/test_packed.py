"""Packed rows against the same rows run one by one through an untouched model."""

import pytest
import torch
from helpers_models import VOCAB, tiny_model
from torch.nn import functional as F

from sapo_fast.models import packed
from sapo_fast.models.packed import check_context, lm_head_of, packed_hidden, prepare

LENGTHS = [5, 17, 1, 0, 30, 17]


def pack(lengths, seed=0):
    ids = torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    return ids, positions, offsets


def row_by_row(model, ids, offsets):
    """The reference: transformers' own attention on one row at a time."""
    rows = [ids[a:b][None] for a, b in zip(offsets, offsets[1:], strict=False) if b > a]
    return torch.cat([model.model(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows])


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_values_and_gradients_equal_row_by_row(kind, kv_heads, checkpointing):
    model, reference = (tiny_model(kind, kv_heads=kv_heads) for _ in range(2))
    if checkpointing:  # the layout must reach the layers again when the backward runs them a second time
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    ids, positions, offsets = pack(LENGTHS)
    weights = torch.randn(len(ids), 32, generator=torch.Generator().manual_seed(1))
    hidden = packed_hidden(model, ids, positions, torch.tensor(offsets, dtype=torch.int32), max(LENGTHS))
    expected = row_by_row(reference, ids, offsets)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    (hidden * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, p), q in zip(model.model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_no_leak_between_rows():
    model = tiny_model()
    ids, positions, offsets = pack(LENGTHS)
    with torch.no_grad():
        before = packed_hidden(model, ids, positions, offsets, max(LENGTHS))
        for row in (0, 1, 4):
            a, b = offsets[row], offsets[row + 1]
            changed = ids.clone()
            changed[a:b] = (changed[a:b] + 1) % VOCAB
            after = packed_hidden(model, changed, positions, offsets, max(LENGTHS))
            outside = torch.ones(len(ids), dtype=torch.bool)
            outside[a:b] = False
            assert torch.equal(before[outside], after[outside])
            assert not torch.allclose(before[a:b], after[a:b])
        # Within a row: causal. A changed last token moves nothing before it.
        changed = ids.clone()
        changed[offsets[5] - 1] = (changed[offsets[5] - 1] + 1) % VOCAB
        after = packed_hidden(model, changed, positions, offsets, max(LENGTHS))
        assert torch.equal(before[: offsets[5] - 1], after[: offsets[5] - 1])


def test_gradient_stays_in_its_row():
    model = tiny_model()
    ids, positions, offsets = pack(LENGTHS)
    seen = []
    handle = model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: seen.append(out.requires_grad_()) or out.retain_grad()
    )
    hidden = packed_hidden(model, ids, positions, offsets, max(LENGTHS))
    handle.remove()
    hidden[offsets[4] : offsets[5]].square().sum().backward()
    moved = seen[0].grad[0].abs().sum(-1) > 0
    expected = torch.zeros(len(ids), dtype=torch.bool)
    expected[offsets[4] : offsets[5]] = True
    assert torch.equal(moved, expected)


def test_no_mask_and_no_call_longer_than_a_row(monkeypatch):
    calls = []
    real = F.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        calls.append((q.shape[2], k.shape[2], kwargs.get("attn_mask")))
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(packed.F, "scaled_dot_product_attention", spy)
    ids, positions, offsets = pack(LENGTHS)
    packed_hidden(tiny_model(), ids, positions, offsets, max(LENGTHS))
    assert {(q, k) for q, k, _ in calls} == {(n, n) for n in LENGTHS}
    assert all(mask is None for _, _, mask in calls)


def test_prepared_model_still_serves_plain_calls_with_padding():
    model, reference = tiny_model(), tiny_model()
    prepare(model)
    ids, positions, offsets = pack(LENGTHS)
    packed_hidden(model, ids, positions, offsets, max(LENGTHS))
    batch = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        got, expected = (m(input_ids=batch, attention_mask=mask).logits for m in (model, reference))
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()])
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(batch, **options), reference.generate(batch, **options))


def test_a_model_that_drops_the_layout_is_refused():
    decoder = prepare(tiny_model())
    with pytest.raises(ValueError, match="does not receive the keywords"):
        decoder(input_ids=torch.tensor([[1, 2]]), attention_mask=torch.empty(1, 1, 0, 0), use_cache=False)


@pytest.mark.parametrize("offsets", [[0, 5], [1, 5, 10], [0, 7, 5, 10], [0], [0, 5, 11]])
def test_offsets_that_do_not_fit(offsets):
    with pytest.raises(ValueError, match="cu_seqlens must be"):
        packed_hidden(tiny_model(), torch.zeros(10, dtype=torch.long), torch.arange(10), offsets, 5)


def test_shapes_that_do_not_fit():
    model, ids = tiny_model(), torch.zeros(10, dtype=torch.long)
    with pytest.raises(ValueError, match=r"must both be \[L\]"):
        packed_hidden(model, ids, torch.arange(9), [0, 10], 10)
    with pytest.raises(ValueError, match="max_seqlen must be the longest row of cu_seqlens, 6; got 10"):
        packed_hidden(model, ids, torch.arange(10), [0, 6, 10], 10)


def test_sliding_window_is_refused_only_where_it_bites():
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    ids, positions = torch.arange(12), torch.arange(12)
    for model in (
        Qwen2ForCausalLM(Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, **sizes)),
        MistralForCausalLM(MistralConfig(sliding_window=8, **sizes)),
    ):
        packed_hidden(model, ids[:8], positions[:8], [0, 8], 8)
        with pytest.raises(ValueError, match="sliding window of 8 tokens, but the context is 12"):
            packed_hidden(model, ids, positions, [0, 12], 12)
        with pytest.raises(ValueError, match="keep the context <= 8"):
            check_context(model, 9)
    unused = Qwen2ForCausalLM(Qwen2Config(use_sliding_window=False, sliding_window=8, **sizes))
    packed_hidden(unused, ids, positions, [0, 12], 12)


def test_layers_with_a_state_are_refused():
    model = tiny_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"\['linear_attention'\] layers, whose state would leak"):
        check_context(model, 10)


def test_lm_head():
    model = tiny_model("llama")
    weight, bias = lm_head_of(model)
    assert weight is model.lm_head.weight and bias is None
    model.lm_head.bias = torch.nn.Parameter(torch.ones(VOCAB))
    assert lm_head_of(model)[1] is model.lm_head.bias
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping=30.0"):
        lm_head_of(model)
    tied = tiny_model("qwen2")
    assert lm_head_of(tied)[0] is tied.model.embed_tokens.weight
    tied.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(ValueError, match="plain linear layer; got Identity"):
        lm_head_of(tied)
