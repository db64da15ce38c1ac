"""Which tests run when: `make quick`, `make test` and `make test-all`.

A test that is not listed is quick. An entry is a path below `tests/`, of a module or of one test in it. If a test
starts processes or takes more than about a second, list it under SLOW; if `make test` can do without it, under FULL.
"""

from __future__ import annotations

# Left out of `make quick`: worker processes and threads, other interpreters, many random examples.
SLOW = """
test_growth.py
test_one_result.py
test_resume.py
core/test_blocks.py::test_the_order_is_elastic_and_resumable
core/test_handles.py::test_loaders_warn_of_generators
core/test_handles.py::test_loaders_warn_of_what_forked_workers_share
core/test_handles.py::test_loaders_without_processes_do_not_warn
core/test_handles.py::test_processes_that_write_warn_as_well
core/test_fingerprint.py::test_what_is_nested_deeply_has_a_fingerprint
core/test_frozen.py::test_new_workers_warn_in_the_second_epoch
core/test_frozen.py::test_spawned_workers_warn_at_once
core/test_frozen.py::test_persistent_workers_warn_although_the_epoch_is_set
core/test_frozen.py::test_epochs_that_are_set_are_no_warning
core/test_one_torch_thread.py
core/test_tracebacks.py::test_a_script_may_end_while_streams_are_open
core/test_tracebacks.py::test_an_interrupt_ends_with_the_users_line
core/test_tracebacks.py::test_causes_are_kept_and_shortened
core/test_tracebacks.py::test_workers_send_the_users_line_as_the_last_one
delivery/test_ranks_apart.py
delivery/test_tail.py
loader/test_receipts_of_streams.py
sources/test_from_table.py::test_batches_with_workers_and_a_copy_of_the_source
sources/test_index_shards.py
storage/test_images.py::test_workers_read_what_this_process_reads
storage/test_images.py::test_executors_read_what_this_process_reads
sources/test_index_while_reading.py
test_layers.py::test_no_module_goes_around_what_others_declare
hosts/test_patches.py::test_kdpipes_changes_nothing_else
hosts/test_patches.py::test_other_changes_are_found
test_public_api.py::test_importing_it_leaves_out_what_few_chains_need
test_public_api.py::test_torchdata_is_imported_when_a_pipe_of_it_is_used
test_public_api.py::test_torchdatas_pipe_names_are_those_it_registers
test_control_characters.py::test_commands_are_clean
test_readme.py::test_every_block_prints_what_stands_below_it
work/test_transform_batch.py::test_batches_do_not_depend_on_workers_or_resumes
work/test_views.py
cli/test_doctor.py
look/test_show.py
cache/test_cache_identity.py
cache/test_cache_in_memory.py
cache/test_cache_in_redis.py
cache/test_cache_on_disk.py
cache/test_folder_watcher.py
cache/test_followed_globals.py
cache/test_held_values.py
cache/test_lmdb_store.py
cache/test_redis_store.py
cache/test_stale_values.py
cache/test_store_contract.py
cli/test_index.py
cli/test_inspect.py
cli/test_main.py
cli/test_replay.py
core/test_own_pipes.py
delivery/test_by_length.py::test_batches_waste_little_and_meet_others_in_every_epoch
delivery/test_by_length.py::test_the_batches_of_an_epoch_do_not_depend_on_workers
delivery/test_chain_state.py
delivery/test_checkpoint.py
delivery/test_cutmix.py
delivery/test_loader.py
delivery/test_loader_service.py
delivery/test_mixing.py
delivery/test_mixup.py
delivery/test_lanes.py
delivery/test_process_reading_service.py
delivery/test_ranks_now.py
loader/test_find.py
delivery/test_shared_buffers.py
delivery/test_thread_reading_service.py
hosts/test_torch.py
loader/test_autotune.py
loader/test_receipt.py
delivery/test_torchdata_services.py
look/test_doctor.py
look/test_doctor_mistakes.py
look/test_peek.py
look/test_profile.py
plan/test_chains.py::test_a_chain_on_a_stream_is_the_chain_on_a_list
plan/test_chains.py::test_a_chain_on_an_index_is_the_chain_on_a_list
plan/test_mix.py
plan/test_take.py
sources/test_open_records.py
sources/test_stream_shards.py
storage/test_codec.py::test_damage_that_is_not_looked_for_does_no_harm
storage/test_codec.py::test_plain_data_comes_back_with_its_types
storage/test_shard_folder_download.py
storage/test_tar_bytes.py
storage/test_shard_index_joined.py
storage/test_remote_ranges.py
storage/test_remote_streams.py
storage/test_shard_cache.py
storage/test_shard_folder.py
core/test_shared.py::test_a_pickle_loads_in_a_fresh_interpreter
core/test_shared.py::test_processes_not_forked_map_arrays_from_one_file
storage/test_tar_headers.py
storage/test_retries.py
test_contract.py::test_each_pipe_keeps_what_the_test_kit_checks
test_docstrings.py::test_examples_give_what_they_show
core/test_randomness.py::test_a_new_process_takes_seeds_for_epochs_not_run_here
core/test_randomness.py::test_a_key_tells_apart_where_parts_begin
core/test_randomness.py::test_a_borrowed_generator_draws_what_a_new_one_draws
core/test_randomness.py::test_workers_of_torchs_loader_run_another_epoch_each_time
test_elastic_order.py
core/test_fingerprint.py::test_another_process_with_another_hash_seed_finds_the_same
test_progress.py::test_a_bar_does_not_choose_how_processes_start
test_public_api.py::test_importing_is_quick
test_public_api.py::test_importing_leaves_the_garbage_collector_off_if_it_was
test_public_api.py::test_importing_prints_no_warning_and_imports_nothing_heavy
test_resume_behind_deal.py
test_resume_without_deal.py
test_sample_pipe.py
test_secrets.py::test_errors_warnings_and_logs_hold_no_secret
test_security.py
test_streams.py
test_structure.py::test_the_source_stays_below_its_ceilings
testing/test_checks.py
test_faulty_storage.py
test_webdataset.py
work/test_color_transforms.py
work/test_damaged_streams.py
work/test_geometric_transforms.py
work/test_joint_transforms.py
work/test_jpeg.py::test_batches_are_the_same_for_every_backend_and_workers
work/test_jpeg.py::test_every_file_has_pillows_pixels
work/test_jpeg.py::test_scaled_decoding_is_the_same_by_each_backend
work/test_on_error.py
work/test_on_error_limits.py
work/test_replay_draws.py
write/test_write_records.py
write/test_write_shards.py
write/test_write_shards_left_out.py
""".split()  # noqa: SIM905  # a path a line is easier to read

