"""Kimi K3 and Kimi Linear as plain modules: architecture only, no rank, cache, device or file.

Shape letters: T tokens, B rows of the residual bank, D model width, N patches, C channels, P patch
side.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.kernels.activation import SILU, Activation
from firstlight.kernels.registry import KernelSet
from firstlight.layers.attention_residual import ResidualCarry, ResidualMix
from firstlight.layers.carry import Carry
from firstlight.layers.experts import ExpertShape
from firstlight.layers.gated_mlp import gated_mlp
from firstlight.layers.kda_attention import DeltaAttention, DeltaShape
from firstlight.layers.latent_moe import LatentMoE
from firstlight.layers.layer_state import LayerState
from firstlight.layers.mla_attention import LatentAttention, LatentShape
from firstlight.layers.norm import RMSNorm
from firstlight.layers.packed_batch import PackedBatch
from firstlight.models.kimi_k3.config import KimiConfig
from firstlight.models.kimi_k3.vision import ImageProjector, VisionTower

AnyCarry = Any  # Carry with plain residuals, ResidualCarry with a bank


class KimiLayer(nn.Module):
    """Attention and feed-forward, with plain residuals (Kimi Linear) or, where the config gives a
    block size, inputs that are mixes of earlier block sums (Kimi K3). The first layer of a block
    puts the running sum into the bank and begins a new one.
    """

    def __init__(self, config: KimiConfig, layer: int, kernels: KernelSet) -> None:
        super().__init__()
        hidden, block = config.hidden_size, config.residual_block
        self.attention_norm = RMSNorm(hidden, config.norm_epsilon, kernels)
        self.attention = _attention(config, layer, kernels)
        self.mlp_norm = RMSNorm(hidden, config.norm_epsilon, kernels)
        shape = expert_shape(config)
        # The published names differ, and so do the modules that sum over ranks.
        self.is_moe = config.is_moe[layer]
        if self.is_moe:
            self.moe = LatentMoE(shape, config.moe.shared_width, kernels)
        else:
            self.mlp = gated_mlp(hidden, config.intermediate_size, shape.activation, kernels)
        self.is_mixed = block is not None
        self.begins_block = block is not None and layer % block == 0
        if self.is_mixed:
            self.attention_mix = ResidualMix(hidden, config.norm_epsilon, kernels)
            self.mlp_mix = ResidualMix(hidden, config.norm_epsilon, kernels)

    def forward(
        self, carry: AnyCarry, batch: PackedBatch, state: LayerState | None = None
    ) -> AnyCarry:
        """Returns the carry after this layer, of the kind that came in."""
        if self.is_mixed:
            return self._mixed(carry, batch, state)
        x_TD = carry.x_TD + self.attention(self.attention_norm(carry.x_TD), batch, state)
        return Carry(x_TD + self._fed_forward(x_TD))

    def _mixed(
        self, carry: ResidualCarry, batch: PackedBatch, state: LayerState | None
    ) -> ResidualCarry:
        input_TD = self.attention_mix(carry)
        attended_TD = self.attention(self.attention_norm(input_TD), batch, state)
        if self.begins_block:
            # The snapshot is the running sum, not its mix; the sum begins anew.
            bank_TBD = torch.cat((carry.bank_TBD, carry.sum_TD.unsqueeze(1)), 1)
            carry = ResidualCarry(attended_TD, bank_TBD)
        else:
            carry = carry._replace(sum_TD=carry.sum_TD + attended_TD)
        moved_TD = self._fed_forward(self.mlp_mix(carry))
        return carry._replace(sum_TD=carry.sum_TD + moved_TD)

    def _fed_forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = (self.moe if self.is_moe else self.mlp)(self.mlp_norm(x_TD))
        return out


class KimiHead(nn.Module):
    """The last mix, the final norm and the projection to logits."""

    def __init__(self, config: KimiConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.is_mixed = config.residual_block is not None
        if self.is_mixed:
            self.mix = ResidualMix(config.hidden_size, config.norm_epsilon, kernels)
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon, kernels)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, carry: AnyCarry) -> Tensor:
        """Returns logits [T, vocabulary rows at hand]."""
        x_TD = self.mix(carry) if self.is_mixed else carry.x_TD
        logits: Tensor = self.lm_head(self.norm(x_TD))
        return logits


class KimiModel(nn.Module):
    """Embedding, layers and head, and for Kimi K3 the vision tower and its projector."""

    def __init__(self, config: KimiConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.is_mixed = config.residual_block is not None
        self.layers = nn.ModuleList(
            KimiLayer(config, layer, kernels) for layer in range(config.num_layers)
        )
        self.head = KimiHead(config, kernels)
        if config.vision is not None:
            self.vision = VisionTower(config.vision, kernels)
            self.projector = ImageProjector(config.vision, kernels)

    def start(self, tokens_T: Tensor, batch: PackedBatch) -> AnyCarry:
        """Returns the carry that enters the first layer; image features replace embeddings."""
        x_TD = self.embed(tokens_T)
        if batch.features is not None:
            rows_MD = batch.features.rows_MD.to(x_TD.dtype)
            x_TD = x_TD.index_copy(0, batch.features.index_M, rows_MD)
        if not self.is_mixed:
            return Carry(x_TD)
        return ResidualCarry(x_TD, x_TD.new_empty(x_TD.shape[0], 0, x_TD.shape[1]))

    def forward(
        self,
        tokens_T: Tensor,
        batch: PackedBatch,
        states: Sequence[LayerState | None] | None = None,
    ) -> AnyCarry:
        """Returns the carry after the last layer; `head` turns chosen tokens of it into logits."""
        carry = self.start(tokens_T, batch)
        for index, layer in enumerate(self.layers):
            carry = layer(carry, batch, states[index] if states else None)
        return carry

    def encode(self, pixels_NCPP: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Returns the features of each image, [tokens, D]; patches of all images back to back.

        `grids` are (frames, rows, columns) of patches; pixels are normalised to [-1, 1].
        """
        return [self.projector(merged) for merged in self.vision(pixels_NCPP, grids)]


