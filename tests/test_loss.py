"""fused_loss against the float64 reference: values, gradients, metrics, types, repeats, splits, extremes."""

import math

import pytest
import torch
from helpers_ops import CONFIGS, FORMS, HALF_FLOOR, WIDE, as_logits, assert_as_good, cast, error, logits_of, problem, run, up

from sapo_fast import MAX_METRICS, LossConfig, fused_loss, loss_terms, reference, row_pass, token_logprobs

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def small_blocks(monkeypatch):
    """Two rows a block, three rows a chunk at V = 37 in float64, so that every loop turns several times."""
    monkeypatch.setitem(row_pass.BLOCK_BYTES, "cpu", 2 * 37 * 8)
    monkeypatch.setitem(row_pass.CHUNK_BYTES, "cpu", 3 * 37 * 8)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("form", FORMS)
def test_float64_equals_the_reference(form, config, small_blocks):
    for seed in range(4):
        p = FORMS[form](problem(seed, bias=seed % 2 == 0))
        found, right = run(fused_loss, p, config=config), run(reference.fused_loss, p, config=config)
        assert set(found) == set(right)
        for name in right:
            # Outputs and metrics are float32 by contract; the loss and the gradients carry float64.
            limit = 1e-12 if name == "loss" or name.startswith("d_") else 2e-7
            assert error(found[name], right[name]) <= limit, name


