"""The TextWorld PDDL engine without its waste: ALFWorld's games, byte for byte as ``textworld.envs.PddlEnv`` under ``AlfredDemangler`` plays them.

Fast Downward's library holds the state, applies operators and judges the goal; TextWorld's parsers read the logic file and its queries; ALFWorld
names the objects. What is ours is the bookkeeping between them. The stock engine parses templates and queries anew at each use, sorts and
deep-copies facts and contexts, fetches every operator's name each turn, and translates the PDDL problem four times for one load and reset.
Here a problem is translated once and kept on disk, the grammar is parsed once, and a command is worded once per operator. No module of
TextWorld is changed: both engines can be used in one process.

Needs ``pip install 'sapo_fast[alfworld]'``.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import json
import os
import re
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

try:
    import fast_downward
    import textworld.logic as tw_logic
    from alfworld.agents.utils.misc import Demangler
    from textworld.envs.pddl import logic as tw_pddl
    from textworld.envs.pddl import textgen
    from textworld.generator.game import EntityInfo
except ImportError as error:
    raise ModuleNotFoundError(
        f"ALFWorld needs its engine ({error}); pip install 'sapo_fast[alfworld]' (Linux, Python 3.10 to 3.12; compiles for about ten minutes)"
    ) from error

RECORD_VERSION = 1  # of translations on disk
RELOAD_AFTER = 20_000  # steps after which a game's states, which the library keeps, are thrown away
_TASK_RULE = re.compile(r'"rhs":\s*("Your task is to: (?:[^"\\]|\\.)*")')
_OPERATOR = np.dtype({"names": ["id"], "formats": [np.int32], "offsets": [0], "itemsize": ctypes.sizeof(fast_downward.Operator)})
_LOCK = threading.Lock()  # Fast Downward's translator has global options

Fact = tuple[str, ...]  # names of a fact's arguments
Signature = tuple[str, tuple[str, ...]]  # predicate and types
Mapping = dict[tuple[str, str], str]  # (placeholder, type) -> entity


# ---- translation -----------------------------------------------------------------------------------------------------------------------


@dataclass
class Translation:
    """A PDDL problem as Fast Downward reads it (``sas``: its text, compressed), and what the wording needs of it."""

    sas: bytes
    types: list[tuple[str, list[str]]]  # name, supertypes
    objects: dict[str, str]  # entity -> type
    parameters: dict[str, list[tuple[str, str]]]  # action -> (parameter, type)
    facts: list[list[str]]  # initial facts: predicate, arguments
    fluents: list[str]  # predicates that may change

    def to_bytes(self) -> bytes:
        head = zlib.compress(json.dumps({k: v for k, v in self.__dict__.items() if k != "sas"}, separators=(",", ":")).encode())
        return len(head).to_bytes(8, "big") + head + self.sas

    @classmethod
    def from_bytes(cls, data: bytes) -> Translation:
        """ValueError (or a kin) for bytes that ``to_bytes`` did not make."""
        end = 8 + int.from_bytes(data[:8], "big")
        head = json.loads(zlib.decompress(data[8:end]))
        head["parameters"] = {action: [(name, kind) for name, kind in pairs] for action, pairs in head["parameters"].items()}
        head["types"] = [(name, supertypes) for name, supertypes in head["types"]]
        zlib.decompress(data[end:])  # its checksum
        return cls(sas=data[end:], **head)


def translate(domain: str, problem: str, cache: Path | None) -> Translation:
    """The translation of a problem; kept in the folder ``cache`` (None: nowhere) under a hash of both texts."""
    if cache is None:
        return _translate(domain, problem)
    key = hashlib.sha256(f"{RECORD_VERSION}\0{domain}\0{problem}".encode()).hexdigest()[:32]
    path = cache / key[:2] / key
    try:
        return Translation.from_bytes(path.read_bytes())
    except (OSError, zlib.error, ValueError, TypeError, KeyError):  # not there, or damaged: made again
        found = _translate(domain, problem)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_bytes(found.to_bytes())
    temporary.replace(path)
    return found


def _pddl2sas(domain: str, problem: str, optimize: bool = False) -> tuple[Any, str]:
    """``fast_downward.pddl2sas`` without its traces: it overwrites sys.argv and swaps stdout."""
    with _LOCK:
        argv, stdout = sys.argv, sys.stdout
        try:
            return fast_downward.pddl2sas(domain, problem, optimize=optimize)
        except SystemExit as stopped:  # the translator's way of refusing a problem
            raise ValueError(f"Fast Downward refuses the problem (exit {stopped.code})") from stopped
        finally:
            sys.argv, sys.stdout = argv, stdout


def _translate(domain: str, problem: str) -> Translation:
    task, sas = _pddl2sas(domain, problem)
    facts = []
    for atom in task.init:
        if hasattr(atom, "predicate"):
            if atom.predicate != "=":
                facts.append([atom.predicate, *atom.args])
        elif atom.fluent.symbol != "total-cost" and not str(atom.expression.value).isdigit():
            facts.append([str(atom.expression.value), *atom.fluent.args])
    library = _Library()
    library.load(sas.encode())
    fluents = set()
    for name, arguments in library.state():
        positive = name.removeprefix("not_")
        fluents.add(positive)
        if name == positive:
            facts.append([name, *arguments])
    library.close()
    return Translation(
        sas=zlib.compress(sas.encode()),
        types=[(t.name, list(t.supertype_names)) for t in task.types],
        objects={o.name: o.type_name for o in task.objects},
        parameters={a.name: [(p.name.strip("?"), p.type_name) for p in a.parameters] for a in task.actions},
        facts=facts,
        fluents=sorted(fluents),
    )


def _read_atom(name: str) -> tuple[str, Fact]:
    """Fast Downward's name of a fact ("NegatedAtom opened(drawer)") as predicate ("not_opened") and arguments."""
    kind, _, rest = name.partition(" ")
    predicate, _, arguments = rest.partition("(")
    return ("not_" if kind == "NegatedAtom" else "") + predicate, tuple(a for a in arguments[:-1].split(", ") if a)


