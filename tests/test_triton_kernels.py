"""The Triton kernels one by one: every branch, block layout, type and kind of row, against float64 and plain torch.

The interpreter executes them where there is no GPU. It sees no races, missing barriers or hardware limits: bench/gpu_check.py and
bench/triton_offline.py look for those.
"""

import math

import pytest
import torch
from conftest import interpreting
from helpers_ops import HALF_FLOOR, error
from helpers_triton import DEVICE, DTYPES, SMALL, restrided, row_inputs

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from sapo_fast import LossConfig, row_pass, triton_rows  # noqa: E402
from sapo_fast.kernels.scalar_math import exp, expm1, log1p  # noqa: E402
from sapo_fast.loss_terms import Tokens  # noqa: E402

KERNEL, PLAIN = triton_rows.TritonRows(), row_pass.TorchRows()


@pytest.fixture(params=[SMALL["one read"], SMALL["16 at a time"]], ids=["one read", "16 at a time"])
def launches(request, monkeypatch):
    monkeypatch.setattr(triton_rows, "LAUNCHES", request.param)


with interpreting():

    @triton.jit
    def _scalars(X, EXP, EXPM1, LOG1P, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < n, other=0.0)
        tl.store(EXP + at, exp(x), mask=at < n)
        tl.store(EXPM1 + at, expm1(x), mask=at < n)
        tl.store(LOG1P + at, log1p(tl.abs(x)), mask=at < n)


def test_scalar_functions_to_the_last_digits():
    small = torch.logspace(-30, 1.5, 500)
    x = torch.cat([torch.linspace(-86, 86, 1001), torch.linspace(-1, 1, 1001), small, -small, torch.tensor([0.0, 1e5, 2e9])]).to(DEVICE)
    found = torch.empty(3, len(x), device=DEVICE)
    _scalars[(1,)](x, *found, len(x), BLOCK=4096, num_warps=4)
    right = x.double().clamp(max=87).exp(), x.double().clamp(max=87).expm1(), x.double().abs().log1p()
    for name, ours, theirs in zip(("exp", "expm1", "log1p"), found, right, strict=True):
        keep = (theirs.abs() > 1e-37) & ((x <= 87) | (name == "log1p"))
        relative = ((ours.double() - theirs) / theirs)[keep].abs().max()
        assert relative < 3 * 2.0**-24, f"{name}: {float(relative) * 2**24} units of 2^-24"
    odd = torch.tensor([math.nan, -math.inf, -100.0, 0.0], device=DEVICE)
    found = torch.empty(3, 4, device=DEVICE)
    _scalars[(1,)](odd, *found, 4, BLOCK=4, num_warps=1)
    assert found[:, 0].isnan().all()
    assert found[0, 1:].tolist() == [0.0, 0.0, 1.0] and found[1, 1:].tolist() == [-1.0, -1.0, 0.0] and found[2, 3] == 0


