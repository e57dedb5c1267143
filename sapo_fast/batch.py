"""Trajectories -> rows of tokens -> packed micro-batches, with the row indices every loss needs.

Prefix merging: when a turn's prompt extends the previous turn's prompt + response, both live in one row and each token is computed once; otherwise
the turn opens a row of its own (windowed history). The ids decide, turn by turn, so any mixture works. Rows are packed without padding.

Legend: B trajectories, T turns (all of the iteration, flat, trajectory by trajectory), N response tokens (flat, turn by turn), R rows of a
micro-batch, L its packed length, n and m its response tokens and turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from sapo_fast.records import Trajectory, Turn


@dataclass
class Row:
    """One sequence of tokens holding one or more turns of one trajectory."""

    ids: list[int]
    turns: list[int] = field(default_factory=list)  # flat turn indices
    starts: list[int] = field(default_factory=list)  # position of each turn's first response token
    trajectory: int = 0
    bootstrap: bool = False  # the last position is the context after the trajectory's last turn


@dataclass
class RolloutBatch:
    """An iteration's turns, flat. Every per-turn array is [T], every per-token array [N]."""

    trajectories: list[Trajectory]
    rows: list[Row]
    cu_turns: torch.Tensor  # [B+1] int64
    cu_tokens: torch.Tensor  # [T+1] int64, response tokens
    rewards: torch.Tensor  # [T] float32, reward units
    invalid: torch.Tensor  # [T] bool
    actions: torch.Tensor  # [N] int64
    rollout_logprobs: torch.Tensor  # [N] float32

    @property
    def num_turns(self) -> int:
        return self.rewards.numel()

    @property
    def num_tokens(self) -> int:
        return self.actions.numel()

    def tokens_per_turn(self) -> torch.Tensor:
        return self.cu_tokens.diff()

    def to_tokens(self, per_turn: torch.Tensor) -> torch.Tensor:
        """[T] -> [N]: every response token gets its turn's value."""
        return per_turn.repeat_interleave(self.tokens_per_turn())


@dataclass
class MicroBatch:
    """Rows packed end to end, ready for one forward."""

    input_ids: torch.Tensor  # [L] int64
    position_ids: torch.Tensor  # [L] int64, restart at each row
    cu_seqlens: list[int]  # R+1 offsets; plain ints, so that no forward waits for the device
    action_rows: torch.Tensor  # [n] int64: position that predicts each response token
    actions: torch.Tensor  # [n] int64
    token_index: torch.Tensor  # [n] int64 into the flat [N] arrays
    v_rows: torch.Tensor  # [m] int64: last context token of each turn
    q_rows: torch.Tensor  # [m] int64: last response token of each turn
    turn_index: torch.Tensor  # [m] int64 into the flat [T] arrays
    bootstrap_rows: torch.Tensor  # [k] int64: last context token after a truncated trajectory
    bootstrap_trajectory: torch.Tensor  # [k] int64
    max_seqlen: int

    def to(self, device: torch.device | str) -> MicroBatch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(**{k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in moved.items()})


def _extends(prompt: Sequence[int], row: list[int]) -> bool:
    return len(prompt) > len(row) and list(prompt[: len(row)]) == row


def _check_turn(turn: Turn, where: str) -> None:
    if not turn.prompt_ids:
        raise ValueError(f"{where}: prompt_ids is empty; a turn needs at least one context token to read V from")
    if not turn.response_ids:
        raise ValueError(f"{where}: response_ids is empty; a turn needs at least one response token (drop turns that took no action)")
    if len(turn.rollout_logprobs) != len(turn.response_ids):
        raise ValueError(
            f"{where}: rollout_logprobs has {len(turn.rollout_logprobs)} entries for {len(turn.response_ids)} response_ids; give one per sampled id"
        )
    if not np.isfinite(turn.reward):
        raise ValueError(f"{where}: reward is {turn.reward}; rewards must be finite (mend the environment, or end the episode as crashed)")


