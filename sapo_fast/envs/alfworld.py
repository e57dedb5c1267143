"""ALFWorld (Shridhar et al. 2021) over its real engine: any game by its id, each environment reset on its own.

Games are those of a folder in the data set's own layout, ``<data>/json_2.1.1/<split>/<task>/<trial>/game.tw-pddl``: the data set as
``alfworld-download`` leaves it, or games made here (``python -m sapo_fast.envs.alfworld_games``). A task's id is its folder below
``json_2.1.1``. The reward is 1.0 at success, which ends the episode, and 0.0 everywhere else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sapo_fast.envs.names import unknown_name

if TYPE_CHECKING:
    from sapo_fast.envs.alfworld_engine import Engine, Game

log = logging.getLogger("sapo_fast")

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
PANELS = ("valid_seen", "valid_unseen")
SYSTEM_PROMPT = (
    "You are a skilled agent in the ALFRED household, which you act in by short text commands. "
    "You can carry one object at a time, and must go to a place before you can open it, search it or use it."
)
_TASK = "Your task is to: "
_TAIL = 16_384  # bytes at the end of a game file that hold "solvable" and the walkthrough, as alfworld writes them


class AlfWorld:
    """The suite of a data folder: the games of ``train`` to train on, all games of the split ``panel`` to evaluate on, each once.

    data: the folder that holds json_2.1.1 (default: $ALFWORLD_DATA). task_types: the families wanted (default: all six). admissible:
    put ``admissible_commands`` in ``info``. cache: where translated games are kept (a fifth of a megabyte each; "" for nowhere: every
    first load of a game then takes half a second). As in ALFWorld, games with movable receptacles or sliced objects and those not
    marked solvable do not count; a file that is broken is named in the log, left out, and listed in ``broken``.
    ValueError for a folder that is not such a folder, a split without games, and a family or panel that does not exist.
    """

    name = "alfworld"
    system_prompt = SYSTEM_PROMPT

    def __init__(
        self,
        data: str | None = None,
        panel: Literal["valid_seen", "valid_unseen"] = "valid_seen",
        task_types: Iterable[str] | None = None,
        admissible: bool = True,
        cache: str = "~/.cache/sapo_fast/alfworld",
    ) -> None:
        if panel not in PANELS:
            raise ValueError(unknown_name("ALFWorld panel", panel, PANELS))
        if isinstance(task_types, str):
            raise ValueError(f"alfworld: task_types must be a list of names, got the string {task_types!r}; write [{task_types!r}]")
        wanted = TASK_TYPES if task_types is None else tuple(task_types)
        for kind in wanted:
            if kind not in TASK_TYPES:
                raise ValueError(unknown_name("ALFWorld task type", kind, TASK_TYPES))
        if not wanted:
            raise ValueError(f"alfworld: task_types must name at least one of {', '.join(TASK_TYPES)}")
        self.panel, self.admissible = panel, admissible
        self.task_types = tuple(kind for kind in TASK_TYPES if kind in wanted)
        self.root = find_data(data)
        self.cache = Path(cache).expanduser() if cache else None
        self.broken: list[str] = []
        self._splits = {split: self._games(split) for split in ("train", panel)}

    def train_tasks(self) -> Sequence[str]:
        return self._splits["train"]

    def eval_tasks(self) -> Sequence[str]:
        return self._splits[self.panel]

    def make(self) -> AlfWorldEnv:
        return AlfWorldEnv(self)

    def _games(self, split: str) -> list[str]:
        ids = []
        for path in sorted((self.root / split).glob("*/*/game.tw-pddl")):
            task_id = path.parent.relative_to(self.root).as_posix()
            if task_type(task_id) not in self.task_types or "movable" in task_id or "Sliced" in task_id:
                continue
            marked = _solvable(path)
            if marked is None:
                self.broken.append(str(path))
                log.warning("game file %s is broken (it does not say whether the game is solvable); left out", path)
            elif marked:
                ids.append(task_id)
        if not ids:
            raise ValueError(
                f"alfworld: no game of {', '.join(self.task_types)} in {self.root / split}"
                + (f" ({len(self.broken)} broken files left out)" if self.broken else "")
                + "; complete the data with alfworld-download, or make games with python -m sapo_fast.envs.alfworld_games"
            )
        return ids


def find_data(data: str | None) -> Path:
    """The json_2.1.1 folder of an ALFWorld data folder (default: $ALFWORLD_DATA). ValueError, with the ways to get one, if there is none."""
    given = data or os.environ.get("ALFWORLD_DATA")
    how = (
        "get the data set with `alfworld-download` (pip install 'sapo_fast[alfworld]'), or make games of your own with "
        "`python -m sapo_fast.envs.alfworld_games FOLDER`, and give the folder as env.options.data or ALFWORLD_DATA"
    )
    if not given:
        raise ValueError(f"alfworld: no data folder given; {how}")
    root = Path(given).expanduser()
    for found in (root / "json_2.1.1", root):
        if (found / "train").is_dir():
            return found
    state = "holds no json_2.1.1/train" if root.is_dir() else "does not exist"
    raise ValueError(f"alfworld: the data folder {root} {state}; {how}")


def task_type(task_id: str) -> str:
    """The family of a task id: the first word of its folder's name."""
    return task_id.split("/")[-2].split("-")[0]


