"""Chat templates in the styles of well-known models, and a tokenizer whose tokens can be counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = [
    "<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|end|>",
]  # fmt: skip


def byte_tokenizer(
    directory: Path,
    *,
    merges: tuple[tuple[str, str], ...] = (),
    eos: str = "<|endoftext|>",
    template: str | dict[str, str] | None = None,
) -> Path:
    """Save a tokenizer: a token for each byte, each special and each merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKED = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}

{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

#: The system text stands in the first user's turn.
MISTRAL = """\
{{ bos_token }}{% set ns = namespace(system='') %}
{% for message in messages %}
{% if message.role == 'system' %}{% set ns.system = message.content + '\\n\\n' %}
{% elif message.role == 'user' %}[INST] {{ ns.system + message.content }} [/INST]{% set ns.system = '' %}
{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""

#: In the last one's: each turn more moves it.
MISTRAL_MOVING = """\
{{ bos_token }}{% set ns = namespace(last=0) %}
{% for message in messages %}
{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% for message in messages %}
{% if message.role == 'user' %}[INST] {% set now = loop.index0 == ns.last %}
{% if now and messages[0].role == 'system' %}
{{ messages[0].content + '\\n\\n' }}{% endif %}{{ message.content }} [/INST]
{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""

#: No system role, and the assistant is the model.
GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}
{% for message in messages %}
{% if loop.index0 % 2 != (message.role == 'assistant') | int %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

#: Roles are plain text.
ZEPHYR = """\
{% for message in messages %}<|{{ message.role }}|>
{{ message.content + eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

#: As Zephyr's with a token of its own for the end of a turn, and an end of text behind the last one.
PHI = """\
{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""

#: Thoughts are shown only behind the last question of the user; tools and their answers.
QWEN3 = """\
{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{% set ns = namespace(last=0) %}
{% for message in messages %}
{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% for message in messages %}
{% if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% set thought = message.reasoning_content or '' %}{% set content = message.content %}
{% if '</think>' in content %}
{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}
{{ content }}{% for call in message.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