class _Library:
    """One copy of Fast Downward's library: its state is global to the copy, so every environment has its own."""

    _free: list[
        ctypes.CDLL
    ] = []  # copies for the next one: unloading a copy would crash the process at its end, by the copy's exit handler

    def __init__(self) -> None:
        try:
            self._lib = self._free.pop()
        except IndexError:
            self._lib = fast_downward.load_lib()
        self._operators = (fast_downward.Operator * 64)()
        self._atoms = (fast_downward.Atom * 16)()

    def load(self, sas: bytes) -> None:
        self._lib.load_sas(sas)
        self._initial = self._lib.get_state_id()

    def restart(self) -> None:
        """Back to the initial state, which the library still holds."""
        self._lib.set_state_id(self._initial)

    def state(self) -> Iterator[tuple[str, Fact]]:
        atoms = (fast_downward.Atom * self._lib.get_state_size())()
        self._lib.get_state(atoms)
        return (_read_atom(atom.name) for atom in atoms)

    def applicable(self) -> list[int]:
        """Ids of the operators that apply, in the library's order. ``operator`` reads more about each until the next call."""
        count = self._lib.get_applicable_operators_count()
        if count > len(self._operators):
            self._operators = (fast_downward.Operator * (2 * count))()
        self._lib.get_applicable_operators(self._operators)
        return np.frombuffer(self._operators, _OPERATOR, count)["id"].tolist()

    def operator(self, position: int) -> tuple[list[str], int]:
        """The words of an operator's name, and the number of its effects."""
        found = self._operators[position]
        return found.name.split(), found.nb_effect_atoms

    def apply(self, operator: int) -> None:
        self._lib.apply_operator(operator, None)

    def apply_and_read(self, operator: int, effects: int) -> list[tuple[str, Fact]]:
        if effects > len(self._atoms):
            self._atoms = (fast_downward.Atom * effects)()
        self._lib.apply_operator(operator, self._atoms)
        return [_read_atom(self._atoms[i].name) for i in range(effects)]

    def won(self) -> bool:
        return self._lib.check_goal()

    def plan(self, sas: str) -> list[list[str]]:
        """The planner's way to the goal from here: the words of each operator's name; empty if it finds none."""
        self._lib.load_sas_replan(sas.encode())
        if not self._lib.replan(False):
            return []
        operators = (fast_downward.Operator * self._lib.get_last_plan_length())()
        self._lib.get_last_plan(operators)
        return [operator.name.split() for operator in operators]

    def close(self) -> None:
        if self._lib is not None:
            self._lib.cleanup()
            self._free.append(self._lib)
            self._lib = None


