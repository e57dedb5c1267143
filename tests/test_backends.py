"""The seam: what is chosen, what is refused, what is said."""

import logging
import subprocess
import sys

import pytest
import torch

from sapo_fast import LossConfig, backends, fused_loss, row_pass, token_logprobs, turn_gae

CPU = torch.device("cpu")


@pytest.fixture
def table(monkeypatch):
    """A registry of its own, with the shipped providers imported."""
    backends.explain()
    for name in ("_table", "_loaded", "_probed"):
        monkeypatch.setattr(backends, name, dict(getattr(backends, name)))
    monkeypatch.setattr(backends, "_announced", set())
    for key in [k for k in backends._table if k[1] != "torch"]:
        del backends._table[key]
    return backends


def marked(calls, name):
    def fn(rewards, values, q_values, bootstrap, cu_turns, gamma, lam, lam_v):
        calls.append((name, rewards.dtype, rewards.is_contiguous(), cu_turns.dtype, bootstrap.shape, lam_v))
        return rewards + 1, values, q_values

    return fn


def test_torch_is_always_there_and_every_backend_is_explained():
    lines = backends.explain()
    assert {(x.operation, x.backend) for x in lines} == {(o, b) for o in backends.OPERATIONS for b in backends.IMPLS[1:]}
    assert all(x.available for x in lines if x.backend == "torch") and all(x.reason for x in lines)


def test_a_registered_kernel_is_used_and_gets_clean_input(table):
    calls = []
    table.register("turn_gae", "cpp", lambda: marked(calls, "cpp"), lambda: None, devices=("cpu",))
    r = torch.zeros(6)[::2]
    got = turn_gae(r, r, cu_turns=torch.tensor([0, 1, 3], dtype=torch.int32), lam=0.5)
    assert got.advantages.tolist() == [1, 1, 1]
    assert calls == [("cpp", torch.float32, True, torch.int64, (2,), 0.5)]
    turn_gae(r, r, cu_turns=torch.tensor([0, 3]), impl="torch")
    assert len(calls) == 1


def test_auto_passes_over_what_cannot_run_and_says_so_once(table, caplog):
    table.register("turn_gae", "cpp", lambda: None, lambda: "no compiler was found at installation", devices=("cpu",))
    table.register("turn_gae", "cuda", lambda: None, lambda: None, devices=("cuda",))
    with caplog.at_level(logging.INFO, logger="sapo_fast"):
        for _ in range(3):
            assert table.select("turn_gae", "auto", CPU, torch.float32)[0] == "torch"
    assert len(caplog.records) == 1
    assert "turn_gae on cpu: torch" in caplog.text and "no compiler was found" in caplog.text and "serves cuda tensors" in caplog.text


def test_an_explicit_choice_is_never_replaced(table):
    table.register("turn_gae", "cpp", lambda: None, lambda: "no compiler was found at installation", devices=("cpu",))
    table.register("turn_gae", "cuda", lambda: None, lambda: None, devices=("cuda",))
    table.register("row_pass", "triton", lambda: None, lambda: None, devices=("cuda",), dtypes=(torch.float32, torch.bfloat16))
    with pytest.raises(RuntimeError, match="impl='cpp' cannot be used for turn_gae: no compiler was found at installation; use impl="):
        table.select("turn_gae", "cpp", CPU, torch.float32)
    with pytest.raises(ValueError, match="impl='cuda' serves cuda tensors, these are on cpu"):
        table.select("turn_gae", "cuda", CPU, torch.float32)
    with pytest.raises(ValueError, match="impl='triton' serves cuda tensors, these are on cpu"):
        z = torch.zeros(1, 4)
        token_logprobs(logits=z, value_token_ids=(2, 3), action_rows=torch.tensor([0]), actions=torch.tensor([0]), impl="triton")
    with pytest.raises(ValueError, match="impl='triton' serves float32, bfloat16, these are float64"):
        table.select("row_pass", "triton", torch.device("cuda"), torch.float64)
    with pytest.raises(RuntimeError, match="turn_gae has no triton kernel in this installation"):
        table.select("turn_gae", "triton", CPU, torch.float32)
    with pytest.raises(ValueError, match="impl must be one of auto, torch, cpp, triton, cuda; got 'numba'"):
        table.select("turn_gae", "numba", CPU, torch.float32)


def test_probe_and_load_run_once(table):
    counts = {"probe": 0, "load": 0}

    def count(name, value):
        counts[name] += 1
        return value

    table.register("row_pass", "cpp", lambda: count("load", "kernel"), lambda: count("probe", None), devices=("cpu",))
    for _ in range(3):
        assert table.select("row_pass", "auto", CPU, torch.float32) == ("cpp", "kernel")
    assert counts == {"probe": 1, "load": 1}


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="operation must be one of"):
        backends.register("gae", "cpp", lambda: None, lambda: None, devices=("cpu",))
    with pytest.raises(ValueError, match="backend must be one of"):
        backends.register("turn_gae", "auto", lambda: None, lambda: None, devices=("cpu",))
    with pytest.raises(ValueError, match="impl must be one of"):
        fused_loss(
            logits=torch.zeros(1, 4), value_token_ids=(2, 3), action_rows=torch.tensor([0]), actions=torch.tensor([0]),
            old_logprobs=None, advantages=torch.zeros(1), impl="magic",
        )  # fmt: skip


def test_import_needs_torch_and_numpy_alone():
    """`import sapo_fast` and a call, with everything else out of reach."""
    code = (
        "import sys\n"
        "for name in ('transformers', 'pydantic', 'yaml', 'triton', 'safetensors', 'gymnasium', 'vllm', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "import torch, sapo_fast\n"
        "x = torch.zeros(2)\n"
        "print(sapo_fast.turn_gae(x, x, cu_turns=torch.tensor([0, 2]), impl='torch').advantages.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[0.0, 0.0]", done.stderr


def test_a_registered_row_kernel_serves_both_public_operations(table):
    calls = []

    class Counting(row_pass.TorchRows):
        def stats(self, logits, rows, *rest):
            calls.append(("stats", tuple(logits.shape), rows is None))
            return super().stats(logits, rows, *rest)

        def grad(self, logits, rows, actions, stats, a, b, value_token_ids, temperature, out):
            calls.append(("grad", tuple(logits.shape), rows is None, out is logits))
            super().grad(logits, rows, actions, stats, a, b, value_token_ids, temperature, out)

    table.register("row_pass", "cpp", Counting, lambda: None, devices=("cpu",), dtypes=(torch.float32,))
    hidden, head = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3)
    at = {"value_token_ids": (5, 6), "action_rows": torch.tensor([1, 4]), "actions": torch.tensor([0, 2])}
    loss = {"old_logprobs": None, "advantages": torch.ones(2), "config": LossConfig(kl_coef=0.0)}
    fused_loss(hidden=hidden, lm_head=head, **at, **loss)
    assert calls == [("stats", (2, 7), True), ("grad", (2, 7), True, True)], "compact rows, gradient in place"
    calls.clear()
    logits = torch.randn(5, 7, requires_grad=True)
    fused_loss(logits=logits, **at, **loss).loss.backward()
    token_logprobs(logits=logits, **at)[0].sum().backward()
    assert calls == [("stats", (5, 7), False), ("grad", (5, 7), False, False)] * 2, "rows picked from [T, V]"
    calls.clear()
    fused_loss(logits=logits.double(), **at, **loss)
    fused_loss(logits=logits, **at, **loss, impl="torch")
    assert calls == []
