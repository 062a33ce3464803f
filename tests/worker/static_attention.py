"""A backend whose decodes can be replayed, made of plain torch: it runs without a GPU."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.attention.base import AttentionBackend, write_kv
from worker.attention.sdpa import SdpaBackend


class StaticBackend(AttentionBackend):
    """Reads nothing but the metadata's tensors for decodes, as a CUDA graph would on replay."""

    name = "static"
    replayable_decodes = True

    def __init__(self):
        self.plans = 0
        self._others = SdpaBackend()

    def plan(self, step, dtype):
        self.plans += 1
        replayable = step.decodes == len(step.query_lens)
        return step if replayable else self._others.plan(step, dtype)

    def attend(self, rows, pool, plan):
        if not hasattr(plan, "seq_lens"):
            return self._others.attend(rows, pool, plan)
        write_kv(rows, pool, plan.slot_mapping)
        query, (count, kv_heads, dim) = rows.query, rows.key.shape
        keys = pool.keys[plan.block_table].view(count, -1, kv_heads, dim).transpose(1, 2)
        values = pool.values[plan.block_table].view(count, -1, kv_heads, dim).transpose(1, 2)
        seen = torch.arange(keys.shape[2], device=query.device) < plan.seq_lens[:, None]
        out = scaled_dot_product_attention(
            query.view(count, kv_heads, -1, dim), keys, values, attn_mask=seen[:, None, None, :]
        )
        return out.reshape(query.shape)
