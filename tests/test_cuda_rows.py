"""The row pass in CUDA C++ as torch sees it, without a GPU: what Python hands to the operators, their schemas and shapes, and what the registry says.

The kernels themselves run on the CPU under an emulator (ctest; tests/native/test_rows_cuda.cpp). Here their place is taken by plain torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sapo_fast import LossConfig, backends, cuda_rows, fused_loss, native

LIBRARY = Path(native.__file__).with_name("_cuda.abi3.so")

STANDIN = """
import ctypes, sys, torch
from sapo_fast import LossConfig, backends, cuda_rows, fused_loss, native, token_logprobs
from sapo_fast.loss_terms import Tokens
from sapo_fast.row_pass import RowStats, TorchRows, one_pass

assert native.cpu_obstacle() is None
if torch.version.cuda is None:
    ctypes.CDLL(sys.argv[1])
assert native._load("_cuda") is None, native._load("_cuda")
cuda_rows.register_fakes()
rows_in_torch, library, calls = TorchRows(), torch.library.Library("sapo_fast", "FRAGMENT"), []


def standin(name):
    def register(fn):
        def counted(*args):
            calls.append(name)
            return fn(*args)
        library.impl("cuda_row_" + name, counted, "CPU")
    return register


@standin("stats")
def _(logits, rows, actions, plus, minus, temperature):
    return torch.stack(rows_in_torch.stats(logits, rows, actions, (plus, minus), temperature))


@standin("loss")
def _(logits, rows, actions, old, advantages, weights, ref, scale, plus, minus, temperature, low, high, dual, kl_coef, entropy_coef, out):
    assert rows is None or len(rows.unique()) == len(rows), "a row repeats"
    limits = [None if x in (0.0, float("inf")) else x for x in (low, high, dual)]
    config = LossConfig(
        clip_low=None if limits[0] is None else 1 - low, clip_high=None if limits[1] is None else high - 1, dual_clip=limits[2], kl_coef=kl_coef,
        entropy_coef=entropy_coef, temperature=temperature,
    )
    tokens = Tokens(old, advantages, weights, ref)
    return torch.stack(one_pass(rows_in_torch, logits, rows, actions, tokens, config, scale, (plus, minus), out, True))


@standin("grad")
def _(logits, rows, actions, stats, a, b, same, first, plus, minus, temperature, out):
    # As csrc/cuda/rows.cuh: a, b of whole rows, written by the first token of each; then the entries at all actions.
    for i in range(len(actions)):
        row = i if rows is None else int(rows[i])
        if first is not None and first[i] != i:
            continue
        q = (logits[row].float() / temperature - stats[1, i] - stats[2, i]).exp()
        slope = -a[i] if b is None else b[i] * ((logits[row].float() / temperature - stats[1, i]) + stats[3, i]) - a[i]
        g = q * slope / temperature
        g[[plus, minus]] = 0
        out[row] = g.to(out.dtype)
    for i in range(len(actions)):
        row = i if rows is None else int(rows[i])
        q, p = stats[0, i].exp(), a[i] if same is None else same[i]
        g = p * -torch.expm1(stats[0, i]) - (a[i] - p) * q
        if b is not None:
            g = g + b[i] * q * (stats[0, i] + stats[2, i] + stats[3, i])
        out[row, actions[i]] = (g / temperature).to(out.dtype)


@standin("scale")
def _(x, factor):
    x.mul_(factor.float())


backends.register("row_pass", "cuda", cuda_rows.CudaRows, lambda: None, devices=("cpu",), dtypes=(torch.bfloat16, torch.float16, torch.float32))
g = torch.Generator().manual_seed(0)
V, T = 37, 12
z = torch.randn(T, V, generator=g)
# Everything on; then every clip, the old log-probs, the weights and the entropy off.
plain = LossConfig(clip_low=None, clip_high=None, dual_clip=None, kl_coef=0.0, entropy_coef=0.0)
for config in (LossConfig(kl_coef=0.1, entropy_coef=0.05, temperature=0.7), plain):
    for rows in (torch.tensor([3, 1, 7, 9]), torch.tensor([3, 1, 3, 3])):
        for inplace in (False, True):
            results = []
            for impl in ("torch", "cuda"):
                leaf = z.clone().requires_grad_()
                full = config is not plain
                out = fused_loss(
                    logits=leaf * 1.0, value_token_ids=(0, V - 1), action_rows=rows, actions=torch.tensor([5, 6, 5, 8]),
                    old_logprobs=torch.tensor([-3.0, -4.0, -3.5, -2.0]) if full else None, advantages=torch.tensor([1.0, -1.0, 0.5, -2.0]),
                    ref_logprobs=torch.tensor([-3.0, -3.0, -3.0, -3.0]) if full else None,
                    token_weights=torch.tensor([1.0, 0.5, 2.0, 1.0]) if full else None, num_tokens=7, v_rows=torch.tensor([2, 3]),
                    v_old=torch.tensor([0.1, 0.2]), v_targets=torch.tensor([1.0, 2.0]), config=config, impl=impl, inplace=inplace,
                )
                (3 * out.loss).backward()
                results.append((out.loss, out.logprobs, out.entropy, leaf.grad))
            for ours, right in zip(*results, strict=True):
                assert torch.allclose(ours, right, atol=1e-6), (config, rows, inplace)
