"""A kernel that fails its trial on a device is not used there."""

import logging
import time

import jax
import jax.numpy as jnp
import pytest

from domino_jax.evals import report
from domino_jax.models import kernels
from domino_jax.models.attention import attend_cache


def planted(form):
    return form, jnp.sin, (jnp.arange(8.0),)


def raising(x):
    raise NotImplementedError("Unsupported lowering for GPUs")


PLANTED = {"right": planted(jnp.sin), "wrong": planted(lambda x: jnp.sin(x) * 1.1), "unsupported": planted(raising)}


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """REFUSED, empty before and after, with verdicts kept in a new folder."""
    monkeypatch.setattr(kernels, "REFUSED", kernels.REFUSED)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield kernels.REFUSED
    jax.config.update("jax_compilation_cache_dir", before)
    kernels.REFUSED.clear()


def test_a_wrong_kernel_and_one_that_raises_are_refused_in_one_line_and_in_the_report(refused, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "trials", lambda platform: PLANTED)
    with caplog.at_level(logging.WARNING):
        kernels.refuse_faulty.__wrapped__()
    assert refused.keys() == {"wrong", "unsupported"}
    assert refused["wrong"] == "it is 0.1 of the largest value off"
    assert "Unsupported lowering" in refused["unsupported"]
    assert [line.count("\n") for line in caplog.messages] == [0, 0]
    assert all(f"(jax {jax.__version__}, " in line for line in caplog.messages)
    assert all(reason in report.device() for reason in refused.values())


def test_a_kernel_is_tried_once_and_one_that_did_not_end_is_refused(refused, monkeypatch):
    monkeypatch.setattr(kernels, "SECONDS", 0.2)
    slow = {"slow": planted(lambda x: time.sleep(1) or x)}
    assert kernels.judge(slow) == {"slow": "its trial did not end in 0.2 s"}
    assert kernels.judge({"slow": PLANTED["right"]}).keys() == {"slow"}, "the verdict is kept"


def test_a_trial_that_takes_the_process_with_it_is_refused_at_the_next_start(refused, monkeypatch):
    monkeypatch.setattr(kernels, "fault_of", lambda *_: exit(1))
    with pytest.raises(SystemExit):
        kernels.judge({"deadly": PLANTED["right"]})
    assert kernels.judge({"deadly": PLANTED["right"]}) == {"deadly": "its trial did not end"}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_kernel_passes_its_trial_in_the_interpreter(platform):
    trials = kernels.trials(platform, interpret=True)
    assert {name: kernels.fault_of(*trial) for name, trial in trials.items()} == dict.fromkeys(trials, "")


def test_attention_takes_the_form_of_xla_where_its_kernel_is_refused(refused):
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 32, 17, 128), (1, 8, 4096, 128)))
    mask = jax.ShapeDtypeStruct((1, 17, 4096), bool)

    def text():
        traced = jax.jit(lambda *arguments: attend_cache(*arguments)).trace(q, k, k, mask)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" in text()
    refused["attention"] = "it failed"
    assert "tpu_custom_call" not in text()
