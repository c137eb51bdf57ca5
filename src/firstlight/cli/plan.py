"""Owns the verb `plan`: a model and a fleet in, a plan and its reasons out; the arithmetic is
planning's.

Knows how a model is named on a command line: a folder, a store, a GGUF file, a config or an index.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.cli.options import AsJson, options_from
from firstlight.cli.outcome import show
from firstlight.errors import BadInput, UsageError
from firstlight.settings.serve import ServeSettings
from firstlight.settings.settings import required, resolve_flags, setting

if TYPE_CHECKING:
    from firstlight.models.spec import ModelSpec
    from firstlight.planning.hardware import Device, Fleet
    from firstlight.planning.plan_file import PlanFile
    from firstlight.planning.rehearse import Rehearsal, SourceNames
    from firstlight.planning.search import Answer, Question
    from firstlight.planning.workload import PlanRules, Workload

_NOT_ASKED = "not asked"
_SEARCHED = "searched"
_MANIFEST = "kubernetes"


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What the verb takes; lengths in tokens, times in seconds."""

    model: Path = required("checkpoint folder, store, GGUF file, config.json or index")
    devices: str | None = setting(
        None, "fleet, like 64xS5000@8: number, device, cards of an island", optional_text="none"
    )
    find_hardware: bool = setting(False, "find the smallest fleets instead")
    context: int | None = setting(
        None, "longest sequence", kind="count", minimum=1, optional_text="the model's own"
    )
    concurrency: int = setting(16, "sequences at once, each of full context", minimum=1)
    images: int = setting(0, "images in a request", minimum=0)
    image_tokens: int = setting(1024, "features of one image", kind="count", minimum=1)
    input_tokens: int | None = setting(
        None, "prompt length times are predicted for", kind="count", optional_text="8K, if it fits"
    )
    output_tokens: int | None = setting(
        None, "answer length times are predicted for", kind="count", optional_text="1K, if it fits"
    )
    objective: str = setting(
        "latency", "what is best", choices=("latency", "throughput", "cheapest")
    )
    ttft: float | None = setting(None, "first token within", minimum=0, optional_text=_NOT_ASKED)
    tpot: float | None = setting(
        None, "each further token within", minimum=0, optional_text=_NOT_ASKED
    )
    tp: int | None = setting(None, "this tensor parallel degree", optional_text=_SEARCHED)
    pp: int = setting(1, "pipeline stages, with --tp", minimum=1)
    dp: int = setting(1, "data-parallel parts of attention, with --tp", minimum=1)
    ep: int = setting(1, "expert parallel degree, with --tp", minimum=1)
    context_parallel: bool = setting(
        False, "let ranks share out the latent cache (other engines can)"
    )
    dtype: str = setting("bfloat16", "compute type", choices=("float32", "bfloat16", "float16"))
    cache_dtype: str = setting("same", "type of cached values", choices=("same", "int8", "fp8"))
    attention: str = setting(
        "full",
        "earlier tokens that attention reads: full, window=4096,sinks=4, sparse=64x32, or by layer",
    )
    tiers: str = setting(
        "", "cache of each rank beside its device, as in host=64GiB,disk=/path:500GiB"
    )
    encoder_cache_bytes: int = setting(
        ServeSettings.encoder_cache_bytes,
        "bytes for features of images, on each rank, of a model that reads any",
        kind="bytes",
        minimum=0,
    )
    reserve_share: float = setting(0.2, "part of each device kept for framework and driver")
    block_size: int = setting(16, "tokens in a cache block", minimum=1)
    chunk_tokens: int = setting(2048, "tokens of a prompt in one step", kind="count", minimum=1)
    max_batch_tokens: int = setting(4096, "tokens in one step", kind="count", minimum=1)
    storage_rate: int = setting(
        5 * 10**9, "bytes a second one machine reads from storage", kind="bytes", minimum=1
    )
    profile: Path | None = setting(
        None, "JSON record of a device that the catalogue lacks", optional_text="none"
    )
    memory_bytes: int | None = setting(
        None,
        "plan as if a device had this much memory, like 64GiB",
        kind="bytes",
        minimum=1,
        optional_text="its own",
    )
    emit: str = setting("", "launch settings to show: vllm, sglang, torchrun, ray, kubernetes, all")
    rehearse: bool = setting(False, "go through every rank's load, and the names of an index")
    plan_path: Path | None = setting(None, "file to write the plan to", optional_text="none")
    picture: Path | None = setting(
        None, "SVG file to draw memory and layout in", optional_text="none"
    )


