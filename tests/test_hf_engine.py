"""The transformers engine: every sampled token's log-prob against a plain forward of the whole sequence, the sampler, and the cache."""

import itertools

import numpy as np
import pytest
import torch
from helpers_models import VOCAB, tiny_model

from sapo_fast.rollout import hf
from sapo_fast.rollout.engine import Request, Sampling
from sapo_fast.rollout.hf import HFEngine
from sapo_fast.rollout.sampler import derive_seed, draw, uniforms

BANNED = (VOCAB - 2, VOCAB - 1)
STOPS = tuple(range(3, 12))


def engine_for(model, **options):
    return HFEngine(model, value_token_ids=BANNED, **{"max_context_tokens": 300, **options})


def rescore(reference, prompt, completion, temperature):
    """Log-probs of a response by one forward of an untouched model over prompt + response."""
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([list(prompt) + completion.token_ids])).logits[0].float()
    logits[:, list(BANNED)] = -torch.inf
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    first = len(prompt) - 1
    return [logprobs[first + i, token].item() for i, token in enumerate(completion.token_ids)]


def assert_exact(reference, requests, completions, temperature=1.0):
    for request, completion in zip(requests, completions, strict=True):
        expected = rescore(reference, request.prompt_ids, completion, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5 / (temperature or 1.0))  # the logits' rounding, over T


def text(rng, low, high):
    return rng.integers(0, VOCAB - 2, int(rng.integers(low, high))).tolist()


def rescored_turns(kind, heads, kv_heads, temperature, options, turns=6, episodes=12):
    """Plays turns of growing contexts with gaps, divergences and endings; asserts every log-prob. Returns the engine."""
    model, reference = (tiny_model(kind, heads=heads, kv_heads=kv_heads) for _ in range(2))
    engine, rng = engine_for(model, **options), np.random.default_rng(0)
    contexts = {key: text(rng, 1, 40) for key in range(episodes)}
    sampling = Sampling(temperature, 7, STOPS)
    for turn in range(turns):
        chosen = [key for key in contexts if (key + turn) % 4]  # some episodes sit a turn out
        rng.shuffle(chosen)
        requests = [Request(key, contexts[key], int(rng.integers(1 << 62))) for key in chosen]
        completions = engine.generate(requests, sampling)
        assert_exact(reference, requests, completions, temperature)
        for request, completion in zip(requests, completions, strict=True):
            kept = list(request.prompt_ids) + completion.token_ids
            if (request.key + turn) % 5 == 0:  # a windowed history: the next prompt diverges in the middle
                kept = kept[: max(1, len(kept) // 2)]
            contexts[request.key] = kept + text(rng, 1, 14)
        if turn == 2:  # some episodes end and others begin
            engine.release([0, 1])
            contexts |= {key: text(rng, 5, 60) for key in (0, 1)}
    return engine


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "temperature", "options"),
    [
        ("qwen2", 4, 2, 1.0, {}),
        ("llama", 4, 4, 0.7, {}),
        ("qwen2", 4, 1, 0.4, {"max_batch": 5, "max_slots": 8}),
        ("llama", 4, 2, 0.0, {"max_batch": 3}),
    ],
)
def test_logprobs_equal_a_plain_forward(kind, heads, kv_heads, temperature, options):
    engine = rescored_turns(kind, heads, kv_heads, temperature, options)
    assert 0 < engine.stats.cached_tokens < engine.stats.prompt_tokens
    assert (engine.stats.evictions > 0) == ("max_batch" in options)


def test_small_groups_and_many_forwards(monkeypatch):
    """The limits that split a prefill, drawn so tight that every path splits."""
    monkeypatch.setattr(hf, "_PREFILL_TOKENS", 50)
    monkeypatch.setattr("sapo_fast.rollout.kv_cache._MASK_ELEMENTS", 600)
    rescored_turns("qwen2", 4, 2, 1.0, {})


def test_a_turn_computes_its_new_tokens_only():
    engine = engine_for(tiny_model())
    prompt = list(range(20))
    first = engine.generate([Request(7, prompt, 1)], Sampling(1.0, 5))[0]
    longer = prompt + first.token_ids + [1, 2, 3]
    engine.generate([Request(7, longer, 2)], Sampling(1.0, 5))
    assert engine.stats.prompt_tokens == 20 + 28
    assert engine.stats.cached_tokens == 20 + 4  # the last sampled token had not been run
    engine.release([7])
    engine.generate([Request(7, longer, 2)], Sampling(1.0, 5))
    assert engine.stats.cached_tokens == 24


