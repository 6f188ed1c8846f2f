"""DFlash2's convolutions are the identity at the start; what they read: test_block_causality.py."""

import jax
import numpy as np
import pytest

from domino_jax.method.drafter import init_drafter_params
from tests.helpers.models import random_tokens, run_blocks, tiny_drafter, tiny_target

ANCHORS = [[5, 9], [5, 9]]


@pytest.mark.long
def test_a_new_drafter_with_convolutions_is_one_without():
    """The same weights beside them, and the convolutions as they are initialised."""
    target = tiny_target(tied=False)  # a tied one would predict the mask token in every masked slot
    shape = {"head": "none", "shift_label": False}
    plain, convolved = (
        tiny_drafter(target.config, **shape, conv_kernel_size=taps, conv_group_size=4 * taps) for taps in (0, 2)
    )
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