def compare(z, rows, actions, ids, temperature=1.0, a=None, b=None, within=12):
    """Statistics, and the gradient for A and B, of the kernel; asserts against TorchRows in float64."""
    right = PLAIN.stats(z.double(), rows, actions, ids, temperature)
    plain = PLAIN.stats(z, rows, actions, ids, temperature)
    found = KERNEL.stats(z, rows, actions, ids, temperature)
    right, plain = (s._replace(top=s.top * temperature) for s in (right, plain))  # the kernel's is not divided
    unit = 2.0**-24 * max(1.0, float(right.logprob.abs().max()))
    for name, x, y, w in zip(found._fields, found, plain, right, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(torch.isnan(x), torch.isnan(w)), name
        assert error(x.nan_to_num(), w.nan_to_num()) <= 3 * error(y.nan_to_num(), w.nan_to_num()) + within * unit, name
    if a is None:
        return found, None
    grads = []
    for kernel, x, stats in ((KERNEL, z, found), (PLAIN, z, plain), (PLAIN, z.double(), right)):
        out = torch.full(x.shape, 7.0, dtype=x.dtype, device=x.device)
        slopes = (s if s is None else s.to(stats.logprob.dtype) for s in (a, b))
        if kernel is PLAIN:
            stats = stats._replace(top=stats.top / temperature)
        kernel.grad(x, rows, actions, stats, *slopes, ids, temperature, out)
        grads.append(out)
    floor = within * unit + 2 * HALF_FLOOR[z.dtype]
    assert error(grads[0], grads[2]) <= 3 * error(grads[1], grads[2]) + floor
    assert (grads[0][:, list(ids)][slice(None) if rows is None else rows] == 0).all()
    return found, grads[0]


POSITIONS = [(0, 1), (0, 36), (36, 0), (36, 35), (15, 16), (16, 15), (31, 32), (3, 33), (20, 21)]


@pytest.mark.parametrize("ids", POSITIONS, ids=str)
def test_value_tokens_in_every_place(ids, launches):
    """First, last, side by side, across a block's edge, in the last and partial block; the others' statistics do not see them."""
    z, rows, actions, a, b = row_inputs(1, n=3, ids=ids)
    right, grad = compare(z, rows, actions, ids, a=a, b=b)
    junk = z.clone()
    junk[rows[:, None], list(ids)] = torch.tensor([[math.nan, 1e30], [math.inf, math.nan], [-math.inf, math.inf]], device=DEVICE)
    found, out = KERNEL.stats(junk, rows, actions, ids, 1.0), torch.full_like(z, 7.0)
    KERNEL.grad(junk, rows, actions, found, a, b, ids, 1.0, out)
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True)) and torch.equal(out, grad)


