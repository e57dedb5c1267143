"""``--dry-run``: everything that can be checked without working, and what would run, in words."""

from __future__ import annotations

from pathlib import Path

import torch

from sapo_fast import backends, checkpoint
from sapo_fast.config import Config, to_yaml


def describe(config: Config, resume: str) -> str:
    """The resolved configuration as YAML, then the plan as comments (so that the whole is a valid configuration file again).

    ValueError or ModuleNotFoundError for what would stop the run: a bad environment, a missing model or package, an unusable device.
    """
    from sapo_fast.models.load import resolve_device
    from sapo_fast.setup_run import check_engine

    check_engine(config)
    device = resolve_device(config.model.device)
    plan = [
        ("output", _output(config, resume)),
        ("environment", _environment(config)),
        ("model", _model(config, device)),
        (
            "iterations",
            f"{config.iterations} of {config.episodes_per_iteration} episodes, {config.value_warmup.iterations} of them value warm-up",
        ),
        ("rollout", f"{config.rollout.engine}, {'each episode at its own pace' if config.rollout.streams() else 'in lock-step'}"),
        ("evaluation", _evaluation(config)),
        ("device", f"{device}, torch {torch.__version__}, {config.threads or torch.get_num_threads()} threads"),
    ]
    for operation in backends.OPERATIONS:
        # targets are made on the CPU, the loss where the model is
        where = torch.device("cpu") if operation == "turn_gae" else device
        dtype = torch.float32 if operation == "turn_gae" else getattr(torch, config.model.dtype)
        plan.append((operation, f"{backends.select(operation, 'auto', where, dtype)[0]} on {where.type}"))
    width = max(len(name) for name, _ in plan)
    return to_yaml(config) + "\n# would run:\n" + "\n".join(f"# {name:<{width}}  {text}" for name, text in plan)


def _output(config: Config, resume: str) -> str:
    folder = config.run_dir()
    if resume == "never":
        return f"{folder}, from the start"
    found = checkpoint.latest(folder / "checkpoints") if resume == "auto" else Path(resume)
    return f"{folder}, from the start" if found is None else f"{folder}, going on from {found}"


def _environment(config: Config) -> str:
    from sapo_fast.envs import make_suite
    from sapo_fast.setup_run import tasks_of

    suite = make_suite(config.env.name, config.env.options)
    train, _ = tasks_of(config, suite)
    env = suite.make()
    try:
        env.reset(seed=config.seed, options={"task": train[0]})
    finally:
        env.close()
    if config.model.path == "tiny":
        from sapo_fast.models import tiny

        tiny.expert_episodes(config, suite, 1)
    return f"{suite.name}, {len(train):,} training and {len(suite.eval_tasks()):,} evaluation tasks, at most {config.env.max_turns} turns"


def _evaluation(config: Config) -> str:
    when = f"every {config.eval.every} iterations, before and after" if config.eval.every else "before and after"
    return f"the first {config.eval.episodes} evaluation tasks at temperature {config.eval.temperature:g}, {when}"


def _model(config: Config, device: torch.device) -> str:
    count = _parameters(config)
    name = "tiny (embedded, warm-started, cached)" if config.model.path == "tiny" else config.model.path
    width = getattr(torch, config.model.dtype).itemsize
    networks = 2 if config.algorithm in ("ppo", "ppo_token") else 1
    reference = config.loss.kl_coef > 0 or (config.value_warmup.iterations > 0 and config.value_warmup.kl_coef > 0)
    # weights, gradients and AdamW's two moments of every trained network; the reference is weights alone
    size = count * width * (4 * networks + reference)
    what = "policy and critic" if networks == 2 else "policy"
    return (
        f"{name}, about {count / 1e6:.3g} M parameters; {what} with gradients and AdamW{', and a frozen reference' if reference else ''}: "
        f"about {size / 2**20:,.0f} MB on {device}, activations apart"
    )


class _AnyTokenizer:
    """As much of a tokenizer as the embedded model's shape depends on."""

    eos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def _parameters(config: Config) -> int:
    """Number of parameters, without reading or making a weight."""
    if config.model.path == "tiny":
        from sapo_fast.models import tiny

        with torch.device("meta"):
            model = tiny.build_model(_AnyTokenizer(tiny.VOCAB - 2), config.rollout.max_context_tokens, seed=0)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        from sapo_fast.models.load import locate

        where, extra = locate(config.model.path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(where), **extra))
    return sum(parameter.numel() for parameter in model.parameters())
