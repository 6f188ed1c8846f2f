"""The table of restart rules, and the launchers that repeat it in other languages."""

import subprocess

from domino_jax.runtime import preemption, watchdog
from launch import machine_codes, restarts
from tests.helpers.paths import ROOT

SBATCH = ROOT / "launch" / "slurm.sbatch"


def test_saved_hung_and_killed_runs_start_again_and_no_others():
    assert [code for code in range(131) if restarts.starts_again(code)] == [42, 43, 129]
    assert all(restarts.starts_again(code) for code in (134, 137, 143))  # SIGABRT (a lost peer), SIGKILL, SIGTERM
    assert not restarts.starts_again(255)
    assert [restarts.shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
    assert (restarts.SAVED, restarts.HUNG) == (preemption.PREEMPTED, watchdog.HUNG)


def test_the_first_final_failure_counts_for_all():
    assert restarts.verdict([]) == restarts.verdict([0, 0]) == 0
    assert restarts.verdict([134, 0, 137]) == 134
    assert restarts.verdict([134, 3, 137, 2]) == 3
    assert restarts.verdict([255, 42], again=lambda code: code == 255) == 42


def test_pauses_double_up_to_a_minute_and_begin_again_after_a_run_that_lasted():
    pauses = restarts.Pauses()
    assert [pauses.after(0.1) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [pauses.after(400), pauses.after(0.1)] == [1, 2]


def test_slurm_has_the_rules_of_the_table():
    function = (
        'source <(sed -n "/^starts_again/,/^}/p" "$0"); for n in {0..255}; do starts_again $n && echo $n; done; :'
    )
    done = subprocess.run(["bash", "-c", function, str(SBATCH)], capture_output=True, text=True, check=True)
    assert tuple(map(int, done.stdout.split())) == restarts.AGAIN
    assert f"DOMINO_MAX_RESTARTS:-{restarts.MAX_RESTARTS}" in SBATCH.read_text()


def test_the_first_final_code_of_the_machines_wins_over_later_ones():
    assert machine_codes.codes("9 2 h0\n5 3 h1\n7 running h2\n") == [3, 2]
    assert machine_codes.final("9 2 h0\n5 3 h1\n3 134 h2\n") == 3
    assert machine_codes.final("9 134 h0\n5 0 h1\n") is None
    assert machine_codes.final("5 running h0\n") is None
