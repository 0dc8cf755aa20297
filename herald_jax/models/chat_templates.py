"""Chat templates of our own, for checkpoint folders that come without one.

They write what is known of a family's prompts and nothing else; a role that one of them does not
write is refused by ``Tokenizer.encode_chat``.
"""

from __future__ import annotations

#: One turn is ``<role>NAME</role>text<|role_end|>``, with no newline between turns and no token of
#: beginning. The first turn is always the system's and ends by switching thinking off, which is
#: the only form known for these networks.
LLADA2_CHAT_TEMPLATE = r"""
{%- if enable_thinking is defined and enable_thinking %}
    {{- raise_exception('LLaDA2 prompts are only known with thinking off') }}
{%- endif %}
{{- '<role>SYSTEM</role>' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content + '\n' }}
{%- endif %}
{{- 'detailed thinking off<|role_end|>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<role>HUMAN</role>' + message.content + '<|role_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<role>ASSISTANT</role>' + message.content + '<|role_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<role>ASSISTANT</role>' }}
{%- endif %}
"""

#: The form of Qwen2.5, on which Fast-dLLM v2 is trained: its own system prompt unless there is one.
FAST_DLLM_V2_CHAT_TEMPLATE = r"""
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. ' }}
    {{- 'You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
