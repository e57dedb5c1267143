"""The typed configuration of a training run: YAML file + ``key=value`` overrides, validated whole before any work.

Every field is documented where it stands; docs/configuration.md is the same list for people. Units: tokens, turns, episodes, iterations (one rollout
and its updates), steps (one optimizer step).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=())


class ModelSection(Section):
    path: str = Field("tiny", description="'tiny' (embedded), a directory with a Hugging Face causal LM, or a .gguf file")
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = Field("auto", description="'auto': cuda if there is one, else cpu")
    value_tokens: Literal["auto"] | tuple[int, int] = Field("auto", description="ids of w+ and w-; auto: method.md, Settings")
    equal_value_rows: bool = Field(True, description="copy w+'s LM-head row to w- at the start, so that V = Q = 0 (a model whose readout is trained keeps its rows)")
    gradient_checkpointing: bool = False


class WarmStartSection(Section):
    """The embedded model's pre-training on the imperfect expert's episodes (all tokens, and V and Q on the returns). Used by model.path=tiny only."""

    episodes: int = Field(3000, ge=1, description="expert episodes generated")
    steps: int = Field(400, ge=0, description="optimizer steps")
    batch_tokens: int = Field(8192, ge=64, description="tokens a step, before packing")
    lr: float = Field(3e-3, gt=0)
    value_coef: float = Field(0.5, ge=0, description="weight of the V and Q regression on the demonstrations' discounted returns; 0 leaves the value cold")
    expert: dict[str, float] = Field(default_factory=dict, description="the expert's imperfections (see envs), empty: the suite's defaults")
    seed: int = 0
    cache_dir: str = Field("~/.cache/sapo_fast", description="finished warm starts are kept here, by the hash of their settings")


class EnvSection(Section):
    name: str = Field("household", description="a built-in suite, or 'module:attribute' of your own")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the suite")
    max_turns: int = Field(30, ge=1, description="turn limit; reaching it truncates the episode")
    reward_scale: float = Field(10.0, description="reward units: the environment's reward times this (method.md: 10 on success)")


class PromptSection(Section):
    history: Literal["full", "window"] = Field("full", description="full: append-only, turns merge into one row; window: the last turns only, as in the papers")
    window: int = Field(2, ge=0, description="turns shown with history=window")
    think: bool = Field(False, description="ask for <think>...</think> before the action")
    action_tags: bool = Field(False, description="ask for <action>...</action>")
    admissible: bool = Field(False, description="list the admissible commands in the prompt")
    invalid_rule: Literal["format", "admissible"] = Field("format", description="what counts as an invalid action")


class RolloutSection(Section):
    engine: Literal["hf"] = "hf"
    temperature: float = Field(1.0, gt=0)
    max_response_tokens: int = Field(16, ge=1)
    max_context_tokens: int = Field(1024, ge=8, description="prompt + response; an episode whose prompt leaves no room ends as 'overlong'")
    max_live_episodes: int = Field(64, ge=1, description="episodes played side by side")


class LossSection(Section):
    """method.md, Loss; the fields of sapo_fast.LossConfig."""

    clip_low: float | None = Field(0.2, gt=0)
    clip_high: float | None = Field(0.2, gt=0)
    dual_clip: float | None = Field(3.0, gt=1)
    v_clip: float | None = Field(0.2, gt=0, description="normalised units (reward / r_max)")
    q_clip: float | None = Field(0.2, gt=0)
    v_coef: float = Field(0.5, ge=0)
    q_coef: float = Field(0.5, ge=0)
    kl_coef: float = Field(0.01, ge=0)
    entropy_coef: float = Field(0.001, ge=0)
    r_max: float = Field(10.0, gt=0)
    tau_v: float = Field(1.0, gt=0)
    readout: Literal["linear", "clip"] = "linear"


class AdvantageSection(Section):
    gamma: float = Field(0.95, ge=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    lam_v: float | None = Field(None, ge=0, le=1, description="lambda of the V target; none: lam")
    invalid_penalty: float = Field(0.1, ge=0, description="subtracted from the advantage of an invalid turn, reward units")
    bootstrap_truncated: bool = Field(False, description="use V after the last turn of a truncated episode; off: truncation counts as terminal (paper)")
    min_std: float = Field(1e-4, gt=0, description="floor of the advantages' standard deviation, reward units: a batch without signal gives no gradient")


class OptimSection(Section):
    lr: float = Field(1e-6, gt=0)
    critic_lr: float | None = Field(None, gt=0, description="ppo's separate critic; none: lr")
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    minibatch_turns: int = Field(256, ge=1, description="turns of one optimizer step (rows are kept whole, so it is a target)")
    epochs: int = Field(1, ge=1, description="passes over an iteration's turns")
    micro_batch_tokens: int = Field(16384, ge=1, description="token budget of one forward and backward; no effect on the result")


class ValueWarmupSection(Section):
    """First iterations that train the value alone (method.md, What goes wrong 2)."""

    iterations: int = Field(5, ge=0)
    kl_coef: float = Field(1.0, ge=0, description="weight of KL to the frozen policy while warming up: the shared backbone must not move the policy")


class EvalSection(Section):
    every: int = Field(10, ge=0, description="iterations between evaluations; 0: only before and after")
    episodes: int = Field(128, ge=1, description="size of the fixed panel: the first tasks of the suite's evaluation list")
    temperature: float = Field(0.4, ge=0)


class CheckpointSection(Section):
    every: int = Field(10, ge=0, description="iterations between checkpoints; 0: only at the end and on Ctrl-C")
    keep: int = Field(2, ge=1)


class LogSection(Section):
    tensorboard: bool = True
    wandb: bool = False
    term_grad_norms_every: int = Field(10, ge=0, description="iterations between measurements of each loss term's gradient norm (a backward pass a term); 0: never")
    sample_episodes: int = Field(2, ge=0, description="episodes written out in full each evaluation")


class Config(Section):
    algorithm: Literal["sapo", "ppo", "ppo_token", "grpo"] = "sapo"
    seed: int = Field(0, ge=0)
    output_dir: str = "runs/{algorithm}-{seed}"
    iterations: int = Field(150, ge=1)
    episodes_per_iteration: int = Field(128, ge=1, description="tasks x group_size")
    group_size: int = Field(8, ge=2, description="episodes of one task, grpo only; the other methods play each task once")
    threads: int = Field(0, ge=0, description="torch CPU threads; 0: torch's own choice")
    model: ModelSection = ModelSection()
    warm_start: WarmStartSection = WarmStartSection()
    env: EnvSection = EnvSection()
    prompt: PromptSection = PromptSection()
    rollout: RolloutSection = RolloutSection()
    loss: LossSection = LossSection()
    advantage: AdvantageSection = AdvantageSection()
    optim: OptimSection = OptimSection()
    value_warmup: ValueWarmupSection = ValueWarmupSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.algorithm == "grpo" and self.episodes_per_iteration % self.group_size:
            raise ValueError(
                f"episodes_per_iteration must be a multiple of group_size for grpo, got {self.episodes_per_iteration} and {self.group_size}; "
                f"set episodes_per_iteration={-(-self.episodes_per_iteration // self.group_size) * self.group_size}"
            )
        if self.rollout.max_response_tokens >= self.rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_response_tokens ({self.rollout.max_response_tokens}) must be below rollout.max_context_tokens "
                f"({self.rollout.max_context_tokens}); raise max_context_tokens"
            )
        return self
