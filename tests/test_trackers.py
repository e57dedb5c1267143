"""What a run writes down: every number, readable after a kill, told once after a resume."""

import json
import sys

import pytest

from sapo_fast.trackers import Tracker, check_installed, episode_text, read_jsonl

EPISODE = {
    "task_id": "train/7",
    "won": True,
    "end": "terminated",
    "return": 10.0,
    "turns": [
        {
            "observation": "You see a box.\nIt is <b>shut</b> | dusty.",
            "response": "open box",
            "command": "open box",
            "reward": 0.0,
            "invalid": False,
        },
        {"observation": "An apple.", "response": "¿?", "command": "", "reward": 10.0, "invalid": True},
    ],
}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_an_iteration_and_non_finite_numbers_are_flagged(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.log(0, {"loss/policy": 0.1, "train/turns": 7.0})
        tracker.log(1, {"loss/policy": float("nan"), "loss/v": float("inf"), "loss/q": -0.25})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 0, "loss/policy": 0.1, "train/turns": 7},
        {"iteration": 1, "loss/policy": None, "loss/v": None, "loss/q": -0.25, "non_finite": ["loss/policy", "loss/v"]},
    ]


def test_values_that_are_not_finite_do_not_end_the_run(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.values(3, v=[1.5, float("nan")], q=[], returns=[float("-inf"), 2.0])
    assert lines(tmp_path / "values.jsonl") == [{"iteration": 3, "v": [1.5, None], "q": [], "returns": [None, 2]}]


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log(0, {"a": 1.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1  # not closed, not flushed by us
    tracker.close()


def test_floats_survive_exactly(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.log(0, {"x": 0.1 + 0.2, "y": 1e-300, "z": 2.0**60})
    assert lines(tmp_path / "metrics.jsonl")[0] == {"iteration": 0, "x": 0.1 + 0.2, "y": 1e-300, "z": 2.0**60}


def test_whole_numbers_read_as_such_and_huge_ones_stay_short(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.log(0, {"count": 128.0, "huge": 1e300})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iteration": 0, "count": 128, "huge": 1e+300}\n'


def test_resuming_drops_what_will_be_told_again(tmp_path):
    with Tracker(tmp_path) as tracker:
        for iteration in range(5):
            tracker.log(iteration, {"a": float(iteration)})
            tracker.values(iteration, v=[1.0], q=[], returns=[2.0])
        tracker.episodes(0, [EPISODE])
        tracker.episodes(4, [EPISODE])
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"iteration": 5, "a"')  # killed while writing
    with Tracker(tmp_path, resume_at=3) as tracker:
        assert [line["iteration"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
        tracker.log(3, {"a": 30.0})
    assert [line["a"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 30]
    assert [line["iteration"] for line in lines(tmp_path / "values.jsonl")] == [0, 1, 2]
    assert [line["iteration"] for line in lines(tmp_path / "episodes.jsonl")] == [0]
    assert "Iteration 4" not in (tmp_path / "episodes.md").read_text()
    assert not list(tmp_path.glob(".tmp*"))


def test_resuming_before_the_first_episode_leaves_no_stale_page(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.episodes(0, [EPISODE])
    Tracker(tmp_path, resume_at=0).close()
    assert not (tmp_path / "episodes.md").exists()


def test_a_reader_passes_over_a_line_that_a_kill_cut_short(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"iteration": 0}\n{"iteration": 1, "a')
    assert list(read_jsonl(tmp_path / "m.jsonl")) == [{"iteration": 0}]
    assert list(read_jsonl(tmp_path / "none.jsonl")) == []


def test_episodes_are_kept_as_data_and_readable(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.episodes(10, [EPISODE, {**EPISODE, "won": False, "end": "truncated", "return": 0.0}])
    assert lines(tmp_path / "episodes.jsonl")[0] == {"iteration": 10, **EPISODE}
    page = (tmp_path / "episodes.md").read_text()
    assert "train/7: won in 2 turns, return 10" in page and "lost (truncated) in 2 turns, return 0" in page
    with Tracker(tmp_path, resume_at=11) as tracker:
        tracker.episodes(20, [EPISODE])
    headings = [line for line in (tmp_path / "episodes.md").read_text().splitlines() if line.startswith("## ")]
    assert [heading.split(":")[0] for heading in headings] == ["## Iteration 20", "## Iteration 10", "## Iteration 10"], "newest first"


def test_the_configuration_is_kept_beside_the_numbers(tmp_path):
    from sapo_fast.config import load_config

    config = load_config(None, ["seed=7", "optim.lr=3e-5"])
    Tracker(tmp_path, config=config).close()
    assert load_config(str(tmp_path / "config.yaml"), []) == config


def test_tensorboard_is_flushed_every_iteration_and_closed(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def __getattr__(self, name):
            return lambda *given: calls.append((name, *given))

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)
    with Tracker(tmp_path, tensorboard=True, resume_at=3) as tracker:
        tracker.log(3, {"a": 1.0})
        assert calls == [(str(tmp_path / "tensorboard"), 3), ("add_scalar", "a", 1.0, 3), ("flush",)]
    assert calls[-1] == ("close",)


def test_an_episode_s_text_cannot_break_the_table():
    rows = [line for line in episode_text({"iteration": 1, **EPISODE}).splitlines() if line.startswith("| 1 ") or line.startswith("| 2 ")]
    assert rows == [
        "| 1 | You see a box.<br>It is &lt;b&gt;shut&lt;/b&gt; \\| dusty. | open box | open box | 0 |",
        "| 2 | An apple. | ¿? | (invalid) | 10 |",
    ]


def test_tensorboard_holds_the_same_numbers_and_a_resume_purges(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(tmp_path, tensorboard=True) as tracker:
        for iteration in range(4):
            tracker.log(iteration, {"loss/policy": iteration / 4})
    with Tracker(tmp_path, tensorboard=True, resume_at=2) as tracker:
        tracker.log(2, {"loss/policy": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/policy")] == [(0, 0.0), (1, 0.25), (2, 9.0)]


def test_a_missing_package_is_told_before_any_work(tmp_path, monkeypatch):
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name in ("wandb", "tensorboard") else real(name, *rest))
    with pytest.raises(ValueError, match="log.wandb=true needs the package wandb; pip install wandb, or set log.wandb=false"):
        Tracker(tmp_path / "new", wandb=True)
    with pytest.raises(ValueError, match="log.tensorboard=true needs the package tensorboard; pip install 'sapo_fast.train.'"):
        Tracker(tmp_path / "new", tensorboard=True)
    assert not (tmp_path / "new").exists()
    check_installed(tensorboard=False, wandb=False)


def test_wandb_gets_the_numbers_and_a_resume_goes_on_in_the_same_run(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, numbers, step):
            calls.append(("log", numbers, step))

        def finish(self):
            calls.append("finish")

    class Wandb:
        __spec__ = True

        class util:
            @staticmethod
            def generate_id():
                return f"id{len(calls)}"

        @staticmethod
        def init(**settings):
            calls.append(("init", settings["id"], settings["resume"], settings["config"]["seed"]))
            return Run()

    from sapo_fast.config import Config

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    for start in (0, 1):
        with Tracker(tmp_path, wandb=True, resume_at=start, config=Config(seed=7)) as tracker:
            tracker.log(start, {"a": 1.5})
    assert calls == [
        ("init", "id0", "allow", 7),
        ("log", {"a": 1.5}, 0),
        "finish",
        ("init", "id0", "allow", 7),
        ("log", {"a": 1.5}, 1),
        "finish",
    ]
