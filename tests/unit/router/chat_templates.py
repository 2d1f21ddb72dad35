"""Chat templates in the manner of the common model families, to render in tests."""

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# A start token, headers, trimmed contents, a date, a macro, calls as JSON.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- macro header(role) %}
    {{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" }}
{%- endmacro %}
{{- header("system") }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model calls one tool at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- header("assistant") }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- header("ipython") + message.content|tojson + "<|eot_id|>" }}
    {%- else %}
        {{- header(message['role']) + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header("assistant") }}
{%- endif %}
"""

# Tools branches, a namespace, slices in reverse, string methods, loop neighbours, loop controls.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and loop.last %}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Roles must alternate; the system text goes into the last user turn.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages | rejectattr("role", "equalto", "tool") %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate"
            ~ " user/assistant/user/assistant/...") }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# No system role; plain block tags whose line breaks and indents trim_blocks must remove.
GEMMA = """\
{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
    {{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if (message['role'] == 'assistant') %}
        {% set role = 'model' %}
    {% else %}
        {% set role = message['role'] %}
    {% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\\n' }}
{% endif %}
"""

# Marks the answers for training, and a variable set inside the mark must not leak out.
MARKED = """\
{%- set mark = 'out' %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- set mark = 'in' %}
            {{- mark + ':' + message.content + loop.index|string }}
        {%- endgeneration %}
        {{- mark }}
    {%- else %}
        {{- message.role + ':' + message.content }}
        {%- if message.content == 'skip' %}{%- continue %}{%- endif %}
        {{- '|' }}
    {%- endif %}
{%- endfor %}
"""

# JSON options and characters that an HTML-minded filter would escape.
JSON = """\
{{ messages | tojson(indent=2) }}
{{ messages[0] | tojson(sort_keys=true, separators=(',', ':')) }}
{{ messages[0].content | tojson(ensure_ascii=true) }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "marked": MARKED,
    "json": JSON,
}
