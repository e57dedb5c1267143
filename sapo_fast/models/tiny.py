"""The embedded model: a Llama of well under a million parameters with its own tokenizer, warm-started on the imperfect expert.

The warm start is language modelling over **all** tokens of the expert's episodes, observations included (a model cloned on actions alone has no state
features to read a value from), plus regression of V and Q on the episodes' discounted returns (a cold value costs SAPO its first tens of
iterations). The result is an ordinary Hugging Face directory, cached by the hash of everything that shaped it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from sapo_fast.advantage import turn_gae
from sapo_fast.batch import MicroBatch, build_rows, micro_batches
from sapo_fast.envs.demonstration import Demonstration
from sapo_fast.models.load import SIDE_FILE, Policy, finish_policy, load_policy, resolve_device
from sapo_fast.records import Trajectory, Turn
from sapo_fast.value_tokens import read_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sapo_fast.config import Config
    from sapo_fast.envs.base import Demonstrator, TaskSuite
    from sapo_fast.rollout.prompts import PromptBuilder

    BuilderFor = Callable[[PreTrainedTokenizerBase], PromptBuilder]
    Play = Callable[[Policy, int], list[Trajectory]]

log = logging.getLogger("sapo_fast")

RECIPE = 4  # raise when a change here makes older cached warm starts differ from what this code would train
HIDDEN, LAYERS, HEADS, KV_HEADS, MLP, VOCAB = 128, 2, 4, 2, 256, 768
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """A byte-level BPE on the environment's own text: its words become single tokens, and any other text still encodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", END, "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 2, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerBase, max_positions: int, seed: int) -> torch.nn.Module:
    """A fresh model, initialised for its size. Its LM head has unused padding rows beyond the tokenizer, as Qwen's has: w+ and w- come from there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    # Llama and not Qwen2: AutoTokenizer gives every Qwen2 its own pre-tokenizer, whatever tokenizer.json says, and would read this text differently.
    config = LlamaConfig(
        vocab_size=64 * math.ceil((len(tokenizer) + 2) / 64),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        # Tied embeddings, and residual branches quiet beside them: what attention brings of a token already points at that token's logit, so
        # copying names from the text, the skill this world asks for, is learned for all tokens at once. Near-uniform attention at the start.
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
        for block in model.model.layers:
            for linear in (block.self_attn.q_proj, block.self_attn.k_proj):
                torch.nn.init.normal_(linear.weight, std=0.03)
            for linear in (block.self_attn.v_proj, block.mlp.gate_proj, block.mlp.up_proj):
                torch.nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            for linear in (block.self_attn.o_proj, block.mlp.down_proj):
                torch.nn.init.normal_(linear.weight, std=0.2 * linear.in_features**-0.5)
    return model.float()


def expert_episodes(config: Config, suite: TaskSuite, n: int) -> list[Demonstration]:
    """``n`` episodes of the suite's expert under ``config``. ValueError, with the environment and the fix: it has none, or the expert failed."""
    settings, name = config.warm_start, config.env.name
    if not hasattr(suite, "expert_episodes"):
        raise ValueError(
            f"model.path=tiny needs a suite with expert_episodes(n, seed=, max_turns=, noise=) to learn from; {name!r} has none. "
            "Add it (docs/environments.md), or set model.path to a Hugging Face causal LM"
        )
    episodes: list[Demonstration] = []
    try:
        for episode in suite.expert_episodes(n, seed=settings.seed, max_turns=config.env.max_turns, noise=settings.expert):
            if not isinstance(episode, Demonstration):
                raise TypeError(f"an episode must be a sapo_fast.envs.demonstration.Demonstration, got {type(episode).__name__}")
            episodes.append(episode)
        if not episodes:
            raise ValueError("it gave no episode")
    except Exception as error:  # user's code may raise anything
        after = f" after {len(episodes)} episodes, the last of task {episodes[-1].task_id!r}" if episodes else ""
        told = f"the expert of env.name={name} failed{after}: {type(error).__name__}: {error}."
        if settings.expert:
            told += f" It was given warm_start.expert={settings.expert}; if these are another environment's, take them out: warm_start.expert={{}}."
        raise ValueError(f"{told} Mend its expert_episodes (--debug shows where), or set model.path to a Hugging Face causal LM") from error
    return episodes


def rendered(episodes: Iterable, builder: PromptBuilder) -> Iterator[str]:
    """The texts that the model will see and write, as the prompts word them."""
    for episode in episodes:
        history = builder.start()
        for step in episode.turns:
            history.prompt(step.observation, step.info)
            yield history.shown
            yield builder.format_action(step.command)
            history.respond([builder.end_ids[0]], step.command)


