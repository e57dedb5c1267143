"""The training loop: collect, evaluate the policy that played, make targets, update, log, save. Read ``Trainer.train`` first.

Everything random in iteration i derives from (seed, i) alone, so a resumed run needs no replay: weights, optimizer state and the iteration number are
the whole state.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from sapo_fast import checkpoint
from sapo_fast.algorithms import ALGORITHMS, Algorithm, OldPolicy, Targets, monte_carlo_returns, value_returns
from sapo_fast.batch import RolloutBatch, build_rows
from sapo_fast.config import Config
from sapo_fast.envs import make_suite
from sapo_fast.evaluate import PANEL_SEED, Panel
from sapo_fast.learner import Learner
from sapo_fast.mismatch import engine_old_policy, mismatch_metrics, token_weights
from sapo_fast.models.load import Policy
from sapo_fast.panels import panel_digest, suite_report, write_panel
from sapo_fast.records import Trajectory
from sapo_fast.rollout.collector import CollectorStats
from sapo_fast.setup_run import build_policy, check_engine, make_engine, make_runner, prompt_builder, tasks_of
from sapo_fast.trackers import Tracker

log = logging.getLogger("sapo_fast")


class Trainer:
    """One run: builds everything from a config, then ``train()``."""

    def __init__(self, config: Config, *, progress: bool = True) -> None:
        self.config, self.progress = config, progress
        check_engine(config)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.run_dir = Path(config.run_dir())
        self.algorithm = ALGORITHMS[config.algorithm]
        self.suite = make_suite(config.env.name, config.env.options)
        self.tasks, panel_tasks = tasks_of(config, self.suite)
        self.policy: Policy = build_policy(config, self.suite, progress=progress)
        checkpoint.seed_all(config.seed)  # after the policy: a warm start made now or found in the cache must not matter
        self.learner = Learner(config, self.algorithm, self.policy)
        builder = prompt_builder(config, self.suite, self.policy.tokenizer)
        self.engine = make_engine(config, self.policy)
        read_q = config.rollout.old_policy == "engine" and self.algorithm.readout
        self.runner = make_runner(config, self.suite, self.engine, builder, temperature=config.rollout.temperature, read_q=read_q)
        panel_runner = make_runner(config, self.suite, self.engine, builder, temperature=config.eval.temperature)
        self.panel = Panel(panel_runner, panel_tasks)
        self.iteration = 0  # iterations completed
        self._saved: int | None = None  # the iterations that the newest checkpoint of this run holds
        self._updating = False  # the weights are on their way from one iteration to the next
        self.seconds: dict[str, float] = {}

    # ---- the loop -------------------------------------------------------------------------------------------------------------------

    def train(self, resume: str = "auto") -> dict[str, float]:
        """Run to ``config.iterations``. Returns the last evaluation.

        Ctrl-C (or SIGTERM) leaves a checkpoint and raises KeyboardInterrupt. So does any other error, unless an update was under way or the
        weights are not finite: then their state is kept apart, under ``failed``, and the run goes on from the last checkpoint.
        """
        config = self.config
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._resume(resume)
        self.tracker = Tracker(
            self.run_dir, resume_at=self.iteration, tensorboard=config.log.tensorboard, wandb=config.log.wandb, config=config
        )
        bar = tqdm(total=config.iterations, initial=self.iteration, desc=config.algorithm, unit="it", disable=not self.progress)
        shown: dict[str, float] = {}
        try:
            while self.iteration < config.iterations:
                iteration, began, self.seconds = self.iteration, time.perf_counter(), {}
                metrics = self.evaluate_panel() if self._evaluation_due(iteration) else {}
                trajectories = self.collect(iteration)
                with finish_before_interrupt():
                    metrics |= self.learn(trajectories, iteration)
                    metrics |= {f"time/{phase}": s for phase, s in self.seconds.items()}
                    metrics["time/total"] = time.perf_counter() - began
                    self.tracker.log(iteration, metrics)
                    self.iteration += 1
                    self._updating = False
                    if config.checkpoint.every and self.iteration % config.checkpoint.every == 0:
                        self.save()
                shown |= {"success": f"{metrics['train/success']:.2f}"}
                shown |= {"panel": f"{metrics['eval/success']:.2f}"} if "eval/success" in metrics else {}
                bar.set_postfix(shown, refresh=False)
                bar.update()
            final = self.evaluate_panel()
            self.tracker.log(config.iterations, final)
            self.save()
            self.export(self.run_dir / "model")
        except KeyboardInterrupt:
            log.warning("interrupted: saving a checkpoint of the %d iterations completed", self.iteration)
            self.save()
            raise
        except Exception as error:
            self._save_failed(error)
            raise
        finally:
            bar.close()
            self.tracker.close()
        return final

    def collect(self, iteration: int) -> list[Trajectory]:
        """Play this iteration's episodes with the current policy."""
        per_task = self.algorithm.episodes_per_task(self.config)
        rng = np.random.default_rng([self.config.seed, iteration])
        count = self.config.episodes_per_iteration // per_task
        chosen = rng.choice(len(self.tasks), size=count, replace=count > len(self.tasks))
        seeds = rng.integers(0, 2**31, size=count * per_task)
        jobs = [(self.tasks[int(chosen[i // per_task])], int(seeds[i]), i // per_task) for i in range(count * per_task)]
        with self.phase("rollout"):
            trajectories = self.runner.run(jobs)
        self.seconds["env"] = self.runner.stats.env_seconds
        return trajectories

    def learn(self, trajectories: list[Trajectory], iteration: int) -> dict[str, float]:
        """Targets from the policy that played, then the update."""
        config, learner = self.config, self.learner
        batch = build_rows(trajectories, bootstrap=config.advantage.bootstrap_truncated)
        metrics = rollout_metrics(batch) | self._engine_metrics()
        if not batch.num_turns:
            raise ValueError(
                f"iteration {iteration}: no episode took a single turn, the first because of {trajectories[0].error or trajectories[0].end}; "
                f"mend the environment {config.env.name!r}, or raise rollout.max_context_tokens"
            )
        if hasattr(self.engine, "rest"):
            self.engine.rest()
        if self._fits_readout(iteration):
            self._updating = True
            with self.phase("fit_readout"):
                metrics["value/fit_explained_variance"] = learner.fit_readout(batch)
        old = self._old_policy(batch, iteration)
        metrics |= self._mismatch(batch, old)
        reference = None
        if learner.needs_reference(iteration):
            with self.phase("reference"):
                reference = learner.reference_logprobs(batch)
        targets = self.algorithm.targets(batch, old, config)
        metrics |= value_metrics(batch, old, self.algorithm, config)
        every = config.log.term_grad_norms_every
        if every and iteration % every == 0:
            with self.phase("diagnosis"):
                norms = learner.term_grad_norms(batch, old, targets, reference, iteration)
            metrics |= {f"optim/grad_norm_{term}": norm for term, norm in norms.items()}
        with self.phase("update"):
            self._updating = True
            generator = torch.Generator().manual_seed(int(np.random.default_rng([config.seed, iteration, 1]).integers(2**62)))
            updated, log_ratios = learner.update(batch, old, targets, reference, iteration, generator)
        with self.phase("sync"):
            self.engine.weights_changed()
        metrics |= update_metrics(updated, log_ratios) | memory_metrics(learner)
        metrics["optim/lr"] = learner.optimizers["policy"].param_groups[0]["lr"]
        metrics["warming_up"] = float(learner.warming_up(iteration))
        metrics["episodes_total"] = float((iteration + 1) * len(trajectories))
        self._write_values(batch, old, targets, iteration)
        return metrics

    def _fits_readout(self, iteration: int) -> bool:
        return iteration == 0 and self.config.value_warmup.fit_readout and (self.algorithm.readout or self.algorithm.critic)

    def _old_policy(self, batch: RolloutBatch, iteration: int) -> OldPolicy:
        """The policy that played: by the trainer's own pass, or as the engine reported it (not where the value rows were refitted since)."""
        rollout, loss = self.config.rollout, self.config.loss
        if rollout.old_policy == "engine" and not self._fits_readout(iteration):
            reported = engine_old_policy(batch, values=self.algorithm.readout, r_max=loss.r_max, tau_v=loss.tau_v, readout=loss.readout)
            if reported is not None:
                return reported
        with self.phase("evaluate_policy"):
            return self.learner.evaluate(batch)

    def _mismatch(self, batch: RolloutBatch, old: OldPolicy) -> dict[str, float]:
        """Weigh the policy term for the engine's arithmetic, where that is asked for; how far it is from the trainer's."""
        rollout = self.config.rollout
        limits = {"cap": rollout.correction_cap, "turn_mask": rollout.turn_mask}
        if rollout.corrects():
            old.token_weights = token_weights(batch, old.logprobs, **limits)
        return mismatch_metrics(batch, old.logprobs, **limits)

    def evaluate_panel(self) -> dict[str, float]:
        """Success on the fixed panel under the current weights; sample episodes go to the run's folder."""
        with self.phase("eval"):
            metrics, trajectories = self.panel.run()
        header = {"suite": self.suite.name, **suite_report(self.suite), "iteration": self.iteration, "temperature": self.config.eval.temperature}
        write_panel(self.run_dir, panel_digest(self.suite, self.panel.tasks, PANEL_SEED), header, trajectories)
        if self.config.log.sample_episodes:
            self.tracker.episodes(self.iteration, [episode_record(t) for t in trajectories[: self.config.log.sample_episodes]])
        metrics["time/eval"] = self.seconds["eval"]
        return metrics

    def _evaluation_due(self, iteration: int) -> bool:
        every = self.config.eval.every
        return iteration == 0 or (every > 0 and iteration % every == 0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    # ---- state ----------------------------------------------------------------------------------------------------------------------

    def export(self, directory: Path) -> None:
        """The policy as a plain Hugging Face model whose generation config bans w+ and w-."""
        p, loss = self.policy, self.config.loss
        side = {"r_max": loss.r_max, "tau_v": loss.tau_v, "readout": loss.readout, "trained_readout": self.algorithm.readout}
        checkpoint.export_hf(p.model, p.tokenizer, p.value_token_ids, directory, side)

    def save(self) -> None:
        """Checkpoint of the iterations completed, atomic; once for each."""
        if self._saved != self.iteration:
            self._write_checkpoint(self.run_dir / "checkpoints")
            self._saved = self.iteration

    def _save_failed(self, error: Exception) -> None:
        """After an error: a checkpoint if the weights are those between two iterations, else their state aside, to look into."""
        try:
            if self._updating or not self.learner.finite():
                where = self._write_checkpoint(self.run_dir / "failed")
                log.error("%s in iteration %d: its unfinished state is in %s", type(error).__name__, self.iteration, where)
            else:
                log.error("%s: saving a checkpoint of the %d iterations completed", type(error).__name__, self.iteration)
                self.save()
        except (OSError, ValueError) as second:  # the first error is the one to tell
            log.error("the state could not be saved: %s", second)

    def _write_checkpoint(self, directory: Path) -> Path:
        learner = self.learner
        tensors = {"policy": checkpoint.unique_tensors(self.policy.model)}
        if learner.critic is not None:
            tensors["critic"] = checkpoint.unique_tensors(learner.critic)
        state: dict[str, object] = {"rng": checkpoint.rng_state(), "value_token_ids": list(self.policy.value_token_ids), "optimizers": {}}
        for name, optimizer in learner.optimizers.items():
            tensors[f"optimizer_{name}"], state["optimizers"][name] = checkpoint.optimizer_to_tensors(optimizer)
        return checkpoint.save(directory, self.iteration, tensors=tensors, state=state, keep=self.config.checkpoint.keep)

    def _resume(self, resume: str) -> None:
        if resume == "never":
            return
        where = checkpoint.latest(self.run_dir / "checkpoints") if resume == "auto" else Path(resume)
        if where is None:
            return
        found = checkpoint.load(where)
        tensors, state = found.tensors, found.state
        if list(self.policy.value_token_ids) != state["value_token_ids"]:
            raise ValueError(
                f"{where} was trained with value tokens {state['value_token_ids']}, this run has {list(self.policy.value_token_ids)}; "
                "set model.value_tokens to the checkpoint's, or another output_dir"
            )
        learner = self.learner
        checkpoint.copy_into(checkpoint.unique_tensors(self.policy.model), tensors["policy"])
        if learner.critic is not None:
            checkpoint.copy_into(checkpoint.unique_tensors(learner.critic), tensors["critic"])
        for name, optimizer in learner.optimizers.items():
            checkpoint.optimizer_from_tensors(optimizer, tensors[f"optimizer_{name}"], state["optimizers"][name])
        checkpoint.set_rng_state(state["rng"])
        self.iteration = found.iteration
        self._saved = found.iteration if resume == "auto" else None
        self.engine.weights_changed()
        log.info("resumed from %s after %d iterations", where, found.iteration)

    # ---- what is written down -------------------------------------------------------------------------------------------------------

    def _engine_metrics(self) -> dict[str, float]:
        stats = self.runner.stats
        metrics = {
            "rollout/prompt_tokens": float(stats.prompt_tokens),
            "rollout/reused_tokens": float(stats.reused_tokens),
            "rollout/generated_tokens": float(stats.generated_tokens),
        }
        if isinstance(stats, CollectorStats):
            metrics |= {"rollout/retries": float(stats.retries), "rollout/engine_restarts": float(stats.engine_restarts)}
        sync = getattr(self.engine, "last_sync", None)  # of the weights that played
        if sync is not None:
            metrics |= {"sync/canary_gap": sync.canary_gap, "sync/proof_seconds": sync.proof_seconds}
        return metrics

    def _write_values(self, batch: RolloutBatch, old: OldPolicy, targets: Targets, iteration: int) -> None:
        """Up to 500 turns' values against what came of them, for the report."""
        if old.v is None or self.algorithm.token_values:
            return
        returns = monte_carlo_returns(batch, self.config.advantage.gamma)
        pick = torch.linspace(0, batch.num_turns - 1, min(500, batch.num_turns)).long()
        q = old.q[pick].tolist() if old.q is not None else []
        self.tracker.values(iteration, v=old.v[pick].tolist(), q=q, returns=returns[pick].tolist())


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What the episodes were like."""
    trajectories = batch.trajectories
    n = len(trajectories)
    ends = [t.end for t in trajectories]
    return {
        "train/success": sum(t.won for t in trajectories) / n,
        "train/return": sum(t.total_reward for t in trajectories) / n,
        "train/turns": batch.num_turns / n,
        "train/tokens": float(batch.num_tokens),
        "train/row_tokens": float(sum(len(r.ids) for r in batch.rows)),
        "rollout/invalid_rate": batch.invalid.float().mean().item() if batch.num_turns else 0.0,
        "rollout/truncated_rate": ends.count("truncated") / n,
        "rollout/crashed": float(ends.count("crashed")),
        "rollout/overlong": float(ends.count("overlong")),
        "rollout/cut_responses": float(sum(turn.finish_reason == "length" for t in trajectories for turn in t.turns)),
    }


def value_metrics(batch: RolloutBatch, old: OldPolicy, algorithm: Algorithm, config: Config) -> dict[str, float]:
    """How well the values that played foretold the returns, and how far the engine's log-probs are from the trainer's own."""
    metrics = {"rollout/logprob_gap_max": (batch.rollout_logprobs - old.logprobs).abs().max().item()}
    if old.v is None:
        return metrics
    returns, v = value_returns(batch, algorithm, config), old.v
    metrics["value/explained_variance"] = explained_variance(v, returns)
    metrics["value/mean"] = v.mean().item()
    metrics["value/return_mean"] = returns.mean().item()
    metrics["value/saturated"] = (v.abs() >= config.loss.r_max).float().mean().item()
    if old.q is not None:
        metrics["value/q_explained_variance"] = explained_variance(old.q, returns)
    return metrics


def explained_variance(predicted: torch.Tensor, actual: torch.Tensor) -> float:
    """1 - Var(actual - predicted) / Var(actual); 0 where there is nothing to explain."""
    variance = actual.var(correction=0)
    return (1 - (actual - predicted).var(correction=0) / variance).item() if variance > 1e-12 else 0.0


def update_metrics(updated: dict[str, float], log_ratios: torch.Tensor) -> dict[str, float]:
    """The learner's numbers under the names of the log."""
    names = {
        "policy_loss": "loss/policy",
        "v_loss": "loss/v",
        "q_loss": "loss/q",
        "kl": "loss/kl",
        "entropy": "policy/entropy",
        "clip_fraction": "policy/clip_fraction",
        "dual_clip_fraction": "policy/dual_clip_fraction",
        "approx_kl": "policy/approx_kl",
        "v_clip_fraction": "value/clip_fraction",
        "q_clip_fraction": "value/q_clip_fraction",
        "grad_norm": "optim/grad_norm",
        "critic_grad_norm": "optim/critic_grad_norm",
        "skipped_steps": "optim/skipped_steps",
        "first_log_ratio_max": "policy/first_log_ratio_max",
    }
    metrics = {names[key]: value for key, value in updated.items() if key in names}
    if log_ratios.numel():
        size = log_ratios.abs().float()
        for label, quantile in (("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
            # kthvalue, not quantile: torch's quantile refuses more than 16M elements.
            metrics[f"policy/log_ratio_{label}"] = size.kthvalue(max(1, round(quantile * size.numel()))).values.item()
        metrics["policy/log_ratio_max"] = size.max().item()
    return metrics


def memory_metrics(learner: Learner) -> dict[str, float]:
    """Peak memory so far (the GPU's where there is one, else the process's), and what parameters and optimizer hold."""
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _peak_rss_bytes()
    return {"memory/peak_mb": peak / 2**20, "memory/param_optimizer_mb": learner.state_bytes() / 2**20}


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def episode_record(trajectory: Trajectory) -> dict[str, object]:
    """An episode as text, for people."""
    turns = [
        {"observation": t.observation, "response": t.response, "command": t.command, "reward": t.reward, "invalid": t.invalid}
        for t in trajectory.turns
    ]
    return {"task_id": trajectory.task_id, "won": trajectory.won, "end": trajectory.end, "return": trajectory.total_reward, "turns": turns}


@contextlib.contextmanager
def finish_before_interrupt() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block is done, then raise KeyboardInterrupt: an update is never left half done."""
    pending: list[int] = []
    try:
        previous = {s: signal.signal(s, lambda number, frame: pending.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals do not arrive here
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if pending:
        raise KeyboardInterrupt
