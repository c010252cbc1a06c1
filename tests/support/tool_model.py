"""A tiny model whose chat template knows of tools, as Hermes and Qwen write them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.support.tiny_model import _tokenizer, tiny_llama

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    '{{ \'<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>\\n\' }}{% endif %}'
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}{% endif %}"
)
MARKERS = ("<tool_call>", "</tool_call>")


def tool_llama(path: Path, *, special: bool = True) -> Path:
    """`tiny_llama` with `TEMPLATE`. `special`: `MARKERS` are special tokens, with the ids 510 and 511."""
    folder = tiny_llama(path)
    _tokenizer(510, 2048).save_pretrained(folder)  # so that there are rows for two more tokens
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if special:
        file = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
        tokenizer.save(file)
    return folder
