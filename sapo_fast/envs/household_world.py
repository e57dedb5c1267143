"""What the household is made of: rooms, receptacles, objects, and the seeded generator of tasks.

A task is a room (10 or 11 receptacles), objects put in it by the priors below, and a goal of one of six families (those of ALFWorld).
Every task is a function of (suite seed, split, index) and the suite's families alone. Training and evaluation tasks cannot share content:
a digest of the content says which split it belongs to, and a draw that falls in the other split is thrown away.

Only ``Random.random`` is used, whose stream Python guarantees across versions: an id means the same task everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")

TASK_TYPES = (
    "pick_and_place",
    "look_at_obj_in_light",
    "pick_clean_then_place",
    "pick_heat_then_place",
    "pick_cool_then_place",
    "pick_two_obj_and_place",
)

#: Receptacle types that start closed: their contents are seen only when they are open and you stand there.
OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})

#: Receptacle types one puts things in rather than on.
HOLLOW = OPENABLE | {"bathtub", "garbagecan", "sinkbasin"}

#: The weight of a receptacle no prior speaks of: most things are where they belong, some are not.
ANYWHERE = 1

#: The answer to a command that cannot be done.
NOTHING_HAPPENS = "nothing happens ."

LAMP = "desklamp 1"
LAMP_PRIOR: dict[str, int] = {"desk": 4, "sidetable": 3, "dresser": 3, "coffeetable": 1, "shelf": 1}

#: Where things tend to be: object type -> receptacle type -> weight of each such receptacle, on top of ``ANYWHERE`` for every receptacle.
PRIORS: dict[str, dict[str, int]] = {
    "apple": {"fridge": 4, "diningtable": 3, "countertop": 2, "garbagecan": 2, "microwave": 1, "sinkbasin": 1},
    "book": {"bed": 3, "desk": 3, "shelf": 3, "sofa": 2, "coffeetable": 2, "sidetable": 1, "dresser": 1, "drawer": 1, "armchair": 1},
    "bowl": {
        "cabinet": 3,
        "diningtable": 3,
        "countertop": 2,
        "shelf": 2,
        "coffeetable": 2,
        "desk": 1,
        "dresser": 1,
        "fridge": 1,
        "sinkbasin": 1,
    },
    "bread": {"countertop": 4, "diningtable": 3, "fridge": 2, "cabinet": 1},
    "candle": {"toilet": 3, "countertop": 3, "shelf": 2, "cabinet": 2, "drawer": 1},
    "cd": {"desk": 3, "drawer": 3, "shelf": 3, "safe": 2, "dresser": 1, "tvstand": 1, "garbagecan": 1},
    "cellphone": {"bed": 3, "desk": 3, "sidetable": 3, "drawer": 2, "dresser": 2, "sofa": 1, "coffeetable": 1, "armchair": 1},
    "cloth": {"cabinet": 3, "drawer": 3, "countertop": 2, "bathtub": 2, "sinkbasin": 1},
    "creditcard": {"drawer": 3, "desk": 2, "dresser": 2, "sidetable": 2, "sofa": 2, "armchair": 1, "coffeetable": 1, "safe": 1, "shelf": 1},
    "cup": {"cabinet": 3, "countertop": 3, "sinkbasin": 3, "diningtable": 2, "fridge": 1, "microwave": 1, "shelf": 1},
    "egg": {"fridge": 5, "countertop": 2, "garbagecan": 1, "microwave": 1, "sinkbasin": 1},
    "keychain": {"drawer": 3, "safe": 3, "dresser": 2, "sidetable": 2, "armchair": 1, "coffeetable": 1, "desk": 1, "sofa": 1},
    "knife": {"drawer": 4, "countertop": 3, "diningtable": 2, "sinkbasin": 2},
    "laptop": {"desk": 4, "bed": 3, "coffeetable": 2, "sofa": 2, "armchair": 1},
    "mug": {
        "coffeemachine": 4,
        "countertop": 3,
        "cabinet": 2,
        "desk": 2,
        "diningtable": 2,
        "sidetable": 2,
        "sinkbasin": 2,
        "microwave": 1,
        "shelf": 1,
    },
    "newspaper": {"sofa": 4, "coffeetable": 3, "armchair": 2, "garbagecan": 2, "diningtable": 1, "drawer": 1, "sidetable": 1},
    "pan": {"stoveburner": 5, "cabinet": 3, "countertop": 2, "sinkbasin": 2},
    "pen": {"desk": 4, "drawer": 3, "sidetable": 2, "dresser": 1, "garbagecan": 1, "shelf": 1},
    "pillow": {"bed": 5, "sofa": 4, "armchair": 3},
    "plate": {"diningtable": 4, "cabinet": 3, "sinkbasin": 3, "countertop": 2, "fridge": 1, "shelf": 1},
    "potato": {"countertop": 3, "sinkbasin": 3, "fridge": 2, "garbagecan": 2, "microwave": 2},
    "remotecontrol": {"tvstand": 4, "coffeetable": 3, "sofa": 3, "armchair": 2, "drawer": 1, "sidetable": 1},
    "soapbar": {"sinkbasin": 4, "cabinet": 3, "bathtub": 2, "countertop": 2, "toilet": 2, "drawer": 1, "garbagecan": 1},
    "spoon": {"drawer": 5, "countertop": 2, "diningtable": 2, "sinkbasin": 2},
    "spraybottle": {"cabinet": 4, "garbagecan": 2, "shelf": 2, "toilet": 2, "countertop": 1, "drawer": 1},
    "toiletpaper": {"cabinet": 4, "toilet": 3, "drawer": 2, "countertop": 1, "garbagecan": 1, "shelf": 1},
    "tomato": {"fridge": 4, "countertop": 3, "sinkbasin": 2, "diningtable": 1, "garbagecan": 1, "microwave": 1},
    "vase": {"shelf": 3, "coffeetable": 2, "dresser": 2, "tvstand": 2, "cabinet": 1, "desk": 1, "safe": 1, "sidetable": 1},
    "watch": {"drawer": 3, "dresser": 3, "safe": 2, "sidetable": 2, "cabinet": 1, "coffeetable": 1, "shelf": 1},
}

#: What can be done to an object, and the receptacle type that does it.
TOOLS: dict[str, str] = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
PROCESSABLE: dict[str, frozenset[str]] = {
    "clean": frozenset({"apple", "bowl", "cloth", "cup", "knife", "mug", "pan", "plate", "potato", "soapbar", "spoon", "tomato"}),
    "heat": frozenset({"apple", "bread", "cup", "egg", "mug", "plate", "potato", "tomato"}),
    "cool": frozenset({"apple", "bowl", "bread", "cup", "egg", "mug", "pan", "plate", "potato", "tomato"}),
}
#: The process a task family needs (none: no entry), and the word for its result in the goal.
PROCESS_OF_TYPE = {"pick_clean_then_place": "clean", "pick_heat_then_place": "heat", "pick_cool_then_place": "cool"}
RESULT_WORD = {"clean": "clean", "heat": "hot", "cool": "cool"}


@dataclass(frozen=True)
class Room:
    """A kind of room: what it always has, the most it has of what it may have more of, what lies there, and the families it serves."""

    always: tuple[str, ...]
    at_most: dict[str, int]
    objects: tuple[str, ...]
    task_types: tuple[str, ...]


_LIVING_TASKS = ("pick_and_place", "look_at_obj_in_light", "pick_two_obj_and_place")
ROOMS: dict[str, Room] = {
    "kitchen": Room(
        always=("cabinet", "cabinet", "cabinet", "countertop", "drawer", "fridge", "microwave", "sinkbasin"),
        at_most={
            "cabinet": 4,
            "coffeemachine": 1,
            "countertop": 2,
            "diningtable": 1,
            "drawer": 2,
            "garbagecan": 1,
            "shelf": 1,
            "stoveburner": 1,
        },
        objects=("apple", "bowl", "bread", "cup", "egg", "knife", "mug", "pan", "plate", "potato", "spoon", "tomato"),
        task_types=("pick_and_place", "pick_clean_then_place", "pick_heat_then_place", "pick_cool_then_place", "pick_two_obj_and_place"),
    ),
    "bedroom": Room(
        always=("bed", "cabinet", "desk", "drawer", "drawer", "drawer", "shelf", "sidetable"),
        at_most={"armchair": 1, "cabinet": 2, "drawer": 4, "dresser": 1, "garbagecan": 1, "safe": 1, "shelf": 2, "sidetable": 2},
        objects=("book", "bowl", "cd", "cellphone", "creditcard", "keychain", "laptop", "mug", "pen", "pillow", "vase", "watch"),
        task_types=_LIVING_TASKS,
    ),
    "livingroom": Room(
        always=("armchair", "cabinet", "coffeetable", "drawer", "drawer", "drawer", "sidetable", "sofa"),
        at_most={"armchair": 2, "cabinet": 2, "desk": 1, "diningtable": 1, "drawer": 4, "dresser": 1, "safe": 1, "shelf": 1, "tvstand": 1},
        objects=("book", "bowl", "cellphone", "creditcard", "keychain", "laptop", "newspaper", "pillow", "remotecontrol", "vase", "watch"),
        task_types=_LIVING_TASKS,
    ),
    "bathroom": Room(
        always=("cabinet", "cabinet", "cabinet", "countertop", "drawer", "drawer", "sinkbasin", "toilet"),
        at_most={"bathtub": 1, "cabinet": 4, "countertop": 2, "drawer": 3, "garbagecan": 1, "shelf": 1},
        objects=("candle", "cloth", "cup", "soapbar", "spraybottle", "toiletpaper"),
        task_types=("pick_and_place", "pick_clean_then_place", "pick_two_obj_and_place"),
    ),
}

_MIN_RECEPTACLES, _MAX_RECEPTACLES = 10, 11
_MIN_DISTRACTORS, _MAX_DISTRACTORS = 5, 8
_SECOND_COPY = 0.1  # how often one more object of the wanted type than needed is there
_EVAL_SHARE = 8  # one content in so many belongs to evaluation


@dataclass(frozen=True)
class HouseholdTask:
    """One task, whole: what is where at the start, and what is wanted.

    ``receptacles`` and the object names in ``placements`` are like "drawer 2" and "mug 1"; both are sorted.
    ``lamp_place`` is None where there is no lamp.
    """

    task_id: str
    task_type: str
    room: str
    object_type: str
    target_type: str  # receptacle type; "" for look_at_obj_in_light
    receptacles: tuple[str, ...]
    placements: tuple[tuple[str, str], ...]  # (object, receptacle)
    lamp_place: str | None

    @property
    def process(self) -> str | None:
        """ "clean", "heat", "cool" or None: what must be done to the object before it is put down."""
        return PROCESS_OF_TYPE.get(self.task_type)

    @property
    def count(self) -> int:
        """How many objects must end in one receptacle of the target type."""
        return 2 if self.task_type == "pick_two_obj_and_place" else 1

    @property
    def goal(self) -> str:
        """The goal in words."""
        if self.task_type == "look_at_obj_in_light":
            return f"look at {self.object_type} under desklamp"
        if self.count == 2:
            return f"put two {self.object_type} in {self.target_type}"
        word = f"{RESULT_WORD[self.process]} " if self.process else ""
        return f"put a {word}{self.object_type} in {self.target_type}"

    def content(self) -> str:
        """Layout, goal and placement as text, without the id and without the objects' numbers: equal for tasks that are the same task."""
        things = sorted(f"{type_of(thing)} {place}" for thing, place in self.placements)
        return "|".join((self.goal, ",".join(self.receptacles), ",".join(things), self.lamp_place or ""))


