"""The typed configuration of a training run: YAML file + ``key=value`` overrides, validated whole before any work.

Every field is documented where it stands; docs/configuration.md is made from this file (``python -m sapo_fast.config > docs/configuration.md``).
Units: tokens, turns, episodes, iterations (one rollout and its updates), steps (one optimizer step).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # YAML has lists only, and strict validation takes none for a tuple


class Section(BaseModel):
    # strict: a quoted number, or true for 1, is a mistake worth telling; YAML already gives every value its type
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=())


class ModelSection(Section):
    """The policy, which is also V and Q."""

    path: str = Field("tiny", min_length=1, description="`tiny` (embedded), a directory with a Hugging Face causal LM, or a .gguf file")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights; on CPU bfloat16 is several times slower")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="`auto`: cuda if there is one, else cpu; or cpu, cuda, cuda:N")
    value_tokens: Annotated[Literal["auto"] | tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], BeforeValidator(_pair)] = Field(
        "auto", description="ids of w+ and w-; `auto`: two LM-head rows beyond the tokenizer, else two reserved specials that never occur"
    )
    equal_value_rows: bool = Field(
        True, description="copy w+'s LM-head row to w- at the start, so that V = Q = 0 (a model whose readout is trained keeps its rows)"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory, about a third more time")


class WarmStartSection(Section):
    """The embedded model's pre-training on the imperfect expert's episodes (all tokens, and V and Q on the returns). Used by model.path=tiny only."""

    episodes: int = Field(3000, ge=1, description="expert episodes generated")
    steps: int = Field(400, ge=0, description="optimizer steps")
    batch_tokens: int = Field(8192, ge=64, description="tokens a step, before packing")
    lr: float = Field(3e-3, gt=0, description="peak learning rate")
    value_coef: float = Field(
        0.5, ge=0, description="weight of the V and Q regression on the demonstrations' discounted returns; 0 leaves the value cold"
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
    think: bool = Field(False, description="ask for `<think>...</think>` before the action")
    action_tags: bool = Field(False, description="ask for `<action>...</action>`")
    admissible: bool = Field(False, description="list the admissible commands in the prompt")
    invalid_rule: Literal["format", "admissible"] = Field("format", description="what counts as an invalid action")


class RolloutSection(Section):
    """How episodes are generated."""

    engine: Literal["hf"] = Field("hf", description="the generation engine")
    temperature: float = Field(1.0, gt=0, description="of sampling, and of the policy in the loss")
    max_response_tokens: int = Field(16, ge=1, description="response budget of a turn")
    max_context_tokens: int = Field(1024, ge=8, description="prompt + response; an episode whose prompt leaves no room ends as `overlong`")
    max_live_episodes: int = Field(64, ge=1, description="episodes played side by side")


class LossSection(Section):
    """The fields of `sapo_fast.LossConfig` (docs/method.md, Loss)."""

    clip_low: float | None = Field(0.2, gt=0, description="the ratio is clipped below at 1 - clip_low; null: never")
    clip_high: float | None = Field(0.2, gt=0, description="the ratio is clipped above at 1 + clip_high; null: never")
    dual_clip: float | None = Field(3.0, gt=1, description="bound on ratio x |advantage| for negative advantages; null: none")
    v_clip: float | None = Field(
        0.2, gt=0, description="how far V may move from its old value, in normalised units (reward / r_max); null: any"
    )
    q_clip: float | None = Field(0.2, gt=0, description="the same for Q")
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
    """First iterations that train the value alone (docs/method.md, What goes wrong)."""

    iterations: int = Field(5, ge=0, description="how many; 0: none")
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
                f"({self.rollout.max_context_tokens}); raise rollout.max_context_tokens"
            )
        if self.model.value_tokens != "auto" and self.model.value_tokens[0] == self.model.value_tokens[1]:
            raise ValueError(f"model.value_tokens must be two different ids, got {list(self.model.value_tokens)}; use model.value_tokens=auto")
        unknown = set(re.findall(r"\{(.*?)\}", self.output_dir)) - {"algorithm", "seed"}
        if unknown:
            raise ValueError(f"output_dir may hold {{algorithm}} and {{seed}} only, got {self.output_dir!r}; take {{{min(unknown)}}} out")
        return self

    def run_dir(self) -> Path:
        """``output_dir`` with its placeholders filled in."""
        return Path(self.output_dir.replace("{algorithm}", self.algorithm).replace("{seed}", str(self.seed))).expanduser()


class _Loader(yaml.SafeLoader):
    """YAML with floats as people write them (1e-6) and without silently overwritten keys."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ValueError(f"line {line}: keys must be text, got {key!r}; quote it")
        if key in seen:
            raise ValueError(f"line {line}: key {key!r} is set again (first on line {seen[key]}); keep one")
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def load_config(path: str | None, overrides: list[str]) -> Config:
    """Read ``path`` (YAML; None: the defaults alone), lay ``key=value`` overrides over it, validate the whole.

    Raises ValueError before any work, one line a mistake: the dotted key, the rule, the value got, the fix.
    """
    data = _read(path) if path is not None else {}
    mistakes = [f"{path}: {text}" for text in _unknown_keys(data)]
    given: dict[str, str] = {}
    for override in overrides:
        try:
            key, value = _override(override)
            for other in given:
                if key == other or key.startswith(other + ".") or other.startswith(key + "."):
                    raise ValueError(f"{override!r} and {given[other]!r} set the same thing; keep one")
            given[key] = override
            if not mistakes:
                _put(data, key.split("."), value)
        except ValueError as error:
            mistakes.append(f"override {error}")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(error, data))) from None


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that ``load_config`` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def config_hash(*parts: BaseModel | Any) -> str:
    """16 hex digits of SHA-256 over sections or plain JSON values; equal settings give equal hashes, whatever the order of keys."""
    plain = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting: its dotted key and pydantic's description of it, in the order of the schema."""
    for name, field in Config.model_fields.items():
        if _is_section(field):
            for inner, inner_field in field.annotation.model_fields.items():
                yield f"{name}.{inner}", inner_field
        else:
            yield name, field


