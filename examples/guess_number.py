"""A whole environment of your own: guess a number from "higher" and "lower".

    sapo-fast train env.name=examples.guess_number:suite env.max_turns=5

``env.name`` names an object of this module, from the folder above ``examples``. The protocol is in sapo_fast/envs/base.py.
"""

from random import Random

from sapo_fast.envs.demonstration import Demonstration, DemonstrationTurn

WIDTH = 32  # a number from low to low + WIDTH - 1
PAIRS = [(low, secret) for low in range(1, 41) for secret in range(low, low + WIDTH)]
Random(0).shuffle(PAIRS)
SPLITS = {"train": PAIRS[:1152], "eval": PAIRS[1152:]}  # no pair is in both


class GuessNumber:
    """The game. One command is one number."""

    def reset(self, *, seed=None, options=None):
        split, _, index = options["task"].partition("-")
        self.low, self.secret = SPLITS[split][int(index)]
        self.info = {"task_id": options["task"], "task": "guess the number", "task_type": "guess", "won": False, "invalid": False}
        return f"guess a number from {self.low} to {self.low + WIDTH - 1} .", dict(self.info)

    def step(self, command):
        if not (command.isascii() and command.isdigit() and len(command) < 4):
            return "say one number .", 0.0, False, False, self.info | {"invalid": True}
        guess = int(command)
        if guess == self.secret:
            return "right .", 1.0, True, False, self.info | {"won": True}
        return f"{'higher' if guess < self.secret else 'lower'} .", 0.0, False, False, dict(self.info)

    def close(self):
        pass


class GuessSuite:
    """The tasks, and what makes the game."""

    name = "guess_number"
    system_prompt = "answer with one number ."

    def train_tasks(self):
        return [f"train-{i}" for i in range(len(SPLITS["train"]))]

    def eval_tasks(self):
        return [f"eval-{i}" for i in range(len(SPLITS["eval"]))]

    def make(self):
        return GuessNumber()

    def expert_episodes(self, n, *, seed, max_turns, noise):
        """Only for model.path=tiny, which learns the language of the game from these: any number that is still possible."""
        if noise:
            raise ValueError(f"guess_number: its expert has no settings, got {', '.join(noise)}")
        game, tasks = self.make(), self.train_tasks()
        for i in range(n):
            rng = Random(f"{seed}/{i}")
            episode = Demonstration(rng.choice(tasks))
            text, info = game.reset(options={"task": episode.task_id})
            low, high = game.low, game.low + WIDTH - 1
            while len(episode.turns) < max_turns and not episode.won:
                guess = rng.randint(low, high)
                answer, reward, _, _, next_info = game.step(str(guess))
                episode.turns.append(DemonstrationTurn(text, info, str(guess), reward))
                low, high = (guess + 1, high) if answer == "higher ." else (low, guess - 1)
                text, info, episode.won = answer, next_info, next_info["won"]
            episode.final_observation = text
            yield episode


suite = GuessSuite()
