"""Owns writing down the rules of a grammar in llguidance's Lark form, JSON schemas checked.
It knows nothing of requests, elements or tokens.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher

from firstlight.errors import RequestError
from firstlight.inputs.chat_messages import plain_value

# White space between the parts of a JSON text: enough to indent, too little to go on for ever.
_FORM = MappingProxyType({"whitespace_pattern": r"[ \n]{0,16}"})


class GrammarRules:
    """Collects named rules; what each method returns is an expression to use in another rule."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._any_text = ""
        self._json_rules: dict[str, str] = {}

    def text(self, *, start: str, where: str) -> str:
        """The whole grammar, with `start` as the expression of an answer.

        Raises RequestError naming `where` when the rules do not fit together.
        """
        text = "\n".join([f"start: {start}", *self._lines]) + "\n"
        self._check(text, where)
        return text

    def rule(self, expression: str) -> str:
        """A rule of its own for `expression`."""
        return self._add("rule", expression)

    def any_text(self) -> str:
        """Any text, empty too, without control tokens."""
        if not self._any_text:
            self._any_text = self._add("TEXT", "/(.|\\n)*/")
        return self._any_text

    def pattern(self, pattern: str, where: str) -> str:
        """Text that matches a regular expression; raises RequestError naming `where`."""
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern)
        escaped = escaped.replace("\n", "\\n").replace("\r", "\\r")
        name = self._add("TEXT", f"/{escaped}/")
        self._check(f"start: {name}\n{self._lines[-1]}\n", where)
        return name

    def literal(self, text: str) -> str:
        """Exactly this text."""
        return json.dumps(text)

    def json(self, schema: Mapping[str, Any] | bool, where: str) -> str:
        """JSON text of a schema; raises RequestError naming `where` for one that is not valid."""
        given = {} if schema is True else schema
        if given is False:
            raise RequestError(f"{where}: the schema `false` allows no value", where)
        given = plain_value(given, where)
        expression = f"%json {json.dumps({**given, 'x-guidance': dict(_FORM)})}"
        if expression not in self._json_rules:
            self._check(f"start: {expression}\n", where)
            self._json_rules[expression] = self._add("json", expression)
        return self._json_rules[expression]

    def _add(self, kind: str, expression: str) -> str:
        name = f"{kind}_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    @staticmethod
    def _check(grammar: str, where: str) -> None:
        problem = LLMatcher.validate_grammar(grammar)
        if problem:
            reason = problem.splitlines()[0].partition("): ")[2] or problem
            parameter = where.partition(":")[0]
            raise RequestError(f"{where}: {reason}", parameter, "invalid_schema")
