"""Environments by name: ``make_suite("household", {...})``, or your own as ``make_suite("module:attribute", {...})``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from sapo_fast.envs.base import TaskSuite, TextEnv
from sapo_fast.envs.names import unknown_name

__all__ = ["SUITES", "TaskSuite", "TextEnv", "make_suite"]

#: name -> "module:attribute" of the suite's class; imported when asked for.
SUITES: dict[str, str] = {
    "household": "sapo_fast.envs.household:Household",
    "alfworld": "sapo_fast.envs.alfworld:AlfWorld",
    "webshop": "sapo_fast.envs.webshop:WebShop",
    "isolated": "sapo_fast.envs.worker:Isolated",
}

_NEEDED = ("name", "system_prompt", "train_tasks", "eval_tasks", "make")


def make_suite(name: str, options: Mapping[str, Any] | None = None) -> TaskSuite:
    """The suite called ``name``, with its options.

    ``name`` is one of ``SUITES`` or "module:attribute", where the attribute is a suite, or a class or function that makes one.
    The module is looked for where Python looks, and in the current folder.
    Raises ValueError, with the nearest known names, for an unknown name, module, attribute or option, and for an object that is no suite.
    """
    options = dict(options or {})
    if name in SUITES:
        return _build(name, _load(SUITES[name]), options)
    if ":" not in name:
        raise ValueError(unknown_name("environment", name, SUITES) + "; your own is given as 'module:attribute'")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # a console script, unlike `python -m`, does not look in the current folder
    return _build(name, _load(name), options)


def _load(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ValueError(f"environment {path!r} must read 'module:attribute', like 'examples.guess_number:suite'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (module_name == missing or module_name.startswith(missing + ".")):
            raise  # the module is there; something it needs is not
        raise ValueError(
            f"environment {path!r}: no module {missing!r}, neither installed nor in the current folder {os.getcwd()}"
        ) from error
    if not hasattr(module, attribute):
        public = [found for found in vars(module) if not found.startswith("_")]
        raise ValueError(f"environment {path!r}: " + unknown_name(f"attribute of {module_name}", attribute, public))
    return getattr(module, attribute)


def _build(name: str, found: Any, options: dict[str, Any]) -> TaskSuite:
    if not inspect.isclass(found) and all(hasattr(found, needed) for needed in _NEEDED):
        if options:
            raise ValueError(f"environment {name!r} is a ready suite and takes no options, got {', '.join(sorted(options))}")
        return found
    if not callable(found):
        raise ValueError(f"environment {name!r} is a {type(found).__name__}; it must be a suite, or a class or function that makes one")
    parameters = inspect.signature(found).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in known:
                raise ValueError(unknown_name(f"option of environment {name!r}", option, known))
    needed = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in options]
    if needed:
        raise ValueError(f"environment {name!r} needs the option{'s' if len(needed) > 1 else ''} {', '.join(needed)}")
    suite = found(**options)
    missing = [attribute for attribute in _NEEDED if not hasattr(suite, attribute)]
    if missing:
        raise ValueError(
            f"environment {name!r} made a {type(suite).__name__}, which lacks {', '.join(missing)} (see sapo_fast/envs/base.py)"
        )
    return suite
