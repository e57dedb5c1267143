"""WebShop's search: BM25 in Lucene's variant (k1 0.9, b 0.4) over bm25s, with English analysis as Lucene's: possessives, stop words, Porter stems.

Needs ``pip install 'sapo_fast[webshop]'``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

import numpy as np

try:
    import bm25s
    import Stemmer
except ImportError as error:
    raise ModuleNotFoundError(f"WebShop's search needs bm25s and PyStemmer ({error}); pip install 'sapo_fast[webshop]'") from error

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG, and would tell of every index
STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was will
    with
""".split()  # noqa: SIM905
)
HITS = 50  # results of one search
_WORD = re.compile(r"\w+(?:['’.]\w+)*")  # words; an apostrophe or a full stop between letters or digits does not end one


class Analyzer:
    """Text to index terms."""

    def __init__(self) -> None:
        self._stemmer = Stemmer.Stemmer("porter")

    def terms(self, text: str) -> list[str]:
        words = [word[:-2] if word.endswith(("'s", "’s")) else word for word in _WORD.findall(text.lower())]
        return self._stemmer.stemWords([word for word in words if word and word not in STOP_WORDS])


class SearchIndex:
    """An index of documents, in memory."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._analyzer = Analyzer()
        corpus = [self._analyzer.terms(text) for text in documents]
        if not any(corpus):
            raise ValueError("webshop: the products hold no word to search for")
        self._index = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
        self._index.index(corpus, show_progress=False)
        self._terms = self._index.vocab_dict

    def search(self, query: str, hits: int = HITS) -> Sequence[int]:
        """Numbers of the best documents that share a term with the query, best first; of equal scores the earlier document first."""
        terms = [term for term in self._analyzer.terms(query) if term in self._terms]
        if not terms:
            return []
        scores = self._index.get_scores(terms)
        found = np.flatnonzero(scores > 0)
        if len(found) > hits:
            kth = np.partition(scores[found], len(found) - hits)[len(found) - hits]
            found = found[scores[found] >= kth]
        return found[np.argsort(-scores[found], kind="stable")][:hits].tolist()
