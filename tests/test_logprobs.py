"""token_logprobs: values and both gradients against the reference, and the same bits as fused_loss."""

import pytest
import torch
from helpers_ops import FORMS, HALF_FLOOR, WIDE, as_logits, cast, error, problem, up

from sapo_fast import fused_loss, reference, row_pass, token_logprobs

KEYS = (*WIDE, "value_token_ids", "action_rows", "actions")


def run(fn, p, *, up_logprob=None, up_entropy=None, temperature=0.8):
    leaves = {k: p[k].detach().clone().requires_grad_() for k in WIDE if p.get(k) is not None}
    logprob, entropy = fn(**{k: leaves.get(k, p.get(k)) for k in KEYS}, temperature=temperature)
    total = 0
    if up_logprob is not None:
        total = total + (logprob * up_logprob.to(logprob.dtype)).sum()
    if up_entropy is not None:
        total = total + (entropy * up_entropy.to(entropy.dtype)).sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {"logprobs": logprob.detach(), "entropy": entropy.detach()} | {f"d_{k}": g for k, g in zip(leaves, grads, strict=True)}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setitem(row_pass.BLOCK_BYTES, "cpu", 2 * 37 * 8)
    monkeypatch.setitem(row_pass.CHUNK_BYTES, "cpu", 3 * 37 * 8)


@pytest.mark.parametrize("which", ["logprob", "entropy", "both"])
@pytest.mark.parametrize("form", FORMS)
def test_float64_equals_the_reference(form, which, small_blocks):
    for seed in range(3):
        p = FORMS[form](problem(seed, bias=seed == 0))
        weights = {"up_logprob": None if which == "entropy" else torch.randn(11, dtype=torch.float64)}
        weights["up_entropy"] = None if which == "logprob" else torch.randn(11, dtype=torch.float64)
        found, right = run(token_logprobs, p, **weights), run(reference.token_logprobs, p, **weights)
        assert found["logprobs"].dtype == torch.float64
        assert all(error(found[k], right[k]) < 1e-12 for k in right)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_by_finite_differences(form, small_blocks):
    p = FORMS[form](problem(3, T=7, V=13, N=8))
    names = [k for k in WIDE if k in p]
    rest = {k: p[k] for k in ("value_token_ids", "action_rows", "actions")}
    leaves = [p[k].clone().requires_grad_() for k in names]
    assert torch.autograd.gradcheck(lambda *xs: token_logprobs(**dict(zip(names, xs, strict=True)), **rest, temperature=1.7), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_error_is_no_worse_than_plain_torch(form, dtype):
    for seed in range(4):
        p = cast(FORMS[form](problem(seed, T=40, N=30, V=301, H=32, scale=0.5)), dtype)
        weights = {"up_logprob": torch.randn(30), "up_entropy": torch.randn(30)}
        right = run(reference.token_logprobs, up(p), **weights)
        plain, found = run(reference.token_logprobs, p, **weights), run(token_logprobs, p, **weights)
        assert found["logprobs"].dtype == found["entropy"].dtype == torch.float32
        for k in right:
            assert error(found[k], right[k]) <= 3 * error(plain[k], right[k]) + 4 * HALF_FLOOR[dtype], k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_as_fused_loss(form, dtype):
    p = cast(FORMS[form](problem(4, T=50, N=40, V=301)), dtype)
    out = fused_loss(**p)
    logprob, entropy = token_logprobs(**{k: p[k] for k in KEYS if k in p})
    assert torch.equal(out.logprobs, logprob) and torch.equal(out.entropy, entropy)


def test_only_what_asks_for_a_gradient_gets_one():
    p = cast(problem(5), torch.float32)
    hidden = p["hidden"].clone().requires_grad_()
    args = {k: p[k] for k in KEYS if k in p} | {"hidden": hidden}
    logprob, entropy = token_logprobs(**args)
    logprob.sum().backward()  # the entropy's gradient is never asked
    assert hidden.grad is not None and p["lm_head"].grad is None
    with torch.no_grad():
        assert not token_logprobs(**args)[0].requires_grad
    assert token_logprobs(**args, entropy=False)[1] is None


def test_broadcast_upstream_gradient():
    """.sum() and .mean() hand down stride-0 gradients."""
    p = as_logits(problem(6))
    z = p["logits"].clone().requires_grad_()
    args = {k: p[k] for k in ("value_token_ids", "action_rows", "actions")}
    logprob, entropy = token_logprobs(logits=z, **args)
    (a,) = torch.autograd.grad(logprob.sum() - entropy.mean(), z, retain_graph=True)
    weights = torch.ones(11, dtype=torch.float64), torch.full((11,), 1 / 11, dtype=torch.float64)
    (b,) = torch.autograd.grad((logprob * weights[0]).sum() - (entropy * weights[1]).sum(), z)
    assert torch.allclose(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form):
    p = FORMS[form](problem(7))
    leaves = {k: p[k].requires_grad_() for k in WIDE if p.get(k) is not None}
    none = torch.zeros(0, dtype=torch.int64)
    logprob, entropy = token_logprobs(**leaves, value_token_ids=p["value_token_ids"], action_rows=none, actions=none)
    assert logprob.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(logprob.sum() + entropy.sum(), list(leaves.values()))
    assert all((g == 0).all() for g in grads)


def test_row_at_a_time_and_all_at_once_are_the_same_bits():
    """From logits a row's numbers do not depend on the rows beside it, whatever the number of threads."""
    z = torch.randn(30, 70001) * 5
    at = {"value_token_ids": (0, 1), "actions": torch.randint(2, 70001, (30,))}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        logprob, entropy = token_logprobs(logits=z, action_rows=torch.arange(30), **at)
        for i in range(0, 30, 7):
            one = token_logprobs(logits=z, action_rows=torch.tensor([i]), value_token_ids=(0, 1), actions=at["actions"][i : i + 1])
            assert torch.equal(one[0], logprob[i : i + 1]) and torch.equal(one[1], entropy[i : i + 1])


def test_compiles_without_a_break():
    p = cast(problem(8), torch.float32)
    args = {k: p[k] for k in KEYS if k in p and k != "hidden"}
    torch._dynamo.reset()
    h = p["hidden"].clone().requires_grad_()
    logprob, entropy = torch.compile(lambda h: token_logprobs(hidden=h, **args), fullgraph=True, backend="aot_eager")(h)
    (g,) = torch.autograd.grad(logprob.sum() + entropy.sum(), h)
    right = token_logprobs(hidden=h, **args)
    assert torch.equal(logprob, right[0])
    assert error(g, torch.autograd.grad(right[0].sum() + right[1].sum(), h)[0]) < 1e-6
