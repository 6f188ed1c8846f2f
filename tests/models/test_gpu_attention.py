"""models/gpu_attention.py: the shapes that it is used for, its parts, and the GPUs that it needs."""

from types import SimpleNamespace

import jax
import pytest

from domino_jax.models.gpu_attention import applies, multiplies_bfloat16
from tests.helpers.attention import shapes


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
