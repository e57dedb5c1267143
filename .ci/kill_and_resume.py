"""Train twice by one configuration, once straight, once killed (SIGKILL) in the middle and resumed; compare tensors and numbers."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from sapo_fast import checkpoint
from sapo_fast.trackers import read_jsonl

LIMIT_SECONDS = 600
UNEQUAL = ("time/", "memory/")  # differ between any two runs


def command(config: str, run: Path) -> list[str]:
    sapo_fast = str(Path(sys.executable).with_name("sapo-fast"))
    return [sapo_fast, "train", "--config", config, f"output_dir={run}", "threads=1", "checkpoint.every=1"]


def numbers(run: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if not k.startswith(UNEQUAL)} for record in read_jsonl(run / "metrics.jsonl")]


def kill_in_the_middle(config: str, run: Path) -> int:
    """Start, wait for the second iteration's line, let the third begin, kill. Returns the number of iterations logged."""
    process = subprocess.Popen(command(config, run), start_new_session=True)
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(numbers(run)) < 2:
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed: give configs/smoke.yaml more iterations"
    return len(numbers(run))


def main(config: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        straight, killed = Path(folder) / "straight", Path(folder) / "killed"
        subprocess.run(command(config, straight), check=True)
        logged = kill_in_the_middle(config, killed)
        subprocess.run(command(config, killed), check=True)

        assert numbers(straight) == numbers(killed), first_difference(numbers(straight), numbers(killed))
        last = [checkpoint.latest(run / "checkpoints") for run in (straight, killed)]
        states = [json.loads((path / "state.json").read_text()) for path in last]
        assert checkpoint.iteration_of(last[0]) == checkpoint.iteration_of(last[1])
        assert states[0] == states[1], first_difference(*([state] for state in states))
        compared = 0
        for file in sorted(last[0].glob("*.safetensors")):
            tensors = [load_file(path / file.name) for path in last]
            assert tensors[0].keys() == tensors[1].keys()
            for name, tensor in tensors[0].items():
                assert tensor.numpy().tobytes() == tensors[1][name].numpy().tobytes(), f"{file.name}: {name} differs"
                compared += 1
        assert compared, "nothing was compared"
        print(
            f"killed after {logged} iterations and resumed = straight: {compared} tensors, {len(numbers(straight))} log lines equal bitwise"
        )


def first_difference(a: list[dict], b: list[dict]) -> str:
    if len(a) != len(b):
        return f"{len(a)} log lines against {len(b)}"
    line, other = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
    differing = [key for key in line.keys() | other.keys() if line.get(key) != other.get(key)]
    return "; ".join(f"{key}: {line.get(key)} against {other.get(key)}" for key in differing)


if __name__ == "__main__":
    main(sys.argv[1])
