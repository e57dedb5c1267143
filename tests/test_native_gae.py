"""The native GAE through torch: right to the last digit, the same on any number of threads, and a good citizen of torch.

The loops themselves, with sanitizers, and the CUDA kernels (on the CPU, under an emulator) are tested by ctest; see tests/native and docs/native.md.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from sapo_fast import TurnTargets, backends, native, normalize_advantages, reference, token_gae, turn_gae
from sapo_fast.turn_targets import normalized_turn_gae

OBSTACLE = native.cpu_obstacle()
if OBSTACLE and not shutil.which("c++"):
    pytest.skip(f"the CPU library is not there: {OBSTACLE}", allow_module_level=True)
assert OBSTACLE is None, f"this machine has a compiler, so the install should have built the CPU library: {OBSTACLE}"


def ragged(seed: int, lengths: list[int], scale: float = 1.0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)])
    r, v, q = scale * torch.randn(3, int(cu[-1]), generator=g)
    return {"rewards": r, "values": v, "q_values": q, "cu_turns": cu, "bootstrap": scale * torch.randn(len(lengths), generator=g)}


def definition(p: dict[str, torch.Tensor], gamma: float, lam: float, lam_v: float, real: type) -> TurnTargets:
    """delta and A turn by turn, every operation in ``real`` (np.float64 or np.float32)."""
    r, v, q, after = (p[k].numpy().astype(real) for k in ("rewards", "values", "q_values", "bootstrap"))
    gamma, lam, lam_v = real(gamma), real(lam), real(lam_v)
    out = np.zeros((3, len(r)), dtype=real)
    cu = p["cu_turns"].tolist()
    for b in range(len(cu) - 1):
        next_v = next_q = after[b]
        a = a_v = real(0)
        for t in range(cu[b + 1] - 1, cu[b] - 1, -1):
            delta = r[t] + gamma * next_v - v[t]
            a, a_v = delta + gamma * lam * a, delta + gamma * lam_v * a_v
            out[:, t] = a, v[t] + a_v, r[t] + gamma * next_q
            next_v, next_q = v[t], q[t]
    return TurnTargets(*(torch.from_numpy(x) for x in out))


def assert_rounded_once(found: TurnTargets, right: TurnTargets, scale: float) -> None:
    """Float32 results one rounding from float64: half a unit in the last place, and float64's own noise."""
    for a, b in zip(found, right, strict=True):
        bound = 0.5001 * 2.0**-23 * b.abs() + 1e-12 * scale
        assert a.dtype == torch.float32 and bool(((a.double() - b).abs() <= bound).all())


def test_ten_thousand_segmentations():
    """Every backend here against the definition in float64: error at most three times that of the definition in float32; the native one rounds once.

    Longer, and with other lengths: tests/heavy/fuzz_gae.py.
    """
    rng = random.Random(5)
    ways = [x.backend for x in backends.explain() if x.operation == "turn_gae" and x.available]
    assert {"torch", "cpp"} <= set(ways)
    errors = dict.fromkeys([*ways, "float32"], 0.0)
    for batch in range(100):
        # One call holds a hundred segmentations: trajectories never see each other.
        lengths = [n for _ in range(100) for n in rng.choices([0, 1, 2, 3, rng.randint(0, 40)], k=rng.randint(0, 6))]
        p = ragged(batch, lengths)
        gamma, lam = rng.choice([0.95, 0.99, 1.0, 0.0]), rng.choice([0.95, 1.0, 0.0])
        lam_v = rng.choice([lam, 1.0, 0.5])
        right = definition(p, gamma, lam, lam_v, np.float64)
        found = {"float32": definition(p, gamma, lam, lam_v, np.float32)} if batch % 10 == 0 else {}
        for impl in ways:
            device = "cuda" if impl == "cuda" else "cpu"
            result = turn_gae(**{k: x.to(device) for k, x in p.items()}, gamma=gamma, lam=lam, lam_v=lam_v, impl=impl)
            found[impl] = TurnTargets(*(x.cpu() for x in result))
            if impl != "torch":
                assert_rounded_once(found[impl], right, 100.0)
        for name, result in found.items():
            errors[name] = max([errors[name], *(float((a - b).abs().max()) for a, b in zip(result, right, strict=True))])
    assert max(errors[impl] for impl in ways) <= 3 * errors["float32"], errors


