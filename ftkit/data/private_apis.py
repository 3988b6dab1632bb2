"""The private name of transformers that preparing data needs; those of training are in `ftkit.train.private_apis`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftkit.data.imports import import_transformers

if TYPE_CHECKING:
    import jinja2


def compile_chat_template(template: str) -> jinja2.Template:
    """Return a chat template as a `jinja2.Template` in the environment in which `apply_chat_template` renders it.

    Calls `transformers.utils.chat_template_utils._compile_jinja_template` (transformers 4.57 to 5.23), which caches
    compiled templates. The public `render_jinja_template` is the fallback if it is removed; it checks and copies each
    conversation, which takes longer than rendering.
    """
    import_transformers()
    from transformers.utils import chat_template_utils  # noqa: PLC0415 - seconds of imports

    compiled: jinja2.Template = chat_template_utils._compile_jinja_template(template)  # noqa: SLF001
    return compiled
