"""How fused_loss behaves beside its numbers: strides, memory, in-place, grad modes, determinism, compilation."""

import pytest
import torch
from helpers_ops import FORMS, WIDE, as_logits, cast, error, problem, run
from torch.utils._python_dispatch import TorchDispatchMode

from sapo_fast import fused_loss, row_pass


def _strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers behind unusual strides."""
    if kind == "padded" and x.dim() == 2:
        wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan, dtype=x.dtype)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]
    if kind == "transposed" and x.dim() == 2:
        return x.T.contiguous().T
    holed = torch.full((2 * x.shape[0] + 1, *x.shape[1:]), torch.nan if x.is_floating_point() else 999, dtype=x.dtype)
    holed[1::2] = x
    return holed[1::2]


@pytest.mark.parametrize("kind", ["padded", "transposed", "every other"])
@pytest.mark.parametrize("form", FORMS)
def test_strides_and_index_types_change_nothing(form, kind):
    p = cast(FORMS[form](problem(5)), torch.float32)
    right = run(fused_loss, p)
    leaves = {k: _strided(p[k], kind).requires_grad_() for k in WIDE if p.get(k) is not None}
    rest = {k: _strided(v, "every other") for k, v in p.items() if isinstance(v, torch.Tensor) and k not in WIDE}
    for k in ("action_rows", "actions", "v_rows", "q_rows"):
        rest[k] = rest[k].to(torch.int32)
    out = fused_loss(**{**p, **leaves, **rest})
    grads = torch.autograd.grad(out.loss, list(leaves.values()))
    assert torch.equal(out.logprobs, right["logprobs"]) or error(out.logprobs, right["logprobs"]) < 1e-6
    assert error(out.loss.detach(), right["loss"]) < 1e-6
    for k, g in zip(leaves, grads, strict=True):
        assert error(g, right[f"d_{k}"]) < 1e-6, k


def test_expanded_inputs():
    p = cast(as_logits(problem(5)), torch.float32)
    row = p["logits"][:1]
    flat = {**p, "logits": row.expand(17, -1), "advantages": p["advantages"][:1].expand(11), "v_targets": p["v_targets"][:1].expand(4)}
    same = {**flat, "logits": flat["logits"].contiguous(), "advantages": flat["advantages"].contiguous()}
    a, b = flat["logits"].requires_grad_(), same["logits"].requires_grad_()
    x, y = fused_loss(**{**flat, "logits": a}, inplace=True), fused_loss(**{**same, "logits": b})
    assert torch.equal(x.loss, y.loss)
    assert torch.equal(torch.autograd.grad(x.loss, a)[0], torch.autograd.grad(y.loss, b)[0])


@pytest.mark.parametrize("form", FORMS)
def test_three_dimensional_views_of_a_batch(form):
    """[S, B, V] transposed to batch first, flattened: what a sequence-first model gives."""
    p = cast(FORMS[form](problem(6, T=12)), torch.float32)
    key = "logits" if form == "logits" else "hidden"
    batch_first = p[key].reshape(3, 4, -1)
    sequence_first = batch_first.transpose(0, 1).contiguous()
    right, found = run(fused_loss, p), run(fused_loss, {**p, key: sequence_first.transpose(0, 1).flatten(0, 1)})
    assert torch.equal(found["loss"], right["loss"])


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_every_time(form):
    torch.set_num_threads(2)
    p = cast(FORMS[form](problem(12, T=60, N=400, V=501, H=16)), torch.float32)
    first = run(fused_loss, p)
    for _ in range(3):
        again = run(fused_loss, p)
        assert all(torch.equal(first[k], again[k]) for k in first)


@pytest.mark.parametrize("form", FORMS)
def test_unselected_rows_are_never_read_and_get_zero(form):
    p = cast(FORMS[form](problem(14)), torch.float32)
    key = "logits" if form == "logits" else "hidden"
    used = torch.zeros(17, dtype=torch.bool)
    for k in ("action_rows", "v_rows", "q_rows"):
        used[p[k]] = True
    assert not used.all()
    junk = {**p, key: p[key].clone()}
    junk[key][~used] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])[torch.randint(0, 4, (int((~used).sum()), 1))]
    right, found = run(fused_loss, p), run(fused_loss, junk)
    assert all(torch.equal(found[k], right[k]) for k in right)
    assert (found[f"d_{key}"][~used] == 0).all()
    if form == "logits":
        for inplace in (False, True):
            z = junk["logits"].clone().requires_grad_()
            fused_loss(**{**junk, "logits": z}, inplace=inplace).loss.backward()
            # In place a kernel makes its own coefficients: the same formulas, its own exp().
            assert torch.equal(z.grad, right["d_logits"]) or inplace and error(z.grad, right["d_logits"]) < 1e-6
            assert (z.grad[~used] == 0).all()


class _Allocations(TorchDispatchMode):
    """Shapes of everything computed inside."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.shapes.add(tuple(x.shape))
        return out