@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (1.0, 1.0)])
def test_lengths_from_none_to_a_hundred_thousand(gamma, lam):
    p = ragged(1, [0, 1, 100_000, 7, 0, 50, 4096, 3, 8192, 0])
    found = turn_gae(**p, gamma=gamma, lam=lam, lam_v=0.9, impl="cpp")
    assert_rounded_once(found, definition(p, gamma, lam, 0.9, np.float64), 1e4)


def test_equals_the_reference_in_float64():
    p = ragged(2, [5, 0, 40, 1])
    right = reference.turn_gae(**{k: x.double() if x.is_floating_point() else x for k, x in p.items()}, gamma=0.9, lam=0.8)
    assert_rounded_once(turn_gae(**p, gamma=0.9, lam=0.8, impl="cpp"), right, 1.0)


def test_any_number_of_threads_gives_the_same_bits():
    p = ragged(3, random.Random(3).choices([1, 7, 50, 3000, 20_000], k=60))
    flags = torch.rand(p["rewards"].shape[0], generator=torch.Generator().manual_seed(0))
    args = (
        p["rewards"],
        p["values"],
        p["q_values"],
        p["bootstrap"],
        flags < 0.1,
        flags < 0.9,
        p["cu_turns"],
        0.99,
        0.95,
        0.9,
        0.1,
        False,
        True,
    )
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3, 4, 7, 1):
            torch.set_num_threads(threads)
            runs.append(torch.ops.sapo_fast.turn_gae(*args))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_offsets_strides_and_layouts_do_not_matter():
    p = ragged(4, [3, 0, 9, 30])
    plain = turn_gae(**p, impl="cpp")
    wide = {k: torch.stack([x, x + 1], 1)[:, 0] for k, x in p.items()}
    for other in (wide, {**p, "cu_turns": p["cu_turns"].int()}, {**p, "cu_turns": p["cu_turns"].to(torch.int16)}):
        assert all(torch.equal(a, b) for a, b in zip(plain, turn_gae(**other, impl="cpp"), strict=True))
    assert turn_gae(p["rewards"], p["values"], cu_turns=p["cu_turns"], impl="cpp").q_targets is None


def test_no_turns():
    for cu in ([0], [0, 0, 0]):
        found = turn_gae(torch.zeros(0), torch.zeros(0), torch.zeros(0), cu_turns=torch.tensor(cu), impl="cpp")
        assert [x.shape for x in found] == [(0,)] * 3
    empty = torch.zeros(0)
    moments = torch.ops.sapo_fast.turn_gae(empty, empty, None, None, None, None, torch.tensor([0]), 1.0, 1.0, 1.0, 0.0, True, True)[3]
    assert moments.tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_trajectory(bad):
    p = ragged(5, [9, 30, 5, 2000, 4])
    clean = turn_gae(**p, impl="cpp")
    p["values"][20] = bad  # in the second
    with pytest.raises(ValueError, match=r"values\[20\] = .* is not finite \(trajectory 1, turn 11\)"):
        turn_gae(**p, impl="cpp")
    spoilt = turn_gae(**p, impl="cpp", check=False)
    own = torch.zeros(2048, dtype=torch.bool)
    own[9:39] = True
    for a, b in zip(clean, spoilt, strict=True):
        assert torch.equal(a[~own], b[~own])
    assert not spoilt.advantages[9:21].isfinite().any() and spoilt.advantages[21:39].isfinite().all()


def test_the_operator_sees_every_fault():
    """The check on the way says no where the checks in torch raise; those then find the words."""
    p = ragged(12, [3, 0, 70_000])
    r, v, q, after, cu = (p[k] for k in ("rewards", "values", "q_values", "bootstrap", "cu_turns"))

    def refused(r, v, q, after, cu):
        try:
            torch.ops.sapo_fast.turn_gae(r, v, q, after, None, None, cu, 1.0, 1.0, 1.0, 0.0, True, False)
        except RuntimeError:
            with pytest.raises(ValueError):
                turn_gae(r, v, q, cu_turns=cu, bootstrap=after, impl="cpp")
            return True
        return False

    assert not refused(r, v, q, after, cu)
    for at in (0, 2, 40_000, 70_002):
        for i, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
            spoilt = [x.clone() for x in (r, v, q)]
            spoilt[i][at] = bad
            assert refused(*spoilt, after, cu)
    for at in range(3):  # also that of the empty trajectory
        assert refused(r, v, q, torch.where(torch.arange(3) == at, float("nan"), after), cu)
    for offsets in ([1, 3, 3, 70_003], [0, 3, 2, 70_003], [0, 3, 3, 70_002]):
        assert refused(r, v, q, after, torch.tensor(offsets))


