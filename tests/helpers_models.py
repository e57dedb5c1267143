"""Tiny random models and a tiny tokenizer for tests, built offline and fixed by a seed."""

from __future__ import annotations

import torch

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<w+>", "<w->"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCAB = 97


def tiny_model(
    kind: str = "qwen2", *, vocab: int = VOCAB, hidden: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 2, seed: int = 0
):
    """A random causal LM in float32 and eval mode. ``kind``: "qwen2" (tied LM head, biases in q, k, v) or "llama" (untied)."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_class, model_class = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=kind == "qwen2",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for p in model.parameters():  # larger than the default, so that attention and the distribution are far from uniform
                if p.ndim == 2:
                    p.normal_(std=0.25)
        for layer in model.model.layers:  # not SDPA's own default, so that a model's scale must be handed on
            layer.self_attn.scaling = 0.3
    return model


def tiny_tokenizer(template: str | None = CHATML):
    """A byte-level BPE tokenizer trained on a few lines, with ChatML's special tokens and ``template``; its eos is <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(SPECIALS) + len(alphabet) + 40
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    lines = ["hello hello hello", "go north", "go south", "take the lamp", "look", "user assistant system"] * 8
    core.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template)
