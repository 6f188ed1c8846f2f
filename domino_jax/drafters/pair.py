"""Target and drafter with their parameters, as one argument of the jitted functions."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from domino_jax.drafters.drafter import Drafter
from domino_jax.models.cache import Cache
from domino_jax.models.qwen3 import Qwen3


@flax.struct.dataclass
class Models:
    """The modules are static, the parameters are arrays. drafter and drafter_params are None for plain decoding."""

    target: Qwen3 = flax.struct.field(pytree_node=False)
    target_params: dict
    drafter: Drafter | None = flax.struct.field(pytree_node=False, default=None)
    drafter_params: dict | None = None

    def run_target(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.target.apply({"params": self.target_params}, *args, **kwargs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] → the target's embedding rows [..., D]."""
        return self.target.apply({"params": self.target_params}, tokens, method=Qwen3.embed)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] → the target's float32 logits [..., V]."""
        return self.target.apply({"params": self.target_params}, hidden, method=Qwen3.unembed)

    def extend_context(self, *args: Any) -> Cache:
        return self._drafter(Drafter.extend_context, *args)

    def draft_hidden(self, *args: Any) -> tuple[jax.Array, Cache]:
        return self._drafter(Drafter.draft_hidden, *args)

    def head_hidden_half(self, z: jax.Array) -> jax.Array:
        return self._drafter(Drafter.head_hidden_half, z)

    def head_rows(self, tokens: jax.Array) -> jax.Array:
        return self._drafter(Drafter.head_rows, tokens)

    def head_start(self, *batch: int) -> jax.Array:
        """The head's state float32 [*batch, U] before any token."""
        return self._drafter(Drafter.head_start, *batch)

    def residual(self, *args: Any) -> jax.Array:
        return self._drafter(Drafter.residual, *args)

    def residual_of(self, *args: Any) -> jax.Array:
        return self._drafter(Drafter.residual_of, *args)

    def head_step(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """The head's state float32 [..., U] after `tokens` int32 [...]."""
        return self._drafter(Drafter.head_step, state, self.embed(tokens))

    def _drafter(self, method: Callable, *args: Any) -> Any:
        return self.drafter.apply({"params": self.drafter_params}, *args, method=method)
