"""A causal LM made ready to be policy, V and Q at once: the model, its tokenizer, and the two reserved ids.

Legend: L packed tokens, H hidden, V vocabulary (LM-head rows).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from sapo_fast.batch import MicroBatch
from sapo_fast.models.packed import lm_head_of, packed_hidden, prepare
from sapo_fast.value_tokens import check_value_tokens, choose_value_tokens, equalize_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sapo_fast.config import ModelSection

log = logging.getLogger("sapo_fast")
SIDE_FILE = "sapo_fast.json"  # beside a saved model: its value ids and readout scale


@dataclass
class Policy:
    """One causal LM as policy, V and Q."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    value_token_ids: tuple[int, int]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def hidden(self, micro: MicroBatch) -> torch.Tensor:
        """Last hidden states [L, H] of a packed micro-batch."""
        return packed_hidden(self.model, micro.input_ids, micro.position_ids, micro.cu_seqlens, micro.max_seqlen)

    def lm_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """LM head weight [V, H] and bias [V] or None, live parameters."""
        return lm_head_of(self.model)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def frozen_copy(self) -> Policy:
        """A reference that never moves."""
        model = copy.deepcopy(self.model)
        model.requires_grad_(False)
        return Policy(model.eval(), self.tokenizer, self.value_token_ids)


class Critic(nn.Module):
    """PPO's separate critic: a second network of the policy's size with a scalar head.

    It starts as a copy of the policy's backbone with head = row(w+) - row(w-), so its first values are the policy's own V. The head is held as a
    two-row LM head with value ids (0, 1): the public loss and readout then serve the critic as they serve the policy.
    """

    value_token_ids = (0, 1)

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        model = copy.deepcopy(policy.model)
        weight, _ = lm_head_of(model)
        plus, minus = policy.value_token_ids
        rows = torch.stack([weight[plus] - weight[minus], torch.zeros_like(weight[plus])]).detach().clone()
        self.model = model
        self.model.set_output_embeddings(nn.Identity())  # no vocabulary head in a critic: its memory is not charged for one
        self.head = nn.Parameter(rows)

    def hidden(self, micro: MicroBatch) -> torch.Tensor:
        return packed_hidden(self.model, micro.input_ids, micro.position_ids, micro.cu_seqlens, micro.max_seqlen)


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"model.device must name a torch device, got {device!r}: {error}") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"model.device is {device!r} but torch sees no CUDA device; use model.device=cpu, or install a CUDA build of torch"
        )
    return resolved


def locate(path: str) -> tuple[Path, dict[str, str]]:
    """The directory to load from and, for a .gguf file, the argument that names it.

    ValueError: nothing to load there. ModuleNotFoundError: a .gguf file, and not the packages that read one.
    """
    where = Path(path).expanduser()
    if (where / "config.json").is_file():
        return where, {}
    found = [where] if where.is_file() and where.suffix == ".gguf" else sorted(where.glob("*.gguf")) if where.is_dir() else []
    if len(found) == 1:
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(f"reading {found[0].name} needs the package {package}: pip install 'sapo_fast[gguf]'")
        return found[0].parent, {"gguf_file": found[0].name}
    raise ValueError(f"model.path must be 'tiny', a directory with config.json, or a .gguf file; got {path!r}, which is none of them")


def prepare_value_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, wanted: str | tuple[int, int], side: dict, equal_rows: bool
) -> tuple[int, int]:
    """Decide w+ and w- once: what the config names, else what the model was saved with, else the rule of method.md (Settings)."""
    weight, bias = lm_head_of(model)
    if wanted != "auto":
        ids = (int(wanted[0]), int(wanted[1]))
    elif "value_token_ids" in side:
        ids = (int(side["value_token_ids"][0]), int(side["value_token_ids"][1]))
    else:
        ids = choose_value_tokens(tokenizer, weight)
    check_value_tokens(ids, tokenizer=tokenizer, vocab_size=weight.shape[0])
    if equal_rows and not side.get("trained_readout", False):
        equalize_rows(weight, ids, lm_head_bias=bias)
    log.info("value tokens w+ = %d, w- = %d", *ids)
    return ids


def load_policy(section: ModelSection) -> Policy:
    """Load a Hugging Face causal LM from disk and prepare it.

    Raises:
        ValueError: nothing to load at the path, an unusable device, or unusable value tokens.
        ModuleNotFoundError: transformers is missing (``pip install 'sapo_fast[train]'``), or what reads a .gguf file (``'sapo_fast[gguf]'``).
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("loading a model needs transformers: pip install 'sapo_fast[train]'") from error
    where, extra = locate(section.path)
    device = resolve_device(section.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(where), **extra)
    # Where transformers can keep GGUF weights packed, it must be told to unpack them: packed ones can neither be trained nor saved.
    if extra and hasattr(transformers, "GgufConfig"):
        extra = extra | {"quantization_config": transformers.GgufConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(str(where), dtype=getattr(torch, section.dtype), **extra)
    side = json.loads((where / SIDE_FILE).read_text()) if (where / SIDE_FILE).is_file() else {}
    return finish_policy(model.to(device), tokenizer, section, side)


def finish_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: ModelSection, side: dict) -> Policy:
    prepare(model)
    ids = prepare_value_tokens(model, tokenizer, section.value_tokens, side, section.equal_value_rows)
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _switch_off_dropout(model)
    return Policy(model.eval(), tokenizer, ids)


def _switch_off_dropout(model: PreTrainedModel) -> None:
    # Dropout would make the old and the new log-probs of the same weights differ. Checkpointing needs train(), so eval() alone is not enough.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
