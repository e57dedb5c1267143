"""Turn GAE, token GAE, normalisation and turn order against their loops."""

import math
import os
import socket
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from sapo_fast import normalize_advantages, reference, token_gae, turn_gae, turn_order


def ragged(seed: int, lengths: list[int] | None = None):
    g = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = torch.randint(0, 9, (7,), generator=g).tolist()
    cu = torch.tensor([0, *np.cumsum(lengths).tolist()])
    total = int(cu[-1])
    r, v, q = (torch.randn(total, generator=g, dtype=torch.float64) for _ in range(3))
    return r, v, q, cu, torch.randn(len(lengths), generator=g, dtype=torch.float64)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_loop(seed, impl):
    r, v, q, cu, bootstrap = ragged(seed)
    gamma, lam, lam_v = [(0.95, 0.95, None), (1.0, 1.0, 0.5), (0.99, 0.0, 1.0), (0.0, 0.9, None), (1.0, 1.0, None), (0.7, 1.0, 0.0)][seed]
    found = turn_gae(r, v, q, cu_turns=cu, gamma=gamma, lam=lam, lam_v=lam_v, bootstrap=bootstrap, impl=impl)
    right = reference.turn_gae(r, v, q, cu_turns=cu, gamma=gamma, lam=lam, lam_v=lam_v, bootstrap=bootstrap)
    for a, b in zip(found, right, strict=True):
        assert a.dtype == torch.float64 and torch.allclose(a, b, rtol=1e-13, atol=1e-13)


def test_closed_form():
    """With V = 0 an advantage is the (gamma lam)-discounted return; with lam = 1 the V target is the discounted return plus bootstrap."""
    r, _, _, cu, bootstrap = ragged(11, [5])
    zero = torch.zeros(5, dtype=torch.float64)
    found = turn_gae(r, zero, cu_turns=cu, gamma=0.9, lam=0.8)
    assert found.advantages.tolist() == pytest.approx([sum(0.72**k * float(r[t + k]) for k in range(5 - t)) for t in range(5)])
    _, v, *_ = ragged(12, [5])
    returns = [sum(0.9**k * float(r[t + k]) for k in range(5 - t)) + 0.9 ** (5 - t) * float(bootstrap[0]) for t in range(5)]
    assert turn_gae(r, v, cu_turns=cu, gamma=0.9, lam=1.0, bootstrap=bootstrap).v_targets.tolist() == pytest.approx(returns)


