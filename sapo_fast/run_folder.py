"""One run's folder: may this run write there, does it go on with what is there, is another process at work in it; export from it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sapo_fast import checkpoint
from sapo_fast.config import Config, load_config
from sapo_fast.trackers import check_installed

log = logging.getLogger("sapo_fast")

# settings that decide what the weights in a checkpoint mean, or which episodes come next; a run cannot go on under others
_FIXED = (
    "algorithm",
    "seed",
    "model.path",
    "model.dtype",
    "model.value_tokens",
    "warm_start",
    "env",
    "prompt",
    "loss.r_max",
    "loss.tau_v",
    "loss.readout",
)
_FREE = (
    "output_dir",
    "iterations",
    "threads",
    "checkpoint",
    "log",
    "eval",
    "model.device",
    "warm_start.cache_dir",
    "optim.micro_batch_tokens",
)


def check(config: Config, resume: str) -> None:
    """Before any work: the folder is writable, and the run there, if any, can go on under ``config``. ValueError says what to change."""
    check_installed(tensorboard=config.log.tensorboard, wandb=config.log.wandb)
    folder = config.run_dir()
    _check_writable(folder)
    checkpoints = folder / "checkpoints"
    if resume == "never":
        if any(checkpoints.glob("iteration-*")):
            raise ValueError(
                f"--resume never starts anew, but {folder} holds the checkpoints of a run; delete it, or set another output_dir"
            )
        return
    if resume != "auto" and not (Path(resume) / "manifest.json").is_file():
        raise ValueError(f"--resume must be auto, never or a checkpoint's directory (it holds manifest.json), got {resume}")
    saved = folder / "config.yaml"
    if saved.is_file() and any(checkpoints.glob("iteration-*")):
        _check_same_run(load_config(str(saved), []), config, folder)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. ValueError if another one trains in it. A killed process holds nothing.

    Made here if it is not there, and taken away again if an error leaves it empty: a refused command leaves no trace.
    """
    import fcntl

    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            owner = stream.read().strip()
            raise ValueError(f"process {owner} is training in {folder} already; wait for it, or set another output_dir") from None
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        try:
            yield
        except BaseException:
            if made and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                for path in made:
                    with contextlib.suppress(OSError):  # another run has come to stand in it
                        path.rmdir()
            raise


def export(run_dir: Path, out_dir: Path) -> Path:
    """The run's last checkpoint as a plain Hugging Face model directory."""
    from sapo_fast.algorithms import ALGORITHMS
    from sapo_fast.envs import make_suite
    from sapo_fast.setup_run import build_policy

    config = load_run_config(run_dir)
    where = checkpoint.latest(run_dir / "checkpoints")
    if where is None:
        raise ValueError(f"{run_dir} has no checkpoint yet; nothing to export")
    tensors, state, iteration = checkpoint.load(where)
    policy = build_policy(config, make_suite(config.env.name, config.env.options))
    checkpoint.copy_into(checkpoint.unique_tensors(policy.model), tensors["policy"])
    log.info("exporting %s, after %d iterations", where, iteration)
    side = {
        "r_max": config.loss.r_max,
        "tau_v": config.loss.tau_v,
        "readout": config.loss.readout,
        "trained_readout": ALGORITHMS[config.algorithm].readout,
    }
    plus, minus = state["value_token_ids"]
    return checkpoint.export_hf(policy.model, policy.tokenizer, (plus, minus), out_dir, side)


def load_run_config(run_dir: Path) -> Config:
    """The configuration that a run was trained with. ValueError if ``run_dir`` is no run's folder."""
    saved = run_dir / "config.yaml"
    if not saved.is_file():
        raise ValueError(f"{run_dir} is no run's folder: it has no config.yaml; give the output_dir of a training run")
    return load_config(str(saved), [])


def _check_writable(folder: Path) -> None:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"output_dir must be a directory, got {folder}, but {existing} is a file; set another output_dir")
    try:  # the permission bits tell root nothing, and a full or read-only file system has them set
        os.rmdir(tempfile.mkdtemp(prefix=".tmp-", dir=existing))
    except OSError as error:
        # the kernel's own file systems answer "no such file", which tells nobody anything
        reason = "nothing can be made there" if error.errno == errno.ENOENT else error.strerror
        raise ValueError(f"output_dir must be writable, got {folder}, but {existing} is not ({reason}); set another output_dir") from None


def _check_same_run(saved: Config, config: Config, folder: Path) -> None:
    there, here = _flat(saved.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    changed = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key) and not _under(key, _FREE)]
    fixed = [key for key in changed if _under(key, _FIXED)]
    if fixed:
        told = "; ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in fixed)
        raise ValueError(
            f"{folder} holds a run with other settings: {told}; set another output_dir, or give the run's own settings to go on"
        )
    for key in changed:
        log.warning("%s was %r when the run in %s was saved; it goes on with %r", key, there.get(key), folder, here.get(key))


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)
