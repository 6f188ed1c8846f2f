"""The Domino head in plain torch: a GRU over the chosen tokens and a low-rank correction of the logits.

Letters: B rows, M drafts of a round, D width, U GRU state, E rank, V vocabulary, Q candidates of a slot.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class GRU(nn.Module):
    """torch's GRU without biases, with a float32 state between its steps."""

    def __init__(self, width: int, state: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state, width), requires_grad=False)
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state, state), requires_grad=False)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """state float32 [B, U] after the token with embedding x [B, D]."""
        dtype = self.weight_ih_l0.dtype
        x_reset, x_update, x_new = F.linear(x.to(dtype), self.weight_ih_l0).float().chunk(3, dim=-1)
        h_reset, h_update, h_new = F.linear(state.to(dtype), self.weight_hh_l0).float().chunk(3, dim=-1)
        reset, update = torch.sigmoid(x_reset + h_reset), torch.sigmoid(x_update + h_update)
        new = torch.tanh(x_new + reset * h_new)
        return (1.0 - update) * new + update * state


class Head(nn.Module):
    """Its parameters have the names of a drafter's tensors. prefix: drafts of the base logits alone.
    candidates: Q; 0: all tokens."""

    def __init__(self, width: int, state: int, rank: int, vocab: int, prefix: int, candidates: int):
        super().__init__()
        self.prefix, self.candidates = prefix, candidates if candidates < vocab else 0
        self.prefix_gru = GRU(width, state)
        down, up = nn.Linear(width + state, rank, bias=False), nn.Linear(rank, vocab, bias=False)
        self.embed_proj = nn.Sequential(down, nn.SiLU(), up).requires_grad_(False)

    def forward(
        self,
        base: torch.Tensor,
        z: torch.Tensor,
        anchors: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
        keep_logits: bool = False,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Greedy drafts int64 [B, M], each given the ones before it, and with keep_logits the M corrected logits,
        float32 [B, Q] or [B, V].

        Unrolled and without reads on the host, so that a CUDA graph can hold it.

        Args:
            base: logits [B, M, V], and z: [B, M, D], of the slots that predict.  anchors: token ids [B].
            embed: token ids [B] → the target's embeddings [B, D].
        """
        (down, activate, up), state_size = self.embed_proj, self.prefix_gru.weight_hh_l0.shape[1]
        halves = F.linear(z.to(down.weight.dtype), down.weight[:, : z.shape[-1]])
        down_h = down.weight[:, z.shape[-1] :]
        best, tokens = base.topk(self.candidates, dim=-1) if self.candidates else (base, None)
        state = torch.zeros(len(anchors), state_size, dtype=torch.float32, device=z.device)
        token, drafts, corrected = anchors, [], []
        for slot in range(z.shape[1]):
            state, logits = self.prefix_gru(state, embed(token)), best[:, slot].float()
            if slot >= self.prefix:
                code = activate(halves[:, slot] + F.linear(state.to(down_h.dtype), down_h))
                if tokens is None:
                    logits = logits + up(code).float()
                else:
                    rows = up.weight[tokens[:, slot]]
                    logits = logits + torch.bmm(rows, code[:, :, None])[:, :, 0].float()
            place = logits.argmax(dim=-1)
            token = place if tokens is None else tokens[:, slot].gather(1, place[:, None])[:, 0]
            drafts.append(token)
            corrected += [logits] * keep_logits
        return torch.stack(drafts, dim=1), corrected
