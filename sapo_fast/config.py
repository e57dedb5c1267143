"""The typed configuration of a training run: YAML file + ``key=value`` overrides, validated whole before any work.

The settings themselves are in sapo_fast.config_schema and are imported from here.
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
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from sapo_fast.config_schema import (
    AdvantageSection,
    CheckpointSection,
    Config,
    EnvSection,
    EvalSection,
    LogSection,
    LossSection,
    ModelSection,
    OptimSection,
    PromptSection,
    RolloutSection,
    Section,
    ValueWarmupSection,
    WarmStartSection,
)

__all__ = [
    "AdvantageSection",
    "CheckpointSection",
    "Config",
    "EnvSection",
    "EvalSection",
    "LogSection",
    "LossSection",
    "ModelSection",
    "OptimSection",
    "PromptSection",
    "RolloutSection",
    "Section",
    "ValueWarmupSection",
    "WarmStartSection",
    "config_hash",
    "load_config",
    "to_yaml",
]


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
    if field.examples:
        return f"one of {', '.join(field.examples)}"
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
        data = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold 'key: value' lines, got {type(data).__name__}; see docs/configuration.md")
    for key, field in Config.model_fields.items():
        if _is_section(field) and key in data and data[key] is None:
            data[key] = {}  # a section whose lines are all commented out reads as null; it means the defaults
    return data


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"{text!r} must have the form key=value, for example optim.lr=1e-5")
    known = dict(fields())
    if key in Config.model_fields and key not in known:
        inner = next(iter(Config.model_fields[key].annotation.model_fields))
        raise ValueError(f"{text!r}: {key} is a section; set its keys one by one, for example {key}.{inner}=...")
    if key not in known and not any(key.startswith(name + ".") and get_origin(field.annotation) is dict for name, field in known.items()):
        raise ValueError(f"{text!r}: {_no_such_key(key)}")
    try:
        return key, yaml.load(value, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{text!r}: the value is not valid YAML ({' '.join(str(error).split())}); quote it") from None


def _put(data: dict, parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            return  # the file has a plain value where a mapping belongs: validation tells that
    data[parts[-1]] = value


def _unknown_keys(data: dict) -> Iterator[str]:
    for head, inner in data.items():
        field = Config.model_fields.get(head)
        if field is None:
            yield _no_such_key(head)
        elif _is_section(field) and isinstance(inner, dict):
            for name in inner:
                if name not in field.annotation.model_fields:
                    yield _no_such_key(f"{head}.{name}")


def _no_such_key(key: str) -> str:
    known = [name for name, _ in fields()]
    if key in known:  # 'optim.lr: 1' as one key of the file
        head, inner = key.split(".")
        return f"key {key!r} must be nested in a file: write '{head}:' and, indented below it, '{inner}: ...'"
    section, _, last = key.rpartition(".")
    in_section = [name for name in known if name.rpartition(".")[0] == section]
    initials = "".join(word[:1] for word in last.split("_"))
    near = (
        difflib.get_close_matches(key, known, n=1, cutoff=0.8)  # a slip in the key or in its section
        or [name for name in known if name.rpartition(".")[2] == last][:3]  # the right name, elsewhere
        or [name for name in in_section if name.rpartition(".")[2] == initials]  # learning_rate: lr
        or difflib.get_close_matches(key, in_section, n=1)
        or difflib.get_close_matches(key, [*known, *Config.model_fields], n=1, cutoff=0.5)
    )
    return f"unknown key {key!r}; " + (f"did you mean {' or '.join(map(repr, near))}?" if near else "docs/configuration.md lists every key")


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
    return " ".join([words, " and ".join(bounds)]).strip()


_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))

if __name__ == "__main__":
    print(reference_page(), end="")
