"""``sapo-fast``: train, eval, compare, report, export, check, env.

Mistakes of the user are told in one message on stderr, without a traceback (``--debug`` shows it). Exit codes: 0 done, 1 failed,
2 wrong input, 130 interrupted. ``env`` and ``check`` work with torch alone.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

ALGORITHMS = ("sapo", "ppo", "ppo_token", "grpo")
# what our extras bring: a missing one is the user's to install, any other missing module is a bug
_EXTRAS = {
    "train": ("transformers", "safetensors", "tokenizers", "pydantic", "yaml", "tqdm", "tensorboard"),
    "plot": ("matplotlib",),
    "gguf": ("gguf", "accelerate"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    _settle_rest(parser, args, rest)
    _configure_output()
    try:
        with _sigterm_as_interrupt():
            return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe (head, less) left: nothing to tell
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the interpreter flushes it at exit
        return 1
    except Exception as error:
        code, message = _told(error)
        if message is None or args.debug:
            traceback.print_exc()
        if message is not None:
            print(f"sapo-fast {args.command}: {message}", file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sapo-fast", description="Train LLM agents with SAPO.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"sapo-fast {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=epilog, allow_abbrev=False)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(run=run, overrides=[])
        return sub

    keys = "docs/configuration.md lists every key. Example: sapo-fast train --config configs/demo.yaml optim.lr=1e-4 seed=3"
    train = command("train", _train, "Train a model by a configuration, or go on with a run that was stopped.", keys)
    _config_arguments(train)
    train.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved configuration and what would run, and stop"
    )
    train.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: from the last checkpoint of output_dir, if any; never; or a checkpoint's path",
    )

    evaluate = command("eval", _eval, "Play the evaluation panel with a run's last checkpoint or with a model directory.", keys)
    evaluate.add_argument("path", metavar="RUN_OR_MODEL_DIR")
    _override_argument(evaluate)

    compare = command("compare", _compare, "Train several algorithms and seeds alike; one table and one figure of the result.", keys)
    _config_arguments(compare)
    compare.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS, metavar="A", help="default: all four")
    compare.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    compare.add_argument(
        "--out", default="runs/compare", metavar="DIR", help="runs and results go here; finished runs are kept, others go on"
    )
    compare.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (default 1)")
    compare.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads of each run; default: the cores divided by the jobs"
    )

    report = command("report", _report, "Draw a run: learning curve, time, values, losses; PNGs and one HTML page.")
    report.add_argument("path", metavar="RUN_DIR")

    export = command("export", _export, "Write a run's last checkpoint as a plain Hugging Face model that never says w+ or w-.")
    export.add_argument("path", metavar="RUN_DIR")
    export.add_argument("out", metavar="OUT_DIR")

    plan = command("plan", _plan, "Compute a configuration's memory by part, beside PPO's with a critic of its own; no weight is read.", keys)
    plan.add_argument("config", metavar="CONFIG", help="a YAML file")
    _override_argument(plan)

    command("check", _check, "Run every available backend against the reference and print the errors.")
    command("env", _env, "Print versions, devices and every backend with its reason.")
    return parser


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", action="append", metavar="FILE", help="a YAML file; without it, the defaults")
    _override_argument(parser)


def _override_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings laid over the file, for example optim.lr=1e-4")


def _settle_rest(parser: argparse.ArgumentParser, args: argparse.Namespace, rest: list[str]) -> None:
    """What argparse left over: overrides that stand between options, or a mistake."""
    takes_overrides = args.command in ("train", "eval", "compare", "plan")
    known = [option for action in parser._subparsers._group_actions[0].choices[args.command]._actions for option in action.option_strings]
    for word in rest:
        if takes_overrides and not word.startswith("-"):
            args.overrides.append(word)
            continue
        near = difflib.get_close_matches(word.split("=")[0], known, n=1)
        parser.error(
            f"{args.command}: unrecognised argument {word}"
            + (f"; did you mean {near[0]}?" if near else f"; see sapo-fast {args.command} -h")
        )


def _train(args: argparse.Namespace) -> None:
    from sapo_fast import run_folder
    from sapo_fast.config import load_config

    config = load_config(_one_config(args.config), args.overrides)
    run_folder.check(config, args.resume)
    if args.dry_run:
        from sapo_fast.plan import describe

        print(describe(config, args.resume))
        return
    from sapo_fast.trainer import Trainer

    with run_folder.lock(config.run_dir()):
        metrics = Trainer(config).train(resume=args.resume)
    _print_metrics(metrics)
    print(f"metrics, checkpoints and the exported model are in {config.run_dir()}; draw them with: sapo-fast report {config.run_dir()}")


def _eval(args: argparse.Namespace) -> None:
    from sapo_fast.evaluate import evaluate_run

    _print_metrics(evaluate_run(args.path, args.overrides))


def _compare(args: argparse.Namespace) -> int:
    from sapo_fast.compare import compare

    return compare(
        _one_config(args.config),
        args.overrides,
        algorithms=args.algorithms,
        seeds=args.seeds,
        out_dir=Path(args.out),
        jobs=args.jobs,
        threads=args.threads,
    )


def _report(args: argparse.Namespace) -> None:
    from sapo_fast.report import report

    print(f"report: {report(args.path)}")


def _export(args: argparse.Namespace) -> None:
    from sapo_fast.run_folder import export

    print(f"exported to {export(Path(args.path), Path(args.out))}")


def _plan(args: argparse.Namespace) -> None:
    from sapo_fast.config import load_config
    from sapo_fast.memory_plan import describe

    print(describe(load_config(args.config, args.overrides)))


def _check(args: argparse.Namespace) -> int:
    from sapo_fast.selfcheck import run

    return run()


def _env(args: argparse.Namespace) -> None:
    from sapo_fast.environment import describe

    print(describe())


def _one_config(given: list[str] | None) -> str | None:
    if given and len(given) > 1:
        raise ValueError(f"--config must be given once, got {' and '.join(given)}; put what differs into key=value overrides")
    return given[0] if given else None


def _print_metrics(metrics: dict[str, float]) -> None:
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:.4g}")


def _told(error: Exception) -> tuple[int, str | None]:
    """Exit code, and the error in words where it is the user's or the machine's; None for what looks like a bug."""
    if isinstance(error, ModuleNotFoundError):
        if error.name is None:  # raised by our own code, with its own advice
            return 2, str(error)
        for extra, modules in _EXTRAS.items():
            if error.name.split(".")[0] in modules:
                return 2, f"this command needs the package {error.name.split('.')[0]}; pip install 'sapo_fast[{extra}]'"
        return 1, None
    if isinstance(error, ValueError):
        return 2, str(error)
    if isinstance(error, OSError):
        return 1, str(error)
    if type(error).__name__ == "Diverged":
        return 1, str(error)
    if type(error).__name__ == "OutOfMemoryError":
        advice = "lower optim.micro_batch_tokens or rollout.max_live_episodes, or set model.gradient_checkpointing=true"
        return 1, f"{str(error).splitlines()[0]}\n{advice}; the run goes on from its last checkpoint"
    return 1, None


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A polite kill ends a run as Ctrl-C does: the trainer saves a checkpoint on its way out."""
    try:
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # called from a thread: signals go to the main one
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _AboveBars(logging.Handler):
    """Log lines above the progress bars instead of into them."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            print(self.format(record), file=sys.stderr)
        else:
            tqdm.tqdm.write(self.format(record), file=sys.stderr)


def _configure_output() -> None:
    handler = _AboveBars()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("sapo_fast").setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a bar for reading one small file tells nobody anything
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # in a log file every refresh is a line


def _version() -> str:
    from sapo_fast.environment import version

    return version()


if __name__ == "__main__":
    sys.exit(main())
