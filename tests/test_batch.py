"""Rows, merging and packing: whatever the arrangement, the same loss and the same gradients."""

import random

import pytest
import torch
from helpers_models import VOCAB, tiny_model

from sapo_fast import LossConfig, fused_loss
from sapo_fast.batch import build_rows, micro_batches, minibatches, pack
from sapo_fast.models.packed import lm_head_of, packed_hidden
from sapo_fast.records import Trajectory, Turn

W = (VOCAB - 2, VOCAB - 1)


def ids(rng, low, high):
    return [rng.randrange(1, VOCAB - 2) for _ in range(rng.randint(low, high))]


def random_trajectories(seed, count=5, merge_chance=0.6, max_turns=5):
    """Episodes in which some prompts extend the turn before and some start anew (windowed history), in any mixture."""
    rng = random.Random(seed)
    out = []
    for b in range(count):
        turns, context = [], ids(rng, 2, 9)
        for _ in range(rng.randint(0 if b else 1, max_turns)):
            response = ids(rng, 1, 6)
            turns.append(
                Turn(
                    list(context),
                    response,
                    [-1.0 - rng.random() for _ in response],
                    reward=rng.choice([0.0, 10.0]),
                    invalid=rng.random() < 0.2,
                )
            )
            context = context + response + ids(rng, 1, 5) if rng.random() < merge_chance else ids(rng, 2, 9)
        end = rng.choice(["terminated", "truncated"])
        out.append(Trajectory(f"t{b}", b, turns, end=end, final_prompt_ids=context if end == "truncated" else None))
    return out


def per_turn_data(trajectories, seed):
    """Per-turn and per-token quantities keyed by (trajectory, turn), so that they follow their turn through any rearrangement."""
    g = torch.Generator().manual_seed(seed)
    data = {}
    for trajectory in trajectories:
        for t, turn in enumerate(trajectory.turns):
            n = len(turn.response_ids)
            draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
            data[trajectory.task_id, t] = {"old": draw(n) * 0.3 - 3, "ref": draw(n) * 0.3 - 3, "adv": draw(1), "v": draw(4)}
    return data


def loss_and_grads(model, trajectories, data, *, merge, budget, steps_seed=None):
    batch = build_rows(trajectories, merge=merge)
    keys = [(tr.task_id, t) for tr in trajectories for t in range(len(tr.turns))]
    tokens = lambda name: torch.cat([data[k][name] for k in keys])  # noqa: E731
    old, ref = tokens("old"), tokens("ref")
    adv = batch.to_tokens(tokens("adv"))
    values = torch.stack([data[k]["v"] for k in keys])
    rows = list(range(len(batch.rows)))
    if steps_seed is not None:
        random.Random(steps_seed).shuffle(rows)
    model.zero_grad()
    total = 0.0
    for micro in micro_batches(batch, rows, budget):
        weight, bias = lm_head_of(model)
        out = fused_loss(
            hidden=packed_hidden(model, micro.input_ids, micro.position_ids, micro.cu_seqlens, micro.max_seqlen),
            lm_head=weight, lm_head_bias=bias, value_token_ids=W, action_rows=micro.action_rows, actions=micro.actions,
            old_logprobs=old[micro.token_index], advantages=adv[micro.token_index], ref_logprobs=ref[micro.token_index],
            v_rows=micro.v_rows, v_old=values[micro.turn_index, 0], v_targets=values[micro.turn_index, 1],
            q_rows=micro.q_rows, q_old=values[micro.turn_index, 2], q_targets=values[micro.turn_index, 3],
            num_tokens=batch.num_tokens, num_turns=batch.num_turns, config=LossConfig(kl_coef=0.1, entropy_coef=0.01),
        )  # fmt: skip
        out.loss.backward()
        total += out.loss.item()
    return total, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("seed", range(8))