# Run by `make test-all` alone: object stores, process groups, trainers and other packages, notebooks, documentation,
# benchmarks, type checkers, kills, leaks, and what takes many seconds and seldom fails.
FULL = """
cache/test_stale_values.py::test_a_change_is_never_missed_in_redis
cache/test_stale_values.py::test_a_change_is_never_missed_on_disk
cache/test_cache_on_disk.py::test_workers_and_executors_fill_a_cache
cli/test_replay.py::test_it_is_a_command
delivery/test_lanes.py::test_a_stream_resumes_at_every_batch
delivery/test_lanes.py::test_num_batches_continue_under_any_workers
delivery/test_lanes.py::test_num_batches_resume_at_any_batch
delivery/test_layout.py::test_positions_are_independent_of_batches_read_before
delivery/test_ranks_now.py::test_workers_that_would_each_give_every_batch_are_rejected
plan/test_redraw.py
sources/test_random_datasets.py
test_golden.py::test_golden_files_hold_in_another_process
test_public_api.py::test_no_name_of_torch_or_torchdata_is_replaced_or_hidden
test_public_api.py::test_torchdatas_hugging_face_reader_imports_datasets_on_use
test_resume.py::test_a_run_with_changing_workers_equals_one_process
test_resume.py::test_images_and_streams_go_on_from_every_batch
test_seeded_map.py
testing/test_checks.py::test_sound_chains_pass
work/test_replay.py
write/test_write_shards_again.py
cli/test_demo.py
cli/test_examples.py
hosts/test_accelerate.py
hosts/test_compile.py
delivery/test_chain_state.py::test_a_stateful_loader_resumes_in_any_epoch
delivery/test_checkpoint.py::test_a_script_resumes_in_a_fresh_process_with_moved_images
delivery/test_errors_of_workers.py
delivery/test_faults.py
delivery/test_interrupts.py
delivery/test_lifetimes.py
delivery/test_process_reading_service.py::test_spawned_workers_print_nothing
delivery/test_ranks.py
loader/test_find.py::test_any_state_will_do
loader/test_find.py::test_streams_are_read_again
look/test_notebook.py
sources/test_open_records.py::test_all_kinds_of_workers_read_them_after_this_process
sources/test_open_shards_elsewhere.py
sources/test_open_shards_elsewhere_faults.py
sources/test_open_shards_elsewhere_indexes.py
sources/test_open_shards_elsewhere_whole.py
storage/test_codec.py::test_an_entry_that_reads_its_bytes_twice_is_damaged
storage/test_responses.py
storage/test_index_home.py
storage/test_object_store.py
storage/test_object_store_clouds.py
storage/test_s3.py
storage/test_storage_options.py
storage/test_tar_headers.py::test_a_changed_byte_is_an_error_or_reads_as_with_tarfile
test_benchmarks.py
test_demo.py
test_docs.py
test_elastic_order.py::test_workers_that_are_not_forked_give_the_same_batches
test_notebooks.py
test_package.py
test_soak.py
test_structure.py::test_a_sample_takes_no_longer_way
test_trainers.py
test_type_checkers.py
test_without_posix.py
work/test_adapters.py
write/test_copy_to_local_faults.py::test_a_bucket_is_a_source
storage/test_jobs.py
write/test_write_shards_elsewhere.py
write/test_write_shards_on_dask.py
""".split()  # noqa: SIM905  # a path a line is easier to read


def tier_of(node_id: str) -> str | None:
    """Return the marker of a test, `slow` or `full`; None for a quick one."""
    test = node_id.removeprefix("tests/").partition("[")[0]
    names = {test, test.partition("::")[0]}
    return "full" if names & set(FULL) else "slow" if names & set(SLOW) else None
