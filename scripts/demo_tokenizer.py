"""The tokenizer of the demo model: byte-level BPE, which encodes any text without loss, and a chat
template.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")

# A conversation is <s>, followed by role, text and </s> for each turn. Functions are listed with
# the names of their arguments: JSON schemas would fill the small model's context. The grammar of a
# required call follows the schemas.
CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools %}
{{- '<|system|>Call a function with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.' }}
{{- ' Functions:' }}
{%- for tool in tools %}
{%- set function = tool.function %}
{{- '\\n' + function.name + '(' }}
{{- ((function.parameters or {}).properties or {}) | join(', ') }}
{{- '): ' + (function.description or '') | trim }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role ' + message.role + '; use system, user, assistant or tool') }}
{%- endif %}
{{- '<|user|>' if message.role == 'tool' else '<|' + message.role + '|>' }}
{{- (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains the tokenizer on `texts`. Every digit is a separate token, so the model sees sums
    digit by digit. The tokenizer adds <s> at the start.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wraps the tokenizer for transformers."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
