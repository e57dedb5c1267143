"""Turn-level targets: GAE over turns, V and Q targets, normalisation, and the order of turns (method: Targets).

Trajectories are stored one after the other: turns of trajectory b are ``cu_turns[b] : cu_turns[b + 1]``, in order.

Legend: T turns in all, B trajectories, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, native
from . import checks_turns as checks


class TurnTargets(NamedTuple):
    """What the old policy's values become; each [T], detached, float32 (float64 for float64 rewards or values)."""

    advantages: Tensor  # A_t, reward units, before the invalid penalty and normalisation
    v_targets: Tensor  # V_t + A_t, reward units
    q_targets: Tensor | None  # r_t + gamma Q_{t+1}; None without q_values


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    q_values: Tensor | None = None,
    *,
    cu_turns: Tensor,
    gamma: float = 0.95,
    lam: float = 0.95,
    lam_v: float | None = None,
    bootstrap: Tensor | None = None,
    impl: str = "auto",
    check: bool = True,
) -> TurnTargets:
    """Advantages and targets of every turn (method: Targets).

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  v_target = V_t + A_t,  q_target = r_t + gamma Q_{t+1}.
    After the last turn V and Q are ``bootstrap`` and A is 0. A NaN stays in its own trajectory.

    Args:
        rewards, values, q_values: [T] floating, reward units; the values are the old policy's. Any strides.
        cu_turns: [B+1] int32 or int64: 0, the ends of the trajectories, and last T. Empty trajectories are allowed.
        gamma, lam: in [0, 1], a turn.
        lam_v: the lambda of the V target; None: ``lam``.
        bootstrap: [B] value after the last turn of a trajectory cut off before its end, 0 where the episode ended; None: all 0. An episode
            that ended in the very turn of the limit has ended.
        impl: auto | torch | cpp | cuda.
        check: also look at the data (offsets, non-finite numbers). On a GPU that waits for the device once; False skips it.

    Arithmetic is float64 inside for impl="torch"; the result is float32 unless an input is float64.

    Raises:
        ValueError: lengths or types that do not fit, offsets that do not start at 0, fall, or end elsewhere than T, a non-finite reward or
            value (named by trajectory and turn), gamma or lam outside [0, 1], unknown impl.
    """
    checks.turn_gae(rewards, values, q_values, cu_turns, gamma, lam, lam_v, bootstrap, impl)
    given = [x for x in (rewards, values, q_values, bootstrap) if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
    backend, fn = backends.select("turn_gae", impl, rewards.device, dtype)
    with torch.no_grad():

        def plain(x: Tensor) -> Tensor:
            return x.to(dtype).contiguous()

        after = rewards.new_zeros(cu_turns.shape[0] - 1) if bootstrap is None else bootstrap
        arguments = (plain(rewards), plain(values), None if q_values is None else plain(q_values), plain(after))
        arguments += (cu_turns.to(torch.int64).contiguous(), gamma, lam, lam if lam_v is None else lam_v)
        looks_itself = backend == "cpp" and fn is native.turn_gae
        if check and looks_itself and (found := native.checked_turn_gae(*arguments)) is not None:
            return TurnTargets(*found)
        if check:
            checks.turn_data(rewards, values, q_values, cu_turns, bootstrap)
        return TurnTargets(*fn(*arguments))


def _turn_gae_torch(
    rewards: Tensor,
    values: Tensor,
    q_values: Tensor | None,
    bootstrap: Tensor,
    cu_turns: Tensor,
    gamma: float,
    lam: float,
    lam_v: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All turns at once, in log2(longest trajectory) vector steps, so one long trajectory among short ones costs nothing extra."""
    total, dtype = rewards.shape[0], rewards.dtype
    if total == 0:
        return rewards.clone(), rewards.clone(), None if q_values is None else rewards.clone()
    r, v, after = rewards.double(), values.double(), bootstrap.double()
    position = torch.arange(total, device=r.device)
    # Ends are counted, so an empty trajectory shifts nothing: turn i belongs to the trajectory with the first end beyond i.
    trajectory = torch.searchsorted(cu_turns[1:].contiguous(), position, right=True)
    left = cu_turns[1:][trajectory] - position  # turns from here to the end of the trajectory, this one included
    last = left == 1

    def following(x: Tensor) -> Tensor:
        return torch.where(last, after[trajectory], x.roll(-1))

    delta = r + gamma * following(v) - v
    # On a GPU the number of steps is bounded by T, so that nothing waits for the device.
    longest = total if r.is_cuda else int(cu_turns.diff().max())
    advantages = _discounted_sum(delta, gamma * lam, left, longest)
    for_v = advantages if lam_v == lam else _discounted_sum(delta, gamma * lam_v, left, longest)
    q_targets = None if q_values is None else (r + gamma * following(q_values.double())).to(dtype)
    return advantages.to(dtype), (v + for_v).to(dtype), q_targets


def _discounted_sum(x: Tensor, factor: float, left: Tensor, longest: int) -> Tensor:
    """sum_k factor^k x_{t+k} to the end of the trajectory, by doubling. Select, not multiply: 0 * NaN would cross the border."""
    reach = 1
    while reach < longest:
        x = x + torch.where(left > reach, factor**reach * x.roll(-reach), 0.0)
        reach *= 2
    return x


backends.register("turn_gae", "torch", lambda: _turn_gae_torch, lambda: None, devices=("any",))


def token_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    cu_tokens: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """GAE over response tokens, for the token-level PPO baseline: observation tokens neither step nor decay.

    Args:
        rewards, values: [L] floating. Values where ``mask`` is 0 are never used; a reward there belongs to the response token before it.
        mask: [L] bool, integer or float; non-zero marks a response token.
        cu_tokens: [B+1] int offsets of the sequences.

    Returns:
        (advantages, returns), each [L], 0 where ``mask`` is 0.

    Raises:
        ValueError: as `turn_gae`; also a reward before the first response token of its sequence, which nothing earned.
    """
    checks.token_gae(rewards, values, mask, cu_tokens, gamma, lam, impl)
    with torch.no_grad():
        keep, offsets = mask if mask.dtype == torch.bool else mask != 0, cu_tokens.to(torch.int64)
        dtype = torch.float64 if torch.float64 in (rewards.dtype, values.dtype) else torch.float32
        backend, fn = backends.select("turn_gae", impl, rewards.device, dtype)
        native_form = fn is native.turn_gae  # the native libraries have a token form of their own
        arguments = (rewards.to(dtype), values.to(dtype), keep, offsets, gamma, lam)
        if native_form and backend == "cpp" and (found := native.token_gae(*arguments, check=True)) is not None:
            return found
        checks.token_data(rewards, keep, cu_tokens)
        checks.token_values(values, keep)
        return native.token_gae(*arguments, check=False) if native_form else _token_gae_by_turns(*arguments, impl)


def _token_gae_by_turns(
    rewards: Tensor,
    values: Tensor,
    keep: Tensor,
    cu_tokens: Tensor,
    gamma: float,
    lam: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Response tokens alone are turns of one token; each gets the rewards up to the next."""
    count = torch.zeros(keep.shape[0] + 1, dtype=torch.int64, device=keep.device)
    count[1:] = keep.cumsum(0)
    total, dtype = int(count[-1]), rewards.dtype
    earned = torch.zeros(total + 1, dtype=torch.float64, device=keep.device)
    paid = rewards != 0
    earned.index_add_(0, torch.where(paid, count[1:] - 1, total), torch.where(paid, rewards, 0).double())
    targets = turn_gae(earned[:total].to(dtype), values[keep], cu_turns=count[cu_tokens], gamma=gamma, lam=lam, impl=impl)
    advantages, returns = torch.zeros(keep.shape[0], dtype=dtype, device=keep.device), torch.zeros_like(values)
    advantages[keep], returns[keep] = targets.advantages, targets.v_targets
    return advantages, returns


def normalize_advantages(
    advantages: Tensor,
    *,
    invalid: Tensor | None = None,
    invalid_penalty: float = 0.1,
    eps: float = 1e-8,
    min_std: float = 1e-4,
    valid: Tensor | None = None,
    process_group: Any = None,
) -> Tensor:
    """(A - mean) / (std + eps) over all turns of the iteration's batch, population std (method: Targets).

    The penalty of an invalid action is taken off first: A_t - invalid_penalty * invalid_t. A standard deviation below ``min_std`` counts as
    ``min_std``; where it is no more than rounding noise (one turn, or all equal) the result is exactly 0.

    Args:
        advantages: [T] floating, reward units.
        invalid: [T] bool, integer or float flags; None: no turn is invalid.
        invalid_penalty: reward units.
        min_std: reward units.
        valid: [T] flags; turns where it is 0 (copies made to fill a batch) stay out of the statistics, may hold anything, and get 0.
        process_group: a torch.distributed group whose ranks hold parts of one batch (`torch.distributed.group.WORLD` for all). Counts,
            means and squared deviations are merged exactly, in rank order, so every rank uses the same numbers. Every rank must call, also
            with no turns. None: this process alone.

    Returns:
        [T], float32 (float64 for float64 input).

    Raises:
        ValueError: lengths or types that do not fit, a negative eps, min_std or invalid_penalty, a non-finite advantage (on every rank).
    """
    checks.normalize_advantages(advantages, invalid, invalid_penalty, eps, min_std, valid)
    with torch.no_grad():
        dtype = torch.float64 if advantages.dtype == torch.float64 else torch.float32
        x = advantages.double()
        if invalid is not None:
            x = x - invalid_penalty * invalid.double()
        keep = torch.ones_like(x, dtype=torch.bool) if valid is None else valid != 0
        x = torch.where(keep, x, 0.0)
        count = keep.sum().double()
        mean = x.sum() / count.clamp(min=1)
        m2 = torch.where(keep, x - mean, 0.0).square().sum()
        size = x.abs().max() if x.numel() else x.new_zeros(())
        bad = (~x.isfinite()).sum().double()
        own = torch.stack([count, mean, m2, size, bad])
        parts = own[None] if process_group is None else gather_moments(own, process_group)
        checks.finite_advantages(parts[:, 4], x, process_group is not None)
        count, mean, m2, size = merge_moments(parts)
        std = (m2 / count.clamp(min=1)).sqrt()
        # Equal advantages come as float32 from the recursion: differences of a few units in the last place carry nothing.
        noise = 4 * torch.finfo(torch.float32).eps * size
        scaled = (x - mean) / (std.clamp(min=min_std) + eps)
        return torch.where(keep & (std > noise), scaled, 0.0).to(dtype)


def gather_moments(own: Tensor, group: Any) -> Tensor:
    """One row a rank of the group, in rank order."""
    import torch.distributed as dist

    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts)


def merge_moments(parts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count, mean, squared deviations and largest size of the union (Chan's update, in rank order)."""
    count, mean, m2, size = parts[0, :4]
    for other, other_mean, other_m2, other_size in parts[1:, :4]:
        total = (count + other).clamp(min=1)
        gap = other_mean - mean
        mean = mean + gap * other / total
        m2 = m2 + other_m2 + gap.square() * count * other / total
        count, size = count + other, torch.maximum(size, other_size)
    return count, mean, m2, size


def turn_order(trajectory_ids: Tensor | Sequence[int], turn_index: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Put turns that arrive in any order into the order `turn_gae` wants.

    Args:
        trajectory_ids: [T] integers, any values.
        turn_index: [T] integers; in each trajectory 0, 1, 2, ... (or 1, 2, 3, ... in all of them), each once.

    Returns:
        (permutation, cu_turns): ``rewards[permutation]`` is ordered, trajectories by ascending id; [T] and [B+1], int64. What was computed
        on the ordered turns goes back with ``out[permutation] = ordered``.

    Raises:
        ValueError: lengths or types that do not fit; a turn that occurs twice (a copy must not enter the statistics); a gap.
    """
    ids, index = checks.turn_order(trajectory_ids, turn_index)
    by_index = torch.argsort(index, stable=True)
    permutation = by_index[torch.argsort(ids[by_index], stable=True)]
    ids, index = ids[permutation], index[permutation]
    names, lengths = torch.unique_consecutive(ids, return_counts=True)
    cu_turns = torch.zeros(names.shape[0] + 1, dtype=torch.int64, device=ids.device)
    cu_turns[1:] = lengths.cumsum(0)
    checks.turn_sequence(ids, index, cu_turns)
    return permutation, cu_turns
