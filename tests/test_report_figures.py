"""The figures hold the run's numbers: what is drawn is read back from the figure itself, which is not rendered."""

import numpy as np
import pytest
from matplotlib import pyplot as plt

from sapo_fast import report_figures as figures


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were to be written, by file name."""
    kept = {}
    monkeypatch.setattr(figures, "_write", lambda figure, path: kept.update({path: figure}))
    yield kept
    plt.close("all")


def line(axis, label):
    (found,) = [one for one in axis.get_lines() if (one.get_label() or "").startswith(label)]
    return found.get_xdata().tolist(), found.get_ydata().tolist()


def band(axis, index=0):
    """Lowest and highest y of a filled band, by x."""
    (path,) = axis.collections[index].get_paths()
    points = path.vertices
    return {float(x): (points[points[:, 0] == x][:, 1].min(), points[points[:, 0] == x][:, 1].max()) for x in set(points[:, 0])}


def bars(axis):
    """(x, bottom, height) of every bar."""
    return [(round(p.get_x() + p.get_width() / 2, 9), p.get_y(), p.get_height()) for p in axis.patches]


RUN = [
    {
        "iteration": 0,
        "train/success": 0.1,
        "eval/success": 0.2,
        "eval/success_se": 0.05,
        "eval/put": 0.4,
        "eval/cool": 0.3,
        "eval/turns": 9,
    },
    {"iteration": 1, "train/success": 0.4},
    {"iteration": 2, "train/success": 0.7, "eval/success": 0.6, "eval/success_se": 0.1, "eval/put": 0.5, "eval/cool": 0.9, "eval/turns": 9},
    {"iteration": 3, "train/success": 1.0},
    {"iteration": 4, "eval/success": 0.8, "eval/success_se": 0.02, "eval/put": 0.6, "eval/cool": 0.95, "eval/turns": 9},
]


def test_the_learning_curve_is_success_over_episodes(drawn):
    figures.learning_curve("curve", RUN, episodes=8, warmup=2, panel=16)
    axis, types = drawn["curve"].axes
    assert line(axis, "evaluation panel, 16 tasks") == ([0, 16, 32], [0.2, 0.6, 0.8])
    assert line(axis, "training episodes")[0] == [0, 8, 16, 24]
    assert line(axis, "training episodes")[1] == pytest.approx([0.4, 0.55, 0.55, 0.7])  # means of those within 2 iterations
    got = band(axis)
    assert got[0.0] == pytest.approx((0.15, 0.25)) and got[16.0] == pytest.approx((0.5, 0.7)) and got[32.0] == pytest.approx((0.78, 0.82))
    assert [(text.get_text(), text.xy) for text in axis.texts] == [("20%", (0, 0.2)), ("80%", (32, 0.8))]
    (span,) = [patch for patch in axis.patches if patch.get_label() == "value warm-up"]
    assert (span.get_x(), span.get_width()) == (0, 16)
    assert [text.get_text() for text in types.get_yticklabels()] == ["put", "cool"]  # worst below
    assert [patch.get_width() for patch in types.patches] == [0.6, 0.95]
    assert line(types, "first evaluation")[0] == [0.4, 0.3]


def test_a_warm_up_longer_than_the_run_is_shaded_to_its_end(drawn):
    figures.learning_curve("curve", RUN[:2], episodes=8, warmup=5, panel=16)
    (span,) = [patch for patch in drawn["curve"].axes[0].patches if patch.get_label() == "value warm-up"]
    assert span.get_width() == 16
    figures.learning_curve("none", RUN, episodes=8, warmup=0, panel=16)
    assert not [patch for patch in drawn["none"].axes[0].patches if patch.get_label() == "value warm-up"]


def test_phases_are_stacked_to_the_whole_time(drawn):
    records = [{"iteration": i, "time/total": 10.0, "time/rollout": 4.0 + i, "time/env": 1.0, "time/update": 3.0} for i in range(2)]
    figures.time_split("time", [*records, {"iteration": 2, "eval/success": 1.0}])
    (axis,) = drawn["time"].axes
    tops = {0.0: 0.0, 1.0: 0.0}
    for x, bottom, height in bars(axis):
        assert bottom == pytest.approx(tops[x])
        tops[x] += height
    assert tops == {0.0: pytest.approx(10), 1.0: pytest.approx(10)}
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["generation  35%  (3.5 s)", "environments  10%  (1 s)", "update  30%  (3 s)", "other  25%  (2.5 s)"]
    assert axis.get_title(loc="left") == "Time of an iteration: 10 s on average"


def test_values_against_returns_of_the_last_sample(drawn):
    records = [{"iteration": i, "value/explained_variance": 0.1 * i, "value/q_explained_variance": 0.2 * i} for i in range(3)]
    last = {"iteration": 2, "v": [1.0, None, 3.0, 4.0], "q": [2.0, 5.0, 6.0, 7.0], "returns": [0.0, 1.0, None, 8.0]}
    figures.values("values", records, [{"iteration": 0, "v": [9.0], "q": [9.0], "returns": [9.0]}, last])
    v, q, explained = drawn["values"].axes
    assert v.collections[0].get_offsets().tolist() == [[1, 0], [4, 8]] and q.collections[0].get_offsets().tolist() == [
        [2, 0],
        [5, 1],
        [7, 8],
    ]
    assert v.get_title(loc="left") == "V and the return, iteration 2" and "2 turns" in v.get_xlabel() and "3 turns" in q.get_xlabel()
    assert line(explained, "V")[1] == pytest.approx([0, 0.1, 0.2]) and line(explained, "Q")[1] == pytest.approx([0, 0.2, 0.4])
    figures.values("critic", records, [{**last, "q": []}])
    assert [text.get_text() for text in drawn["critic"].axes[1].texts] == ["no finite Q"]


def test_losses_each_on_an_axis_of_its_own(drawn):
    names = {"loss/policy": -1.0, "loss/v": 2.0, "policy/entropy": 3.0, "optim/grad_norm": 4.0, "optim/grad_norm_v": 0.5}
    figures.losses("losses", [{"iteration": i, **{name: value + i for name, value in names.items()}} for i in range(3)])
    axes = drawn["losses"].axes
    assert [axis.get_title(loc="left") for axis in axes] == ["policy loss", "V loss", "entropy", "Gradient norms"]
    assert {axis.get_xlabel() for axis in axes} == {"iteration"}
    assert axes[0].get_lines()[0].get_ydata().tolist() == [-1, 0, 1] and axes[1].get_lines()[0].get_ydata().tolist() == [2, 3, 4]
    assert line(axes[3], "whole, before clipping")[1] == [4, 5, 6] and line(axes[3], "v alone")[1] == [0.5, 1.5, 2.5]
    assert axes[3].get_yscale() == "log"


def test_what_is_zero_throughout_keeps_a_linear_scale(drawn):
    records = [{"iteration": i, "policy/approx_kl": 0.0, "policy/clip_fraction": 0.0, "policy/log_ratio_max": 0.5 - i} for i in range(2)]
    figures.health("health", records)
    _, moved, ratios = drawn["health"].axes
    assert moved.get_yscale() == "linear" and ratios.get_yscale() == "log"


def test_the_health_of_a_run_counts_lost_episodes(drawn):
    base = {
        "train/success": 0.5,
        "rollout/invalid_rate": 0.3,
        "rollout/truncated_rate": 0.2,
        "rollout/crashed": 2.0,
        "rollout/overlong": 1.0,
    }
    base |= {"policy/log_ratio_q50": 0.01, "policy/log_ratio_q99": 0.09, "rollout/logprob_gap_max": 1e-5}
    figures.health("health", [{"iteration": i, **base} for i in range(3)])
    episodes, _, ratios = drawn["health"].axes
    assert episodes.get_ylabel() == "in 3 iterations: 6 crashed, 3 overlong"
    assert line(episodes, "invalid turns")[1] == [0.3] * 3 and line(episodes, "truncated episodes")[1] == [0.2] * 3
    assert line(ratios, "median")[1] == [0.01] * 3 and line(ratios, "99 %")[1] == [0.09] * 3
    assert line(ratios, "engine against trainer")[1] == [1e-5] * 3


def test_a_comparison_shows_means_errors_and_every_seed(drawn):
    x = np.array([0.0, 8.0])
    curves = {"sapo": [(x, np.array(y)) for y in ([0.1, 0.5], [0.2, 0.7], [0.3, 0.6])], "grpo": [(x, np.array([0.1, 0.4]))]}
    figures.comparison("comparison", curves, {"seconds an iteration": {"sapo": (4.0, 1.0), "grpo": (2.0, 0.0)}})
    success, seconds = drawn["comparison"].axes
    assert line(success, "sapo (3 seeds)")[1] == pytest.approx([0.2, 0.6]) and line(success, "grpo (1 seed)")[1] == [0.1, 0.4]
    assert sorted(one.get_ydata()[-1] for one in success.get_lines() if one.get_linewidth() < 1) == [0.4, 0.5, 0.6, 0.7]
    error = 0.1 / np.sqrt(3)
    assert band(success)[8.0] == pytest.approx((0.6 - error, 0.6 + error)) and band(success)[0.0] == pytest.approx(
        (0.2 - error, 0.2 + error)
    )
    assert [patch.get_width() for patch in seconds.patches] == [4, 2]
    assert [text.get_text() for text in seconds.get_yticklabels()] == ["sapo", "grpo"]
    assert seconds.get_title(loc="left") == "seconds an iteration" and seconds.yaxis_inverted()


def test_the_mean_curve_needs_a_point_of_every_seed():
    seeds = [
        (np.array([0.0, 8, 16]), np.array([0.0, 1, 2])),
        (np.array([0.0, 16]), np.array([1.0, 4])),
        (np.array([0.0, 16]), np.array([2.0, 6])),
    ]
    x, mean, error = figures.mean_curve(seeds)
    assert x.tolist() == [0, 16] and mean.tolist() == [1, 4] and error.tolist() == pytest.approx([1 / np.sqrt(3), 2 / np.sqrt(3)])
