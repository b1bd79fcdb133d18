"""Safeguards of the hand-off: fences, digests, order, leases."""

from __future__ import annotations

from mutants.mutant import Mutant

LEASE = "kv_transfer/lease.py"
RECEIVER = "kv_transfer/receiver.py"
VALIDATOR = "kv_transfer/frame_validator.py"
WRITER = "kv_transfer/block_writer.py"
FRAMES = "kvrelay/wire/encoding/kv_frame_bytes.py"
SHM = "kv_transfer/transports/shm.py"

MUTANTS = (
    Mutant(
        "generation fence",
        LEASE,
        "if generation != lease.generation:",
        "if False:",
        (
            "unit/kv_transfer/test_receiver.py::test_a_late_frame_does_not_reach_blocks_that_are_another_requests",
            "unit/kv_transfer/test_lease.py::test_a_wrong_number_is_named",
        ),
    ),
    Mutant(
        "epoch fence of a transfer",
        LEASE,
        "if epoch != self.epoch:",
        "if False:",
        (
            "unit/kv_transfer/test_receiver.py::test_an_open_frame_with_a_wrong_number_is_refused",
            "unit/kv_transfer/test_lease.py::test_a_wrong_number_is_named",
        ),
    ),
    Mutant(
        "an expired lease takes no frame",
        LEASE,
        "if entry.closed or now >= entry.expires_at:\n                raise",
        "if entry.closed:\n                raise",
        (
            "unit/kv_transfer/test_receiver.py::test_an_expired_lease_takes_no_frame_even_before_it_is_collected",
            "unit/kv_transfer/test_receiver.py::test_a_lease_that_ends_before_the_commit_is_not_committed",
        ),
    ),
    Mutant(
        "a closed lease takes no frame",
        LEASE,
        "if entry.closed or now >= entry.expires_at:\n                raise",
        "if now >= entry.expires_at:\n                raise",
        (
            "unit/kv_transfer/test_lease.py::test_a_closed_lease_is_released_once_nothing_is_copied_into_it",
        ),
    ),
    Mutant(
        "lease expiry",
        LEASE,
        "if not entry.closed and now >= entry.expires_at]",
        "if False]",
        (
            "unit/kv_transfer/test_lease.py::test_a_lease_ends_with_its_time_even_before_anyone_collects_it",
            "unit/worker/test_relay.py::test_a_lease_that_is_not_renewed_ends_and_gives_its_blocks_back",
        ),
    ),
    Mutant(
        "renewal refused after expiry",
        LEASE,
        "if entry is None or entry.closed or now >= entry.expires_at:\n                gone",
        "if entry is None or entry.closed:\n                gone",
        (
            "unit/kv_transfer/test_lease.py::test_a_lease_ends_with_its_time_even_before_anyone_collects_it",
        ),
    ),
    Mutant(
        "pin while a copy is under way, in the table",
        LEASE,
        "if entry.closed and not entry.pins]",
        "if entry.closed]",
        (
            "unit/kv_transfer/test_lease.py::test_a_closed_lease_is_released_once_nothing_is_copied_into_it",
            "unit/kv_transfer/test_receiver.py::test_blocks_are_not_released_while_they_are_written_to",
        ),
    ),
    Mutant(
        "pin while a copy is under way, by the receiver",
        RECEIVER,
        "self._leases.pin(lease.lease_id)\n        try:\n            await in_thread(take)\n"
        "        finally:\n            self._leases.unpin(lease.lease_id)",
        "await in_thread(take)",
        (
            "unit/kv_transfer/test_receiver.py::test_blocks_are_not_released_while_they_are_written_to",
        ),
    ),
    Mutant(
        "the copy is waited for when its push is cancelled",
        "kvrelay/process/uninterrupted.py",
        "cancelled = error\n",
        "raise\n",
        ("unit/kv_transfer/test_in_thread.py::test_cancelled_it_waits_for_the_function",),
    ),
    Mutant(
        "a lease is for one request and attempt",
        RECEIVER,
        "if lease.key != (opening.request_id, opening.attempt):",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_an_open_frame_with_a_wrong_number_is_refused",),
    ),
    Mutant(
        "the lease is looked at for each frame, not once",
        RECEIVER,
        "lease = self._find(opening)\n        if self._leases.is_committed(lease.lease_id):\n      "
        "      return",
        "lease = writer._lease\n        if self._leases.is_committed(lease.lease_id):\n           "
        " return",
        (
            "unit/kv_transfer/test_receiver.py::test_a_lease_that_expires_in_mid_push_takes_no_more_frames",
        ),
    ),
    Mutant(
        "one push at a time",
        RECEIVER,
        "if lease.lease_id in self._pushes:\n            raise",
        "if False:\n            raise",
        ("unit/kv_transfer/test_receiver.py::test_one_lease_has_one_push_at_a_time",),
    ),
    Mutant(
        "a commit that is repeated is taken once",
        RECEIVER,
        "if self._leases.commit(lease.lease_id, commit):",
        "if self._leases.commit(lease.lease_id, commit) or True:",
        (
            "unit/kv_transfer/test_receiver.py::test_a_repeated_push_is_acknowledged_and_writes_nothing",
        ),
    ),
    Mutant(
        "blocks of a committed lease are not written again",
        RECEIVER,
        "return  # a repetition, of which the commit will tell",
        "pass",
        (
            "unit/kv_transfer/test_receiver.py::test_a_repeated_push_is_acknowledged_and_writes_nothing",
        ),
    ),
    Mutant(
        "a commit with other content is refused",
        LEASE,
        "if self._committed[lease_id][1] != content:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_a_repeated_push_with_other_content_is_refused",),
    ),
    Mutant(
        "KV of another model is refused",
        "kv_transfer/layout_check.py",
        "if opening.layout is None or opening.model_id != model_id:",
        "if opening.layout is None:",
        ("unit/kv_transfer/test_receiver.py::test_an_open_frame_with_a_wrong_number_is_refused",),
    ),
    Mutant(
        "pushes that have not opened are capped",
        RECEIVER,
        "wait = self._timeout_s if self._unopened < _MAX_UNOPENED else 0",
        "wait = self._timeout_s",
        (
            "unit/kv_transfer/test_handoff_faults.py::test_pushes_that_do_not_open_are_capped_and_end",
        ),
    ),
    Mutant(
        "a lease that ends revokes its push",
        RECEIVER,
        "push.deadline.reschedule(asyncio.get_running_loop().time())",
        "pass",
        (
            "unit/kv_transfer/test_receiver.py::test_a_revoked_push_ends_although_its_sender_is_silent",
        ),
    ),
    Mutant(
        "block digest",
        WRITER,
        "if sent != arrived:",
        "if False:",
        (
            "unit/kv_transfer/test_receiver.py::test_one_flipped_bit_is_data_loss",
            "unit/kv_transfer/test_handoff_faults.py::test_kv_that_was_tampered_with_is_not_committed",
        ),
    ),
    Mutant(
        "each block has a digest",
        WRITER,
        "if self._digest is not None and len(frame.digests) != frame.count:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_a_wrong_frame_is_data_loss",),
    ),
    Mutant(
        "commit digest",
        VALIDATOR,
        "if commit.digest != digest:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_a_wrong_commit_is_data_loss",),
    ),
    Mutant(
        "number of frames in the commit",
        VALIDATOR,
        "if commit.frames != self._frames:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_a_wrong_commit_is_data_loss",),
    ),
    Mutant(
        "order of frames",
        VALIDATOR,
        "if frame.sequence != self._frames:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_a_wrong_frame_is_data_loss",),
    ),
    Mutant(
        "a block comes once",
        VALIDATOR,
        "if due != {frame.first_layer}:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_frames_out_of_order_or_twice_are_data_loss",),
    ),
    Mutant(
        "all blocks are there at the commit",
        VALIDATOR,
        "if missing and self._lease.writable:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_a_commit_without_all_blocks_is_data_loss",),
    ),
    Mutant(
        "blocks outside of the lease are refused",
        VALIDATOR,
        "if frame.count < 1 or frame.first < self._first or end > self._end:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_a_wrong_frame_is_data_loss",),
    ),
    Mutant(
        "count times size is the length",
        VALIDATOR,
        "if frame.num_bytes != frame.count *",
        "if False and frame.num_bytes != frame.count *",
        ("unit/kv_transfer/test_receiver.py::test_a_wrong_frame_is_data_loss",),
    ),
    Mutant(
        "largest frame without KV, before it is parsed",
        FRAMES,
        "if len(data) > _MAX_BYTES_WITHOUT_KV:",
        "if False:",
        ("unit/wire/test_kv_frames.py::test_rubbish_is_refused",),
    ),
    Mutant(
        "a frame's length is that of its message",
        FRAMES,
        "if whole > len(view):",
        "if False:",
        ("unit/wire/test_kv_frames.py::test_rubbish_is_refused",),
    ),
    Mutant(
        "a mapped arena is the one that was named",
        SHM,
        'not _is_memory_file(f"/proc/self/fd/{fd}", segment) or os.fstat',
        "os.fstat",
        (
            "unit/kv_transfer/test_receiver.py::test_a_segment_that_is_not_the_senders_arena_is_not_mapped",
        ),
    ),
    Mutant(
        "a mapped arena cannot shrink",
        SHM,
        "if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:",
        "if False:",
        ("unit/kv_transfer/test_receiver.py::test_an_arena_that_could_shrink_is_not_mapped",),
    ),
    Mutant(
        "the store of a group listens on the worker's address only",
        "kv_transfer/transports/group_outbound.py",
        "listener = socket.create_server((self._host, 0))",
        'listener = socket.create_server(("", 0))',
        ("unit/kv_transfer/test_group.py::test_the_store_listens_on_the_workers_address_only",),
    ),
    Mutant(
        "each head goes to the rank that has it",
        "kv_transfer/blocks/conversion.py",
        "number += rank * (len(span.places.sizes) // span.layout.ranks)",
        "number += 0",
        (
            "unit/kv_transfer/test_conversion.py::test_one_workers_heads_become_ranks_shares_and_come_together_again",
        ),
    ),
    Mutant(
        "a layer of several ranks is there when the next one is stored",
        "kvrelay/engine/parallel/forward.py",
        "            on_layer(index - 1)",
        "            on_layer(index)",
        ("unit/engine/parallel/test_group.py::test_a_layer_is_told_when_all_ranks_have_stored_it",),
    ),
)