def rule(field: FieldInfo) -> str:
    """What a setting may be, in words: 'a number > 0, or null'."""
    return _rule(field.annotation, field.metadata)


def reference_page() -> str:
    """docs/configuration.md: every setting with its default, its rule and its meaning."""
    lines = [
        "# Configuration",
        "",
        "Made by `python -m sapo_fast.config > docs/configuration.md`; change `sapo_fast/config.py` instead of this page.",
        "",
        "A run is described by one YAML file and `key=value` overrides, laid over the defaults below:",
        "`sapo-fast train --config configs/demo.yaml optim.lr=1e-4 seed=3`. An unknown key, a wrong type or a value out of range stops",
        "the command before any work, with the nearest valid name. `sapo-fast train ... --dry-run` prints the resolved whole.",
    ]
    section = None
    for key, field in fields():
        name, _, inner = key.rpartition(".")
        if name != section:
            section = name
            doc = Config.model_fields[name].annotation.__doc__ if name else "The run."
            lines += ["", f"## {name or 'Top level'}", "", doc, "", "| key | default | must be | meaning |", "|---|---|---|---|"]
        default = yaml.safe_dump(_plain(field.get_default(call_default_factory=True)), default_flow_style=True, width=1000)
        cells = [f"`{key}`", f"`{default.removesuffix(chr(10)).removesuffix('...').strip()}`", rule(field), field.description]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _read(path: str) -> dict:
    file = Path(path).expanduser()
    if not file.is_file():
        known = sorted(str(found) for folder in {file.parent, Path("configs")} if folder.is_dir() for found in folder.glob("*.y*ml"))
        near = difflib.get_close_matches(str(file), known, n=1, cutoff=0.3) or difflib.get_close_matches(file.name, known, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]}?" if near else "; give the path of a YAML file, or none for the defaults"
        raise ValueError(f"--config must name an existing YAML file, got {path}{hint}")
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold 'key: value' lines, got {type(data).__name__}; see docs/configuration.md")
    # a section whose lines are all commented out reads as null; it means the defaults
    return {key: {} if value is None and key in Config.model_fields and _is_section(Config.model_fields[key]) else value for key, value in data.items()}


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"{text!r} must have the form key=value, for example optim.lr=1e-5")
    field = Config.model_fields.get(key)
    if field is not None and _is_section(field):
        inner = next(iter(field.annotation.model_fields))
        raise ValueError(f"{text!r}: {key} is a section; set its keys one by one, for example {key}.{inner}=...")
    head, *rest = key.split(".")
    nested: Any = None
    for part in reversed(rest):
        nested = {part: nested}
    for mistake in _unknown_keys({head: nested}):
        raise ValueError(f"{text!r}: {mistake}")
    try:
        return key, yaml.load(value, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{text!r}: the value is not valid YAML: {' '.join(str(error).split())}; quote it") from None


def _put(data: dict, parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ValueError(f"{'.'.join(parts)}: {part} is no mapping in the file, got {data!r}; make it one")
    data[parts[-1]] = value


def _unknown_keys(data: dict) -> Iterator[str]:
    known = [key for key, _ in fields()]
    for head, inner in data.items():
        field = Config.model_fields.get(head)
        if field is None:
            yield _no_such_key(head, known)
        elif _is_section(field) and isinstance(inner, dict):
            for name in inner:
                if name not in field.annotation.model_fields:
                    yield _no_such_key(f"{head}.{name}", known)


def _no_such_key(key: str, known: list[str]) -> str:
    if key in known:  # 'optim.lr: 1' as one key of the file
        head, inner = key.split(".")
        return f"key {key!r} must be nested in a file: write '{head}:' and, indented below it, '{inner}: ...'"
    section, _, last = key.rpartition(".")
    # the same name in another section first, then a near name in the same section, then a near name anywhere
    near = [name for name in known if name.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(key, [name for name in known if name.rpartition(".")[0] == section], n=1)
    near = near or difflib.get_close_matches(key, known + list(Config.model_fields), n=1, cutoff=0.5)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else "docs/configuration.md lists every key")


def _explain(error: ValidationError, data: dict) -> Iterator[str]:
    """One line a setting, in our words: pydantic reports each branch of a union apart."""
    by_key = dict(fields())
    told = set()
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        key = next((k for k in (".".join(where[:2]), ".".join(where[:1])) if k in by_key), None)
        if key is None:
            section = where[0] if where else ""
            yield (
                f"{section} must be a section of 'key: value' lines, got {item['input']!r}; see docs/configuration.md"
                if section
                else item["msg"].removeprefix("Value error, ")
            )
        elif key not in told:
            told.add(key)
            value: Any = data
            for part in key.split("."):
                value = value[part]
            default = _plain(by_key[key].get_default(call_default_factory=True))
            yield f"{key} must be {rule(by_key[key])}, got {value!r}; the default is {key}={json.dumps(default)}"


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _rule(kind: Any, metadata: list | tuple) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner = [part for extra in args[1:] for part in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _rule(args[0], inner)
    if origin in (Union, UnionType):
        words = [_rule(arg, metadata) for arg in args if arg is not NoneType]
        return " or ".join(words) + (", or null" if NoneType in args else "")
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(arg) for arg in args)
    if origin is tuple:
        return f"[{', '.join(_rule(arg, ()) for arg in args)}]"
    if origin is dict:
        return "a mapping of names to " + ("anything" if args[1] is Any else "numbers")
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    bounds = [f"{sign} {getattr(part, name):g}" for part in metadata for name, sign in _BOUNDS if getattr(part, name, None) is not None]
    patterns = [f"matching `{part.pattern}`" for part in metadata if getattr(part, "pattern", None)]
    return " ".join([words, " and ".join(bounds), *patterns]).replace("  ", " ").strip()


_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))

if __name__ == "__main__":
    print(reference_page(), end="")
