"""The proof after a weight sync, against an engine made of a second copy of the model that can be made to cheat."""

import copy

import pytest
import torch
from helpers_models import VOCAB, tiny_model
from torch import nn

from sapo_fast.models.packed import prepare
from sapo_fast.rollout import weight_sync
from sapo_fast.rollout.engine import Request, Sampling
from sapo_fast.rollout.hf import HFEngine
from sapo_fast.rollout.weight_sync import CanaryAnswer, WeightMismatch, WeightSync, bit_sum, named_weights

BANNED = (VOCAB - 2, VOCAB - 1)
GROUPS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Engine:
    """A SyncTarget with weights of its own, fused as vLLM fuses them. ``packed_head``: computes with the head it was made with, whatever it
    loads. ``deaf``: loads nothing. ``keeps_cache``: a reset does nothing, and the cache counts. ``stale``: names it does not load."""

    def __init__(self, model, *, packed_head=False, deaf=False, keeps_cache=False, stale=()):
        self.model = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.02)
        self.packed_head, self.deaf, self.keeps_cache, self.stale = packed_head, deaf, keeps_cache, stale
        self.head = self.model.get_output_embeddings().weight.detach().clone()
        self.cached, self.loads = False, 0

    def load_weights(self, weights):
        self.loads += 1
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            if not self.deaf and name not in self.stale:
                own[name].data.copy_(weight)
            if "lm_head" in name and not self.packed_head or ("embed" in name and "lm_head.weight" not in own and not self.packed_head):
                self.head = weight.clone()

    def reset_prefix_cache(self):
        self.cached = self.cached and self.keeps_cache
        return True

    def bit_sums(self):
        sums = {}
        whole = {part: name for name, parts in GROUPS.items() for part in parts}
        for name, parameter in self.model.named_parameters():
            fused = ".".join(whole.get(part, part) for part in name.split("."))
            sums[fused] = weight_sync._wrap(sums.get(fused, 0) + bit_sum(parameter))
        return sums

    def weight_groups(self):
        return GROUPS

    def canary(self, prompts, tokens):
        model = copy.deepcopy(self.model)
        model.lm_head.weight = nn.Parameter(self.head)
        engine = HFEngine(model, value_token_ids=BANNED, max_context_tokens=400)
        answers = []
        for i, prompt in enumerate(prompts):
            done = engine.generate([Request(0, prompt, i)], Sampling(1.0, tokens))[0]
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
            answers.append(
                CanaryAnswer(done.token_ids, done.logprobs, (logits[BANNED[0]] - logits[BANNED[1]]).item(), 64 if self.cached else 0)
            )
        self.cached = True
        return answers


def made(kind="qwen2", **faults):
    model = tiny_model(kind)
    prepare(model)
    engine = Engine(model, **faults)
    return model, engine, WeightSync(model, engine, value_token_ids=BANNED, dtype=torch.float32, context=400)


def nudge(model, size=1e-7):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.view(-1)[3] += size


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_sync_is_proved(kind):
    model, engine, sync = made(kind)
    with pytest.raises(WeightMismatch, match="were not synced"):
        sync.prove()
    sync.rehearse()
    assert engine.loads == 3 and not sync.moved()
    before = {name: weight.clone() for name, weight in named_weights(model)}
    nudge(model)
    assert sync.moved()
    report = sync.sync()
    assert report.canary_gap < 1e-4 and 0 < report.proof_seconds <= report.seconds and not sync.moved()
    sync.rehearse()
    assert [n for n, w in named_weights(model) if not torch.equal(w, before[n])] == ["model.layers.1.mlp.up_proj.weight"]


def test_a_sync_that_did_not_happen_is_seen_however_small_the_step():
    model, engine, sync = made()
    sync.sync()
    engine.deaf = True
    nudge(model)
    with pytest.raises(
        WeightMismatch, match=r"1 of the engine's \d+ parameters are not the trainer's: model.layers.1.mlp.gate_up_proj.weight"
    ):
        sync.sync()


