"""The C++ row pass: every kind of problem against the float64 reference, its operators under torch's own checks, threads, layouts and refusals.

SAPO_FUZZ=10000 runs the fuzz that often; tests/fuzz_rows.py is the same as a script, with figures.
"""

import os

import pytest
import torch
from fuzz_rows import check_call
from helpers_ops import as_logits, cast, error, problem, run

from sapo_fast import LossConfig, backends, fused_loss, native, token_logprobs
from sapo_fast.loss_terms import Tokens

pytestmark = pytest.mark.skipif(native.cpu_obstacle() is not None, reason=str(native.cpu_obstacle()))


@pytest.mark.parametrize("impl", ["cpp", "torch"])
def test_fuzz(impl):
    for seed in range(int(os.environ.get("SAPO_FUZZ", "120"))):
        check_call(seed, impl)


def _kernel():
    return backends.select("row_pass", "cpp", torch.device("cpu"), torch.float32)[1]


def _call(n=9, V=5003, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, V, generator=g) * 3).to(dtype)
    actions = torch.randint(0, V - 2, (n,), generator=g)
    tokens = Tokens(
        torch.randn(n, generator=g) - 9, torch.randn(n, generator=g), torch.rand(n, generator=g), torch.randn(n, generator=g) - 9
    )
    return logits, actions, tokens, torch.tensor(0.3, dtype=torch.float64), (V - 2, V - 1)


def test_auto_takes_it_for_the_trainers_types_and_leaves_float64_to_torch():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert backends.select("row_pass", "auto", torch.device("cpu"), dtype)[0] == "cpp"
    assert backends.select("row_pass", "auto", torch.device("cpu"), torch.float64)[0] == "torch"
    with pytest.raises(ValueError, match="impl='cpp' serves bfloat16, float16, float32"):
        backends.select("row_pass", "cpp", torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_pass_gives_the_bits_of_two(dtype):
    """loss_grad's statistics are stats', and its gradient is grad's from the same coefficients."""
    logits, actions, tokens, scale, pair = _call(dtype=dtype)
    kernel, config = _kernel(), LossConfig(entropy_coef=0.0, kl_coef=0.0, clip_low=None, clip_high=None, dual_clip=None, temperature=0.7)
    two = kernel.stats(logits, None, actions, pair, 0.7)
    out, again = torch.empty_like(logits), torch.empty_like(logits)
    unit = Tokens(None, torch.ones(9), None, None)  # ratio 1, so A is -1 whatever exp() is used
    one = kernel.loss_grad(logits, None, actions, unit, config, torch.ones((), dtype=torch.float64), pair, out)
    kernel.grad(logits, None, actions, two, -torch.ones(9), None, pair, 0.7, again)
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True)) and torch.equal(out, again)
    kernel.loss_grad(logits, None, actions, unit, config, torch.ones((), dtype=torch.float64), pair, logits)
    assert torch.equal(logits, out), "in place"


def test_threads_change_no_bit():
    logits, actions, tokens, scale, pair = _call(n=33)
    rows = torch.randint(0, 33, (33,), generator=torch.Generator().manual_seed(3))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.zeros_like(logits)
        stats = _kernel().loss_grad(logits, rows, actions, tokens, LossConfig(), scale, pair, out)
        found.append((*stats, out))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_row_does_not_depend_on_its_neighbours():
    logits, actions, tokens, scale, pair = _call(n=7)
    whole = _kernel().stats(logits, None, actions, pair, 1.0)
    for i in range(7):
        alone = _kernel().stats(logits[i : i + 1], None, actions[i : i + 1], pair, 1.0)
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole, alone, strict=True))


def test_rows_with_nothing_to_learn_get_zeros():
    logits, actions, tokens, scale, pair = _call()
    out = torch.full_like(logits, torch.nan)
    tokens = tokens._replace(advantages=torch.zeros(9), ref=None)
    _kernel().loss_grad(logits, None, actions, tokens, LossConfig(entropy_coef=0.0, kl_coef=0.0), scale, pair, out)
    assert (out == 0).all()


