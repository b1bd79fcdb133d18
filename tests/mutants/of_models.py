"""Safeguards of models as they are loaded: held to transformers, and identified by every byte."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "a model is held to transformers' own attention",
        "kvrelay/engine/model/loader.py",
        "        check_against_own_attention(model, probed.layers, probed.dtype)\n",
        "",
        ("unit/engine/model/test_self_check.py::test_positions_that_the_model_shifts_are_noticed",),
    ),
    Mutant(
        "rounding of 16 bits is no difference",
        "kvrelay/engine/model/self_check.py",
        "rows.max() if rounding == torch.float32 or not",
        "rows.max() if True or not",
        ("unit/engine/model/test_self_check.py::test_rounding_refuses_nothing",),
    ),
    Mutant(
        "models that drop keywords get the batch all the same",
        "kvrelay/engine/model/loader.py",
        "if probed.drops_keywords:",
        "if False:",
        ("unit/engine/model/test_self_check.py::test_models_that_drop_keywords_run_side_by_side",),
    ),
    Mutant(
        "a cache that is shorter than attention is noticed",
        "kvrelay/engine/model/attention_probe.py",
        "if kept and kept < min(window, max_len):",
        "if False:",
        (
            "unit/engine/model/test_self_check.py::test_a_cache_that_is_shorter_than_attention_is_noticed",
        ),
    ),
    Mutant(
        "a V that is in K takes no memory",
        "kvrelay/engine/model/attention_probe.py",
        "v_in_k=latent is not None",
        "v_in_k=False",
        (
            "unit/worker/test_latent_relay.py::test_a_hand_off_sends_each_latent_vector_once",
            "unit/engine/attention/test_latent_attention.py::test_answers_are_those_of_k_and_v",
        ),
    ),
    Mutant(
        "workers with a V of its own do not exchange blocks with workers whose V is in K",
        "kvrelay/types/kv_layout.py",
        '", v_in_k=True" if self.v_in_k else ""',
        '""',
        ("unit/engine/base/test_kv_memory.py::test_layouts_that_differ_cannot_exchange_blocks",),
    ),
    Mutant(
        "a peer that does not know of a V in K sees another layout",
        "kvrelay/wire/encoding/kv_frame_bytes.py",
        '{"v_dim": 0, "v_in_k": layer.v_dim}',
        '{"v_in_k": layer.v_dim}',
        ("unit/wire/test_kv_frames.py::test_a_peer_that_does_not_know_v_in_k_sees_another_layout",),
    ),
    Mutant(
        "a V that is in K is its first values",
        "kvrelay/engine/base/kv_memory.py",
        "k[..., : self.v_dim]",
        "k[..., -self.v_dim :]",
        ("unit/engine/attention/test_paged_attention.py::test_equals_the_definition",),
    ),
    Mutant(
        "every byte of a model's files",
        "kvrelay/engine/model/digest.py",
        "end = start + PART_BYTES",
        "end = start + 64",
        ("unit/engine/model/test_digest.py::test_any_byte_of_any_file_makes_another_id",),
    ),
    Mutant(
        "a model file with old times",
        "kvrelay/engine/model/digest.py",
        'found.get("file") == key',
        'found.get("file")[0] == key[0]',
        (
            "unit/engine/model/test_digest.py::test_a_file_that_was_replaced_with_its_old_times_is_read_again",
        ),
    ),
)