@options_from(PlanFlags, arguments=("model",))
def plan(flags: Mapping[str, Any], as_json: AsJson = False) -> int:
    """Say which layout, what it holds and how fast it is.

    Reads the config alone. Weights and caches are exact, times a prediction with a band; the next
    five layouts are listed with what they lost by.
    """
    from firstlight.accept.plan_report import fleets_report, plan_report
    from firstlight.planning.plan_file import write_plan

    given = resolve_flags(PlanFlags, flags)
    spec = read_model(given.model)
    if given.find_hardware:
        from firstlight.planning.fleets import find_fleets

        question = _question(given, spec, _any_fleet())
        return show(fleets_report(find_fleets(question)), as_json=as_json)
    fleet = _fleet(given)
    answer = _answer(given, _question(given, spec, fleet))
    made = _plan_file(given, answer)
    rehearsal = _rehearse(given, spec, answer) if given.rehearse else None
    if made is not None and given.plan_path is not None:
        write_plan(made, given.plan_path)
    _draw(given, answer)
    launches = _launches(given.emit, made, answer.fleet)
    return show(plan_report(answer, made, launches, rehearsal), as_json=as_json)


def read_model(path: Path) -> ModelSpec:
    """Returns the spec of whatever names a model; an index stands for the config beside it.

    Raises BadInput when there is none.
    """
    from firstlight.checkpoint.json_file import read_json
    from firstlight.models.spec import read_model_spec
    from firstlight.runner.model_path import read_spec

    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    if path.is_file() and ".json" in path.name:
        config = path.with_name("config.json") if ".index.json" in path.name else path
        if not config.exists():
            raise BadInput(f"{path}: there is no config.json beside this index")
        return read_model_spec(read_json(config))
    return read_spec(path)


def _question(given: PlanFlags, spec: ModelSpec, fleet: Fleet) -> Question:
    from firstlight.planning.search import Question
    from firstlight.planning.workload import Targets

    return Question(
        spec=spec,
        fleet=fleet,
        workload=_workload(given, spec),
        rules=_rules(given),
        objective=given.objective,
        targets=Targets(given.ttft, given.tpot),
    )


def _workload(given: PlanFlags, spec: ModelSpec) -> Workload:
    from firstlight.planning.workload import Workload, request_lengths

    context = given.context or spec.context_length
    if context > spec.context_length:
        raise UsageError(
            f"context {context} exceeds the model's {spec.context_length} tokens; positions beyond "
            "it were never trained"
        )
    lengths = request_lengths(
        context, input_tokens=given.input_tokens, output_tokens=given.output_tokens
    )
    return Workload(
        context=context,
        concurrency=given.concurrency,
        images=given.images,
        image_tokens=given.image_tokens,
        input_tokens=lengths[0],
        output_tokens=lengths[1],
    )


def _rules(given: PlanFlags) -> PlanRules:
    from firstlight.planning.workload import PlanRules

    return PlanRules(
        dtype=given.dtype,
        block_size=given.block_size,
        chunk_tokens=given.chunk_tokens,
        max_batch_tokens=given.max_batch_tokens,
        kv_dtype="auto" if given.cache_dtype == "same" else given.cache_dtype,
        encoder_cache_bytes=given.encoder_cache_bytes,
        reserve_share=given.reserve_share,
        storage_rate=float(given.storage_rate),
        context_parallel=given.context_parallel,
        attention=given.attention,
        tiers=given.tiers,
    )


def _fleet(given: PlanFlags) -> Fleet:
    from firstlight.planning.hardware import Fleet, parse_fleet, read_device

    if given.devices is None:
        raise UsageError("no devices given; write --devices 64xS5000@8, or use --find-hardware")
    if given.profile is not None:
        device = read_device(given.profile.read_bytes())
        number = int(given.devices.partition("x")[0] or 1)
        return _limited(given, Fleet(number, device, min(device.island, number)))
    return _limited(given, parse_fleet(given.devices, _host(given.devices)))