def test_numbers_that_overflow_are_no_fault_of_the_input():
    r = torch.full((4,), 3e38)
    for impl in ("cpp", "torch"):
        assert turn_gae(r, -r, cu_turns=torch.tensor([0, 4]), gamma=1.0, lam=1.0, impl=impl).advantages.tolist() == [float("inf")] * 4


# ------------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("seed", range(20))
def test_tokens_equal_the_reference(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 5, 64, 500, 3000]) for _ in range(6)]
    p = ragged(seed, lengths)
    rewards, values, cu = p["rewards"], p["values"], p["cu_turns"]
    mask = (torch.rand(len(rewards), generator=torch.Generator().manual_seed(seed)) < 0.6) | (torch.arange(len(rewards)) % 7 < 4)
    mask[cu[:-1][cu.diff() > 0]] = True  # a reward before any response is an error, tested elsewhere
    junk = torch.where(mask, values, torch.tensor(float("nan")))
    a, returns = token_gae(rewards, junk, mask, cu_tokens=cu, gamma=0.99, lam=0.95, impl="cpp")
    right = reference.token_gae(rewards.double(), values.double(), mask, cu_tokens=cu, gamma=0.99, lam=0.95)
    assert torch.allclose(a.double(), right[0], rtol=1.2e-7, atol=1e-10) and torch.allclose(
        returns.double(), right[1], rtol=1.2e-7, atol=1e-10
    )
    assert not a[~mask].any() and not returns[~mask].any()
    slow = token_gae(rewards, junk, mask, cu_tokens=cu, gamma=0.99, lam=0.95, impl="torch")
    assert torch.allclose(a, slow[0], atol=1e-4) and torch.allclose(returns, slow[1], atol=1e-4)


def test_a_token_value_that_is_not_finite_is_named():
    values = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    token_gae(torch.zeros(4), values, torch.tensor([1, 1, 0, 1]), cu_tokens=torch.tensor([0, 4]), impl="cpp")
    with pytest.raises(ValueError, match=r"values\[2\] = nan"):
        token_gae(torch.zeros(4), values, torch.tensor([1, 1, 1, 1]), cu_tokens=torch.tensor([0, 4]), impl="cpp")


def test_a_token_paid_before_any_action_is_refused():
    mask = torch.tensor([True, False, False, True])
    cu = torch.tensor([0, 1, 4])
    token_gae(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4), mask, cu_tokens=cu, impl="cpp")
    with pytest.raises(ValueError, match=r"rewards\[2\] is non-zero before the first response token of sequence 1"):
        token_gae(torch.tensor([1.0, 0.0, 0.5, 1.0]), torch.zeros(4), mask, cu_tokens=cu, impl="cpp")


def test_tokens_with_two_lambdas_and_bootstrap_are_turns_when_all_are_actions():
    p = ragged(6, [4, 0, 700, 2000])
    mask = torch.ones(len(p["rewards"]), dtype=torch.bool)
    ops = torch.ops.sapo_fast
    tokens = ops.token_gae(p["rewards"], p["values"], p["bootstrap"], mask, p["cu_turns"], 0.99, 0.95, 0.8, True, True)
    turns = ops.turn_gae(p["rewards"], p["values"], None, p["bootstrap"], None, None, p["cu_turns"], 0.99, 0.95, 0.8, 0.0, True, True)
    for a, b in zip(tokens[:3], turns[:3], strict=True):
        assert torch.allclose(a, b, rtol=1.2e-7, atol=1e-12)
    assert torch.allclose(tokens[3], turns[3], rtol=1e-7)


# ------------------------------------------------------------------------------------------------- moments and normalisation


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_are_those_of_the_advantages(offset):
    p = ragged(7, random.Random(7).choices([0, 1, 17, 400, 5000], k=40))
    p["rewards"] += offset
    flags = torch.rand(len(p["rewards"]), generator=torch.Generator().manual_seed(1))
    invalid, valid = flags < 0.2, flags < 0.8
    args = (p["rewards"], p["values"], None, None, invalid, valid, p["cu_turns"], 0.9, 0.9, 0.9, 0.25, True, True)
    advantages, _, _, moments = torch.ops.sapo_fast.turn_gae(*args)
    x = (advantages.double() - 0.25 * invalid)[valid]
    want = [len(x), float(x.mean()), float((x - x.mean()).square().sum()), float(x.abs().max())]
    assert moments.tolist() == pytest.approx(want, rel=1e-11)


