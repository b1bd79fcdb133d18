"""Makes the evictor of a model by the name of its method."""

from __future__ import annotations

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.token_eviction.evictor import TokenEvictor
from kvrelay.engine.token_eviction.query_centres import Forward, query_centres
from kvrelay.engine.token_eviction.rotary import Rotary
from kvrelay.engine.token_eviction.row_mover import RowMover
from kvrelay.engine.token_eviction.stored_keys import StoredKeys
from kvrelay.engine.token_eviction.token_scores import AttentionScores, TokenScores, WindowScores
from kvrelay.engine.token_eviction.trigonometric_scores import TrigonometricScores
from kvrelay.errors import ConfigError
from kvrelay.types.token_eviction import EvictionMethod


def token_evictor(
    method: EvictionMethod,
    loaded: LoadedModel,
    kv: KvPool,
    max_model_len: int,
    forward: Forward,
) -> TokenEvictor:
    """The evictor of a model whose KV memory is not used yet, for sequences of at most
    `max_model_len` tokens. Overwrites the first blocks. Raises ConfigError if the method cannot
    serve the model.
    """
    keys = StoredKeys(kv)
    kv_heads = [layer.kv_heads for layer in kv.layout.share.layers]
    scores: TokenScores
    match method:
        case "window":
            scores = WindowScores()
        case "attention":
            scores = AttentionScores(keys, kv_heads)
        case "triattention":
            rotary = _rotary(loaded)
            centres = query_centres(loaded, kv, max_model_len, rotary, forward)
            scores = TrigonometricScores(keys, rotary, centres, kv_heads)
    return TokenEvictor(RowMover(kv), scores, kv.layout.block_size)


def _rotary(loaded: LoadedModel) -> Rotary:
    rotary = Rotary.of(loaded.model)
    if rotary is None:
        raise ConfigError(
            f"kv.eviction: triattention needs rotary position embeddings, which "
            f"{type(loaded.model).__name__} does not have; set method: attention"
        )
    return rotary
