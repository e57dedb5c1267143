"""The learning half of an iteration: evaluate the policy that played, then update it.

Legend: B trajectories, T turns, N response tokens of the iteration; L packed tokens, n and m response tokens and value rows of a micro-batch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import torch

from sapo_fast.algorithms import Algorithm, OldPolicy, Targets, value_returns
from sapo_fast.batch import MicroBatch, RolloutBatch, micro_batches, minibatches
from sapo_fast.config import Config
from sapo_fast.logprobs import token_logprobs
from sapo_fast.loss import MAX_METRICS, LossConfig, LossOutput, fused_loss
from sapo_fast.models.load import Critic, Policy
from sapo_fast.readout_fit import ReadoutFit
from sapo_fast.value_tokens import read_values

log = logging.getLogger("sapo_fast")

MAX_SKIPPED_STEPS = 5  # non-finite gradients in a row before the run stops: it would not recover


class Diverged(RuntimeError):
    """The model's numbers are not finite any more: the run cannot go on from here."""


class Learner:
    """Policy, critic where there is one, frozen reference, optimizers."""

    def __init__(self, config: Config, algorithm: Algorithm, policy: Policy) -> None:
        self.config, self.algorithm, self.policy = config, algorithm, policy
        self.critic = Critic(policy) if algorithm.critic else None
        warms_up = algorithm.readout and config.value_warmup.iterations > 0 and config.value_warmup.kl_coef > 0
        self.reference = policy.frozen_copy() if config.loss.kl_coef > 0 or warms_up else None
        loss = config.loss.model_dump()
        self.loss_config = LossConfig(**loss, temperature=config.rollout.temperature)
        o = config.optim
        adamw = {"betas": o.betas, "weight_decay": o.weight_decay}
        self.optimizers = {"policy": torch.optim.AdamW(policy.parameters(), lr=o.lr, **adamw)}
        if self.critic is not None:
            self.optimizers["critic"] = torch.optim.AdamW(self.critic.parameters(), lr=o.critic_lr or o.lr, **adamw)
        self.skipped_in_a_row = 0

    # ---- evaluation of the policy that played ---------------------------------------------------------------------------------------

    def _micros(self, batch: RolloutBatch) -> Iterator[MicroBatch]:
        for micro in micro_batches(batch, range(len(batch.rows)), self.config.optim.micro_batch_tokens):
            yield micro.to(self.policy.device)

    def _score(self, policy: Policy, micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = policy.lm_head()
        logprobs, _ = token_logprobs(
            hidden=hidden,
            lm_head=weight,
            lm_head_bias=bias,
            value_token_ids=policy.value_token_ids,
            action_rows=micro.action_rows,
            actions=micro.actions,
            temperature=self.config.rollout.temperature,
            entropy=False,
        )
        return logprobs.cpu()

    def _read(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """V or Q in reward units at these rows, from whatever holds the values in this algorithm."""
        if self.critic is not None:
            head, bias, ids = self.critic.head, None, Critic.value_token_ids
        else:
            (head, bias), ids = self.policy.lm_head(), self.policy.value_token_ids
        loss = self.config.loss
        values = read_values(
            hidden=hidden,
            lm_head=head,
            lm_head_bias=bias,
            value_token_ids=ids,
            rows=rows,
            r_max=loss.r_max,
            tau_v=loss.tau_v,
            readout=loss.readout,
        )
        return values.cpu()

    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch) -> OldPolicy:
        """Old log-probs, V and Q in one pass over the rows (and one of the critic, where there is one). Diverged: one is not finite."""
        old = OldPolicy(logprobs=torch.zeros(batch.num_tokens))
        with_values = self.algorithm.readout or self.critic is not None
        if with_values:
            old.v = torch.zeros(batch.num_tokens if self.algorithm.token_values else batch.num_turns)
            old.q = torch.zeros(batch.num_turns) if self.algorithm.readout else None
            old.bootstrap = torch.zeros(len(batch.trajectories)) if not self.algorithm.token_values else None
        for micro in self._micros(batch):
            hidden = self.policy.hidden(micro)
            old.logprobs[micro.token_index.cpu()] = self._score(self.policy, micro, hidden)
            if not with_values:
                continue
            hidden = self.critic.hidden(micro) if self.critic is not None else hidden
            if self.algorithm.token_values:
                old.v[micro.token_index.cpu()] = self._read(hidden, micro.action_rows)
                continue
            old.v[micro.turn_index.cpu()] = self._read(hidden, micro.v_rows)
            old.bootstrap[micro.bootstrap_trajectory.cpu()] = self._read(hidden, micro.bootstrap_rows)
            if old.q is not None:
                old.q[micro.turn_index.cpu()] = self._read(hidden, micro.q_rows)
        self._check_finite(batch, old)
        return old

    def _check_finite(self, batch: RolloutBatch, old: OldPolicy) -> None:
        """Name the first turn whose numbers are not finite: an update on them would spoil every weight."""
        turn_of_token = batch.to_tokens(torch.arange(batch.num_turns))
        for name, numbers in (("log-probability", old.logprobs), ("V", old.v), ("Q", old.q)):
            if numbers is None or torch.isfinite(numbers).all():
                continue
            entry = int((~torch.isfinite(numbers)).nonzero()[0, 0])
            turn = int(turn_of_token[entry]) if len(numbers) == batch.num_tokens else entry
            b = int(torch.searchsorted(batch.cu_turns, turn, right=True)) - 1
            weights = "" if self.finite() else "; the weights themselves are not finite"
            raise Diverged(
                f"the model's {name} in turn {turn - int(batch.cu_turns[b])} of trajectory {b} (task {batch.trajectories[b].task_id!r}) is "
                f"{float(numbers[entry])}{weights}; go on from an earlier checkpoint with a lower optim.lr"
            )

    def finite(self) -> bool:
        """Is every weight finite?"""
        trained = self.policy.parameters() + (list(self.critic.parameters()) if self.critic is not None else [])
        return bool(torch.stack([torch.isfinite(p.detach()).all() for p in trained]).all())

    @torch.no_grad()
    def reference_logprobs(self, batch: RolloutBatch) -> torch.Tensor:
        """The frozen policy's log-probs of the sampled tokens [N]."""
        out = torch.zeros(batch.num_tokens)
        for micro in self._micros(batch):
            out[micro.token_index.cpu()] = self._score(self.reference, micro, self.reference.hidden(micro))
        return out

    @torch.no_grad()
    def fit_readout(self, batch: RolloutBatch) -> float:
        """Set the value rows by ridge regression on this batch's returns; the policy does not move. Returns the explained variance, held out."""
        loss, per_token = self.config.loss, self.algorithm.token_values
        returns = value_returns(batch, self.algorithm, self.config)
        head, bias = (self.critic.head, None) if self.critic is not None else self.policy.lm_head()
        plus, minus = Critic.value_token_ids if self.critic is not None else self.policy.value_token_ids
        fit = ReadoutFit(head.shape[1], head.device)
        owner = torch.arange(len(batch.trajectories)).repeat_interleave(batch.cu_turns.diff())
        owner = batch.to_tokens(owner) if per_token else owner
        for micro in self._micros(batch):
            hidden = (self.policy if self.critic is None else self.critic).hidden(micro)
            index = (micro.token_index if per_token else micro.turn_index).cpu()
            targets = (returns[index] / loss.r_max * loss.tau_v).to(head.device)
            both = [micro.v_rows, micro.q_rows] if self.algorithm.readout else [micro.action_rows if per_token else micro.v_rows]
            for rows in both:
                fit.add(hidden[rows], targets, owner[index].to(head.device))
        direction, explained = fit.solve(head[plus] - head[minus])
        middle = (head[plus] + head[minus]) / 2
        head[plus] = middle + (direction / 2).to(head.dtype)
        head[minus] = middle - (direction / 2).to(head.dtype)
        if bias is not None:
            bias[minus] = bias[plus]
        return explained

    # ---- update ---------------------------------------------------------------------------------------------------------------------

    def warming_up(self, iteration: int) -> bool:
        """Value-only iterations (method: What goes wrong 2)."""
        return (self.algorithm.readout or self.critic is not None) and iteration < self.config.value_warmup.iterations

    def iteration_loss_config(self, iteration: int) -> LossConfig:
        if not self.warming_up(iteration):
            return self.loss_config
        return dataclasses.replace(self.loss_config, entropy_coef=0.0, kl_coef=self.config.value_warmup.kl_coef)

    def effective_targets(self, targets: Targets, iteration: int) -> Targets:
        """While the value warms up, no action is better than another."""
        return _without_advantages(targets) if self.warming_up(iteration) else targets

    def needs_reference(self, iteration: int) -> bool:
        """Is the KL term in this iteration's loss? (While a separate critic warms up, the policy is not touched at all.)"""
        if self.warming_up(iteration) and self.critic is not None:
            return False
        return self.iteration_loss_config(iteration).kl_coef > 0

    def update(
        self,
        batch: RolloutBatch,
        old: OldPolicy,
        targets: Targets,
        reference: torch.Tensor | None,
        iteration: int,
        generator: torch.Generator,
    ) -> tuple[dict[str, float], torch.Tensor]:
        """All minibatches and epochs of one iteration.

        Returns:
            Metrics (means over the optimizer steps), and the log-ratios before clamping of every scored token, in order of scoring; those of
            the first step come from unchanged weights and are 0 up to rounding.
        """
        warming = self.warming_up(iteration)
        config = self.iteration_loss_config(iteration)
        self._set_learning_rates(iteration)
        targets = self.effective_targets(targets, iteration)
        steps: list[dict[str, float]] = []
        ratios: list[torch.Tensor] = []
        for _ in range(self.config.optim.epochs):
            for rows in minibatches(batch, self.config.optim.minibatch_turns, generator):
                step, ratio = self._step(batch, rows, old, targets, reference, config, critic_only=warming and self.critic is not None)
                step["first_log_ratio_max"] = ratio.abs().max().item() if not steps and ratio.numel() else 0.0
                steps.append(step)
                ratios.append(ratio)
        metrics = {key: sum(s[key] for s in steps) / len(steps) for key in steps[0]} if steps else {}
        if steps:
            metrics["first_log_ratio_max"] = steps[0]["first_log_ratio_max"]
            metrics["skipped_steps"] = sum(s["skipped_steps"] for s in steps)
        return metrics, torch.cat(ratios) if ratios else torch.zeros(0)

    def _set_learning_rates(self, iteration: int) -> None:
        # Adam's first steps move every weight by the full rate, whatever its gradient: a ramp keeps them from undoing the model that came in.
        o = self.config.optim
        ramp = min(1.0, (iteration + 1) / (o.lr_warmup_iterations + 1))
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = ramp * ((o.critic_lr or o.lr) if name == "critic" else o.lr)

    def policy_loss(
        self,
        micro: MicroBatch,
        old: OldPolicy,
        targets: Targets,
        reference: torch.Tensor | None,
        config: LossConfig,
        num_tokens: int,
        num_turns: int,
    ) -> LossOutput:
        """The policy's part of the loss on one micro-batch (with V and Q where the policy holds them)."""
        weight, bias = self.policy.lm_head()
        token, turn, device = micro.token_index.cpu(), micro.turn_index.cpu(), self.policy.device
        values = {}
        if self.algorithm.readout:
            values = {
                "v_rows": micro.v_rows,
                "v_old": old.v[turn].to(device),
                "v_targets": targets.v[turn].to(device),
                "q_rows": micro.q_rows,
                "q_old": old.q[turn].to(device),
                "q_targets": targets.q[turn].to(device),
            }
        return fused_loss(
            hidden=self.policy.hidden(micro),
            lm_head=weight,
            lm_head_bias=bias,
            value_token_ids=self.policy.value_token_ids,
            action_rows=micro.action_rows,
            actions=micro.actions,
            old_logprobs=old.logprobs[token].to(device),
            advantages=targets.advantages[token].to(device),
            ref_logprobs=reference[token].to(device) if reference is not None and config.kl_coef > 0 else None,
            token_weights=old.token_weights[token].to(device) if old.token_weights is not None else None,
            num_tokens=num_tokens,
            num_turns=num_turns,
            config=config,
            **values,
        )

    def critic_loss(self, micro: MicroBatch, old: OldPolicy, targets: Targets, config: LossConfig, num_values: int) -> LossOutput:
        """The separate critic's clipped value loss, by the same public operation (no action rows, a two-row head)."""
        per_token = self.algorithm.token_values
        index = (micro.token_index if per_token else micro.turn_index).cpu()
        device = self.policy.device
        nothing, none = micro.actions[:0], torch.zeros(0, device=device)
        return fused_loss(
            hidden=self.critic.hidden(micro),
            lm_head=self.critic.head,
            value_token_ids=Critic.value_token_ids,
            action_rows=nothing,
            actions=nothing,
            old_logprobs=none,
            advantages=none,
            v_rows=micro.action_rows if per_token else micro.v_rows,
            v_old=old.v[index].to(device),
            v_targets=targets.v[index].to(device),
            num_tokens=1,
            num_turns=num_values,
            config=dataclasses.replace(config, v_coef=1.0, kl_coef=0.0, entropy_coef=0.0),
        )

    def _step(
        self,
        batch: RolloutBatch,
        rows: Sequence[int],
        old: OldPolicy,
        targets: Targets,
        reference: torch.Tensor | None,
        config: LossConfig,
        critic_only: bool,
    ) -> tuple[dict[str, float], torch.Tensor]:
        micros = micro_batches(batch, rows, self.config.optim.micro_batch_tokens)
        # Counts of the whole minibatch, so that its gradient does not depend on how it is cut into micro-batches.
        num_tokens, num_turns = sum(m.actions.numel() for m in micros), sum(m.turn_index.numel() for m in micros)
        metrics: dict[str, torch.Tensor] = {}
        ratios: list[torch.Tensor] = []
        # Checkpointing needs train mode; dropout is off in every model that load.py prepares.
        self.policy.model.train(self.config.model.gradient_checkpointing)
        for micro in micros:
            micro = micro.to(self.policy.device)
            if not critic_only:
                out = self.policy_loss(micro, old, targets, reference, config, num_tokens, num_turns)
                out.loss.backward()
                _accumulate(metrics, out.metrics)
                ratios.append(out.logprobs.cpu() - old.logprobs[micro.token_index.cpu()])
            if self.critic is not None:
                out = self.critic_loss(micro, old, targets, config, num_tokens if self.algorithm.token_values else num_turns)
                out.loss.backward()
                _accumulate(metrics, {k: v for k, v in out.metrics.items() if k.startswith("v_")})
        self.policy.model.eval()
        result = {k: float(v) for k, v in metrics.items()}
        result["skipped_steps"] = 0.0
        for name, optimizer in self.optimizers.items():
            if name == "policy" and critic_only:
                continue
            norm = self._apply(optimizer)
            result["grad_norm" if name == "policy" else "critic_grad_norm"] = norm if norm is not None else 0.0
            result["skipped_steps"] += float(norm is None)
        return result, torch.cat(ratios) if ratios else torch.zeros(0)

    def _apply(self, optimizer: torch.optim.Optimizer) -> float | None:
        """Clip and step; a non-finite gradient leaves every parameter as it was. Returns the norm before clipping, None when skipped."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(params, self.config.optim.max_grad_norm).item()
        finite = norm == norm and norm != float("inf")
        if finite:
            optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
            log.warning("gradient norm is %s: optimizer step skipped (%d in a row)", norm, self.skipped_in_a_row)
        optimizer.zero_grad(set_to_none=True)
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise Diverged(
                f"{MAX_SKIPPED_STEPS} optimizer steps in a row had a non-finite gradient; lower optim.lr, or look at the last episodes"
            )
        return norm if finite else None

    # ---- diagnosis ------------------------------------------------------------------------------------------------------------------

    def term_grad_norms(
        self, batch: RolloutBatch, old: OldPolicy, targets: Targets, reference: torch.Tensor | None, iteration: int
    ) -> dict[str, float]:
        """Norm of each loss term's own gradient at the current weights, on the first micro-batch (a backward pass a term)."""
        config = self.iteration_loss_config(iteration)
        micro = next(self._micros(batch))
        targets = self.effective_targets(targets, iteration)
        silent = _without_advantages(targets)
        off = dataclasses.replace(config, v_coef=0.0, q_coef=0.0, kl_coef=0.0, entropy_coef=0.0)
        terms = {"policy": (off, targets), "entropy": (dataclasses.replace(off, entropy_coef=config.entropy_coef), silent)}
        if self.algorithm.readout:
            terms["v"] = (dataclasses.replace(off, v_coef=config.v_coef), silent)
            terms["q"] = (dataclasses.replace(off, q_coef=config.q_coef), silent)
        if reference is not None and config.kl_coef > 0:
            terms["kl"] = (dataclasses.replace(off, kl_coef=config.kl_coef), silent)
        norms = {}
        params = self.policy.parameters()
        for name, (term_config, term_targets) in terms.items():
            out = self.policy_loss(
                micro, old, term_targets, reference, term_config, max(1, micro.actions.numel()), max(1, micro.turn_index.numel())
            )
            grads = torch.autograd.grad(out.loss, params, allow_unused=True)
            norms[name] = torch.nn.utils.get_total_norm([g for g in grads if g is not None]).item()
        return norms

    def state_bytes(self) -> int:
        """Bytes of trained parameters, their gradients and the optimizer's two moments, and of the frozen reference."""
        trained = self.policy.parameters() + (list(self.critic.parameters()) if self.critic is not None else [])
        total = sum(p.numel() * p.element_size() * 4 for p in trained)
        if self.reference is not None:
            total += sum(p.numel() * p.element_size() for p in self.reference.model.parameters())
        return total


def _without_advantages(targets: Targets) -> Targets:
    return dataclasses.replace(targets, advantages=torch.zeros_like(targets.advantages))


def _accumulate(total: dict[str, torch.Tensor], part: dict[str, torch.Tensor]) -> None:
    for key, value in part.items():
        if key not in total:
            total[key] = value.clone()
        else:
            total[key] = torch.maximum(total[key], value) if key in MAX_METRICS else total[key] + value
