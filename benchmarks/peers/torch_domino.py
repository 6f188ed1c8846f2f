"""The baseline of transformers.py: a straightforward Domino loop over transformers and torch modules.

The drafter is a torch module over a folder in the public layout. The loop is that of docs/method.md with one host read
per round. The target is a transformers model with its growing cache, which is cut back after each verify. Greedy, batch
1.
"""

import json
import pathlib

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half


class DraftAttention(nn.Module):
    """Queries from the block, keys and values from context and block; every slot reads all of them."""

    def __init__(self, config: Qwen3Config, index: int):
        super().__init__()
        self.index, self.width = index, config.head_dim
        queries, keys = config.num_attention_heads * self.width, config.num_key_value_heads * self.width
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.width, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.width, config.rms_norm_eps)

    def forward(self, x, context, angles, cache):
        """x [1, G, D], context [1, C, D], angles of the C + G positions → [1, G, D]; the cache gets both."""
        joined = torch.cat([context, x], dim=1)
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)
        k = self.k_norm(self._heads(self.k_proj(joined))).transpose(1, 2)
        v = self._heads(self.v_proj(joined)).transpose(1, 2)
        cos, sin = (part[:, None] for part in angles)
        slots = x.shape[1]
        q = q * cos[:, :, -slots:] + rotate_half(q) * sin[:, :, -slots:]
        k, v = cache.update(k * cos + rotate_half(k) * sin, v, self.index)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x):
        return x.unflatten(-1, (-1, self.width))


class DraftLayer(nn.Module):
    def __init__(self, config: Qwen3Config, index: int):
        super().__init__()
        self.self_attn = DraftAttention(config, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, context, angles, cache):
        x = x + self.self_attn(self.input_layernorm(x), context, angles, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class TorchDrafter(nn.Module):
    """A Domino drafter in float32 with the parameter names of the public layout, so that a folder loads strictly."""

    def __init__(self, folder: str | pathlib.Path):
        super().__init__()
        folder = pathlib.Path(folder)
        raw = json.loads((folder / "config.json").read_text())
        choices = {**raw, **raw["dflash_config"]}
        masked = "sliding_attention" in choices.get("layer_types", ()) or choices.get("is_causal")
        if choices.get("projector_type") != "domino" or masked:
            raise SystemExit(f"{folder}: this yardstick knows Domino drafters with full attention only.")
        config = Qwen3Config.from_pretrained(folder)
        width, state, rank = config.hidden_size, choices["gru_hidden_dim"], choices["emb_dim"]
        self.taps = choices["target_layer_ids"]
        self.block_size, self.mask_token = choices["block_size"], choices["mask_token_id"]
        self.first_slot = 0 if choices["shift_label"] else 1
        self.prefix = choices["pure_draft_prefix_len"]
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.prefix_gru = nn.GRU(width, state, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, config.vocab_size, bias=False)
        )
        self.rotary = Qwen3RotaryEmbedding(config)  # its buffer is not stored
        self.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
        self.float().eval()

    def block_hidden(self, target, anchor, features, start: int, cache):
        """z [1, M, D] of the predicting slots; features [1, C, taps·D] of the positions start-C..start-1."""
        block = torch.full((1, self.block_size), self.mask_token)
        block[0, 0] = anchor
        x = target.get_input_embeddings()(block)
        context = self.hidden_norm(self.fc(features))
        positions = torch.arange(start - features.shape[1], start + self.block_size)[None]
        angles = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, context, angles, cache)
        cache.crop(-self.block_size)
        return self.norm(x)[:, self.first_slot :]

    def draft(self, target, anchor, features, start: int, cache):
        """Drafts int64 [1, M], one after the other through the head."""
        z = self.block_hidden(target, anchor, features, start, cache)
        base, embed = target.lm_head(z), target.get_input_embeddings()
        state = z.new_zeros(1, self.prefix_gru.hidden_size)
        token, drafts = anchor.view(1), []
        for slot in range(z.shape[1]):
            state = torch.gru_cell(embed(token), state, self.prefix_gru.weight_ih_l0, self.prefix_gru.weight_hh_l0)
            logits = base[:, slot]
            if slot >= self.prefix:
                logits = logits + self.embed_proj(torch.cat([z[:, slot], state], dim=-1))
            token = logits.argmax(-1)
            drafts.append(token)
        return torch.stack(drafts, dim=1)


@torch.inference_mode()
def plain_generate(
    target, prompt: list[int], max_new_tokens: int, stop_ids: tuple[int, ...], lookup: int | None = None
) -> list[int]:
    """transformers' own greedy generate with its cache: the new tokens, a stop id included.

    lookup: drafts of its prompt-lookup decoding, which copies them from the text so far. None: without it.
    """
    ids = torch.tensor([prompt])
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0]
    )
    settings.prompt_lookup_num_tokens = lookup
    out = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def domino_generate(
    target, drafter: TorchDrafter, prompt: list[int], max_new_tokens: int, stop_ids: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """(new tokens, tokens emitted per round): draft, verify, accept, cut both caches back."""
    cache, draft_cache = DynamicCache(config=target.config), DynamicCache()
    out = run(target, torch.tensor([prompt]), cache, last_only=True)
    features, anchor = tapped(out, drafter.taps), out.logits[0, -1].argmax(-1)
    tokens, accepts, start = [anchor.item()], [], len(prompt)
    while tokens[-1] not in stop_ids and len(tokens) < max_new_tokens:
        drafts = drafter.draft(target, anchor, features, start, draft_cache)
        block = torch.cat([anchor.view(1, 1), drafts], dim=1)
        out = run(target, block, cache)
        chosen = out.logits[0].argmax(-1)
        accepted = int((drafts[0] == chosen[:-1]).int().cumprod(0).sum())
        fresh = chosen[: accepted + 1].tolist()[: max_new_tokens - len(tokens)]
        stop = next((place for place, token in enumerate(fresh) if token in stop_ids), len(fresh))
        fresh = fresh[: stop + 1]
        tokens += fresh
        accepts.append(len(fresh))
        cache.crop(-(drafts.shape[1] - accepted))
        anchor, start = chosen[accepted], start + accepted + 1
        features = tapped(out, drafter.taps)[:, : accepted + 1]
    return tokens, accepts


def run(target, ids, cache, last_only: bool = False):
    return target(
        ids, past_key_values=cache, use_cache=True, output_hidden_states=True, logits_to_keep=1 if last_only else 0
    )


def tapped(out, taps: list[int]):
    """Outputs of the tapped layers side by side; entry 0 of the tuple is the embedding."""
    return torch.cat([out.hidden_states[index + 1] for index in taps], dim=-1)