# ---- facts and queries -------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(None)
def _query(expression: str) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    """A conjunctive query: for every predicate its name and its placeholders (name, type)."""
    rule = tw_logic.Rule.parse_conjunctive_query(expression)
    return [(p.name, tuple((ph.name, ph.type) for ph in p.parameters)) for p in rule.preconditions]


class Facts:
    """What is true, by signature. Answers queries in the order of TextWorld's ``State.all_assignments``."""

    def __init__(self, translation: Translation, hierarchy: tw_logic.TypeHierarchy) -> None:
        self._hierarchy = hierarchy
        self._signatures: dict[Signature, list[Signature]] = {}
        self._types = translation.objects
        self._initial: dict[Signature, frozenset[Fact]] = {}
        gathered: dict[Signature, set[Fact]] = {}
        for predicate, *arguments in translation.facts:
            gathered.setdefault(self.signature(predicate, tuple(arguments)), set()).add(tuple(arguments))
        self._initial = {signature: frozenset(facts) for signature, facts in gathered.items()}
        self._first_sorted = {signature: sorted(facts) for signature, facts in self._initial.items()}
        self.restart()

    def restart(self) -> None:
        self._facts: dict[Signature, set[Fact] | frozenset[Fact]] = dict(self._initial)
        self._sorted = dict(self._first_sorted)

    def signature(self, predicate: str, arguments: Fact) -> Signature:
        return predicate, tuple(self._types[a] for a in arguments)

    def add(self, signature: Signature, fact: Fact) -> None:
        self._own(signature).add(fact)

    def remove(self, signature: Signature, fact: Fact) -> None:
        if fact in self._facts.get(signature, ()):
            self._own(signature).remove(fact)

    def _own(self, signature: Signature) -> set[Fact]:
        """The set of a signature, to be changed: not shared with the initial state, and no longer sorted."""
        facts = self._facts.get(signature, frozenset())
        if isinstance(facts, frozenset):
            facts = self._facts[signature] = set(facts)
        self._sorted.pop(signature, None)
        return facts

    def _in_order(self, signature: Signature) -> list[Fact]:
        found = self._sorted.get(signature)
        if found is None:
            found = self._sorted[signature] = sorted(self._facts.get(signature, ()))
        return found

    def _subtypes(self, predicate: str, types: tuple[str, ...]) -> list[Signature]:
        """The signatures that a query for these types may find, in TextWorld's order."""
        found = self._signatures.get((predicate, types))
        if found is None:
            nodes = [self._hierarchy.get(t) for t in types]
            found = [(predicate, tuple(t.name for t in some)) for some in self._hierarchy.multi_subtypes(nodes)]
            self._signatures[predicate, types] = found
        return found

    def assignments(self, expression: str, mapping: Mapping) -> Iterator[Mapping]:
        """Every way to bind the query's free placeholders, different placeholders to different entities."""
        return self._assign(_query(expression), 0, dict(mapping), set(mapping.values()))

    def _assign(self, query: list, depth: int, mapping: Mapping, used: set[str]) -> Iterator[Mapping]:
        if depth == len(query):
            yield dict(mapping)
            return
        predicate, placeholders = query[depth]
        bound = [mapping.get(p) for p in placeholders]
        for signature in self._subtypes(predicate, tuple(t for _, t in placeholders)):
            facts = self._facts.get(signature)
            if not facts:
                continue
            if None not in bound:
                if tuple(bound) in facts:
                    yield from self._assign(query, depth + 1, mapping, used)
                continue
            for fact in self._in_order(signature):
                new: list[tuple[str, str]] = []
                for placeholder, entity in zip(placeholders, fact, strict=True):
                    existing = mapping.get(placeholder)
                    if existing is None:
                        if entity in used:
                            break
                        mapping[placeholder] = entity
                        used.add(entity)
                        new.append(placeholder)
                    elif existing != entity:
                        break
                else:
                    yield from self._assign(query, depth + 1, mapping, used)
                for placeholder in new:
                    used.discard(mapping.pop(placeholder))


