"""Memory by shapes: against published parameter counts, and sums worked by hand."""

from pathlib import Path

import pytest

from sapo_fast.cli import main
from sapo_fast.config import load_config
from sapo_fast.memory_plan import SHAPES, Shape, memory, model_shape

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = sorted(path.name for kind in ("alfworld", "webshop") for path in CONFIGS.glob(f"{kind}_*.yaml"))


@pytest.mark.parametrize(
    ("name", "count"),
    [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-7b", 7_615_616_512), ("qwen3-14b", 14_768_307_200)],
)
def test_parameters_as_published(name, count):
    assert SHAPES[name].parameters == count


def test_parameters_as_transformers_counts(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    sizes = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80, vocab_size=101)
    for config in (LlamaConfig(**sizes, tie_word_embeddings=True), Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False)):
        config.save_pretrained(tmp_path / config.model_type)
        model = AutoModelForCausalLM.from_config(config)
        assert model_shape(str(tmp_path / config.model_type)).parameters == sum(p.numel() for p in model.parameters())


def test_cache_and_activations_by_hand():
    shape = Shape(hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, mlp=8, vocab=10, tied=True)
    assert shape.cache(5, 2) == 2 * 2 * 1 * 2 * 5 * 2  # keys and values, layers, heads, dims, tokens, bytes
    block = 6 * 4 + 4 * 8 + 3 * 4 + 4 * 2
    assert shape.activations(5, 2, False) == 5 * 2 * 2 * block and shape.activations(5, 2, True) == 5 * 2 * (2 * 4 + block)


def test_the_parts_add_up():
    config = load_config(str(CONFIGS / "alfworld_qwen2.5_1.5b.yaml"), [])
    sapo, ppo, grpo = (memory(config, algorithm) for algorithm in ("sapo", "ppo", "grpo"))
    p = 1_543_714_304 * 4
    assert (sapo["policy"], sapo["policy AdamW"], sapo["reference"], sapo["critic, gradient and AdamW"]) == (p, 2 * p, p, 0)
    assert ppo["critic, gradient and AdamW"] == 4 * p and ppo["peak"] - sapo["peak"] == 4 * p and grpo["peak"] == sapo["peak"]
    assert sapo["key-value cache"] == 2 * 28 * 2 * 128 * 128 * 2560 * 4
    assert sapo["peak"] == 5 * p + max(sapo["key-value cache"], sapo["activations (estimate)"] + sapo["logits of a chunk"])
    assert (
        memory(load_config(str(CONFIGS / "alfworld_qwen2.5_1.5b.yaml"), ["loss.kl_coef=0", "value_warmup.iterations=0"]), "sapo")[
            "reference"
        ]
        == 0
    )


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("algorithm", ["sapo", "ppo", "grpo"])
def test_recipes_are_valid_and_planned(name, algorithm, capsys):
    assert main(["plan", str(CONFIGS / name), f"algorithm={algorithm}"]) in (0, None)
    out = capsys.readouterr().out
    assert "GiB on the device" in out and "less than PPO" in out
    config = load_config(str(CONFIGS / name), [])
    webshop = "webshop" in name
    assert (config.env.max_turns, config.optim.minibatch_turns) == ((15, 64) if webshop else (50, 256))
    assert (config.iterations, config.episodes_per_iteration, config.optim.lr, config.loss.kl_coef) == (150, 128, 1e-6, 0.01)
    assert (config.advantage.gamma, config.advantage.lam, config.eval.temperature, config.prompt.window) == (0.95, 0.95, 0.4, 2)
    assert config.rollout.max_context_tokens == (4096 if webshop else 2048) + config.rollout.max_response_tokens


def test_bfloat16_and_small_steps_are_warned_of(capsys):
    import torch

    weight = torch.tensor([0.02, 1e-4], dtype=torch.bfloat16)
    assert (weight + 1e-6 == weight).tolist() == [True, False], "what the warning is about"
    for dtype, lr, warned in (("bfloat16", 1e-6, True), ("bfloat16", 1e-3, False), ("float32", 1e-6, False)):
        main(["plan", str(CONFIGS / RECIPES[0]), f"model.dtype={dtype}", f"optim.lr={lr}"])
        assert ("rounded away in bfloat16" in capsys.readouterr().out) == warned


def test_an_unknown_model_is_refused():
    config = load_config(str(CONFIGS / RECIPES[0]), ["model.path=models/Foo-1B"])
    with pytest.raises(ValueError, match=r"models/Foo-1B is no model directory, and its name is none of qwen2\.5-0\.5b"):
        memory(config, "sapo")
