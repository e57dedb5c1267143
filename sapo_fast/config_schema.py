"""The settings of a training run: names, types, bounds, defaults and meanings. sapo_fast.config reads them from YAML and the command line.

docs/configuration.md is made from this file (``python -m sapo_fast.config > docs/configuration.md``).
Units: tokens, turns, episodes, iterations (one rollout and its updates), steps (one optimizer step).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # YAML has lists only, and strict validation takes none for a tuple


class Section(BaseModel):
    # strict: a quoted number, or true for 1, is a mistake worth telling; YAML already gives every value its type
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=())


class ModelSection(Section):
    """The policy, which is also V and Q."""

    path: str = Field("tiny", min_length=1, description="`tiny` (embedded), a directory with a Hugging Face causal LM, or a .gguf file")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights; on CPU bfloat16 is several times slower")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        examples=["auto", "cpu", "cuda", "cuda:N"],
        description="`auto`: cuda if there is one, else cpu",
    )
    value_tokens: Annotated[Literal["auto"] | tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], BeforeValidator(_pair)] = (
        Field(
            "auto",
            description="ids of w+ and w-; `auto`: two LM-head rows beyond the tokenizer, else two reserved specials that never occur",
        )
    )
    equal_value_rows: bool = Field(
        True, description="copy w+'s LM-head row to w- at the start, so that V = Q = 0 (a model whose readout is trained keeps its rows)"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, about a third more time"
    )


class WarmStartSection(Section):
    """The embedded model's pre-training on the imperfect expert's episodes (all tokens, V and Q on the returns); model.path=tiny only."""

    episodes: int = Field(6000, ge=1, description="expert episodes generated")
    steps: int = Field(1800, ge=0, description="optimizer steps")
    batch_tokens: int = Field(2048, ge=64, description="tokens a step, before packing")
    lr: float = Field(
        5e-3, gt=0, description="peak learning rate of AdamW (embeddings, norms, biases); Muon's, for the matrices, is 1.2 times that"
    )
    value_coef: float = Field(
        0.5, ge=0, description="weight of the V and Q regression on the demonstrations' discounted returns; 0 leaves the value cold"
    )
    own_episodes: int = Field(
        384,
        ge=0,
        description="episodes that the clone itself plays after two thirds of the steps, for V and Q to learn its own returns; 0: the expert's",
    )
    expert: dict[str, float] = Field(default_factory=dict, description="the expert's imperfections (see envs); empty: the suite's defaults")
    seed: int = Field(0, ge=0, description="of the episodes, the initial weights and the batches")
    cache_dir: str = Field(
        "~/.cache/sapo_fast", min_length=1, description="finished warm starts are kept here, by the hash of their settings"
    )


class EnvSection(Section):
    """What is played."""

    name: str = Field("household", min_length=1, description="a built-in suite, or `module:attribute` of your own")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the suite")
    max_turns: int = Field(30, ge=1, description="turn limit; reaching it truncates the episode")
    reward_scale: float = Field(10.0, description="reward units: the environment's reward times this (10 on success)")


class PromptSection(Section):
    """What the model is shown and how it must answer."""

    history: Literal["full", "window"] = Field(
        "full", description="full: append-only, turns merge into one row; window: the last turns only, as in the papers"
    )
    window: int = Field(2, ge=0, description="turns shown with history=window")
    restate_task: bool = Field(
        False, description="history=full: end every user message with the task, so that a small model need not look back for it"
    )
    think: bool = Field(False, description="ask for `<think>...</think>` before the action")
    action_tags: bool = Field(False, description="ask for `<action>...</action>`")
    admissible: bool = Field(False, description="list the admissible commands in the prompt")
    invalid_rule: Literal["format", "admissible"] = Field("format", description="what counts as an invalid action")


class VLLMSection(Section):
    """The vLLM engine, with rollout.engine=vllm (docs/rollout.md)."""

    mode: Literal["embedded", "server"] = Field("embedded", description="inside this process, or another process (and GPU) over HTTP")
    url: str | None = Field(None, pattern=r"^https?://", description="mode=server: of a `vllm serve` that runs already; null: start one")
    devices: str | None = Field(None, description="mode=server: CUDA_VISIBLE_DEVICES of the server that is started; null: this process's")
    kv_cache_mb: int | None = Field(None, ge=1, description="memory of keys and values; null: what max_live_episodes full contexts need")
    sleep: bool = Field(False, description="mode=embedded: free the engine's GPU memory during updates")
    sync_tolerance: float | None = Field(
        None, gt=0, description="largest difference of log-probs allowed in the proof after a sync; null: 5e-4 in float32, .25 in bfloat16"
    )


class RolloutSection(Section):
    """How episodes are generated."""

    engine: Literal["hf", "vllm"] = Field("hf", description="the generation engine: transformers in this process, or vLLM")
    collector: Literal["auto", "lockstep", "stream"] = Field(
        "auto",
        description="lockstep: a turn of every live episode at a time; stream: each goes on as its own answer arrives; auto: stream with vllm",
    )
    env_workers: int = Field(
        0, ge=0, description="collector=stream: threads for environment steps; 0: in line (where they take microseconds)"
    )
    env_timeout: float | None = Field(
        None, gt=0, description="collector=stream with env_workers: seconds a reset or step may take; null: any"
    )
    retries: int = Field(1, ge=0, description="collector=stream: how often an episode that crashed or timed out is played again")
    correction: Literal["auto", "always", "never"] = Field(
        "auto", description="weigh each token's policy loss by min(pi_old / pi_rollout, correction_cap); auto: with vllm"
    )
    correction_cap: float = Field(2.0, ge=1, description="the largest such weight")
    turn_mask: float | None = Field(
        None, gt=1, description="with the correction: ignore turns whose mean ratio is outside [1/turn_mask, turn_mask]; null: none"
    )
    old_policy: Literal["trainer", "engine"] = Field(
        "trainer",
        description="whose log-probs, V and Q of the policy that played are used: a pass of the trainer, or the engine's (vllm; saves the pass)",
    )
    temperature: float = Field(1.0, gt=0, description="of sampling, and of the policy in the loss")
    max_response_tokens: int = Field(16, ge=1, description="response budget of a turn")
    max_context_tokens: int = Field(1024, ge=8, description="prompt + response; an episode whose prompt leaves no room ends as `overlong`")
    max_live_episodes: int = Field(64, ge=1, description="episodes played side by side")

    def streams(self) -> bool:
        return self.collector == "stream" or (self.collector == "auto" and self.engine == "vllm")

    def corrects(self) -> bool:
        return self.correction == "always" or (self.correction == "auto" and self.engine == "vllm")


class LossSection(Section):
    """The fields of `sapo_fast.LossConfig` (docs/method.md, Loss)."""

    clip_low: float | None = Field(0.2, ge=0, description="the ratio is clipped below at 1 - clip_low; null: never")
    clip_high: float | None = Field(0.2, ge=0, description="the ratio is clipped above at 1 + clip_high; null: never")
    dual_clip: float | None = Field(3.0, gt=1, description="bound on ratio x |advantage| for negative advantages; null: none")
    v_clip: float | None = Field(
        0.2, ge=0, description="how far V may move from its old value, in normalised units (reward / r_max); null: any"
    )
    q_clip: float | None = Field(0.2, ge=0, description="the same for Q")
    v_coef: float = Field(0.5, ge=0, description="weight of the V loss")
    q_coef: float = Field(0.5, ge=0, description="weight of the Q loss")
    kl_coef: float = Field(0.01, ge=0, description="weight of the KL (k3) to the frozen reference; 0 saves the reference pass")
    entropy_coef: float = Field(0.001, ge=0, description="weight of the entropy bonus")
    r_max: float = Field(10.0, gt=0, description="reward units of a readout of 1")
    tau_v: float = Field(1.0, gt=0, description="temperature of the value readout")
    readout: Literal["linear", "clip"] = Field("linear", description="V = r_max (z+ - z-) / tau_v, or the same clipped to +-r_max")


class AdvantageSection(Section):
    """Turn-level advantages and value targets."""

    gamma: float = Field(0.95, ge=0, le=1, description="discount a turn")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of the advantage")
    lam_v: float | None = Field(None, ge=0, le=1, description="lambda of the V target; null: lam")
    invalid_penalty: float = Field(0.1, ge=0, description="subtracted from the advantage of an invalid turn, reward units")
    bootstrap_truncated: bool = Field(
        False, description="use V after the last turn of a truncated episode; off: truncation counts as terminal (paper)"
    )
    min_std: float = Field(
        1e-4, gt=0, description="floor of the advantages' standard deviation, reward units: a batch without signal gives no gradient"
    )


class OptimSection(Section):
    """AdamW and how an iteration's turns become optimizer steps."""

    lr: float = Field(1e-6, gt=0, description="learning rate")
    lr_warmup_iterations: int = Field(0, ge=0, description="iterations over which the rates rise linearly to their full value")
    critic_lr: float | None = Field(None, gt=0, description="of ppo's separate critic; null: lr")
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], BeforeValidator(_pair)] = Field(
        (0.9, 0.999), description="AdamW's moment decays"
    )
    weight_decay: float = Field(0.01, ge=0, description="AdamW's decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient is scaled down to this norm")
    minibatch_turns: int = Field(256, ge=1, description="turns of one optimizer step (rows are kept whole, so it is a target)")
    epochs: int = Field(1, ge=1, description="passes over an iteration's turns")
    micro_batch_tokens: int = Field(16384, ge=1, description="token budget of one forward and backward; no effect on the result")


