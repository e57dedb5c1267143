"""What runs beside the model inside vLLM's worker: load weights, and say which weights are held. Named to vLLM as its worker extension.

Importing this module must come before the engine loads its model: on CPU it keeps the linear layers on plain parameters. vLLM would
otherwise compute with oneDNN-packed copies made at start, and a tied LM head's copy would stay on the old weights for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from sapo_fast.rollout.weight_sync import bit_sum


def keep_plain_weights() -> None:
    """CPU builds only; a build without the switch computes with plain parameters anyway, and the proof after a sync tells if not."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops as ops

        ops._supports_onednn = False


keep_plain_weights()


def vocabulary_rows(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "lm_head.bias"))


class WorkerExtension:
    """Methods that vLLM mixes into its worker, called by ``collective_rpc``."""

    def sapo_load(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Copy (Hugging Face name, tensor) pairs into the model. Returns the number of parameters written."""
        with torch.no_grad():
            return len(self.model_runner.model.load_weights(weights))

    def sapo_load_file(self, path: str) -> int:
        """The same from a safetensors file, which is deleted."""
        from safetensors.torch import load_file

        loaded = self.sapo_load(load_file(path).items())
        Path(path).unlink()
        return loaded

    def sapo_bit_sums(self, vocabulary: int | str) -> dict[str, str]:
        """``bit_sum`` of every parameter, as decimal text. Rows beyond the vocabulary are vLLM's own padding and left out."""
        rows = int(vocabulary)
        return {
            name: str(bit_sum(parameter[:rows] if vocabulary_rows(name) else parameter))
            for name, parameter in self.model_runner.model.named_parameters()
        }

    def sapo_groups(self) -> dict[str, list[str]]:
        """Which of the checkpoint's matrices lie in one of vLLM's: {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}."""
        return {name: list(parts) for name, parts in getattr(self.model_runner.model, "packed_modules_mapping", {}).items()}

    def sapo_dtype(self) -> str:
        """Name of the parameters' dtype: "float32", "bfloat16"."""
        return str(next(self.model_runner.model.parameters()).dtype).removeprefix("torch.")
