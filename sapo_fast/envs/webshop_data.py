"""WebShop's own JSON files: products, prices and goals, all a function of the files and a seed.

    items_shuffle.json    or items_shuffle_1000.json      products
    items_ins_v2.json     or items_ins_v2_1000.json       attributes and synthetic instructions
    items_human_ins.json                                  instructions written by people

The original draws prices and goals from a global random generator before it is seeded, so that goals differ between processes and evaluation
goals reach training. Here every draw is from the seed and the product's own number, and one manifest holds all goals in a fixed order: the
first ``n_eval`` are for evaluation, the others for training, and no goal is in it twice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sapo_fast.envs.webshop_reward import Goal, Product

FILES = {
    "small": ("items_shuffle_1000.json", "items_ins_v2_1000.json"),
    "full": ("items_shuffle.json", "items_ins_v2.json"),
}
HUMAN = "items_human_ins.json"
_LIMITS = tuple(10.0 * i for i in range(1, 100))
_NO_LIMIT = 1_000_000.0
_HOW = (
    "download WebShop's data (github.com/princeton-nlp/WebShop, setup.sh), or make products of your own with "
    "`python -m sapo_fast.envs.webshop_generator FOLDER`, and give the folder as env.options.data or WEBSHOP_DATA"
)


@dataclass
class Item:
    """A product with what its pages show."""

    product: Product
    number: int  # its document in the search index
    price: float
    price_tag: str
    options: dict[str, list[str]]  # name -> values
    rating: str
    category: str


@dataclass
class Catalogue:
    """Products by number, and the manifest of goals."""

    items: list[Item]
    goals: list[Goal]
    human: bool
    by_asin: dict[str, Item] = field(init=False)

    def __post_init__(self) -> None:
        self.by_asin = {item.product.asin: item for item in self.items}

    def documents(self) -> Iterator[str]:
        """The text of each product that is searched: title, description, first bullet point and options."""
        for item in self.items:
            options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in item.options.items())
            first = item.product.bullets[0] if item.product.bullets else ""
            yield " ".join((item.product.title, item.product.description, first, options)).lower()

    def digest(self) -> str:
        """A hash of the manifest: which goals, in which order."""
        found = hashlib.sha256()
        for goal in self.goals:
            found.update(repr((goal.product.asin, goal.instruction, goal.attributes, goal.options, goal.price_upper)).encode())
        return found.hexdigest()[:16]


def read_catalogue(data: Path, size: str, human: bool, seed: int) -> Catalogue:
    """Read a folder of WebShop's files. ValueError, saying what was expected and how to get it, for a folder or file that is not so."""
    products_file, attributes_file = FILES[size]
    products, attributes = _load(data, products_file, list), _load(data, attributes_file, dict)
    written = _load(data, HUMAN, dict) if human else {}
    items: list[Item] = []
    goals: list[Goal] = []
    seen: set[str] = set()
    for position, raw in enumerate(products):
        try:
            asin = str(raw["asin"])
            if asin in seen or asin == "nan" or len(asin) > 10:
                continue
            seen.add(asin)
            known = attributes.get(asin) or {}
            item = _item(raw, known, len(items), seed)
            items.append(item)
            goals += _written_goals(item, written[asin], seed) if asin in written else []
            if not human:
                goals += _synthetic_goals(item, known, seed)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"webshop: {data / products_file}, product {position}, is not as WebShop's: {type(error).__name__}: {error}"
            ) from error
    unique = list({(g.product.asin, g.instruction, g.attributes, g.options): g for g in goals}.values())
    random.Random(f"goals-{seed}").shuffle(unique)
    return Catalogue(items, unique, human)


def _load(data: Path, name: str, kind: type) -> Any:
    path = data / name
    if not path.is_file():
        state = f"has no {name}" if data.is_dir() else "does not exist"
        raise ValueError(f"webshop: the data folder {data} {state}; {_HOW}")
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"webshop: {path} is broken ({error}); download it again") from error
    if not isinstance(found, kind):
        raise ValueError(f"webshop: {path} holds a {type(found).__name__}, where WebShop has a {kind.__name__}; {_HOW}")
    return found


def _item(raw: Mapping[str, Any], known: Mapping[str, Any], number: int, seed: int) -> Item:
    bullets = raw["small_description"]
    bullets = bullets if isinstance(bullets, list) else [bullets]
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in (raw.get("pricing") or "").split("$")[1:]][:2] or [100.0]
    price = prices[0] if len(prices) == 1 else random.Random(f"price-{seed}-{raw['asin']}").uniform(*prices)
    options = {
        name.lower(): [content["value"].strip().replace("/", " | ").lower() for content in contents]
        for name, contents in (raw.get("customization_options") or {}).items()
        if contents is not None
    }
    product = Product(
        asin=str(raw["asin"]),
        title=raw["name"],
        query=raw["query"].lower().strip(),
        categories=frozenset(part.strip() for part in raw["product_category"].split("›")),
        attributes=tuple(known.get("attributes") or ("DUMMY_ATTR",)),
        bullets=tuple(str(bullet) for bullet in bullets if bullet),
        description=raw["full_description"] or "",
    )
    tag = " to ".join(f"${price}" for price in prices)
    return Item(product, number, price, tag, options, str(raw.get("average_rating") or "N.A."), raw.get("category") or "")


def _limit(item: Item, seed: int, which: str) -> tuple[float, str]:
    """A goal's price limit and its words: the larger of two of the four tens above the price."""
    above = [limit for limit in _LIMITS if limit > item.price][:4]
    if len(above) < 2:
        return _NO_LIMIT, ""
    limit = max(random.Random(f"limit-{seed}-{item.product.asin}-{which}").sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _written_goals(item: Item, written: list[Mapping[str, Any]], seed: int) -> Iterator[Goal]:
    for number, one in enumerate(written):
        if one["instruction_attributes"]:
            limit, words = _limit(item, seed, f"human-{number}")
            options = one["instruction_options"]
            options = options.values() if isinstance(options, dict) else options
            yield Goal(item.product, one["instruction"].strip(".") + words, tuple(one["instruction_attributes"]), tuple(options), limit)


def _synthetic_goals(item: Item, known: Mapping[str, Any], seed: int) -> Iterator[Goal]:
    if not known.get("instruction"):
        return
    attributes = tuple(known["instruction_attributes"])
    if not attributes:
        raise ValueError("instruction_attributes is empty")
    limit, words = _limit(item, seed, "synthetic")
    names = sorted(item.options)
    for values in itertools.product(*(item.options[name] for name in names)):
        chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
        yield Goal(item.product, known["instruction"] + (f" with {chosen}" if chosen else "") + words, attributes, values, limit)