@pytest.mark.parametrize("V", [3, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129])
def test_every_length_of_the_last_block(V, launches):
    ids = (V // 2, V - 1)
    z, _, actions, a, b = row_inputs(V, n=2, T=2, V=V, ids=ids)
    compare(z, None, actions, ids, a=a, b=b)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_and_temperatures(dtype, temperature, launches):
    z, rows, actions, a, b = row_inputs(2, dtype=dtype)
    compare(z, rows, actions, (3, 20), temperature, a=a, b=b)
    compare(z, rows, actions, (3, 20), temperature, a=a)


@pytest.mark.parametrize("kind", ["padded", "transposed", "every other"])
def test_strides(kind, launches):
    z, rows, actions, a, b = row_inputs(3)
    right, grad = compare(z, rows, actions, (3, 20), a=a, b=b)
    found = KERNEL.stats(restrided(z, kind), rows.repeat_interleave(2)[::2], actions.repeat_interleave(2)[::2], (3, 20), 1.0)
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
    out = restrided(torch.full_like(z, 7.0), kind)
    KERNEL.grad(restrided(z, kind), rows, actions, found, a, b, (3, 20), 1.0, out)
    assert torch.equal(out, grad)


def test_an_expanded_row(launches):
    z, _, actions, a, b = row_inputs(4, n=5, T=5)
    compare(z[:1].expand(5, -1), None, actions, (3, 20), a=a, b=b)


EXTREMES = {
    "high": lambda z: z + 300, "low": lambda z: z - 300, "1e30": lambda z: z * 1e30, "equal": torch.zeros_like,
    "one-hot": lambda z: z.index_fill(1, torch.tensor([5], device=z.device), 80.0),
    "only one allowed": lambda z: torch.full_like(z, -math.inf).index_fill(1, torch.tensor([30], device=z.device), 2.0),
    "only the last block": lambda z: z.index_fill(1, torch.arange(33, device=z.device), -math.inf),
    "only the first": lambda z: z.index_fill(1, torch.arange(16, 37, device=z.device), -math.inf),
    "-1e30 and -inf": lambda z: torch.where(z < -1, -math.inf, torch.where(z < 0, -1e30, z)),
    "lowest number": lambda z: torch.where(z < 0, torch.finfo(z.dtype).min, z),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXTREMES)
def test_extremes(kind, launches):
    z, rows, actions, a, b = row_inputs(5)
    z = EXTREMES[kind](z)
    best = z.index_fill(1, torch.tensor([3, 20], device=DEVICE), -math.inf).argmax(1)[rows]  # an action that is possible
    found, grad = compare(z, rows, best, (3, 20), a=a, b=b)
    assert torch.isfinite(grad).all() and all(torch.isfinite(x).all() for x in found)
    assert (found.log_sum >= 0).all() and (found.spread >= 0).all() and (found.logprob <= 0).all()


def test_an_impossible_action(launches):
    z, rows, actions, a, b = row_inputs(6)
    z[rows, actions] = -math.inf
    found, out = KERNEL.stats(z, rows, actions, (3, 20), 1.0), torch.zeros_like(z)
    KERNEL.grad(z, rows, actions, found, a, b, (3, 20), 1.0, out)
    right, wide = PLAIN.stats(z.double(), rows, actions, (3, 20), 1.0), torch.zeros_like(z, dtype=torch.float64)
    PLAIN.grad(z.double(), rows, actions, right, a.double(), b.double(), (3, 20), 1.0, wide)
    assert (found.logprob == -math.inf).all() and torch.isfinite(found.entropy).all() and torch.isfinite(out).all()
    assert error(out, wide) < 1e-5


@pytest.mark.parametrize("value", ["nan", "inf", "all banned"])
@pytest.mark.parametrize("at", [0, 17, 36])
def test_a_broken_row_is_not_a_number_and_others_are_untouched(value, at, launches):
    z, rows, actions, a, b = row_inputs(7, ids=(3, 20))
    right = KERNEL.stats(z, rows, actions, (3, 20), 1.0)
    broken = z.clone()
    if value == "all banned":
        broken[rows[2]] = -math.inf
    else:
        broken[rows[2], at] = float(value)
    found, others = KERNEL.stats(broken, rows, actions, (3, 20), 1.0), torch.arange(5, device=DEVICE) != 2
    assert all(torch.equal(x[others], y[others]) for x, y in zip(found, right, strict=True))
    assert found.logprob[2].isnan() and found.entropy[2].isnan()
    out = torch.zeros_like(z)
    tokens = Tokens(right.logprob.clone(), a, None, None)
    KERNEL.loss_grad(
        broken, rows, actions, tokens, LossConfig(kl_coef=0.0), torch.ones((), dtype=torch.float64, device=DEVICE), (3, 20), out
    )
    assert out[rows[2]].isnan().any() and torch.isfinite(out[rows[others]]).all()


def test_rows_out_of_range_read_and_write_nothing(launches):
    """With check=False nothing has looked at the indices: no memory of others is touched, and the numbers say so."""
    z, _, actions, a, b = row_inputs(8, n=4)
    rows = torch.tensor([-1, 2, 7, 10**6], device=DEVICE)
    found = KERNEL.stats(z, rows, actions, (3, 20), 1.0)
    assert found.logprob.isnan().tolist() == [True, False, True, True]
    out = torch.full_like(z, 7.0)
    tokens = Tokens(None, a, None, None)
    KERNEL.loss_grad(z, rows, actions, tokens, LossConfig(kl_coef=0.0), torch.ones((), dtype=torch.float64, device=DEVICE), (3, 20), out)
    untouched = torch.arange(7) != 2
    assert (out[untouched] == 7).all() and (out[2] != 7).all()
    assert KERNEL.stats(z, rows[1:2], torch.tensor([37], device=DEVICE), (3, 20), 1.0).logprob.isnan().all()


def test_repeated_rows_add(launches):
    z, _, actions, a, b = row_inputs(9, n=6, T=3)
    rows = torch.tensor([2, 0, 2, 2, 0, 2], device=DEVICE)
    actions[3] = actions[0]
    _, grad = compare(z, rows, actions, (3, 20), 0.7, a=a, b=b)
    assert (grad[1] == 7).all(), "a row nobody names is not written"
    inplace = z.clone()
    KERNEL.grad(inplace, rows, actions, KERNEL.stats(z, rows, actions, (3, 20), 0.7), a, b, (3, 20), 0.7, inplace)
    assert torch.equal(inplace[[0, 2]], grad[[0, 2]])


SETTINGS = {
    "default": LossConfig(kl_coef=0.1), "no entropy": LossConfig(entropy_coef=0.0, kl_coef=0.0), "no clips": LossConfig(
        clip_low=None, clip_high=None, dual_clip=None, kl_coef=0.2), "tight": LossConfig(clip_low=0.02, clip_high=0.3, dual_clip=1.1, temperature=0.6),
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_is_stats_terms_and_grad(dtype, settings, launches):
    """loss_grad against the same in three steps of plain torch, in float64, into other memory and in place, with and without each input."""
    g = torch.Generator().manual_seed(3)
    z, rows, actions, a, _ = row_inputs(10, dtype=dtype)
    exact = PLAIN.stats(z.double(), rows, actions, (3, 20), settings.temperature).logprob
    far = torch.tensor([0.0, 0.05, -1.4, 25.0, -25.0])[torch.randperm(5, generator=g)].to(DEVICE)  # off both clips, and beyond the limit
    scale = torch.tensor(0.37, dtype=torch.float64, device=DEVICE)
    for old in (None, (exact - far).float()):
        for weights in (None, torch.rand(5, generator=g).to(DEVICE)):
            tokens = Tokens(old, a, weights, (exact + far.flip(0)).float() if settings.kl_coef > 0 else None)
            wide = Tokens(*(None if x is None else x.double() for x in tokens))
            right = torch.full_like(z, 7.0, dtype=torch.float64)
            row_pass.one_pass(PLAIN, z.double(), rows, actions, wide, settings, scale, (3, 20), right, True)
            out, same = torch.full_like(z, 7.0), z.clone()
            stats = KERNEL.loss_grad(z, rows, actions, tokens, settings, scale, (3, 20), out)
            again = KERNEL.loss_grad(same, rows, actions, tokens, settings, scale, (3, 20), same)
            assert torch.equal(same[rows], out[rows]) and all(torch.equal(x, y) for x, y in zip(stats, again, strict=True))
            assert all(torch.equal(x, y) for x, y in zip(stats, KERNEL.stats(z, rows, actions, (3, 20), settings.temperature), strict=True))
            assert error(out, right) < 2 * HALF_FLOOR[dtype] + 4e-6
            unnamed = torch.ones(7, dtype=torch.bool, device=DEVICE).index_fill(0, rows, False)
            assert (out[unnamed] == 7).all()


def test_a_clipped_row_costs_zeros_and_reads_nothing_twice(launches):
    """A = B = 0: exact zeros, also where the logits are banned."""
    z, rows, actions, _, _ = row_inputs(11)
    z[:, 7] = -math.inf
    stats = KERNEL.stats(z, rows, actions, (3, 20), 1.0)
    tokens = Tokens(stats.logprob - 1.0, torch.ones(5, device=DEVICE), None, None)  # ratio e, advantage 1: clipped
    out = torch.full_like(z, 7.0)
    config = LossConfig(kl_coef=0.0, entropy_coef=0.0)
    KERNEL.loss_grad(z, rows, actions, tokens, config, torch.ones((), dtype=torch.float64, device=DEVICE), (3, 20), out)
    assert (out[rows] == 0).all()


def test_digits_of_a_certain_token():
    """log q = -1e-20 and not 0, and everything that follows."""
    z = torch.tensor([[46.0, 0.0, 5.0, -3.0]], device=DEVICE)
    for layout in ([(16, 16, 1)], [(None, 16, 1)]):
        kept, triton_rows.LAUNCHES = triton_rows.LAUNCHES, layout
        stats = KERNEL.stats(z, None, torch.tensor([0], device=DEVICE), (2, 3), 1.0)
        triton_rows.LAUNCHES = kept
        assert float(stats.logprob) == pytest.approx(-math.exp(-46), rel=1e-5, abs=0)
        assert float(stats.entropy) == pytest.approx(47 * math.exp(-46), rel=1e-5, abs=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale(dtype, monkeypatch):
    monkeypatch.setattr(triton_rows, "LAUNCHES", [(None, 16, 1)])
    x = torch.randn(3, 37, device=DEVICE).to(dtype)
    for view in (lambda y: y, lambda y: y.T, lambda y: y[:, 2:30]):
        for factor in (1.0, -0.3):
            y = x.clone()
            KERNEL.scale_(view(y), torch.tensor(factor, dtype=torch.float64, device=DEVICE))
            right = x.clone()
            view(right).copy_((view(x).float() * torch.tensor(factor, device=DEVICE)).to(dtype))
            assert torch.equal(y, right)
    KERNEL.scale_(torch.zeros(0, 5, device=DEVICE), torch.tensor(2.0, dtype=torch.float64, device=DEVICE))


def test_no_rows():
    z, none = torch.zeros(4, 9, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    stats = KERNEL.stats(z, none, none, (0, 1), 1.0)
    assert all(x.shape == (0,) for x in stats)
    out = torch.full_like(z, 7.0)
    KERNEL.grad(z, none, none, stats, stats.top, None, (0, 1), 1.0, out)
    tokens = Tokens(None, stats.top, None, None)
    KERNEL.loss_grad(z, none, none, tokens, LossConfig(kl_coef=0.0), torch.ones((), dtype=torch.float64, device=DEVICE), (0, 1), out)
    assert (out == 7).all()


@pytest.mark.parametrize("V", [151_936, 5000, 16_384])
def test_as_launched(V):
    """The launches that ship, a few rows of a real vocabulary."""
    ids = (V - 200, V - 201)
    z, rows, actions, a, b = row_inputs(12, n=2, T=3, V=V, ids=ids, dtype=torch.bfloat16)
    compare(z, rows, actions, ids, a=a, b=b)


def test_every_vocabulary_has_a_launch():
    for V in (3, 1024, 1025, 4096, 16384, 16385, 151_936, 2**21):
        options = triton_rows.launch(V)
        assert not options["ON_CHIP"] or options["BLOCK"] >= V
        assert options["BLOCK"] & (options["BLOCK"] - 1) == 0 and options["BLOCK"] >= 8 * 64 * options["num_warps"]
        assert options["num_warps"] <= 16  # 64 lanes a warp on AMD: 1024 threads at most
    assert triton_rows.launch(151_936) == triton_rows.launch(200_000)


def test_operators_are_registered_right():
    z, rows, actions, a, b = row_inputs(13, n=3)
    stats = torch.stack(KERNEL.stats(z, rows, actions, (3, 20), 1.0))
    scale = torch.ones((), dtype=torch.float64, device=DEVICE)
    ops = torch.ops.sapo_fast
    check = torch.library.opcheck
    check(ops.triton_row_stats, (z, rows, actions, 3, 20, 0.7))
    check(ops.triton_row_stats, (z, None, actions[:2], 3, 20, 1.0))
    check(ops.triton_row_grad, (z, rows, torch.arange(3, device=DEVICE), actions, stats, a, b, a.clone(), 3, 20, 1.0, torch.zeros_like(z)))
    limits = (0.8, 1.2, 3.0, 0.0, 0.01)
    check(ops.triton_row_loss, (z, rows, actions, None, a, None, None, scale, 3, 20, 1.0, *limits, torch.zeros_like(z)))
    check(ops.triton_scale, (z.clone(), scale))
