"""The axis letters that every docstring and einsum of the package uses, and the score of a masked key.

Letters
    B batch rows                    T query positions               S key positions or cache slots
    N query heads                   K key/value heads               R query heads per key/value head (N = K·R)
    H width of one head             D model width (hidden_size)     F feed-forward width
    V vocabulary rows               L decoder layers                C tapped layers (context features are C·D wide)
    A anchors (draft blocks) per training row                       G slots of one draft block (block_size)
    U width of the GRU state        E rank of the logit residual    M drafted tokens per round

The aliases name what an array holds; the letters are in the docstrings.
"""

import jax

Tokens = jax.Array  # int32 [B, T]
Positions = jax.Array  # int32 [B, T], absolute
Lengths = jax.Array  # int32 [B], committed rows of a cache
Mask = jax.Array  # bool, True where a query may read a key
Hidden = jax.Array  # [B, T, D]
Features = jax.Array  # [B, T, C·D], outputs of the tapped target layers, joined in list order
Logits = jax.Array  # float32 [..., V]

# The score of a key that a query may not read. Finite, so that a row whose keys are all masked gives no NaN (-inf minus
# -inf).
MASKED = -1e30
