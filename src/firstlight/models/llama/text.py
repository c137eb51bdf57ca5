"""The Llama-like dense decoder as plain modules: architecture only, no rank, cache, device or
file.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from firstlight.kernels.registry import KernelSet
from firstlight.layers.carry import Carry
from firstlight.layers.gated_mlp import GatedMLP
from firstlight.layers.gqa_attention import AttentionShape, GroupedQueryAttention
from firstlight.layers.layer_state import KeysValues
from firstlight.layers.norm import RMSNorm
from firstlight.layers.packed_batch import PackedBatch
from firstlight.layers.rotary import RotaryTable
from firstlight.models.llama.config import LlamaConfig


class LlamaLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self, config: LlamaConfig, layer: int, kernels: KernelSet, rotary: RotaryTable
    ) -> None:
        super().__init__()
        shape = AttentionShape(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            norm_epsilon=config.norm_epsilon if config.qk_norm else None,
            window=config.windows[layer],
        )
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon, kernels)
        self.attention = GroupedQueryAttention(
            shape, kernels, rotary if config.uses_rope[layer] else None
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon, kernels)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, kernels, bias=config.mlp_bias
        )

    def forward(self, carry: Carry, batch: PackedBatch, state: KeysValues | None = None) -> Carry:
        """Returns the carry after this layer."""
        attended_TD = self.attention(self.attention_norm(carry.x_TD), batch, state)
        normed_TD, x_TD = self.mlp_norm.add(attended_TD, carry.x_TD)
        return Carry(x_TD + self.mlp(normed_TD))


class LlamaHead(nn.Module):
    """Final norm and projection to logits over the vocabulary."""

    def __init__(self, config: LlamaConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon, kernels)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.kernels = kernels

    def forward(self, carry: Carry) -> Tensor:
        """Returns logits [T, vocabulary rows at hand]."""
        logits: Tensor = self.kernels.linear(self.norm(carry.x_TD), self.lm_head.weight, None)
        return logits


class LlamaModel(nn.Module):
    """Embedding, layers and head; each is called on its own by pipelines and by layer-wise
    tools.
    """

    def __init__(self, config: LlamaConfig, kernels: KernelSet, num_positions: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.rope, num_positions)
        self.layers = nn.ModuleList(
            LlamaLayer(config, layer, kernels, self.rotary) for layer in range(config.num_layers)
        )
        self.head = LlamaHead(config, kernels)
        if config.tied:
            self.head.lm_head.weight = self.embed.weight

    def start(self, tokens_T: Tensor, batch: PackedBatch) -> Carry:
        """Returns the carry that enters the first layer; `tokens_T` is int64."""
        return Carry(self.embed(tokens_T))

    def forward(
        self,
        tokens_T: Tensor,
        batch: PackedBatch,
        states: Sequence[KeysValues | None] | None = None,
    ) -> Carry:
        """Returns the carry after the last layer; `head` turns chosen tokens of it into logits."""
        carry = self.start(tokens_T, batch)
        for index, layer in enumerate(self.layers):
            carry = layer(carry, batch, states[index] if states else None)
        return carry


def build(config: LlamaConfig, kernels: KernelSet, num_positions: int) -> LlamaModel:
    """Returns the model with parameters allocated on torch's default device, values undefined."""
    return LlamaModel(config, kernels, num_positions)