def demonstrations(episodes: Sequence, builder: PromptBuilder, tokenizer: PreTrainedTokenizerBase, reward_scale: float) -> list[Trajectory]:
    """Expert episodes as trajectories, prompted exactly as the rollout will prompt."""
    end = tokenizer.eos_token_id
    out = []
    for index, episode in enumerate(episodes):
        history = builder.start()
        trajectory = Trajectory(task_id=episode.task_id, seed=index, won=episode.won)
        for step in episode.turns:
            prompt = history.prompt(step.observation, step.info)
            response = tokenizer.encode(builder.format_action(step.command), add_special_tokens=False) + [end]
            trajectory.turns.append(
                Turn(prompt_ids=prompt, response_ids=response, rollout_logprobs=[0.0] * len(response), reward=step.reward * reward_scale)
            )
            history.respond(response, step.command)
        out.append(trajectory)
    return out


def language_loss(policy: Policy, hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Mean next-token cross-entropy over all tokens of the rows, on the vocabulary without w+ and w-."""
    # Next-token pairs inside a row: the last position of each row predicts nothing.
    inside = torch.ones(len(micro.input_ids), dtype=torch.bool)
    inside[torch.tensor(micro.cu_seqlens[1:]) - 1] = False
    rows = inside.nonzero()[:, 0].to(hidden.device)
    logits = F.linear(hidden[rows], policy.lm_head()[0])
    logits[:, list(policy.value_token_ids)] = -torch.inf
    return F.cross_entropy(logits, micro.input_ids[rows + 1])


def value_loss(policy: Policy, hidden: torch.Tensor, micro: MicroBatch, returns: torch.Tensor, r_max: float, tau_v: float) -> torch.Tensor:
    """Mean squared error of V plus that of Q against the discounted returns [T], in units of r_max."""
    target = (returns[micro.turn_index.cpu()] / r_max).to(hidden.device)
    head, ids = policy.lm_head()[0], policy.value_token_ids
    read = {"hidden": hidden, "lm_head": head, "value_token_ids": ids, "r_max": 1.0, "tau_v": tau_v, "readout": "linear"}
    return sum((read_values(rows=rows, **read) - target).square().mean() for rows in (micro.v_rows, micro.q_rows))


class Stream:
    """An endless shuffled stream of packed micro-batches over one set of rows, with the rows' discounted returns."""

    def __init__(self, trajectories: Sequence[Trajectory], gamma: float, batch_tokens: int, generator: torch.Generator) -> None:
        self.batch = build_rows(trajectories)
        zeros = torch.zeros(self.batch.num_turns)
        self.returns = turn_gae(self.batch.rewards, zeros, cu_turns=self.batch.cu_turns, gamma=gamma, lam=1.0).advantages
        self._batch_tokens, self._generator = batch_tokens, generator
        self._pool: list[MicroBatch] = []

    def next(self) -> MicroBatch:
        if not self._pool:
            pool = micro_batches(self.batch, self._shuffled(len(self.batch.rows)), self._batch_tokens)
            self._pool = [pool[i] for i in self._shuffled(len(pool))]
        return self._pool.pop()

    def _shuffled(self, n: int) -> list[int]:
        return torch.randperm(n, generator=self._generator).tolist()


def warm_start_optimizers(policy: Policy, lr: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the blocks' matrices, AdamW for the rest, each with its full rate."""
    inside = [p for name, p in policy.model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in policy.model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    muon = torch.optim.Muon(inside, lr=1.2 * lr, momentum=0.95, weight_decay=0.0)
    return [(muon, 1.2 * lr), (torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.01), lr)]


def warm_start(config: Config, suite: Demonstrator, builder_for: BuilderFor, play: Play, *, progress: bool = True) -> Policy:
    """Train tokenizer and model from nothing.

    In the last third of the steps V and Q learn from the clone's own episodes instead of the expert's: the expert's returns say how good a state is
    for the expert, who wins where its clone does not.

    Args:
        suite: an environment suite with ``expert_episodes``.
        builder_for: tokenizer -> PromptBuilder, so that demonstrations are prompted as the rollout prompts.
        play: (policy, n) -> n episodes of the policy on training tasks.
    """
    from tqdm import tqdm

    settings, loss_settings = config.warm_start, config.loss
    episodes = expert_episodes(config, suite, settings.episodes)
    tokenizer = train_tokenizer(rendered(episodes[:1000], builder_for(train_tokenizer([]))))
    device = resolve_device(config.model.device)
    model = build_model(tokenizer, max(config.rollout.max_context_tokens, 2048), settings.seed).to(device)
    # The readout is trained here, so its rows start equal (V = 0) and are kept afterwards.
    policy = finish_policy(model, tokenizer, config.model.model_copy(update={"equal_value_rows": True}), {})
    generator = torch.Generator().manual_seed(settings.seed)
    shown = demonstrations(episodes, builder_for(tokenizer), tokenizer, config.env.reward_scale)
    expert = Stream(shown, config.advantage.gamma, settings.batch_tokens, generator)
    own: Stream | None = None
    optimizers = warm_start_optimizers(policy, settings.lr)
    bar = tqdm(range(settings.steps), desc="warm start", disable=not progress, unit="step")
    for step in bar:
        if settings.own_episodes and step == settings.steps * 2 // 3:
            own = Stream(play(policy, settings.own_episodes), config.advantage.gamma, settings.batch_tokens, generator)
        done = step / max(1, settings.steps)
        ramp = min(1.0, (step + 1) / 50) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
        micro = expert.next().to(device)
        hidden = policy.hidden(micro)
        loss = words = language_loss(policy, hidden, micro)
        if settings.value_coef:
            returns = expert.returns
            if own is not None:
                micro, returns = own.next().to(device), own.returns
                hidden = policy.hidden(micro)
            loss = words + settings.value_coef * value_loss(policy, hidden, micro, returns, loss_settings.r_max, loss_settings.tau_v)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = ramp * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            bar.set_postfix(loss=f"{words.item():.3f}", refresh=False)
    return policy


def cache_key(config: Config, suite_name: str) -> str:
    """Hash of everything that shapes the warm start."""
    settings = config.warm_start.model_dump(exclude={"cache_dir"})
    shaped = {
        "recipe": RECIPE,
        "size": [HIDDEN, LAYERS, HEADS, KV_HEADS, MLP, VOCAB],
        "suite": suite_name,
        "warm_start": settings,
        "env": config.env.model_dump(),
        "prompt": config.prompt.model_dump(exclude={"invalid_rule"}),
        "value": [config.advantage.gamma, config.loss.r_max, config.loss.tau_v],
    }
    return hashlib.sha256(json.dumps(shaped, sort_keys=True).encode()).hexdigest()[:16]


def check_round_trip(tokenizer: PreTrainedTokenizerBase, builder_for: BuilderFor, suite: Demonstrator) -> None:
    """A tokenizer that AutoTokenizer reads back differently would feed the trained model text it has never seen, in silence."""
    from transformers import AutoTokenizer, LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        LlamaConfig().save_pretrained(folder)
        again = AutoTokenizer.from_pretrained(folder)
    for text in rendered(suite.expert_episodes(3, seed=1, max_turns=10, noise={}), builder_for(tokenizer)):
        if again.encode(text, add_special_tokens=False) != tokenizer.encode(text, add_special_tokens=False):
            raise RuntimeError(
                f"this version of transformers reads the tiny model's tokenizer back as {type(again).__name__}, which splits {text!r} differently"
            )


def save_policy(policy: Policy, where: Path, side: dict) -> None:
    """Write a Hugging Face directory whole: a temporary sibling, then a rename."""
    where.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=where.name + ".", dir=where.parent))
    try:
        policy.model.save_pretrained(temporary)
        policy.tokenizer.save_pretrained(temporary)
        (temporary / SIDE_FILE).write_text(json.dumps({"value_token_ids": list(policy.value_token_ids), **side}))
        os.replace(temporary, where)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not (where / SIDE_FILE).is_file():  # another process finished the same warm start first: its result is as good
            raise


def load_or_train(config: Config, suite: Demonstrator, builder_for: BuilderFor, play: Play, *, progress: bool = True) -> Policy:
    """The warm-started tiny model for this configuration, from the cache or trained now."""
    where = Path(config.warm_start.cache_dir).expanduser() / f"tiny-{suite.name}-{cache_key(config, suite.name)}"
    if not (where / SIDE_FILE).is_file():
        log.info("warm start: training the tiny model (cached at %s)", where)
        policy = warm_start(config, suite, builder_for, play, progress=progress)
        check_round_trip(policy.tokenizer, builder_for, suite)
        save_policy(policy, where, {"trained_readout": config.warm_start.value_coef > 0})
    else:
        log.info("warm start: found in the cache at %s", where)
    # Loaded from disk in both cases, so that a first run and a cached one start from the same bytes.
    return load_policy(config.model.model_copy(update={"path": str(where)}))
