"""Each method's targets, on inputs small enough to work out by hand."""

import pytest
import torch

from sapo_fast.algorithms import ALGORITHMS, OldPolicy, monte_carlo_returns, value_returns
from sapo_fast.batch import build_rows
from sapo_fast.config import Config
from sapo_fast.records import Trajectory, Turn
from sapo_fast.reference import turn_gae as reference_gae


def episode(name, rewards, lengths, invalid=(), group=0):
    turns = [
        Turn([1, 2], [3] * n, [0.0] * n, reward=r, invalid=t in invalid) for t, (r, n) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return Trajectory(name, 0, turns, group=group)


def config(**changes):
    return Config(advantage={"gamma": 0.9, "lam": 0.8, **changes})


def test_sapo_is_turn_gae_normalised_over_turns_then_spread_over_tokens():
    batch = build_rows([episode("a", [0, 0, 10], [2, 1, 3], invalid=(1,)), episode("b", [0, 0], [1, 4])], merge=False)
    v, q = torch.tensor([3.0, 5, 8, 2, 1]), torch.tensor([4.0, 6, 9, 1, 0.5])
    found = ALGORITHMS["sapo"].targets(batch, OldPolicy(torch.zeros(11), v=v, q=q), config(invalid_penalty=0.5))
    advantages, v_targets, _ = reference_gae(batch.rewards.double(), v.double(), q.double(), cu_turns=batch.cu_turns, gamma=0.9, lam=0.8)
    raw = advantages.clone()
    raw[1] -= 0.5  # the penalty is on the advantage, before normalising, and not in any value target
    want = (raw - raw.mean()) / raw.std(correction=0)
    assert torch.allclose(found.advantages.double(), want.repeat_interleave(torch.tensor([2, 1, 3, 1, 4])), atol=1e-5)
    assert torch.allclose(found.v.double(), v_targets, atol=1e-5)
    assert torch.allclose(found.q, torch.tensor([0.9 * 6, 0.9 * 9, 10, 0.9 * 0.5, 0]), atol=1e-5)


def test_v_has_a_lambda_of_its_own():
    batch = build_rows([episode("a", [0, 0, 10], [1, 1, 1])], merge=False)
    v = torch.tensor([3.0, 5, 8])
    settings = {"cu_turns": batch.cu_turns, "gamma": 0.9}
    found = ALGORITHMS["sapo"].targets(batch, OldPolicy(torch.zeros(3), v=v, q=v), config(lam_v=0.3))
    rewards = batch.rewards.double()
    _, v_targets, _ = reference_gae(rewards, v.double(), v.double(), lam=0.3, **settings)
    raw, others, _ = reference_gae(rewards, v.double(), v.double(), lam=0.8, **settings)
    assert torch.allclose(found.v.double(), v_targets, atol=1e-5) and (v_targets - others).abs().max() > 0.1
    assert torch.allclose(found.advantages.double(), (raw - raw.mean()) / raw.std(correction=0), atol=1e-5)


@pytest.mark.parametrize("name", ["sapo", "ppo", "ppo_token"])
def test_a_batch_of_little_spread_is_divided_by_the_floor(name):
    batch = build_rows([episode("a", [0, 10], [1, 1]), episode("b", [0], [1])], merge=False)
    old = OldPolicy(torch.zeros(3), v=torch.zeros(3), q=torch.zeros(3))
    raw = torch.tensor([9.0, 10, 0]) if name != "ppo_token" else torch.tensor([10.0, 10, 0])
    found = ALGORITHMS[name].targets(batch, old, Config(advantage={"gamma": 0.9, "lam": 1.0, "min_std": 50.0}))
    assert torch.allclose(found.advantages, (raw - raw.mean()) / 50, atol=1e-6)


def test_ppo_has_the_same_advantages_and_no_q():
    batch = build_rows([episode("a", [0, 10], [2, 1])], merge=False)
    v = torch.tensor([3.0, 5])
    sapo = ALGORITHMS["sapo"].targets(batch, OldPolicy(torch.zeros(3), v=v, q=v), config())
    ppo = ALGORITHMS["ppo"].targets(batch, OldPolicy(torch.zeros(3), v=v), config())
    assert torch.equal(sapo.advantages, ppo.advantages) and torch.equal(sapo.v, ppo.v) and ppo.q is None


def test_ppo_token_gives_every_response_the_whole_episodes_reward():
    batch = build_rows([episode("a", [0, 10], [2, 1], invalid=(1,)), episode("b", [0], [2])], merge=False)
    v = torch.tensor([1.0, 2, 3, 4, 5])
    found = ALGORITHMS["ppo_token"].targets(batch, OldPolicy(torch.zeros(5), v=v), config(invalid_penalty=0.5))
    # gamma = lam = 1: the target of each token is its response's reward; turn 0 of a also gets the episode's 10
    assert torch.allclose(found.v, torch.tensor([10.0, 10, 9.5, 0, 0]))
    raw = torch.tensor([9.0, 8, 6.5, -4, -5])
    assert torch.allclose(found.advantages, (raw - raw.mean()) / raw.std(correction=0), atol=1e-5)


def test_grpo_compares_within_its_group():
    batch = build_rows(
        [
            episode("a", [0, 10], [1, 2], group=0),
            episode("a", [0], [1], group=0),
            episode("b", [10], [2], group=1),
            episode("b", [10], [1], group=1),
        ],
        merge=False,
    )
    found = ALGORITHMS["grpo"].targets(batch, OldPolicy(torch.zeros(7)), config())
    assert torch.allclose(found.advantages, torch.tensor([1.0, 1, 1, -1, 0, 0, 0]))  # a group without spread teaches nothing
    assert found.v is None


def test_grpo_takes_the_penalty_and_leaves_out_groups_of_little_spread():
    played = [
        episode("a", [0, 10], [1, 1], invalid=(0,)),
        episode("a", [0], [1]),
        episode("b", [0.2], [1], group=1),
        episode("b", [0], [1], group=1),
    ]
    found = ALGORITHMS["grpo"].targets(build_rows(played, merge=False), OldPolicy(torch.zeros(5)), config(invalid_penalty=0.5, min_std=1.0))
    assert torch.allclose(found.advantages, torch.tensor([0.9, 1.0, -1.0, 0, 0]))  # mean 5, deviation 5; the penalty is not in them


def test_only_grpo_plays_a_task_more_than_once():
    settings = Config(group_size=4, episodes_per_iteration=8)
    assert {name: algorithm.episodes_per_task(settings) for name, algorithm in ALGORITHMS.items()} == {
        "sapo": 1, "ppo": 1, "ppo_token": 1, "grpo": 4
    }  # fmt: skip


def test_what_the_values_estimate():
    batch = build_rows([episode("a", [1, 10], [2, 1]), episode("b", [2], [1])], merge=False)
    for name in ("sapo", "ppo"):
        assert value_returns(batch, ALGORITHMS[name], config()).tolist() == pytest.approx([10, 10, 2])
    assert value_returns(batch, ALGORITHMS["ppo_token"], config()).tolist() == [11, 11, 11, 2]


def test_truncated_episodes_bootstrap_only_when_asked():
    trajectory = episode("a", [0, 0], [1, 1])
    trajectory.end, trajectory.final_prompt_ids = "truncated", [9, 9]
    assert len(build_rows([trajectory], merge=False).rows) == 2 and len(build_rows([trajectory], merge=False, bootstrap=True).rows) == 3
    batch = build_rows([trajectory], merge=False)
    v = torch.tensor([1.0, 2])
    paper = ALGORITHMS["sapo"].targets(batch, OldPolicy(torch.zeros(2), v=v, q=v, bootstrap=torch.zeros(1)), config())
    booted = ALGORITHMS["sapo"].targets(batch, OldPolicy(torch.zeros(2), v=v, q=v, bootstrap=torch.tensor([6.0])), config())
    assert paper.q.tolist() == pytest.approx([1.8, 0]) and booted.q.tolist() == pytest.approx([1.8, 5.4])


def test_monte_carlo_returns():
    batch = build_rows([episode("a", [1, 0, 10], [1, 1, 1]), episode("b", [2], [1])], merge=False)
    assert monte_carlo_returns(batch, 0.5).tolist() == pytest.approx([3.5, 5, 10, 2])
