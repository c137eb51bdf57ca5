"""Owns the grammar of tool calls in marked elements, typed by the JSON schemas of the tools.
It knows nothing of the rest of an answer.

Strings stand as raw text, other values as JSON. Arguments come in the order of the schema's
properties, each at most once; what is required is there.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from firstlight.errors import RequestError
from firstlight.inputs.element_markers import ElementMarkers
from firstlight.inputs.grammar_rules import GrammarRules
from firstlight.inputs.kimi_k3.encoder import json_type
from firstlight.inputs.kimi_k3.segments import escape_attribute

_JSON_TYPES = ("string", "number", "boolean", "null", "object", "array")
_MAX_REFERENCES = 16
_MAX_WAYS = 256
_MAX_LENGTH = 100_000
_PATTERN_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
_ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
_KEY = r'[^"&<>\x00-\x1f]{1,64}'


class _Value(NamedTuple):
    """One way to write an argument: the `type` attribute, and the expression of the value."""

    kind: str
    expression: str


def add_calls(
    rules: GrammarRules,
    functions: Sequence[Mapping[str, Any]],
    markers: ElementMarkers,
    *,
    several: bool,
) -> str:
    """Adds one call of one of the functions, or `several`, and returns the expression.

    Raises RequestError naming `tools` for parameters that are no usable schema.
    """
    calls = [_Call(rules, function, markers).rule(several=several) for function in functions]
    one = rules.rule(" | ".join(calls))
    return f"{one}+" if several else one


class _Call:
    """Writes the rules of calling one function."""

    def __init__(
        self, rules: GrammarRules, function: Mapping[str, Any], markers: ElementMarkers
    ) -> None:
        self._rules, self._markers = rules, markers
        self._name = str(function.get("name"))
        self._where = f"tools: parameters of {self._name!r}"
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise RequestError(f"{self._where} must be a JSON schema object", "tools")
        self._schema: Mapping[str, Any] | None = parameters
        self._shared = {
            key: value
            for key, value in (parameters or {}).items()
            if key in ("$defs", "definitions")
        }

    def rule(self, *, several: bool) -> str:
        index = "/[1-9][0-9]{0,2}/" if several else '"1"'
        head = json.dumps(f'call tool="{escape_attribute(self._name)}" index="')
        arguments = " ".join(self._arguments())
        return self._rules.rule(
            f'<[{self._markers.open}]> {head} {index} "\\"" <[{self._markers.sep}]> '
            f"{arguments} {self._markers.closed('call')}"
        )

    def _arguments(self) -> Iterator[str]:
        schema = self._schema or {}
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        if not isinstance(properties, Mapping) or not isinstance(required, (list, tuple)):
            raise self._refusal("properties or required are malformed")
        for key, value in properties.items():
            argument = self._argument(key, value)
            yield argument if key in required else f"({argument})?"
        if self._schema and not properties and schema.get("additionalProperties") is not False:
            yield f"({self._any_argument()})*"

    def _argument(self, key: str, schema: Any) -> str:
        values = list(islice(self._values(schema, _MAX_REFERENCES), _MAX_WAYS + 1))
        if not 1 <= len(values) <= _MAX_WAYS:
            raise self._refusal(f"{key!r} can be written in no way, or in more than {_MAX_WAYS}")
        head = f'argument key="{escape_attribute(key)}" type="'
        written = [
            f"{json.dumps(head + value.kind + chr(34))} <[{self._markers.sep}]> {value.expression}"
            for value in values
        ]
        body = self._rules.rule(" | ".join(written))
        return f"<[{self._markers.open}]> {body} {self._markers.closed('argument')}"

    def _any_argument(self) -> str:
        key = self._rules.pattern(_KEY, self._where)
        written = [
            f"{json.dumps(chr(34) + ' type=' + chr(34) + value.kind + chr(34))} "
            f"<[{self._markers.sep}]> {value.expression}"
            for value in self._values({}, 0)
        ]
        body = self._rules.rule(" | ".join(written))
        head = json.dumps('argument key="')
        return f"<[{self._markers.open}]> {head} {key} {body} {self._markers.closed('argument')}"

    def _values(self, schema: Any, references: int) -> Iterator[_Value]:
        """The ways to write a value of `schema`, one or more for each type it may have."""
        if isinstance(schema, bool):
            schema = {}
        if not isinstance(schema, Mapping):
            raise self._refusal("a property is no schema")
        if "$ref" in schema and references:
            yield from self._values(self._referred(schema["$ref"]), references - 1)
            return
        branches = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(branches, list) and references:
            for branch in branches:
                yield from self._values(branch, references - 1)
            return
        if "const" in schema or isinstance(schema.get("enum"), list):
            yield from self._listed([schema["const"]] if "const" in schema else schema["enum"])
            return
        kinds = schema.get("type", _JSON_TYPES)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, (list, tuple)):
            raise self._refusal("a type is neither a name nor a list of names")
        for kind in kinds:
            yield self._typed(str(kind), schema)

    def _referred(self, reference: Any) -> Any:
        found: Any = self._schema
        for step in str(reference).removeprefix("#").strip("/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise self._refusal(f"$ref {reference!r} leads nowhere")
            found = found[name]
        return found

    def _listed(self, values: Sequence[Any]) -> Iterator[_Value]:
        for value in values:
            kind = json_type(value)
            text = value if kind == "string" else json.dumps(value, ensure_ascii=False)
            yield _Value(kind, self._rules.literal(text))

    def _refusal(self, reason: str) -> RequestError:
        return RequestError(f"{self._where}: {reason}", "tools", "invalid_schema")

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> _Value:
        if kind == "string":
            return _Value(kind, self._string(schema))
        whole = {**self._shared, **schema, "type": kind}
        written = "number" if kind == "integer" else kind
        return _Value(written, self._rules.json(whole, self._where))

    def _string(self, schema: Mapping[str, Any]) -> str:
        """Raw text with the pattern of the schema, else within its lengths in characters."""
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            return self._rules.pattern(_anchored(pattern), self._where)
        least, most = schema.get("minLength") or 0, schema.get("maxLength")
        if not least and most is None:
            return self._rules.any_text()
        if type(least) is not int or type(most) not in (int, type(None)):
            raise self._refusal("minLength and maxLength must be whole numbers")
        if max(least, most or 0) > _MAX_LENGTH:
            raise self._refusal(f"a length is above {_MAX_LENGTH}")
        bounds = f"{{{least},{'' if most is None else most}}}"
        return self._rules.pattern(rf"(.|\n){bounds}", self._where)


def _anchored(pattern: str) -> str:
    """A pattern for the whole text, from one that is searched for in it."""
    return "|".join(_anchored_branch(branch) for branch in _branches(pattern))


def _anchored_branch(branch: str) -> str:
    anything = r"(.|\n)*"
    before = "" if branch.startswith("^") else anything
    after = "" if _ENDS.search(branch) else anything
    core = branch.removeprefix("^")
    return f"{before}({core if after else core[:-1]}){after}"


def _branches(pattern: str) -> list[str]:
    """The alternatives of a pattern that stand in no group."""
    branches, start, depth = [], 0, 0
    for token in _PATTERN_TOKENS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(token.group(), 0)
        if token.group() == "|" and depth == 0:
            branches.append(pattern[start : token.start()])
            start = token.end()
    return [*branches, pattern[start:]]
