"""ALFWorld's engine: is ours the stock one, and how much faster is it?

    python bench/alfworld_engine.py walk DATA        every game loads, and its own walkthrough wins it
    python bench/alfworld_engine.py same DATA        transcripts of both engines on 10 games of each family, byte for byte (random, then walkthrough)
    python bench/alfworld_engine.py speed DATA       steps per CPU second, load and reset, memory per environment: stock and ours, 1 and 64 environments

DATA: a folder with json_2.1.1. Needs the extra `alfworld`. Prints a table; exits 1 where something does not hold. Times are CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sapo_fast.envs.alfworld import TASK_TYPES, AlfWorld, task_type

clock = time.process_time


def suite_of(args: argparse.Namespace) -> AlfWorld:
    return AlfWorld(args.data, panel=args.panel, cache=args.cache)


def walkthrough(suite: AlfWorld, task: str) -> list[str]:
    return json.loads((suite.root / task / "game.tw-pddl").read_text())["walkthrough"]


def stock_env() -> Any:
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))


def walk(args: argparse.Namespace) -> int:
    """Play the walkthrough of every game of both splits."""
    suite = suite_of(args)
    tasks = [*suite.train_tasks(), *suite.eval_tasks()]
    env, lost, turns, began = suite.make(), [], 0, clock()
    for task in tasks:
        _, info = env.reset(options={"task": task})
        rewards = []
        for command in walkthrough(suite, task):
            if info["won"] or command not in info["admissible_commands"]:
                break
            _, reward, _, _, info = env.step(command)
            rewards.append(reward)
        turns += len(rewards)
        if not info["won"] or sum(rewards) != 1.0 or rewards[-1] != 1.0:
            lost.append(task)
            print("not won:", task)
    print(
        f"{len(tasks) - len(lost)} of {len(tasks)} games loaded and won by their walkthrough; {turns} turns, {clock() - began:.1f} CPU s in all"
    )
    return int(bool(lost))


def same(args: argparse.Namespace) -> int:
    """Play the same commands through both engines and compare every byte of text, every list of commands, and the end."""
    suite = suite_of(args)
    tasks = [*suite.train_tasks(), *suite.eval_tasks()]
    random.Random(0).shuffle(tasks)
    chosen = [task for kind in TASK_TYPES for task in [t for t in tasks if task_type(t) == kind][: args.games]]
    stock, ours, turns = stock_env(), suite.make(), 0
    for number, task in enumerate(chosen):
        rng = random.Random(number)
        for commands in (None, walkthrough(suite, task)):
            if commands is None:
                stock.load(str(suite.root / task / "game.tw-pddl"))
            state = stock.reset()
            text, info = ours.reset(options={"task": task})
            theirs, mine = (state.feedback, state["admissible_commands"]), (text, info["admissible_commands"])
            over = False
            for turn in range(args.turns if commands is None else len(commands)):
                if theirs != mine or over:
                    break
                command = rng.choice([*info["admissible_commands"], "dance", " look "]) if commands is None else commands[turn]
                state, score, done = stock.step(command)
                text, reward, over, _, info = ours.step(command)
                theirs = (state.feedback, state["admissible_commands"], bool(state["won"]), bool(done), float(score))
                mine = (text, info["admissible_commands"], info["won"], over, reward)
                turns += 1
            if theirs != mine:
                print(f"{task}: turn {turn + 1} differs\n  stock {theirs}\n  ours  {mine}")
                return 1
        print(f"{number + 1}/{len(chosen)} identical, {turns} turns so far", end="\r" if sys.stdout.isatty() else "\n", flush=True)
    print(f"\n{len(chosen)} games, {turns} turns: every observation, command list, score and end byte-identical")
    return 0


def rss() -> float:
    """Resident memory of this process, MiB."""
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024


def speed_of(args: argparse.Namespace) -> int:
    """One engine, ``envs`` environments, each on its own game, random commands in turn. Prints one line of JSON."""
    suite = suite_of(args)
    tasks = list(suite.train_tasks())
    random.Random(1).shuffle(tasks)
    files = {task: suite.root / task / "game.tw-pddl" for task in tasks[: args.envs]}
    rng, load, reset, again, play = random.Random(2), 0.0, 0.0, 0.0, []
    if args.engine == "stock":
        make = stock_env
    else:
        from sapo_fast.envs.alfworld_engine import Engine, read_game

        make = Engine
    warm = make()  # what is loaded once in a process is in neither figure
    if args.engine == "stock":
        warm.load(str(suite.root / tasks[-1] / "game.tw-pddl"))
    else:
        warm.load(read_game(suite.root / tasks[-1] / "game.tw-pddl", None))
    before = rss()
    envs = [make() for _ in files]
    commands: list[list[str]] = []
    for env, path in zip(envs, files.values(), strict=True):
        began = clock()
        env.load(str(path) if args.engine == "stock" else read_game(path, Path(args.cache) if args.cache else None))
        load += clock() - began
        began = clock()
        state = env.reset()
        reset += clock() - began
        began = clock()
        state = env.reset()
        again += clock() - began
        commands.append(state["admissible_commands"] if args.engine == "stock" else state[1])
    for _ in range(args.turns):
        for i, env in enumerate(envs):
            command = rng.choice(commands[i])
            began = clock()
            state = env.step(command)
            play.append(clock() - began)
            commands[i] = state[0]["admissible_commands"] if args.engine == "stock" else state[3]
    n = len(envs)
    figures = {
        "load": load / n,
        "reset": reset / n,
        "again": again / n,
        "step": sum(play) / len(play),
        "steps": len(play),
        "mib": (rss() - before) / n,
    }
    print(json.dumps(figures))
    return 0


def speed(args: argparse.Namespace) -> int:
    def measure(engine: str, envs: int, cache: str, turns: int) -> dict[str, float]:
        command = [
            sys.executable,
            __file__,
            "_speed",
            str(suite_of(args).root),
            "--engine",
            engine,
            "--envs",
            str(envs),
            "--turns",
            str(turns),
        ]
        done = subprocess.run([*command, "--panel", args.panel, "--cache", cache], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    print(f"{'':<34}{'load s':>9}{'reset s':>9}{'again s':>9}{'step ms':>9}{'steps/s':>9}{'MiB/env':>9}")
    with tempfile.TemporaryDirectory() as cache:
        rows = {}
        for label, engine, envs, where, turns in (
            ("stock, 1 environment", "stock", 1, "", 50),
            ("ours, 1 environment, first load", "ours", 1, cache, 2000),
            ("ours, 1 environment, kept on disk", "ours", 1, cache, 2000),
            ("stock, 64 environments", "stock", 64, "", args.stock_turns),
            ("ours, 64 environments, first load", "ours", 64, cache, 50),
            ("ours, 64 environments, kept on disk", "ours", 64, cache, 50),
        ):
            row = rows[label] = measure(engine, envs, where, turns)
            times = f"{row['load']:>9.3f}{row['reset']:>9.4f}{row['again']:>9.4f}{1e3 * row['step']:>9.3f}{1 / row['step']:>9,.0f}"
            print(f"{label:<34}{times}{row['mib']:>9.1f}", flush=True)
    for envs in (1, 64):
        stock, ours = (next(row for label, row in rows.items() if label.startswith(f"{who}, {envs} ")) for who in ("stock", "ours"))
        print(
            f"{envs} environment{'s' if envs > 1 else ''}: {stock['step'] / ours['step']:.0f} times the stock engine's steps per CPU second"
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("walk", "same", "speed", "_speed"))
    parser.add_argument("data")
    parser.add_argument("--panel", default="valid_seen")
    parser.add_argument("--cache", default="~/.cache/sapo_fast/alfworld", help='translations; "" for none')
    parser.add_argument("--games", type=int, default=10, help="same: games of each family")
    parser.add_argument("--turns", type=int, default=30, help="same: random commands a game")
    parser.add_argument("--stock-turns", type=int, default=3, help="speed: turns of the stock engine's 64 environments")
    parser.add_argument("--engine", choices=("stock", "ours"), default="ours", help=argparse.SUPPRESS)
    parser.add_argument("--envs", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    return {"walk": walk, "same": same, "speed": speed, "_speed": speed_of}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
