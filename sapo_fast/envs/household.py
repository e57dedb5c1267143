"""The embedded environment ``household``: ALFWorld's six task families in a small generated world, pure Python, no download.

The grammar is ALFWorld 0.4's, shortened, in lower case, with every token set off by a space, so that splitting at spaces is a tokenizer:

    you see bed 1 , desk 1 , drawer 1 , shelf 1 . task : put a pen in shelf .
    > go to drawer 1        drawer 1 is closed .
    > open drawer 1         you open drawer 1 . in it you see pen 1 .
    > take pen 1 from drawer 1
    > go to shelf 1         on shelf 1 you see nothing .
    > move pen 1 to shelf 1

What a closed receptacle holds is seen only when it is open and you stand at it. One object can be carried. The reward is 1.0 at success,
which ends the episode, and 0.0 everywhere else; the turn limit is the caller's (``max_turns`` is the suite's suggestion).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from sapo_fast.envs.demonstration import Demonstration
from sapo_fast.envs.household_expert import ExpertNoise, expert_episodes
from sapo_fast.envs.household_world import (
    HOLLOW,
    LAMP,
    NOTHING_HAPPENS,
    OPENABLE,
    PROCESSABLE,
    RESULT_WORD,
    TASK_TYPES,
    TOOLS,
    HouseholdTask,
    generate_task,
    type_of,
)
from sapo_fast.envs.names import unknown_name

INSTRUCTIONS = (
    "you are in a room and must do the task . answer with one command : "
    "go to R , open R , close R , take O from R , move O to R , "
    "clean O with sinkbasin 1 , heat O with microwave 1 , cool O with fridge 1 , use desklamp 1 , examine O , look , inventory . "
    "R is a place like drawer 1 , O an object like mug 1 . you can carry one object . closed places must be opened first ."
)


class TaskIds(Sequence[str]):
    """The ids "train-000000", "train-000001", ... without storing them."""

    def __init__(self, split: str, indices: range) -> None:
        self._split, self._indices = split, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> TaskIds: ...

    def __getitem__(self, index: int | slice) -> str | TaskIds:
        if isinstance(index, slice):
            return TaskIds(self._split, self._indices[index])
        return f"{self._split}-{self._indices[index]:06d}"


class Household:
    """The suite: ``n_train`` training and ``n_eval`` evaluation tasks, fixed by ``seed``; no evaluation content occurs in training.

    ``task_types``: the families wanted (default: all six, equally often). ``max_turns``: the turn limit suggested to the caller.
    ``admissible``: put ``admissible_commands`` in ``info``. ``instructions``: tell the model the grammar in ``system_prompt`` (for a model
    that has never seen this environment; a warm-started one does not need it).
    Raises ValueError for counts below 1, a family that does not exist, and no family at all.
    """

    name = "household"

    def __init__(
        self,
        n_train: int = 20_000,
        n_eval: int = 200,
        seed: int = 0,
        task_types: Iterable[str] | None = None,
        max_turns: int = 30,
        admissible: bool = True,
        instructions: bool = False,
    ) -> None:
        for label, value in (("n_train", n_train), ("n_eval", n_eval), ("max_turns", max_turns)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"household: {label} must be an integer >= 1, got {value!r}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(f"household: seed must be an integer, got {seed!r}")
        for label, flag in (("admissible", admissible), ("instructions", instructions)):
            if not isinstance(flag, bool):
                raise ValueError(f"household: {label} must be true or false, got {flag!r}")
        if isinstance(task_types, str):
            raise ValueError(f"household: task_types must be a list of names, got the string {task_types!r}; write [{task_types!r}]")
        wanted = TASK_TYPES if task_types is None else tuple(task_types)
        for kind in wanted:
            if kind not in TASK_TYPES:
                raise ValueError(unknown_name("household task type", kind, TASK_TYPES))
        if not wanted:
            raise ValueError(f"household: task_types must name at least one of {', '.join(TASK_TYPES)}")
        self.n_train, self.n_eval, self.seed, self.max_turns, self.admissible = n_train, n_eval, seed, max_turns, admissible
        self.task_types = tuple(kind for kind in TASK_TYPES if kind in wanted)
        self.system_prompt = INSTRUCTIONS if instructions else ""

    def train_tasks(self) -> Sequence[str]:
        return TaskIds("train", range(self.n_train))

    def eval_tasks(self) -> Sequence[str]:
        return TaskIds("eval", range(self.n_eval))

    def task(self, task_id: str) -> HouseholdTask:
        """The task of an id. ValueError where the suite has none of that id."""
        split, _, number = task_id.partition("-") if isinstance(task_id, str) else ("", "", "")
        index = int(number) if number.isascii() and number.isdigit() and len(number) < 12 else -1
        ids = {"train": self.train_tasks(), "eval": self.eval_tasks()}.get(split, ())
        if not (0 <= index < len(ids) and ids[index] == task_id):
            known = " and ".join(f"{some[0]} to {some[-1]}" for some in (self.train_tasks(), self.eval_tasks()))
            raise ValueError(f"household: no task {task_id!r}; ids are {known}")
        return generate_task(task_id, split, index, self.seed, self.task_types)

    def make(self) -> HouseholdEnv:
        return HouseholdEnv(self)

    def expert_episodes(self, n: int, *, seed: int, max_turns: int, noise: Mapping[str, float]) -> Iterator[Demonstration]:
        """``n`` demonstrations for a warm start; ``noise``: fields of ``ExpertNoise`` that differ from its defaults."""
        for field in noise:
            if field not in ExpertNoise.__dataclass_fields__:
                raise ValueError(unknown_name("household expert noise", field, ExpertNoise.__dataclass_fields__))
        return expert_episodes(self, n, seed=seed, noise=ExpertNoise(**noise), max_turns=max_turns)


class HouseholdEnv:
    """One household, reusable by ``reset``. Protocol: ``sapo_fast.envs.base.TextEnv``.

    A command that cannot be done here and now, or is no command at all, answers "nothing happens ." with ``info["invalid"]`` true and
    changes nothing. Case and the amount of white space do not matter.
    """

    def __init__(self, suite: Household) -> None:
        self._suite = suite
        self._task: HouseholdTask | None = None
        self._over = True
        self._acts = {
            "go": self._go,
            "open": self._open,
            "close": self._close,
            "take": self._take,
            "move": self._move,
            "clean": self._process,
            "heat": self._process,
            "cool": self._process,
            "use": self._use,
            "examine": self._examine,
            "look": self._look,
            "inventory": self._inventory,
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the task ``options["task"]``. ``seed`` changes nothing: a task has no chance in it."""
        if not options or "task" not in options:
            raise ValueError("household: reset needs options={'task': id}, an id of the suite's train_tasks() or eval_tasks()")
        task = self._suite.task(options["task"])
        self._task = task
        self._over = False
        self._won = False
        self._at: str | None = None
        self._held: str | None = None
        self._opened: set[str] = set()
        self._lamp_on = False
        self._done_to: dict[str, set[str]] = {}  # object -> {"clean", "heat" or "cool"}
        self._contents: dict[str, list[str]] = {name: [] for name in task.receptacles}
        for thing, place in task.placements:
            self._contents[place].append(thing)
        self._go_commands = {name: f"go to {name}" for name in task.receptacles}
        self._room_text = f"you see {' , '.join(task.receptacles)} ."
        return f"{self._room_text} task : {task.goal} .", self._info(False)

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do one command: observation, reward, terminated, truncated (always False), info. RuntimeError when no episode is running."""
        if self._over:
            raise RuntimeError("household: no episode is running; call reset first")
        words = command.lower().split()
        act = self._acts.get(words[0]) if words else None
        text = act(words) if act else None
        if text is None:
            return NOTHING_HAPPENS, 0.0, False, False, self._info(True)
        self._over = self._won
        return text, 1.0 if self._won else 0.0, self._won, False, self._info(False)

    def close(self) -> None:
        self._over = True

    def admissible_commands(self) -> list[str]:
        """Every command that now does something: exactly those not answered by "nothing happens ."."""
        at, held = self._at, self._held
        commands = [text for name, text in self._go_commands.items() if name != at]
        commands += ("look", "inventory")
        if held is not None:
            commands.append(f"examine {held}")
        if at is None:
            return commands
        kind = type_of(at)
        commands.append(f"examine {at}")
        reachable = kind not in OPENABLE or at in self._opened
        if kind in OPENABLE:
            commands.append(f"close {at}" if reachable else f"open {at}")
        if reachable:
            if held is None:
                commands += [f"take {thing} from {at}" for thing in self._contents[at]]
            else:
                commands.append(f"move {held} to {at}")
            commands += [f"examine {thing}" for thing in self._contents[at]]
        if held is not None:
            commands += [f"{verb} {held} with {at}" for verb, tool in TOOLS.items() if tool == kind and type_of(held) in PROCESSABLE[verb]]
        if at == self._task.lamp_place:
            commands += (f"use {LAMP}", f"examine {LAMP}")
        return commands

    def _info(self, invalid: bool) -> dict[str, Any]:
        task = self._task
        info = {"won": self._won, "task_id": task.task_id, "task": task.goal, "task_type": task.task_type, "invalid": invalid}
        if self._suite.admissible:
            info["admissible_commands"] = [] if self._won else self.admissible_commands()
        return info

    # What each verb does: the words of the command in, the observation out, None where it cannot be done.

    def _go(self, words: list[str]) -> str | None:
        if len(words) != 4 or words[1] != "to":
            return None
        place = f"{words[2]} {words[3]}"
        if place == self._at or place not in self._contents:
            return None
        self._at = place
        self._check_light()
        return self._place_text()

    def _open(self, words: list[str]) -> str | None:
        place = self._at
        if len(words) != 3 or place is None or f"{words[1]} {words[2]}" != place or words[1] not in OPENABLE or place in self._opened:
            return None
        self._opened.add(place)
        return f"you open {place} . in it you see {self._list(place)} ."

    def _close(self, words: list[str]) -> str | None:
        place = self._at
        if len(words) != 3 or place is None or f"{words[1]} {words[2]}" != place or place not in self._opened:
            return None
        self._opened.remove(place)
        return f"you close {place} ."

    def _take(self, words: list[str]) -> str | None:
        place = self._at
        if len(words) != 6 or words[3] != "from" or place is None or self._held is not None or f"{words[4]} {words[5]}" != place:
            return None
        thing = f"{words[1]} {words[2]}"
        if not self._reachable() or thing not in self._contents[place]:
            return None
        self._contents[place].remove(thing)
        self._held = thing
        self._check_light()
        return f"you take {thing} ."

    def _move(self, words: list[str]) -> str | None:
        place, thing = self._at, self._held
        if len(words) != 6 or words[3] != "to" or place is None or thing is None:
            return None
        if f"{words[1]} {words[2]}" != thing or f"{words[4]} {words[5]}" != place or not self._reachable():
            return None
        self._held = None
        self._contents[place].append(thing)
        self._contents[place].sort()
        self._check_placed()
        return f"you move {thing} to {place} ."

    def _process(self, words: list[str]) -> str | None:
        verb, place, thing = words[0], self._at, self._held
        if len(words) != 6 or words[3] != "with" or place is None or thing is None or words[4] != TOOLS[verb]:
            return None
        if f"{words[1]} {words[2]}" != thing or f"{words[4]} {words[5]}" != place or words[1] not in PROCESSABLE[verb]:
            return None
        done = self._done_to.setdefault(thing, set())
        done.add(verb)
        if verb != "clean":
            done.discard("cool" if verb == "heat" else "heat")
        return f"you {verb} {thing} ."

    def _use(self, words: list[str]) -> str | None:
        if len(words) != 3 or f"{words[1]} {words[2]}" != LAMP or self._at is None or self._at != self._task.lamp_place:
            return None
        self._lamp_on = True
        self._check_light()
        return f"you use {LAMP} ."

    def _examine(self, words: list[str]) -> str | None:
        if len(words) != 3:
            return None
        name, at = f"{words[1]} {words[2]}", self._at
        if name == self._held or (at is not None and self._reachable() and name in self._contents[at]):
            states = [RESULT_WORD[verb] for verb in TOOLS if verb in self._done_to.get(name, ())]
            return f"{name} is {' , '.join(states)} ." if states else f"you see {name} ."
        if at is None:
            return None
        if name == at:
            return self._place_text()
        if name == LAMP and at == self._task.lamp_place:
            return f"you see {LAMP} ."
        return None

    def _look(self, words: list[str]) -> str | None:
        if len(words) != 1:
            return None
        return self._room_text if self._at is None else self._place_text()

    def _inventory(self, words: list[str]) -> str | None:
        return f"you have {self._held or 'nothing'} ." if len(words) == 1 else None

    # What is seen, and what is won.

    def _reachable(self) -> bool:
        """Whether the receptacle you stand at can be looked into."""
        return self._at in self._opened or type_of(self._at) not in OPENABLE

    def _list(self, place: str) -> str:
        things = self._contents[place]
        if place == self._task.lamp_place:
            things = sorted([*things, LAMP])
        return " , ".join(things) if things else "nothing"

    def _place_text(self) -> str:
        place = self._at
        if not self._reachable():
            return f"{place} is closed ."
        return f"{'in' if type_of(place) in HOLLOW else 'on'} {place} you see {self._list(place)} ."

    def _check_placed(self) -> None:
        task = self._task
        if not task.target_type or type_of(self._at) != task.target_type:
            return
        need = task.process
        good = [
            thing
            for thing in self._contents[self._at]
            if type_of(thing) == task.object_type and (need is None or need in self._done_to.get(thing, ()))
        ]
        self._won = len(good) >= task.count

    def _check_light(self) -> None:
        task = self._task
        if task.task_type == "look_at_obj_in_light" and self._lamp_on and self._at == task.lamp_place:
            self._won = self._held is not None and type_of(self._held) == task.object_type
