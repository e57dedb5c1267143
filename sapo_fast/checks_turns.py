"""Checks of the operations on turns; see `sapo_fast.checks` for the manners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends, checks


def _offsets(data: checks.Data, name: str, offsets: Tensor, total: int, of: str) -> None:
    data.none(offsets[:1] != 0, lambda i: f"{name} must start at 0, got {int(offsets[0])}")
    data.none(
        offsets.diff() < 0,
        lambda i: f"{name} must not fall: {name}[{i}] = {int(offsets[i])}, {name}[{i + 1}] = {int(offsets[i + 1])}",
    )
    data.none(offsets[-1:] != total, lambda i: f"{name} must end at {total}, the number of {of}, got {int(offsets[-1])}")


def turn_gae(
    rewards: Any,
    values: Any,
    q_values: Any,
    cu_turns: Any,
    gamma: Any,
    lam: Any,
    lam_v: Any,
    bootstrap: Any,
    impl: Any,
) -> None:
    """Everything but the data."""
    backends.check_impl(impl)
    for name, x in (("gamma", gamma), ("lam", lam), ("lam_v", 0 if lam_v is None else lam_v)):
        checks.fraction(name, x)
    rewards = checks.floats("rewards", rewards, None, None, "turn")
    total, device = rewards.shape[0], rewards.device
    checks.floats("values", values, total, device, "turn")
    if q_values is not None:
        checks.floats("q_values", q_values, total, device, "turn")
    checks.integers("cu_turns", cu_turns, None, device, "trajectory")
    if cu_turns.shape[0] == 0:
        raise ValueError("cu_turns must be [B + 1] offsets starting at 0, got an empty tensor; for no trajectories give [0]")
    if bootstrap is not None:
        checks.floats("bootstrap", bootstrap, cu_turns.shape[0] - 1, device, "trajectory (len(cu_turns) - 1)")


def turn_data(rewards: Tensor, values: Tensor, q_values: Tensor | None, cu_turns: Tensor, bootstrap: Tensor | None) -> None:
    """Offsets that rise from 0 to T, and finite numbers."""
    device = rewards.device
    data = checks.Data()
    _offsets(data, "cu_turns", cu_turns, rewards.shape[0], "turns")
    ends = cu_turns.to(torch.int64)

    def finite(name: str, x: Tensor) -> None:
        def story(i: int) -> str:
            b = int(torch.searchsorted(ends[1:].contiguous(), torch.tensor(i, device=device), right=True))
            return f"{name}[{i}] = {float(x[i])} is not finite (trajectory {b}, turn {i - int(ends[b])})"

        data.finite(name, x, story)

    finite("rewards", rewards)
    finite("values", values)
    if q_values is not None:
        finite("q_values", q_values)
    if bootstrap is not None:
        data.finite("bootstrap", bootstrap, lambda b: f"bootstrap[{b}] = {float(bootstrap[b])} is not finite (trajectory {b})")
    data.settle()


def token_gae(rewards: Any, values: Any, mask: Any, cu_tokens: Any, gamma: Any, lam: Any, impl: Any) -> None:
    backends.check_impl(impl)
    for name, x in (("gamma", gamma), ("lam", lam)):
        checks.fraction(name, x)
    rewards = checks.floats("rewards", rewards, None, None, "token")
    total, device = rewards.shape[0], rewards.device
    checks.floats("values", values, total, device, "token")
    checks.flags("mask", mask, total, device, "token")
    checks.integers("cu_tokens", cu_tokens, None, device, "sequence")
    if cu_tokens.shape[0] == 0:
        raise ValueError("cu_tokens must be [B + 1] offsets starting at 0, got an empty tensor; for no sequences give [0]")


def token_data(rewards: Tensor, keep: Tensor, cu_tokens: Tensor) -> None:
    """Offsets that rise from 0 to L, finite rewards, each with a response token to go to; values are looked at where they are used."""
    data = checks.Data()
    _offsets(data, "cu_tokens", cu_tokens, rewards.shape[0], "tokens")
    data.finite("rewards", rewards)
    data.settle()
    _paid_tokens(rewards, keep, cu_tokens.to(torch.int64))


def _paid_tokens(rewards: Tensor, keep: Tensor, cu_tokens: Tensor) -> None:
    """A reward before the first response token of its sequence is nobody's."""
    elsewhere = (rewards != 0) & ~keep
    if not bool(elsewhere.any()):
        return
    responses = torch.zeros(keep.shape[0] + 1, dtype=torch.int64, device=keep.device)
    responses[1:] = keep.cumsum(0)
    sequence = torch.searchsorted(cu_tokens[1:].contiguous(), torch.arange(keep.shape[0], device=keep.device), right=True)
    orphan = elsewhere & (responses[1:] == responses[cu_tokens[sequence]])
    if bool(orphan.any()):
        where = int(orphan.nonzero()[0])
        raise ValueError(
            f"rewards[{where}] is non-zero before the first response token of sequence {int(sequence[where])}: no token earned it"
        )