def test_memory_of_the_hidden_form(monkeypatch):
    """Never [T, V], never all of [N, V]; a frozen head costs no [V, H], frozen hidden states no [T, H]; no_grad neither."""
    T, N, V, H = 50, 24, 301, 4  # H below the 5 rows of a chunk, so that the head's transpose is not mistaken for logits
    monkeypatch.setitem(row_pass.CHUNK_BYTES, "cpu", 5 * V * 4)
    p = cast(problem(16, T=T, N=N, V=V, H=H, bias=False), torch.float32)
    for head_grad, hidden_grad, grad in ((True, True, True), (False, True, True), (True, False, True), (True, True, False)):
        hidden, head = p["hidden"].clone().requires_grad_(hidden_grad), p["lm_head"].clone().requires_grad_(head_grad)
        with _Allocations() as seen, torch.set_grad_enabled(grad):
            out = fused_loss(**{**p, "hidden": hidden, "lm_head": head})
            if grad:
                out.loss.backward()
        assert not any(len(s) == 2 and s[1] == V and s[0] > 5 for s in seen.shapes), seen.shapes
        assert ((V, H) in seen.shapes) == (head_grad and grad)
        assert ((T, H) in seen.shapes) == (hidden_grad and grad)
        assert (hidden.grad is not None) == (hidden_grad and grad) and (head.grad is not None) == (head_grad and grad)
        assert out.loss.requires_grad == grad


def test_memory_of_the_logits_form():
    """The forward keeps nothing of the logits' size; in place, the backward neither."""
    p = cast(as_logits(problem(17, T=60, N=9)), torch.float32)
    z = p["logits"].clone().requires_grad_()
    with _Allocations() as seen:
        loss = fused_loss(**{**p, "logits": z}).loss
    assert (60, 37) not in seen.shapes
    assert loss.requires_grad
    base = p["logits"].clone().requires_grad_()
    out = base * 1.0
    fused_loss(**{**p, "logits": out}, inplace=True).loss.backward()
    right = run(fused_loss, p)["d_logits"]
    assert torch.equal(base.grad, right)
    assert torch.equal(out.detach(), right), "inplace=True puts the gradient into the logits' memory"


