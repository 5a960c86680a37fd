#!/usr/bin/env bash
# Guess: a chat template is a Jinja template, so any Jinja renders the prompt that the model was trained with.
# Fact: transformers changes Jinja. Its blocks take their line (trim_blocks, lstrip_blocks), and its tojson keeps the order
#   of keys and the characters < > & '. Plain Jinja leaves the blanks, sorts the keys and writes \u003c; minijinja (used
#   by servers in Rust) leaves the blanks and writes \u003c but keeps the order. A tool with "x < y" in its description
#   has three prompts, none with an error.
# Source: transformers 5.23.0, utils/chat_template_utils.py:_compile_jinja_template; jinja2 3.1.6,
#   utils.py:htmlsafe_json_dumps and defaults.py ("json.dumps_kwargs": sort_keys); minijinja 3.1.0, filter tojson.
# Remedy: render with transformers, or set both options, the policy and the filter.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q jinja2==3.1.6 minijinja==3.1.0 transformers==5.23.0 tokenizers==0.23.3
cat > "$work/show.py" <<'PY'
import jinja2
import minijinja
from transformers.utils.chat_template_utils import render_jinja_template

template = '''{{ tools | tojson }}
{% for message in messages %}
  {% if message.role == "user" %}
User: {{ message.content }}
  {% endif %}
{% endfor %}'''
tools = [{"name": "less", "description": "x < y"}]
messages = [{"role": "user", "content": "hi"}]
rendered, _ = render_jinja_template([messages], tools=tools, chat_template=template)
print("transformers", repr(rendered[0]))
print("jinja2", repr(jinja2.Template(template).render(messages=messages, tools=tools)))
print("minijinja", repr(minijinja.Environment().render_str(template, messages=messages, tools=tools)))
PY
"$work/venv/bin/python" "$work/show.py" 2> "$work/log" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
transformers '[{"name": "less", "description": "x < y"}]\nUser: hi\n'
jinja2 '[{"description": "x \\u003c y", "name": "less"}]\n\n  \nUser: hi\n  \n'
minijinja '[{"name": "less", "description": "x \\u003c y"}]\n\n  \nUser: hi\n  \n'
SEEN
