"""The faults that a run has to survive: how soon each is noticed, how the run goes on, and the tests that prove it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        name: what is injected.
        noticed: detection bound.
        goes_on: recovery bound.
        holds: afterwards. `equal`: sample ids, losses and final weights are those of an uninterrupted run, bit for bit.
        tests: paths below `tests` and functions, `module.py::function`.
        punish: the fault of `python -m lab punish` that repeats it at random.
    """

    name: str
    noticed: str
    goes_on: str
    holds: str
    tests: tuple[str, ...]
    punish: str = ""


AT_ONCE, START, RESTART, EQUAL = "at once", "at the next start", "a start", "equal"
SIGNALS, FILES, RESTARTS = "train/test_train_signals.py", "faults/test_files.py", "faults/test_restarts.py"
FAULTS, LOST, STORE = "train/test_train_faults.py", "train/test_train_lost.py", "unit/test_checkpoint_store.py"
INSIDE = "faults/test_punish.py::test_faults_inside_ranks_are_noticed_and_change_nothing"
SLURM, PREPARED = "system/slurm/test_training.py", "unit/test_data_prepare.py"

PROCESSES = (
    Case("a rank killed while a save is stalled", AT_ONCE, RESTART, "every announced checkpoint is valid",
         ("dist/test_checkpoint_killed.py::test_every_announced_checkpoint_survives_the_death_of_a_rank",),
         "killed in a save"),
    Case("rank 0 killed", AT_ONCE, RESTART, EQUAL,
         ("unit/test_launch.py::test_a_killed_first_rank_is_reported_too",), "first rank killed"),
    Case("another rank killed", AT_ONCE, RESTART, EQUAL,
         (f"{SIGNALS}::test_a_run_restarts_automatically_after_a_killed_rank",), "rank killed"),
    Case("the launcher killed", AT_ONCE, RESTART, "equal; no process of it is left",
         (f"{SIGNALS}::test_when_the_command_is_killed_nothing_of_it_stays",), "launcher killed"),
    Case("a rank stopped by SIGSTOP", "its limit and 2 s", RESTART, EQUAL,
         (f"{SIGNALS}::test_a_rank_that_is_stopped_is_reported_killed_and_all_start_again",), "rank stopped"),
    Case("a thread that holds Python's lock", "its limit and 2 s", RESTART, EQUAL,
         ("unit/test_faults_watchdog.py::test_a_hang_is_reported_with_stacks_and_ended",), "GIL held"),
    Case("a rank that leaves out a collective", "its limit and 2 s", RESTART, EQUAL,
         (INSIDE,), "collective left out"),
    Case("an exception in evaluation on one rank", AT_ONCE, RESTART, EQUAL,
         (INSIDE,), "exception in evaluation"),
    Case("the same crash every time", "three restarts", "stops with 93", "the newest checkpoint is valid",
         ("unit/test_workflow_slurm.py::test_restarts_without_progress_stop",
          f"{SLURM}::test_restarts_without_progress_end")),
    Case("a rank half as fast", "two reports", "named", EQUAL,
         ("dist/test_stragglers.py::test_a_slow_rank_is_reported_within_two_reports",
          "dist/test_stragglers.py::test_the_node_of_a_lasting_straggler_is_left_out_by_its_job")),
)  # fmt: skip
ENDS = (
    Case("SIGTERM to one rank", "one step", "a start", EQUAL,
         ("dist/test_stops.py::test_a_stop_request_of_one_rank_reaches_all",), "rank told to stop"),
    Case("SIGTERM during a save", "one step", "a start", "both steps are saved",
         (f"{FILES}::test_a_signal_during_a_save_ends_the_run_with_both_steps_saved",), "preempted"),
    Case("SIGTERM twice, then SIGINT", "one step", "a start", EQUAL,
         (f"{SIGNALS}::test_one_run_is_stopped_and_killed_and_the_same_command_resumes",
          "unit/test_faults_signals.py::test_second_ctrl_c_leaves_at_once_and_names_the_newest_checkpoint")),
    Case("a save slower than the grace", "the grace", "a start", "exit code 75 if it was published, else 143",
         ("unit/test_launch.py::test_after_the_grace_period_ranks_are_killed_and_the_code_tells_whether_they_saved",
          f"{SIGNALS}::test_a_rank_that_is_stopped_is_killed_after_the_grace")),
    Case("a job requeued three times", "Slurm's", "a start", "equal; one MLflow run",
         (f"{SLURM}::test_requeued_three_times",)),
    Case("the time limit of a job", "its warning", "a start", EQUAL,
         (f"{SLURM}::test_time_limit_whose_warning_comes_before_the_ranks_are_started", f"{SLURM}::test_interrupted")),
    Case("slurmctld away", "not by the run", "without a restart", EQUAL,
         (f"{SLURM}::test_the_controller_is_away_while_a_job_trains",
          "unit/test_launch_jobs.py::test_a_scheduler_that_stays_away_ends_the_waiting")),
)  # fmt: skip
CHECKPOINTS = (
    Case("200 random kills over save and retention", AT_ONCE, "a start", "what was announced is there, and loads",
         (f"{FILES}::test_two_hundred_random_kills_over_save_and_retention",
          "unit/test_checkpoint_saver.py::test_kill_nine_at_any_moment_leaves_a_complete_newest_checkpoint",)),
    Case("each file of the newest cut, flipped (100 bits) and deleted", START, "from the one before", EQUAL,
         (f"{FILES}::test_whatever_happens_to_a_file_of_the_newest_the_one_before_is_used",
          f"{LOST}::test_damaged_checkpoints_are_set_aside_and_their_steps_written_again"), "truncated checkpoint"),
    Case("all checkpoints corrupt", START, "stops with 93", "nothing is changed",
         (f"{LOST}::test_a_run_that_has_lost_all_its_checkpoints_is_refused",)),
    Case("a full disk for three saves", "at each save", "at the next save", "no step is lost",
         (f"{FILES}::test_a_disk_that_cannot_be_written_for_three_saves_loses_nothing",
          f"{FAULTS}::test_a_disk_that_stays_full_ends_the_run"), "full disk"),
    Case("a read-only disk for three saves", "at each save", "at the next save", "no step is lost",
         (f"{FILES}::test_a_disk_that_cannot_be_written_for_three_saves_loses_nothing",), "read-only disk"),
    Case("two jobs on one run", START, "the second ends with 2", EQUAL,
         (f"{SIGNALS}::test_two_commands_cannot_train_one_run",)),
    Case("killed between publishing and retention", START, "a start", "one checkpoint more, until the next save",
         (f"{FILES}::test_a_process_that_is_killed_between_publishing_and_retention_leaves_one_more",)),
    Case("resumed on another layout", "never", "a start", "losses are equal but for rounding",
         ("dist/test_layouts.py::test_a_checkpoint_resumes_in_a_different_layout",)),
    Case("on with 4, 2, 1 and 4 ranks (train.elastic)", "two ends without a checkpoint", "a start",
         "losses are equal but for rounding, no sample twice or missing",
         ("train/test_train_elastic.py::test_a_run_on_4_2_1_and_4_ranks_trains_what_one_rank_does",
          "train/test_train_pods.py::test_pods_that_are_left_go_on_and_one_that_comes_later_waits",
          f"{SLURM}::test_a_job_goes_on_with_more_nodes_and_with_those_that_are_left")),
    Case("resumed with other data, architecture or betas", START, "refused with 2", "nothing is changed",
         (f"{RESTARTS}::test_a_run_is_not_resumed_with_other_data_architecture_or_betas",
          "unit/test_workflow_train.py::test_the_run_of_another_recipe_is_refused_with_a_diff")),
)  # fmt: skip
NUMBERS = (
    Case("NaN on one rank, once", "before the update", "the step is computed again", EQUAL,
         ("dist/test_guard.py::test_a_fault_that_does_not_come_again_changes_nothing_and_names_its_rank",), "NaN"),
    Case("NaN on one rank that stays", "before the update", "stops with 93", "no checkpoint has it",
         ("dist/test_stops.py::test_all_ranks_stop_at_a_nan_and_name_where_it_began",
          "dist/test_stops.py::test_no_weight_moves_in_a_step_that_is_not_finite"), "NaN that stays"),
    Case("one bit of a weight flipped on one replica", "at the next comparison", "stops with 93", EQUAL,
         ("dist/test_guard.py::test_one_bit_of_a_weight_that_replicas_do_not_share_is_found_and_named",
          "dist/test_guard.py::test_one_bit_that_the_next_gather_overwrites_is_found_before_it"),
         "flipped weight bit"),
    Case("a rank that computes one bit of a layer's results wrong", "at the next comparison", "an alarm", EQUAL,
         ("dist/test_guard.py::test_a_rank_that_computes_one_bit_otherwise_is_found_and_named",)),
    Case("a spike of ten times", "before the update", "left out, or rewound", "as a run that was cut there",
         ("train/test_train_spikes.py::test_the_update_of_a_spike_is_left_out_also_right_after_a_restart",
          "train/test_train_spikes.py::test_a_run_goes_back_from_a_spike_and_leaves_out_the_batches_that_led_to_it")),
)  # fmt: skip
DATA = (
    Case("tokens flipped", START, "refused with 2", "nothing is trained on them",
         ("unit/test_data_checked.py::test_a_changed_byte_is_found_before_a_run_starts",
          f"{PREPARED}::test_changed_bytes_are_found_by_the_full_check")),
    Case("tokens cut off, also under a run", "at the read", "the last step is saved", EQUAL,
         (f"{PREPARED}::test_a_truncated_bin_is_named_with_both_sizes",
          f"{FAULTS}::test_tokens_that_are_cut_off_under_a_run_end_it_with_the_last_step_saved")),
    Case("foreign tokens", START, "refused with 2", "nothing is trained on them",
         (f"{PREPARED}::test_a_foreign_index_of_the_same_size_is_found",
          f"{PREPARED}::test_a_damaged_or_foreign_manifest_is_one_message")),
    Case("four builders at once, one killed", AT_ONCE, "the others build it", "every hash matches",
         (f"{RESTARTS}::test_of_four_processes_that_prepare_the_same_data_one_is_killed",)),
    Case("ten restarts on 4, 2 and 1 ranks", "never", "a start", "no sample twice or missing",
         (f"{RESTARTS}::test_ten_restarts_on_4_2_and_1_ranks_leave_no_sample_out_and_none_is_seen_twice",)),
)  # fmt: skip
SERVICES = (
    Case("MLflow away, for a while and for ever", "said once", "points are sent later", "metrics.jsonl has all",
         ("unit/test_tracking_mlflow.py::"
          "test_a_dead_server_neither_stops_nor_delays_training_and_gets_missed_points_on_resume",
          "unit/test_tracking_mlflow.py::test_an_unreachable_server_costs_a_warning_without_its_password")),
    Case("MLflow on PostgreSQL away for a while", "said once", "points are sent later", "metrics.jsonl has all",
         ("system/search/test_mlflow_postgres.py::test_a_database_that_is_away_gets_the_points_when_it_is_back",)),
    Case("a clock off by an hour", "never", "without a restart", "the lease is that of who renews it",
         (f"{RESTARTS}::test_the_lease_of_a_machine_whose_clock_is_off_by_an_hour",)),
    Case("the machine of a run gone", "120 s after its last renewal", "its run is taken over", "one writer",
         ("unit/test_search_takeover.py::test_a_job_whose_machine_is_gone_is_started_here",
          "unit/test_search_takeover.py::test_a_job_ends_when_its_run_is_given_to_another")),
)  # fmt: skip
HOSTILE = (
    Case("pickles in every place", "when it is read", "refused", "no code runs",
         ("unit/test_checkpoint_hostile.py::test_nothing_but_an_index_is_read_from_a_pickle",
          "unit/test_checkpoint_hostile.py::test_code_in_a_stored_value_is_not_run",
          "unit/test_checkpoint_hostile.py::test_code_in_what_is_not_sharded_is_not_run")),
    Case("names with `..`", "when it is read", "refused", "nothing outside is read",
         ("unit/test_checkpoint_hostile.py::test_an_index_that_cannot_be_true_is_refused",
          "unit/test_data_checked.py::test_an_archive_in_place_of_an_array_is_refused")),
    Case("YAML bombs", "when it is read", "refused with 2", "one message",
         ("unit/test_recipe_load.py::test_hostile_files_get_one_message",)),
    Case("shell metacharacters in every name", "when it is rendered", "quoted or refused", "nothing is run",
         ("system/slurm/test_jobs.py::test_hostile_values_reach_the_job_as_they_are",
          "unit/test_kubernetes_render.py::test_hostile_values_round_trip_as_literals")),
    Case("tokens", "when they are printed", "redacted", "in no log, manifest or command line",
         ("unit/test_redact.py::test_a_secret_is_in_no_output_of_a_run",
          "unit/test_redact.py::test_a_rank_prints_its_traceback_without_secrets")),
    Case("10,000 generated recipes", "when they are read", "read or refused with 2", "no traceback",
         ("faults/test_recipes.py::test_ten_thousand_generated_recipes_get_no_traceback",)),
)  # fmt: skip
CASES = (*PROCESSES, *ENDS, *CHECKPOINTS, *NUMBERS, *DATA, *SERVICES, *HOSTILE)
