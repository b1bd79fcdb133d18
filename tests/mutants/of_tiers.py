"""Safeguards of the tiers: whose block a file is, whether it is whole, and who may lose it."""

from __future__ import annotations

from mutants.mutant import Mutant

FILE = "kvrelay/worker/tiers/block_file.py"
FOLDER = "kvrelay/worker/tiers/slot_folder.py"
STORE = "kvrelay/worker/tiers/tier_store.py"
COPIES = "kv_transfer/blocks/single_blocks.py"
KEY = "kvrelay/engine/kvcache/block_hashes.py"
DISK = "kvrelay/worker/tiers/disk_tier.py"
JOBS = "kvrelay/worker/tiers/disk_files.py"
PREFILL = "prefill_worker/prefill_stage.py"
UNIT = "unit/worker/tiers/"

MUTANTS = (
    Mutant(
        "the digest of a block from a tier",
        COPIES,
        "if found != copy.digest:\n                return count",
        "if False:\n                return count",
        (f"{UNIT}test_tier_faults.py::test_everything_on_the_disk_is_damaged",),
    ),
    Mutant(
        "the digest of a file's header",
        FILE,
        "if _DIGEST.unpack(data[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(fields):",
        "if False:",
        (f"{UNIT}test_slot_folder.py::test_a_damaged_header_is_refused",),
    ),
    Mutant(
        "the layout in a file",
        FILE,
        "if self.layout != layout:",
        "if False:",
        (
            f"{UNIT}test_slot_folder.py::test_a_file_of_another_model_under_this_ones_name_is_refused",
        ),
    ),
    Mutant(
        "the identity in a file",
        FILE,
        "if self.identity != identity:",
        "if False:",
        (f"{UNIT}test_slot_folder.py::test_a_block_of_another_model_or_place_is_refused",),
    ),
    Mutant(
        "the length of a file",
        FOLDER,
        "if status.st_size != expected:",
        "if status.st_size < expected:",
        (f"{UNIT}test_slot_folder.py::test_a_longer_file_is_refused",),
    ),
    Mutant(
        "a file is written under another name",
        FOLDER,
        "part = path.with_suffix(_PART)",
        "part = path",
        (f"{UNIT}test_slot_folder.py::test_no_reader_sees_a_file_that_is_being_written",),
    ),
    Mutant(
        "a folder that others can write to",
        FOLDER,
        "if status.st_mode & 0o022:",
        "if False:",
        (f"{UNIT}test_slot_folder.py::test_a_folder_that_others_can_write_to_is_refused",),
    ),
    Mutant(
        "a copy of a block that was allocated meanwhile",
        STORE,
        "if same and self._cache.key_of(block) == key:",
        "if True:",
        (f"{UNIT}test_tier_store.py::test_a_block_that_changes_during_its_copy_is_not_stored",),
    ),
    Mutant(
        "the salt in the identity of a block",
        KEY,
        "self._identity = hashlib.blake2b(key=key, digest_size=IDENTITY_BYTES, person=_IDENTITY)",
        "self._identity = hashlib.blake2b(digest_size=IDENTITY_BYTES, person=_IDENTITY)",
        (f"{UNIT}test_tier_store.py::test_identities_differ_by_model_salt_and_tokens",),
    ),
    Mutant(
        "removals behind one that failed",
        JOBS,
        "done.stuck.append(one)",
        "break",
        (f"{UNIT}test_slot_folder.py::test_what_cannot_be_removed_holds_up_nothing_else",),
    ),
    Mutant(
        "a damaged file of another worker does not stand for the block",
        JOBS,
        "if block.key.identity not in refused and folder.holds_elsewhere(block.key):",
        "if folder.holds_elsewhere(block.key):",
        (
            f"{UNIT}test_tier_faults.py::test_damaged_files_of_a_worker_that_is_gone_are_stored_anew",
        ),
    ),
    Mutant(
        "a file that cannot be read is given up",
        DISK,
        'note_error(self.counts, self.kind, "read", reason_of(found.error)) '
        "self._give_up(found.failed)",
        'note_error(self.counts, self.kind, "read", reason_of(found.error))',
        (f"{UNIT}test_tier_faults.py::test_a_file_that_cannot_be_read_is_stored_anew",),
    ),
    Mutant(
        "a scored prompt is computed",
        PREFILL,
        "if scored or not fetches",
        "if not fetches",
        (
            "unit/worker/test_prefix_fetch.py::"
            "test_a_scored_prompt_is_computed_although_the_router_names_a_source",
        ),
    ),
    Mutant(
        "a read that was given up tells little about the rate",
        "kvrelay/worker/tiers/tier_cost.py",
        "            num_bytes, seconds = wanted, 2 * seconds\n",
        "            pass\n",
        ("unit/worker/tiers/test_tier_cost.py::test_one_slow_moment_is_forgotten_within_minutes",),
    ),
    Mutant(
        "a very fast read does not hide slow ones",
        "kvrelay/worker/tiers/tier_cost.py",
        "old ** (1 - _READ_WEIGHT) * rate**_READ_WEIGHT",
        "(1 - _WEIGHT) * old + _WEIGHT * rate",
        ("unit/worker/tiers/test_tier_cost.py::test_a_store_that_becomes_slow_is_noticed_soon",),
    ),
    Mutant(
        "answers of one token tell how fast prompts are computed",
        "kvrelay/worker/worker.py",
        "            self.stage.prompt_computed(work.sequence, tokens.prefill)\n",
        "",
        (
            "unit/worker/tiers/test_tier_hit_rate.py::"
            "test_answers_of_one_token_tell_how_fast_prompts_are_computed",
        ),
    ),
    Mutant(
        "a block that came into doubt while it was written is written again",
        "kvrelay/worker/tiers/disk_tier.py",
        "if self._waiting.get(block.key.identity) is block:",
        "if block.key.identity in self._waiting:",
        (
            "unit/worker/tiers/test_tier_faults.py::"
            "test_a_block_that_comes_into_doubt_while_it_is_written_is_written_again",
        ),
    ),
    Mutant(
        "a read of a disk ends at a block that came into doubt meanwhile",
        "kvrelay/worker/tiers/disk_tier.py",
        "key.identity not in doubted",
        "True",
        (
            UNIT + "test_tier_faults.py::"
            "test_a_block_that_comes_into_doubt_while_it_is_read_is_not_used",
        ),
    ),
    Mutant(
        "a read notices that its disk is back",
        JOBS,
        "folder.check_claim()\n        except OSError as error:\n            found.failed",
        "pass\n        except OSError as error:\n            found.failed",
        (
            UNIT + "test_tier_faults.py::"
            "test_a_file_in_doubt_is_not_read_before_the_tier_knows_that_its_disk_is_back",
        ),
    ),
    Mutant(
        "files in doubt are gone before a worker ends in order",
        DISK,
        "(self._waiting or self._doomed or self._writes.pending)",
        "(self._waiting or self._doomed)",
        (
            UNIT + "test_tier_faults.py::"
            "test_a_worker_that_ends_in_order_removes_files_in_doubt_before",
        ),
    ),
    Mutant(
        "a block that came into doubt is not saved",
        STORE,
        "if tier.holds(block.key):",
        "if True:",
        (
            UNIT + "test_tier_store.py::"
            "test_a_block_that_comes_into_doubt_while_memory_is_saved_is_not_written",
        ),
    ),
)
