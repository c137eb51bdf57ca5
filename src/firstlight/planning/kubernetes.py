"""Owns the Kubernetes manifest of a plan: a LeaderWorkerSet, one group of pods a replica.

Knows no cluster; it is written as YAML of the plain kind (blocks, quoted strings).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from firstlight.planning.emit import PORT, command_line, for_firstlight, machines
from firstlight.planning.hardware import Fleet
from firstlight.planning.plan_file import PlanFile

# The names under which device plug-ins offer a vendor's cards.
RESOURCES: Mapping[str, str] = MappingProxyType(
    {
        "NVIDIA": "nvidia.com/gpu",
        "AMD": "amd.com/gpu",
        "Moore Threads": "mthreads.com/gpu",
        "Huawei": "huawei.com/Ascend910",
    }
)
_PROBE_SECONDS = 10
# A cold start may take this many times what is predicted before it is given up.
_PATIENCE = 4


def manifest(plan: PlanFile, fleet: Fleet, *, engine: str = "sglang", image: str = "IMAGE") -> str:
    """Returns a LeaderWorkerSet that starts every replica; `image` is the container to run.

    `sglang` runs the same command on all machines of a replica; `firstlight` serves from one.
    """
    count = machines(plan, fleet)
    container: dict[str, Any] = {
        "name": "engine",
        "image": image,
        "command": ["sh", "-c", _start(plan, fleet, engine)],
        "ports": [{"containerPort": 8000}],
        "resources": {"limits": _limits(plan, fleet)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    worker = {"spec": {"containers": [container], "volumes": volumes}}
    leader = {"spec": {"containers": [{**container, **_probes(plan)}], "volumes": volumes}}
    template = {"size": count, "restartPolicy": "RecreateGroupOnPodRestart"}
    document = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": _name(plan.model)},
        "spec": {
            "replicas": plan.replicas,
            "leaderWorkerTemplate": {
                **template,
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }
    return "\n".join(_lines(document, "")) + "\n"


def _start(plan: PlanFile, fleet: Fleet, engine: str) -> str:
    if engine == "firstlight":
        return f"{for_firstlight(plan, fleet).lines[0]} --host 0.0.0.0 --port 8000"
    words = [
        *("python", "-m", "sglang.launch_server", "--model-path", plan.model),
        *("--trust-remote-code", "--tp-size", str(plan.tp * plan.dp)),
        *("--pp-size", str(plan.pp), "--ep-size", str(plan.ep)),
        *(("--dp-size", str(plan.dp), "--enable-dp-attention") if plan.dp > 1 else ()),
        *("--context-length", str(plan.context), "--host", "0.0.0.0", "--port", "8000"),
        *("--nnodes", "$LWS_GROUP_SIZE", "--node-rank", "$LWS_WORKER_INDEX"),
        *("--dist-init-addr", f"$LWS_LEADER_ADDRESS:{PORT}"),
    ]
    # The variables are set in every pod of a LeaderWorkerSet.
    return command_line(*words)


def _limits(plan: PlanFile, fleet: Fleet) -> dict[str, str]:
    name = RESOURCES.get(fleet.device.vendor)
    each = min(fleet.machine, plan.layout.world_size)
    return {name: str(each)} if name else {"cpu": str(each)}


def _probes(plan: PlanFile) -> dict[str, Any]:
    """Patience follows the predicted start: a healthy slow load must not be killed."""
    seconds = _PATIENCE * sum(plan.times.cold_start.values())
    check = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": _PROBE_SECONDS}
    tries = max(30, int(seconds / _PROBE_SECONDS) + 1)
    return {"startupProbe": {**check, "failureThreshold": tries}, "readinessProbe": check}


def _name(model: str) -> str:
    """A name Kubernetes allows, from the last part of the model's path."""
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:40] or "model"


def _lines(value: Any, indent: str) -> list[str]:
    """Writes mappings and lists as blocks; scalars as JSON writes them, which YAML reads alike."""
    if isinstance(value, dict):
        return [line for key, item in value.items() for line in _entry(key, item, indent)]
    lines = []
    for item in value:
        first, *rest = _lines(item, indent + "  ") if isinstance(item, dict) else [_scalar(item)]
        lines.append(f"{indent}- {first.strip()}")
        lines.extend(rest)
    return lines


def _entry(key: str, item: Any, indent: str) -> list[str]:
    name = key if re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", key) else json.dumps(key)
    if isinstance(item, (dict, list)) and item:
        return [f"{indent}{name}:", *_lines(item, indent + "  ")]
    return [f"{indent}{name}: {_scalar(item)}"]


def _scalar(value: Any) -> str:
    return json.dumps(value)
