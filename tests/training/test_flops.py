"""flops.py: products of a jaxpr, loops by their length."""

import jax
import jax.numpy as jnp

from domino_jax.training.flops import product_flops


def test_products_in_loops_count_as_often_as_they_run():
    """(2·3·4·5) FLOPs a turn, 7 turns; the same in a rematerialised function and twice in its gradient."""

    def loop(x, w):
        return jax.lax.scan(lambda total, _: (total + jnp.sum(x @ w), None), 0.0, length=7)[0]

    x, w = jnp.ones((3, 4)), jnp.ones((4, 5))
    assert product_flops(jax.make_jaxpr(loop)(x, w)) == 7 * 2 * 3 * 4 * 5
    gradient = jax.grad(jax.checkpoint(lambda x: jnp.sum((x @ w) ** 2)))
    assert product_flops(jax.make_jaxpr(gradient)(x)) >= 2 * 2 * 3 * 4 * 5


def test_of_the_forms_for_different_devices_the_default_counts():
    x, w = jnp.ones((3, 4)), jnp.ones((4, 5))
    forms = {"cpu": lambda x, w: x @ w @ w.T @ w, "default": lambda x, w: jnp.matmul(x, w + 1.0)}
    jaxpr = jax.make_jaxpr(lambda x, w: jax.lax.platform_dependent(x, w, **forms))(x, w)
    assert product_flops(jaxpr) == 2 * 3 * 4 * 5


def test_each_row_of_a_ragged_product_counts_once_and_a_part_on_each_device():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, matrices, sizes = jnp.ones((6, 4)), jnp.ones((3, 4, 5)), jnp.array([1, 0, 5])
    assert product_flops(jax.make_jaxpr(jax.lax.ragged_dot)(rows, matrices, sizes)) == 2 * 6 * 4 * 5
    spec = jax.sharding.PartitionSpec
    part = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data"))
    assert product_flops(jax.make_jaxpr(part)(rows, matrices[0])) == 2 * 6 * 4 * 5