def test_the_same_prompt_again_runs_its_last_token():
    model, reference = tiny_model(), tiny_model()
    engine = engine_for(model)
    request = Request(0, list(range(30)), 5)
    one, two = (engine.generate([request], Sampling(1.0, 6))[0] for _ in range(2))
    assert one.token_ids == two.token_ids and engine.stats.cached_tokens == 29
    assert_exact(reference, [request], [two])


@pytest.mark.parametrize("extra", [0, 4])
def test_a_shared_prefix_is_computed_once(extra):
    model, reference = tiny_model(), tiny_model()
    engine, rng = engine_for(model), np.random.default_rng(1)
    system = text(rng, 80, 81)
    requests = [Request(key, system + text(rng, 3, 20), key) for key in range(6)]
    if extra:  # one of them is there already, and holds the prefix
        engine.generate(requests[:1], Sampling(1.0, extra))
    held = engine.stats.cached_tokens
    completions = engine.generate(requests, Sampling(1.0, 5))
    assert_exact(reference, requests, completions)
    assert engine.stats.cached_tokens - held >= 6 * 80
    requests = [Request(r.key, list(r.prompt_ids) + c.token_ids + [4, 5], 9) for r, c in zip(requests, completions, strict=True)]
    assert_exact(reference, requests, engine.generate(requests, Sampling(1.0, 5)))


def test_weights_changed_drops_the_cache():
    model, moved = tiny_model(), tiny_model(seed=3)
    engine = engine_for(model)
    prompt = list(range(40))
    engine.generate([Request(0, prompt, 1)], Sampling(1.0, 4))
    model.load_state_dict(moved.state_dict())
    longer = Request(0, prompt + [5, 6], 2)
    stale = engine.generate([longer], Sampling(1.0, 4))[0]
    gap = np.abs(np.array(stale.logprobs) - rescore(moved, longer.prompt_ids, stale, 1.0)).max()
    assert gap > 1e-2  # without the call the old keys are still there: this is what the call is for
    engine.weights_changed()
    assert_exact(moved, [longer], engine.generate([longer], Sampling(1.0, 4)))


def test_same_seed_same_response_alone_or_in_a_batch():
    rng = np.random.default_rng(2)
    requests = [Request(key, text(rng, 2, 60), int(rng.integers(1 << 62))) for key in range(17)]
    together = engine_for(tiny_model()).generate(requests, Sampling(1.0, 20, STOPS))
    chunked = engine_for(tiny_model(), max_batch=4).generate(requests, Sampling(1.0, 20, STOPS))
    for request, a, b in zip(requests, together, chunked, strict=True):
        alone = engine_for(tiny_model()).generate([request], Sampling(1.0, 20, STOPS))[0]
        assert alone.token_ids == a.token_ids == b.token_ids
    assert len({tuple(c.token_ids) for c in together}) == 17
    other = engine_for(tiny_model()).generate([Request(0, requests[0].prompt_ids, requests[0].seed + 1)], Sampling(1.0, 20))[0]
    assert other.token_ids != together[0].token_ids


def test_stop_ids_budget_and_context():
    engine = engine_for(tiny_model(), max_context_tokens=40)
    done = engine.generate([Request(k, [1, 2, 3 + k], k) for k in range(40)], Sampling(1.0, 15, STOPS))
    for completion in done:
        assert not set(completion.token_ids[:-1]) & set(STOPS)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in STOPS else "length")
        assert len(completion.token_ids) == len(completion.logprobs) == 15 or completion.finish_reason == "stop"
    assert {c.finish_reason for c in done} == {"stop", "length"}
    room = engine.generate([Request(50, list(range(35)), 0), Request(51, list(range(39)), 0), Request(52, [1], 0)], Sampling(1.0, 12))
    assert [len(c.token_ids) for c in room] == [5, 1, 12]
    with pytest.raises(ValueError, match="request 3: the prompt has 40 tokens"):
        engine.generate([Request(3, list(range(40)), 0)], Sampling())


