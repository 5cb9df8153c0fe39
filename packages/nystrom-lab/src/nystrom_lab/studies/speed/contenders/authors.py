r"""The authors' formula as published: the baseline against which `nystrom_attention` is timed.

With $Q, K$ each scaled by $d^{-1/4}$, n divisible by m, and $\tilde Q, \tilde K$ the means of m segments of n / m
tokens,
$$F = \mathrm{softmax}(Q \tilde K^\top), \quad A = \mathrm{softmax}(\tilde Q \tilde K^\top), \quad
B = \mathrm{softmax}(\tilde Q K^\top), \qquad \mathrm{out} = (F Z^*)(B V) + \mathrm{conv}(V),$$
where $Z^*$ is six iterations of eq. (14) from $Z_0 = A^\top / \max_j \sum_i A_{ij}$, the maximum taken over batch and
heads, and conv is a depthwise convolution along the tokens with one kernel per head, or is left out. All three matrices
are stored.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. (13)-(17) and Fig. 4; the scaling, Z0 and the order of the products
are those of the authors' code. Written independently in plain torch.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class AuthorsAttention(nn.Module):
    """The formula over head-split tensors: no masks, n divisible by m.

    Args:
        num_heads: Heads h.
        num_landmarks: Landmarks m.
        kernel_size: Odd size of the convolution of the values; None for none.
    """

    def __init__(self, num_heads: int, num_landmarks: int, kernel_size: int | None = None):
        super().__init__()
        self.num_landmarks = num_landmarks
        self.conv = None
        if kernel_size is not None:
            self.conv = nn.Conv2d(
                num_heads, num_heads, (kernel_size, 1), padding=(kernel_size // 2, 0), groups=num_heads, bias=False
            )

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h n d"], v: Float[Tensor, "b h n e"]
    ) -> Float[Tensor, "b h n e"]:
        """Attend; see the module's formula."""
        scale = q.shape[-1] ** 0.25
        q, k = q / scale, k / scale
        q_landmarks, k_landmarks = self._segment_means(q), self._segment_means(k)
        left = (q @ k_landmarks.mT).softmax(dim=-1)
        a = (q_landmarks @ k_landmarks.mT).softmax(dim=-1)
        right = (q_landmarks @ k.mT).softmax(dim=-1)
        out = (left @ _inverse(a)) @ (right @ v)
        return out if self.conv is None else out + self.conv(v)

    def _segment_means(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h m d"]:
        b, h, n, d = x.shape
        return x.reshape(b, h, self.num_landmarks, n // self.num_landmarks, d).mean(dim=-2)


def _inverse(a: Float[Tensor, "b h m m"]) -> Float[Tensor, "b h m m"]:
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = a.mT / a.sum(dim=-2).max()
    for _ in range(6):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z
