"""Where a run's numbers go: metrics.jsonl always, TensorBoard and Weights & Biases when asked for.

``metrics.jsonl`` holds one JSON object an iteration, written whole and at once, so that a killed run leaves at most one broken last line
(readers here skip it). A number that is not finite is written as null and named in ``non_finite``: JSON has no NaN, and a NaN must be seen.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sapo_fast.config import Config


class Tracker:
    """The sinks of one run.

    ``resume_at``: the iteration where the run goes on; what an earlier process logged from there on is dropped, so that none is told twice.
    ``config``: kept in config.yaml and told to wandb. ValueError if ``tensorboard`` or ``wandb`` is asked for and not installed.
    """

    def __init__(
        self, run_dir: str | Path, *, resume_at: int = 0, tensorboard: bool = False, wandb: bool = False, config: Config | None = None
    ) -> None:
        check_installed(tensorboard=tensorboard, wandb=wandb)
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "values.jsonl", "episodes.jsonl"):
            _drop_from(self.run_dir / name, resume_at)
        self._write_episodes_page()
        if config is not None:
            from sapo_fast.config import to_yaml

            _replace(self.run_dir / "config.yaml", to_yaml(config))
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=resume_at)
        self._wandb = None
        if wandb:
            self._wandb = _start_wandb(self.run_dir, config)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """One iteration's numbers, by name ('loss/policy'). Call it once an iteration."""
        numbers = {name: float(value) for name, value in metrics.items()}
        record: dict[str, Any] = {"iteration": iteration, **{name: _finite(value) for name, value in numbers.items()}}
        bad = sorted(name for name, value in numbers.items() if record[name] is None)
        if bad:
            record["non_finite"] = bad
        _append(self.run_dir / "metrics.jsonl", record)
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, iteration)
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(numbers, step=iteration)

    def values(self, iteration: int, *, v: Sequence[float], q: Sequence[float], returns: Sequence[float]) -> None:
        """A sample of predicted values and the discounted returns that followed, reward units; same lengths, or empty. Not finite: null."""
        sample = {"v": v, "q": q, "returns": returns}
        record = {name: [_finite(value) for value in numbers] for name, numbers in sample.items()}
        _append(self.run_dir / "values.jsonl", {"iteration": iteration, **record})

    def episodes(self, iteration: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Episodes in words, kept in episodes.jsonl; episodes.md is the same for people.

        A record: ``task_id``, ``won``, ``end``, ``return`` (reward units) and ``turns``, a list of mappings with ``observation``,
        ``response``, ``command``, ``reward`` and ``invalid``.
        """
        for record in records:
            _append(self.run_dir / "episodes.jsonl", {"iteration": iteration, **record})
        self._write_episodes_page()

    def close(self) -> None:
        """Flush and close every sink."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_episodes_page(self) -> None:
        records = list(read_jsonl(self.run_dir / "episodes.jsonl"))
        page = self.run_dir / "episodes.md"
        if records:
            _replace(page, "# Sample episodes\n\n" + "\n".join(map(episode_text, reversed(records))))
        else:
            page.unlink(missing_ok=True)


def check_installed(*, tensorboard: bool, wandb: bool) -> None:
    """ValueError if a sink is wanted whose package is missing."""
    for module, wanted, install in (("tensorboard", tensorboard, "'sapo_fast[train]'"), ("wandb", wandb, "wandb")):
        if wanted and importlib.util.find_spec(module) is None:
            raise ValueError(f"log.{module}=true needs the package {module}; pip install {install}, or set log.{module}=false")


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a file written here; a line that a kill cut short is left out. A missing file has none."""
    if not Path(path).is_file():
        return
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def episode_text(record: Mapping[str, Any]) -> str:
    """One sample episode as Markdown: a heading and a table of turns."""
    lines = [
        f"## Iteration {record['iteration']}: {_cell(record['task_id'])}: {episode_outcome(record)}",
        "",
        "| turn | observation | response | command | reward |",
        "|---:|---|---|---|---:|",
    ]
    for number, turn in enumerate(record["turns"], start=1):
        command = "(invalid)" if turn["invalid"] else _cell(turn["command"])
        lines.append(f"| {number} | {_cell(turn['observation'])} | {_cell(turn['response'])} | {command} | {turn['reward']:g} |")
    return "\n".join(lines) + "\n"


def episode_outcome(record: Mapping[str, Any]) -> str:
    """'won in 7 turns, return 10'."""
    return f"{'won' if record['won'] else 'lost (' + record['end'] + ')'} in {len(record['turns'])} turns, return {record['return']:g}"


def _cell(text: str) -> str:
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\r", ""), ("\n", "<br>")):
        text = text.replace(plain, escaped)
    return text.strip()


def _finite(value: float) -> float | int | None:
    """The number as JSON can say it: a NaN must not end a run by way of its log."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(value)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    line = (json.dumps(record, allow_nan=False) + "\n").encode()
    with open(path, "ab") as stream:
        stream.write(line)  # one write of one buffer: a reader never sees half of it unless the machine dies
        stream.flush()


def _drop_from(path: Path, iteration: int) -> None:
    """Leave only whole records before ``iteration``."""
    if not path.is_file():
        return
    kept = [record for record in read_jsonl(path) if record["iteration"] < iteration]
    _replace(path, "".join(json.dumps(record) + "\n" for record in kept))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _start_wandb(run_dir: Path, config: Config | None) -> Any:
    import wandb

    name_file = run_dir / "wandb_id"
    run_id = name_file.read_text(encoding="utf-8").strip() if name_file.is_file() else wandb.util.generate_id()
    _replace(name_file, run_id)  # a resumed process goes on in the same wandb run
    return wandb.init(
        project="sapo_fast", name=run_dir.name, id=run_id, resume="allow", dir=str(run_dir), config=config.model_dump() if config else None
    )