def type_of(name: str) -> str:
    """ "drawer" of "drawer 2"."""
    return name.split(" ", 1)[0]


def is_eval_content(content: str) -> bool:
    """Which split a content belongs to: fixed by the content alone."""
    return hashlib.blake2b(content.encode(), digest_size=8).digest()[0] % _EVAL_SHARE == 0


def generate_task(task_id: str, split: str, index: int, seed: int, task_types: Sequence[str]) -> HouseholdTask:
    """The task number ``index`` of a split ("train" or "eval") of the suite with this seed and these families."""
    attempt = 0
    while True:
        task = _draw(task_id, Random(f"household/{seed}/{split}/{index}/{attempt}"), task_types)
        if task is not None and is_eval_content(task.content()) == (split == "eval"):
            return task
        attempt += 1


def excluded_starts(task_type: str, target_type: str) -> tuple[str, ...]:
    """Receptacle types that never hold the wanted object at the start: the tool's, or without a process the target's."""
    process = PROCESS_OF_TYPE.get(task_type)
    return (TOOLS[process],) if process else (target_type,)


def _pick(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _between(rng: Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))


def shuffled(rng: Random, items: Sequence[T]) -> list[T]:
    """The items in random order, drawn with ``Random.random`` alone."""
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=lambda pair: pair[0])]