@pytest.mark.parametrize("impl", ["cpp", "torch"])
def test_at_once_is_one_after_the_other(impl):
    p = ragged(8, [5, 0, 300, 40, 1])
    flags = torch.rand(346, generator=torch.Generator().manual_seed(2))
    for penalty in ({}, {"invalid": flags < 0.3}, {"invalid": (flags < 0.3).int(), "valid": flags < 0.9, "invalid_penalty": 0.5}):
        targets, normalized = normalized_turn_gae(**p, gamma=0.95, lam=0.9, **penalty, impl=impl)
        alone = turn_gae(**p, gamma=0.95, lam=0.9, impl=impl)
        assert all(torch.equal(a, b) for a, b in zip(targets, alone, strict=True))
        assert torch.allclose(normalized, normalize_advantages(alone.advantages, **penalty), rtol=1e-6, atol=1e-7)


def _rank(rank: int, store: str, parts: list, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}", timeout=timedelta(seconds=60))
    found = [normalized_turn_gae(**part, process_group=torch.distributed.group.WORLD, impl="cpp")[1] for part in parts[rank]]
    results.put((rank, [x.tolist() for x in found]))
    torch.distributed.destroy_process_group()


def test_two_processes_normalise_at_once_as_one(tmp_path):
    """Moments merge exactly where the ranks hold other numbers of turns, none among them."""
    whole, parts = [], [[], []]
    for batch, cut in enumerate((2, 0)):  # trajectories of the first rank
        p = ragged(20 + batch, [5, 40, 0, 7])
        turns = int(p["cu_turns"][cut])
        whole.append(normalized_turn_gae(**p, impl="torch")[1])
        for rank, (some, those) in enumerate(((slice(None, turns), slice(None, cut)), (slice(turns, None), slice(cut, None)))):
            offsets = p["cu_turns"][: cut + 1] if rank == 0 else p["cu_turns"][cut:] - turns
            part = {k: p[k][some].clone() for k in ("rewards", "values", "q_values")}
            parts[rank].append({**part, "cu_turns": offsets.clone(), "bootstrap": p["bootstrap"][those].clone()})
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path / "store"), parts, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=100) for _ in ranks)
    for process in ranks:
        process.join(20)
        assert process.exitcode == 0
    for batch, right in enumerate(whole):
        assert torch.allclose(torch.tensor(found[0][batch] + found[1][batch]), right, rtol=1e-6, atol=1e-6)


def test_equal_advantages_normalise_to_nothing():
    _, normalized = normalized_turn_gae(torch.full((3,), 0.1), torch.zeros(3), cu_turns=torch.tensor([0, 1, 2, 3]), impl="cpp")
    assert normalized.tolist() == [0.0, 0.0, 0.0]


def test_at_once_refuses_what_overflows():
    r = torch.full((4,), 3e38)
    with pytest.raises(ValueError, match="not finite"):
        normalized_turn_gae(r, -r, cu_turns=torch.tensor([0, 4]), gamma=1.0, lam=1.0, impl="cpp")


# ------------------------------------------------------------------------------------------------------ a citizen of torch


def operator_cases() -> list[tuple[str, tuple]]:
    p = ragged(9, [3, 0, 6])
    r, v, q, after, cu = (p[k] for k in ("rewards", "values", "q_values", "bootstrap", "cu_turns"))
    flag = r > 0
    return [
        ("turn_gae", (r, v, q, after, flag, flag, cu, 0.9, 0.9, 0.8, 0.1, True, True)),
        ("turn_gae", (r, v, None, None, None, None, cu.int(), 0.9, 0.9, 0.9, 0.0, False, False)),
        ("token_gae", (r, v, after, flag, cu, 0.9, 0.9, 0.8, False, True)),
        ("normalize", (r, torch.tensor([9.0, 0.1, 4.0, 2.0], dtype=torch.float64), flag, None, 0.1, 1e-8, 1e-4)),
    ]


@pytest.mark.parametrize("name, args", operator_cases())
def test_opcheck(name, args):
    assert set(torch.library.opcheck(getattr(torch.ops.sapo_fast, name).default, args).values()) == {"SUCCESS"}


