"""DFlash2's convolutions: the borders of blocks, and the identity at the start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.method.drafter import init_drafter_params
from tests.helpers.models import random_tokens, run_blocks, tiny_drafter, tiny_target

CONVOLVED = {"head": "none", "shift_label": False, "conv_kernel_size": 2, "conv_group_size": 8}
ANCHORS = jnp.array([[5, 9], [5, 9]])


@functools.lru_cache
def models(**changes):
    """Blocks of 4 slots, 32 wide: 4 groups of 8 channels."""
    target = tiny_target(tied=False)  # a tied one would predict the mask token in every masked slot
    return target, tiny_drafter(target.config, **{**CONVOLVED, **changes})


def test_a_new_drafter_with_convolutions_is_one_without():
    """The same weights beside them, and the convolutions as they are initialised."""
    (target, plain), (_, convolved) = models(conv_kernel_size=0, conv_group_size=0), models()
    fresh = init_drafter_params(convolved.module, jax.random.key(0))["backbone"]
    layers = {
        name: {**layer, **{part: fresh[name][part] for part in ("attention_conv", "mlp_conv")}}
        for name, layer in plain.params["backbone"].items()
        if name.startswith("layers_")
    }
    params = {"backbone": {**plain.params["backbone"], **layers}}
    tokens = random_tokens((2, 16))
    ours = run_blocks(target, convolved, tokens, ANCHORS, params=params)["z"]
    np.testing.assert_array_equal(ours, run_blocks(target, plain, tokens, ANCHORS)["z"])
    assert (run_blocks(target, convolved, tokens, ANCHORS)["z"] != ours).any()


def test_blocks_do_not_mix():
    """A row's second block moves: its neighbours keep their values to the last bit."""
    target, drafter = models()
    tokens = random_tokens((2, 16))
    before, moved = (run_blocks(target, drafter, tokens, anchors)["z"] for anchors in (ANCHORS, [[5, 12], [2, 9]]))
    assert (before[0, 0] == moved[0, 0]).all() and (before[1, 1] == moved[1, 1]).all()
    assert (before[0, 1] != moved[0, 1]).any() and (before[1, 0] != moved[1, 0]).any()


def test_a_slot_reaches_later_ones_through_the_convolutions_and_never_another_block():
    """Attention is turned off by zero values: only convolutions move what slot 0 of a block holds."""
    _, drafter = models()
    backbone = drafter.params["backbone"]
    layers = {name: dict(layer) for name, layer in backbone.items() if name.startswith("layers_")}
    for layer in layers.values():
        layer["self_attn"] = {
            **layer["self_attn"],
            "v_proj": jax.tree.map(jnp.zeros_like, layer["self_attn"]["v_proj"]),
        }
    params = {"backbone": {**backbone, **layers}}
    c, features = drafter.config, jnp.ones((1, 16, 64))
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, 2, c.block_size, c.hidden_size)), jnp.float32)

    @jax.jit
    def hidden(x):
        keep = jnp.ones((1, 2), bool)
        return drafter.module.apply({"params": params}, features, x, ANCHORS[:1], keep, method="block_hidden")

    changed = np.asarray(hidden(x) != hidden(x.at[0, 0, 0].add(1.0))).any(-1)[0]
    # Two layers of two taps around the MLP: slot 0 reaches the two slots of each convolution after it.
    assert changed[0].all() and not changed[1].any()
    last = np.asarray(hidden(x) != hidden(x.at[0, 0, 3].add(1.0))).any(-1)[0]
    assert last[0].tolist() == [False, False, False, True] and not last[1].any()
