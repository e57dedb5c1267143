"""Checkpoints that survive being killed and never run code: safetensors for tensors, JSON for everything else.

One checkpoint is one directory, ``iteration-000010/``: ``<group>.safetensors`` for each group of tensors (policy, critic, optimizer),
``state.json`` (counters, generators, optimizer settings) and ``manifest.json`` (size and SHA-256 of each file). It is written under
another name, flushed to the disk and renamed, so that a checkpoint is whole or absent. Nothing that the manifest does not list is opened,
nothing is unpickled.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

FORMAT = 1
SIDE_FILE = "sapo_fast.json"  # the name that models.load looks for
_NAME = re.compile(r"^iteration-(\d{6,})(?:-(\d+))?$")  # the second number: the same iteration saved again
_GROUP = re.compile(r"^[a-z][a-z0-9_]*$")


class CheckpointError(ValueError):
    """A checkpoint that must not be used: which file, what is wrong with it."""


class Checkpoint(NamedTuple):
    """What ``load`` read. ``tensors[group][name]`` on the CPU; ``state`` as saved, tuples as lists."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    iteration: int


def save(
    directory: str | Path, iteration: int, *, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write ``directory/iteration-<iteration>`` atomically, then delete all but the last ``keep`` checkpoints.

    ``tensors`` by group, each a flat name -> tensor mapping without two names for one memory (``unique_tensors``). ``state``: JSON values
    with text keys. Later iterations found in ``directory`` are of an abandoned continuation (the run went on from before them): deleted.
    Raises ValueError for what cannot be stored; OSError (disk full, read-only) leaves the earlier checkpoints as they are.
    """
    if iteration < 0 or keep < 1:
        raise ValueError(f"iteration must be >= 0 and keep >= 1, got {iteration} and {keep}")
    for group in tensors:
        if not _GROUP.match(group):
            raise ValueError(f"a group of tensors must be named in lower case letters, digits and _, got {group!r}")
    _check_json(state, "state")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob(".tmp-*"):  # left by a process that was killed while saving
        shutil.rmtree(stale, ignore_errors=True)
    again = [attempt for number, attempt, _ in _found(directory) if number == iteration]
    target = directory / (f"iteration-{iteration:06d}" + (f"-{max(again) + 1}" if again else ""))
    temporary = directory / f".tmp-{target.name}-{os.getpid()}"
    try:
        temporary.mkdir()
        for group, named in tensors.items():
            _save_tensors(named, temporary / f"{group}.safetensors")
        (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
        files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "iteration": iteration, "files": files}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    kept = 0
    for number, _, path in reversed(_found(directory)):
        superseded = path != target and number >= iteration
        kept += not superseded
        if superseded or kept > keep:
            _remove(path)
    return target


def load(path: str | Path) -> Checkpoint:
    """Read one checkpoint directory after verifying every file against the manifest. CheckpointError (a ValueError) names the bad file."""
    path = Path(path)
    manifest = _verify(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors, state = {}, {}
    for name in manifest["files"]:
        try:
            if name.endswith(".safetensors"):
                tensors[name.removesuffix(".safetensors")] = load_file(path / name)
            elif name == "state.json":
                state = json.loads((path / name).read_text(encoding="utf-8"))
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path / name} is not what its name says ({error})") from None
    return Checkpoint(tensors, state, manifest["iteration"])


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint of ``directory`` whose every file is as it was written; damaged ones are passed over with a warning.

    None: there is no checkpoint. Raises CheckpointError if there are some and all are damaged: starting anew must be the user's choice.
    """
    damaged = []
    for _, _, path in reversed(_found(Path(directory))):
        try:
            _verify(path)
            return path
        except CheckpointError as error:
            log.warning("checkpoint passed over: %s", error)
            damaged.append(str(error))
    if damaged:
        raise CheckpointError("every checkpoint is damaged; delete them, or choose another output_dir:\n" + "\n".join(damaged))
    return None


def iteration_of(path: Path) -> int:
    """Iterations completed at a checkpoint that ``latest`` gave."""
    match = _NAME.match(path.name)
    if match is None:
        raise ValueError(f"a checkpoint's directory is named iteration-NNNNNN, got {path}")
    return int(match[1])


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with each memory once: of tied weights (LM head = embedding) only the first name is kept."""
    seen = set()
    unique = {}
    for name, tensor in model.state_dict().items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        unique[name] = tensor
    return unique


def copy_into(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy ``saved`` into the live tensors ``own`` (``unique_tensors(model)``, or another mapping that was saved).

    In place, so that ties and the optimizer's references hold. ValueError if names, shapes or dtypes differ, before anything is copied.
    """
    missing, extra = own.keys() - saved.keys(), saved.keys() - own.keys()
    if missing or extra:
        raise ValueError(
            f"the checkpoint is of another model: missing {sorted(missing)[:3]}, unexpected {sorted(extra)[:3]} "
            f"({len(missing)} and {len(extra)} in all); use the configuration that it was saved with"
        )
    for name, tensor in saved.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise ValueError(
                f"the checkpoint is of another model: {name} is {tuple(tensor.shape)} {tensor.dtype} there and "
                f"{tuple(own[name].shape)} {own[name].dtype} here; use the configuration that it was saved with"
            )
    with torch.no_grad():
        for name, tensor in saved.items():
            own[name].copy_(tensor)


def optimizer_to_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split ``optimizer.state_dict()`` into tensors, named ``<parameter index>.<key>``, and JSON settings."""
    whole = optimizer.state_dict()
    tensors, scalars = {}, {}
    for index, values in whole["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                scalars[f"{index}.{key}"] = value
    groups = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()} for group in whole["param_groups"]
    ]
    return tensors, {"groups": groups, "scalars": scalars}


def optimizer_from_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore, bitwise, what ``optimizer_to_tensors`` gave into an optimizer over the same parameters. ValueError if they are others."""
    current = optimizer.state_dict()["param_groups"]
    saved = state["groups"]
    if [group["params"] for group in saved] != [group["params"] for group in current]:
        count = [sum(len(group["params"]) for group in groups) for groups in (saved, current)]
        raise ValueError(
            f"the checkpoint's optimizer has {count[0]} parameters in {len(saved)} groups, this one {count[1]} in {len(current)}"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **state["scalars"]}.items():
        index, key = name.split(".", 1)
        if isinstance(value, Tensor) and value.dim() and value.shape != parameters[int(index)].shape:
            raise ValueError(
                f"the checkpoint's optimizer is of another model: {name} is {tuple(value.shape)}, "
                f"its parameter {tuple(parameters[int(index)].shape)}"
            )
        values.setdefault(int(index), {})[key] = value
    groups = [
        {key: tuple(value) if isinstance(now.get(key), tuple) else value for key, value in group.items()}
        for group, now in zip(saved, current, strict=True)
    ]
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def generator_state(generator: torch.Generator | np.random.Generator | random.Random) -> Any:
    """One generator's state as JSON values."""
    if isinstance(generator, torch.Generator):
        return _pack(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return _arrays_to_lists(generator.bit_generator.state)
    return list(generator.getstate())


def set_generator_state(generator: torch.Generator | np.random.Generator | random.Random, state: Any) -> None:
    """Set a generator to what ``generator_state`` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(_unpack(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate((state[0], tuple(state[1]), state[2]))


def seed_all(seed: int) -> None:
    """Seed the global generators (torch on every device, numpy, random): two runs of one configuration then draw alike, resumed or not."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> dict[str, Any]:
    """The global generators (torch CPU, every CUDA device, numpy, random) as JSON values."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": _pack(torch.get_rng_state()),
        "cuda": [_pack(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [name, keys.tolist(), position, has_gauss, gauss],
        "python": list(random.getstate()),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the global generators to what ``rng_state`` gave. Another number of CUDA devices: those that both have, with a warning."""
    torch.set_rng_state(_unpack(state["torch"]))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices != len(state["cuda"]):
        log.warning("the checkpoint has the generators of %d CUDA devices, this machine has %d", len(state["cuda"]), devices)
    for device, packed in zip(range(devices), state["cuda"], strict=False):
        torch.cuda.set_rng_state(_unpack(packed), device)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))


