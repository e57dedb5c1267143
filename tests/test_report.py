"""The report: right numbers in the table, whole pages, readable figures, also of runs that are young, broken or of another algorithm."""

import base64
import csv
import json
import math
import re

import numpy as np
import pytest

from sapo_fast import report_figures
from sapo_fast.config import load_config, to_yaml
from sapo_fast.report import compare_report, report

TURN = {"observation": "A <box> & more", "response": "<think>x</think>", "command": "open box", "reward": 0.0, "invalid": False}
EPISODE = {"task_id": "eval/3", "won": False, "end": "truncated", "return": 0.0, "turns": [TURN, {**TURN, "invalid": True}]}


def make_run(
    folder, *, algorithm="sapo", seed=0, iterations=4, wanted=None, success=(0.25, 0.5, 0.75), seconds=4.0, peak=100.0, change=None
):
    """A run's folder with known numbers: an evaluation at 0, 2 and the end."""
    folder.mkdir(parents=True)
    settings = [
        f"algorithm={algorithm}",
        f"seed={seed}",
        f"iterations={wanted or iterations}",
        "episodes_per_iteration=8",
        "eval.episodes=16",
    ]
    (folder / "config.yaml").write_text(to_yaml(load_config(None, settings)))
    records = []
    for iteration in range(iterations + 1):
        record = {"iteration": iteration}
        if iteration % 2 == 0:
            value = success[iteration // 2]
            record |= {
                "eval/success": value,
                "eval/success_se": math.sqrt(value * (1 - value) / 16),
                "eval/turns": 9,
                "eval/pick_two": value,
            }
            record["time/eval"] = 1.0
        if iteration < iterations:
            evaluated = record.get("time/eval", 0.0)
            record |= {"train/success": 0.5, "loss/policy": -0.1, "loss/v": 0.2, "optim/grad_norm": 1.5, "policy/approx_kl": 0.01}
            record |= {"time/rollout": seconds / 2, "time/env": 0.1, "time/update": seconds / 4, "time/total": seconds + evaluated}
            record |= {
                "memory/peak_mb": peak + iteration,
                "memory/param_optimizer_mb": 12.0,
                "rollout/invalid_rate": 0.1,
                "rollout/crashed": 1,
            }
        records.append(record)
    if change:
        change(records)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sample = {
        "iteration": iterations - 1,
        "v": [1.0, 2.0, 3.0],
        "q": [1.5, 2.0, 2.5] if algorithm == "sapo" else [],
        "returns": [0.0, 2.5, 4.0],
    }
    (folder / "values.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "episodes.jsonl").write_text(json.dumps({"iteration": 0, **EPISODE}) + "\n")
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """What was to be drawn, by file name; the files hold their own names. For tests of the page and the table, which need no figure."""
    kept = {}

    def stub(path, *given, **named):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
        kept[path.name] = (given, named)

    for name in ("learning_curve", "time_split", "values", "losses", "health", "comparison"):
        monkeypatch.setattr(report_figures, name, stub)
    return kept


def ink(path):
    """Share of pixels that are not white: an empty figure has next to none."""
    from PIL import Image

    image = np.asarray(Image.open(path).convert("L"))
    assert image.shape[0] > 300 and image.shape[1] > 600
    return float((image < 250).mean())


def test_a_run_becomes_figures_and_one_self_contained_page(tmp_path):
    page = report(make_run(tmp_path / "run"))
    assert page == tmp_path / "run" / "report" / "report.html"
    names = {"learning_curve.png", "time.png", "values.png", "losses.png", "health.png"}
    assert {path.name for path in page.parent.iterdir()} == names | {"report.html"}
    for name in names:
        assert ink(page.parent / name) > 0.02, name
    text = page.read_text()
    assert not re.findall(r"(?:src|href)=['\"](?!data:)", text) and "<script" not in text
    images = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", text)
    assert {base64.b64decode(image) for image in images} == {(page.parent / name).read_bytes() for name in names}


def test_the_page_tells_the_run_s_numbers(tmp_path, undrawn):
    text = report(make_run(tmp_path / "run")).read_text()
    assert "25.0%" in text and "75.0% &plusmn; 10.8%" in text  # sqrt(.75 * .25 / 16)
    assert "<b>4 s</b><span>an iteration, without the panel" in text
    assert "<b>18 s</b><span>whole time" in text  # 4 iterations of 4 s and two panels of 1 s
    assert "103 MB" in text and "4 of 4 iterations, 32 episodes" in text
    assert "<td>eval/success<td class='n'>0.75<td class='n note'>at 4" in text
    assert "<td>loss/v<td class='n'>0.2<td class='n note'>at 3" in text


def test_values_that_are_not_finite_are_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "values.jsonl").write_text(
        json.dumps({"iteration": 3, "v": [1.0, None, 2.0], "q": [None] * 3, "returns": [0.5, 1.0, None]}) + "\n"
    )
    assert ink(report(run).parent / "values.png") > 0.02


def test_what_a_model_says_cannot_break_the_page(tmp_path, undrawn):
    text = report(make_run(tmp_path / "run")).read_text()
    assert "<think>" not in text and "&lt;think&gt;x&lt;/think&gt;" in text
    assert "A &lt;box&gt; &amp; more" in text and "eval/3: lost (truncated) in 2 turns, return 0" in text


def test_numbers_that_are_not_finite_are_named_and_left_out(tmp_path, undrawn):
    def spoil(records):
        records[1] |= {"loss/policy": None, "non_finite": ["loss/policy"]}
        records[3] |= {"loss/v": None, "non_finite": ["loss/v"]}

    text = report(make_run(tmp_path / "run", change=spoil)).read_text()
    assert "Not finite at some iteration (left out of the plots): loss/policy, loss/v" in text
    assert "<td>loss/v<td class='n'><span class='bad'>not finite</span>" in text


@pytest.mark.parametrize("algorithm", ["ppo", "ppo_token", "grpo"])
def test_a_run_of_another_algorithm_without_values(tmp_path, undrawn, algorithm):
    run = make_run(tmp_path / "run", algorithm=algorithm)
    (run / "values.jsonl").unlink()
    page = report(run)
    assert not (page.parent / "values.png").exists() and "Values and returns" not in page.read_text()


def test_a_run_that_has_just_begun(tmp_path):
    def first(records):
        del records[1:]

    assert ink(report(make_run(tmp_path / "one", change=first)).parent / "losses.png") > 0.02

    def only_evaluation(records):
        records[:] = [{key: value for key, value in records[0].items() if key == "iteration" or key.startswith("eval/")}]

    page = report(make_run(tmp_path / "none", change=only_evaluation))
    assert sorted(path.name for path in page.parent.iterdir()) == ["learning_curve.png", "report.html", "values.png"]


def test_folders_without_numbers_are_refused(tmp_path, undrawn):
    with pytest.raises(ValueError, match="no run's folder"):
        report(tmp_path)
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no metrics yet"):
        report(run)


@pytest.mark.parametrize("algorithm", ["sapo", "ppo", "grpo"])
def test_the_learning_curve_is_told_the_run_s_sizes(tmp_path, undrawn, algorithm):
    def fewer(records):
        for record in records:
            if "eval/success" in record:
                record["eval/episodes"] = 12

    report(make_run(tmp_path / "all", algorithm=algorithm))
    given, named = undrawn["learning_curve.png"]
    assert named == {"episodes": 8, "warmup": 0 if algorithm == "grpo" else 5, "panel": 16} and len(given[0]) == 5
    report(make_run(tmp_path / "few", algorithm=algorithm, change=fewer))
    assert undrawn["learning_curve.png"][1]["panel"] == 12, "the suite had 12 evaluation tasks"


def test_the_newest_episode_and_number_come_first(tmp_path, undrawn):
    run = make_run(tmp_path / "run")
    with open(run / "episodes.jsonl", "a") as stream:
        stream.write(json.dumps({"iteration": 2, **EPISODE, "turns": [{**TURN, "observation": "one\ntwo"}]}) + "\n")
    text = report(run).read_text()
    assert text.index("Iteration 2, eval/3") < text.index("Iteration 0, eval/3") and "<td>one<br>two<td>" in text
    assert (
        "<td>eval/turns<td class='n'>9<td class='n note'>at 4" in text
        and "<td>memory/peak_mb<td class='n'>103<td class='n note'>at 3" in text
    )


@pytest.mark.parametrize(("seconds", "shown"), [(20.0, "82 s"), (60.0, "4 min"), (1799.0, "120 min"), (3600.0, "4.0 h")])
def test_durations_in_the_unit_that_people_use(tmp_path, undrawn, seconds, shown):
    text = report(make_run(tmp_path / "run", seconds=seconds)).read_text()
    assert f"<b>{shown}</b><span>whole time" in text


def test_a_comparison_of_unlike_runs_counts_what_all_have(tmp_path, undrawn):
    runs = [
        make_run(tmp_path / "s1", seed=1, success=(0.2, 0.5, 0.9), seconds=2.0, peak=10.0),
        make_run(tmp_path / "s0", seed=0, success=(0.6, 0.7, 0.5), seconds=4.0, peak=30.0, iterations=2, wanted=4),
    ]
    table = compare_report(runs, tmp_path / "out").read_text()
    (row,) = csv.DictReader((tmp_path / "out" / "comparison.csv").open())
    assert (row["iterations"], row["episodes"]) == ("2", "16"), "the shortest run's"
    assert float(row["success_start"]) == pytest.approx(0.4) and float(row["success"]) == pytest.approx(0.8)
    assert float(row["success_se"]) == pytest.approx(0.1) and float(row["seconds_per_iteration_se"]) == pytest.approx(1.0)
    assert float(row["peak_mb"]) == pytest.approx((13 + 31) / 2) and float(row["param_optimizer_mb"]) == 12
    assert table.index("- sapo, seed 0: 0.700 (unfinished: 2 of 4 iterations)") < table.index("- sapo, seed 1: 0.900\n")
    (curves, bars), _ = undrawn["comparison.png"]
    assert [(x.tolist(), y.tolist()) for x, y in curves["sapo"]] == [([0, 16, 32], [0.2, 0.5, 0.9]), ([0, 16], [0.6, 0.7])]
    assert bars["seconds an iteration"]["sapo"] == (pytest.approx(3.0), pytest.approx(1.0)) and bars["peak memory, MB"]["sapo"] == (22, 0.0)


def test_a_comparison_averages_over_seeds_and_leaves_the_panel_out_of_the_costs(tmp_path):
    runs = [
        make_run(tmp_path / "s0", seed=0, success=(0.2, 0.5, 0.8), seconds=3.0),
        make_run(tmp_path / "s1", seed=1, success=(0.3, 0.5, 0.6), seconds=5.0),
        make_run(tmp_path / "g0", algorithm="grpo", seed=0, success=(0.2, 0.3, 0.4), seconds=2.0, peak=50.0, iterations=2, wanted=4),
    ]
    table = compare_report(runs, tmp_path / "out")
    rows = {row["algorithm"]: row for row in csv.DictReader((tmp_path / "out" / "comparison.csv").open())}
    sapo, grpo = rows["sapo"], rows["grpo"]
    assert (sapo["seeds"], sapo["iterations"], sapo["episodes"]) == ("2", "4", "32")
    assert float(sapo["success"]) == pytest.approx(0.7) and float(sapo["success_start"]) == pytest.approx(0.25)
    assert float(sapo["success_se"]) == pytest.approx(0.1)  # sd of (0.8, 0.6) = sqrt(0.02), over sqrt(2)
    assert float(sapo["success_mean"]) == pytest.approx((0.5 + 1.4 / 3) / 2)
    assert float(sapo["seconds_per_iteration"]) == pytest.approx(4.0) and float(sapo["peak_mb"]) == 103.0
    assert grpo["success_se"] == "" and float(grpo["success"]) == pytest.approx(0.3) and grpo["episodes"] == "16"
    text = table.read_text()
    assert "| sapo | 2 | 4 | 32 | 0.25 | 0.7 | 0.1 |" in text and "- sapo, seed 1: 0.600" in text
    assert "- grpo, seed 0: 0.300 (unfinished: 2 of 4 iterations)" in text
    assert ink(tmp_path / "out" / "comparison.png") > 0.03


def test_the_mean_curve_is_over_the_points_that_all_seeds_have():
    x, mean, error = report_figures.mean_curve([(np.array([0.0, 8, 16]), np.array([0.0, 1, 2])), (np.array([0.0, 16]), np.array([1.0, 4]))])
    assert x.tolist() == [0, 16] and mean.tolist() == [0.5, 3.0] and error.tolist() == pytest.approx([0.5, 1.0])
    x, mean, error = report_figures.mean_curve([(np.array([0.0, 8]), np.array([0.3, 0.4]))])
    assert mean.tolist() == [0.3, 0.4] and error.tolist() == [0, 0]


def test_phases_add_up_to_the_whole_time(tmp_path):
    records = [json.loads(line) for line in (make_run(tmp_path / "run") / "metrics.jsonl").read_text().splitlines()]
    phases = report_figures._phases(records)
    assert sum(phases.values()).tolist() == pytest.approx([5.0, 4.0, 5.0, 4.0])
    assert phases["generation"][0] == pytest.approx(1.9) and phases["environments"][0] == pytest.approx(0.1)
    assert phases["other"].tolist() == pytest.approx([1.0] * 4)


def test_a_comparison_needs_evaluated_runs(tmp_path):
    def no_evaluation(records):
        for record in records:
            record.pop("eval/success", None)

    with pytest.raises(ValueError, match="has no evaluation yet"):
        compare_report([make_run(tmp_path / "run", change=no_evaluation)], tmp_path / "out")
    with pytest.raises(ValueError, match="at least one run"):
        compare_report([], tmp_path / "out")
    assert not (tmp_path / "out").exists()