def test_greedy_takes_the_largest_allowed_logit():
    model, reference = tiny_model("llama"), tiny_model("llama")
    for m in (model, reference):
        m.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB).index_fill_(0, torch.tensor(BANNED), 50.0))
    request = Request(0, [1, 2, 3], 0)
    done = engine_for(model).generate([request], Sampling(0.0, 10))[0]
    ids = [1, 2, 3]
    for token in done.token_ids:
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([ids])).logits[0, -1]
        logits[list(BANNED)] = -torch.inf
        assert token == logits.argmax().item()
        ids.append(token)
    assert_exact(reference, [request], [done], 1.0)


def test_value_tokens_are_never_generated_however_likely():
    model, reference = tiny_model("llama"), tiny_model("llama")
    for m in (model, reference):
        m.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB).index_fill_(0, torch.tensor(BANNED), 50.0))
    requests = [Request(k, [1, 2, k], k) for k in range(64)]
    done = engine_for(model).generate(requests, Sampling(1.0, 30))
    assert not {t for c in done for t in c.token_ids} & set(BANNED)
    assert_exact(reference, requests, done)


def test_token_i_of_a_response_is_drawn_by_number_i_of_its_seed():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every allowed id is equally likely, so the drawn number is the id
    requests = [Request(k, [1, 2], 1000 + k) for k in range(8)]
    for request, completion in zip(requests, engine_for(model).generate(requests, Sampling(1.0, 25)), strict=True):
        drawn = [uniforms(np.array([request.seed], dtype=np.uint64), i)[0] for i in range(25)]
        assert completion.token_ids == [int(u * (VOCAB - 2)) for u in drawn]


# ---- the sampler --------------------------------------------------------------------------------------------------------------------


