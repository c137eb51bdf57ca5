"""Kimi K3's vision tower and projector as plain modules: architecture only.

Shape letters: I images, N patches of all images, C channels, P patch side, D tower width, A heads,
H head width, R rotated pairs of a head, F frames, Y rows, X columns, M merged features, W merged
width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from firstlight.kernels.registry import KernelSet
from firstlight.layers.norm import RMSNorm
from firstlight.models.kimi_k3.vision_config import VisionConfig

Grid = tuple[int, int, int]


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel: one linear map of each patch."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = (config.hidden_size, config.channels, config.patch, config.patch)
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, pixels_NCPP: Tensor) -> Tensor:
        """Returns [N, D]."""
        pixels_NX = pixels_NCPP.flatten(1).to(self.weight.dtype)
        return functional.linear(pixels_NX, self.weight.flatten(1))


class VisionBlock(nn.Module):
    """Pre-norm attention among the patches of each image, and a feed-forward."""

    def __init__(self, config: VisionConfig, kernels: KernelSet) -> None:
        super().__init__()
        width, hidden = config.attention_width, config.hidden_size
        self.norm0 = RMSNorm(hidden, config.epsilon, kernels)
        self.wqkv = nn.Linear(hidden, 3 * width, bias=False)
        self.wo = nn.Linear(width, hidden, bias=False)
        self.norm1 = RMSNorm(hidden, config.epsilon, kernels)
        self.fc0 = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.fc1 = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.head_dim = config.head_dim

    def forward(self, x_ND: Tensor, turn_NR2: Tensor, images: int) -> Tensor:
        """Returns [N, D] for the patches of `images` images of one size; `turn_NR2` holds the
        cosine and the sine by which each channel pair turns.
        """
        x_ND = x_ND + self.wo(self._attend(self.norm0(x_ND), turn_NR2, images))
        inner_NF = functional.gelu(self.fc0(self.norm1(x_ND)), approximate="tanh")
        out: Tensor = x_ND + self.fc1(inner_NF)
        return out

    def _attend(self, x_ND: Tensor, turn_NR2: Tensor, images: int) -> Tensor:
        q_NAH, k_NAH, v_NAH = self.wqkv(x_ND).view(len(x_ND), 3, -1, self.head_dim).unbind(1)
        q_NAH, k_NAH = rotate_pairs(q_NAH, turn_NR2), rotate_pairs(k_NAH, turn_NR2)
        q_IANH, k_IANH, v_IANH = (
            x_NAH.unflatten(0, (images, -1)).transpose(1, 2) for x_NAH in (q_NAH, k_NAH, v_NAH)
        )
        out_IANH = functional.scaled_dot_product_attention(q_IANH, k_IANH, v_IANH)
        return out_IANH.transpose(1, 2).flatten(0, 1).flatten(1)


class VisionTower(nn.Module):
    """Patches to merged features, image by image: no patch sees another image's."""

    def __init__(self, config: VisionConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(config)
        table = (config.table_height, config.table_width, config.hidden_size)
        self.positions = nn.Parameter(torch.zeros(table))
        self.blocks = nn.ModuleList(VisionBlock(config, kernels) for _ in range(config.blocks))
        self.final_norm = RMSNorm(config.hidden_size, config.epsilon, kernels)
        self.config = config

    def forward(self, pixels_NCPP: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Returns for each image its merged features [M, W], M = rows * columns / merge."""
        sizes = [frames * rows * columns for frames, rows, columns in grids]
        parts = torch.split(pixels_NCPP, sizes)
        return [self.alike(part, grid, 1)[0] for part, grid in zip(parts, grids, strict=True)]

    def alike(self, pixels_NCPP: Tensor, grid: Grid, images: int) -> list[Tensor]:
        """Returns what `forward` does, for images of one grid that go through together: each small
        one alone costs more than its arithmetic.
        """
        x_ND = self.patch_embed(pixels_NCPP)
        x_ND = (x_ND.unflatten(0, (images, -1)) + self._places(grid)).flatten(0, 1)
        turn_NR2 = patch_rotation(grid, self.config).repeat(images, 1, 1).to(x_ND.device)
        for block in self.blocks:
            x_ND = block(x_ND, turn_NR2, images)
        parts = self.final_norm(x_ND).chunk(images)
        return [_merged(part, grid, self.config.merge) for part in parts]

    def _places(self, grid: Grid) -> Tensor:
        """The learned table resampled to the grid, and a fixed code of each frame if several."""
        frames, rows, columns = grid
        table_YXD: Tensor = self.positions
        if table_YXD.shape[:2] != (rows, columns):
            resampled = functional.interpolate(
                table_YXD.permute(2, 0, 1)[None].float(), (rows, columns), mode="bilinear"
            )
            table_YXD = resampled[0].permute(1, 2, 0).to(table_YXD.dtype)
        flat_ND = table_YXD.flatten(0, 1)
        if frames == 1:
            return flat_ND
        code_F1D = frame_code(frames, self.config).to(flat_ND).unsqueeze(1)
        return (flat_ND + code_F1D).flatten(0, 1)


class ImageProjector(nn.Module):
    """Merged features to the text model's width: linear, exact GELU, linear, norm."""

    def __init__(self, config: VisionConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.merged_size, config.merged_size, bias=False)
        self.fc1 = nn.Linear(config.merged_size, config.projector_size, bias=False)
        self.norm = RMSNorm(config.projector_size, config.projector_epsilon, kernels)

    def forward(self, merged_MW: Tensor) -> Tensor:
        """Returns [M, text width]."""
        out: Tensor = self.norm(self.fc1(functional.gelu(self.fc0(merged_MW))))
        return out


def patch_rotation(grid: Grid, config: VisionConfig) -> Tensor:
    """Returns fp32 cosines and sines [N, R, 2]: pair 2i turns by column * theta_i, pair 2i + 1 by
    row * theta_i, theta_i = base^(-4i / head width); the same for every frame.
    """
    frames, rows, columns = grid
    steps_I = torch.arange(0, config.head_dim, 4, dtype=torch.float32, device="cpu")
    theta_I = 1.0 / config.rope_base ** (steps_I / config.head_dim)
    row_N = torch.arange(rows, device="cpu").repeat_interleave(columns)
    column_N = torch.arange(columns, device="cpu").repeat(rows)
    angles_NI2 = torch.stack((torch.outer(column_N, theta_I), torch.outer(row_N, theta_I)), -1)
    angles_NR = angles_NI2.flatten(1).repeat(frames, 1)
    return torch.stack((angles_NR.cos(), angles_NR.sin()), -1)


def frame_code(frames: int, config: VisionConfig) -> Tensor:
    """Returns fp32 [F, D]: sines, then cosines of frame * 10000^(-i / (D / 2)).

    Raises ValueError for more frames than the model was made for.
    """
    if frames > config.table_time:
        raise ValueError(f"{frames} frames, the model knows {config.table_time}")
    half = config.hidden_size // 2
    steps_I = torch.arange(half, dtype=torch.float32, device="cpu")
    omega_I = 10_000.0 ** (-steps_I / half)
    angles_FI = torch.outer(torch.arange(frames, dtype=torch.float32, device="cpu"), omega_I)
    return torch.cat((angles_FI.sin(), angles_FI.cos()), -1)


def rotate_pairs(x_NAH: Tensor, turn_NR2: Tensor) -> Tensor:
    """Turns each pair of neighbouring channels of x [N, A, H] by its angle, in fp32.

    It is the product of complex numbers, written out: not every device computes with these.
    """
    real_NAR, imaginary_NAR = x_NAH.float().reshape(*x_NAH.shape[:-1], -1, 2).unbind(-1)
    cos_N1R, sin_N1R = turn_NR2.unsqueeze(1).unbind(-1)
    turned = torch.stack(
        (
            real_NAR * cos_N1R - imaginary_NAR * sin_N1R,
            real_NAR * sin_N1R + imaginary_NAR * cos_N1R,
        ),
        -1,
    )
    return turned.flatten(-2).to(x_NAH.dtype)


def _merged(x_ND: Tensor, grid: Grid, merge: tuple[int, int]) -> Tensor:
    """Mean over frames; then blocks of patches side by side: row, column, channel."""
    frames, rows, columns = grid
    high, wide = merge
    x = x_ND.view(frames, rows // high, high, columns // wide, wide, -1).mean(0)
    return x.transpose(1, 2).flatten(2).flatten(0, 1)
