"""The figures of a run and of a comparison. The only module that imports matplotlib; Agg backend, so that no display is needed.

A *series* is (x, y): NumPy arrays without gaps, x in the unit named on the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - the backend is chosen first
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter  # noqa: E402

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = "#1f6feb", "#e8710a", "#1a936f", "#d1345b", "#7b4fbf", "#5aa9e6", "#b8c1cc"
ALGORITHM_COLOURS = {"sapo": BLUE, "ppo": ORANGE, "ppo_token": PURPLE, "grpo": GREEN}
STYLE = {
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "savefig.bbox": "tight",
    "savefig.facecolor": "white",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
}
PHASE_COLOURS = {
    "generation": BLUE,
    "environments": SKY,
    "values and old log-probs": PURPLE,
    "reference": GREY,
    "update": ORANGE,
    "gradient diagnosis": RED,
    "evaluation panel": GREEN,
    "other": FAINT,
}
Records = Sequence[Mapping[str, Any]]


def series(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(iteration, value) of one metric, where it was logged and finite."""
    pairs = [(record["iteration"], record[name]) for record in records if record.get(name) is not None]
    array = np.array(pairs, dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def learning_curve(path: Path, records: Records, *, episodes: int, warmup: int, panel: int) -> None:
    """Success over the episodes played: the panel with its standard error, the training episodes behind it; by task type beside it."""
    x, success = series(records, "eval/success")
    _, error = series(records, "eval/success_se")
    types = sorted(name for name in {key for record in records for key in record} if name.startswith("eval/") and name not in _EVAL_TOTALS)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, 2 if types else 1, figsize=(11 if types else 7.5, 4.2), width_ratios=[2.3, 1] if types else None, squeeze=False
        )
        axis = axes[0, 0]
        train_x, train = series(records, "train/success")
        if len(train):
            axis.plot(train_x * episodes, train, color=GREY, linewidth=0.9, alpha=0.8)
            axis.plot(train_x * episodes, _smooth(train), color=FAINT, linewidth=1.4, label="training episodes (mean of 5 iterations)")
        if len(success):
            axis.fill_between(x * episodes, success - error, success + error, color=BLUE, alpha=0.15, linewidth=0)
            axis.plot(
                x * episodes, success, color=BLUE, marker="o", markersize=4, label=f"evaluation panel, {panel} tasks (band: standard error)"
            )
            for index in {0, len(success) - 1}:
                axis.annotate(
                    f"{success[index]:.0%}",
                    (x[index] * episodes, success[index]),
                    (0, 9),
                    textcoords="offset points",
                    ha="center",
                    color=BLUE,
                    weight="bold",
                )
        if warmup and len(train_x):
            axis.axvspan(0, min(warmup, train_x[-1] + 1) * episodes, color=GRID, alpha=0.6, linewidth=0, label="value warm-up")
        axis.set(title="Success", xlabel="episodes played", ylim=(0, 1.04))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.legend(loc="lower right")
        if types:
            _type_bars(axes[0, 1], records, types)
        _write(figure, path)


def time_split(path: Path, records: Records) -> None:
    """Seconds of each iteration by phase, stacked; the legend gives each phase's share of the whole."""
    phases = _phases(records)
    iterations = np.array([record["iteration"] for record in records if record.get("time/total") is not None], dtype=float)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(11, 3.8))
        total = sum(float(seconds.sum()) for seconds in phases.values()) or 1.0
        base = np.zeros(len(iterations))
        for name, seconds in phases.items():
            label = f"{name}  {seconds.sum() / total:.0%}  ({seconds.mean() if len(seconds) else 0:.2g} s)"
            axis.bar(iterations, seconds, bottom=base, width=1.0, color=PHASE_COLOURS[name], linewidth=0, label=label)
            base += seconds
        axis.set(title=f"Time of an iteration: {base.mean() if len(base) else 0:.3g} s on average", xlabel="iteration", ylabel="seconds")
        axis.grid(axis="x", visible=False)
        axis.margins(x=0.01)
        axis.xaxis.set_major_locator(_whole())
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title="share of the time (mean)", alignment="left")
        _write(figure, path)


def values(path: Path, records: Records, samples: Records) -> None:
    """What the values foretold: V and Q against the returns that followed, and their explained variance over the iterations."""
    last = samples[-1]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(13, 4))
        for axis, name, colour in ((axes[0], "v", BLUE), (axes[1], "q", ORANGE)):
            predicted = np.array(last[name], dtype=float)  # null reads as NaN
            returns = np.array(last["returns"], dtype=float)[: len(predicted)]
            told = np.isfinite(predicted) & np.isfinite(returns)
            predicted, returns = predicted[told], returns[told]
            title = f"{name.upper()} and the return, iteration {last['iteration']}"
            if not len(predicted):
                _empty(axis, title, f"no finite {name.upper()}")
                continue
            low, high = min(predicted.min(), returns.min()), max(predicted.max(), returns.max())
            pad = 0.05 * (high - low) or 1.0
            limits = (low - pad, high + pad)
            axis.plot(limits, limits, color=FAINT, linewidth=1, linestyle="--", zorder=1)
            axis.scatter(predicted, returns, s=14, color=colour, alpha=0.35, linewidths=0, zorder=2)
            axis.set(title=title, ylabel="discounted return that followed", xlim=limits, ylim=limits)
            axis.set_xlabel(f"{name.upper()}, reward units ({len(predicted)} turns; dashed: foretold exactly)")
        axis = axes[2]
        drawn = [
            _line(axis, records, "value/explained_variance", "V", BLUE),
            _line(axis, records, "value/q_explained_variance", "Q", ORANGE),
        ]
        axis.axhline(0, color=FAINT, linewidth=1)
        axis.set(title="Explained variance of the returns", xlabel="iteration", ylim=(max(-1.0, axis.get_ylim()[0]), 1.0))
        axis.set_ylabel("1: exactly, 0: no better than their mean")
        if any(drawn):
            axis.legend(loc="lower right")
        _write(figure, path)