assert {"stats", "loss", "grad", "scale"} == set(calls), set(calls)

for impl in ("torch", "cuda"):  # both gradients at once, without rows in the hidden form
    h, w = torch.randn(5, 4, generator=g.manual_seed(1)), torch.randn(V, 4, generator=g)
    w.requires_grad_()
    logprobs, entropy = token_logprobs(
        hidden=h, lm_head=w, value_token_ids=(1, 2), action_rows=torch.tensor([0, 0, 4]), actions=torch.tensor([5, 7, 9]), temperature=2.0, impl=impl
    )
    (logprobs.sum() + 0.3 * entropy.square().sum()).backward()
    if impl == "torch":
        right = w.grad
assert torch.allclose(w.grad, right, atol=1e-5)

# Shapes and mutations as declared; torch.compile takes the calls as they stand.
actions, stats = torch.arange(T) + 1, torch.zeros(4, T)
one = torch.ones((), dtype=torch.float64)
for name, args in (
    ("stats", (z, None, actions, 0, V - 1, 1.0)),
    ("loss", (z, None, actions, None, torch.ones(T), None, None, one, 0, V - 1, 1.0, 0.8, 1.2, 3.0, 0.0, 0.0, z.clone())),
    ("grad", (z, None, actions, stats, torch.ones(T), None, None, None, 0, V - 1, 1.0, z.clone())),
    ("scale", (z.clone(), one)),
):
    checks = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(getattr(torch.ops.sapo_fast, "cuda_row_" + name).default, args, test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}, (name, found)
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """What a CPU torch lacks to load the library: the one function of libtorch_cuda.so."""
    if not LIBRARY.exists():
        assert native._why_missing("_cuda") != "", "the install must say why"
        pytest.skip(native._why_missing("_cuda"))
    path = tmp_path / "libtorch_cuda.so"
    source = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }'
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-Wl,-soname,libtorch_cuda.so", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def test_python_hands_the_operators_what_they_want(stub: Path):
    """Losses and gradients by way of the operators' schemas, plain torch in the kernels' place."""
    subprocess.run([sys.executable, "-c", STANDIN, str(stub)], check=True, timeout=200)


def test_the_registry_says_why_it_cannot_run():
    line = next(x for x in backends.explain() if (x.operation, x.backend) == ("row_pass", "cuda"))
    if torch.cuda.is_available():
        assert line.available or "GPU" in line.reason or "kernels" in line.reason
    else:
        assert line.reason == "torch finds no CUDA device" and cuda_rows.obstacle() == line.reason
        with pytest.raises(ValueError, match="serves cuda tensors"):
            fused_loss(
                logits=torch.zeros(1, 5), value_token_ids=(0, 1), action_rows=torch.tensor([0]), actions=torch.tensor([2]), old_logprobs=None,
                advantages=torch.ones(1), config=LossConfig(kl_coef=0.0), impl="cuda",
            )  # fmt: skip


def test_a_gpu_whose_numbers_differ_is_refused(monkeypatch):
    """Before its first use the kernel is compared with plain torch; here a kernel that forgets the temperature of nothing but its gradient."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "to", _to_the_cpu(torch.Tensor.to))
        monkeypatch.setattr(torch, "tensor", _on_the_cpu(torch.tensor))
        monkeypatch.setattr(torch, "ones", _on_the_cpu(torch.ones))
    right = cuda_rows.TorchRows()
    monkeypatch.setattr(cuda_rows, "CudaRows", lambda: right)
    assert cuda_rows._differs(300) is None

    class Wrong(cuda_rows.TorchRows):
        def grad(self, logits, rows, actions, stats, a, b, value_token_ids, temperature, out):
            super().grad(logits, rows, actions, stats, 1.1 * a, b, value_token_ids, temperature, out)

    monkeypatch.setattr(cuda_rows, "CudaRows", Wrong)
    assert "other numbers than plain torch (V = 300)" in cuda_rows._differs(300)

    class Failing(cuda_rows.TorchRows):
        def stats(self, *given):
            raise RuntimeError("CUDA: no kernel image")

    monkeypatch.setattr(cuda_rows, "CudaRows", Failing)
    assert "no kernel image" in cuda_rows._differs(300)


def _to_the_cpu(to):
    return lambda x, *args, **options: to(x, *("cpu" if arg == "cuda" else arg for arg in args), **options)


def _on_the_cpu(make):
    return lambda *args, **options: make(*args, **{k: v for k, v in options.items() if k != "device"})