def test_one_parameter_left_behind_is_named():
    _, engine, sync = made(stale=("model.layers.0.self_attn.k_proj.bias",))
    with pytest.raises(WeightMismatch, match=r"model.layers.0.self_attn.qkv_proj.bias; the weights"):
        sync.sync()


def test_a_cache_that_was_not_reset_is_seen():
    model, engine, sync = made(keeps_cache=True)
    sync.sync()
    nudge(model)
    with pytest.raises(WeightMismatch, match="64 tokens of the canary prompt in its prefix cache"):
        sync.sync()
    engine.reset_prefix_cache = lambda: False
    with pytest.raises(WeightMismatch, match="requests are still in progress"):
        sync.sync()


def test_a_packed_copy_of_a_tied_head_is_seen_at_the_start():
    model, engine, _ = made("qwen2")
    engine.model.load_state_dict(model.state_dict())
    engine.head, engine.packed_head = model.get_output_embeddings().weight.detach().clone(), True
    sync = WeightSync(model, engine, value_token_ids=BANNED, dtype=torch.float32, context=400)
    sync.sync()  # the copy is still right
    with pytest.raises(WeightMismatch, match="the trainer's, bit for bit, yet its log-probs differ"):
        sync.rehearse()


def test_a_blind_proof_is_refused_and_the_weights_are_put_back():
    model, engine, _ = made()
    sync = WeightSync(model, engine, value_token_ids=BANNED, dtype=torch.float32, context=400, tolerance=100.0)
    before = {name: weight.clone() for name, weight in named_weights(model)}
    with pytest.raises(WeightMismatch, match="the proof is blind"):
        sync.rehearse()
    assert all(torch.equal(weight, before[name]) for name, weight in named_weights(model))


def test_weights_that_are_not_finite_never_pass():
    model, engine, sync = made()
    sync.sync()
    answers = engine.canary([[5] * 9], 2)
    answers[0].logprobs[0] = float("nan")
    engine.canary = lambda prompts, tokens: answers * len(prompts)
    sync._prompts = [[5] * 9]
    with pytest.raises(WeightMismatch, match="differ by nan"):
        sync.prove(fresh=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bit_sums_add_over_parts_and_see_every_bit(dtype):
    tensor = torch.randn(7, 5).to(dtype)
    assert weight_sync._wrap(bit_sum(tensor[:3]) + bit_sum(tensor[3:])) == bit_sum(tensor) == bit_sum(tensor.T)
    bits = tensor.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    bits[4, 2] ^= 1
    assert bit_sum(bits.view(dtype)) != bit_sum(tensor)
    assert bit_sum(torch.zeros(3).neg()) != bit_sum(torch.zeros(3)), "-0 is not 0"


class LoraLinear(nn.Module):
    """As peft's."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.merged, self.active_adapters = base, False, ["default"]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def get_delta_weight(self, adapter):
        return 0.5 * self.lora_B[adapter].weight @ self.lora_A[adapter].weight


def test_adapters_are_merged_into_what_is_sent_only():
    model = tiny_model()
    plain = dict(named_weights(tiny_model()))
    attention = model.model.layers[0].self_attn
    attention.q_proj = layer = LoraLinear(attention.q_proj)
    sent = dict(named_weights(model))
    assert sent.keys() == plain.keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(sent[name], plain[name] + layer.get_delta_weight("default"))
    assert torch.equal(layer.base_layer.weight, plain[name]) and torch.equal(
        sent[name.replace("weight", "bias")], plain[name.replace("weight", "bias")]
    )
    layer.merged = True
    assert torch.equal(dict(named_weights(model))[name], plain[name])


def test_an_unknown_dtype_needs_a_tolerance():
    model, engine, _ = made()
    with pytest.raises(ValueError, match=r"float64; give one"):
        WeightSync(model, engine, value_token_ids=BANNED, dtype=torch.float64, context=400)