def _solvable(path: Path) -> bool | None:
    """What a game file says of itself, read from its end; None: nothing."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            tail = file.read()
            if b'"solvable"' not in tail:
                file.seek(0)
                tail = file.read()
    except OSError:
        return None
    mark = tail.rpartition(b'"solvable"')[2].lstrip(b": ") if b'"solvable"' in tail else b""
    if not tail.rstrip().endswith(b"}"):
        return None
    return True if mark.startswith(b"true") else False if mark.startswith(b"false") else None


@lru_cache(32)
def _read(path: Path, cache: Path | None) -> Game:
    from sapo_fast.envs.alfworld_engine import read_game

    return read_game(path, cache)


class AlfWorldEnv:
    """One household, reusable by ``reset``. Protocol: ``sapo_fast.envs.base.TextEnv``.

    A command outside the admissible ones is answered "Nothing happens." and has ``info["invalid"]``; white space around a command does
    not count, and its case does not either (all of ALFWorld's commands are in lower case).
    """

    def __init__(self, suite: AlfWorld) -> None:
        self._suite = suite
        self._engine: Engine | None = None
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the game ``options["task"]``, an id such as those of ``train_tasks()``. ``seed`` changes nothing: games have no chance in them."""
        from sapo_fast.envs.alfworld_engine import Engine

        task_id = (options or {}).get("task")
        if not isinstance(task_id, str):
            raise ValueError("alfworld: reset needs options={'task': id}, an id of the suite's train_tasks() or eval_tasks()")
        parts = task_id.split("/")
        path = self._suite.root.joinpath(*parts, "game.tw-pddl")
        if len(parts) != 3 or ".." in parts or not path.is_file():
            raise ValueError(f"alfworld: no game {task_id!r} in {self._suite.root}; ids read split/task/trial")
        game = _read(path, self._suite.cache)
        if self._engine is None:
            self._engine = Engine()
        self._engine.load(game)
        observation, admissible = self._engine.reset()
        self._over = False
        self._base = {"task_id": task_id, "task_type": task_type(task_id), "task": observation.rpartition(_TASK)[2].strip().rstrip(".")}
        return observation, self._info(False, False, admissible)

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do one command: observation, reward, terminated, truncated (always False), info. RuntimeError when no episode is running."""
        if self._over or self._engine is None:
            raise RuntimeError("alfworld: no episode is running; call reset first")
        observation, known, won, admissible = self._engine.step(command.lower())
        self._over = won
        return observation, float(won), won, False, self._info(not known, won, admissible)

    def close(self) -> None:
        self._over = True
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _info(self, invalid: bool, won: bool, admissible: list[str]) -> dict[str, Any]:
        info = {**self._base, "won": won, "invalid": invalid}
        if self._suite.admissible:
            info["admissible_commands"] = list(admissible)
        return info
