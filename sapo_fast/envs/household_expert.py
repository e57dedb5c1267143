"""A searcher for ``household`` that knows only what it has read, and its deliberate faults: demonstrations for a warm start.

It reads observations like any player, remembers what it saw where, and looks for things where they tend to be (``PRIORS``).
Since it never looks at the hidden state, a model that sees the same history can imitate it exactly. ``ExpertNoise`` makes it worse,
so that a model cloned from it has something left to learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from sapo_fast.envs.demonstration import Demonstration, DemonstrationTurn
from sapo_fast.envs.household_world import (
    ANYWHERE,
    LAMP,
    LAMP_PRIOR,
    NOTHING_HAPPENS,
    OPENABLE,
    PRIORS,
    RESULT_WORD,
    TOOLS,
    shuffled,
    type_of,
)

if TYPE_CHECKING:
    from sapo_fast.envs.household import Household, HouseholdEnv

_PROCESS_OF_WORD = {word: verb for verb, word in RESULT_WORD.items()}


@dataclass(frozen=True)
class ExpertNoise:
    """How often the expert errs. All probabilities in [0, 1]; ``ExpertNoise.none()`` is the expert at its best.

    ``p_random``: each turn, a command drawn from all admissible ones.
    ``p_slip``: each turn, a hasty command that cannot be done here ("nothing happens"). A clone of an expert who never slips has never read that
    answer, and repeats itself when its own first slip brings it.
    ``p_forget``: each object taken, its cleaning, heating or cooling is skipped until the failure shows; each closed place reached,
    it is not opened (and passed over, or something is put into it in vain).
    ``p_revisit``: each choice of where to search, a place already searched.
    ``p_blind``: each choice of where to search, any unsearched place instead of the likeliest.
    """

    p_random: float = 0.3
    p_slip: float = 0.1
    p_forget: float = 0.4
    p_revisit: float = 0.45
    p_blind: float = 0.8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, (int, float)) and 0.0 <= value <= 1.0):
                raise ValueError(f"ExpertNoise: {name} is a probability and must lie in [0, 1], got {value!r}")

    @classmethod
    def none(cls) -> ExpertNoise:
        return cls(p_random=0.0, p_slip=0.0, p_forget=0.0, p_revisit=0.0, p_blind=0.0)


class HouseholdExpert:
    """Plays one episode: ``start`` with the first observation, then ``act`` and ``observe`` in turn."""

    def __init__(self, rng: Random, noise: ExpertNoise) -> None:
        self._rng, self._noise = rng, noise

    def start(self, observation: str) -> None:
        """Read the first observation: the places and the goal. ValueError where it is not one of ``household``."""
        room, mark, goal = observation.partition(" . task : ")
        words = goal.split()
        if not (mark and room.startswith("you see ") and words[:1] in (["put"], ["look"])):
            raise ValueError(f"not a first observation of household: {observation!r}")
        self._places = room.removeprefix("you see ").split(" , ")
        self._looking = words[0] == "look"
        self._process: str | None = None
        self._count = 1
        if self._looking:  # look at mug under desklamp .
            self._object, self._target = words[2], ""
        else:  # put a clean mug in shelf . / put two mug in shelf .
            self._object, self._target = words[-4], words[-2]
            self._count = 2 if words[1] == "two" else 1
            self._process = _PROCESS_OF_WORD.get(words[2])
        self._at: str | None = None
        self._held: str | None = None
        self._seen: dict[str, list[str]] = {}  # place -> what was last seen there
        self._opened: set[str] = set()
        self._skipped: set[str] = set()  # closed places left unopened by mistake
        self._done_to: dict[str, set[str]] = {}
        self._lamp_at: str | None = None
        self._forgot = False  # the process, for the object in hand
        self._aim: str | None = None  # the place chosen by the last search

    def act(self, admissible: Sequence[str]) -> str:
        """The next command. ``admissible`` is what a random command is drawn from."""
        if self._chance(self._noise.p_random) and admissible:
            return self._pick(admissible)
        if self._chance(self._noise.p_slip) and (slip := self._slip()) not in admissible:
            return slip
        return self._plan()

    def observe(self, command: str, observation: str) -> None:
        """Read the answer to ``command``."""
        if observation == NOTHING_HAPPENS:
            return
        words = command.split()
        verb = words[0]
        if verb == "go":
            self._at = f"{words[2]} {words[3]}"
        if verb == "open":
            self._opened.add(self._at)
        elif verb == "close":
            self._opened.discard(self._at)
        elif verb == "take":
            self._held = f"{words[1]} {words[2]}"
            self._seen[self._at].remove(self._held)
            self._forgot = self._process is not None and self._chance(self._noise.p_forget)
        elif verb == "move":
            self._seen.setdefault(self._at, []).append(self._held)
            self._held = None
        elif verb in TOOLS:
            done = self._done_to.setdefault(self._held, set())
            done.add(verb)
            if verb != "clean":
                done.discard("cool" if verb == "heat" else "heat")
        if verb in ("go", "open") and "you see " in observation:
            listed = observation.rpartition("you see ")[2].removesuffix(" .")
            things = [] if listed == "nothing" else listed.split(" , ")
            if LAMP in things:
                things.remove(LAMP)
                self._lamp_at = self._at
            self._seen[self._at] = things

    def _slip(self) -> str:
        """To go where one is, to take or put what is not there, to open what is out of reach."""
        place, here = self._pick(self._places), self._at or self._pick(self._places)
        thing = self._held or f"{self._pick((self._object, *PRIORS))} {1 + int(self._rng.random() * 2)}"
        return self._pick((f"go to {here}", f"take {thing} from {here}", f"open {place}", f"move {thing} to {place}"))

    # What to do next.

    def _plan(self) -> str:
        held = self._held
        if held is not None:
            if type_of(held) != self._object:
                return self._reach(self._at) or f"move {held} to {self._at}"
            if self._looking:
                if self._lamp_at is None:
                    return self._search(self._lamp_weight)
                return f"use {LAMP}" if self._at == self._lamp_at else f"go to {self._lamp_at}"
            if self._process and self._process not in self._done_to.get(held, ()) and not self._forgot:
                tool = next(place for place in self._places if type_of(place) == TOOLS[self._process])
                return f"{self._process} {held} with {tool}" if self._at == tool else f"go to {tool}"
            target = self._chosen_target()
            forgets = self._at == target and target not in self._opened and target not in self._skipped and self._forgets(target)
            if forgets:
                return f"move {held} to {target}"
            return self._reach(target) or f"move {held} to {target}"
        known = self._known_object()
        if known is None:
            return self._search(self._object_weight)
        thing, place = known
        return self._reach(place) or f"take {thing} from {place}"

    def _reach(self, place: str) -> str | None:
        """The command that brings the place nearer to hand; None when you stand at it and it is open."""
        if self._at != place:
            return f"go to {place}"
        return f"open {place}" if type_of(place) in OPENABLE and place not in self._opened else None

    def _chosen_target(self) -> str:
        """Where to put it: for two objects, where the first one is; else where you stand, else an open place, else the first."""
        targets = [place for place in self._places if type_of(place) == self._target]

        def rank(place: str) -> tuple[int, bool, bool]:
            there = sum(type_of(thing) == self._object for thing in self._seen.get(place, ())) if self._count == 2 else 0
            return there, place == self._at, place in self._opened

        return max(targets, key=rank)

    def _known_object(self) -> tuple[str, str] | None:
        """A wanted object seen somewhere, and not yet where it belongs: here if possible, else the one seen first."""
        keep = None
        if self._count == 2:
            target = self._chosen_target()
            keep = target if any(type_of(thing) == self._object for thing in self._seen.get(target, ())) else None
        elsewhere = [(place, things) for place, things in self._seen.items() if place != keep]
        found = [(thing, place) for place, things in elsewhere for thing in things if type_of(thing) == self._object]
        return min(found, key=lambda pair: pair[1] != self._at, default=None)

    def _search(self, weight: Callable[[str], float]) -> str:
        at = self._at
        arrived = at is not None and at == self._aim and at not in self._seen and at not in self._skipped
        if arrived and not self._forgets(at):
            return f"open {at}"
        fresh = [place for place in self._places if place not in self._seen and place not in self._skipped and place != at]
        known = [place for place in self._places if place in self._seen and place != at]
        if known and self._chance(self._noise.p_revisit):
            self._aim = self._pick(known)
        elif fresh and self._chance(self._noise.p_blind):
            self._aim = self._pick(fresh)
        else:
            self._aim = max(fresh, key=lambda place: self._worth(place, weight), default=None)
            if self._aim is None or self._worth(self._aim, weight) == 0:
                self._aim = self._last_resort(weight)
        return self._reach(self._aim) or "look"

    def _last_resort(self, weight: Callable[[str], float]) -> str:
        """Nothing likely is unseen: go back to what was left closed, then to unlikely places, then anywhere."""
        left = [place for place in self._places if place in self._skipped]
        self._skipped.clear()
        unseen = left or [place for place in self._places if place not in self._seen]
        if unseen:
            return max(unseen, key=lambda place: self._worth(place, weight))
        return self._pick([place for place in self._places if place != self._at])

    def _worth(self, place: str, weight: Callable[[str], float]) -> float:
        """Weight a turn: a closed place costs one turn more."""
        kind = type_of(place)
        return weight(kind) / (2 if kind in OPENABLE and place not in self._opened else 1)

    def _object_weight(self, kind: str) -> float:
        """How likely the wanted object is there: never at the tool, or without a process where it would already have won."""
        never = TOOLS[self._process] if self._process else self._target
        return 0.0 if kind == never else ANYWHERE + PRIORS[self._object].get(kind, 0)

    @staticmethod
    def _lamp_weight(kind: str) -> float:
        return LAMP_PRIOR.get(kind, 0)

    def _forgets(self, place: str) -> bool:
        """Whether a closed place is left closed; decided once, then remembered in ``_skipped``."""
        if type_of(place) in OPENABLE and self._chance(self._noise.p_forget):
            self._skipped.add(place)
            return True
        return False

    def _chance(self, p: float) -> bool:
        return p > 0.0 and self._rng.random() < p

    def _pick(self, items: Sequence[str]) -> str:
        return items[int(self._rng.random() * len(items))]


def play_expert(env: HouseholdEnv, task_id: str, rng: Random, noise: ExpertNoise, max_turns: int) -> Demonstration:
    """One episode of the expert on one task."""
    observation, info = env.reset(options={"task": task_id})
    expert = HouseholdExpert(rng, noise)
    expert.start(observation)
    episode = Demonstration(task_id)
    while not episode.won and len(episode.turns) < max_turns:
        command = expert.act(env.admissible_commands())
        answer, reward, _, _, next_info = env.step(command)
        expert.observe(command, answer)
        episode.turns.append(DemonstrationTurn(observation, info, command, reward))
        observation, info = answer, next_info
        episode.won = info["won"]
    episode.final_observation = observation
    return episode


def expert_episodes(suite: Household, n: int, *, seed: int, noise: ExpertNoise, max_turns: int) -> Iterator[Demonstration]:
    """``n`` demonstrations on training tasks, a function of ``seed`` (episode i does not depend on n).

    Tasks are drawn without repeats until all have been used. ValueError for a negative ``n`` and for ``max_turns`` below 1.
    """
    if n < 0:
        raise ValueError(f"expert_episodes: n must be >= 0, got {n}")
    if max_turns < 1:
        raise ValueError(f"expert_episodes: max_turns must be >= 1, got {max_turns}")
    return _episodes(suite, n, seed, noise, max_turns)


def _episodes(suite: Household, n: int, seed: int, noise: ExpertNoise, max_turns: int) -> Iterator[Demonstration]:
    env = suite.make()
    tasks = suite.train_tasks()
    order: list[int] = []
    for i in range(n):
        lap, place = divmod(i, len(tasks))
        if place == 0:
            order = shuffled(Random(f"expert/{seed}/order/{lap}"), range(len(tasks)))
        yield play_expert(env, tasks[order[place]], Random(f"expert/{seed}/{i}"), noise, max_turns)
