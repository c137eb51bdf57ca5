"""Serves a model folder with the scripted engine until a signal comes; run by a test."""

import asyncio
import sys
from pathlib import Path

from scripted_engine import ScriptedEngine

from firstlight.inputs.chat_format import load_chat_format
from firstlight.inputs.generation_defaults import read_generation_defaults
from firstlight.inputs.tokenizer import load_tokenizer
from firstlight.metrics.series import Series
from firstlight.server.context import AppContext
from firstlight.server.listener import bind_socket
from firstlight.server.serving import serve_app


async def main(folder: Path) -> int:
    """Prints its address, then serves."""
    listener = bind_socket("127.0.0.1", 0)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    tokenizer, series = load_tokenizer(folder), Series()
    context = AppContext(
        engine=ScriptedEngine(tokenizer, step_seconds=0.02),
        tokenizer=tokenizer,
        chat_format=load_chat_format(folder, tokenizer),
        defaults=read_generation_defaults(folder),
        model_names=("small",),
        context_length=256,
        recorder=series,
        read_series=series.flatten,
    )
    return await serve_app(context, listener)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]))))