def build(config: KimiConfig, kernels: KernelSet, num_positions: int) -> KimiModel:
    """Returns the model with parameters allocated on torch's default device, values undefined.

    `num_positions` plays no role: no layer knows positions.
    """
    return KimiModel(config, kernels)


def _attention(config: KimiConfig, layer: int, kernels: KernelSet) -> nn.Module:
    kda, mla = config.kda, config.mla
    if config.is_mla[layer]:
        return LatentAttention(
            LatentShape(
                hidden=config.hidden_size,
                heads=mla.heads,
                q_rank=mla.q_rank,
                latent=mla.kv_rank,
                own=mla.nope_dim,
                shared=mla.shared_dim,
                value=mla.value_dim,
                gated=mla.output_gate,
                latent_epsilon=mla.epsilon,
            ),
            kernels,
        )
    return DeltaAttention(
        DeltaShape(
            hidden=config.hidden_size,
            heads=kda.heads,
            head_dim=kda.head_dim,
            taps=kda.taps,
            lower_bound=kda.gate_lower_bound,
            full_rank_gate=kda.full_rank_gate,
            norm_epsilon=config.norm_epsilon,
            # The softplus form is published with one value a head in four dims.
            decay_shape=() if kda.gate_lower_bound is not None else (1, 1, kda.heads, 1),
        ),
        kernels,
    )


def expert_shape(config: KimiConfig) -> ExpertShape:
    """Returns the sizes of one layer's routed experts, all of them."""
    moe, situ = config.moe, config.situ
    return ExpertShape(
        hidden=config.hidden_size,
        experts=moe.experts,
        chosen=moe.top_k,
        width=moe.width,
        latent=moe.latent,
        latent_norm=moe.latent_norm,
        renormalise=moe.renormalise,
        scaling=moe.scaling,
        quantised=moe.quantised,
        activation=SILU if situ is None else Activation(situ.beta, situ.linear_beta),
        norm_epsilon=config.norm_epsilon,
    )
