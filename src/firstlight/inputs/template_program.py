"""Owns compiling a chat template and running it in a sandbox, marked text followed through it.
It knows nothing of messages, tokens or where the template came from.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from firstlight.inputs.guarded_text import GuardedText, Shadow
from firstlight.inputs.template_limits import (
    RenderBudget,
    check_length,
    check_method,
    check_operation,
)

_BUDGET = "_render_budget"
# Filters that work on patterns or make another type: they see what the user wrote, and all they
# return counts as the user's.
_OPAQUE_FILTERS = [
    "title",
    "wordwrap",
    "wordcount",
    "striptags",
    "urlize",
    "forceescape",
    "escape",
    "e",
    "urlencode",
    "xmlattr",
    "pprint",
    "format",
    "int",
    "float",
    "abs",
    "round",
    "filesizeformat",
]
# What foreign template code may raise when it meets values it did not expect.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateProgram:
    """A compiled chat template; rendering is a pure function of the variables given.

    Raises jinja2.TemplateSyntaxError when `source` is no template.
    """

    def __init__(self, source: str, shadow: Shadow) -> None:
        self.shadow = shadow
        self._environment = _ChatEnvironment(shadow)
        tree = self._environment.parse(source)
        self.literals: frozenset[str] = frozenset(_literals(tree))
        self._template = self._environment.from_string(_Watched().visit(tree))

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """The text the template writes, marks in it; raises one of TEMPLATE_ERRORS."""
        pieces, length = [], 0
        for piece in self._template.generate(**variables, **{_BUDGET: RenderBudget(now)}):
            length += len(piece)
            check_length(length)
            pieces.append(piece)
        return "".join(pieces)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, shadow: Shadow) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        self.shadow = shadow
        self.concat = self._joined  # type: ignore[method-assign]
        self.filters = {name: self._watched(name, call) for name, call in self.filters.items()}
        self.filters["tojson"] = self._tojson
        self.filters["safe"] = self._safe
        self.filters["_counted"] = _counted
        self.filters["_joined"] = lambda first, *rest: self._joined(map(str, (first, *rest)))
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls for the template, counting the call and marking what it returns."""
        _budget(context)._spend()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str):
            check_method(method.__name__, receiver, (*args, *kwargs.values()))
        return self.shadow.wrap(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses results of absurd size before they are made."""
        check_operation(operator, left, right)
        return self.shadow.wrap(super().call_binop(context, operator, left, right))

    def _joined(self, pieces: Iterable[str]) -> str:
        listed = list(pieces)
        check_length(sum(map(len, listed)))
        joined: str = self.shadow.wrap("".join(listed))
        return joined

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            skipped = 1 if hasattr(call, "jinja_pass_arg") else 0
            check_method(name, args[skipped], (*args[skipped + 1 :], *kwargs.values()))
            if name not in _OPAQUE_FILTERS or not self.shadow.has_marks_inside([*args, kwargs]):
                return self.shadow.wrap(call(*args, **kwargs))
            plain = [self.shadow.reveal_all(arg) for arg in args]
            result = call(*plain, **self.shadow.reveal_all(kwargs))
            return self.shadow.guard(str(result)) if isinstance(result, str) else result

        return watched

    def _tojson(self, value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        if unknown := options.keys() - {"indent", "separators", "sort_keys"}:
            raise TypeError(f"tojson does not take {', '.join(sorted(unknown))}")
        check_method("indent", "", [options.get("indent")])
        text = json.dumps(self.shadow.reveal_all(value), ensure_ascii=ensure_ascii, **options)
        return self.shadow.guard(text) if self.shadow.has_marks_inside(value) else text

    def _safe(self, value: Any) -> Any:
        return value if isinstance(value, GuardedText) else jinja2.filters.do_mark_safe(value)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here it only opens a scope."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """Reads up to `endgeneration`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Watched(NodeTransformer):
    """Sends loops and `~` through the environment, where they are counted and marked."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        return nodes.Filter(first, "_joined", rest, [], None, None, lineno=node.lineno)


def _literals(tree: nodes.Template) -> Iterable[str]:
    for data in tree.find_all(nodes.TemplateData):
        yield data.data
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


def _budget(context: Context) -> RenderBudget:
    budget = context.parent[_BUDGET]
    assert isinstance(budget, RenderBudget), "a template ran without a budget"
    return budget


@jinja2.pass_context
def _counted(context: Context, items: Any) -> Any:
    return _budget(context)._counted(items)


@jinja2.pass_context
def _strftime_now(context: Context, pattern: str) -> str:
    return _budget(context)._now.strftime(pattern)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))