class ValueWarmupSection(Section):
    """Values before the first policy step (docs/method.md, What goes wrong)."""

    fit_readout: bool = Field(
        True, description="fit the value rows to the first batch's returns by ridge regression; the policy does not move"
    )
    iterations: int = Field(5, ge=0, description="iterations that train the value alone; 0: none")
    kl_coef: float = Field(
        1.0, ge=0, description="weight of KL to the frozen policy while warming up: the shared backbone must not move the policy"
    )


class EvalSection(Section):
    """Evaluation on a fixed panel of tasks that training never sees."""

    every: int = Field(10, ge=0, description="iterations between evaluations; 0: only before and after")
    episodes: int = Field(128, ge=1, description="size of the panel: the first tasks of the suite's evaluation list")
    temperature: float = Field(0.4, ge=0, description="of sampling; 0: greedy")


class CheckpointSection(Section):
    """What a killed run loses at most."""

    every: int = Field(10, ge=0, description="iterations between checkpoints; 0: only at the end and on Ctrl-C")
    keep: int = Field(2, ge=1, description="checkpoints kept; 2 or more survive a damaged newest one")


class LogSection(Section):
    """metrics.jsonl is always written."""

    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: bool = Field(False, description="log to Weights & Biases (needs `pip install wandb`)")
    term_grad_norms_every: int = Field(
        10, ge=0, description="iterations between measurements of each loss term's gradient norm (a backward pass a term); 0: never"
    )
    sample_episodes: int = Field(2, ge=0, description="episodes written out in full each evaluation")


