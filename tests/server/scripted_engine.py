"""Owns a small engine that runs in process: real requests, streams and cancellation.

The "model" answers every prompt with the same text, token by token; it knows no tensor. Greedy
requests get the text from its start, sampled ones from a token chosen by their seed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from firstlight.checkpoint.damage import Damage
from firstlight.engine.messages import (
    Output,
    Phase,
    RankWeightsChecked,
    Score,
    Status,
    WeightsReloaded,
    WeightsReport,
)
from firstlight.errors import EnvironmentProblem, RequestError
from firstlight.inputs.tokenizer import Tokenizer
from firstlight.schedule.request import FinishReason, Request, SubmittedRequest
from firstlight.schedule.step import TokenLogprobs

REPLY = (
    "The capital of France is Paris. Caf\u00e9 \u6f22\u5b57 \U0001f642 and then some more words."
)


class ScriptedEngine:
    """An EngineClient. `live` holds the unfinished requests; what ended is counted."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reply: str = REPLY,
        step_seconds: float = 0.0,
        prefill_seconds: float = 0.0,
        tokens_per_output: int = 1,
        max_live: int = 100_000,
        refuse_with: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.reply_ids = tokenizer.encode_plain(reply)
        self.step_seconds = step_seconds
        self.prefill_seconds = prefill_seconds
        self.tokens_per_output = tokens_per_output
        self.max_live = max_live
        self.refuse_with = refuse_with
        self.live: dict[str, Request] = {}
        self.submitted: list[SubmittedRequest] = []
        self.num_finished = 0
        self.num_cancelled = 0
        self.failed_ids: set[int] = set()
        self.gone = False
        self.stalled_seconds = 0.0
        self.status_age_seconds = 0.1
        self.damages: list[Damage] = []
        self.reloaded_from: list[str | None] = []
        self.reload_answer = WeightsReloaded("reload", "v2", "known answers hold", 1.5)
        self.drained = False
        self.closed = False
        self.status: Status | None = Status(
            sequence=1,
            progress=7,
            busy=False,
            ready=True,
            phases=[Phase("load weights", 0.5, 2.0, "1 GiB")],
            facts={"device": "cpu"},
            metrics={"steps_total": 3.0, "cache_used_bytes/kv": 10.0},
        )

    async def submit(self, requests: Sequence[SubmittedRequest]) -> AsyncGenerator[Output, None]:
        """Serves the requests token by token; closing the stream cancels what is unfinished."""
        if self.gone:
            raise EnvironmentProblem("the engine has ended; restart the service")
        if self.refuse_with is not None:
            raise RequestError("not now", code=self.refuse_with)
        if len(self.live) + len(requests) > self.max_live:
            raise RequestError("the queue is full; try again later", code="queue_full")
        own = {one.request_id: Request(one, len(self.submitted)) for one in requests}
        assert not own.keys() & self.live.keys(), "a request id was used twice"
        self.submitted += requests
        self.live |= own
        try:
            await asyncio.sleep(self.prefill_seconds)
            while own:
                await asyncio.sleep(self.step_seconds)
                for request in list(own.values()):
                    output = self.step(request)
                    if output.finish is not None:
                        del own[request.request_id], self.live[request.request_id]
                        self.num_finished += 1
                    yield output
        finally:
            self.num_cancelled += len(own)
            for request_id in own:
                del self.live[request_id]

    def step(self, request: Request) -> Output:
        """Generates the next tokens of a request."""
        if request.submitted.prompt_ids[-1] in self.failed_ids:
            return Output(request.request_id, finish=FinishReason.ERROR, error="not finite logits")
        scores = None
        if request.num_output == 0 and request.params.prompt_logprobs is not None:
            prompt = request.submitted.prompt_ids
            scores = Score(1, [self.score(token_id) for token_id in prompt[1:]])
        ids: list[int] = []
        finish = FinishReason.LENGTH if request.params.max_tokens == 0 else None
        while finish is None and len(ids) < self.tokens_per_output:
            ids.append(self.next_token(request))
            request.token_ids.append(ids[-1])
            finish = request.finish_reason()
        wanted = request.params.logprobs is not None
        return Output(
            request.request_id,
            token_ids=ids,
            logprobs=[self.score(token_id) for token_id in ids] if wanted else None,
            prompt_logprobs=scores,
            finish=finish,
            num_cached=2,
        )

    def next_token(self, request: Request) -> int:
        """The reply's token at this place; its end token after the last, or the reply again."""
        start = request.params.seed if request.params.temperature > 0 else 0
        place = request.num_output
        if place >= len(self.reply_ids) and request.params.end_token_ids:
            return request.params.end_token_ids[0]
        return self.reply_ids[(start + place) % len(self.reply_ids)]

    def score(self, token_id: int) -> TokenLogprobs:
        """Made-up numbers that depend on the token alone; one is minus infinity."""
        top = [
            (token_id, -0.25),
            ((token_id + 1) % 256, -1.5),
            ((token_id + 2) % 256, -float("inf")),
        ]
        return TokenLogprobs(token_id, -0.25, 1, top)

    async def check_weights(self) -> WeightsReport:
        """What two ranks found: the second one `damages`."""
        ranks = [RankWeightsChecked(0, 100, []), RankWeightsChecked(1, 90, self.damages)]
        return WeightsReport("check", ranks, 0.5)

    async def reload_weights(self, source: str | None) -> WeightsReloaded:
        """The answer a test has set; notes the source."""
        self.reloaded_from.append(source)
        return self.reload_answer

    async def drain(self) -> None:
        """Waits until nothing is live."""
        while self.live:
            await asyncio.sleep(0.01)
        self.drained = True

    async def close(self) -> None:
        """Nothing to release; noted for the tests."""
        self.closed = True

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """For the test's thread: waits until no request is live."""
        deadline = time.monotonic() + seconds
        while self.live:
            assert time.monotonic() < deadline, f"{len(self.live)} requests are still in the engine"
            time.sleep(0.01)