def build_rows(trajectories: Sequence[Trajectory], *, merge: bool = True, bootstrap: bool = False) -> RolloutBatch:
    """Flatten trajectories into turns and rows.

    Args:
        trajectories: B episodes; an episode without turns is allowed and contributes an empty segment.
        merge: let consecutive turns share a row where the ids allow it. Off: one row a turn (same loss, more tokens).
        bootstrap: add the context after the last turn of every truncated episode, so that its value can be read.

    Raises:
        ValueError: empty prompt or response, lengths that differ, a non-finite reward; named with trajectory and turn.
    """
    rows: list[Row] = []
    flat: list[Turn] = []
    cu_turns = [0]
    for b, trajectory in enumerate(trajectories):
        row: Row | None = None
        for t, turn in enumerate(trajectory.turns):
            _check_turn(turn, f"trajectory {b} (task {trajectory.task_id!r}), turn {t}")
            if row is None or not merge or not _extends(turn.prompt_ids, row.ids):
                row = Row(ids=list(turn.prompt_ids), trajectory=b)
                rows.append(row)
            else:
                row.ids.extend(turn.prompt_ids[len(row.ids) :])
            row.turns.append(len(flat))
            row.starts.append(len(row.ids))
            row.ids.extend(turn.response_ids)
            flat.append(turn)
        cu_turns.append(len(flat))
        if bootstrap and trajectory.turns and trajectory.end in ("truncated", "overlong") and trajectory.final_prompt_ids:
            if merge and _extends(trajectory.final_prompt_ids, row.ids):
                row.ids.extend(trajectory.final_prompt_ids[len(row.ids) :])
                row.bootstrap = True
            else:
                rows.append(Row(ids=list(trajectory.final_prompt_ids), trajectory=b, bootstrap=True))
    lengths = np.array([len(t.response_ids) for t in flat], dtype=np.int64)
    return RolloutBatch(
        trajectories=list(trajectories),
        rows=rows,
        cu_turns=torch.tensor(cu_turns, dtype=torch.int64),
        cu_tokens=torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])),
        rewards=torch.tensor([t.reward for t in flat], dtype=torch.float32),
        invalid=torch.tensor([t.invalid for t in flat], dtype=torch.bool),
        actions=torch.tensor([i for t in flat for i in t.response_ids], dtype=torch.int64),
        rollout_logprobs=torch.tensor([p for t in flat for p in t.rollout_logprobs], dtype=torch.float32),
    )


def pack(batch: RolloutBatch, row_indices: Sequence[int]) -> MicroBatch:
    """Pack these rows of the batch end to end into one micro-batch, in the order given."""
    ids: list[int] = []
    positions: list[np.ndarray] = []
    cu = [0]
    v_rows, q_rows, turn_index, boot_rows, boot_traj = [], [], [], [], []
    action_rows: list[np.ndarray] = []
    token_index: list[np.ndarray] = []
    cu_tokens = batch.cu_tokens.numpy()
    for r in row_indices:
        row = batch.rows[r]
        base = len(ids)
        ids.extend(row.ids)
        positions.append(np.arange(len(row.ids), dtype=np.int64))
        cu.append(len(ids))
        for turn, start in zip(row.turns, row.starts, strict=True):
            first, last = int(cu_tokens[turn]), int(cu_tokens[turn + 1])
            v_rows.append(base + start - 1)
            q_rows.append(base + start + (last - first) - 1)
            turn_index.append(turn)
            action_rows.append(np.arange(base + start - 1, base + start - 1 + last - first, dtype=np.int64))
            token_index.append(np.arange(first, last, dtype=np.int64))
        if row.bootstrap:
            boot_rows.append(len(ids) - 1)
            boot_traj.append(row.trajectory)

    def long(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64)

    def joined(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, dtype=torch.int64)

    index = joined(token_index)
    return MicroBatch(
        input_ids=long(ids),
        position_ids=joined(positions),
        cu_seqlens=cu,
        action_rows=joined(action_rows),
        actions=batch.actions[index],
        token_index=index,
        v_rows=long(v_rows),
        q_rows=long(q_rows),
        turn_index=long(turn_index),
        bootstrap_rows=long(boot_rows),
        bootstrap_trajectory=long(boot_traj),
        max_seqlen=max((len(batch.rows[r].ids) for r in row_indices), default=0),
    )


def micro_batches(batch: RolloutBatch, row_indices: Sequence[int], token_budget: int) -> list[MicroBatch]:
    """Split rows into packed micro-batches of at most ``token_budget`` tokens, similar lengths together; a longer single row goes alone."""
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    order = sorted(row_indices, key=lambda r: (len(batch.rows[r].ids), r))
    groups: list[list[int]] = []
    used = 0
    for r in order:
        length = len(batch.rows[r].ids)
        if not groups or used + length > token_budget:
            groups.append([])
            used = 0
        groups[-1].append(r)
        used += length
    return [pack(batch, g) for g in groups]


def minibatches(batch: RolloutBatch, turns: int, generator: torch.Generator) -> list[list[int]]:
    """Shuffle the rows and cut them into near-equal groups of about ``turns`` turns each: the rows of one optimizer step.

    Rows are kept whole, so a group's turns vary by a row's; the number of groups is round(T / turns), at least 1. Rows without turns
    (bootstrap contexts) are left out: they are read, never trained.
    """
    if turns < 1:
        raise ValueError(f"turns must be at least 1, got {turns}")
    trained = [r for r in range(len(batch.rows)) if batch.rows[r].turns]
    order = [trained[i] for i in torch.randperm(len(trained), generator=generator).tolist()]
    groups = max(1, round(batch.num_turns / turns))
    out: list[list[int]] = [[] for _ in range(groups)]
    seen = 0
    for r in order:
        out[min(groups - 1, seen * groups // max(1, batch.num_turns))].append(r)
        seen += len(batch.rows[r].turns)
    return [g for g in out if g]
