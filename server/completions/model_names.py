"""Resolves the model names in a request's body."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from paged_kv.server.engine.paged_model_provider import LoadedModel, ModelKey
from paged_kv.server.http.api_errors import APIError, shortened
from paged_kv.server.http.schema import DEFAULT_MODEL, Body
from paged_kv.server.options import ServerOptions

# mlx-lm's server lists a repository as a model if it has these files.
_FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}


class ModelNames:
    """The model names that the server accepts."""

    def __init__(self, options: ServerOptions) -> None:
        self._default: ModelKey = (options.model, options.adapter_path, options.draft_model)
        self._may_switch: bool = options.allow_model_switch
        self._created = int(time.time())
        self._listed: list[str] = [*options.served_model_name]
        self._names = {DEFAULT_MODEL, *self._listed}
        if options.model is not None:
            path = Path(options.model).expanduser()
            own = typed_name(path) if path.exists() else options.model
            self._listed.append(own)
            self._names |= {own, options.model, str(path.resolve())}
        self._aliases: dict[str, str] = dict(options.model_alias)
        self._listed += self._aliases

    def key_of(self, body: Body) -> ModelKey:
        """The model, adapter and draft model that a request names. Raises APIError 404: the server
        does not serve such a model."""
        model, adapter, draft = self._default
        if body.model in self._aliases and self._aliases[body.model] != model:
            model, adapter = self._aliases[body.model], None
        elif body.model is not None and body.model not in {*self._names, *self._aliases}:
            model, adapter = self._other(body.model, "model"), None
        if body.adapters not in (None, self._default[1]):
            adapter = self._other(body.adapters, "adapters")
        if body.draft_model not in (None, DEFAULT_MODEL, self._default[2]):
            draft = self._other(body.draft_model, "draft_model")
        if model is None:
            raise _not_found("there is no default model: name one", "model")
        return model, adapter, draft

    def public_name(self, name: str | None) -> str:
        """What an answer calls the model of a request, which may have left the name out."""
        if name not in (None, DEFAULT_MODEL):
            return str(name)
        return self._listed[0] if self._default[0] is not None else DEFAULT_MODEL

    def listed(self, loaded: LoadedModel | None) -> list[dict[str, Any]]:
        """The models that a request may name, in the forms of OpenAI and of Anthropic. Of the
        loaded one they tell more."""
        names = dict.fromkeys(self._listed)
        if self._may_switch:
            names |= dict.fromkeys(_downloaded())
        return [self._as_dict(name, loaded) for name in names]

    def described(self, name: str, loaded: LoadedModel | None) -> dict[str, Any]:
        """One model, in the form of `listed`. Raises APIError 404: the server does not serve such a
        model."""
        names = {*self._names, *self._aliases}
        if name not in names and name not in (_downloaded() if self._may_switch else ()):
            self._refuse(name, "model")
        return self._as_dict(name, loaded)

    def _as_dict(self, name: str, loaded: LoadedModel | None) -> dict[str, Any]:
        created_at = datetime.fromtimestamp(self._created, UTC).isoformat()
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "paged-kv"}
        model |= {"type": "model", "display_name": name, "created_at": created_at}
        own = self._default[0] if name in self._names else self._aliases.get(name, name)
        if loaded is None or loaded.key[0] != own:
            return model
        # Clients read the context length by these names.
        names = ("context_length", "max_model_len", "max_input_tokens")
        abilities = {
            "images": loaded.why_no_images is None,
            "thinking": bool(loaded.tokenizer.has_thinking),
            "tools": bool(loaded.tokenizer.has_tool_calling),
        }
        return {**model, **dict.fromkeys(names, loaded.context_length), "abilities": abilities}

    def _other(self, name: str | None, param: str) -> str | None:
        if not self._may_switch:
            self._refuse(name, param)
        return name

    def _refuse(self, name: str | None, param: str) -> None:
        served = (self._listed or [DEFAULT_MODEL])[0]
        other = "download it" if self._may_switch else "start the server with --allow-model-switch"
        raise _not_found(
            f"{param}={shortened(name)} is not served here: ask for {served!r}, or {other}", param
        )


def typed_name(folder: Path) -> str:
    """What people call the model in a folder: its repository, if the folder is a download of the
    Hub's client, and else the folder's name."""
    folder = folder.resolve()
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
        return repository.name.removeprefix("models--").replace("--", "/")
    return folder.name or str(folder)


def _not_found(message: str, param: str) -> APIError:
    return APIError(404, message, param=param, code="model_not_found")


def _downloaded() -> list[str]:
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        repository.repo_id
        for repository in repositories
        if repository.repo_type == "model"
        and "main" in repository.refs
        and {file.file_path.name for file in repository.refs["main"].files} >= _FILES
    )