def _limited(given: PlanFlags, fleet: Fleet) -> Fleet:
    if given.memory_bytes is None:
        return fleet
    from msgspec.structs import replace

    from firstlight.planning.hardware import Figure

    memory = Figure(float(given.memory_bytes), "asked for")
    return replace(fleet, device=replace(fleet.device, memory=memory))


def _host(devices: str) -> Device | None:
    """Measures this machine only when it is asked about."""
    if "cpu" not in devices.lower():
        return None
    from firstlight.planning.host_profile import measure_host

    return measure_host()


def _any_fleet() -> Fleet:
    from firstlight.planning.hardware import Fleet, catalogue

    return Fleet(1, catalogue()[0], 1)


def _answer(given: PlanFlags, question: Question) -> Answer:
    from firstlight.planning.search import evaluate, search
    from firstlight.sharding.layout import Layout

    if given.tp is None:
        return search(question)
    layout = Layout(tp=given.tp, pp=given.pp, dp=given.dp, ep=given.ep)
    replicas = max(1, question.fleet.count // layout.world_size)
    return evaluate(question, layout, replicas)


def _plan_file(given: PlanFlags, answer: Answer) -> PlanFile | None:
    from firstlight.planning.plan_file import plan_of
    from firstlight.planning.weights import weight_table

    if answer.memory is None:
        return None
    total = weight_table(answer.question.spec, given.dtype).total_bytes
    return plan_of(answer, str(_folder(given.model)), total)


def _folder(model: Path) -> Path:
    """What holds the model a config or an index belongs to."""
    return model.parent if ".json" in model.name else model


def _rehearse(given: PlanFlags, spec: ModelSpec, answer: Answer) -> Rehearsal:
    from firstlight.planning.rehearse import rehearse
    from firstlight.planning.weights import weight_table

    memory = answer.nearest
    if memory is None:
        raise UsageError("nothing to rehearse: the model cannot be cut for so many devices")
    source = read_names(given.model)
    table = weight_table(spec, given.dtype)
    return rehearse(spec, table, memory.arrangement.layout, source, memory)


def read_names(path: Path) -> SourceNames | None:
    """Returns the tensor names of a safetensors index at or in a path, None when there is none.

    Raises BadInput when it cannot be read.
    """
    from firstlight.planning.rehearse import SourceNames

    found = [path] if ".index.json" in path.name else sorted(path.glob("*.index.json*"))
    if not found:
        return None
    try:
        content = found[0].read_bytes()
        index = json.loads(gzip.decompress(content) if found[0].suffix == ".gz" else content)
        total = index.get("metadata", {}).get("total_size")
        return SourceNames(index["weight_map"], total)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BadInput(f"{found[0]}: no safetensors index: {error}") from error


def _draw(given: PlanFlags, answer: Answer) -> None:
    from firstlight.planning.explain import verdict
    from firstlight.planning.picture import draw

    memory = answer.nearest
    if given.picture is not None and memory is not None:
        title = (
            f"{_folder(given.model.resolve()).name}: {verdict(memory, answer.question.workload)}"
        )
        given.picture.write_text(draw(memory, answer.fleet, title), encoding="utf-8")


def _launches(targets: str, made: PlanFile | None, fleet: Fleet) -> list[Any]:
    from firstlight.planning.emit import TARGETS, Launch
    from firstlight.planning.kubernetes import manifest

    known = (*TARGETS, _MANIFEST)
    asked = known if targets == "all" else tuple(t.strip() for t in targets.split(",") if t.strip())
    unknown = [target for target in asked if target not in known]
    if unknown:
        raise UsageError(
            f"no launch settings for {', '.join(unknown)}; there are {', '.join(known)}"
        )
    if made is None:
        return []
    names = dict.fromkeys(("firstlight", *asked))
    found = [TARGETS[name](made, fleet) for name in names if name in TARGETS]
    if _MANIFEST in names:
        found.append(Launch(_MANIFEST, tuple(manifest(made, fleet).splitlines())))
    return found
