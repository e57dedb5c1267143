"""From observations to prompt ids, and from response text to commands.

Two histories. ``full``: one growing conversation; a turn's prompt is the previous prompt, the response ids exactly as sampled,
and the tokens of what is new, so every token of an episode is computed once. ``window``: a fresh single user message a turn that
restates the task and quotes the last few (observation, action) pairs, as in the papers (method: Settings, history). Nothing that
was sampled is ever tokenised again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stand-ins for messages, to see what a template puts around them.
_SYSTEM = "sapofastsystem"
_USERS = ("sapofastuserone", "sapofastusertwo", "sapofastuserthree")
_ASSISTANTS = ("sapofastreplyone", "sapofastreplytwo")
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_FALLBACK = 30  # characters of a response without tags that are sent to the environment, as verl-agent does


@dataclass(frozen=True)
class ParsedAction:
    """What a response says. ``command`` goes to the environment in any case; ``valid``: the format (and the admissible rule) was kept."""

    command: str
    valid: bool


def _allows(admissible: str, command: str) -> bool:
    """Whether a command is the admissible one, whose "<...>", if it has any, stands for any text that is not empty."""
    if admissible == command:
        return True
    pieces = re.split(r"<[^<>]+>", admissible)
    return len(pieces) > 1 and re.fullmatch(".+".join(map(re.escape, pieces)), command, re.DOTALL) is not None


class PromptBuilder:
    """Prompts and parsing for one tokenizer and one family of tasks.

    tokenizer: with a chat template. system_prompt: what the model is told once (``full``: a system message where the template has
    one, else the head of the first user message; ``window``: the head of every user message). restate_task: under ``full``, every
    user message after the first ends with the task too, so that a small model need not look back for it (``window`` always states
    it). think: the response must reason in <think></think>. action_tags: the command stands in <action></action>; otherwise the
    whole response (after </think>) is the command. admissible: list ``info["admissible_commands"]``. invalid_rule: "format", or
    "admissible": a command outside that list is invalid too. chat_template_kwargs: extra variables of the template (such as
    enable_thinking).

    ``end_ids``: ids that end a turn: the template's end-of-turn token and the tokenizer's eos.

    ValueError: no chat template; no end-of-turn token; a template that changes earlier messages, under ``full``; window < 0.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str = "",
        history: Literal["full", "window"] = "full",
        window: int = 2,
        restate_task: bool = False,
        think: bool = False,
        action_tags: bool = False,
        admissible: bool = False,
        invalid_rule: Literal["format", "admissible"] = "format",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if history not in ("full", "window"):
            raise ValueError(f"history must be 'full' or 'window'; got {history!r}")
        if invalid_rule not in ("format", "admissible"):
            raise ValueError(f"invalid_rule must be 'format' or 'admissible'; got {invalid_rule!r}")
        if window < 0:
            raise ValueError(f"window must be at least 0 past turns; got {window}")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; use an instruction-tuned model, or set tokenizer.chat_template")
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt.strip()
        self.history, self.window, self.restate_task = history, window, restate_task
        self.think, self.action_tags = think, action_tags
        self.admissible, self.invalid_rule = admissible, invalid_rule
        self._template_kwargs = dict(chat_template_kwargs or {})
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = re.compile("|".join(re.escape(t) for t in sorted(special, key=len, reverse=True))) if special else None
        self._find_frame()
        self.end_ids = self._find_end_ids()
        if history == "full":
            self._check_append_only()

    def start(self) -> History:
        """The history of a new episode."""
        return History(self)

    def format_action(self, command: str) -> str:
        """A response that says ``command`` in the format asked for (without the end-of-turn token)."""
        action = f"<action>{command}</action>" if self.action_tags else command
        if not self.think:
            return action
        return ("" if self._think_opened else "<think>") + "</think>" + action

    def parse(self, response: str, admissible: Sequence[str] | None = None) -> ParsedAction:
        """The command of a response text (end-of-turn token taken off): lower case, without outer white space.

        With action_tags: the text of the first <action></action>; without such a pair, or with an empty one, the response is
        invalid and its last 30 characters are the command, as in verl-agent. With think: <think> (unless the prompt opened it)
        and </think> must both occur. Without tags the whole text is the command, and only an empty one is invalid. ``admissible``
        counts under invalid_rule="admissible" alone; "<...>" in one of them stands for any text, as in "search[<keywords>]".
        """
        valid, body = True, response
        if self.think:
            opened = self._think_opened or "<think>" in response
            valid = opened and "</think>" in response
            if not self.action_tags:
                body = response.partition("</think>")[2] if "</think>" in response else response[-_FALLBACK:]
        if self.action_tags:
            found = _ACTION.search(response)
            valid = valid and found is not None and bool(found[1].strip())
            body = found[1] if found is not None and found[1].strip() else response[-_FALLBACK:]
        command = body.strip().lower()
        valid = valid and bool(command)
        if self.invalid_rule == "admissible" and admissible is not None:
            valid = valid and any(_allows(a.strip().lower(), command) for a in admissible)
        return ParsedAction(command, valid)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of prompt."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def defuse(self, text: str) -> str:
        """Text from an environment with every special token's spelling broken up, so that no observation can end a turn or open another."""
        text = text.strip()
        return text if self._special is None else self._special.sub(lambda found: found[0][0] + " " + found[0][1:], text)

    def instruction(self) -> str:
        """What the format asks of the model, in words; empty without tags."""
        parts = []
        if self.think:
            parts.append("First reason step by step inside <think> </think>.")
        if self.action_tags:
            parts.append("Then give one action inside <action> </action>." if self.think else "Give one action inside <action> </action>.")
        elif self.think:
            parts.append("Then give one action and nothing else.")
        return " ".join(parts)

    def admissible_line(self, info: Mapping[str, Any]) -> str:
        """The admissible commands, quoted, without "help"; empty where they are off or unknown."""
        commands = info.get("admissible_commands") if self.admissible else None
        if not commands:
            return ""
        return "Admissible actions: " + ", ".join(f"'{self.defuse(c)}'" for c in commands if c != "help") + "."

    # ---- the template ---------------------------------------------------------------------------------------------------------------

    def _render(self, turns: Sequence[str], *, system: bool, prompt: bool = True) -> str:
        """The template's text for user, assistant, user, ... messages."""
        messages = [{"role": "system", "content": _SYSTEM}] if system else []
        messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **self._template_kwargs)

    def _find_frame(self) -> None:
        """What the template puts before and after the first user message."""
        self._has_system = False
        if self.history == "full" and self.system_prompt:
            try:
                self._has_system = _SYSTEM in self._render(_USERS[:1], system=True)
            except Exception:  # templates refuse roles by raising whatever they like; then the system prompt goes into the user message
                self._has_system = False
        text = self._render(_USERS[:1], system=self._has_system)
        head, found, self._after = text.partition(_USERS[0])
        if not found:
            raise ValueError("the chat template does not show the user's message; use another template")
        self._before = head.replace(_SYSTEM, self.system_prompt)
        self._think_opened = self._after.rstrip().endswith("<think>")

    def _find_end_ids(self) -> tuple[int, ...]:
        eos = self.tokenizer.eos_token_id
        after = self._render((_USERS[0], _ASSISTANTS[0]), system=self._has_system, prompt=False).partition(_ASSISTANTS[0])[2]
        first = self.encode(after)[:1]
        ids = [i for i in first if i in self.tokenizer.added_tokens_decoder] + ([] if eos is None else [int(eos)])
        if not ids:
            raise ValueError("neither the chat template nor the tokenizer has a token that ends a turn; set tokenizer.eos_token")
        return tuple(dict.fromkeys(ids))

    def _check_append_only(self) -> None:
        """Find what stands between a response and the next user message, and make sure that a longer conversation only ever appends."""
        u1, u2, u3 = _USERS
        a1, a2 = (self.format_action(reply) for reply in _ASSISTANTS)  # with reasoning, which some templates cut out later
        one, two, three = (self._render(turns, system=self._has_system) for turns in ((u1,), (u1, a1, u2), (u1, a1, u2, a2, u3)))
        self._between, _, after = two.removeprefix(one + a1).partition(u2)
        consistent = two.startswith(one + a1) and after == self._after and three == two + a2 + self._between + u3 + self._after
        if not consistent:
            raise ValueError(
                "history='full' needs a chat template that only appends, but this one changes earlier messages as the conversation "
                "grows (or opens the reply with text it later leaves out, as templates with a thinking switch do); use "
                "history='window', or a template that appends"
            )