def token_values(values: Tensor, keep: Tensor) -> None:
    bad = keep & ~values.isfinite()
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        raise ValueError(f"values[{where}] = {float(values[where])} is not finite")


def normalize_advantages(advantages: Any, invalid: Any, invalid_penalty: Any, eps: Any, min_std: Any, valid: Any) -> None:
    advantages = checks.floats("advantages", advantages, None, None, "turn")
    for name, x in (("invalid_penalty", invalid_penalty), ("eps", eps), ("min_std", min_std)):
        checks.not_negative(name, x)
    for name, x in (("invalid", invalid), ("valid", valid)):
        if x is not None:
            checks.flags(name, x, advantages.shape[0], advantages.device, "turn")


def finite_advantages(counts: Tensor, own: Tensor, grouped: bool) -> None:
    """``counts`` [ranks]: non-finite advantages on each rank. Every rank raises, so none waits for one that stopped."""
    counts = counts.tolist()
    if not any(counts):
        return
    bad = (~own.isfinite()).nonzero()
    if bad.numel():
        i = int(bad[0, 0])
        raise ValueError(f"advantages[{i}] = {float(own[i])} (after the invalid penalty) is not finite")
    ranks = [rank for rank, count in enumerate(counts) if count]
    raise ValueError(f"advantages are not finite on group rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")


def turn_order(trajectory_ids: Any, turn_index: Any) -> tuple[Tensor, Tensor]:
    """Both as int64 tensors."""

    def integers(name: str, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            if not isinstance(x, Sequence) or isinstance(x, str) or any(isinstance(i, bool) or not isinstance(i, int) for i in x):
                raise ValueError(f"{name} must be a tensor or a sequence of integers, got {x!r:.80}")
            x = torch.tensor(list(x), dtype=torch.int64)
        return checks.integers(name, x, None, None, "turn").to(torch.int64)

    ids, index = integers("trajectory_ids", trajectory_ids), integers("turn_index", turn_index)
    checks.entries("turn_index", index, ids.shape[0], "entry of trajectory_ids")
    if ids.device != index.device:
        raise ValueError(f"turn_index is on {index.device}, trajectory_ids on {ids.device}: move one")
    return ids, index


def turn_sequence(ids: Tensor, index: Tensor, cu_turns: Tensor) -> None:
    """Sorted turns must count up by one in each trajectory, from 0 (or from 1 in all of them)."""
    if not ids.numel():
        return
    data = checks.Data()
    same = ids[1:] == ids[:-1]
    step = index.diff()
    data.none(
        same & (step == 0),
        lambda i: f"turn {int(index[i])} of trajectory {int(ids[i])} occurs twice: a copy must not enter the statistics; drop it",
    )
    data.none(
        same & (step > 1),
        lambda i: f"trajectory {int(ids[i])} has a gap: turn {int(index[i + 1])} follows turn {int(index[i])}; every turn must be there",
    )
    first = index[cu_turns[:-1]]
    base = index.min().clamp(0, 1)
    data.none(
        first != base,
        lambda b: (
            f"trajectory {int(ids[cu_turns[b]])} begins at turn {int(first[b])}, not {int(base)}: "
            "turn_index counts from 0 (or from 1 in every trajectory), and its first turns must be there"
        ),
    )
    data.settle()