def test_same_loss_and_gradients_however_arranged(seed):
    model = tiny_model(["qwen2", "llama"][seed % 2]).double()
    trajectories = random_trajectories(seed)
    data = per_turn_data(trajectories, seed)
    want, grads = loss_and_grads(model, trajectories, data, merge=False, budget=1)  # a row a turn, one row at a time
    assert any(g.abs().max() > 1e-3 for g in grads)
    shuffled = random.Random(seed + 100).sample(trajectories, len(trajectories))
    arrangements = [
        (trajectories, dict(merge=True, budget=1)),
        (trajectories, dict(merge=True, budget=10_000)),
        (trajectories, dict(merge=False, budget=10_000)),
        (shuffled, dict(merge=True, budget=37, steps_seed=seed)),
        (shuffled, dict(merge=False, budget=23, steps_seed=seed)),
    ]
    for order, how in arrangements:
        got, other = loss_and_grads(model, order, data, **how)
        assert got == pytest.approx(want, rel=1e-10), how
        for a, b in zip(grads, other, strict=True):
            # The model's RMSNorm works in float32 whatever its weights are in, and its backward rounds with the arrangement.
            assert (a - b).abs().max() < 2e-6 * a.abs().max().clamp(min=1e-3), how


def test_merging_computes_each_token_once():
    trajectories = random_trajectories(3, merge_chance=1.0)
    merged, apart = build_rows(trajectories), build_rows(trajectories, merge=False)
    with_turns = sum(bool(t.turns) for t in trajectories)
    assert len(merged.rows) == with_turns < len(apart.rows) == merged.num_turns
    last = [t.turns[-1] for t in trajectories if t.turns]
    assert [len(r.ids) for r in merged.rows] == [len(t.prompt_ids) + len(t.response_ids) for t in last]


def test_one_different_id_starts_a_new_row():
    first = Turn([1, 2, 3], [4, 5], [0.0, 0.0])
    for prompt, rows in (([1, 2, 3, 4, 5, 6], 1), ([1, 2, 3, 4, 9, 6], 2), ([1, 2, 3, 4, 5], 2), ([1, 2], 2)):
        batch = build_rows([Trajectory("t", 0, [first, Turn(prompt, [7], [0.0])])])
        assert len(batch.rows) == rows, prompt


def test_indices_point_at_the_right_tokens():
    trajectories = random_trajectories(11, count=7)
    batch = build_rows(trajectories, bootstrap=True)
    turns = [t for tr in trajectories for t in tr.turns]
    micro = pack(batch, list(range(len(batch.rows)))[::-1])
    for i, turn in enumerate(micro.turn_index.tolist()):
        # The context's last token carries V, the response's last token Q.
        assert micro.input_ids[micro.v_rows[i]] == turns[turn].prompt_ids[-1]
        assert micro.input_ids[micro.q_rows[i]] == turns[turn].response_ids[-1]
        assert micro.position_ids[micro.v_rows[i]] == len(turns[turn].prompt_ids) - 1
    assert torch.equal(micro.input_ids[micro.action_rows + 1], micro.actions)
    assert torch.equal(batch.actions[micro.token_index], micro.actions)
    assert sorted(micro.token_index.tolist()) == list(range(batch.num_tokens))
    truncated = [b for b, t in enumerate(trajectories) if t.end == "truncated" and t.turns]
    assert sorted(micro.bootstrap_trajectory.tolist()) == truncated
    for row, b in zip(micro.bootstrap_rows.tolist(), micro.bootstrap_trajectory.tolist(), strict=True):
        assert micro.input_ids[row] == trajectories[b].final_prompt_ids[-1]


def test_micro_batches_keep_the_budget_and_lose_no_row():
    batch = build_rows(random_trajectories(5, count=30), bootstrap=True)
    longest = max(len(r.ids) for r in batch.rows)
    micros = micro_batches(batch, range(len(batch.rows)), longest + 3)
    assert all(len(m.input_ids) <= longest + 3 for m in micros) and len(micros) > 3
    assert sum(len(m.input_ids) for m in micros) == sum(len(r.ids) for r in batch.rows)
    assert len(micro_batches(batch, range(len(batch.rows)), 1)) == len(batch.rows)


