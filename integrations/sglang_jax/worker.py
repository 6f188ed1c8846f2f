"""A Domino drafter in sglang-jax: the engine's DFlash worker, with the head's roll-out after the backbone.

Backbone, caches, verification, allocation and scheduling stay the engine's own. `DominoWorker` replaces the one program
that drafts.

Letters: B rows of a batch, R verified rows of a round (the anchor and its drafts), G slots, D width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from integrations.sglang_jax import engine
from integrations.sglang_jax.drafter import local_folder, read_config, read_head
from integrations.sglang_jax.head import Head, roll_out

dflash_worker = engine.look_up("dflash_worker")
verify_input = engine.look_up("dflash_info.DFlashVerifyInput")
make_metadata = engine.look_up("draft_extend_fused._make_target_verify_metadata")
gather_relay = engine.look_up("relay_buffer.gather_dflash_relay_buffers")


def install() -> None:
    """In this process `--speculative-algorithm DFLASH` drafts with the Domino head from now on."""
    dflash_worker.DFlashWorker = DominoWorker


class DominoWorker(dflash_worker.DFlashWorker):
    """`block_size` is the engine's name of R; the drafter's own G is in `head_config`."""

    def __init__(self, server_args: Any, target_worker: Any):
        model = target_worker.model_runner.model
        if getattr(model.config, "tie_word_embeddings", False):  # the engine looks for an lm_head that it lacks
            table = model.model.embed_tokens.embedding.value
            model.get_embed_and_head = lambda: (table, table)
        super().__init__(server_args, target_worker)

    def _init_jit_draft_block(self) -> None:
        """Loads the head and compiles `_draft`: W2 split over the vocabulary as the lm_head is, the rest whole."""
        options, runner = self.server_args, self.draft_model_runner
        folder = local_folder(options.speculative_draft_model_path, options.speculative_draft_model_revision)
        self.head_config = read_config(folder)
        self.head_config.check_rows(self.block_size)
        head = read_head(folder, runner.model.dtype, self._target_embed.shape[1], self._target_vocab_size)
        whole = NamedSharding(runner.mesh, P())
        places = jax.tree.map(lambda _: whole, head)._replace(up=NamedSharding(runner.mesh, P(None, "tensor")))
        self.head = jax.device_put(jax.tree.map(np.asarray, head), places)
        static = ("use_relay_state", "dp_size")
        self._jit_draft_block = jax.jit(self._draft, static_argnames=static, donate_argnames="memory_pools")

    def _run_jit_draft_block(self, plan: Any) -> tuple[jax.Array, ...]:
        """The engine's hook: `_draft` without the cache updates, which go into the pools."""
        runner, batch = self.draft_model_runner, plan.forward_batch
        batch.cache_loc = None
        with self._dispatch_context(runner):
            updates, *results = self._jit_draft_block(
                runner.model_state_leaves,
                batch,
                runner.memory_pools,
                (self._target_embed, self._target_lm_head),
                self.head,
                self.spec_relay_buffers if plan.use_relay_state else None,
                (plan.relay_future_indices, plan.relay_valid_mask, plan.allocated_lens, plan.reservation_base_lens),
                use_relay_state=plan.use_relay_state,
                dp_size=plan.dp_size,
            )
            self._replace_memory_pools(runner, updates)
        return tuple(results)

    def _can_use_fused_spec_prefill(self, model_worker_batch: Any) -> bool:
        """Requests that are not greedy are refused, but pass through a prefill first.

        The engine sends their batch to its other prefill, after which overlapping rounds end the server.
        """
        return not self.server_args.disable_overlap_schedule

    # ---------------------------------------------------------------------------------------------------- compiled

    def _draft(self, leaves, batch, memory_pools, tables, head, relay, places, *, use_relay_state: bool, dp_size: int):
        """One round: (cache updates, tokens [B·R] with the anchors, lengths [B], positions [B·R], cache slots [B·R]).

        Args:
            leaves: of the backbone's state.  tables: the target's embeddings and lm_head [V, D].
            relay: the last round's results, which the host has not read when rounds overlap.
            places: indices into `relay`, which rows are live, lengths allocated and reserved, each [B].
        """
        indices, valid, allocated, reserved = places
        rows, lengths, anchors = self.block_size, batch.seq_lens, batch.input_ids.reshape(-1, self.block_size)[:, 0]
        if use_relay_state:
            anchors, after = gather_relay(relay, indices, dp_size=dp_size)
            lengths = jnp.where(valid, after - 1, 0)
        anchors = self._reshard(anchors, "data")
        positions = self._flat(lengths[:, None] + jnp.arange(rows, dtype=jnp.int32))
        cache_slots = self._slots(batch.out_cache_loc, jnp.where(valid, lengths - reserved, 0), valid)

        # The drafter has G slots, one more or one fewer than the verified rows; the cache has room for the rows.
        used = min(self.head_config.block_size, rows)
        batch.input_ids = self._block(anchors, used)
        batch.positions = self._flat(lengths[:, None] + jnp.arange(used, dtype=jnp.int32))
        batch.out_cache_loc = self._flat(cache_slots.reshape(-1, rows)[:, :used])
        batch.seq_lens = lengths
        batch.spec_info = verify_input(draft_token=batch.input_ids, draft_token_num=used)
        backend = batch.attn_backend
        backend.forward_metadata = make_metadata(
            backend.forward_metadata,
            lengths,
            allocated,
            speculative_num_draft_tokens=used,
            page_size=backend.page_size,
            dp_size=dp_size,
        )
        batch.input_embedding = tables[0].at[batch.input_ids].get(out_sharding=self._place("data", "tensor"))
        runner = self.draft_model_runner
        model = nnx.merge(runner._model_def, jax.tree.unflatten(runner._model_state_def, leaves))
        output, updates, _, _ = model(batch, memory_pools, None)
        drafts = self._correct(head, tables, output.hidden_states, anchors, used)
        tokens = jnp.concatenate([anchors[:, None], drafts], axis=1)
        return updates, self._flat(tokens), lengths, positions, cache_slots

    def _correct(self, head: Head, tables: Any, hidden: jax.Array, anchors: jax.Array, used: int) -> jax.Array:
        """The backbone's hidden states [B·used, D] → drafts int32 [B, R-1], by base logits and head."""
        config, (embeddings, unembed) = self.head_config, tables
        by_row, by_block = self._place("data", None), self._place("data", None, None)
        z = jax.sharding.reshard(hidden, by_row).reshape(-1, used, hidden.shape[-1], out_sharding=by_block)
        z = z[:, config.first_slot :][:, : self.block_size - 1]
        flat = z.reshape(-1, z.shape[-1], out_sharding=by_row)
        base = jnp.dot(flat, unembed.T, out_sharding=self._place("data", "tensor"))[:, : self._target_vocab_size]
        base = base.reshape(*z.shape[:2], base.shape[-1], out_sharding=self._place("data", None, "tensor"))

        def embed(tokens):
            return embeddings.at[tokens].get(out_sharding=by_row)

        return roll_out(head, embed, base, z, anchors, config.pure_draft_prefix_len)

    def _block(self, anchors: jax.Array, slots: int) -> jax.Array:
        """Anchors [B] → [anchor, mask, …] of each row, int32 [B·slots]."""
        masks = jnp.full((anchors.shape[0], slots - 1), self._mask_token_id, jnp.int32)
        return self._flat(jnp.concatenate([anchors[:, None], self._reshard(masks, "data", None)], axis=1))

    def _slots(self, reserved: jax.Array, starts: jax.Array, valid: jax.Array) -> jax.Array:
        """The R cache slots [B·R] from `starts` [B] on, of each row's reserved ones; -1 where a row is not live."""
        table, rows = reserved.reshape(valid.shape[0], -1), self.block_size
        columns = jnp.clip(starts, 0, table.shape[1] - rows)[:, None] + jnp.arange(rows, dtype=jnp.int32)
        lines = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
        chosen = table.at[lines, columns].get(out_sharding=self._place("data", None))
        return self._flat(jnp.where(valid[:, None], chosen, -1))

    def _flat(self, x: jax.Array) -> jax.Array:
        """[B, n] → [B·n], split over the data axis."""
        return self._reshard(self._reshard(x, "data", None).reshape(-1), "data")

    def _reshard(self, x: jax.Array, *axes: str | None) -> jax.Array:
        return jax.sharding.reshard(x, self._place(*axes))

    def _place(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, P(*axes))
