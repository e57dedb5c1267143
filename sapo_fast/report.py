"""``report``: one run as PNGs and one self-contained HTML page. ``compare_report``: several runs as one table and one figure.

Everything is read from the run's folder (config.yaml, metrics.jsonl, values.jsonl, episodes.jsonl); a run that goes on is drawn so far.
"""

from __future__ import annotations

import base64
import csv
import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapo_fast.config import Config, to_yaml
from sapo_fast.run_folder import load_run_config
from sapo_fast.trackers import episode_outcome, read_jsonl

COLUMNS = (
    ("algorithm", "algorithm"),
    ("seeds", "seeds"),
    ("iterations", "iterations"),
    ("episodes", "episodes"),
    ("success_start", "success before"),
    ("success", "success after"),
    ("success_se", "+-"),
    ("success_mean", "mean over training"),
    ("seconds_per_iteration", "s / iteration"),
    ("seconds_per_iteration_se", "+-"),
    ("peak_mb", "peak MB"),
    ("param_optimizer_mb", "parameters + optimizer MB"),
)


def report(run_dir: str | Path) -> Path:
    """Draw ``run_dir`` into ``run_dir/report/``; returns the HTML page's path. ValueError if it holds no run, or one without numbers."""
    from sapo_fast import report_figures as figures  # matplotlib

    run_dir = Path(run_dir)
    config, records = _load(run_dir)
    samples = list(read_jsonl(run_dir / "values.jsonl"))
    out = run_dir / "report"
    warmup = config.value_warmup.iterations if config.algorithm != "grpo" else 0
    drawn = {"learning_curve.png": "Success"}
    played = _numbers(records, "eval/episodes")  # a suite may have fewer evaluation tasks than eval.episodes
    figures.learning_curve(
        out / "learning_curve.png",
        records,
        episodes=config.episodes_per_iteration,
        warmup=warmup,
        panel=int(played[-1]) if played else config.eval.episodes,
    )
    if any(record.get("time/total") is not None for record in records):
        figures.time_split(out / "time.png", records)
        figures.losses(out / "losses.png", records)
        figures.health(out / "health.png", records)
        drawn |= {"time.png": "Time", "losses.png": "Losses and gradients", "health.png": "Health of the run"}
    if samples:
        figures.values(out / "values.png", records, samples)
        drawn |= {"values.png": "Values and returns"}
    page = out / "report.html"
    page.write_text(_page(run_dir, config, records, out, drawn), encoding="utf-8")
    return page