def test_compiles_without_a_break():
    p = ragged(10, [3, 6])

    def step(rewards, values, q_values, cu_turns):
        found = torch.ops.sapo_fast.turn_gae(rewards * 2, values, q_values, None, None, None, cu_turns, 0.9, 0.9, 0.9, 0.0, True, True)
        return found[0] + 1, found[3]

    args = (p["rewards"], p["values"], p["q_values"], p["cu_turns"])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*args)
    assert all(torch.equal(a, b) for a, b in zip(compiled, step(*args), strict=True))


def test_a_direct_call_cannot_read_out_of_bounds():
    p = ragged(11, [4, 5])
    r, v, cu = p["rewards"], p["values"], p["cu_turns"]
    op = torch.ops.sapo_fast.turn_gae
    rest = (0.9, 0.9, 0.9, 0.0, False, True)
    for args, words in (
        ((r, v[:-1], None, None, None, None, cu), "values must have shape"),
        ((r, v.double(), None, None, None, None, cu), "values has the wrong dtype"),
        ((r, torch.randn(9, 2)[:, 0], None, None, None, None, cu), "values must be contiguous"),
        ((r, v, None, torch.zeros(3), None, None, cu), "bootstrap must have shape"),
        ((r, v, None, None, r, None, cu), "invalid has the wrong dtype"),
        ((r, v, None, None, None, None, cu + 1), "offsets must start at 0"),
        ((r, v, None, None, None, None, torch.tensor([0, 7, 4, 9])), "never fall"),
        ((r, v, None, None, None, None, torch.tensor([0, 4])), "end at 9"),
        ((r, v, None, None, None, None, cu.double()), "offsets has the wrong dtype"),
        ((r, v, None, None, None, None, torch.tensor([0])), "name no trajectory"),
    ):
        with pytest.raises(RuntimeError, match=words):
            op(*args, *rest)


# ------------------------------------------------------------------------------------------------------------ the libraries


def test_a_library_from_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    assert "was built from other sources" in native._load("_cpu")


def test_a_missing_library_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_HERE", tmp_path)
    assert "no record of the build" in native._load("_cuda")
    (tmp_path / "native_build.json").write_text('{"_cuda": "nvcc is not on PATH"}')
    assert native._load("_cuda") == "not compiled at install: nvcc is not on PATH"


def test_the_registry_tells_what_runs():
    lines = {x.backend: x for x in backends.explain() if x.operation == "turn_gae"}
    assert lines["cpp"].available
    if not torch.cuda.is_available():
        assert lines["cuda"].reason == "torch finds no CUDA device"
        with pytest.raises(ValueError, match="serves cuda tensors"):
            turn_gae(torch.zeros(1), torch.zeros(1), cu_turns=torch.tensor([0, 1]), impl="cuda")


def test_the_cuda_library_loads_into_a_cpu_torch_given_the_one_symbol_it_lacks(tmp_path):
    """Everything but the stream's getter resolves in any torch, and its kernels are registered for CUDA tensors."""
    library = Path(native.__file__).with_name("_cuda.abi3.so")
    if not library.exists():
        assert native._why_missing("_cuda") != "", "the install must say why"
        pytest.skip(native._why_missing("_cuda"))
    stub = tmp_path / "libtorch_cuda.so"
    source = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }'
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-Wl,-soname,libtorch_cuda.so", "-o", str(stub)]
    subprocess.run(command, input=source, text=True, check=True)
    program = f"""
import ctypes, torch
from sapo_fast import native
assert native.cpu_obstacle() is None
if torch.version.cuda is None:
    ctypes.CDLL({str(stub)!r})
assert native._load("_cuda") is None, native._load("_cuda")
for name in ("turn_gae", "token_gae", "normalize"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("sapo_fast::" + name, "CUDA")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_libraries_need_no_python():
    """One file serves every Python: nothing of its C API is referred to."""
    library = ctypes.CDLL(str(Path(native.__file__).with_name("_cpu.abi3.so")))
    assert library.sapo_fast_interface() == native.INTERFACE
    tool = shutil.which("nm")
    assert tool is not None, "nm comes with the compiler"
    for name in ("_cpu", "_cuda"):
        path = Path(native.__file__).with_name(f"{name}.abi3.so")
        if path.exists():
            assert (
                " Py" not in subprocess.run([tool, "-D", "--undefined-only", str(path)], capture_output=True, text=True, check=True).stdout
            )