def test_float32_is_the_rounded_float64():
    r, v, q, cu, bootstrap = ragged(3, [50] * 20)
    small = [x.float() for x in (r, v, q, bootstrap)]
    found = turn_gae(*small[:3], cu_turns=cu, bootstrap=small[3], impl="torch")
    right = reference.turn_gae(*(x.double() for x in small[:3]), cu_turns=cu, bootstrap=small[3].double())
    for a, b in zip(found, right, strict=True):
        assert a.dtype == torch.float32 and torch.allclose(a, b.float(), rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_one_long_trajectory_among_short_ones(impl):
    r, v, q, cu, bootstrap = ragged(4, [3, 0, 700, 1, 2])
    found = turn_gae(r, v, q, cu_turns=cu, gamma=1.0, lam=1.0, bootstrap=bootstrap, impl=impl)
    right = reference.turn_gae(r, v, q, cu_turns=cu, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    assert torch.allclose(found.advantages, right[0], rtol=1e-12, atol=1e-11)


def test_index_types_strides_and_floats():
    r, v, q, cu, bootstrap = (x.float() if x.is_floating_point() else x for x in ragged(5))
    right = turn_gae(r, v, q, cu_turns=cu, bootstrap=bootstrap)

    def holed(x):
        wide = torch.full((2 * len(x),), 99, dtype=x.dtype)
        wide[::2] = x
        return wide[::2]

    found = turn_gae(holed(r), holed(v), holed(q), cu_turns=holed(cu.int()), bootstrap=holed(bootstrap))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    half = turn_gae(r.bfloat16(), v.bfloat16(), cu_turns=cu)
    assert half.advantages.dtype == torch.float32 and half.q_targets is None
    assert torch.equal(half.advantages, turn_gae(r.bfloat16().float(), v.bfloat16().float(), cu_turns=cu).advantages)


def test_nothing():
    none = torch.zeros(0)
    for cu in ([0], [0, 0], [0, 0, 0]):
        found = turn_gae(none, none, none, cu_turns=torch.tensor(cu))
        assert all(x.shape == (0,) for x in found)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("where", ["rewards", "values", "q_values", "bootstrap"])
def test_a_nan_is_named_or_stays_in_its_trajectory(where, impl):
    data = dict(zip(("rewards", "values", "q_values", "cu_turns", "bootstrap"), ragged(6, [3, 0, 4, 2]), strict=True))
    clean = turn_gae(**data, impl=impl)
    data[where] = data[where].clone()
    data[where][2 if where == "bootstrap" else 4] = math.nan
    story = r"bootstrap\[2\] = nan is not finite \(trajectory 2\)" if where == "bootstrap" else rf"{where}\[4\].*trajectory 2, turn 1"
    with pytest.raises(ValueError, match=story):
        turn_gae(**data)
    found = turn_gae(**data, check=False, impl=impl)
    for a, b in zip(found, clean, strict=True):
        assert torch.equal(a[:3], b[:3]) and torch.equal(a[7:], b[7:])
    assert any(x[3:7].isnan().any() for x in found)


@pytest.mark.parametrize(
    ("change", "story"),
    [
        ({"cu_turns": torch.tensor([1, 3])}, "must start at 0, got 1"),
        ({"cu_turns": torch.tensor([0, 3, 2, 3])}, r"must not fall: cu_turns\[1\] = 3, cu_turns\[2\] = 2"),
        ({"cu_turns": torch.tensor([0, 2])}, "must end at 3, the number of turns, got 2"),
        ({"cu_turns": torch.zeros(0, dtype=torch.int64)}, r"give \[0\]"),
        ({"cu_turns": torch.tensor([0.0, 3.0])}, "cu_turns must be integers"),
        ({"values": torch.zeros(2)}, "values must have one entry per turn: 3, got 2"),
        ({"q_values": torch.zeros(4)}, "q_values must have one entry per turn: 3, got 4"),
        ({"bootstrap": torch.zeros(2)}, "bootstrap must have one entry per trajectory .*: 1, got 2"),
        ({"rewards": torch.zeros(3, 1)}, "rewards must have 1 dimension"),
        ({"rewards": [0.0, 0.0, 0.0]}, "rewards must be a torch.Tensor, got list"),
        ({"rewards": torch.zeros(3, dtype=torch.int64)}, "rewards must be floating point"),
        ({"gamma": 1.01}, r"gamma must be in \[0, 1\], got 1.01"),
        ({"lam": -0.1}, "lam must be in"),
        ({"lam_v": math.nan}, "lam_v must be a number"),
        ({"impl": "fast"}, "impl must be one of auto, torch, cpp, triton, cuda; got 'fast'"),
    ],
)
def test_bad_input(change, story):
    right = {"rewards": torch.zeros(3), "values": torch.zeros(3), "cu_turns": torch.tensor([0, 3])}
    with pytest.raises(ValueError, match=story):
        turn_gae(**{**right, **change})


# ----------------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("seed", range(5))
def test_token_gae_equals_the_loop(seed):
    g = torch.Generator().manual_seed(seed)
    lengths = [6, 0, 9, 1, 4]
    cu = torch.tensor([0, *np.cumsum(lengths).tolist()])
    r, v = torch.randn(20, generator=g, dtype=torch.float64), torch.randn(20, generator=g, dtype=torch.float64)
    mask = torch.rand(20, generator=g) < 0.6
    mask[[0, 6, 15, 16]] = True  # every sequence begins with a response token
    right = reference.token_gae(r, v, mask, cu_tokens=cu, gamma=0.9, lam=0.8)
    for kind in (torch.bool, torch.uint8, torch.int64, torch.float32):
        junk = torch.where(mask, v, math.nan)
        found = token_gae(r, junk, mask.to(kind), cu_tokens=cu.int(), gamma=0.9, lam=0.8)
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(found, right, strict=True))


def test_token_gae_masked_sequence_and_orphan_reward():
    zero = torch.zeros(3)
    a, _ = token_gae(zero, zero, zero, cu_tokens=torch.tensor([0, 3]))
    assert torch.equal(a, zero)
    with pytest.raises(ValueError, match=r"rewards\[0\] is non-zero before the first response token of sequence 0"):
        token_gae(torch.tensor([1.0, 0, 0]), zero, torch.tensor([0, 1, 1]), cu_tokens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"rewards\[2\] is non-zero before the first response token of sequence 1"):
        token_gae(torch.tensor([0.0, 0, 1]), zero, torch.tensor([1, 0, 0]), cu_tokens=torch.tensor([0, 2, 3]))


# ----------------------------------------------------------------------------------------------------------------- normalisation


def test_normalize_equals_the_reference():
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        a = torch.randn(40, generator=g) * 10.0 ** (seed - 2)
        invalid, valid = torch.rand(40, generator=g) < 0.2, torch.rand(40, generator=g) < 0.8
        kwargs = {"invalid": invalid if seed % 2 else None, "valid": valid if seed % 3 else None, "invalid_penalty": 0.3}
        found = normalize_advantages(a, **kwargs)
        assert found.dtype == torch.float32
        assert torch.allclose(found, reference.normalize_advantages(a, **kwargs), rtol=1e-6, atol=1e-7)


def test_the_penalty_comes_before_the_statistics():
    a, invalid = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([0, 1, 0, 0])
    found = normalize_advantages(a, invalid=invalid, invalid_penalty=0.1)
    assert found.tolist() == pytest.approx([1 / math.sqrt(3), -math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3)], rel=1e-5)
    for kind in (torch.bool, torch.uint8, torch.float32):
        assert torch.equal(normalize_advantages(a, invalid=invalid.to(kind)), found)
    assert torch.equal(normalize_advantages(a, invalid=invalid, invalid_penalty=0.0), torch.zeros(4))


