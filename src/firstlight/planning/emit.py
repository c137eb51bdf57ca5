"""Owns launch settings made from a plan: commands for firstlight, vLLM, SGLang, torchrun and Ray.

Knows only option names; what a target cannot express is said in a note instead of left out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from firstlight.planning.hardware import Fleet
from firstlight.planning.plan_file import PlanFile
from firstlight.planning.workload import ENCODER_CACHE_BYTES
from firstlight.settings.serve import ServeSettings
from firstlight.settings.settings import fields_of, flag_of

PORT = 29500
_WHERE = "HEAD is the address of the first machine, MACHINE the number of each from 0"


@dataclass(frozen=True)
class Launch:
    """Settings for one target: lines to run, in order, and what they cannot say."""

    target: str
    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Lines and notes as a shell script."""
        return "\n".join([*(f"# {note}" for note in self.notes), *self.lines]) + "\n"


def machines(plan: PlanFile, fleet: Fleet) -> int:
    """Machines that one replica spreads over."""
    return -(-plan.layout.world_size // fleet.machine)


def serve_values(plan: PlanFile) -> dict[str, int | str]:
    """Returns what a plan says of the settings of `serve`, by their names there."""
    values: dict[str, int | str] = {
        "tp": plan.tp,
        "pp": plan.pp,
        "dp": plan.dp,
        "ep": plan.ep,
        "dtype": plan.dtype,
        "context": plan.context,
        "max_sequences": plan.sequences_per_part * plan.dp,
        "chunk_tokens": plan.chunk_tokens,
        "max_batch_tokens": plan.max_batch_tokens,
        "block_size": plan.block_size,
        "kv_budget_bytes": plan.kv_budget_bytes,
    }
    if plan.kv_dtype != "auto":
        values["kv_dtype"] = plan.kv_dtype
    if plan.encoder_cache_bytes != ENCODER_CACHE_BYTES:
        values["encoder_cache_bytes"] = plan.encoder_cache_bytes
    if plan.attention != "full":
        values["attention"] = plan.attention
    if plan.tiers:
        values["tiers"] = plan.tiers
    return values


def _beyond_others(plan: PlanFile, engine: str) -> list[str]:
    """What an engine other than ours is not told of the cache."""
    named = (("--attention", plan.attention, "full"), ("--tiers", plan.tiers, ""))
    asked = [f"{flag} {value}" for flag, value, usual in named if value != usual]
    if not asked:
        return []
    return [f"{engine} is not told of {' and '.join(asked)}: planned for `firstlight serve`"]


def for_firstlight(plan: PlanFile, fleet: Fleet) -> Launch:
    """Returns the `serve` command of one replica; degrees `serve` has no option for are a note."""
    known, wanted = fields_of(ServeSettings), serve_values(plan)
    degrees = ("pp", "dp", "ep")
    lacking = [f"{n} {wanted[n]}" for n in degrees if n not in known and wanted[n] != 1]
    options = [
        word
        for name, value in wanted.items()
        if name in known and not (name in degrees and value == 1)
        for word in (flag_of(name), str(value))
    ]
    notes = []
    if lacking:
        notes.append(f"this version of `serve` has no option for {', '.join(lacking)}")
    if machines(plan, fleet) > 1:
        notes.append("this version of `serve` starts the ranks of one machine")
    if plan.context_parallel > 1:
        notes.append("firstlight does not share out the latent cache")
    if plan.cache_element_bytes == 1:
        notes.append("this version of firstlight keeps cached values in the compute type")
    return Launch(
        "firstlight", (command_line("firstlight", "serve", plan.model, *options),), tuple(notes)
    )


def for_vllm(plan: PlanFile, fleet: Fleet) -> Launch:
    """Returns one command, or one for the first and one for every other machine of a replica."""
    words, group = _vllm_words(plan), plan.tp * plan.dp
    notes = [] if plan.ep in (1, group) else [_whole_experts(plan.ep, group)]
    notes += _beyond_others(plan, "vLLM")
    count = machines(plan, fleet)
    if count == 1:
        return Launch("vllm", (command_line(*words),), tuple(notes))
    notes.append(f"{_WHERE}, the second line on all but the first")
    spread = ("--nnodes", count, "--master-addr", "$HEAD", "--node-rank")
    lines = (
        command_line(*words, *spread, 0),
        command_line(*words, *spread, "$MACHINE", "--headless"),
    )
    return Launch("vllm", lines, tuple(notes))


def _vllm_words(plan: PlanFile) -> list[object]:
    return [
        *("vllm", "serve", plan.model, "--trust-remote-code"),
        *_degree("--tensor-parallel-size", plan.tp),
        *_degree("--pipeline-parallel-size", plan.pp),
        *_degree("--data-parallel-size", plan.dp),
        *(("--enable-expert-parallel",) if plan.ep > 1 else ()),
        *_degree("--decode-context-parallel-size", plan.context_parallel),
        *("--max-model-len", plan.context, "--max-num-seqs", plan.sequences_per_part),
        *("--max-num-batched-tokens", plan.max_batch_tokens, "--block-size", plan.block_size),
        *("--gpu-memory-utilization", _share(1 - plan.reserve_share), "--dtype", plan.dtype),
        *(("--kv-cache-dtype", "fp8") if _has_fp8_caches(plan) else ()),
    ]


def for_sglang(plan: PlanFile, fleet: Fleet) -> Launch:
    """Returns one command for each machine of a replica; its tensor parallel size counts the
    data-parallel parts of attention.
    """
    group = plan.tp * plan.dp
    words = [
        *("python", "-m", "sglang.launch_server", "--model-path", plan.model),
        *("--trust-remote-code", "--tp-size", group),
        *_degree("--pp-size", plan.pp),
        *(("--dp-size", plan.dp, "--enable-dp-attention") if plan.dp > 1 else ()),
        *_degree("--ep-size", plan.ep),
        *_degree("--dcp-size", plan.context_parallel),
        *("--context-length", plan.context),
        *("--max-running-requests", plan.sequences_per_part * plan.dp),
        *("--chunked-prefill-size", plan.chunk_tokens, "--page-size", plan.block_size),
        *("--mem-fraction-static", _share(1 - plan.reserve_share), "--dtype", plan.dtype),
        *(("--kv-cache-dtype", "fp8_e4m3") if _has_fp8_caches(plan) else ()),
    ]
    notes = _beyond_others(plan, "SGLang")
    count = machines(plan, fleet)
    if count == 1:
        return Launch("sglang", (command_line(*words),), tuple(notes))
    spread = ("--nnodes", count, "--dist-init-addr", f"$HEAD:{PORT}")
    line = command_line(*words, *spread, "--node-rank", "$MACHINE")
    return Launch("sglang", (line,), (*notes, _WHERE))


def for_torchrun(plan: PlanFile, fleet: Fleet) -> Launch:
    """Returns the command that gives a program the ranks of one replica, the same on every
    machine.
    """
    count = machines(plan, fleet)
    each = min(fleet.machine, plan.layout.world_size)
    where = ("--standalone",) if count == 1 else _rendezvous()
    words = ("torchrun", "--nnodes", count, "--nproc-per-node", each, *where, "$PROGRAM")
    notes = (
        "PROGRAM is a script that reads RANK and WORLD_SIZE; ranks count tp innermost, then dp, pp",
    )
    return Launch("torchrun", (command_line(*words),), notes)


def _rendezvous() -> tuple[str, ...]:
    return ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"$HEAD:{PORT}", "--rdzv-id", "plan")


