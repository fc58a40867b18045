"""One decoder for Llama, Mistral, Qwen2 and Qwen3: what differs between them is in `ModelConfig`."""

import torch
from torch import Tensor, nn

from inference_service.model.attention import AttentionPlan, KVCache, attend, plan_attention
from inference_service.model.batch import ForwardBatch
from inference_service.model.layers import Embedding, GatedMLP, Head, Linear, RMSNorm, frozen
from inference_service.model.rope import Rotation, inverse_frequencies, rotate, rotation
from shared.base_model import ModelConfig


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary embeddings; q, k and v packed as one projection, in this order."""

    def __init__(self, config: ModelConfig, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        packed = q_size + 2 * config.num_kv_heads * config.head_dim
        self.qkv_proj: nn.Module = Linear(hidden, packed, config.qkv_bias, device=device, dtype=dtype)
        self.o_proj: nn.Module = Linear(q_size, hidden, config.o_bias, device=device, dtype=dtype)
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(self.head_dim, eps, device=device, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps, device=device, dtype=dtype) if config.qk_norm else None

    def forward(self, x: Tensor, by: Rotation, plan: AttentionPlan, kv_cache: KVCache, lora: object | None) -> Tensor:
        heads = self.qkv_proj(x, lora).view(x.shape[0], -1, self.head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        qk, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [self.num_heads, self.num_kv_heads], 1)
            qk = torch.cat((self.q_norm(q, lora), self.k_norm(k, lora)), 1)
        q, k = torch.split(rotate(qk, by), [self.num_heads, self.num_kv_heads], 1)
        y: Tensor = self.o_proj(attend(q, k, v, self.layer, plan, kv_cache), lora)
        return y


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, device=device, dtype=dtype)
        self.self_attn = SelfAttention(config, layer, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(hidden, config.intermediate_size, config.mlp_bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, by: Rotation, plan: AttentionPlan, kv_cache: KVCache, lora: object | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x, lora), by, plan, kv_cache, lora)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x, lora), lora)
        return y


class Decoder(nn.Module):
    """A decoder-only transformer over a paged KV cache. Call it within `torch.inference_mode()`.

    Parameters are uninitialised: see `model.loader`. Tied embeddings are one parameter, `embed.weight`.
    """

    frequencies: Tensor

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed = frozen(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, device=device, dtype=dtype) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        tied, shape = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
        self.lm_head = self.embed if tied else frozen(*shape, device=device, dtype=dtype)
        self.embedding: nn.Module = Embedding(self.embed)
        self.head: nn.Module = Head(self.lm_head)
        self.register_buffer("frequencies", inverse_frequencies(config).to(device), persistent=False)
        self.attention_factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Normed hidden states of `batch.logit_rows`, [rows, hidden]. Writes the tokens' K and V into `kv_cache`."""
        x = self.embedding(batch.token_ids, batch.lora)  # [tokens, hidden]
        plan = plan_attention(batch, self.config.sliding_windows, kv_cache.block_size, x.dtype)
        by = rotation(batch.positions, self.frequencies, self.attention_factor)
        for layer in self.layers:
            x = layer(x, by, plan, kv_cache, batch.lora)
        hidden: Tensor = self.norm(x.index_select(0, batch.logit_rows), batch.logit_lora)
        return hidden

    def logits(self, hidden: Tensor, lora: object | None = None) -> Tensor:
        """Scores of the next token, [rows, vocab] float32, from normed `hidden` [rows, hidden].

        `lora`: of these rows, as `ForwardBatch.logit_lora` has them. Adapters may add columns.
        """
        logits: Tensor = self.head(hidden, lora)
        return logits