def export_hf(model: nn.Module, tokenizer: Any, value_token_ids: tuple[int, int], directory: str | Path, side: Mapping[str, Any]) -> Path:
    """Write a plain Hugging Face model directory whose generation never produces w+ or w-, and ``sapo_fast.json`` to read V and Q with.

    ``side``: JSON values kept in ``sapo_fast.json`` beside the value ids (r_max, tau_v, readout, trained_readout).
    Atomic. An earlier export in ``directory`` is replaced; a directory that holds anything else is refused (ValueError).
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or (any(directory.iterdir()) and not (directory / SIDE_FILE).is_file())):
        raise ValueError(f"export needs a new or empty directory (or an earlier export to replace), got {directory}; choose another")
    _check_json(side, "side")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.parent / f".tmp-{directory.name}-{os.getpid()}"
    old = directory.parent / f".old-{directory.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        generation = copy.deepcopy(model.generation_config)  # the live model's own is not touched
        generation.suppress_tokens = sorted({*(generation.suppress_tokens or []), *value_token_ids})
        generation.save_pretrained(temporary)
        (temporary / SIDE_FILE).write_text(json.dumps({"value_token_ids": list(value_token_ids), **side}, indent=1), encoding="utf-8")
        if directory.exists():
            os.rename(directory, old)
        _publish(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return directory


def _found(directory: Path) -> list[tuple[int, int, Path]]:
    """(iteration, attempt, path) of every finished checkpoint, oldest first."""
    matches = [(match, path) for path in directory.glob("iteration-*") if (match := _NAME.match(path.name))]
    return sorted((int(match[1]), int(match[2] or 0), path) for match, path in matches)


def _verify(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        known = manifest["format"] == FORMAT and isinstance(manifest["iteration"], int) and "state.json" in files
    except FileNotFoundError:
        raise CheckpointError(f"{path / 'manifest.json'} is missing; this is no checkpoint, or a damaged one") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path / 'manifest.json'} is damaged ({error})") from None
    if not known:
        raise CheckpointError(f"{path / 'manifest.json'} is of format {manifest['format']}, this version reads {FORMAT}")
    for name, (size, digest) in files.items():
        file = path / name
        if Path(name).name != name or not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes instead of {size}: it is truncated or was changed")
        if _sha256(file) != digest:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's")
    return manifest


def _save_tensors(named: Mapping[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    memories: dict[int, str] = {}
    plain = {}
    for name, tensor in named.items():
        tensor = tensor.detach()
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        plain[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
        other = memories.setdefault(tensor.data_ptr(), name) if tensor.numel() and whole else name
        if other != name:
            raise ValueError(f"{file.stem}: {name!r} and {other!r} are one memory; save a model by unique_tensors(model)")
    save_file(plain, file)


def _publish(temporary: Path, target: Path) -> None:
    """Flush every file and the directory to the disk, then give it its name: after a power cut it is there whole or not at all."""
    for file in temporary.iterdir():
        _fsync(file)
    _fsync(temporary)
    os.rename(temporary, target)
    _fsync(target.parent)


def _remove(path: Path) -> None:
    doomed = path.with_name(f".tmp-{path.name}")  # renamed first: a half-deleted checkpoint must not look like one
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; keys must be text to survive JSON")
            _check_json(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_json(inner, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ValueError(f"{where} is a {type(value).__name__}; a checkpoint's state takes JSON values only (tensors go to tensors=)")


def _arrays_to_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays_to_lists(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _pack(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _unpack(packed: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.uint8)