def compare_report(run_dirs: Sequence[str | Path], out_dir: str | Path) -> Path:
    """Write ``comparison.csv``, ``.md`` and ``.png`` over these runs into ``out_dir``; returns the path of the table (.md).

    Runs are grouped by algorithm; means and standard errors are over a group's seeds. Costs leave the evaluation panel out.
    """
    from sapo_fast import report_figures as figures  # matplotlib

    out_dir = Path(out_dir)
    groups: dict[str, list[tuple[Config, list[dict[str, Any]]]]] = defaultdict(list)
    for run_dir in run_dirs:
        config, records = _load(Path(run_dir))
        if not any(record.get("eval/success") is not None for record in records):
            raise ValueError(f"{run_dir} has no evaluation yet; let it run, or leave it out")
        groups[config.algorithm].append((config, records))
    if not groups:
        raise ValueError("a comparison needs at least one run, got none")
    out_dir.mkdir(parents=True, exist_ok=True)
    rows, curves = [], {}
    for algorithm, runs in groups.items():
        curves[algorithm] = []
        for config, records in runs:
            x, y = figures.series(records, "eval/success")
            curves[algorithm].append((x * config.episodes_per_iteration, y))
        rows.append(_row(algorithm, runs))
    with open(out_dir / "comparison.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [name for name, _ in COLUMNS])
        writer.writeheader()
        writer.writerows(rows)
    bars = {
        title: {row["algorithm"]: (row[name], row.get(f"{name}_se") or 0.0) for row in rows if row[name] is not None}
        for name, title in (
            ("seconds_per_iteration", "seconds an iteration"),
            ("peak_mb", "peak memory, MB"),
            ("param_optimizer_mb", "parameters + optimizer, MB"),
        )
    }
    figures.comparison(out_dir / "comparison.png", curves, {title: by for title, by in bars.items() if by})
    table = out_dir / "comparison.md"
    table.write_text(_comparison_text(rows, groups), encoding="utf-8")
    return table


def _load(run_dir: Path) -> tuple[Config, list[dict[str, Any]]]:
    config = load_run_config(run_dir)
    records = list(read_jsonl(run_dir / "metrics.jsonl"))
    if not records:
        raise ValueError(f"{run_dir} has no metrics yet: metrics.jsonl is missing or empty; let it finish an iteration")
    return config, records


def _numbers(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if record.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _standard_error(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _seconds(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean seconds of an iteration without the evaluation panel."""
    return _mean([record["time/total"] - (record.get("time/eval") or 0.0) for record in records if record.get("time/total") is not None])


def _row(algorithm: str, runs: Sequence[tuple[Config, list[dict[str, Any]]]]) -> dict[str, Any]:
    """One line of the comparison: means over the seeds; None where a run did not measure it."""
    success = [_numbers(records, "eval/success") for _, records in runs]
    seconds = [value for _, records in runs if (value := _seconds(records)) is not None]
    trained = [len(_numbers(records, "time/total")) for _, records in runs]
    peaks = [max(peak) for _, records in runs if (peak := _numbers(records, "memory/peak_mb"))]
    held = [max(size) for _, records in runs if (size := _numbers(records, "memory/param_optimizer_mb"))]
    return {
        "algorithm": algorithm,
        "seeds": len(runs),
        "iterations": min(trained),
        "episodes": min(count * config.episodes_per_iteration for count, (config, _) in zip(trained, runs, strict=True)),
        "success_start": _mean([values[0] for values in success]),
        "success": _mean([values[-1] for values in success]),
        "success_se": _standard_error([values[-1] for values in success]),
        "success_mean": _mean([float(np.mean(values)) for values in success]),
        "seconds_per_iteration": _mean(seconds),
        "seconds_per_iteration_se": _standard_error(seconds),
        "peak_mb": _mean(peaks),
        "param_optimizer_mb": _mean(held),
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}" if isinstance(value, float) else str(value)


def _comparison_text(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[tuple[Config, list[dict[str, Any]]]]]) -> str:
    lines = ["# Comparison", "", "| " + " | ".join(title for _, title in COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(_cell(row[name]) for name, _ in COLUMNS) + " |" for row in rows]
    lines += [
        "",
        "Success: share of the fixed evaluation panel that was won, mean over seeds; +-: standard error over seeds (-: one seed).",
        "Costs are means over iterations without the evaluation panel.",
        "",
        "![comparison](comparison.png)",
        "",
        "Success after training, seed by seed:",
        "",
    ]
    for algorithm, runs in groups.items():
        for config, records in sorted(runs, key=lambda run: run[0].seed):
            done = len(_numbers(records, "time/total"))
            note = "" if done >= config.iterations else f" (unfinished: {done} of {config.iterations} iterations)"
            lines.append(f"- {algorithm}, seed {config.seed}: {_numbers(records, 'eval/success')[-1]:.3f}{note}")
    return "\n".join(lines) + "\n"


_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem }
h2 { font-size: 1.15rem; margin-top: 2.2rem }
img { max-width: 100% }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0 }
.card { border: 1px solid #e4e7eb; border-radius: 8px; padding: .6rem 1rem }
.card b { display: block; font-size: 1.35rem }
.card span, .note { color: #7b8794; font-size: .85rem }
table { border-collapse: collapse; font-size: .85rem; width: 100% }
td, th { border-bottom: 1px solid #e4e7eb; padding: .25rem .6rem; text-align: left; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.bad { color: #d1345b }
pre { background: #f5f7fa; border-radius: 8px; padding: 1rem; overflow: auto; font-size: .8rem }
summary { cursor: pointer; padding: .3rem 0 }
.numbers { columns: 2 }
@media (max-width: 700px) { .numbers { columns: 1 } }
"""


def _page(run_dir: Path, config: Config, records: Sequence[Mapping[str, Any]], out: Path, drawn: Mapping[str, str]) -> str:
    panels = sorted(path.stem.removeprefix("panel-") for path in run_dir.glob("panel-*.json"))
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(run_dir.name)}</title><style>{_CSS}</style>",
        f"<h1>{html.escape(run_dir.name)}</h1><div class='note'>{_sentence(config, records, panels)}</div>",
        "<div class='cards'>"
        + "".join(f"<div class='card'><b>{value}</b><span>{label}</span></div>" for label, value in _cards(records))
        + "</div>",
    ]
    broken = sorted({name for record in records for name in record.get("non_finite", ())})
    if broken:
        parts.append(f"<p class='bad'>Not finite at some iteration (left out of the plots): {html.escape(', '.join(broken))}</p>")
    for name, title in drawn.items():
        image = base64.b64encode((out / name).read_bytes()).decode()
        parts.append(f"<h2>{title}</h2><img alt='{title}' src='data:image/png;base64,{image}'>")
    parts.append("<h2>Last value of every number</h2><div class='numbers'><table>" + _last_numbers(records) + "</table></div>")
    episodes = list(read_jsonl(run_dir / "episodes.jsonl"))
    if episodes:
        parts.append("<h2>Sample episodes</h2>" + "".join(map(_episode, reversed(episodes))))
    parts.append(f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{html.escape(to_yaml(config))}</pre></details></html>")
    return "\n".join(parts)


def _sentence(config: Config, records: Sequence[Mapping[str, Any]], panels: Sequence[str]) -> str:
    done = len(_numbers(records, "time/total"))
    return html.escape(
        f"{config.algorithm} on {config.env.name} with {config.model.path}, seed {config.seed}: {done} of {config.iterations} iterations, "
        f"{done * config.episodes_per_iteration:,} episodes" + "".join(f"; evaluation panel {digest}" for digest in panels)
    )


def _cards(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    cards = []
    success, error = _numbers(records, "eval/success"), _numbers(records, "eval/success_se")
    if success:
        cards.append(("success on the panel before", f"{success[0]:.1%}"))
        cards.append(("success after (standard error)", f"{success[-1]:.1%} &plusmn; {error[-1]:.1%}" if error else f"{success[-1]:.1%}"))
    seconds = _seconds(records)
    if seconds is not None:
        cards.append(("an iteration, without the panel", f"{seconds:.3g} s"))
        cards.append(("whole time", _duration(sum(_numbers(records, "time/total")))))
    for name, label in (("memory/peak_mb", "peak memory"), ("memory/param_optimizer_mb", "parameters and optimizer")):
        if values := _numbers(records, name):
            cards.append((label, f"{max(values):,.3g} MB" if max(values) < 1000 else f"{max(values):,.0f} MB"))
    return cards


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _last_numbers(records: Sequence[Mapping[str, Any]]) -> str:
    last: dict[str, tuple[int, float | None]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("iteration", "non_finite"):
                last[name] = (record["iteration"], value)
    rows = []
    for name, (iteration, value) in sorted(last.items()):
        shown = "<span class='bad'>not finite</span>" if value is None else f"{value:,.5g}"
        rows.append(f"<tr><td>{html.escape(name)}<td class='n'>{shown}<td class='n note'>at {iteration}")
    return "".join(rows)


def _episode(record: Mapping[str, Any]) -> str:
    rows = []
    for number, turn in enumerate(record["turns"], start=1):
        texts = "".join(f"<td>{html.escape(turn[name]).replace(chr(10), '<br>')}" for name in ("observation", "response"))
        command = "<span class='bad'>invalid</span>" if turn["invalid"] else html.escape(turn["command"])
        rows.append(f"<tr><td class='n'>{number}{texts}<td>{command}<td class='n'>{turn['reward']:g}")
    title = html.escape(f"Iteration {record['iteration']}, {record['task_id']}: {episode_outcome(record)}")
    head = "<tr><th class='n'>turn<th>observation<th>response<th>command<th class='n'>reward"
    return f"<details><summary>{title}</summary><table>{head}{''.join(rows)}</table></details>"