def for_ray(plan: PlanFile, fleet: Fleet) -> Launch:
    """Returns how to join machines into a Ray cluster and the bundles of one replica."""
    count, each = machines(plan, fleet), min(fleet.machine, plan.layout.world_size)
    bundles = json.dumps([{"GPU": each}] * count)
    lines = (
        "ray start --head --port 6379  # on the first machine",
        "ray start --address $HEAD:6379  # on every other machine",
        f"# placement group: strategy STRICT_SPREAD, bundles {bundles}",
        command_line(*_vllm_words(plan), "--distributed-executor-backend", "ray"),
    )
    counted = "devices that Ray does not count need --num-gpus on `ray start`"
    return Launch("ray", lines, (counted, *_beyond_others(plan, "vLLM")))


TARGETS: Mapping[str, Callable[[PlanFile, Fleet], Launch]] = MappingProxyType(
    {
        "firstlight": for_firstlight,
        "vllm": for_vllm,
        "sglang": for_sglang,
        "torchrun": for_torchrun,
        "ray": for_ray,
    }
)


def _has_fp8_caches(plan: PlanFile) -> bool:
    return plan.kv_dtype == "fp8" or plan.cache_element_bytes == 1


def _degree(flag: str, value: int) -> tuple[object, ...]:
    return (flag, value) if value > 1 else ()


def _share(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _whole_experts(ep: int, group: int) -> str:
    return f"vLLM spreads experts over all {group} ranks, the plan over {ep}"


def command_line(*words: object) -> str:
    """Joins words for a shell; those with a variable keep it."""
    return " ".join(_quoted(str(word)) for word in words)


def _quoted(word: str) -> str:
    return f'"{word}"' if word.startswith("$") else shlex.quote(word)
