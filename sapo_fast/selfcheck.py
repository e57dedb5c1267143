"""`sapo-fast check`: every backend this machine can run, against the float64 reference, beside what plain torch would have got.

Legend: T rows of logits and hidden states, N action tokens, M turns, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, reference
from .advantage import turn_gae
from .logprobs import token_logprobs
from .loss import fused_loss
from .loss_terms import LossConfig

_WIDE = ("logits", "hidden", "lm_head")  # what the model computes in its own type
_CONFIG = LossConfig(entropy_coef=0.02, kl_coef=0.1, temperature=0.9)
# A result is right when its error is at most this many times plain torch's in the same type, plus a few units in the last place.
_TIMES, _UNITS = 3.0, 8.0


class CheckRow(NamedTuple):
    """One line of the table. Errors are relative to the largest entry of the right answer, the worst over outputs and gradients."""

    operation: str
    backend: str
    device: str
    dtype: str
    error: float
    torch_error: float
    ok: bool


def rows() -> list[CheckRow]:
    """Check every available backend on every device and type it serves."""
    found = []
    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    for line in backends.explain():
        if not line.available:
            continue
        for device in devices:
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                if line.operation == "turn_gae" and dtype.itemsize < 4 or not _served(line.operation, line.backend, device, dtype):
                    continue
                for name, call, plain, problem in _cases(line.operation):
                    found.append(_compare(name, line.backend, device, dtype, call, plain, problem))
    return found


def run() -> int:
    """Print the table; 0 when every row is right, else 1."""
    table = rows()
    width = max(len(row.operation) for row in table)
    print(f"{'operation':<{width}}  backend  device  type      error     plain torch")
    for row in table:
        verdict = "ok" if row.ok else "WRONG"
        where = f"{row.operation:<{width}}  {row.backend:<7}  {row.device:<6}  {row.dtype:<8}"
        print(f"{where}  {row.error:<8.1e}  {row.torch_error:<8.1e}     {verdict}")
    wrong = sum(not row.ok for row in table)
    print(
        "\nerrors are against the float64 reference, relative to the largest entry; right: at most 3 times plain torch's in the same type"
    )
    print(f"{len(table)} checks, all right" if not wrong else f"{wrong} of {len(table)} checks are WRONG: do not train with these backends")
    return 1 if wrong else 0


def _served(operation: str, backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    try:
        backends.select(operation, backend, device, dtype)
    except ValueError:  # not these tensors
        return False
    return True


def _cases(operation: str) -> list[tuple[str, Callable[..., Any], Callable[..., Any], dict[str, Any]]]:
    """(name, operation, reference, float64 problem) of everything that uses this piece."""
    if operation == "turn_gae":
        return [("turn_gae", turn_gae, reference.turn_gae, _turns())]
    hidden = _tokens()
    logits = {k: v for k, v in hidden.items() if k not in ("hidden", "lm_head")} | {"logits": hidden["hidden"] @ hidden["lm_head"].T}
    few = ("hidden", "lm_head", "value_token_ids", "action_rows", "actions")
    return [
        ("fused_loss from hidden", fused_loss, reference.fused_loss, {**hidden, "config": _CONFIG}),
        ("fused_loss from logits", fused_loss, reference.fused_loss, {**logits, "config": _CONFIG}),
        ("token_logprobs", token_logprobs, reference.token_logprobs, {k: hidden[k] for k in few}),
    ]


def _tokens(T: int = 96, N: int = 64, M: int = 12, V: int = 1003, H: int = 48) -> dict[str, Any]:
    """Rows that repeat, tokens far from likely, and values by and beyond their clips."""
    g = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden, head = randn(T, H) / H**0.5 * 3, randn(V, H)
    at, actions = torch.randint(0, T, (N,), generator=g), torch.randint(0, V - 2, (N,), generator=g)
    problem = {"hidden": hidden, "lm_head": head, "value_token_ids": (V - 2, V - 1), "action_rows": at, "actions": actions}
    logprob, _ = reference.token_logprobs(**problem)
    old, ref = (-(logprob + 0.3 * randn(N)).abs() for _ in range(2))
    problem |= {"old_logprobs": old, "ref_logprobs": ref, "advantages": randn(N)}
    for kind in "vq":
        problem |= {f"{kind}_rows": torch.randint(0, T, (M,), generator=g), f"{kind}_old": 20 * randn(M), f"{kind}_targets": 5 * randn(M)}
    return problem


def _turns() -> dict[str, Any]:
    """Short, long and empty trajectories."""
    g = torch.Generator().manual_seed(7)
    lengths = torch.tensor([5, 0, 50, 1, 17, 333, 2])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu[-1])
    data = {k: torch.randn(total, generator=g, dtype=torch.float64) for k in ("rewards", "values", "q_values")}
    return {**data, "cu_turns": cu, "bootstrap": torch.randn(7, generator=g, dtype=torch.float64), "lam_v": 1.0}


def _compare(
    name: str, backend: str, device: torch.device, dtype: torch.dtype, call: Callable, plain: Callable, problem: dict[str, Any]
) -> CheckRow:
    rest = torch.float64 if dtype == torch.float64 else torch.float32
    own = {
        k: v.to(device, dtype if k in _WIDE else rest if v.is_floating_point() else v.dtype) if isinstance(v, Tensor) else v
        for k, v in problem.items()
    }
    same = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in own.items()}
    right = _answer(plain, same)
    error = _worst(_answer(lambda **p: call(**p, impl=backend), own), right, dtype)
    torch_error = _worst(_answer(plain, own), right, dtype)
    ok = error <= _TIMES * torch_error + _UNITS * torch.finfo(dtype).eps  # NaN is not
    return CheckRow(name, backend, device.type, str(dtype).removeprefix("torch."), error, torch_error, ok)


def _answer(call: Callable[..., Any], problem: dict[str, Any]) -> list[Tensor]:
    """Outputs, and the gradients of the model's tensors where there are any."""
    leaves = {k: problem[k].detach().requires_grad_() for k in _WIDE if k in problem}
    out = call(**{**problem, **leaves})
    outputs = [x for x in out if isinstance(x, Tensor)]
    if not leaves:
        return outputs
    total = out[0] if out[0].dim() == 0 else sum(x.sum() for x in outputs)
    return [x.detach() for x in outputs] + list(torch.autograd.grad(total, list(leaves.values())))


def _worst(found: list[Tensor], right: list[Tensor], dtype: torch.dtype) -> float:
    """Outputs that are float32 by contract say nothing about float64."""
    pairs = [(a, b) for a, b in zip(found, right, strict=True) if a.dtype.itemsize >= dtype.itemsize]
    errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in pairs]
    return float(torch.stack(errors).max())  # NaN where any is
