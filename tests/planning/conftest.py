import json
from pathlib import Path

import pytest

from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.planning.work import ModelWork, model_work
from tiny_models import tiny_config

DATA = Path(__file__).parent.parent / "data" / "k3"


@pytest.fixture(scope="session")
def k3() -> ModelSpec:
    return read_model_spec(json.loads((DATA / "full" / "config.json").read_text()))


@pytest.fixture(scope="session")
def k3_work(k3: ModelSpec) -> ModelWork:
    return model_work(k3, "bfloat16")


@pytest.fixture(scope="session")
def mini() -> ModelSpec:
    return read_model_spec(json.loads((DATA / "checkpoint" / "config.json").read_text()))


@pytest.fixture(scope="session")
def mini_work(mini: ModelSpec) -> ModelWork:
    return model_work(mini, "bfloat16")


@pytest.fixture(scope="session")
def dense() -> ModelSpec:
    """A dense model with fewer KV heads than some layouts have ranks."""
    config = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return read_model_spec(config)


@pytest.fixture(scope="session")
def windowed() -> ModelSpec:
    """A dense model half of whose layers look back 16 tokens."""
    return read_model_spec(tiny_config("qwen2-window"))