def test_minibatches_partition_the_rows_near_equally():
    batch = build_rows(random_trajectories(6, count=60, max_turns=6))
    groups = minibatches(batch, 40, torch.Generator().manual_seed(1))
    assert sorted(r for g in groups for r in g) == list(range(len(batch.rows)))
    sizes = [sum(len(batch.rows[r].turns) for r in g) for g in groups]
    assert len(groups) == round(batch.num_turns / 40) and max(sizes) - min(sizes) <= 12
    assert groups == minibatches(batch, 40, torch.Generator().manual_seed(1)) != minibatches(batch, 40, torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "turn, word",
    [
        (Turn([], [1], [0.0]), "prompt_ids"),
        (Turn([1], [], []), "response_ids"),
        (Turn([1], [2, 3], [0.0]), "rollout_logprobs"),
        (Turn([1], [2], [0.0, 0.0]), "rollout_logprobs has 2 entries for 1"),
        (Turn([1], [2], [0.0], reward=float("inf")), "reward is inf"),
        (Turn([1], [2], [0.0], reward=float("nan")), "reward"),
    ],
)
def test_bad_turns_are_named(turn, word):
    with pytest.raises(ValueError, match=rf"trajectory 1 \(task 'b'\), turn 1: {word}"):
        build_rows([Trajectory("a", 0), Trajectory("b", 0, [Turn([1], [2], [0.0]), turn])])


@pytest.mark.parametrize("end", ["truncated", "overlong", "terminated", "crashed"])
@pytest.mark.parametrize("merge", [True, False])
def test_the_context_after_the_last_turn_is_read_where_the_episode_was_cut_off(end, merge):
    trajectory = Trajectory("t", 0, [Turn([1, 2], [3], [0.0])], end=end, final_prompt_ids=[1, 2, 3, 4])
    batch = build_rows([trajectory], merge=merge, bootstrap=True)
    cut_off = end in ("truncated", "overlong")
    want = ([[1, 2, 3, 4]] if merge else [[1, 2, 3], [1, 2, 3, 4]]) if cut_off else [[1, 2, 3]]
    assert [row.ids for row in batch.rows] == want and batch.rows[-1].bootstrap == cut_off
    micro = pack(batch, range(len(batch.rows)))
    assert micro.bootstrap_trajectory.tolist() == [0] * cut_off and micro.input_ids[micro.bootstrap_rows].tolist() == [4] * cut_off


def rows_of(*lengths):
    return build_rows([Trajectory(f"t{i}", 0, [Turn([1] * (n - 1), [2], [0.0])]) for i, n in enumerate(lengths)])


def test_a_budget_is_filled_to_its_last_token_with_rows_of_like_length():
    batch = rows_of(6, 2, 4, 2, 6)
    assert [m.cu_seqlens for m in micro_batches(batch, range(5), 8)] == [[0, 2, 4, 8], [0, 6], [0, 6]]
    assert [m.cu_seqlens for m in micro_batches(batch, [0, 1, 4], 12)] == [[0, 2, 8], [0, 6]]


def test_minibatches_leave_out_rows_without_turns_and_empty_groups():
    cut = Trajectory("t", 0, [Turn([1, 2], [3], [0.0])], end="truncated", final_prompt_ids=[9, 9])
    batch = build_rows([cut, cut], bootstrap=True)
    assert len(batch.rows) == 4
    assert sorted(r for g in minibatches(batch, 1, torch.Generator()) for r in g) == [0, 2]
    long = build_rows([Trajectory("t", 0, [Turn([1], [2], [0.0]), Turn([1, 2, 3], [4], [0.0]), Turn([1, 2, 3, 4, 5], [6], [0.0])])])
    assert minibatches(long, 1, torch.Generator()) == [[0]], "one row of three turns cannot be cut into three groups"


def test_sizes_below_one_are_refused():
    batch = rows_of(3)
    for size in (0, -2):
        with pytest.raises(ValueError, match=f"token_budget must be at least 1, got {size}"):
            micro_batches(batch, [0], size)
        with pytest.raises(ValueError, match=f"turns must be at least 1, got {size}"):
            minibatches(batch, size, torch.Generator())
