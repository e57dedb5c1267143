"""vLLM in this process against the trainer's own arithmetic: tiny Qwen2s with tied and untied heads, and SmolLM2-135M where it was fetched.

Run by `make test-vllm`, which makes an environment with vLLM; its name keeps it out of `make test`.
"""

import dataclasses
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from sapo_fast.models.packed import packed_hidden, prepare
from sapo_fast.rollout import weight_sync
from sapo_fast.rollout.engine import EngineDied, Request, Sampling
from sapo_fast.rollout.hf import HFEngine
from sapo_fast.rollout.vllm import VLLMEngine
from sapo_fast.rollout.weight_sync import WeightMismatch

pytestmark = pytest.mark.timeout(1800)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one test imports vLLM itself, perhaps before the first engine
SMOLLM2 = Path(os.environ.get("SMOLLM2", "~/.cache/sapo_fast/smollm2-135m-instruct")).expanduser()
EXACT = 5e-5  # what log-probs and value logits may differ by


@dataclasses.dataclass
class Room:
    """A model, its engine, and prompts for it."""

    name: str
    model: torch.nn.Module
    banned: tuple[int, int]
    engine: VLLMEngine
    vocabulary: int

    def prompts(self, count, seed=0, low=3, high=60):
        rng = np.random.default_rng(seed)
        allowed = np.setdiff1d(np.arange(self.vocabulary), self.banned)
        return [rng.choice(allowed, size=int(rng.integers(low, high))).tolist() for _ in range(count)]

    def requests(self, count, seed=0):
        return [Request(i, prompt, seed=1000 * seed + i) for i, prompt in enumerate(self.prompts(count, seed))]

    @torch.no_grad()
    def scored(self, prompt, response, temperature):
        """(log-probs, z+ - z- at the prompt's last token, the same at the response's last) by the trainer."""
        ids = torch.tensor([*prompt, *response])
        hidden = packed_hidden(self.model, ids, torch.arange(len(ids)), [0, len(ids)], len(ids))
        logits = torch.nn.functional.linear(hidden, self.model.get_output_embeddings().weight).double()
        values = logits[:, self.banned[0]] - logits[:, self.banned[1]]
        rows = logits[len(prompt) - 1 : -1].clone()
        rows[:, list(self.banned)] = -torch.inf
        logprobs = (rows / (temperature or 1.0)).log_softmax(1)[torch.arange(len(response)), torch.tensor(response)]
        return logprobs, values[len(prompt) - 1].item(), values[-1].item()

    def gaps(self, temperature, count=8, seed=0, tokens=12):
        """Largest differences of log-probs and of V on sampled responses."""
        requests = self.requests(count, seed)
        completions = self.engine.generate(requests, Sampling(temperature, tokens))
        logprob_gap = value_gap = 0.0
        for request, completion in zip(requests, completions, strict=True):
            assert len(completion.token_ids) == tokens and not set(completion.token_ids) & set(self.banned)
            logprobs, v, _ = self.scored(request.prompt_ids, completion.token_ids, temperature)
            logprob_gap = max(logprob_gap, (logprobs - torch.tensor(completion.logprobs)).abs().max().item())
            value_gap = max(value_gap, abs(v - completion.v_logit))
        return logprob_gap, value_gap

    def train_steps(self, steps, lr):
        """Optimizer steps on a language loss, each followed by a sync."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        seconds = []
        for step in range(steps):
            ids = torch.tensor(self.prompts(1, seed=100 + step, low=40, high=60))
            self.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.engine.weights_changed()
            seconds.append(self.engine.last_sync.seconds)
        return seconds


def tiny(tied):
    config = Qwen2Config(
        vocab_size=515,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.1)
    return model


def build(name):
    if name == "smollm2":
        if not (SMOLLM2 / "config.json").is_file():
            raise FileNotFoundError(f"{SMOLLM2} holds no model; run examples/smollm2.py")
        return AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval(), (3, 4), 1024
    return tiny(name == "tied"), (513, 514), 400


@pytest.fixture(scope="module", params=["tied", "untied", "smollm2"])
def room(request):
    model, banned, context = build(request.param)
    prepare(model)
    before = torch.get_rng_state()
    began = time.perf_counter()
    engine = VLLMEngine(model, value_token_ids=banned, max_context_tokens=context, max_live=8)
    print(f"\n{request.param}: engine and rehearsal in {time.perf_counter() - began:.1f} s")
    assert torch.equal(before, torch.get_rng_state()), "the trainer's random numbers are its own"
    yield Room(request.param, model, banned, engine, model.get_output_embeddings().weight.shape[0])
    engine.close()


def test_greedy_ids_are_transformers_own(room):
    requests = room.requests(6, seed=5)
    hf = HFEngine(room.model, value_token_ids=room.banned, max_context_tokens=room.engine.max_context_tokens, max_batch=8)
    expected, found = (engine.generate(requests, Sampling(0.0, 16)) for engine in (hf, room.engine))
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    np.testing.assert_allclose([c.logprobs for c in found], [c.logprobs for c in expected], atol=EXACT)


def test_logprobs_and_v_are_exact_before_and_after_updates(room):
    rows = [("before", *room.gaps(1.0, seed=1), *room.gaps(0.7, seed=2))]
    stale = room.requests(2, seed=3)
    old = room.engine.generate(stale, Sampling(1.0, 4))
    seconds = room.train_steps(5, lr=1e-4 if room.name == "smollm2" else 1e-3)
    assert [c.logprobs for c in room.engine.generate(stale, Sampling(1.0, 4))] != [c.logprobs for c in old]
    rows.append(("after 5 steps", *room.gaps(1.0, seed=1), *room.gaps(0.7, seed=2)))
    for label, *gaps in rows:
        print(f"{room.name} {label}: log-probs T=1 {gaps[0]:.1e}, T=.7 {gaps[2]:.1e}; z+ - z- T=1 {gaps[1]:.1e}, T=.7 {gaps[3]:.1e}")
        assert max(gaps) <= EXACT
    report = room.engine.last_sync
    print(
        f"{room.name}: sync and proof {np.median(seconds):.2f} s, of which proof {report.proof_seconds:.2f} s, canary {report.canary_gap:.1e}"
    )


def test_q_is_read_by_one_more_token(room):
    requests = room.requests(4, seed=7)
    for request, completion in zip(requests, room.engine.generate(requests, Sampling(0.7, 8)), strict=True):
        context = [*request.prompt_ids, *completion.token_ids]
        room.engine.submit(Request(99, context, 0), Sampling(1.0, 1))
        found = []
        while not found:
            found = room.engine.poll(0.0)
        assert abs(found[0][1].v_logit - room.scored(request.prompt_ids, completion.token_ids, 1.0)[2]) <= EXACT


def test_a_response_is_a_function_of_its_seed_alone(room):
    requests = room.requests(8, seed=9)
    together = room.engine.generate(requests, Sampling(1.0, 8))
    alone = [room.engine.generate([request], Sampling(1.0, 8))[0] for request in requests[:3]]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[:3]]
    other = room.engine.generate([dataclasses.replace(requests[0], seed=123456)], Sampling(1.0, 8))[0]
    assert other.token_ids != together[0].token_ids


def test_stop_ids_end_a_response_and_belong_to_it(room):
    request = room.requests(1, seed=11)[0]
    free = room.engine.generate([request], Sampling(1.0, 8))[0]
    stop = free.token_ids[3]
    cut = room.engine.generate([request], Sampling(1.0, 8, (stop,)))[0]
    assert (
        cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1] and cut.finish_reason == "stop" and free.finish_reason == "length"
    )


def test_the_prefix_cache_is_used(room):
    prompt = room.prompts(1, seed=13, low=130, high=131)[0]
    before = room.engine.stats.cached_tokens
    room.engine.generate([Request(0, prompt[:100], 1)], Sampling(1.0, 2))
    room.engine.generate([Request(0, prompt, 1)], Sampling(1.0, 2))
    assert room.engine.stats.cached_tokens - before >= 96


def test_a_skipped_sync_is_seen_however_small_the_step(room):
    with torch.no_grad():
        parameter = list(room.model.parameters())[5]
        parameter.view(-1)[7] += 1e-6
    with pytest.raises(RuntimeError, match="call weights_changed"):
        room.engine.generate(room.requests(1), Sampling(1.0, 1))
    with pytest.raises(WeightMismatch, match="1 of the engine's .* the weights were not synced"):
        room.engine.sync.prove(fresh=False)
    room.engine.weights_changed()
    assert room.engine.sync.prove(fresh=False) <= EXACT


def test_a_skipped_cache_reset_is_seen(room, monkeypatch):
    monkeypatch.setattr(room.engine, "reset_prefix_cache", lambda: True)
    with pytest.raises(WeightMismatch, match=r"found \d+ tokens of the canary prompt in its prefix cache"):
        room.engine.weights_changed()
    monkeypatch.undo()
    room.engine.weights_changed()


def test_stale_keys_and_values_are_seen_by_the_canary_too(room, monkeypatch):
    """The same skipped reset after a real step, with the count of cached tokens hidden."""
    with torch.no_grad():
        for parameter in room.model.parameters():
            parameter.mul_(1.05)
    canary = room.engine.canary
    monkeypatch.setattr(room.engine, "reset_prefix_cache", lambda: True)
    monkeypatch.setattr(
        room.engine, "canary", lambda prompts, n: [dataclasses.replace(answer, cached_tokens=0) for answer in canary(prompts, n)]
    )
    with pytest.raises(WeightMismatch, match="its log-probs differ by"):
        room.engine.weights_changed()
    monkeypatch.undo()
    with torch.no_grad():
        for parameter in room.model.parameters():
            parameter.div_(1.05)
    room.engine.weights_changed()


def test_bad_requests_are_refused(room):
    sampling, limit = Sampling(1.0, 4), room.engine.max_context_tokens
    with pytest.raises(ValueError, match="value token"):
        room.engine.generate([Request(0, [room.banned[0]], 1)], sampling)
    with pytest.raises(ValueError, match="leave room for a response"):
        room.engine.generate([Request(0, [5] * limit, 1)], sampling)
    with pytest.raises(ValueError, match=r"must be 0 \(greedy\) or in \[0.01, 2\]"):
        room.engine.generate(room.requests(1), Sampling(3.0, 4))
    with pytest.raises(RuntimeError, match="has a vLLM engine already"):
        VLLMEngine(room.model, value_token_ids=room.banned, max_context_tokens=limit)
    full = room.engine.generate([Request(0, [5] * (limit - 2), 1)], sampling)[0]
    assert len(full.token_ids) == 2, "prompt and response never exceed the context"


def test_weights_that_diverged_are_named(room):
    parameter = list(room.model.parameters())[0]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(torch.nan)
    with pytest.raises((FloatingPointError, WeightMismatch)):
        room.engine.weights_changed()
    with torch.no_grad():
        parameter.copy_(kept)
    room.engine.weights_changed()


def test_an_engine_that_died_comes_back_with_the_current_weights(room, monkeypatch):
    requests = room.requests(4, seed=17)
    expected = room.engine.generate(requests, Sampling(1.0, 6))
    monkeypatch.setattr(room.engine._llm.llm_engine, "step", lambda: (_ for _ in ()).throw(MemoryError("out of memory")))
    with pytest.raises(EngineDied, match="out of memory"):
        room.engine.generate(requests, Sampling(1.0, 6))
    began = time.perf_counter()
    room.engine.restart()
    print(f"\n{room.name}: restarted and proved in {time.perf_counter() - began:.1f} s")
    assert [c.token_ids for c in room.engine.generate(requests, Sampling(1.0, 6))] == [c.token_ids for c in expected]


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_trap_of_the_tied_head_is_found_at_the_start(monkeypatch, everywhere):
    """vLLM's default on CPU: layers compute with packed copies of their weights, which new weights never reach. The head keeps the parameter
    beside its copy, so that loading succeeds, in vain; the other layers drop it, and refuse to load."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    from sapo_fast.rollout import vllm_worker

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def packed(layer, remove_weight):
        monkeypatch.setattr(ops, "_supports_onednn", everywhere or not remove_weight)
        dispatch(layer, remove_weight)

    monkeypatch.setattr(vllm_worker, "keep_plain_weights", lambda: None)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", packed)
    monkeypatch.setattr(ops, "_supports_onednn", True)
    found = "could not load the weights" if everywhere else "bit for bit, yet its log-probs differ by"
    with pytest.raises(WeightMismatch, match=found) as caught:
        VLLMEngine(prepare_whole(tiny(tied=True)), value_token_ids=(513, 514), max_context_tokens=400, max_live=4)
    print(f"\n{caught.value}")


def prepare_whole(model):
    prepare(model)
    return model


def test_lora_is_merged_on_the_way():
    peft = pytest.importorskip("peft")
    model = prepare_whole(tiny(tied=False))
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False))
    lora.eval()
    names = dict(weight_sync.named_weights(lora))
    assert names.keys() == {name for name, _ in tiny(tied=False).named_parameters()}
    engine = VLLMEngine(lora, value_token_ids=(513, 514), max_context_tokens=400, max_live=4)
    try:
        made = Room("lora", lora, (513, 514), engine, 515)
        assert max(made.gaps(1.0)) <= EXACT
        with torch.no_grad():
            for name, parameter in lora.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(3.0)
        engine.weights_changed()
        assert max(made.gaps(1.0)) <= EXACT
    finally:
        engine.close()
