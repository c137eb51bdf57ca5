"""Owns the known answers of a store: what the plain model says to given tokens, and how far dtypes
stray.

They are computed layer by layer while a checkpoint is converted, so a model larger than memory has
them too. At start the gate asks the service the same and compares. Knows no engine and no service.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from firstlight.assembly.build import build_on_meta, move_buffers
from firstlight.checkpoint.known_answers import FILE_NAME, VERSION, KnownAnswers, KnownCase
from firstlight.checkpoint.store_names import ANSWERS_FOLDER
from firstlight.kernels.builtin import reference_kernels
from firstlight.layers.packed_batch import pack_whole
from firstlight.models.spec import ModelSpec

# Arithmetic in which the sample is run beside fp32, to see how far each strays from it.
SPREAD_DTYPES = ("float64", "bfloat16")
_TOKENS_AT_ONCE = 4096


class AnswerRecorder:
    """Runs sample tokens through a model whose weights pass by one unit at a time.

    Give it every unit in load order with `on_unit`, then `finish`. Only the current unit and the
    embedding (when tied) are held.
    """

    def __init__(self, spec: ModelSpec, samples: Mapping[str, Sequence[int]]) -> None:
        self._spec = spec
        self._samples = {name: list(ids) for name, ids in samples.items()}
        longest = max(len(ids) for ids in self._samples.values())
        self._module: Any = build_on_meta(spec, reference_kernels(), longest)
        move_buffers(self._module, torch.device("cpu"))
        self._batch = pack_whole([len(ids) for ids in self._samples.values()])
        self._carries: dict[str, Any] = {}
        self._plain_TV: Tensor | None = None
        self._spread: dict[str, float] = {}
        self._shared: dict[str, Tensor] = {}
        tied = dict(spec.family.table.tied)
        self._by_token = {rule.name for rule in spec.tensors if rule.axis == "vocabulary"}
        self._by_token |= {name for name, twin in tied.items() if twin in self._by_token}
        self._kept = {rule.name for rule in spec.tensors if rule.dtype == "F32"}

    @torch.inference_mode()
    def on_unit(self, unit: str, tensors: Mapping[str, Tensor]) -> None:
        """Advances the sample through one unit; `tensors` are its parameters by our names.

        The sample is text, so units of an encoder (vision, projector) pass by.
        """
        if unit == "embed":
            self._shared = {n: t.clone() for n, t in tensors.items()} if self._tied else {}
            tokens_T = torch.tensor([t for ids in self._samples.values() for t in ids])
            used, tokens_T = torch.unique(tokens_T, return_inverse=True)
            rows = {n: t[used] if n in self._by_token else t for n, t in tensors.items()}
            for dtype in self._dtypes:
                self._install(rows, dtype)
                self._carries[dtype] = self._module.start(tokens_T, self._batch)
        elif unit.startswith("layer-"):
            layer = self._module.layers[int(unit.removeprefix("layer-"))]
            for dtype in self._dtypes:
                self._install(tensors, dtype)
                self._carries[dtype] = layer(self._carries[dtype], self._batch)
        elif unit == "head":
            for dtype in self._dtypes:
                self._compare(self._head({**tensors, **self._tied_tensors()}, dtype), dtype)
        else:
            return
        self._forget(tensors)

    def _head(self, tensors: Mapping[str, Tensor], dtype: str) -> Tensor:
        """Returns logits [T, V], some tokens of the vocabulary at a time: in float64 the whole
        matrix would take four times its bytes."""
        pieces = []
        for first in range(0, self._spec.vocab_size, _TOKENS_AT_ONCE):
            rows = slice(first, first + _TOKENS_AT_ONCE)
            taken = {n: t[rows] if n in self._by_token else t for n, t in tensors.items()}
            self._install(taken, dtype)
            pieces.append(self._module.head(self._carries[dtype]).double())
        return torch.cat(pieces, -1)

    def _compare(self, logits_TV: Tensor, dtype: str) -> None:
        """Keeps the log-probabilities of float32, which come first; of another type only how far
        they stray from those."""
        logprobs_TV = torch.log_softmax(logits_TV, -1)
        if self._plain_TV is None:
            self._plain_TV = logprobs_TV
        else:
            self._spread[dtype] = float(logprobs_TV.sub_(self._plain_TV).abs_().max())

    def answers(self) -> KnownAnswers:
        """Returns the cases and spreads; every unit must have passed."""
        plain_TV, spread = self._plain_TV, self._spread
        assert plain_TV is not None, "the head unit has not passed yet"
        named = {"float32": spread["float64"], "bfloat16": spread["bfloat16"]}
        cases, start = [], 0
        for name, ids in self._samples.items():
            cases.append(_case(name, ids, plain_TV[start : start + len(ids)]))
            start += len(ids)
        return KnownAnswers(VERSION, "float32 reference kernels", named, cases)

    def finish(self, store: Path) -> None:
        """Writes the answers into a store's `answers` folder."""
        folder = store / ANSWERS_FOLDER
        folder.mkdir(exist_ok=True)
        data = msgspec.json.format(msgspec.json.encode(self.answers()), indent=1)
        (folder / FILE_NAME).write_bytes(data)

    @property
    def _dtypes(self) -> tuple[str, ...]:
        return ("float32", *SPREAD_DTYPES)

    @property
    def _tied(self) -> bool:
        return "tied" in self._spec.facts.flags

    def _tied_tensors(self) -> dict[str, Tensor]:
        if not self._tied:
            return {}
        return {name: self._shared[shared] for name, shared in self._spec.family.table.tied}

    def _install(self, tensors: Mapping[str, Tensor], dtype: str) -> None:
        for name, tensor in tensors.items():
            owner, leaf = _owner(self._module, name)
            value = tensor
            if tensor.is_floating_point():
                # As when serving: what a rule keeps in fp32 is not rounded with the rest.
                kept = name in self._kept and dtype == "bfloat16"
                value = tensor.to(torch.float32 if kept else getattr(torch, dtype))
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def _forget(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            owner, leaf = _owner(self._module, name)
            empty = torch.empty(tensor.shape, device="meta")
            owner._parameters[leaf] = nn.Parameter(empty, requires_grad=False)


def _case(name: str, ids: list[int], logprobs_TV: Tensor) -> KnownCase:
    best_T2, ids_T2 = logprobs_TV[:-1].topk(2, -1)
    following = torch.tensor(ids[1:]).unsqueeze(1)
    return KnownCase(
        name=name,
        token_ids=ids,
        top1=ids_T2[:, 0].tolist(),
        margins=(best_T2[:, 0] - best_T2[:, 1]).tolist(),
        logprobs=logprobs_TV[:-1].gather(1, following).squeeze(1).tolist(),
    )


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
