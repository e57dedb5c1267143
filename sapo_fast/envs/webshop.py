"""WebShop (Yao et al. 2022): find and buy the product that an instruction describes, on simulated shop pages in text.

Our own engine of the published text protocol, over WebShop's own files or products made by ``python -m sapo_fast.envs.webshop_generator``:

    search[keywords]      results, 10 a page
    click[asin]           a product's page; click[value] chooses one of its options
    click[description], click[features], click[reviews], click[attributes] (if shown)   more about it
    click[< prev], click[next >], click[back to search]
    click[buy now]        ends the episode with a score from 0 to 1 (sapo_fast/envs/webshop_reward.py)

Page texts are joined by " [SEP] ", as in the original's simple mode.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sapo_fast.envs.names import unknown_name

if TYPE_CHECKING:
    from sapo_fast.envs.webshop_data import Catalogue, Item
    from sapo_fast.envs.webshop_reward import Goal
    from sapo_fast.envs.webshop_search import SearchIndex

SYSTEM_PROMPT = (
    "You are an expert shopper on a simulated shopping site. Find the product that the instruction describes, choose the options it asks for, "
    "and buy it. You act by search[keywords] on the search page and click[name] on what a page shows."
)
SEARCH = "search[<keywords>]"  # how the search box stands among the admissible commands
PAGE = 10  # results a page
_COMMAND = re.compile(r"(search|click)\[(.*)\]", re.DOTALL)
_SEPARATOR = " [SEP] "
_SUB_PAGES = ("description", "features", "reviews", "attributes")


class WebShop:
    """The suite of a data folder: the manifest's first ``n_eval`` goals to evaluate on, the others to train on.

    data: the folder of WebShop's JSON files (default: $WEBSHOP_DATA). products: "small" (the first 1,000) or "full". human_goals:
    instructions written by people instead of synthetic ones. n_eval: goals kept for evaluation. seed: of prices, price limits and the
    order of goals. reward: "success" (1.0 for a score of 1, else 0; the papers') or "score". admissible: put ``admissible_commands`` in
    ``info``. instruction_on_pages: every page repeats the instruction, as the original's do; off, it is in ``info["task"]`` alone.
    attributes_page: offer click[attributes]. noun_rule: how the type reward finds nouns: "spacy", "words", or "auto" for spaCy where an
    English model is installed; ``report`` says which it was.
    ValueError for a folder without the files, and for fewer goals than ``n_eval`` + 1.
    """

    name = "webshop"
    system_prompt = SYSTEM_PROMPT

    def __init__(
        self,
        data: str | None = None,
        products: Literal["small", "full"] = "small",
        human_goals: bool = False,
        n_eval: int = 500,
        seed: int = 0,
        reward: Literal["success", "score"] = "success",
        admissible: bool = True,
        instruction_on_pages: bool = True,
        attributes_page: bool = False,
        noun_rule: Literal["auto", "spacy", "words"] = "auto",
    ) -> None:
        for label, value, known in (("products", products, ("small", "full")), ("reward", reward, ("success", "score"))):
            if value not in known:
                raise ValueError(unknown_name(f"webshop {label}", value, known))
        if not isinstance(n_eval, int) or isinstance(n_eval, bool) or n_eval < 1:
            raise ValueError(f"webshop: n_eval must be an integer >= 1, got {n_eval!r}")
        given = data or os.environ.get("WEBSHOP_DATA")
        if not given:
            raise ValueError(
                "webshop: no data folder given; download WebShop's files, or make products of your own with "
                "`python -m sapo_fast.envs.webshop_generator FOLDER`, and give the folder as env.options.data or WEBSHOP_DATA"
            )
        from sapo_fast.envs.webshop_data import read_catalogue
        from sapo_fast.envs.webshop_reward import noun_rule as find_rule
        from sapo_fast.envs.webshop_search import SearchIndex

        self.noun_rule, self.nouns = find_rule(noun_rule)
        self.catalogue: Catalogue = read_catalogue(Path(given).expanduser(), products, human_goals, seed)
        if len(self.catalogue.goals) <= n_eval:
            raise ValueError(
                f"webshop: the data in {given} make {len(self.catalogue.goals)} goals; n_eval must leave some of them, got {n_eval}"
            )
        self.index: SearchIndex = SearchIndex(self.catalogue.documents())
        self.n_eval, self.reward, self.admissible = n_eval, reward, admissible
        self.instruction_on_pages, self.attributes_page = instruction_on_pages, attributes_page

    def train_tasks(self) -> Sequence[str]:
        return [f"goal-{number}" for number in range(self.n_eval, len(self.catalogue.goals))]

    def eval_tasks(self) -> Sequence[str]:
        return [f"goal-{number}" for number in range(self.n_eval)]

    @property
    def report(self) -> dict[str, Any]:
        """What a run's report must say of this suite."""
        catalogue = self.catalogue
        return {
            "products": len(catalogue.items),
            "goals": len(catalogue.goals),
            "manifest": catalogue.digest(),
            "noun_rule": self.noun_rule,
        }

    def goal(self, task_id: str) -> Goal:
        """The goal of a task id. ValueError where the manifest has none of that number."""
        number = str(task_id).removeprefix("goal-")
        if not (number.isascii() and number.isdigit() and f"goal-{int(number)}" == task_id and int(number) < len(self.catalogue.goals)):
            raise ValueError(f"webshop: no task {task_id!r}; ids are goal-0 to goal-{len(self.catalogue.goals) - 1}")
        return self.catalogue.goals[int(number)]

    def make(self) -> WebShopEnv:
        return WebShopEnv(self)


@dataclass
class _Session:
    """One visit to the shop. ``view``: which page is open."""

    task_id: str
    goal: Goal
    view: str = "start"  # start, results, item, or a sub-page of an item
    hits: Sequence[int] = ()
    page: int = 1
    item: Item | None = None
    chosen: dict[str, str] = field(default_factory=dict)


class WebShopEnv:
    """One visitor, reusable by ``reset``. Protocol: ``sapo_fast.envs.base.TextEnv``.

    A command that the page does not offer, or that is none, shows the same page again and has ``info["invalid"]``. A search is possible
    from every page, as in the original. ``info["score"]`` is the purchase's score (0 until then), ``info["parts"]`` how it came about.
    """

    def __init__(self, suite: WebShop) -> None:
        self._suite = suite
        self._session: _Session | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the task ``options["task"]``. ``seed`` changes nothing: a task has no chance in it."""
        if not options or "task" not in options:
            raise ValueError("webshop: reset needs options={'task': id}, an id of the suite's train_tasks() or eval_tasks()")
        self._session = _Session(options["task"], self._suite.goal(options["task"]))
        return self._show(invalid=False)

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do one command: observation, reward, terminated, truncated (always False), info. RuntimeError when no episode is running."""
        session = self._session
        if session is None:
            raise RuntimeError("webshop: no episode is running; call reset first")
        found = _COMMAND.fullmatch(command.strip().lower())
        verb, argument = (found[1], found[2].strip()) if found else ("", "")
        if verb == "search" and argument:  # anything but this and an offered click leaves the page as it is
            session.view, session.hits, session.page = "results", self._suite.index.search(argument), 1
            session.item, session.chosen = None, {}
        elif verb == "click" and argument == "buy now" and session.view == "item":
            return self._buy(session)
        elif verb == "click" and argument in (buttons := self._buttons(session)):
            buttons[argument]()
        else:
            verb = ""
        observation, info = self._show(invalid=not verb)
        return observation, 0.0, False, False, info

    def close(self) -> None:
        self._session = None

    # ---- what a page offers: the name of each button, and what it does --------------------------------------------------------------------

    def _buttons(self, session: _Session) -> dict[str, Callable[[], None]]:
        if session.view == "start":
            return {}
        buttons: dict[str, Callable[[], None]] = {"back to search": lambda: self._open(session, "start")}
        if session.view == "results":
            if session.page > 1:
                buttons["< prev"] = lambda: self._turn(session, -1)
            if session.page * PAGE < len(session.hits):
                buttons["next >"] = lambda: self._turn(session, 1)
            for item in self._shown(session):
                buttons[item.product.asin.lower()] = lambda item=item: self._visit(session, item)
            return buttons
        if session.view != "item":
            return buttons | {"< prev": lambda: self._open(session, "item")}
        buttons["< prev"] = lambda: self._leave(session)
        for name in self._sub_pages():
            buttons[name] = lambda name=name: self._open(session, name)
        buttons["buy now"] = lambda: None  # the caller buys
        for name, values in session.item.options.items():
            for value in values:
                buttons[value] = lambda name=name, value=value: session.chosen.update({name: value})
        return buttons

    def _sub_pages(self) -> tuple[str, ...]:
        return _SUB_PAGES if self._suite.attributes_page else _SUB_PAGES[:-1]

    def _shown(self, session: _Session) -> list[Item]:
        items = self._suite.catalogue.items
        return [items[number] for number in session.hits[(session.page - 1) * PAGE : session.page * PAGE]]

    @staticmethod
    def _open(session: _Session, view: str) -> None:
        session.view = view

    @staticmethod
    def _turn(session: _Session, by: int) -> None:
        session.page += by

    @staticmethod
    def _visit(session: _Session, item: Item) -> None:
        session.view, session.item, session.chosen = "item", item, {}

    @staticmethod
    def _leave(session: _Session) -> None:
        session.view, session.item, session.chosen = "results", None, {}

    def _buy(self, session: _Session) -> tuple[str, float, bool, bool, dict[str, Any]]:
        from sapo_fast.envs.webshop_reward import score

        item = session.item
        parts = score(item.product, session.goal, item.price, session.chosen, self._suite.nouns)
        won = parts.total == 1.0
        info = self._info(False) | {"won": won, "score": parts.total, "parts": parts}
        if self._suite.admissible:
            info["admissible_commands"] = []
        self._session = None
        text = _SEPARATOR.join(("Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", f"{parts.total:g}"))
        return text, parts.total if self._suite.reward == "score" else float(won), True, False, info

    # ---- what is shown ----------------------------------------------------------------------------------------------------------------------

    def _show(self, invalid: bool) -> tuple[str, dict[str, Any]]:
        return _SEPARATOR.join(self._texts(self._session)), self._info(invalid)

    def _texts(self, session: _Session) -> list[str]:
        head = ["Instruction:", session.goal.instruction] if self._suite.instruction_on_pages else []
        if session.view == "start":
            return ["WebShop", *head, "Search"]
        head.append("Back to Search")
        if session.view == "results":
            turns = ["< Prev"] * (session.page > 1) + ["Next >"] * (session.page * PAGE < len(session.hits))
            products = [text for i in self._shown(session) for text in (i.product.asin, i.product.title, i.price_tag)]
            return [*head, f"Page {session.page} (Total results: {len(session.hits)})", *turns, *products]
        item = session.item
        head.append("< Prev")
        if session.view == "item":
            options = [text for name, values in item.options.items() for text in (name, *values)]
            sub_pages = [name.capitalize() for name in self._sub_pages()]
            return [*head, *options, item.product.title, f"Price: {item.price_tag}", f"Rating: {item.rating}", *sub_pages, "Buy Now"]
        if session.view == "description":
            return [*head, item.product.description or "No description"]
        if session.view == "features":
            return [*head, *(item.product.bullets or ("No features",))]
        if session.view == "reviews":
            return [*head, "No reviews found"]
        return [*head, *item.product.attributes, item.category, item.product.query, " › ".join(sorted(item.product.categories))]

    def _info(self, invalid: bool) -> dict[str, Any]:
        session = self._session
        info = {"task_id": session.task_id, "task": session.goal.instruction, "won": False, "score": 0.0, "invalid": invalid}
        if self._suite.admissible:
            info["admissible_commands"] = [SEARCH] if session.view == "start" else [f"click[{name}]" for name in self._buttons(session)]
        return info
