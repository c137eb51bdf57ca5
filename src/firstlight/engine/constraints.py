"""Owns the grammars of requests while the engine serves them: compiled aside, asked for a mask in
each step, moved on by each token. Knows no tensor, and nothing of what the grammars mean.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from firstlight.errors import ConfigError, FirstlightError, RequestError
from firstlight.runner.model_path import inputs_path
from firstlight.schedule.admission import RefusalCode
from firstlight.schedule.answers import RequestUpdate
from firstlight.schedule.request import FinishReason, SubmittedRequest
from firstlight.schedule.step import StepPlan, TokenMask

if TYPE_CHECKING:
    from firstlight.inputs.constraint import ConstraintFactory, TokenConstraint

_LOG = logging.getLogger("firstlight.engine")


class Prepared(NamedTuple):
    """A request whose grammar was compiled, or why it cannot be."""

    request: SubmittedRequest
    constraint: "TokenConstraint | None"
    error: RequestError | None


class _Pending(NamedTuple):
    request: SubmittedRequest
    future: "Future[TokenConstraint]"


class Constraints:
    """Grammars by request id. All calls come from the engine's thread.

    Grammars are compiled in a thread of their own, so that requests under way do not wait for a
    large schema, or for the tokenizer that the first grammar needs. What a request has said stays
    with it through a preemption: its constraint is moved on by its tokens only.
    """

    def __init__(
        self, make_factory: "Callable[[], ConstraintFactory]", *, max_pending: int = 1024
    ) -> None:
        self._make_factory = make_factory
        self._factory: ConstraintFactory | None = None
        self._max_pending = max_pending
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._pending: dict[str, _Pending] = {}
        self._held: dict[str, TokenConstraint] = {}
        self._rows: dict[int, str] = {}
        self._broken: dict[str, str] = {}

    @property
    def num_pending(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._pending)

    def prepare(self, request: SubmittedRequest) -> None:
        """Begins to compile the request's grammar; take_prepared gives it back.

        Raises RequestError when too many are being compiled, or one of this id.
        """
        if len(self._pending) >= self._max_pending:
            raise RequestError(
                f"the grammars of {len(self._pending)} requests are being compiled; try again "
                "later",
                code=RefusalCode.QUEUE_FULL.value,
            )
        if request.request_id in self._pending:
            raise RequestError(
                f"request {request.request_id} is being served already; each needs its own id",
                "request_id",
                RefusalCode.DUPLICATE.value,
            )
        future = self._compiler.submit(self._compile, request.params.grammar)
        self._pending[request.request_id] = _Pending(request, future)

    def take_prepared(self) -> list[Prepared]:
        """Requests whose grammar is done, in the order they came; each is given once."""
        done = [key for key, pending in self._pending.items() if pending.future.done()]
        return [_prepared(self._pending.pop(key)) for key in done]

    def withdraw(self, request_ids: Iterable[str]) -> list[str]:
        """Forgets those of the requests that are not prepared yet, and returns their ids."""
        found = [key for key in dict.fromkeys(request_ids) if key in self._pending]
        for key in found:
            self._pending.pop(key).future.cancel()
        return found

    def hold(self, request_id: str, constraint: "TokenConstraint") -> None:
        """Keeps a constraint for a request that was admitted, until its last update."""
        self._held[request_id] = constraint

    def masked(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with a mask for each row that samples under a grammar."""
        for row in plan.released:
            self._rows.pop(row, None)
        for sequence in plan.new:
            if sequence.request_id in self._held:
                self._rows[sequence.row] = sequence.request_id
        masks = [
            TokenMask(step.row, self._mask(self._rows[step.row]))
            for step in plan.steps
            if step.sample and step.row in self._rows
        ]
        return msgspec.structs.replace(plan, masks=masks) if masks else plan

    def follow(self, updates: Iterable[RequestUpdate]) -> list[RequestUpdate]:
        """Moves the grammars on by what was sampled, and drops those of requests that ended.

        Returns the updates; where a grammar ended a request, with the reason it had.
        """
        return [self._follow(update) for update in updates]

    def _follow(self, update: RequestUpdate) -> RequestUpdate:
        constraint = self._held.get(update.request_id)
        if constraint is None:
            return update
        if update.finish is not None:
            del self._held[update.request_id]
            reason = self._broken.pop(update.request_id, None)
            failed = update.finish is FinishReason.ERROR and reason is not None
            return msgspec.structs.replace(update, error=reason) if failed else update
        try:
            for token_id in update.token_ids:
                constraint.advance(token_id)
        except RequestError as error:
            self._note_broken(update.request_id, error)
        return update

    def _mask(self, request_id: str) -> bytes:
        """The tokens a request may go on with; none, which ends it, when its grammar broke."""
        if request_id in self._broken:
            return b""
        try:
            return self._held[request_id].mask()
        except RequestError as error:
            self._note_broken(request_id, error)
            return b""

    def _note_broken(self, request_id: str, error: RequestError) -> None:
        self._broken[request_id] = str(error).partition("\n")[0]  # below is the library's state

    def _compile(self, grammar: str) -> "TokenConstraint":
        if self._factory is None:
            self._factory = self._make_factory()
        return self._factory.constraint(grammar)


def _prepared(pending: _Pending) -> Prepared:
    problem = pending.future.exception()
    if problem is None:
        return Prepared(pending.request, pending.future.result(), None)
    if isinstance(problem, RequestError):
        return Prepared(pending.request, None, problem)
    if not isinstance(problem, FirstlightError):
        _LOG.error("a bug in firstlight or its grammar library ended a request", exc_info=problem)
    error = RequestError(
        f"this model cannot be held to a grammar: {problem}", "response_format", "no_grammar"
    )
    return Prepared(pending.request, None, error)


def open_factory(model: Path, vocab_size: int) -> "ConstraintFactory":
    """Reads the tokenizer of a store, a checkpoint folder or a GGUF file for its grammars.

    `vocab_size` counts the model's logits. Takes a second or two for a vocabulary of 160,000.
    Raises ConfigError when there is no tokenizer or the model has no end token.
    """
    from firstlight.inputs.constraint import ConstraintFactory
    from firstlight.inputs.generation_defaults import read_generation_defaults
    from firstlight.inputs.tokenizer import load_tokenizer

    folder = inputs_path(model)
    tokenizer = load_tokenizer(folder)
    defaults = read_generation_defaults(folder if folder.is_dir() else folder.parent)
    ends = (*defaults.eos_ids, *tokenizer.eos_ids)
    if not ends:
        raise ConfigError(f"{folder}: the model names no end token, so a grammar could not end")
    return ConstraintFactory(tokenizer, vocab_size, tuple(dict.fromkeys(ends)))
