"""The command line: what each command does, and that every mistake is one clear message with exit code 2 and no traceback."""

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from sapo_fast import cli, run_folder
from sapo_fast import compare as compare_module
from sapo_fast.config import load_config
from sapo_fast.trackers import read_jsonl

ROOT = Path(__file__).parents[1]
SMOKE = str(ROOT / "configs" / "smoke.yaml")


@pytest.fixture(autouse=True)
def _own_logging():
    """main() configures logging once a process; here it runs many times."""
    root, handlers = logging.getLogger(), list(logging.getLogger().handlers)
    yield
    root.handlers[:] = handlers


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("warm_start")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, cache):
    """A finished run of two iterations, trained through the command line."""
    folder = tmp_path_factory.mktemp("runs") / "smoke"
    assert cli.main(["train", "--config", SMOKE, *settings(folder, cache), "iterations=2"]) == 0
    return folder


def settings(folder, cache):
    return [f"output_dir={folder}", f"warm_start.cache_dir={cache}", "threads=1"]


def refused(capsys, *argv, code=2):
    """Run a command that must fail; returns what it said on stderr."""
    assert cli.main(list(argv)) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and captured.out == ""
    assert captured.err.startswith(f"sapo-fast {argv[0]}: ")
    return captured.err


# ---- mistakes --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", "--configs", "x.yaml"], "unrecognised argument --configs; did you mean --config?"),
        (["train", "--resum=never"], "unrecognised argument --resum=never; did you mean --resume?"),
        (["env", "seed=1"], "unrecognised argument seed=1"),
        (["trian"], "invalid choice: 'trian'"),
        ([], "COMMAND"),
        (["compare", "--algorithms", "ppoo"], "invalid choice: 'ppoo'"),
    ],
)
def test_a_mistyped_command_line(capsys, argv, told):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["optim.learning_rate=1"], "did you mean 'optim.lr'?"),
        (["env.max_turns=0"], "env.max_turns must be a whole number >= 1, got 0"),
        (["--config", "configs/dem.yaml"], "did you mean configs/demo.yaml?"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config must be given once, got a.yaml and b.yaml"),
        (["iterations=1", "--config", SMOKE, "iterations=2"], "'iterations=2' and 'iterations=1' set the same thing"),
        (["log.wandb=true"], "log.wandb=true needs the package wandb; pip install wandb"),
    ],
)
def test_a_bad_configuration(capsys, monkeypatch, tmp_path, command, argv, told):
    monkeypatch.chdir(ROOT)
    where = ["--out", str(tmp_path)] if command == "compare" else []
    assert told in refused(capsys, command, *argv, *where)
    assert not list(tmp_path.iterdir())