def losses(path: Path, records: Records) -> None:
    """Each loss term on its own scale, and the gradient norms on one."""
    terms = [
        ("loss/policy", "policy loss"),
        ("loss/v", "V loss"),
        ("loss/q", "Q loss"),
        ("loss/kl", "KL to the reference (k3)"),
        ("policy/entropy", "entropy"),
    ]
    terms = [(name, title) for name, title in terms if len(series(records, name)[1])]
    with plt.rc_context(STYLE):
        figure, grid = _grid(len(terms) + 1)
        for axis, (name, title) in zip(grid, terms, strict=False):
            _line(axis, records, name, None, BLUE, smooth=True)
            axis.set(title=title, xlabel="iteration")
        axis = grid[len(terms)]
        _line(axis, records, "optim/grad_norm", "whole, before clipping", INK)
        for name, colour in (("policy", BLUE), ("v", GREEN), ("q", ORANGE), ("kl", PURPLE), ("entropy", SKY)):
            _line(axis, records, f"optim/grad_norm_{name}", f"{name} alone", colour, marker="o")
        axis.set(title="Gradient norms", xlabel="iteration")
        _log_scale(axis)
        _legend_below(axis)
        _write(figure, path)


def health(path: Path, records: Records) -> None:
    """What goes wrong first when something goes wrong: invalid actions, lost episodes, how far the policy moves in an update."""
    with plt.rc_context(STYLE):
        figure, (episodes, moved, ratios) = plt.subplots(1, 3, figsize=(13, 4.4))
        _line(episodes, records, "rollout/invalid_rate", "invalid turns", RED)
        _line(episodes, records, "rollout/truncated_rate", "truncated episodes", ORANGE)
        total = len(series(records, "train/success")[1])
        lost = {name: series(records, f"rollout/{name}")[1].sum() for name in ("crashed", "overlong")}
        episodes.set(title="Invalid and truncated", xlabel="iteration", ylim=(-0.02, 1.02))
        episodes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        episodes.set_ylabel(f"in {total} iterations: {lost['crashed']:.0f} crashed, {lost['overlong']:.0f} overlong", fontsize=9)
        _line(moved, records, "policy/approx_kl", "KL of the update (approximate)", BLUE)
        _line(moved, records, "policy/clip_fraction", "clipped tokens (share)", PURPLE)
        moved.set(title="How far an update moves the policy", xlabel="iteration")
        _log_scale(moved)
        for name, colour in (("max", RED), ("q99", ORANGE), ("q90", SKY), ("q50", BLUE)):
            _line(
                ratios, records, f"policy/log_ratio_{name}", {"max": "maximum", "q99": "99 %", "q90": "90 %", "q50": "median"}[name], colour
            )
        _line(ratios, records, "rollout/logprob_gap_max", "engine against trainer, maximum", FAINT)
        ratios.set(title="|log-ratio| of the tokens", xlabel="iteration")
        _log_scale(ratios)
        for axis in (episodes, moved, ratios):
            _legend_below(axis)
        _write(figure, path)


def comparison(
    path: Path, curves: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], bars: Mapping[str, Mapping[str, tuple[float, float]]]
) -> None:
    """Success over episodes for each algorithm (mean and standard error over seeds, each seed thin behind it), and costs as bars.

    ``curves[algorithm]``: one (episodes, success) a seed. ``bars[title][algorithm]``: (mean, standard error).
    """
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(12, 7.2))
        layout = figure.add_gridspec(2, len(bars), height_ratios=[1.7, 1])
        axis = figure.add_subplot(layout[0, :])
        for algorithm, seeds in curves.items():
            colour = ALGORITHM_COLOURS.get(algorithm, INK)
            for x, y in seeds:
                axis.plot(x, y, color=colour, linewidth=0.8, alpha=0.3)
            x, mean, error = mean_curve(seeds)
            axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
            axis.plot(
                x, mean, color=colour, marker="o", markersize=4, label=f"{algorithm} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})"
            )
        axis.set(title="Success on the fixed panel (mean and standard error over seeds)", xlabel="episodes played", ylim=(0, 1.02))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.legend(loc="lower right")
        for column, (title, by_algorithm) in enumerate(bars.items()):
            axis = figure.add_subplot(layout[1, column])
            means, errors = zip(*by_algorithm.values(), strict=True)
            drawn = axis.barh(
                range(len(means)),
                means,
                xerr=np.nan_to_num(errors),
                color=[ALGORITHM_COLOURS.get(name, INK) for name in by_algorithm],
                height=0.62,
                ecolor=INK,
            )
            axis.bar_label(drawn, [f"{mean:,.3g}" if mean < 1000 else f"{mean:,.0f}" for mean in means], padding=5, fontsize=9)
            axis.set_yticks(range(len(means)), list(by_algorithm))
            axis.tick_params(axis="y", labelcolor=INK, length=0)
            axis.invert_yaxis()
            axis.grid(axis="y", visible=False)
            axis.set_title(title, fontsize=10)
            axis.set_xlim(0, max(means) * 1.25 or 1)
        _write(figure, path)


