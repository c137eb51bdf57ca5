"""Runs the benchmarks of Kimi K3's operations one after the other and keeps what they print.

Owns the page docs/benchmarks/kimi-k3.md; refuses to know what is measured.

    python benchmarks/kimi_k3.py [--write]
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks" / "kimi-k3.md"
RUNS = (
    (
        "moe_experts.py",
        "Experts in MXFP4",
        "A slice of one layer, 16 experts of 3 x 3584 x 3072, every token chooses all of them. "
        "Wanted: at least 2x the better of fp32 and bf16 dequantised weights at 1 and at 16 "
        "tokens; resident experts at their packed size and 5 %.",
    ),
    (
        "kda_prefill.py",
        "Kimi Delta Attention, prefill",
        "96 heads of 128 x 128, 2,048 tokens. Wanted: at least 10x the tokens per second of the "
        "recurrence in torch.",
    ),
    (
        "latent_attention.py",
        "Latent attention from the cache",
        "96 heads, latent 512 + 64. The absorbed form with our kernel beside both plain forms: "
        "where the expanded form would win decides how a step is computed.",
    ),
)


def machine() -> str:
    """Return the processor's name as the system gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def main() -> int:
    """Run all, print all, and write the page if asked."""
    parser = argparse.ArgumentParser(description="Benchmarks of Kimi K3's operations")
    parser.add_argument("--write", action="store_true", help=f"keep the page in {PAGE}")
    options = parser.parse_args()
    parts = [
        "# Kimi K3's operations on a CPU\n",
        f"Written by `benchmarks/kimi_k3.py --write`. Machine: {machine()}. All sides of a "
        "question ran in turn in one process; medians over rounds; shares are of what the machine "
        "reached in the same run.\n",
    ]
    for script, title, question in RUNS:
        done = subprocess.run(
            [sys.executable, str(HERE / script)], text=True, stdout=subprocess.PIPE, check=True
        )
        print(f"{title}\n{done.stdout}", flush=True)
        parts.append(f"## {title}\n\n{question}\n\n```\n{done.stdout.rstrip()}\n```\n")
    if options.write:
        PAGE.write_text("\n".join(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
