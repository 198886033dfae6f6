"""SwiGLU: y = W_down (silu(W_gate x) * (W_up x)). The dense layers' feed-forward and the shared expert."""

from torch import Tensor, nn
from torch.nn import functional as F

from moe.linear_maps import LinearMaps


class FeedForward(nn.Module):
    """A gated feed-forward of `hidden_dim` over the last dim of its input, without biases."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.maps = LinearMaps()
        self.w_gate = nn.Linear(dim, hidden_dim, bias=False)
        self.w_up = nn.Linear(dim, hidden_dim, bias=False)
        self.w_down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        gate, up = self.maps.expand(x, self.w_gate, self.w_up)
        return self.maps.contract(F.silu(gate) * up, self.w_down)