def test_no_signal_gives_no_gradient_and_not_noise():
    base = torch.full((1000,), 7.3)
    noisy = base * (1 + torch.finfo(torch.float32).eps * torch.randint(-1, 2, (1000,)))
    assert torch.equal(normalize_advantages(base), torch.zeros(1000))
    assert torch.equal(normalize_advantages(noisy), torch.zeros(1000))
    tiny = torch.tensor([0.0, 1e-6])  # a difference, but a tenth of a thousandth of the floor: stays small
    assert float(normalize_advantages(tiny).abs().max()) < 0.01
    assert normalize_advantages(tiny, min_std=0.0).tolist() == pytest.approx([-1, 1], rel=0.05)
    assert normalize_advantages(torch.zeros(0)).shape == (0,)
    assert torch.equal(normalize_advantages(torch.ones(3), valid=torch.zeros(3)), torch.zeros(3))


def test_large_offsets_keep_their_digits():
    a = torch.randn(200, dtype=torch.float64)
    shifted = normalize_advantages(a + 1e6)
    assert torch.allclose(shifted, normalize_advantages(a), atol=1e-9)


@pytest.mark.parametrize(
    ("change", "story"),
    [
        ({"advantages": torch.tensor([1.0, math.inf, 2.0])}, r"advantages\[1\] = inf .* is not finite"),
        ({"invalid": torch.zeros(2)}, "invalid must have one entry per turn: 3, got 2"),
        ({"valid": torch.zeros(4)}, "valid must have one entry per turn: 3, got 4"),
        ({"min_std": -1.0}, "min_std must be >= 0"),
        ({"eps": math.nan}, "eps must be a number"),
        ({"invalid_penalty": -0.1}, "invalid_penalty must be >= 0"),
    ],
)
def test_normalize_bad_input(change, story):
    with pytest.raises(ValueError, match=story):
        normalize_advantages(**{"advantages": torch.tensor([1.0, 2.0, 3.0]), **change})


def _rank(rank: int, size: int, port: int, parts: list, results) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    group = torch.distributed.group.WORLD
    found = [normalize_advantages(a, invalid=i, process_group=group) for a, i in parts[rank]]
    bad = torch.tensor([1.0, math.nan]) if rank == 1 else torch.tensor([1.0])
    try:
        normalize_advantages(bad, process_group=group)
        message = "no error"
    except ValueError as error:
        message = str(error)
    results.put((rank, [x.tolist() for x in found], message))
    torch.distributed.destroy_process_group()