def mean_curve(seeds: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, mean and standard error (0 for one seed) at the points that every seed has."""
    shared = sorted(set.intersection(*({float(value) for value in x} for x, _ in seeds)))
    rows = np.array([[dict(zip(x.tolist(), y.tolist(), strict=True))[value] for value in shared] for x, y in seeds]).reshape(len(seeds), -1)
    error = rows.std(axis=0, ddof=1) / np.sqrt(len(seeds)) if len(seeds) > 1 else np.zeros(len(shared))
    return np.array(shared), rows.mean(axis=0), error


_EVAL_TOTALS = ("eval/success", "eval/success_se", "eval/score", "eval/score_se", "eval/return", "eval/turns", "eval/episodes")


def _phases(records: Records) -> dict[str, np.ndarray]:
    """Seconds of every iteration by phase; together they are time/total."""
    timed = [record for record in records if record.get("time/total") is not None]

    def column(name: str) -> np.ndarray:
        return np.array([record.get(f"time/{name}") or 0.0 for record in timed])

    phases = {
        "generation": column("rollout") - column("env"),
        "environments": column("env"),
        "values and old log-probs": column("evaluate_policy"),
        "reference": column("reference"),
        "update": column("update"),
        "gradient diagnosis": column("diagnosis"),
        "evaluation panel": column("eval"),
    }
    phases["other"] = np.clip(column("total") - sum(phases.values()), 0, None)
    return {name: seconds for name, seconds in phases.items() if seconds.any()}


def _type_bars(axis: Any, records: Records, types: Sequence[str]) -> None:
    last = {name: series(records, name)[1] for name in types}
    order = sorted((name for name in types if len(last[name])), key=lambda name: last[name][-1])
    places = np.arange(len(order))
    axis.barh(places, [last[name][-1] for name in order], height=0.6, color=BLUE, alpha=0.85, label="last evaluation")
    axis.plot([last[name][0] for name in order], places, "|", color=INK, markersize=14, markeredgewidth=2, label="first evaluation")
    axis.set_yticks(places, [name.removeprefix("eval/").replace("_", " ") for name in order])
    axis.tick_params(axis="y", labelcolor=INK, length=0)
    axis.set(title="By task type", xlim=(0, 1.04), ylim=(-0.6, len(order) - 0.4))
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.grid(axis="y", visible=False)
    _legend_below(axis)


def _line(
    axis: Any, records: Records, name: str, label: str | None, colour: str, *, smooth: bool = False, marker: str | None = None
) -> bool:
    x, y = series(records, name)
    if not len(y):
        return False
    if smooth:
        axis.plot(x, y, color=colour, linewidth=0.8, alpha=0.35)
        y = _smooth(y)
    axis.plot(x, y, color=colour, label=label, marker=marker or ("o" if len(y) == 1 else None), markersize=3.5)
    axis.xaxis.set_major_locator(_whole())
    return True


def _smooth(y: np.ndarray, width: int = 5) -> np.ndarray:
    """Centred mean of ``width`` values, of those there are at the ends."""
    place = np.arange(len(y))
    first, end = np.maximum(place - width // 2, 0), np.minimum(place + width // 2 + 1, len(y))
    total = np.cumsum(np.insert(y, 0, 0.0))
    return (total[end] - total[first]) / (end - first)


def _whole() -> MaxNLocator:
    return MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10])


def _legend_below(axis: Any) -> None:
    """Under the axis, where it hides no data."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)


def _log_scale(axis: Any) -> None:
    """Logarithmic where there is anything positive to show; exact zeros are left out of such a line."""
    if any((np.asarray(line.get_ydata(), dtype=float) > 0).any() for line in axis.get_lines()):
        axis.set_yscale("log")


def _grid(count: int) -> tuple[Any, list[Any]]:
    rows = -(-count // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(13, 3.4 * rows), squeeze=False)
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.remove()
    return figure, flat


def _empty(axis: Any, title: str, text: str) -> None:
    axis.set(title=title, xticks=[], yticks=[])
    axis.grid(visible=False)
    axis.text(0.5, 0.5, text, ha="center", va="center", color=FAINT, transform=axis.transAxes)


def _write(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
