"""What a panel leaves on disk, its hash, and the refusal of tasks that are trained on."""

import json

import pytest

from sapo_fast.evaluate import panel_metrics
from sapo_fast.panels import panel_digest, refuse_overlap, summary, write_panel
from sapo_fast.records import Trajectory, Turn


class Suite:
    name = "toy"
    report = {"manifest": "ab"}


def episode(task, won, score=None, kind="", invalid=False):
    turn = Turn([1], [2], [0.0], reward=10.0 * won, invalid=invalid, command="go")
    return Trajectory(task, seed=7, turns=[turn], won=won, score=score, task_type=kind)


def test_the_hash_is_of_suite_contents_tasks_order_and_seed():
    digest = panel_digest(Suite(), ["a", "b"], 3)
    assert len(digest) == 16 and digest == panel_digest(Suite(), ["a", "b"], 3)
    other = Suite()
    other.report = {"manifest": "cd"}
    changed = [
        panel_digest(Suite(), ["b", "a"], 3),
        panel_digest(Suite(), ["a"], 3),
        panel_digest(Suite(), ["a", "b"], 4),
        panel_digest(other, ["a", "b"], 3),
    ]
    assert digest not in changed and len(set(changed)) == 4


def test_a_task_in_both_is_refused_and_named():
    refuse_overlap(["a", "b"], ["c"])
    with pytest.raises(ValueError, match=r"2 tasks are in both \(a, b\)"):
        refuse_overlap(["a", "b"], ["b", "c", "a"])


def test_summary_by_type_with_standard_errors():
    found = summary(
        [episode("1", True, 1.0, "x"), episode("2", False, 0.5, "x"), episode("3", False, None, "y"), episode("4", False, 0.25, "y")]
    )
    assert list(found) == ["all", "x", "y"]
    assert found["all"]["success"] == 0.25 and found["all"]["success_se"] == pytest.approx((0.25 * 0.75 / 4) ** 0.5)
    assert found["all"]["score"] == pytest.approx(1.75 / 4)
    # scores 1, 0.5, 0 (no score: a crash), 0.25: sample variance 0.1822917
    assert found["all"]["score_se"] == pytest.approx((0.18229166666 / 4) ** 0.5)
    assert found["x"] == pytest.approx({"episodes": 2, "success": 0.5, "success_se": 0.125**0.5, "score": 0.75, "score_se": 0.25})
    assert "score" not in summary([episode("1", True)])["all"]


def test_panel_metrics_have_the_score_where_there_is_one():
    metrics = panel_metrics([episode("1", True, 1.0), episode("2", False, 0.5)])
    assert metrics["eval/score"] == 0.75 and metrics["eval/success"] == 0.5
    assert "eval/score" not in panel_metrics([episode("1", True)])


def test_every_episode_is_written(tmp_path):
    path = write_panel(
        tmp_path / "run", "00ff", {"suite": "toy"}, [episode("1", True, 1.0, "x"), episode("2", False, 0.5, "x", invalid=True)]
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1] and {line["panel"] for line in lines} == {"00ff"}
    assert lines[0] == {
        "panel": "00ff", "index": 0, "task_id": "1", "task_type": "x", "seed": 7, "won": True, "score": 1.0, "return": 10.0, "end": "terminated",
        "turns": 1, "invalid": 0, "error": None, "commands": ["go"],
    }  # fmt: skip
    assert lines[1]["invalid"] == 1
    whole = json.loads((tmp_path / "run" / "panel-00ff.json").read_text())
    assert whole["panel"] == "00ff" and whole["suite"] == "toy" and whole["summary"]["all"]["success"] == 0.5