# ---- text ------------------------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(None)
def _symbols(text: str) -> list[Any]:
    return textgen._parse_and_convert(text, rule_name="symbols")


_EXPRESSION_NODES = (ast.Expression, ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.Add, ast.BoolOp, ast.Or, ast.And, ast.Load)


@functools.lru_cache(None)
def _compile(expression: str) -> Any:
    """A grammar's expression. Names, attributes, text, ``+``, ``and``, ``or`` and nothing else: game files are data from elsewhere."""
    tree = ast.parse(expression.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _EXPRESSION_NODES) or (isinstance(node, ast.Attribute) and node.attr.startswith("_")):
            raise ValueError(f"the game's grammar holds the expression {expression!r}; only names, attributes, text and + are evaluated")
    return compile(tree, "<grammar>", "eval")


@dataclass
class _Logic:
    """A parsed logic file: the rules of the grammar, and each action's command template and feedback."""

    rules: dict[str, list[Any]]
    actions: dict[str, Any]


@functools.lru_cache(16)
def _parse_logic(grammar: str) -> _Logic:
    parsed = tw_pddl.GameLogic(domain="", grammar=grammar)
    return _Logic(dict(parsed.grammar._rules), parsed.actions)


def read_logic(grammar: str) -> _Logic:
    """The logic file of a game. Games differ in the task's sentence alone, so that the rest is parsed once."""
    found = _TASK_RULE.search(grammar)
    if found is None:
        return _parse_logic(grammar)
    common = _parse_logic(grammar[: found.start(1)] + '"Your task is to: ."' + grammar[found.end(1) :])
    task = textgen.ProductionRule("task", _symbols.__wrapped__(json.loads(found[1])), 1, "")
    return _Logic(common.rules | {"task": [task]}, common.actions)


@dataclass
class _Writer:
    """Derives text from a grammar's symbols, as ``ContextSensitiveGrammar.derive`` does."""

    rules: dict[str, list[Any]]
    facts: Facts
    entities: dict[str, Any]

    def write(self, symbols: list[Any], mapping: Mapping) -> str:
        return "".join([self._one(symbol, mapping) for symbol in symbols])

    def _one(self, symbol: Any, mapping: Mapping) -> str:
        if isinstance(symbol, textgen.TerminalSymbol):
            return str(symbol.symbol)
        if isinstance(symbol, textgen.NonterminalSymbol):
            return self._rule(str(symbol.symbol), mapping)
        if isinstance(symbol, textgen.EvalSymbol):
            variables = {name: self.entities[entity] for (name, _), entity in mapping.items()}
            return str(eval(_compile(symbol.expression), {"__builtins__": {}}, variables))  # the expression was looked through
        if isinstance(symbol, textgen.ListSymbol):
            return self._list(self._each(symbol.symbol, mapping), mapping)
        return "".join(self._each(symbol, mapping))

    def _each(self, symbol: Any, mapping: Mapping) -> list[str]:
        """A conditional's text for every answer to its query."""
        if not isinstance(symbol, textgen.ConditionalSymbol):
            return [self._one(symbol, mapping)]
        answers = self.facts.assignments(symbol.given, mapping) if symbol.given else [mapping]
        return [self._one(symbol.expression, answer) for answer in answers]

    def _list(self, items: list[str], mapping: Mapping) -> str:
        if not items:
            return self._rule("list_empty", mapping)
        if len(items) == 1:
            return items[0]
        return self._rule("list_separator", mapping).join(items[:-1]) + self._rule("list_last_separator", mapping) + items[-1]

    def _rule(self, name: str, mapping: Mapping) -> str:
        """The text of the first rule whose condition holds."""
        for rule in self.rules.get(name, ()):
            if not rule.condition or next(self.facts.assignments(rule.condition, mapping), None) is not None:
                return self.write(rule.rhs, mapping)
        raise ValueError(f"the game's grammar has no rule for #{name}# that applies here")


