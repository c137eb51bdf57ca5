"""A service whose cache is mostly on disk: the answers of one that holds everything."""

from pathlib import Path
from typing import Any

PROMPTS = [[(7 * i + 3 * k) % 250 + 3 for i in range(900)] for k in range(3)]


def answer(service: Any, prompt: list[int]) -> list[int]:
    reply = service.complete(prompt, max_tokens=6).json()
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


def total(metrics: dict[str, float], name: str, word: str) -> float:
    """The sum of the samples of a metric that have this word among their labels."""
    return sum(v for key, v in metrics.items() if key.startswith(f"{name}{{") and word in key)


def test_two_ranks_with_their_cache_on_disk(
    tiny_store: Path, start_service: Any, shared_service: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    want = [answer(shared_service, prompt) for prompt in PROMPTS]
    limits = ("--kv-budget-bytes", "128KiB", "--context", "1024", "--chunk-tokens", "64")
    tiers = ("--tiers", f"host=64KiB,disk={folder}:4MiB", "--max-sequences", "2")
    chosen = ("--attention", "sparse=16x64")  # as many blocks as there are
    service = start_service(tiny_store, "--tp", "2", *limits, *tiers, *chosen).wait_ready()
    assert len(list(folder.iterdir())) == 2, "one file a rank"
    facts = service.get("/startup").json()["facts"]
    assert facts["kv_tokens"] < len(PROMPTS[0]), "the device holds no whole prompt"
    for _ in range(2):
        assert [answer(service, prompt) for prompt in PROMPTS] == want
    for path in folder.glob("*rank1.bin"):  # what one rank lost is lost
        data = bytearray(path.read_bytes())
        data[5000:] = bytes(byte ^ 1 for byte in data[5000:])
        path.write_bytes(data)
    assert [answer(service, prompt) for prompt in PROMPTS] == want
    metrics = service.metrics()
    assert total(metrics, "tier_moved_bytes_total", 'direction="in",place="disk"') > 0 or total(
        metrics, "tier_moved_bytes_total", 'place="disk",direction="in"'
    )
    assert total(metrics, "tier_lost_total", 'place="disk"') > 0
    service.terminate()
    assert service.wait_exit() == 0 and not list(folder.iterdir())
