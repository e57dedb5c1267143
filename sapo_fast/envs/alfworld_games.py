"""ALFWorld games made up, in the data set's own layout: everything about ALFWorld runs with no download of games.

    python -m sapo_fast.envs.alfworld_games FOLDER [--train 64] [--seen 16] [--unseen 16] [--seed 0] [--size 1.0] [--check]

writes FOLDER/json_2.1.1/<split>/<task>-<object>-None-<place or lamp>-<scene>/trial_<seed>/{game.tw-pddl, traj_data.json} and FOLDER/logic. Rooms
and what fits where are ALFRED's (the alfworld package); which receptacles a room has is a function of its scene number, which objects lie where
of the game's seed. train and valid_seen share scenes, never a game of the same task, object, goal and scene; valid_unseen has ALFRED's own test
scenes, which occur in no other split. Every game comes with a walkthrough, and --check plays it. --size below 1 makes smaller rooms.

Needs ``pip install 'sapo_fast[alfworld]'``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sapo_fast.envs.alfworld import TASK_TYPES

try:
    from alfworld.agents.utils.misc import Demangler
    from alfworld.gen import constants, goal_library
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
except ImportError as error:
    raise ModuleNotFoundError(f"making ALFWorld games needs the alfworld package ({error}); pip install 'sapo_fast[alfworld]'") from error

# room -> receptacles as "class fewest most", about as often as in the data set's rooms
_RECEPTACLES = {
    "Kitchen": "CounterTop 2 3,Cabinet 6 16,Drawer 3 8,StoveBurner 4 4,Fridge 1 1,Microwave 1 1,SinkBasin 1 1,CoffeeMachine 1 1,Toaster 1 1,"
    "GarbageCan 1 1,Shelf 0 3,DiningTable 0 1,SideTable 0 1",
    "LivingRoom": "Drawer 2 7,Shelf 2 6,SideTable 1 3,Sofa 1 2,ArmChair 1 2,Cabinet 0 3,CoffeeTable 1 1,GarbageCan 1 1,Dresser 0 1,DiningTable 0 1,"
    "Safe 0 1,TVStand 0 1,Ottoman 0 1",
    "Bedroom": "Drawer 3 9,Shelf 2 5,Desk 1 2,Bed 1 2,GarbageCan 1 1,SideTable 0 2,Dresser 0 1,Safe 0 1,LaundryHamper 0 1,ArmChair 0 1",
    "Bathroom": "Cabinet 2 4,Drawer 0 4,HandTowelHolder 1 2,SinkBasin 1 2,Toilet 1 1,TowelHolder 1 1,GarbageCan 1 1,CounterTop 1 1,"
    "ToiletPaperHanger 1 1,BathtubBasin 0 1,Shelf 0 2,Cart 0 1",
}
_OBJECTS = {
    "Kitchen": "Tomato Mug Potato PepperShaker Plate Egg Fork Bowl Spatula Spoon Apple Cup SoapBottle SaltShaker Knife DishSponge ButterKnife "
    "Lettuce Bread Pot Pan Glassbottle Vase CreditCard CellPhone Statue WineBottle Kettle Ladle",
    "LivingRoom": "RemoteControl KeyChain Statue CreditCard Box Vase Laptop Pillow Newspaper Watch TissueBox CellPhone Book Plate Candle WateringCan "
    "Pencil Pen Bowl",
    "Bedroom": "CD CellPhone CreditCard KeyChain Pencil Book AlarmClock Pen Pillow Laptop Mug Bowl BaseballBat BasketBall Box TennisRacket "
    "RemoteControl TissueBox Statue Vase Cloth",
    "Bathroom": "ToiletPaper SoapBar SprayBottle Candle SoapBottle Cloth HandTowel Towel TissueBox DishSponge",
}
_LAMPS = {"LivingRoom": ("FloorLamp", "DeskLamp"), "Bedroom": ("DeskLamp",)}
_LAMP_PLACES = ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable")
# task -> (property that the object must have, receptacle that gives it, verb)
_PROCESSES = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin", "clean"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave", "heat"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge", "cool"),
}
_PREDICATES = (
    ("Cleanable", "cleanable"),
    ("Heatable", "heatable"),
    ("Coolable", "coolable"),
    ("Toggleable", "toggleable"),
    ("Sliceable", "sliceable"),
)
_BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}  # the data set's names: Sink_bar_..._bar_SinkBasin
SPLITS = ("train", "valid_seen", "valid_unseen")


@dataclass(frozen=True)
class GameKey:
    """What a game is about. Two games of one key differ in where things lie."""

    task: str
    thing: str  # class of the object wanted
    goal: str  # class of the receptacle, or of the lamp
    scene: int

    @property
    def folder(self) -> str:
        return f"{self.task}-{self.thing}-None-{self.goal}-{self.scene}"


def _identifier(kind: str, rng: random.Random, used: set[str]) -> str:
    """A name as the data set's: the class and a position, with the characters that PDDL forbids spelt out."""
    while True:
        position = (rng.uniform(-3, 3), rng.uniform(0, 2), rng.uniform(-3, 3))
        text = "".join(f"_bar__{'plus' if x >= 0 else 'minus'}_{abs(x):05.2f}" for x in position).replace(".", "_dot_")
        if text not in used:
            used.add(text)
            return f"{_BASINS[kind]}{text}_bar_{kind}" if kind in _BASINS else kind + text