def _queries(symbols: list[Any]) -> Iterator[str | None]:
    """The queries on which the text of symbols depends; None: more than queries (another rule)."""
    for symbol in symbols:
        if isinstance(symbol, textgen.ListSymbol):
            yield from _queries([symbol.symbol])
        elif isinstance(symbol, textgen.ConditionalSymbol):
            if symbol.given:
                yield symbol.given
            yield from _queries([symbol.expression])
        elif isinstance(symbol, textgen.NonterminalSymbol):
            yield None


# ---- the game --------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Game:
    """Everything of a game file that its episodes share."""

    name: str
    domain: str
    problem: str
    walkthrough: list[str]
    logic: _Logic
    translation: Translation
    hierarchy: Any = field(repr=False)
    entities: dict[str, Any] = field(repr=False)

    def fixed(self, action: str) -> bool:
        """Whether the wording of an action's command can never change in this game."""
        queries = list(_queries(_symbols(self.logic.actions[action].template)))
        fluents = self.translation.fluents
        return None not in queries and not any(name.removeprefix("not_") in fluents for query in queries for name, _ in _query(query))


_KEYS = {"pddl_domain": str, "grammar": str, "pddl_problem": str}


def read_game(path: Path, cache: Path | None = None) -> Game:
    """Read and translate a game.tw-pddl file. ValueError, naming it, for a file that is no such game."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError(f"it holds a {type(data).__name__}, not an object")
        for key, kind in _KEYS.items():
            if not isinstance(data.get(key), kind):
                raise ValueError(f"it lacks {key!r}")
        logic = read_logic(data["grammar"])
        translation = translate(data["pddl_domain"], data["pddl_problem"], cache)
        hierarchy = tw_logic.TypeHierarchy()
        for name, supertypes in translation.types:
            try:
                hierarchy.add(tw_logic.Type(name, supertypes))
            except ValueError:  # declared twice: the first counts, as in the stock engine
                continue
        entities = _name_entities(translation)
    except OSError as error:
        raise ValueError(f"game file {path} cannot be read: {error.strerror}; see the folder again, or leave this game out") from error
    except Exception as error:  # parsers raise whatever they like at broken text
        reason = str(error).strip().splitlines()
        raise ValueError(f"game file {path} is broken: {type(error).__name__}: {reason[0] if reason else 'no reason given'}") from error
    return Game(
        name=str(path),
        domain=data["pddl_domain"],
        problem=data["pddl_problem"],
        walkthrough=list(data.get("walkthrough") or []),
        logic=logic,
        translation=translation,
        hierarchy=hierarchy,
        entities=entities,
    )


def _name_entities(translation: Translation) -> dict[str, Any]:
    """Every entity that occurs in a fact, with the name ALFWorld gives it ("cabinet 3")."""
    entities: dict[str, Any] = {}
    for _, *arguments in translation.facts:
        for name in arguments:
            entities.setdefault(name, EntityInfo(name, translation.objects[name]))
    demangler = Demangler(game_infos=entities)
    for info in entities.values():
        info.definite, info.indefinite = "the", "a"
        info.name = demangler.demangle_alfred_name(info.id)
    return entities


@dataclass
class _Operator:
    """An operator of a game, as far as it has been met."""

    action: str
    mapping: Mapping
    effects: int
    command: str | None  # None: worded anew each turn
    changes: list[tuple[tuple[Signature, Fact], tuple[Signature, Fact]]] | None = None  # (removed, added), read when first applied


class Engine:
    """Plays one game at a time. ``load`` a game, then ``reset`` and ``step``; ``load`` another whenever you like."""

    def __init__(self) -> None:
        self._library = _Library()
        self._game: Game | None = None
        self._steps = 0

    def load(self, game: Game) -> None:
        if game is self._game and self._steps < RELOAD_AFTER:
            return
        self._game, self._steps = game, 0
        self._library.load(zlib.decompress(game.translation.sas))
        self._facts = Facts(game.translation, game.hierarchy)
        self._writer = _Writer(game.logic.rules, self._facts, game.entities)
        self._operators: dict[int, _Operator] = {}
        self._fixed = {action: game.fixed(action) for action in game.translation.parameters}

    def reset(self) -> tuple[str, list[str]]:
        """Back to the beginning: the introduction and the admissible commands."""
        self._library.restart()
        self._facts.restart()
        self._intro = self._writer.write(_symbols("#intro#"), {})
        self._gather()
        return self._intro, self.admissible

    def step(self, command: str) -> tuple[str, bool, bool, list[str]]:
        """Do a command: what is read, whether it was admissible, whether the game is won, the admissible commands."""
        operator = self._commands.get(command.strip())
        if operator is None:
            return "Nothing happens.", False, self.won, self.admissible
        self._apply(operator)
        found = self._operators[operator]
        feedback = self._writer.write(_symbols(self._game.logic.actions[found.action].feedback_rule), found.mapping)
        self._gather()
        return feedback, True, self.won, self.admissible

    def plan(self) -> list[str]:
        """The planner's commands from here to the goal."""
        _, sas = _pddl2sas(self._game.domain, self._game.problem, optimize=True)
        return [self._word(name, self._mapping(name, arguments)) for name, *arguments in self._library.plan(sas)]

    def close(self) -> None:
        self._library.close()

    def _apply(self, operator: int) -> None:
        self._steps += 1
        found, facts = self._operators[operator], self._facts
        if found.changes is None:
            found.changes = []
            for name, arguments in self._library.apply_and_read(operator, found.effects):
                opposite = name.removeprefix("not_") if name.startswith("not_") else "not_" + name
                found.changes.append(((facts.signature(opposite, arguments), arguments), (facts.signature(name, arguments), arguments)))
        else:
            self._library.apply(operator)
        for removed, added in found.changes:
            facts.remove(*removed)
            facts.add(*added)

    def _mapping(self, action: str, arguments: list[str]) -> Mapping:
        return dict(zip(self._game.translation.parameters[action], arguments, strict=False))

    def _word(self, action: str, mapping: Mapping) -> str:
        return self._writer.write(_symbols(self._game.logic.actions[action].template), mapping)

    def _gather(self) -> None:
        """What can be done now. Of several operators with one command the library's first is meant, as in the stock engine."""
        self.won = self._library.won()
        self._commands: dict[str, int] = {}
        for position, operator in enumerate(self._library.applicable()):
            found = self._operators.get(operator)
            if found is None:
                found = self._operators[operator] = self._meet(position)
            self._commands.setdefault(found.command if found.command is not None else self._word(found.action, found.mapping), operator)
        self.admissible = sorted(self._commands)

    def _meet(self, position: int) -> _Operator:
        (action, *arguments), effects = self._library.operator(position)
        mapping = self._mapping(action, arguments)
        command = self._word(action, mapping) if self._fixed[action] else None
        return _Operator(action, mapping, effects, command)