def test_certain_tokens_keep_their_digits():
    """One logit 60 above the rest: log q is -(V - 3) e^-60 and not 0; so is the gradient at the action."""
    z = torch.zeros(1, 1000)
    z[0, 5] = 60.0
    logprob, entropy = token_logprobs(
        logits=z, value_token_ids=(1, 2), action_rows=torch.tensor([0]), actions=torch.tensor([5]), impl="cpp"
    )
    right = 997 * torch.exp(torch.tensor(-60.0, dtype=torch.float64))
    assert abs(-logprob.double() / right - 1) < 1e-6 and abs(entropy.double() / (61 * right) - 1) < 1e-6


def test_layouts_it_does_not_take_go_to_torch_or_are_refused():
    p = cast(as_logits(problem(5)), torch.float32)
    odd = {**p, "logits": p["logits"].T.contiguous().T}
    with pytest.raises(ValueError, match="contiguous in their last dimension"):
        fused_loss(**odd, impl="cpp")
    with pytest.raises(ValueError, match="contiguous in their last dimension"):
        token_logprobs(**{k: odd[k] for k in ("logits", "value_token_ids", "action_rows", "actions")}, impl="cpp")
    assert error(fused_loss(**odd).loss, fused_loss(**p, impl="cpp").loss) < 1e-6


def test_operators_refuse_before_they_write():
    logits, actions, tokens, scale, pair = _call()
    ops = torch.ops.sapo_fast
    out = torch.full_like(logits, 7.0)
    settings = (*pair, 1.0, 0.8, 1.2, 3.0, 0.0, 0.0)

    def loss(logits=logits, rows=None, actions=actions, advantages=tokens.advantages, out=out):
        return ops.row_loss(logits, rows, actions, None, advantages, None, None, scale, *settings, out)

    for broken, story in (
        ({"actions": actions.clone().fill_(5003)}, "actions.0. is out of range"),
        ({"rows": torch.tensor([0] * 8 + [9])}, "rows.8. is out of range"),
        ({"rows": torch.tensor([0] * 8 + [-1])}, "rows.8. is out of range"),
        ({"advantages": tokens.advantages[:8]}, "advantages must have shape"),
        ({"advantages": tokens.advantages.double()}, "advantages has the wrong dtype"),
        ({"logits": logits.double()}, "float32, bfloat16 or float16"),
        ({"logits": logits.T.contiguous().T}, "contiguous in its last dimension"),
        ({"out": out[:, :-1]}, "shape and dtype of logits"),
        ({"out": out[:1].expand(9, -1)}, "must not overlap"),
        ({"logits": logits[:8]}, "one action per row"),
    ):
        with pytest.raises(RuntimeError, match=story):
            loss(**broken)
    assert (out == 7).all()
    with pytest.raises(RuntimeError, match="two different columns"):
        ops.row_stats(logits, None, actions, 3, 3, 1.0)


def test_opcheck():
    logits, actions, tokens, scale, pair = _call(n=4, V=50)
    ops, rows = torch.ops.sapo_fast, torch.tensor([2, 0, 2, 3])
    stats = torch.stack(_kernel().stats(logits, rows, actions, pair, 1.0))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.row_stats.default, (logits, rows, actions, *pair, 1.0), test_utils=checks)
    out = torch.zeros_like(logits)
    given = (logits, rows, actions, tokens.old, tokens.advantages, tokens.weights, None, scale, *pair, 1.0, 0.8, 1.2, 3.0, 0.0, 0.1, out)
    torch.library.opcheck(ops.row_loss.default, given, test_utils=checks)
    torch.library.opcheck(ops.row_grad.default, (logits, rows, actions, stats, tokens.advantages, None, *pair, 1.0, out), test_utils=checks)
    torch.library.opcheck(ops.clear_other_rows.default, (rows, out), test_utils=checks)


@pytest.mark.parametrize("impl", ["cpp", "torch"])
@pytest.mark.parametrize("form", ["hidden", "logits", "logits in place"])
def test_compiles_without_a_break(form, impl):
    p = cast(problem(28) if form == "hidden" else as_logits(problem(28)), torch.float32)
    key = form.split()[0]
    right = run(fused_loss, p, impl=impl)
    torch._dynamo.reset()
    x = p[key].clone().requires_grad_()
    settings = {"impl": impl, "inplace": form.endswith("place")}
    loss = torch.compile(lambda x: fused_loss(**{**p, key: x * 1.0}, **settings).loss, fullgraph=True, backend="aot_eager")(x)
    loss.backward()
    assert error(loss.detach(), right["loss"]) < 1e-6 and error(x.grad, right[f"d_{key}"]) < 1e-6