def pick_weighted(rng: Random, items: Sequence[T], weights: Sequence[float]) -> T:
    """One item with probability in proportion to its weight (non-negative, not all 0)."""
    mark = rng.random() * sum(weights)
    for item, weight in zip(items, weights, strict=True):
        mark -= weight
        if mark < 0:
            return item
    return max(zip(weights, range(len(items)), items, strict=True))[2]  # rounding left nothing: the heaviest


def _numbered(types: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for kind in sorted(types):
        seen[kind] = seen.get(kind, 0) + 1
        names.append(f"{kind} {seen[kind]}")
    return names


def _place(rng: Random, kind: str, receptacles: Sequence[str]) -> str:
    prior = PRIORS[kind]
    return pick_weighted(rng, receptacles, [ANYWHERE + prior.get(type_of(name), 0) for name in receptacles])


def _layout(rng: Random, room: Room) -> list[str]:
    types = list(room.always)
    wanted = _between(rng, _MIN_RECEPTACLES, _MAX_RECEPTACLES)
    spare = [kind for kind, most in room.at_most.items() for _ in range(most - room.always.count(kind))]
    types += shuffled(rng, spare)[: wanted - len(types)]
    return _numbered(types)


def _draw(task_id: str, rng: Random, task_types: Sequence[str]) -> HouseholdTask | None:
    """One draw; None where the room drawn has no target for the goal."""
    task_type = _pick(rng, task_types)
    process = PROCESS_OF_TYPE.get(task_type)
    room_name = _pick(rng, [name for name, room in ROOMS.items() if task_type in room.task_types])
    room = ROOMS[room_name]
    receptacles = _layout(rng, room)
    types = sorted({type_of(name) for name in receptacles})
    wanted = _pick(rng, [kind for kind in room.objects if process is None or kind in PROCESSABLE[process]])

    lamp_place = None
    if room_name in ("bedroom", "livingroom"):
        lamp_place = pick_weighted(rng, receptacles, [LAMP_PRIOR.get(type_of(name), 0) for name in receptacles])

    target_type = ""
    if task_type != "look_at_obj_in_light":
        # Not the tool itself: what is heated would already be in the microwave's place.
        targets = [kind for kind in types if kind in PRIORS[wanted] and kind != TOOLS.get(process or "")]
        if not targets:
            return None
        target_type = _pick(rng, targets)

    starts = [name for name in receptacles if type_of(name) not in excluded_starts(task_type, target_type)]
    copies = (2 if task_type == "pick_two_obj_and_place" else 1) + (rng.random() < _SECOND_COPY)
    things: list[tuple[str, str]] = []
    for _ in range(copies):
        things.append((wanted, _place(rng, wanted, starts)))
    others = [kind for kind in room.objects if kind != wanted]
    for _ in range(_between(rng, _MIN_DISTRACTORS, _MAX_DISTRACTORS)):
        kind = _pick(rng, others)
        things.append((kind, _place(rng, kind, receptacles)))

    # Numbers are dealt at random, so that "mug 1" says nothing of where it is.
    things = shuffled(rng, things)
    count: dict[str, int] = {}
    placements = []
    for kind, place in things:
        count[kind] = count.get(kind, 0) + 1
        placements.append((f"{kind} {count[kind]}", place))
    return HouseholdTask(
        task_id=task_id,
        task_type=task_type,
        room=room_name,
        object_type=wanted,
        target_type=target_type,
        receptacles=tuple(receptacles),
        placements=tuple(sorted(placements)),
        lamp_place=lamp_place,
    )
