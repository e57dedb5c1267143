"""The public operations with impl="triton", and how it is chosen or refused."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_ops import CONFIGS, FORMS, HALF_FLOOR, WIDE, as_logits, cast, error, problem, run, up
from helpers_triton import DEVICE, DTYPES, SMALL, assert_as_good, check_one, to_device

pytest.importorskip("triton")

from sapo_fast import backends, fused_loss, reference, row_pass, token_logprobs, triton_rows  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
KEYS = (*WIDE, "value_token_ids", "action_rows", "actions")


@pytest.fixture
def small(monkeypatch):
    """Several blocks a row, several chunks a call."""
    monkeypatch.setattr(triton_rows, "LAUNCHES", SMALL["16 at a time"])
    monkeypatch.setitem(row_pass.CHUNK_BYTES, DEVICE, 4 * 37 * 4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("form", FORMS)
def test_error_is_no_worse_than_plain_torch(form, config, small):
    for seed, dtype in enumerate(DTYPES):
        p = to_device(cast(FORMS[form](problem(seed)), dtype))
        right, plain = run(reference.fused_loss, up(p), config=config), run(reference.fused_loss, p, config=config)
        assert_as_good(run(fused_loss, p, config=config, impl="triton"), plain, right, HALF_FLOOR[dtype])


@pytest.mark.parametrize("form", FORMS)
def test_repeated_rows_add(form, small):
    p = problem(7, T=4, N=9, M=3)
    p["actions"][:3], p["action_rows"][:3] = p["actions"][0], 2
    p = to_device(cast(FORMS[form](p), torch.float32))
    right, plain = run(reference.fused_loss, up(p)), run(reference.fused_loss, p)
    found = run(fused_loss, p, impl="triton")
    assert_as_good(found, plain, right, HALF_FLOOR[torch.float32])
    if form == "logits":
        base = p["logits"].clone().requires_grad_()
        fused_loss(**{**p, "logits": base * 1.0}, inplace=True, impl="triton").loss.backward()
        assert error(base.grad, right["d_logits"]) < 2e-6


def test_in_place_is_the_same(small):
    p = to_device(cast(as_logits(problem(8, repeat=False)), torch.float32))
    right = run(fused_loss, p, impl="triton", upstream=0.5)
    base = p["logits"].clone().requires_grad_()
    out = base * 1.0
    (fused_loss(**{**p, "logits": out}, inplace=True, impl="triton").loss * 0.5).backward()
    assert error(base.grad, right["d_logits"]) < 1e-6
    assert torch.equal(out.detach(), base.grad)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_as_token_logprobs_and_every_time(form, small):
    p = to_device(cast(FORMS[form](problem(4)), torch.float32))
    first = run(fused_loss, p, impl="triton")
    logprob, entropy = token_logprobs(**{k: p[k] for k in KEYS if k in p}, impl="triton")
    assert torch.equal(first["logprobs"], logprob) and torch.equal(first["entropy"], entropy)
    again = run(fused_loss, p, impl="triton")
    assert all(torch.equal(first[k], again[k]) for k in first)


def test_unselected_rows_are_never_read(small):
    p = to_device(cast(as_logits(problem(14)), torch.float32))
    used = torch.zeros(17, dtype=torch.bool, device=DEVICE)
    for k in ("action_rows", "v_rows", "q_rows"):
        used[p[k]] = True
    junk = {**p, "logits": p["logits"].clone()}
    junk["logits"][~used] = torch.nan
    right, found = run(fused_loss, p, impl="triton"), run(fused_loss, junk, impl="triton")
    assert not used.all() and all(torch.equal(found[k], right[k]) for k in right)
    assert (found["d_logits"][~used] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_learn_from(form):
    p = to_device(cast(FORMS[form](problem(22)), torch.float32))
    none = {k: v[:0] if isinstance(v, torch.Tensor) and k not in WIDE else v for k, v in p.items()}
    found = run(fused_loss, none, impl="triton")
    assert float(found["loss"]) == 0 and all((found[k] == 0).all() for k in found if k.startswith("d_"))


@pytest.mark.parametrize("form", FORMS)
def test_compiles_without_a_break(form):
    p = to_device(cast(FORMS[form](problem(28, T=9, N=5)), torch.float32))
    key = "logits" if form == "logits" else "hidden"
    right = run(fused_loss, p, impl="triton")
    torch._dynamo.reset()
    x = p[key].clone().requires_grad_()
    loss = torch.compile(lambda x: fused_loss(**{**p, key: x}, impl="triton").loss, fullgraph=True, backend="aot_eager")(x)
    loss.backward()
    assert error(loss.detach(), right["loss"]) < 1e-6 and error(x.grad, right[f"d_{key}"]) < 1e-6


@pytest.mark.parametrize("seed", range(30))
def test_fuzz(seed):
    check_one(seed)


def test_what_is_refused():
    p = to_device(as_logits(problem(1)))
    with pytest.raises(ValueError, match="impl='triton' serves bfloat16, float16, float32, these are float64"):
        fused_loss(**p, impl="triton")
    with pytest.raises(RuntimeError, match="turn_gae has no triton kernel"):
        backends.select("turn_gae", "triton", torch.device(DEVICE), torch.float32)


def test_a_cpu_is_served_by_name_and_never_by_auto():
    cpu = torch.device("cpu")
    if DEVICE == "cpu":
        assert backends.select("row_pass", "triton", cpu, torch.float32)[0] == "triton"
    assert backends.select("row_pass", "auto", cpu, torch.float32)[0] != "triton"


def test_reasons_are_told(monkeypatch):
    monkeypatch.setattr(triton_rows, "_interpreted", lambda: False)
    if DEVICE == "cpu":
        assert "torch finds no GPU" in triton_rows.obstacle.__wrapped__()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest))
    assert triton_rows.obstacle.__wrapped__() == "triton is not installed: pip install 'sapo_fast[triton]'"


def test_other_tests_do_not_inherit_the_interpreter():
    assert not triton_rows._interpreted()


def test_importing_the_package_does_not_import_triton():
    """And without the interpreter a CPU is refused, by name too."""
    code = (
        "import sys, torch\n"
        "before = 'triton' in sys.modules\n"
        "import sapo_fast.triton_rows\n"
        "assert ('triton' in sys.modules) == before\n"
        "i = torch.tensor([0])\n"
        "sapo_fast.token_logprobs(logits=torch.zeros(1, 4), value_token_ids=(2, 3), action_rows=i, actions=i, impl='triton')\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert "ValueError: impl='triton' serves cuda tensors, these are on cpu" in done.stderr


def test_offline_compilation_is_as_the_table_has_it():
    """Two launches for sm_90 without a GPU: no spills, 16-byte accesses, registers as recorded for this version of Triton."""
    command = [sys.executable, "bench/triton_offline.py", "--check", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gpu_check_lists_its_checks_and_says_what_it_lacks():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    listed = subprocess.run([sys.executable, "bench/gpu_check.py", "--list"], capture_output=True, text=True, cwd=ROOT, env=env)
    assert listed.returncode == 0 and {"large", "races", "graph", "speed"} <= {line.split()[0] for line in listed.stdout.splitlines()}, (
        listed.stderr
    )
    if not torch.cuda.is_available():
        done = subprocess.run([sys.executable, "bench/gpu_check.py"], capture_output=True, text=True, cwd=ROOT, env=env)
        assert done.returncode == 2 and "torch finds no GPU" in done.stderr
