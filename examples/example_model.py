"""What the examples share: which model they run, and how they ask it something."""

import sys

# Before mlx_lm: on Linux paged_kv loads OpenBLAS, and MLX takes it only if it is there first.
from paged_kv import embedded_model
from paged_kv.options import not_loaded, require_model

from mlx_lm import load  # isort: skip


def load_model(name=None):
    """The model of a folder or a Hugging Face repository, and its tokenizer; without a name, the
    small one of paged_kv, which writes what looks like Python. Ends the program with one line if
    there is no such model."""
    if name is None:
        return load(embedded_model())
    try:
        require_model("MODEL", name)
    except FileNotFoundError as error:
        sys.exit(str(error))
    try:
        return load(name)
    except Exception as error:
        sys.exit(str(not_loaded("MODEL", name, error)))


def question_tokens(tokenizer, question, system=""):
    """A question as the model expects it: in its chat template, where it has one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(system + question)
    messages = [{"role": "user", "content": question}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
