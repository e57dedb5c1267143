"""``sapo-fast plan CONFIG``: the memory a run will need on its device, computed from shapes alone. No weight is read, nothing is allocated.

What is kept: weights, gradients and AdamW's two moments of each trained network, and the frozen reference, in ``model.dtype``, as this
trainer holds them. What comes and goes, of which the largest counts: the activations of one micro-batch (an estimate: the tensors that a
Qwen2/3 or Llama block keeps for its backward pass under an attention that keeps no scores), the logits of one chunk in float32 with their gradient, and
the rollout's key-value cache, full.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sapo_fast.config import Config

LOGIT_CHUNK_BYTES = 2**28  # the loss projects a chunk of rows at a time; about this much logits
_GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. Biases: on the query, key and value projections (Qwen2). Norms: on queries and keys (Qwen3)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def parameters(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        attention += (queries + 2 * keys) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        block = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.layers * block + self.hidden

    def activations(self, tokens: int, width: int, checkpointing: bool) -> int:
        """Bytes kept for the backward pass of ``tokens`` tokens; with checkpointing each layer's input, and one layer at a time whole."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        block = 6 * self.hidden + 4 * self.mlp + 3 * queries + 4 * keys
        kept = self.layers * self.hidden + block if checkpointing else self.layers * block
        return tokens * width * kept

    def cache(self, tokens: int, width: int) -> int:
        """Bytes of keys and values of ``tokens`` tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * width


SHAPES = {
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151_936, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": Shape(1536, 28, 12, 2, 128, 8960, 151_936, tied=True, qkv_bias=True),
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 128, 18_944, 152_064, tied=False, qkv_bias=True),
    "qwen3-14b": Shape(5120, 40, 40, 8, 128, 17_408, 151_936, tied=False, qk_norm=True),
}


def model_shape(path: str) -> Shape:
    """The shape of a model directory, or of a known model by the folder's name. ValueError where it is neither."""
    if (Path(path).expanduser() / "config.json").is_file():
        from transformers import AutoConfig

        c = AutoConfig.from_pretrained(str(Path(path).expanduser()))
        heads = c.num_attention_heads
        return Shape(
            hidden=c.hidden_size,
            layers=c.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(c, "num_key_value_heads", heads),
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
            mlp=c.intermediate_size,
            vocab=c.vocab_size,
            tied=bool(c.tie_word_embeddings),
            qkv_bias=c.model_type == "qwen2",
            qk_norm=c.model_type == "qwen3",
        )
    name = re.sub(r"-(instruct|base|chat)$", "", Path(path).name.lower())
    if name not in SHAPES:
        raise ValueError(
            f"model.path={path} is no model directory, and its name is none of {', '.join(SHAPES)}; download the model, or use one of these"
        )
    return SHAPES[name]


def memory(config: Config, algorithm: str) -> dict[str, int]:
    """Bytes by part, for ``algorithm`` instead of the configuration's own. "peak" is the sum of what is kept and the largest of the rest."""
    shape, width = model_shape(config.model.path), {"float32": 4, "bfloat16": 2}[config.model.dtype]
    networks = 2 if algorithm in ("ppo", "ppo_token") else 1
    head = shape.vocab * shape.hidden
    critic = shape.parameters - (0 if shape.tied else head) if networks == 2 else 0  # a critic has no LM head of its own
    reference = config.loss.kl_coef > 0 or (algorithm != "grpo" and config.value_warmup.iterations > 0 and config.value_warmup.kl_coef > 0)
    tokens, r = config.optim.micro_batch_tokens, config.rollout
    row = 2 * 4 * shape.vocab  # float32 logits of a row and their gradient
    parts = {
        "policy": shape.parameters * width,
        "policy gradient": shape.parameters * width,
        "policy AdamW": 2 * shape.parameters * width,
        "critic, gradient and AdamW": 4 * critic * width,
        "reference": shape.parameters * width if reference else 0,
        "activations (estimate)": shape.activations(tokens, width, config.model.gradient_checkpointing),
        "logits of a chunk": min(tokens * row, max(LOGIT_CHUNK_BYTES * 2, row)),
        "key-value cache": shape.cache(r.max_live_episodes * r.max_context_tokens, width),
    }
    transient = max(parts["activations (estimate)"] + parts["logits of a chunk"], parts["key-value cache"])
    kept = sum(parts[name] for name in list(parts)[:5])
    return parts | {"peak": kept + transient}


def describe(config: Config) -> str:
    """A table: the configuration's algorithm beside SAPO and PPO with a critic of its own, and the peak of each."""
    names = tuple(dict.fromkeys((config.algorithm, "sapo", "ppo")))
    columns = {name: memory(config, name) for name in names}
    shape = model_shape(config.model.path)
    c = config
    lines = [
        f"{c.model.path}: {shape.parameters:,} parameters, {c.model.dtype}; {c.episodes_per_iteration} episodes an iteration, at most "
        f"{c.env.max_turns} turns of {c.rollout.max_context_tokens} tokens",
        f"micro-batch {c.optim.micro_batch_tokens:,} tokens, activations {'recomputed' if c.model.gradient_checkpointing else 'kept'}; "
        f"whole logits of a micro-batch would be {c.optim.micro_batch_tokens * shape.vocab * 4 / _GIB:.1f} GiB in float32",
        "",
        f"{'GiB on the device':<30}" + "".join(f"{name:>10}" for name in names),
    ]
    lines += [f"{part:<30}" + "".join(f"{columns[name][part] / _GIB:>10.2f}" for name in names) for part in columns[names[0]]]
    sapo, ppo = columns["sapo"]["peak"], columns["ppo"]["peak"]
    lines += ["", f"SAPO needs {1 - sapo / ppo:.1%} less than PPO of the same turn-level GAE with a critic of its own."]
    if c.model.dtype == "bfloat16" and (felt := 256 * c.optim.lr) < 0.01:
        lines.append(
            f"Warning: a step of optim.lr={c.optim.lr:g} is rounded away in bfloat16 weights larger than about {felt:.1g}; use model.dtype=float32."
        )
    if c.rollout.engine == "vllm":
        lines.append("The rollout engine's own memory (its weights and cache) comes on top, by its settings.")
    return "\n".join(lines)
