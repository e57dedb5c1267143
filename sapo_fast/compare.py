"""Several algorithms and seeds under one configuration: each run a process of ``sapo-fast train``, then one table and one figure."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from sapo_fast import checkpoint, run_folder
from sapo_fast.config import Config, load_config, to_yaml
from sapo_fast.trackers import read_jsonl

log = logging.getLogger("sapo_fast")
_POLL_SECONDS = 1.0
_SAVE_SECONDS = 120.0  # what an interrupted run may take to save its checkpoint


@dataclass
class _Run:
    config: Config
    process: subprocess.Popen | None = None

    @property
    def folder(self) -> Path:
        return self.config.run_dir()

    def iterations_done(self) -> int:
        """Iterations logged so far: the progress bar's unit."""
        last = max((record["iteration"] for record in read_jsonl(self.folder / "metrics.jsonl")), default=-1)
        return min(last + 1, self.config.iterations)

    def finished(self) -> bool:
        """The last checkpoint is of the last iteration and the final evaluation is in the log."""
        where = checkpoint.latest(self.folder / "checkpoints")
        if where is None or checkpoint.iteration_of(where) < self.config.iterations:
            return False
        return any(r["iteration"] >= self.config.iterations and "eval/success" in r for r in read_jsonl(self.folder / "metrics.jsonl"))


def compare(
    config_path: str | None,
    overrides: Sequence[str],
    *,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out_dir: Path,
    jobs: int = 1,
    threads: int = 0,
) -> int:
    """Train every (algorithm, seed), skipping finished runs and going on with begun ones; write the report into ``out_dir``.

    Everything but the algorithm and the seed is equal: the same file, the same overrides, equal episodes. Returns 0, or 1 if a run failed
    (the others are finished and reported all the same). ValueError before any work for a bad configuration of any of the runs.
    """
    if jobs < 1 or threads < 0:
        raise ValueError(f"--jobs must be >= 1 and --threads >= 0, got {jobs} and {threads}")
    for name, given in (("--algorithms", list(algorithms)), ("--seeds", list(seeds))):
        if not given or len(set(given)) < len(given):
            raise ValueError(f"{name} must be different values, got {given}")
    for override in overrides:
        if override.partition("=")[0].strip() in ("algorithm", "seed", "output_dir", "threads"):
            raise ValueError(
                f"compare sets {override.partition('=')[0]} itself, got {override!r}; use --algorithms, --seeds, --out, --threads"
            )
    threads = threads or max(1, (os.cpu_count() or 1) // jobs)
    runs = []
    for seed in seeds:  # seed by seed, so that an interrupted comparison has every algorithm
        for algorithm in algorithms:
            own = [f"algorithm={algorithm}", f"seed={seed}", f"output_dir={out_dir / f'{algorithm}-{seed}'}", f"threads={threads}"]
            runs.append(_Run(load_config(config_path, [*overrides, *own])))
    for run in runs:
        run_folder.check(run.config, "auto")
    waiting = []
    for run in runs:
        if run.finished():
            log.info("%s is finished already", run.folder)
        else:
            waiting.append(run)
    if waiting and waiting[0].config.model.path == "tiny":
        _make_warm_start(waiting[0].config)
    failed = _run_all(waiting, jobs)
    for run in failed:
        log.error(
            "%s failed; its output is in %s. Its last lines:\n%s",
            run.folder.name,
            run.folder / "train.log",
            _tail(run.folder / "train.log"),
        )
    from sapo_fast.report import compare_report

    whole = [run.folder for run in runs if run not in failed]
    if whole:
        table = compare_report(whole, out_dir)
        print(table.read_text(encoding="utf-8"))
        print(f"this table: {table}, figure: {out_dir / 'comparison.png'}")
    return 1 if failed else 0


def _make_warm_start(config: Config) -> None:
    """All runs share one cached warm start; made here, once, instead of by each of those that start together."""
    from sapo_fast.envs import make_suite
    from sapo_fast.setup_run import build_policy

    build_policy(config, make_suite(config.env.name, config.env.options))


def _run_all(waiting: list[_Run], jobs: int) -> list[_Run]:
    """Run them, ``jobs`` at a time; returns those that failed. Ctrl-C ends them politely (each saves a checkpoint) before it goes on up."""
    queue, active, failed = list(waiting), [], []
    total = sum(run.config.iterations for run in waiting)
    bar = tqdm(total=total, initial=sum(run.iterations_done() for run in waiting), desc="compare", unit="it", disable=not waiting)
    try:
        while queue or active:
            while queue and len(active) < jobs:
                active.append(_start(queue.pop(0)))
            time.sleep(_POLL_SECONDS)
            for run in [run for run in active if run.process.poll() is not None]:
                active.remove(run)
                if run.process.returncode:
                    failed.append(run)
            bar.set_postfix_str(", ".join(run.folder.name for run in active))
            bar.n = sum(run.iterations_done() for run in waiting)
            bar.refresh()
    finally:
        _end(active)
        bar.close()
    return failed


def _end(active: list[_Run]) -> None:
    """Let the runs save their checkpoints; kill those that take too long, and all of them at a second Ctrl-C."""
    for run in active:
        run.process.terminate()
    try:
        for run in active:
            run.process.wait(_SAVE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for run in active:
            run.process.kill()


def _start(run: _Run) -> _Run:
    run.folder.mkdir(parents=True, exist_ok=True)
    settings = run.folder / "compare.yaml"
    settings.write_text(to_yaml(run.config), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": str(run.config.threads)}
    with open(run.folder / "train.log", "ab") as output:
        run.process = subprocess.Popen(
            [sys.executable, "-m", "sapo_fast.cli", "train", "--config", str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone, which ends its children in order
        )
    return run


def _tail(path: Path, lines: int = 8) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return "\n".join(text.replace("\r", "\n").splitlines()[-lines:])