def draws(logits, count, temperature=1.0, banned=(3, 7)):
    """``count`` draws from one row of logits, seeds 0.. and indices 0..99."""
    seeds = np.arange(count // 100, dtype=np.uint64)
    rows = logits.expand(len(seeds), -1)
    return torch.cat([draw(rows, torch.tensor(banned), uniforms(seeds, i), temperature)[0] for i in range(100)])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_sampler_follows_the_distribution(temperature):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    logits[0, [3, 7]] = 50.0
    logits[0, 20] = -torch.inf
    counts = torch.bincount(draws(logits, 100_000, temperature), minlength=40).double()
    masked = logits[0].double().clone()
    masked[[3, 7]] = -torch.inf
    expected = 100_000 * (masked / temperature).softmax(0)
    assert counts[[3, 7, 20]].tolist() == [0, 0, 0]
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum().item()
    freedom = int(used.sum()) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_extreme_uniforms_stay_on_the_support():
    logits = torch.full((2, 9), -torch.inf)
    logits[:, [2, 5]] = torch.tensor([0.0, 1.0])
    logits[:, 8] = 50.0
    ids, logprobs = draw(logits, torch.tensor([8, 0]), np.array([0.0, 1 - 2.0**-53]), 1.0)
    assert ids.tolist() == [2, 5]
    torch.testing.assert_close(logprobs, torch.tensor([0.0, 1.0]).log_softmax(0))
    # Probabilities rounded in float32 add up to a little more or less than 1: the last draw must still find an id.
    rows = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    rows[:, 30:] = -torch.inf
    ids, logprobs = draw(rows, torch.tensor([0, 1]), np.full(300, 1 - 2.0**-53), 1.0)
    assert ids.max() == 29 and logprobs.isfinite().all()


def test_cumulative_sums_are_fine_enough_for_large_vocabularies():
    size, chosen = 200_000, np.arange(5, 200_000, 397)
    ids, _ = draw(torch.zeros(1, size).expand(len(chosen), -1), torch.tensor([0, 1]), (chosen - 2 + 1e-3) / (size - 2), 1.0)
    assert np.array_equal(ids.numpy(), chosen)


def test_blocks_of_rows_draw_the_same(monkeypatch):
    logits, u = torch.randn(23, 40, generator=torch.Generator().manual_seed(0)), uniforms(np.arange(23, dtype=np.uint64), 3)
    whole = draw(logits, torch.tensor([1, 2]), u, 1.0)
    monkeypatch.setattr("sapo_fast.rollout.sampler._FLOAT64_ELEMENTS", 200)
    for a, b in zip(whole, draw(logits, torch.tensor([1, 2]), u, 1.0), strict=True):
        assert torch.equal(a, b)


def test_uniforms_are_pure_and_uncorrelated():
    seeds = np.arange(2000, dtype=np.uint64)
    table = np.stack([uniforms(seeds, i) for i in range(50)], 1)
    assert np.array_equal(uniforms(seeds[17:18], 4), table[17:18, 4])
    assert table.min() >= 0 and table.max() < 1 and len(np.unique(table)) == table.size
    assert abs(table.mean() - 0.5) < 0.005 and abs(table.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.01  # neighbouring seeds
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.01  # neighbouring tokens
    derived = {derive_seed(s, i) for s in range(-50, 50) for i in range(50)}
    assert len(derived) == 5000 and derive_seed(3, 4) == derive_seed(3, 4) and all(0 <= s < 1 << 64 for s in derived)


# ---- bad input, bad weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "sampling", "message"),
    [
        ([Request(0, [1], 0), Request(0, [2], 0)], Sampling(), "same key"),
        ([Request(0, [], 0)], Sampling(), "prompt has 0 tokens"),
        ([Request(0, [1, VOCAB], 0)], Sampling(), "prompt ids must be in"),
        ([Request(0, [1, -1], 0)], Sampling(), "prompt ids must be in"),
        ([Request(0, [1, BANNED[1]], 0)], Sampling(), "holds a value token"),
        ([Request(0, [1], 0)], Sampling(temperature=-1.0), "temperature must be"),
        ([Request(0, [1], 0)], Sampling(temperature=float("nan")), "temperature must be"),
        ([Request(0, [1], 0)], Sampling(max_new_tokens=0), "max_new_tokens must be"),
        ([Request(0, [1], 0)], Sampling(stop_ids=(BANNED[0],)), "never sampled"),
    ],
)
def test_bad_requests(requests, sampling, message):
    with pytest.raises(ValueError, match=message):
        engine_for(tiny_model()).generate(requests, sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_token_ids": (5, 5)}, "two different rows"),
        ({"value_token_ids": (5, VOCAB)}, "two different rows"),
        ({"max_context_tokens": 1}, "max_context_tokens must be"),
        ({"max_context_tokens": 513}, "max_position_embeddings = 512; got 513"),
        ({"max_batch": 0}, "max_batch at least 1"),
        ({"max_batch": 4, "max_slots": 3}, "max_slots must be at least max_batch = 4"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        HFEngine(tiny_model(), **{"value_token_ids": BANNED, "max_context_tokens": 100, **options})


def test_no_requests():
    assert engine_for(tiny_model()).generate([], Sampling()) == []


def test_diverged_weights_are_reported_and_leave_nothing_behind():
    model, reference = tiny_model(), tiny_model()
    engine = engine_for(model)
    requests = [Request(k, list(range(30 - k)), k) for k in range(4)]
    engine.generate(requests, Sampling(1.0, 5))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.fill_(torch.nan)
    engine.weights_changed()
    with pytest.raises(FloatingPointError, match="request 0: the model's logits are not finite"):
        engine.generate(requests, Sampling(1.0, 5))
    model.load_state_dict(reference.state_dict())
    engine.weights_changed()
    shorter = [Request(k, list(range(9 + k)), k) for k in range(4)]
    assert_exact(reference, shorter, engine.generate(shorter, Sampling(1.0, 5)))


def test_an_interrupted_forward_leaves_a_usable_engine(monkeypatch):
    model, reference = tiny_model(), tiny_model()
    model.train()
    engine = engine_for(model)
    requests = [Request(k, list(range(20 + k)), k) for k in range(4)]
    engine.generate(requests, Sampling(1.0, 4))
    real = hf.run_decoder
    for stop_at in (1, 3):  # in the prefill, in the third forward
        forwards = itertools.count(1)

        def interrupted(*args, forwards=forwards, stop_at=stop_at):
            out = real(*args)
            if next(forwards) == stop_at:
                raise KeyboardInterrupt
            return out

        with monkeypatch.context() as patch:
            patch.setattr(hf, "run_decoder", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([Request(k, list(range(10 + k)) + [50 + k] * 15, k) for k in range(4)], Sampling(1.0, 4))
        assert_exact(reference, requests, engine.generate(requests, Sampling(1.0, 4)))
    assert model.training  # put back, also after the interruption