def test_the_traceback_is_there_for_those_who_want_it(capsys):
    assert cli.main(["train", "sed=1", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.rstrip().endswith("did you mean 'seed'?")


def test_an_error_that_is_a_bug_shows_its_traceback(capsys, monkeypatch):
    def broken(*_):
        raise KeyError("oh")

    monkeypatch.setattr(run_folder, "check", broken)
    assert cli.main(["train"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder, "check", lambda *_: (_ for _ in ()).throw(ModuleNotFoundError("No module named 'yaml'", name="yaml")))
    assert "pip install 'sapo_fast[train]'" in refused(capsys, "train")
    monkeypatch.setattr(
        run_folder, "check", lambda *_: (_ for _ in ()).throw(ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.pyplot"))
    )
    assert "pip install 'sapo_fast[plot]'" in refused(capsys, "train")


@pytest.mark.parametrize("place", ["a file", "below a file", "read-only"])
def test_an_output_folder_that_cannot_be_written(capsys, tmp_path, place):
    (tmp_path / "file").write_text("")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "run", "read-only": Path("/proc/run")}[place]
    message = refused(capsys, "train", f"output_dir={folder}", "--dry-run")
    assert "output_dir must be" in message and f"got {folder}, but" in message and "set another output_dir" in message
    assert "No such file" not in message


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("env.name=houshold", "household"),
        ("env.options.rooms_of_gold=3", "rooms_of_gold"),
        ("model.path=/no/such/model", "/no/such/model"),
        ("model.device=cuda:7", "model.device"),
        ("resume", "--resume must be auto, never or a checkpoint's directory"),
    ],
)
def test_a_dry_run_finds_what_would_stop_the_run(capsys, tmp_path, override, told):
    arguments = ["--resume", "nowhere"] if override == "resume" else [override]
    assert told in refused(capsys, "train", "--dry-run", f"output_dir={tmp_path / 'new'}", *arguments)
    assert not (tmp_path / "new").exists()


OWN = """
from examples.guess_number import GuessSuite

class Broken(GuessSuite):
    name = "broken"
    def expert_episodes(self, n, *, seed, max_turns, noise):
        for i, episode in enumerate(super().expert_episodes(n, seed=seed, max_turns=max_turns, noise=noise)):
            if i == 3:
                raise KeyError("low")
            yield episode

class Wordless:
    name, system_prompt = "wordless", ""
    train_tasks, eval_tasks, make = GuessSuite.train_tasks, GuessSuite.eval_tasks, GuessSuite.make

class Odd(GuessSuite):
    def expert_episodes(self, n, *, seed, max_turns, noise):
        return [] if seed else [{"task": "guess"}]

class Untested(GuessSuite):
    def eval_tasks(self):
        return []
"""


@pytest.fixture
def own_suites(tmp_path, monkeypatch):
    """Environments of a user's own, in a module beside the examples."""
    (tmp_path / "own_suites.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    yield
    sys.modules.pop("own_suites", None)


@pytest.mark.parametrize("how", [[], ["--dry-run"]], ids=["train", "dry run"])
@pytest.mark.parametrize(
    ("settings_", "told"),
    [
        (["env.name=own_suites:Wordless"], ["'own_suites:Wordless' has none", "docs/environments.md"]),
        (["env.name=own_suites:Odd"], ["env.name=own_suites:Odd failed: TypeError", "got dict", "Mend its expert_episodes"]),
        (["env.name=own_suites:Odd", "warm_start.seed=1"], ["it gave no episode"]),
        (["env.name=own_suites:Untested"], ["must have training and evaluation tasks, got 1152 and 0"]),
        (
            ["env.name=examples.guess_number:suite", "warm_start.expert={p_slip: 0.1}"],
            ["expert of env.name=examples.guess_number:suite failed", "{'p_slip': 0.1}; if these are another", "warm_start.expert={}"],
        ),
        (["warm_start.expert={p_slipp: 0.1}"], ["did you mean 'p_slip'?"]),
    ],
)
def test_a_suite_that_cannot_be_learned_from_is_told_and_leaves_no_folder(capsys, tmp_path, cache, own_suites, how, settings_, told):
    message = refused(capsys, "train", "--config", SMOKE, *settings(tmp_path / "a" / "run", cache), *settings_, *how)
    assert all(text in message for text in told), message
    assert not (tmp_path / "a").exists()


def test_an_expert_that_breaks_half_way_is_told_by_its_last_task(capsys, tmp_path, cache, own_suites):
    message = refused(capsys, "train", "--config", SMOKE, *settings(tmp_path / "run", cache), "env.name=own_suites:Broken")
    assert (
        "failed after 3 episodes, the last of task 'train-" in message
        and "KeyError: 'low'" in message
        and "warm_start.expert" not in message
    )


def test_a_refused_command_leaves_an_older_folder_as_it_was(tmp_path):
    (tmp_path / "kept").mkdir()
    for folder, left in ((tmp_path / "kept", [".lock"]), (tmp_path / "deep" / "run", [".lock", "metrics.jsonl"])):
        with pytest.raises(ValueError, match="refused"), run_folder.lock(folder):  # noqa: PT012 - the state inside the lock is the point
            if folder.parent.name == "deep":
                (folder / "metrics.jsonl").touch()
            raise ValueError("refused")
        assert sorted(path.name for path in folder.iterdir()) == left


@pytest.mark.parametrize("command", ["report", "export", "eval"])
def test_a_folder_without_a_run(capsys, tmp_path, command):
    arguments = [str(tmp_path / "none")] + ([str(tmp_path / "out")] if command == "export" else [])
    message = refused(capsys, command, *arguments)
    assert f"{tmp_path / 'none'} is " in message and "give the output_dir of a training run" in message and "model.path" not in message
    assert not (tmp_path / "out").exists()


# ---- what works ------------------------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_a_configuration_that_is_valid_again_and_does_nothing(capsys, tmp_path):
    folder = tmp_path / "run"
    assert cli.main(["train", "--config", SMOKE, "--dry-run", f"output_dir={folder}", "optim.lr=3e-5"]) == 0
    text = capsys.readouterr().out
    assert not folder.exists()
    (tmp_path / "again.yaml").write_text(text)
    assert load_config(str(tmp_path / "again.yaml"), []) == load_config(SMOKE, [f"output_dir={folder}", "optim.lr=3e-5"])
    plan = dict(line[2:].split("  ", 1) for line in text.splitlines() if line.startswith("# ") and "  " in line)
    assert plan["output"].strip() == f"{folder}, from the start"
    assert "M parameters" in plan["model"] and "household" in plan["environment"]
    assert plan["row_pass"].strip().endswith("on cpu") and "turn_gae" in plan


def test_the_size_in_the_plan_is_the_model_s(run_dir):
    from transformers import AutoModelForCausalLM

    from sapo_fast.plan import _parameters

    config = load_config(str(run_dir / "config.yaml"), [])
    exported = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(run_dir / "model").parameters())
    assert _parameters(config.model_copy(update={"model": config.model.model_copy(update={"path": str(run_dir / "model")})})) == exported
    assert abs(_parameters(config) - exported) < 0.3 * exported  # the tokenizer of this tiny warm start is smaller than the usual one


def test_train_writes_what_it_says(run_dir):
    assert load_config(str(run_dir / "config.yaml"), []).iterations == 2
    assert [record["iteration"] for record in read_jsonl(run_dir / "metrics.jsonl")] == [0, 1, 2]
    assert (run_dir / "model" / "sapo_fast.json").is_file() and (run_dir / "episodes.md").is_file()


def test_a_run_goes_on_only_under_settings_that_mean_the_same(capsys, run_dir, cache, caplog):
    own = ["--config", SMOKE, *settings(run_dir, cache)]
    for changed in ("seed=3", "loss.tau_v=0.5", "env.max_turns=7", "algorithm=ppo"):
        message = refused(capsys, "train", *own, "iterations=2", changed)
        assert f"{changed.split('=')[0]} is" in message and "holds a run with other settings" in message
    assert "delete it, or set another output_dir" in refused(capsys, "train", *own, "iterations=2", "--resume", "never")
    run_folder.check(load_config(SMOKE, [*settings(run_dir, cache), "iterations=9", "eval.every=1"]), "auto")
    assert not caplog.records
    run_folder.check(load_config(SMOKE, [*settings(run_dir, cache), "optim.lr=0.5"]), "auto")
    assert "optim.lr was 0.001 when the run" in caplog.text and "it goes on with 0.5" in caplog.text


def test_two_processes_cannot_train_in_one_folder(capsys, run_dir, cache):
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; from pathlib import Path; from sapo_fast.run_folder import lock\n"
         "with lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()", str(run_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        message = refused(capsys, "train", "--config", SMOKE, *settings(run_dir, cache), "iterations=2")
        assert f"process {holder.pid} is training in {run_dir} already" in message
    finally:
        holder.kill()
        holder.wait()
    with run_folder.lock(run_dir):  # a killed process holds nothing
        pass


def test_eval_report_and_export_of_a_run(capsys, run_dir, tmp_path):
    assert cli.main(["eval", str(run_dir)]) == 0
    evaluated = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("eval/"))
    last = list(read_jsonl(run_dir / "metrics.jsonl"))[-1]
    assert float(evaluated["eval/success"]) == pytest.approx(last["eval/success"], rel=1e-3)
    assert float(evaluated["eval/turns"]) == pytest.approx(last["eval/turns"], rel=1e-3)
    assert cli.main(["report", str(run_dir)]) == 0
    assert Path(capsys.readouterr().out.split()[1]).is_file()
    assert cli.main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    for name in ("model.safetensors", "generation_config.json", "sapo_fast.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run_dir / "model" / name).read_bytes(), name
    assert cli.main(["eval", str(tmp_path / "out"), "eval.episodes=1"]) == 0  # a model directory is evaluated as well
    assert "eval/success" in capsys.readouterr().out


def test_env_names_every_backend_with_its_reason(capsys):
    from sapo_fast import backends

    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    for row in backends.explain():
        assert any(line.split()[:2] == [row.operation, row.backend] and row.reason in line for line in text.splitlines())
    assert "torch" in text and "python" in text and "cuda" in text


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith("sapo-fast ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_a_checkpoint_and_exits_130(tmp_path, cache, run_dir, number):
    folder = tmp_path / "run"
    arguments = ["train", "--config", SMOKE, *settings(folder, cache), "iterations=500", "checkpoint.every=0", "eval.every=0"]
    # A shell that puts the tests in the background makes them, and this run, deaf to SIGINT.
    process = subprocess.Popen(
        [sys.executable, "-m", "sapo_fast.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 240
    while not (folder / "metrics.jsonl").is_file() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output and "interrupted" in output
    done = [record["iteration"] for record in read_jsonl(folder / "metrics.jsonl")]
    from sapo_fast import checkpoint

    assert checkpoint.load(checkpoint.latest(folder / "checkpoints")).iteration == len(done) >= 1


# ---- compare ---------------------------------------------------------------------------------------------------------------------------


def test_compare_trains_reports_and_skips_what_is_finished(capsys, tmp_path, cache, run_dir, monkeypatch):
    arguments = ["compare", "--config", SMOKE, "--algorithms", "sapo", "grpo", "--seeds", "3", "--jobs", "2", "--threads", "1"]
    arguments += ["--out", str(tmp_path), f"warm_start.cache_dir={cache}", "iterations=1"]
    assert cli.main(arguments) == 0
    table = (tmp_path / "comparison.md").read_text()
    assert "| sapo | 1 | 1 | 8 |" in table and "| grpo | 1 | 1 | 8 |" in table
    assert (tmp_path / "comparison.png").stat().st_size > 10_000 and (tmp_path / "comparison.csv").is_file()
    shared = [yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("sapo-3", "grpo-3")]
    assert {key for key in shared[0] if shared[0][key] != shared[1][key]} == {"algorithm", "output_dir"}
    monkeypatch.setattr(compare_module, "_start", lambda run: pytest.fail(f"{run.folder} was started again"))
    assert cli.main(arguments) == 0


def test_compare_finishes_the_others_when_one_fails(caplog, tmp_path, run_dir, monkeypatch):
    started = []

    def start(run):
        """sapo fails; the others leave a finished run's numbers."""
        run.folder.mkdir(parents=True)
        failing = run.config.algorithm == "sapo"
        started.append(run.config.algorithm)
        (run.folder / "train.log").write_text("first line\rbar\nthe reason why\n")
        if not failing:
            (run.folder / "metrics.jsonl").write_text((run_dir / "metrics.jsonl").read_text())
            (run.folder / "config.yaml").write_text((run_dir / "config.yaml").read_text().replace("algorithm: sapo", "algorithm: grpo"))
        run.process = subprocess.Popen([sys.executable, "-c", f"import sys; sys.exit({3 if failing else 0})"])
        return run

    monkeypatch.setattr(compare_module, "_start", start)
    monkeypatch.setattr(compare_module, "_make_warm_start", lambda config: None)
    monkeypatch.setattr(compare_module, "_POLL_SECONDS", 0.05)
    code = cli.main(["compare", "--config", SMOKE, "--algorithms", "sapo", "grpo", "--seeds", "0", "--out", str(tmp_path), "iterations=2"])
    assert code == 1 and started == ["sapo", "grpo"]
    assert "sapo-0 failed" in caplog.text and "the reason why" in caplog.text
    assert "| grpo | 1 | 2 |" in (tmp_path / "comparison.md").read_text()


def test_a_run_is_finished_when_its_last_checkpoint_and_its_last_evaluation_are_there(tmp_path, monkeypatch):
    run = compare_module._Run(load_config(SMOKE, [f"output_dir={tmp_path}", "iterations=4"]))
    assert run.iterations_done() == 0 and not run.finished()
    found = {"latest": tmp_path / "iteration-000004"}
    monkeypatch.setattr(compare_module.checkpoint, "latest", lambda folder: found["latest"])
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"iteration": 0, "eval/success": 0.5}\n{"iteration": 1}\n')
    assert run.iterations_done() == 2 and not run.finished(), "the evaluation is of the beginning"
    log.write_text('{"iteration": 3}\n{"iteration": 4, "eval/success": 0.5}\n')
    assert run.iterations_done() == 4 and run.finished()
    found["latest"] = tmp_path / "iteration-000002"
    assert not run.finished()


def test_an_interrupted_comparison_ends_its_runs_politely(tmp_path, monkeypatch):
    processes = []

    def start(run):
        code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\nprint('up', flush=True)\ntime.sleep(60)"
        run.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert run.process.stdout.readline() == "up\n"
        processes.append(run.process)
        assert run.config.threads == 3
        return run

    def ctrl_c(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_module, "_start", start)
    monkeypatch.setattr(compare_module, "_make_warm_start", lambda config: None)
    monkeypatch.setattr(compare_module, "time", SimpleNamespace(sleep=ctrl_c))
    assert cli.main(["compare", "--config", SMOKE, "--seeds", "0", "--jobs", "2", "--threads", "3", "--out", str(tmp_path)]) == 130
    assert [process.returncode for process in processes] == [130, 130]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--seeds", "1", "1"], "--seeds must be different values"),
        (["--jobs", "0"], "--jobs must be >= 1"),
        (["seed=3"], "use --algorithms, --seeds, --out, --threads"),
        (["episodes_per_iteration=9"], "multiple of group_size"),
    ],
)
def test_compare_refuses_before_any_work(capsys, tmp_path, argv, told):
    assert told in refused(capsys, "compare", "--config", SMOKE, "--out", str(tmp_path), *argv)
    assert not list(tmp_path.iterdir())