class History:
    """One episode's prompts: ``prompt`` and ``respond``, in turn. ``shown`` is the text of the last user message."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.shown = ""
        self._builder = builder
        self._ids: list[int] = []
        self._past: list[tuple[str, str]] = []  # (observation, command) of every finished turn
        self._observation: str | None = None  # of the turn in progress

    def prompt(self, observation: str, info: Mapping[str, Any]) -> list[int]:
        """Prompt ids for what the environment just said (a new list). ``info``: its ``task`` and ``admissible_commands``."""
        if self._observation is not None:
            raise ValueError("prompt() was called twice; respond() must come between")
        b, first = self._builder, not self._past
        self._observation = b.defuse(observation)
        self.shown = self._windowed(info) if b.history == "window" else self._next_message(info)
        if first or b.history == "window":
            self._ids = b.encode(b._before + self.shown + b._after)
        else:
            new = b.encode(b._between + self.shown + b._after)
            # A response that was cut lacks its end-of-turn token: the template's own is appended as context. One that has its own
            # needs no second.
            ended = self._ids[-1] in b.end_ids and new[0] in b.end_ids
            self._ids = self._ids + (new[1:] if ended else new)
        return self._ids

    def respond(self, response_ids: Sequence[int], command: str) -> None:
        """Note the response (ids as sampled) and the command made of it."""
        if self._observation is None:
            raise ValueError("respond() was called without a prompt(); call prompt() first")
        self._past.append((self._observation, command))
        self._observation = None
        if self._builder.history == "full":
            self._ids = self._ids + list(response_ids)

    def _next_message(self, info: Mapping[str, Any]) -> str:
        b, head = self._builder, []
        if not self._past:
            head = [] if b._has_system else [b.system_prompt]
            head += [self._task(info), b.instruction()]
        again = self._task(info) if b.restate_task and self._past else ""
        return "\n".join(line for line in (*head, self._observation, again, b.admissible_line(info)) if line)

    def _task(self, info: Mapping[str, Any]) -> str:
        """The task in words, unless the current observation states it."""
        task = self._builder.defuse(str(info.get("task") or ""))
        return f"Task: {task}" if task and task not in (self._observation or "") else ""

    def _windowed(self, info: Mapping[str, Any]) -> str:
        b = self._builder
        lines = [b.system_prompt, self._task(info)]
        if self._past:
            count = len(self._past)
            shown = self._past[-b.window :] if b.window else []
            lines.append(f"Steps taken so far: {count}.")
            lines += [
                f"Observation {count - len(shown) + i + 1}: '{seen}' Action {count - len(shown) + i + 1}: '{b.defuse(command)}'"
                for i, (seen, command) in enumerate(shown)
            ]
            lines.append(f"You are now at step {count + 1}.")
        lines += [f"Current observation: {self._observation}", b.admissible_line(info), b.instruction()]
        return "\n".join(line for line in lines if line)