def test_two_processes_normalise_as_one():
    """Exact merge, also where one rank has no turns; a non-finite advantage raises on every rank, so none is left waiting."""
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(9, generator=g) * 3 + 100, torch.randn(5, generator=g), torch.full((6,), 0.1)]
    flags = [torch.rand(len(b), generator=g) < 0.3 for b in batches[:2]] + [torch.zeros(6, dtype=torch.bool)]
    cuts = [4, 0, 3]
    parts = [
        [(b[:c], f[:c]) for b, f, c in zip(batches, flags, cuts, strict=True)],
        [(b[c:], f[c:]) for b, f, c in zip(batches, flags, cuts, strict=True)],
    ]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_rank, args=(rank, 2, port, parts, results), daemon=True) for rank in range(2)]
    for w in workers:
        w.start()
    found = dict((rank, (x, message)) for rank, x, message in (results.get(timeout=150) for _ in workers))
    for w in workers:
        w.join(60)
        assert w.exitcode == 0
    for i, (batch, flag) in enumerate(zip(batches, flags, strict=True)):
        together = torch.tensor(found[0][0][i] + found[1][0][i])
        assert torch.allclose(together, normalize_advantages(batch, invalid=flag), rtol=1e-6, atol=1e-7)
    assert "advantages[1] = nan" in found[1][1] and "rank 1" in found[0][1]


# ------------------------------------------------------------------------------------------------------------------------- order


def test_turn_order_of_interleaved_turns():
    g = torch.Generator().manual_seed(3)
    lengths = {12: 4, 5: 1, -7: 3, 90: 6}
    turns = [(name, i) for name, n in lengths.items() for i in range(n)]
    shuffled = [turns[i] for i in torch.randperm(len(turns), generator=g).tolist()]
    ids, index = [t[0] for t in shuffled], [t[1] for t in shuffled]
    for form in (lambda x: x, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)):
        permutation, cu = turn_order(form(ids), form(index))
        assert [shuffled[i] for i in permutation.tolist()] == sorted(turns)
        assert cu.tolist() == [0, 3, 4, 8, 14] and cu.dtype == permutation.dtype == torch.int64
    right = reference.turn_order(ids, index)
    assert torch.equal(permutation, right[0]) and torch.equal(cu, right[1])
    r, v = torch.randn(14), torch.randn(14)
    ordered = turn_gae(r[permutation], v[permutation], cu_turns=cu).advantages
    back = torch.empty(14)
    back[permutation] = ordered
    one = [i for i in range(14) if ids[i] == 90]
    one.sort(key=lambda i: index[i])
    alone = turn_gae(r[one], v[one], cu_turns=torch.tensor([0, 6])).advantages
    assert torch.equal(back[one], alone)
    assert [x.tolist() for x in turn_order([], [])] == [[], [0]]
    assert turn_order([4, 4, 2], [2, 1, 1])[0].tolist() == [2, 1, 0], "counting from 1 in every trajectory is as good"


@pytest.mark.parametrize(
    ("ids", "index", "story"),
    [
        ([1, 1, 1], [0, 1, 1], "turn 1 of trajectory 1 occurs twice"),
        ([1, 2, 1], [0, 0, 2], "trajectory 1 has a gap: turn 2 follows turn 0"),
        ([1, 2], [0, 1], "trajectory 2 begins at turn 1, not 0"),
        ([1, 1], [5, 6], "trajectory 1 begins at turn 5, not 1"),
        ([1, 1], [-1, 0], "trajectory 1 begins at turn -1, not 0"),
        ([1, 1], [0], "turn_index must have one entry per entry of trajectory_ids: 2, got 1"),
        (["a"], [0], "trajectory_ids must be a tensor or a sequence of integers"),
        (torch.tensor([0.5]), [0], "trajectory_ids must be integers"),
    ],
)
def test_turn_order_bad_input(ids, index, story):
    with pytest.raises(ValueError, match=story):
        turn_order(ids, index)