class Config(Section):
    algorithm: Literal["sapo", "ppo", "ppo_token", "grpo"] = Field(
        "sapo", description="ppo: separate critic, turn GAE; ppo_token: token GAE; grpo: group baseline, no value"
    )
    seed: int = Field(0, ge=0, description="of everything random in the run")
    output_dir: str = Field(
        "runs/{algorithm}-{seed}", min_length=1, description="metrics, checkpoints and reports; {algorithm} and {seed} are filled in"
    )
    iterations: int = Field(150, ge=1, description="iterations of the whole run; a resumed run goes on up to here")
    episodes_per_iteration: int = Field(128, ge=1, description="tasks x group_size")
    group_size: int = Field(8, ge=2, description="episodes of one task, grpo only; the other methods play each task once")
    threads: int = Field(0, ge=0, description="torch CPU threads; 0: torch's own choice")
    model: ModelSection = ModelSection()
    warm_start: WarmStartSection = WarmStartSection()
    env: EnvSection = EnvSection()
    prompt: PromptSection = PromptSection()
    rollout: RolloutSection = RolloutSection()
    vllm: VLLMSection = VLLMSection()
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
                f"episodes_per_iteration must be a multiple of group_size ({self.group_size}) for grpo, got {self.episodes_per_iteration}; "
                f"set episodes_per_iteration={-(-self.episodes_per_iteration // self.group_size) * self.group_size}"
            )
        if self.rollout.max_response_tokens >= self.rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_response_tokens ({self.rollout.max_response_tokens}) must be below rollout.max_context_tokens "
                f"({self.rollout.max_context_tokens}); raise rollout.max_context_tokens"
            )
        self._consistent_rollout()
        if self.model.value_tokens != "auto" and self.model.value_tokens[0] == self.model.value_tokens[1]:
            raise ValueError(f"model.value_tokens must be two different ids, got {list(self.model.value_tokens)}; set it to auto")
        unknown = set(re.findall(r"\{(.*?)\}", self.output_dir)) - {"algorithm", "seed"}
        if unknown:
            raise ValueError(f"output_dir may hold {{algorithm}} and {{seed}} only, got {self.output_dir!r}; take {{{min(unknown)}}} out")
        return self

    def _consistent_rollout(self) -> None:
        r = self.rollout
        if r.engine == "vllm" and not 0.01 <= r.temperature <= 2.0:
            raise ValueError(f"rollout.temperature must be in [0.01, 2] for vllm, got {r.temperature}; use rollout.engine=hf")
        if r.engine == "vllm" and self.eval.temperature and not 0.01 <= self.eval.temperature <= 2.0:
            raise ValueError(f"eval.temperature must be 0 or in [0.01, 2] for vllm, got {self.eval.temperature}; use rollout.engine=hf")
        if r.env_timeout is not None and not r.env_workers:
            raise ValueError(
                f"rollout.env_timeout ({r.env_timeout:g}) needs threads to give up; set rollout.env_workers=4, or env_timeout=null"
            )
        if r.old_policy == "trainer":
            return
        if r.engine != "vllm" or not r.streams():
            raise ValueError("rollout.old_policy=engine needs rollout.engine=vllm, rollout.collector=auto; set rollout.old_policy=trainer")
        if self.algorithm in ("ppo", "ppo_token"):
            raise ValueError(f"rollout.old_policy=engine knows no critic, which {self.algorithm} has; set rollout.old_policy=trainer")
        if self.advantage.bootstrap_truncated:
            raise ValueError(
                "rollout.old_policy=engine reads no value after the last turn; set advantage.bootstrap_truncated=false or rollout.old_policy=trainer"
            )

    def run_dir(self) -> Path:
        """``output_dir`` with its placeholders filled in."""
        return Path(self.output_dir.replace("{algorithm}", self.algorithm).replace("{seed}", str(self.seed))).expanduser()
