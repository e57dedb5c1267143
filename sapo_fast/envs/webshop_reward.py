"""WebShop's reward (Yao et al. 2022): type x (matched attributes + matched options + price) / (their number).

Attributes and options match fuzzily (thefuzz's token_set_ratio above 85) or by standing in the product's texts; sizes match exactly; colors
by the first color word they hold. The price part is 1 when the price is within the goal's limit. The type part is from the search query,
the category path and the nouns of the titles:

    1.0   same query, or two categories in common, or more than a fifth of the goal's nouns in the bought title
    0.5   none of these
    0.1   less than a tenth of the goal's nouns      0.0   none of them      (these two come before the others)

One fault of the original is not repeated: there a purchase can match more options than the goal has, and score above 1. Needs
``pip install 'sapo_fast[webshop]'``.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

try:
    from thefuzz import fuzz
except ImportError as error:
    raise ModuleNotFoundError(f"WebShop's reward needs thefuzz ({error}); pip install 'sapo_fast[webshop]'") from error

NounRule = Literal["auto", "spacy", "words"]
SPACY_MODELS = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm")
_FUZZY = 85
_COLORS = tuple(
    """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo caramel
    champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal dark denim
    eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender
    lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude
    olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone
    stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow
""".split()  # noqa: SIM905
)
# The words rule: what is left of a title's words without numbers and these is taken for nouns.
_NO_NOUNS = frozenset(
    """
    a about above after all an and any are as at be best between both but by can compatible each easy eco extra fast for free
    friendly from good great have high if in inch into is it its large long low made make medium more most multi natural new no
    not of off on one only or other our out over own perfect portable pre premium professional short slim small so soft some
    super than that the their them then these they this to too two ultra under up use used very was we while will with without xl
    xxl you your
""".split()  # noqa: SIM905
)
_TITLE_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True)
class Product:
    """What the reward needs of a product. Texts as the pages show them."""

    asin: str
    title: str
    query: str
    categories: frozenset[str]
    attributes: tuple[str, ...]
    bullets: tuple[str, ...]
    description: str

    @property
    def texts(self) -> tuple[str, str, str]:
        return self.title.lower(), " ".join(self.bullets).lower(), self.description.lower()


@dataclass(frozen=True)
class Goal:
    """What is to be bought. ``product``: the one the goal was made from; others may be as good."""

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


@dataclass(frozen=True)
class Score:
    """A purchase's score and its parts: counts of matches, and the type factor."""

    total: float
    type: float
    attributes: int
    options: int
    price: bool


def noun_rule(wanted: NounRule = "auto") -> tuple[str, Callable[[str], frozenset[str]]]:
    """The rule that finds a title's nouns, and its name for the report: "spacy:MODEL", or "words" where no English model is installed."""
    if wanted not in get_args(NounRule):
        raise ValueError(f"webshop: noun_rule must be one of {', '.join(get_args(NounRule))}, got {wanted!r}")
    if wanted != "words":
        for model in SPACY_MODELS:
            if importlib.util.find_spec("spacy") and importlib.util.find_spec(model):
                return f"spacy:{model}", _spacy_nouns(model)
        if wanted == "spacy":
            raise ValueError(
                "webshop: noun_rule='spacy' needs spaCy and an English model (python -m spacy download en_core_web_lg); or use 'words'"
            )
    return "words", _word_nouns


def _spacy_nouns(model: str) -> Callable[[str], frozenset[str]]:
    import spacy

    parse = spacy.load(model)
    return lru_cache(65_536)(lambda title: frozenset(t.text.lower() for t in parse(title) if t.pos_ in ("NOUN", "PROPN")))


@lru_cache(65_536)
def _word_nouns(title: str) -> frozenset[str]:
    """Every word of two letters or more except numbers, function words and the commonest adjectives of product titles."""
    return frozenset(_TITLE_WORD.findall(title.lower())) - _NO_NOUNS


def type_factor(bought: Product, goal: Goal, nouns: Callable[[str], frozenset[str]]) -> float:
    wanted = nouns(goal.product.title)
    shared = len(nouns(bought.title) & wanted) / len(wanted) if wanted else 0.2
    if shared == 0:
        return 0.0
    if shared < 0.1:
        return 0.1
    alike = bought.query == goal.product.query or len(bought.categories & goal.product.categories) >= 2 or shared > 0.2
    return 1.0 if alike else 0.5


def color(text: str) -> str:
    """The first color word (in alphabetical order) that a text holds, else the text."""
    return next((name for name in _COLORS if name in text), text)


def matched_attributes(bought: Product, wanted: Sequence[str]) -> int:
    texts = bought.texts
    return sum(
        any(fuzz.token_set_ratio(has, want) > _FUZZY for has in bought.attributes) or any(want in text for text in texts) for want in wanted
    )


def matched_options(bought: Product, wanted: Sequence[str], chosen: Mapping[str, str]) -> int:
    """How many of the chosen options (name to value) a goal asks for; at most as many as it asks for."""
    wanted = [color(option) for option in wanted]
    texts, count = bought.texts, 0
    for name, value in chosen.items():
        value = color(value)
        exact = name.lower() == "size"
        matched = value in wanted if exact else any(fuzz.token_set_ratio(want, value) > _FUZZY for want in wanted)
        count += matched or any(value in text for text in texts)
    return min(count, len(wanted))


def score(bought: Product, goal: Goal, price: float, chosen: Mapping[str, str], nouns: Callable[[str], frozenset[str]]) -> Score:
    """The score of buying a product at a price with the chosen options."""
    factor = type_factor(bought, goal, nouns)
    attributes = matched_attributes(bought, goal.attributes)
    options = matched_options(bought, goal.options, chosen)
    cheap = price <= goal.price_upper
    total = factor * (attributes + options + cheap) / (len(goal.attributes) + len(goal.options) + 1)
    return Score(total, factor, attributes, options, cheap)
