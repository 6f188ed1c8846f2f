"""The table of restart rules, and every launcher held against it."""

from launch import restarts


def test_saved_hung_and_killed_runs_start_again_and_no_others():
    assert [code for code in range(1, 131) if restarts.starts_again(code)] == [42, 43, 129]
    assert all(restarts.starts_again(code) for code in (134, 137, 143))  # SIGABRT (a lost peer), SIGKILL, SIGTERM
    assert not any(restarts.starts_again(code) for code in (0, 1, 2, 3, 4, 127, 130, 255))


def test_a_death_by_signal_reads_as_in_a_shell():
    assert [restarts.shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]


def test_the_first_final_failure_stands_for_all():
    assert restarts.verdict([]) == restarts.verdict([0, 0]) == 0
    assert restarts.verdict([134, 0, 137]) == 134
    assert restarts.verdict([134, 3, 137, 2]) == 3
    assert restarts.verdict([255, 42], again=(255, 42)) == 255


def test_pauses_double_up_to_a_minute_and_begin_again_after_a_run_that_lasted():
    pauses = restarts.Pauses()
    assert [pauses.after(0.1) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [pauses.after(400), pauses.after(0.1)] == [1, 2]


def test_fifty_runs_that_end_at_once_take_minutes_and_not_a_second():
    pauses = restarts.Pauses()
    assert sum(pauses.after(0.0) for _ in range(restarts.MAX_RESTARTS)) > 40 * 60
