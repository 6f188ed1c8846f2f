"""Target and drafter with their parameters, as one argument of the jitted functions."""

from typing import Any

import flax.struct
import jax

from domino_jax.drafter.model import Drafter
from domino_jax.target.qwen3 import Qwen3


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
        return self.target.apply({"params": self.target_params}, tokens, method="embed")

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] → the target's float32 logits [..., V]."""
        return self.target.apply({"params": self.target_params}, hidden, method="unembed")

    def run_drafter(self, method: str, *args: Any) -> Any:
        return self.drafter.apply({"params": self.drafter_params}, *args, method=method)