class Room:
    """The receptacles of a scene: a function of its number and the size."""

    def __init__(self, scene: int, size: float) -> None:
        self.kind = next(kind for kind, scenes in constants.SCENE_TYPE.items() if scene in scenes)
        rng = random.Random(f"room-{scene}-{size}")
        self.used: set[str] = set()
        self.receptacles: dict[str, str] = {}  # name -> class
        for entry in _RECEPTACLES[self.kind].split(","):
            kind, fewest, most = entry.split()
            count = rng.randint(int(fewest), int(most))
            if int(most) > 2:
                count = max(min(int(fewest), 1), round(count * size))
            for _ in range(count):
                self.receptacles[_identifier(kind, rng, self.used)] = kind
        places: list[str] = []
        while len(places) <= len(self.receptacles):
            numbers = (rng.randint(-12, 12), rng.randint(-12, 12), rng.randint(0, 3), rng.choice((0, 15, 30, 45, 60)))
            place = "loc_bar_" + "_bar_".join(f"_minus_{-n}" if n < 0 else str(n) for n in numbers)
            if place not in places:
                places.append(place)
        self.start = places.pop()
        self.location = dict(zip(self.receptacles, places, strict=True))
        self.openable = {name for name, kind in self.receptacles.items() if kind in constants.OPENABLE_CLASS_LIST}
        lamps = _LAMPS.get(self.kind, ())
        kept = tuple(lamp for lamp in lamps if rng.random() < 0.8) or lamps[:1]
        self.lamps = kept if any(kind in _LAMP_PLACES for kind in self.receptacles.values()) else ()

    def classes(self) -> list[str]:
        return sorted(set(self.receptacles.values()))

    def keys(self, task: str, scene: int) -> list[GameKey]:
        """The games of a task that this room allows."""
        things = [thing for thing in _OBJECTS[self.kind].split() if any(_fits(thing, kind) for kind in self.classes())]
        if task == "look_at_obj_in_light":
            return [GameKey(task, thing, lamp, scene) for thing in things for lamp in self.lamps]
        tool = ""
        if task in _PROCESSES:
            quality, tool, _ = _PROCESSES[task]
            if tool not in self.classes():
                return []
            things = [thing for thing in things if thing in constants.VAL_ACTION_OBJECTS[quality]]
        return [
            GameKey(task, thing, kind, scene)
            for thing in things
            for kind in self.classes()
            # what is wanted must have another place to lie in at first
            if kind != tool and _fits(thing, kind) and any(_fits(thing, other) for other in self.classes() if other != kind)
        ]


def _fits(thing: str, receptacle: str) -> bool:
    return thing in constants.VAL_RECEPTACLE_OBJECTS.get(receptacle, ())


@dataclass
class _Scene:
    """A room with its objects."""

    room: Room
    things: list[tuple[str, str, str]] = field(default_factory=list)  # name, class, receptacle

    def place(self, kind: str, rng: random.Random, used: set[str], without: str = "") -> None:
        """Put an object of a class somewhere it fits, unless there is no such place."""
        places = [name for name, receptacle in self.room.receptacles.items() if _fits(kind, receptacle) and receptacle != without]
        if places:
            self.things.append((_identifier(kind, rng, used), kind, rng.choice(places)))


