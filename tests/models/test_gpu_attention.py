"""models/gpu_attention.py: the shapes that it is used for, its parts, and the GPUs that it needs."""

from types import SimpleNamespace

import jax
import pytest

from domino_jax.models.gpu_attention import applies, multiplies_bfloat16
from tests.helpers.attention import shapes


@pytest.mark.parametrize(
    ("shape", "used"),
    [
        ((8, 32, 8, 17, 4_096), True),
        ((1, 32, 8, 17, 32_768), True),
        ((1, 32, 8, 17, 4_096), False),  # scores that the cache of the GPU holds
        ((8, 32, 8, 17, 4_096, 64), True),
        ((8, 32, 8, 17, 4_096, 96), False),  # no power of two
        ((8, 32, 8, 17, 4_096 + 32), False),  # no whole steps
        ((8, 32, 8, 33, 4_096), False),  # 132 rows of one head
        ((1, 32, 8, 17, 40_000), True),  # 25 parts
        ((1, 32, 8, 17, 64 * 641), False),  # 641 is a prime: one part, eight programs
    ],
)
def test_shapes_that_it_does_not_pay_for_or_cannot_compute_stay_plain(shape, used):
    q, k, *_ = shapes(*shape)
    assert applies(q, k) is used


@pytest.mark.parametrize(
    ("capability", "supported"), [("7.5", False), ("8.0", True), ("9.0", True), ("10.0", True), ("gfx942", True)]
)
def test_gpus_without_bfloat16_products_keep_the_plain_form(capability, supported):
    assert multiplies_bfloat16(SimpleNamespace(compute_capability=capability)) is supported
    assert multiplies_bfloat16(SimpleNamespace())


def test_a_gpu_without_bfloat16_products_is_never_given_the_kernel(monkeypatch):
    q, k, *_ = shapes(8, 32, 8, 17, 4_096)
    assert applies(q, k)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="7.5")])
    assert not applies(q, k)