@pytest.mark.parametrize("config", [CONFIGS["default"], CONFIGS["all on"]], ids=["default", "all on"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_by_finite_differences(form, config, small_blocks):
    p = FORMS[form](problem(3, T=8, V=13, N=9, M=3))
    # Stay away from the kinks, where a finite difference straddles two slopes: ratios by the clips, values by theirs.
    p["old_logprobs"] = p["old_logprobs"] + 0.013
    names = [k for k in WIDE if k in p]
    leaves = [p[k].clone().requires_grad_() for k in names]
    assert torch.autograd.gradcheck(lambda *xs: fused_loss(**{**p, **dict(zip(names, xs, strict=True))}, config=config).loss, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_error_is_no_worse_than_plain_torch(form, dtype):
    for seed in range(6):
        config = list(CONFIGS.values())[seed % len(CONFIGS)]
        p = cast(FORMS[form](problem(seed, T=40, N=30, M=8, V=301, H=32, scale=0.5)), dtype)
        right = run(reference.fused_loss, up(p), config=config)
        plain, found = run(reference.fused_loss, p, config=config), run(fused_loss, p, config=config)
        assert found["loss"].dtype == torch.float32
        assert all(found[k].dtype == torch.float32 for k in ("logprobs", "entropy", "v", "q"))
        assert all(found[f"d_{k}"].dtype == dtype and found[f"d_{k}"].shape == p[k].shape for k in WIDE if p.get(k) is not None)
        # Fractions count decisions, which half-precision logits can turn over; they are held to the float64 test above.
        fractions = tuple(k for k in right if k.endswith(("fraction", "fraction_low", "fraction_high")))
        assert_as_good(found, plain, right, floor=4 * HALF_FLOOR[dtype], skip=fractions)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_repeated_rows_add(form, dtype, small_blocks):
    p = problem(7, T=5, N=23, M=9)  # every row several times, the same action too
    p["actions"][:6] = p["actions"][0]
    p["action_rows"][:6] = 2
    p = cast(FORMS[form](p), dtype)
    right = run(reference.fused_loss, up(p))
    if dtype == torch.float64:
        found = run(fused_loss, p)
        assert all(error(found[k], right[k]) < 1e-12 for k in right if k.startswith("d_"))
    else:
        assert_as_good(run(fused_loss, p), run(reference.fused_loss, p), right, floor=4 * HALF_FLOOR[dtype], skip=tuple(
            k for k in right if "fraction" in k))  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_micro_batching_gives_the_same_loss_metrics_and_gradients(form):
    whole = cast(FORMS[form](problem(8, T=24, N=20, M=7)), torch.float32)
    config = LossConfig(entropy_coef=0.05)
    right = run(fused_loss, whole, config=config)
    for seed, kind in enumerate((float, torch.tensor)):
        g = torch.Generator().manual_seed(seed)
        part_of_token, part_of_turn = torch.randint(0, 4, (20,), generator=g), torch.randint(0, 4, (7,), generator=g)
        total: dict[str, torch.Tensor] = {}
        for part in range(5):  # the last has no tokens and no turns
            token, turn = part_of_token == part, part_of_turn == part
            piece = {}
            for k, v in whole.items():
                mask = turn if k[:2] in ("v_", "q_") else token
                piece[k] = v if k in WIDE or not isinstance(v, torch.Tensor) else v[mask]
            found = run(fused_loss, piece, config=config, num_tokens=kind(20), num_turns=kind(7))
            for k in ("loss", *(k for k in found if k.startswith(("d_", "metric")))):
                most = k.removeprefix("metric ") in MAX_METRICS
                total[k] = torch.maximum(total[k], found[k]) if most and k in total else total.get(k, 0) + found[k]
        for k, v in total.items():
            assert error(v, right[k]) < 2e-6, k


def test_chunk_and_block_sizes_do_not_matter(monkeypatch):
    p = problem(9, N=29)
    right = run(fused_loss, p)
    for rows in (1, 2, 7, 29, 1000):
        monkeypatch.setitem(row_pass.CHUNK_BYTES, "cpu", rows * 37 * 8)
        monkeypatch.setitem(row_pass.BLOCK_BYTES, "cpu", rows * 37 * 8)
        found = run(fused_loss, p)
        assert all(error(found[k], right[k]) < 1e-12 for k in right if k == "loss" or k.startswith("d_"))


def test_many_chunks_do_not_wear_down_the_weight_gradient(monkeypatch):
    """A sum of 1024 equal parts: kept in bfloat16 it would stop growing after 256 of them."""
    monkeypatch.setitem(row_pass.CHUNK_BYTES, "cpu", 4 * 64 * 6)
    p = cast(problem(10, T=4096, N=4096, V=64, H=4, repeat=False, bias=False), torch.bfloat16)
    p |= {"hidden": torch.ones(4096, 4, dtype=torch.bfloat16), "actions": p["actions"][:1].expand(4096), "old_logprobs": None}
    p |= {"advantages": torch.ones(4096)}
    p = {k: v for k, v in p.items() if k[:2] not in ("v_", "q_") and k not in ("ref_logprobs", "token_weights")}
    config = LossConfig(kl_coef=0.0, entropy_coef=0.0)
    right = run(reference.fused_loss, up(p), config=config)["d_lm_head"]
    assert error(run(fused_loss, p, config=config)["d_lm_head"], right) < 2 * HALF_FLOOR[torch.bfloat16]


def test_row_permutation_and_shift_invariance():
    p = problem(11)
    right = run(fused_loss, as_logits(p))
    order = torch.randperm(11)
    per_token = ("action_rows", "actions", "old_logprobs", "advantages", "ref_logprobs", "token_weights")
    found = run(fused_loss, as_logits({**p, **{k: p[k][order] for k in per_token}}))
    assert error(found["d_logits"], right["d_logits"]) < 1e-12
    shifted = as_logits(p)
    shifted["logits"] = shifted["logits"] + 300 * torch.randn(17, 1, dtype=torch.float64)
    found = run(fused_loss, shifted)
    assert error(found["d_logits"], right["d_logits"]) < 1e-9 and error(found["loss"], right["loss"]) < 1e-9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["peaked on it", "peaked elsewhere", "high", "low", "minus infinity", "huge w+ w-", "action impossible"])
def test_extreme_logits(kind, dtype):
    p = as_logits(problem(13, T=12, N=12, repeat=False))
    z, n = p["logits"], torch.arange(12)
    plus, minus = p["value_token_ids"]
    if kind == "peaked on it":
        z[p["action_rows"], p["actions"]] += 60
    elif kind == "peaked elsewhere":
        z[p["action_rows"], (p["actions"] + 5) % 37] += 60
    elif kind in ("high", "low"):
        z += 300 if kind == "high" else -300
    elif kind == "minus infinity":
        banned = torch.rand(12, 37) < 0.7
        banned[p["action_rows"], p["actions"]] = False
        banned[:, [plus, minus]] = False
        z[banned] = -torch.inf
    elif kind == "huge w+ w-":
        z[:, plus] += 200
        z[:, minus] += 200
    else:
        z[p["action_rows"][n[:6]], p["actions"][:6]] = -torch.inf
        p["old_logprobs"] = p["old_logprobs"].clamp(-8, 0)
        p["ref_logprobs"] = p["ref_logprobs"].clamp(-8, 0)
    p = cast(p, dtype)
    config = LossConfig(entropy_coef=0.1)
    right, plain, found = (run(f, q, config=config) for f, q in ((reference.fused_loss, up(p)), (reference.fused_loss, p), (fused_loss, p)))
    impossible = kind == "action impossible"
    skip = tuple(k for k in right if "fraction" in k) + (("logprobs", "metric log_ratio_max_abs") if impossible else ())
    assert_as_good(found, plain, right, floor=8 * HALF_FLOOR[dtype], skip=skip)
    if impossible:
        assert torch.equal(found["logprobs"] == -torch.inf, right["logprobs"] == -torch.inf)
    if kind == "minus infinity":
        assert (found["d_logits"][p["logits"] == -torch.inf] == 0).all()


def test_probability_one_keeps_its_digits():
    """log q = -1e-20 and not 0, entropy and slopes too: relative error, against exact arithmetic on two tokens."""
    gap = 46.0
    z = torch.tensor([[gap, 0.0, 5.0, -3.0]], requires_grad=True)
    at = {"logits": z, "value_token_ids": (2, 3), "action_rows": torch.tensor([0]), "actions": torch.tensor([0])}
    out = fused_loss(**at, old_logprobs=None, advantages=torch.tensor([1.0]), config=LossConfig(kl_coef=0, entropy_coef=0))
    out.loss.backward()
    tiny = math.exp(-gap)
    assert float(out.logprobs) == pytest.approx(-tiny, rel=1e-6, abs=0)
    assert float(out.entropy) == pytest.approx(tiny * (1 + gap), rel=1e-6, abs=0)
    assert z.grad[0, 0] == pytest.approx(-tiny, rel=1e-6, abs=0) and z.grad[0, 1] == pytest.approx(tiny, rel=1e-6, abs=0)
    h = torch.autograd.grad(token_logprobs(**at)[1], z)[0]
    assert h[0, 1] == pytest.approx(gap * tiny, rel=1e-5, abs=0) and h[0, 0] == pytest.approx(-gap * tiny, rel=1e-5, abs=0)


def test_a_certain_row_that_repeats_gets_no_gradient():
    """One allowed token: its probability is 1 and every slope 0, in half precision too, however often the row comes."""
    for dtype in (torch.float32, torch.bfloat16):
        z = torch.tensor([[3.0, 1.0, 2.0]] * 2, dtype=dtype, requires_grad=True)
        rows = torch.tensor([0, 0, 1, 0])
        at = {"value_token_ids": (1, 2), "action_rows": rows, "actions": torch.zeros(4, dtype=torch.int64)}
        out = fused_loss(logits=z, **at, old_logprobs=None, advantages=torch.tensor([0.3, 0.7, -1.1, 0.2]), config=LossConfig(kl_coef=0.0))
        out.loss.backward()
        assert (z.grad == 0).all()


def test_the_policy_never_reads_the_value_tokens():
    p = cast(as_logits(problem(15)), torch.float32)
    p = {k: v for k, v in p.items() if k[:2] not in ("v_", "q_")}
    right = run(fused_loss, p)
    for junk in (torch.nan, torch.inf, -torch.inf, 1e30):
        q = {**p, "logits": p["logits"].clone()}
        q["logits"][:, list(p["value_token_ids"])] = junk
        found = run(fused_loss, q)
        assert all(torch.equal(found[k], right[k]) for k in right)
        assert (found["d_logits"][:, list(p["value_token_ids"])] == 0).all()


def test_float16_gradients_of_a_large_mean_do_not_vanish():
    """1 / num_tokens is below float16's smallest number for 1e8 tokens; a loss scale is applied upstream, as a grad scaler does."""
    p = cast(problem(21, T=30, N=20, V=64, H=16, repeat=False), torch.float16)
    right = run(reference.fused_loss, up(p), num_tokens=1e8, num_turns=1e8, upstream=2.0**27)
    for form in FORMS:
        q = FORMS[form](p)
        found = run(fused_loss, q, num_tokens=1e8, num_turns=1e8, upstream=2.0**27)
        for k in ("d_hidden", "d_lm_head") if form == "hidden" else ():
            assert error(found[k], right[k]) < 5e-3, k
        if form == "logits":
            assert float((found["d_logits"] != 0).float().mean()) > 0.3


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_learn_from(form):
    """N = 0, M = 0, or both: loss 0 with a graph, gradients 0."""
    p = cast(FORMS[form](problem(22)), torch.float32)
    none = {k: v[:0] if isinstance(v, torch.Tensor) and k not in WIDE else v for k, v in p.items()}
    found = run(fused_loss, none)
    assert float(found["loss"]) == 0 and all((found[k] == 0).all() for k in found if k.startswith(("d_", "metric")))
    found = run(fused_loss, none, num_tokens=0, num_turns=0)
    assert float(found["loss"]) == 0
    bare = {k: v for k, v in none.items() if k[:2] not in ("v_", "q_") and k != "ref_logprobs"}
    out = fused_loss(**{k: v.requires_grad_() if k in WIDE and v is not None else v for k, v in bare.items()})
    assert out.loss.requires_grad and out.v.shape == out.q.shape == (0,)
    only_values = {**none, **{k: p[k] for k in p if k[:2] in ("v_", "q_")}}
    found, right = run(fused_loss, only_values), run(reference.fused_loss, only_values)
    assert all(error(found[k], right[k]) < 1e-6 for k in right)


def test_old_logprobs_none_is_ratio_one():
    p = cast(problem(23), torch.float32)
    found, right = run(fused_loss, {**p, "old_logprobs": None}), run(reference.fused_loss, {**up(p), "old_logprobs": None})
    assert float(found["metric log_ratio_max_abs"]) == 0 and float(found["metric clip_fraction"]) == 0
    assert all(error(found[k], right[k]) < 1e-5 for k in right)


def test_value_terms_weigh_two_columns_only():
    """A value row that is no action row: gradient at w+ and w- alone, opposite."""
    p = as_logits(problem(25))
    p |= {k: p[k][:0] for k in ("action_rows", "actions", "old_logprobs", "advantages", "ref_logprobs", "token_weights")}
    g = run(fused_loss, p)["d_logits"]
    plus, minus = p["value_token_ids"]
    assert torch.equal(g[:, plus], -g[:, minus]) and (g[:, plus] != 0).any()
    others = [j for j in range(37) if j not in (plus, minus)]
    assert (g[:, others] == 0).all()


def test_policy_terms_are_the_reference_elementwise():
    """A dense grid over ratio and advantage, both sides of every kink and on it; slopes by autograd of the reference."""
    ratios = torch.tensor([1e-12, 0.1, 0.79, 0.8, 0.81, 1.0, 1.19, 1.2, 1.21, 2.9, 3.0, 3.1, 1e7, 1e12], dtype=torch.float64)
    adv = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)
    r, a = (x.flatten() for x in torch.meshgrid(ratios, adv, indexing="ij"))
    for config in CONFIGS.values():
        logp = r.log().requires_grad_()
        zero = torch.zeros_like(r)
        right = reference.policy_loss(logp, zero, a, config.clip_low, config.clip_high, config.dual_clip)
        (slope,) = torch.autograd.grad(right.sum(), logp)
        terms = loss_terms.token_terms(logp.detach(), loss_terms.Tokens(zero, a, None, None), config)
        assert torch.allclose(terms.policy, right.detach(), rtol=1e-14, atol=0)
        assert torch.allclose(terms.a, slope, rtol=1e-14, atol=0)


def test_value_terms_are_the_reference_elementwise():
    line = torch.linspace(-1.3, 1.3, 27, dtype=torch.float64)
    u, old, y = (x.flatten() for x in torch.meshgrid(line, line, torch.tensor([-1.0, 0.1, 2.0]).double(), indexing="ij"))
    for dtype in (torch.float64, torch.float32):
        for readout in ("linear", "clip"):
            z = u.to(dtype).requires_grad_()
            v = z.clamp(-1, 1) if readout == "clip" else z
            right = reference.value_loss(v, old.to(dtype), y.to(dtype), 0.2)
            (slope,) = torch.autograd.grad(right.sum(), z)
            rows = loss_terms.ValueRows("v", torch.zeros(0), old.to(dtype), y.to(dtype), 0.2, 1.0, torch.tensor(1.0))
            terms = loss_terms.value_terms(z.detach(), rows, LossConfig(readout=readout))
            assert torch.equal(terms.loss, right.detach()) and torch.equal(terms.c, slope)


def test_outputs_are_detached_float32_and_values_in_reward_units():
    p = problem(29)
    out = fused_loss(**{**p, "hidden": p["hidden"].requires_grad_()})
    z, (plus, minus) = logits_of(p).detach(), p["value_token_ids"]
    assert torch.allclose(out.v.double(), 10 * (z[p["v_rows"], plus] - z[p["v_rows"], minus]), rtol=1e-6)
    for x in (out.logprobs, out.entropy, out.v, out.q, *out.metrics.values()):
        assert x.dtype == torch.float32 and not x.requires_grad


@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed, monkeypatch):
    """Random sizes, types, settings, chunks, repeats and extremes at once."""
    g = torch.Generator().manual_seed(1000 + seed)

    def draw(*choices):
        return choices[int(torch.randint(0, len(choices), (1,), generator=g))]

    V, T, N = draw(3, 4, 17, 64, 129), draw(1, 2, 30), draw(1, 2, 3, 16, 33)
    p = problem(seed, T=T, N=N, M=draw(0, 1, 5), V=V, H=draw(1, 3, 16), scale=draw(0.1, 1.0, 5.0), bias=draw(True, False))
    form = draw("hidden", "logits")
    p = FORMS[form](p)
    if form == "logits":
        if draw(True, False):
            p["logits"] = p["logits"] + 300 * torch.randn(T, 1, generator=g, dtype=torch.float64)
        if draw(True, False):
            spike = torch.randint(0, V, (T, 1), generator=g)
            p["logits"] = p["logits"].scatter_add(1, spike, torch.full((T, 1), 40.0, dtype=torch.float64))
    for k in ("ref_logprobs", "token_weights"):
        if draw(True, False):
            p[k] = None
    config = LossConfig(
        clip_low=draw(None, 0.0, 0.2), clip_high=draw(None, 0.28), dual_clip=draw(None, 3.0), v_clip=draw(None, 0.2), q_clip=draw(None, 0.05),
        v_coef=draw(0.0, 0.5), kl_coef=0.1 if p["ref_logprobs"] is not None else 0.0, entropy_coef=draw(0.0, 0.01), tau_v=draw(0.3, 1.0),
        r_max=draw(1.0, 10.0), readout=draw("linear", "clip"), temperature=draw(0.4, 1.0),
    )  # fmt: skip
    monkeypatch.setitem(row_pass.BLOCK_BYTES, "cpu", draw(1, 500, 10**6))
    monkeypatch.setitem(row_pass.CHUNK_BYTES, "cpu", draw(1, 700, 10**6))
    dtype = draw(torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if dtype == torch.float16:  # ratios near 1: exp(20) is beyond the type, whatever computes it
        keys = [k for k in (*WIDE, "value_token_ids", "action_rows", "actions") if k in p]
        logprob, _ = reference.token_logprobs(**{k: p[k] for k in keys}, temperature=config.temperature)
        for k in ("old_logprobs", "ref_logprobs"):
            if p[k] is not None:
                p[k] = -(logprob + 0.4 * torch.randn(N, generator=g, dtype=torch.float64)).abs()
    p = cast(p, dtype)
    scales = {"num_tokens": draw(None, 1000), "num_turns": draw(None, 77.0, torch.tensor(50))}
    right = run(reference.fused_loss, up(p), config=config, **scales)
    plain, found = run(reference.fused_loss, p, config=config, **scales), run(fused_loss, p, config=config, **scales)
    # Outputs and metrics are float32 by contract, whatever the input; decisions at a clip may turn over in half precision.
    skip = tuple(k for k in right if "fraction" in k)
    wide = {k: v.float() if k in ("logprobs", "entropy", "v", "q") or k.startswith("metric") else v for k, v in plain.items()}
    assert_as_good(found, wide, right, floor=max(16 * HALF_FLOOR[dtype], 1e-9), skip=skip)