def make_game(key: GameKey, seed: int, size: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of game.tw-pddl and traj_data.json. A function of the arguments."""
    room, rng = Room(key.scene, size), random.Random(f"game-{seed}-{key.folder}-{size}")
    scene, used = _Scene(room), set(room.used)
    look = key.task == "look_at_obj_in_light"
    for _ in range((2 if key.task == "pick_two_obj_and_place" else 1) + (rng.random() < 0.5)):
        scene.place(key.thing, rng, used, "" if look else key.goal)
    for kind in _OBJECTS[room.kind].split():
        if kind != key.thing:
            for _ in range(rng.choice((0, 1, 2, 3) if size >= 1 else (0, 0, 1, 1, 2))):
                scene.place(kind, rng, used)
    for lamp in room.lamps:
        places = [name for name, kind in room.receptacles.items() if kind in _LAMP_PLACES and name not in room.openable]
        scene.things.append((_identifier(lamp, rng, used), lamp, rng.choice(places)))
    wanted = [name for name, kind, _ in scene.things if kind == key.thing]
    rng.shuffle(scene.things)
    words = {"obj": key.thing, "recep": key.goal, "toggle": key.goal}
    sentence = rng.choice(goal_library.gdict[key.task]["templates"]).format(**{name: word.lower() for name, word in words.items()})
    goal = goal_library.gdict[key.task]["pddl"].format(**words).replace("#", "-")
    game = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", sentence),
        "pddl_problem": _problem(f"plan_trial_{seed}", scene, goal),
        "solvable": True,
        "walkthrough": list(_walkthrough(key, scene, wanted)),
    }
    trajectory = {
        "task_id": f"trial_{seed}",
        "task_type": key.task,
        "scene": {"scene_num": key.scene, "floor_plan": f"FloorPlan{key.scene}"},
        "pddl_params": {
            "object_target": key.thing,
            "object_sliced": False,
            "mrecep_target": "",
            "parent_target": "" if look else key.goal,
            "toggle_target": key.goal if look else "",
        },
        "turk_annotations": {"anns": []},
        "generated_by": "sapo_fast",
    }
    return game, trajectory


def _problem(name: str, scene: _Scene, goal: str) -> str:
    """The PDDL problem. ALFRED's goal text closes the problem's bracket."""
    room, facts = scene.room, []
    for receptacle, kind in room.receptacles.items():
        facts += [f"receptacleType {receptacle} {kind}Type", f"receptacleAtLocation {receptacle} {room.location[receptacle]}"]
    facts += [f"openable {receptacle}" for receptacle in sorted(room.openable)]
    for thing, kind, receptacle in scene.things:
        facts += [
            f"objectType {thing} {kind}Type",
            f"inReceptacle {thing} {receptacle}",
            f"objectAtLocation {thing} {room.location[receptacle]}",
        ]
        if kind not in ("FloorLamp", "DeskLamp"):
            facts.append(f"pickupable {thing}")
        if kind in constants.MOVABLE_RECEPTACLES_SET:
            facts.append(f"isReceptacleObject {thing}")
        facts += [f"{predicate} {thing}" for quality, predicate in _PREDICATES if kind in constants.VAL_ACTION_OBJECTS[quality]]
    kinds = sorted({kind for _, kind, _ in scene.things})
    facts += [f"canContain {receptacle}Type {kind}Type" for receptacle in room.classes() for kind in kinds if _fits(kind, receptacle)]
    facts.append(f"atLocation agent1 {room.start}")
    objects = ["agent1 - agent"]
    objects += [f"{kind}Type - otype" for kind in kinds] + [f"{kind}Type - rtype" for kind in room.classes()]
    objects += [f"{thing} - object" for thing, _, _ in scene.things] + [f"{receptacle} - receptacle" for receptacle in room.receptacles]
    objects += [f"{place} - location" for place in sorted({*room.location.values(), room.start})]
    lines = [f"\n(define (problem {name})", "(:domain alfred)", "(:objects", *(f"    {one}" for one in objects), "    )"]
    lines += ["(:init", *(f"    ({fact})" for fact in facts), "    )", goal]
    return "\n".join(lines)


@dataclass
class _Named:
    """As much of an entity as ALFWorld's naming needs."""

    id: str


def _walkthrough(key: GameKey, scene: _Scene, wanted: list[str]) -> Iterator[str]:
    """Commands that win, from knowing where everything is, in the words of the engine."""
    room = scene.room
    entities = [*(thing for thing, _, _ in scene.things), *room.receptacles, *room.location.values(), room.start, "agent1"]
    naming = Demangler(game_infos={name: _Named(name.lower()) for name in entities})
    name = {entity: naming.demangle_alfred_name(entity.lower()).strip() for entity in entities}
    lies_in = {thing: receptacle for thing, _, receptacle in scene.things}
    at, opened = "", set()

    def go(receptacle: str, inside: bool) -> Iterator[str]:
        nonlocal at
        if receptacle != at:
            yield f"go to {name[receptacle]}"
        at = receptacle
        if inside and receptacle in room.openable and receptacle not in opened:
            opened.add(receptacle)
            yield f"open {name[receptacle]}"

    def take(thing: str) -> Iterator[str]:
        yield from go(lies_in[thing], True)
        yield f"take {name[thing]} from {name[lies_in[thing]]}"

    if key.task == "look_at_obj_in_light":
        lamp = next(thing for thing, kind, _ in scene.things if kind == key.goal)
        yield from take(wanted[0])
        yield from go(lies_in[lamp], False)
        yield f"use {name[lamp]}"
        return
    goal = next(receptacle for receptacle, kind in room.receptacles.items() if kind == key.goal)
    for thing in wanted[: 2 if key.task == "pick_two_obj_and_place" else 1]:
        yield from take(thing)
        if key.task in _PROCESSES:
            _, tool, verb = _PROCESSES[key.task]
            tool = next(receptacle for receptacle, kind in room.receptacles.items() if kind == tool)
            yield from go(tool, False)
            yield f"{verb} {name[thing]} with {name[tool]}"
        yield from go(goal, True)
        yield f"move {name[thing]} to {name[goal]}"


def choose(counts: dict[str, int], seed: int, size: float, tasks: Sequence[str] = TASK_TYPES) -> Iterator[tuple[str, GameKey, int]]:
    """Split, key and seed of every game: the tasks in turn, no key twice. ValueError where the rooms do not allow so many."""
    rng, taken = random.Random(f"choose-{seed}"), set()
    for split in SPLITS:
        scenes = constants.TEST_SCENE_NUMBERS if split == "valid_unseen" else constants.TRAIN_SCENE_NUMBERS
        left = {
            task: [key for scene in sorted(scenes) for key in Room(scene, size).keys(task, scene) if key not in taken] for task in tasks
        }
        for keys in left.values():
            rng.shuffle(keys)
        for number in range(counts[split]):
            keys = left[tasks[number % len(tasks)]]
            if not keys:
                raise ValueError(
                    f"alfworld: the rooms of {split} allow only {number} games of {', '.join(tasks)}, got {counts[split]}; ask for fewer"
                )
            taken.add(key := keys.pop())
            yield split, key, rng.randrange(10**9)


def write_games(folder: Path, counts: dict[str, int], *, seed: int = 0, size: float = 1.0, tasks: Sequence[str] = TASK_TYPES) -> list[Path]:
    """Write games, so many of each split. Returns the game files. ValueError for bad counts, size and tasks."""
    if not tasks or any(task not in TASK_TYPES for task in tasks):
        raise ValueError(f"alfworld: tasks must be among {', '.join(TASK_TYPES)}, got {', '.join(tasks) or 'none'}")
    if any(count < 0 for count in counts.values()) or set(counts) != set(SPLITS):
        raise ValueError(f"alfworld: counts must give each of {', '.join(SPLITS)} a number of at least 0, got {counts}")
    if not 0.1 <= size <= 2:
        raise ValueError(f"alfworld: size must be from 0.1 to 2, got {size}")
    (folder / "logic").mkdir(parents=True, exist_ok=True)
    for source in (ALFRED_PDDL_PATH, ALFRED_TWL2_PATH):
        (folder / "logic" / Path(source).name).write_text(Path(source).read_text())
    written = []
    for split, key, game_seed in choose(counts, seed, size, tasks):
        where = folder / "json_2.1.1" / split / key.folder / f"trial_{game_seed}"
        where.mkdir(parents=True, exist_ok=True)
        for name, content in zip(("game.tw-pddl", "traj_data.json"), make_game(key, game_seed, size), strict=True):
            (where / name).write_text(json.dumps(content))
        written.append(where / "game.tw-pddl")
    return written


def check_game(path: Path) -> str:
    """Play a game's walkthrough in the engine; what is wrong with it, or an empty text."""
    from sapo_fast.envs.alfworld_engine import Engine, read_game

    game, engine = read_game(path), Engine()
    engine.load(game)
    _, admissible = engine.reset()
    won = engine.won
    for command in game.walkthrough:
        if won:
            return f"won before {command!r}"
        if command not in admissible:
            return f"{command!r} is not admissible"
        _, _, won, admissible = engine.step(command)
    engine.close()
    return "" if won else "not won by its walkthrough"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sapo_fast.envs.alfworld_games", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    for name, split, count in (("--train", "train", 64), ("--seen", "valid_seen", 16), ("--unseen", "valid_unseen", 16)):
        parser.add_argument(name, type=int, default=count, dest=split)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=float, default=1.0, help="below 1: fewer receptacles and objects")
    parser.add_argument("--tasks", default=",".join(TASK_TYPES), help="families, with commas")
    parser.add_argument("--check", action="store_true", help="play every walkthrough")
    given = parser.parse_args(arguments)
    counts = {split: getattr(given, split) for split in SPLITS}
    try:
        games = write_games(given.folder, counts, seed=given.seed, size=given.size, tasks=given.tasks.split(","))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    families = Counter(path.parts[-3].split("-")[0] for path in games)
    print(f"{len(games)} games in {given.folder}: " + ", ".join(f"{count} {family}" for family, count in families.items()))
    wrong = {path: reason for path in games if (reason := check_game(path))} if given.check else {}
    for path, reason in wrong.items():
        print(f"{path}: {reason}")
    if given.check:
        print(f"{len(games) - len(wrong)} of {len(games)} solvable, and won by their walkthrough")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