def test_in_place_reuse_is_caught():
    p = cast(as_logits(problem(17)), torch.float32)
    loss = fused_loss(**{**p, "logits": p["logits"].clone().requires_grad_() * 1.0}, inplace=True).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_is_caught_where_someone_needed_the_logits():
    p = cast(as_logits(problem(17)), torch.float32)
    z = p["logits"].clone().requires_grad_() * 1.0
    other = z.square().sum()
    loss = fused_loss(**{**p, "logits": z}, inplace=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


def test_writing_to_the_logits_between_in_place_forward_and_backward_is_caught():
    p = cast(as_logits(problem(17)), torch.float32)
    z = p["logits"].clone().requires_grad_() * 1.0
    loss = fused_loss(**{**p, "logits": z}, inplace=True).loss
    z.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_in_place_gradient_takes_the_upstream_factor(dtype):
    p = cast(as_logits(problem(20)), dtype)
    right = run(fused_loss, p, upstream=-4.0)["d_logits"]
    base = p["logits"].clone().requires_grad_()
    (fused_loss(**{**p, "logits": base * 1.0}, inplace=True).loss * -4.0).backward()
    assert torch.equal(base.grad, right)


def test_default_never_touches_the_callers_tensors():
    for form in FORMS:
        p = cast(FORMS[form](problem(18)), torch.float32)
        kept = {k: v.clone() for k, v in p.items() if isinstance(v, torch.Tensor)}
        run(fused_loss, p)
        leaves = {k: p[k].requires_grad_() for k in WIDE if p.get(k) is not None}
        fused_loss(**{**p, **leaves}).loss.backward()
        assert all(torch.equal(p[k].detach(), v) for k, v in kept.items())


@pytest.mark.parametrize("form", FORMS)
def test_no_grad_gives_the_same_numbers(form):
    p = cast(FORMS[form](problem(19)), torch.float32)
    with torch.no_grad():
        out = fused_loss(**p)
    right = run(fused_loss, p)
    assert torch.equal(out.loss, right["loss"]) and torch.equal(out.logprobs, right["logprobs"]) and not out.loss.requires_grad
    with torch.inference_mode():
        assert torch.equal(fused_loss(**p).loss, right["loss"])


@pytest.mark.parametrize("form", FORMS)
def test_upstream_gradient_scales_and_backward_may_run_twice(form):
    p = FORMS[form](problem(20))
    one, many = run(fused_loss, p), run(fused_loss, p, upstream=-3.5)
    assert all(error(many[k], -3.5 * one[k]) < 1e-12 for k in one if k.startswith("d_"))
    key = "logits" if form == "logits" else "hidden"
    x = p[key].clone().requires_grad_()
    loss = fused_loss(**{**p, key: x}).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert error(x.grad, 2 * one[f"d_{key}"]) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_second_derivative_is_refused(form):
    p = FORMS[form](problem(20))
    key = "logits" if form == "logits" else "hidden"
    x = p[key].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(fused_loss(**{**p, key: x}).loss, x, create_graph=True)


def test_autocast_changes_nothing():
    p = cast(problem(24), torch.float32)
    right = run(fused_loss, p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(fused_loss, p)
    assert all(torch.equal(found[k], right[k]) for k in right)


def test_reduced_types_of_per_token_inputs():
    p = cast(problem(26), torch.float32)
    small = {k: v.to(torch.bfloat16) if k in ("advantages", "old_logprobs", "v_old", "token_weights") else v for k, v in p.items()}
    wide = {k: v.float() if isinstance(v, torch.Tensor) and v.dtype == torch.bfloat16 else v for k, v in small.items()}
    found, right = run(fused_loss, small), run(fused_loss, wide)
    assert all(torch.equal(found[k], right[k]) for k in right)


def test_inputs_do_not_ask_for_gradients():
    """Old log-probs, advantages and the like are constants even if they come with a graph."""
    p = cast(problem(27), torch.float32)
    leaf = p["advantages"].clone().requires_grad_()
    out = fused_loss(**{**p, "advantages": leaf, "hidden": p["hidden"].requires_grad_()})
    out.loss.backward()
    assert leaf.grad is None


@pytest.mark.parametrize("form", FORMS)
def test_compiles_without_a_break(form):
    p = cast(FORMS[form](problem(28)), torch.float32)
    key = "logits" if form == "logits" else "hidden"
    right = run(fused_loss, p)
    torch._dynamo.reset()
    x = p[key].clone().requires_grad_()
    loss = torch.compile(lambda x: fused_loss(**{**p, key: x}).loss, fullgraph=True, backend="aot_eager")(x)
    loss.backward()
    assert torch.equal(loss.detach(), right["loss"]) and error(x.grad, right[f"d_{key}"]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_in_place_with_repeated_rows(dtype, monkeypatch):
    """A row that comes again in a later block must not be read after it was overwritten."""
    p = cast(as_logits(problem(19, T=5, N=23)), dtype)
    monkeypatch.setitem(row_pass.BLOCK_BYTES, "cpu", 2 * 37 * 8)
    right = run(fused_loss, p)["d_logits"]
    base = p["logits"].clone().requires_grad_()
    fused_loss(**{**p, "logits": base * 1.0}, inplace=True).loss.backward()
    assert torch.equal(base.grad, right)
