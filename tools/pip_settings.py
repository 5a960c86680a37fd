"""pip's configuration in uv's words, so that mirrors, certificates and proxies need to be written once only.

Where the two differ in meaning, uv is told to do what pip does: all indexes count alike, and a local folder of
`find-links` that does not exist is passed over.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SECTIONS = ("global", "install", ":env:")  # a later one wins, as in pip
# Of the user's own UV_ variables only those that do not change what is installed, or from where.
KEPT = ("UV_CACHE_DIR", "UV_CONCURRENT_", "UV_HTTP_", "UV_LINK_MODE", "UV_NO_CACHE")
BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # read by pip's HTTP library


class NotTranslatableError(Exception):
    """A setting of pip that uv has nothing like; the message names it."""


@dataclass
class Settings:
    """What `uv pip install` is given: its whole environment, and arguments for what has no variable."""

    environment: dict[str, str]
    arguments: list[str] = field(default_factory=list)


def read(listing: str) -> dict[str, str]:
    """The options of `pip install` in the output of `pip config list`: configuration files and PIP_ variables."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        name, equals, text = line.partition("=")
        section, _, option = name.rpartition(".")
        if equals and section in found:
            value = str(ast.literal_eval(text))
            if value:  # as in pip, an empty value is none
                found[section][option.replace("_", "-")] = value
    return {option: value for section in SECTIONS for option, value in found[section].items()}


def translate(options: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """What uv needs to install from where pip would.

    Args:
        options: what `read` found.
        environ: environment variables of the user.

    Raises:
        NotTranslatableError: uv cannot do what pip is told.
    """
    variables = {name: value for name, value in environ.items() if not name.startswith("UV_") or name.startswith(KEPT)}
    settings = Settings(variables)
    _sources(options, settings)
    _network(options, settings)
    return settings


def _sources(options: Mapping[str, str], settings: Settings) -> None:
    variables = settings.environment
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # safe here: every file has its hash in the lock
    index = options.get("index-url", options.get("pypi-url", ""))
    if _is_true(options.get("no-index", "")):
        settings.arguments.append("--no-index")
    else:
        if index:
            variables["UV_DEFAULT_INDEX"] = index
        if "extra-index-url" in options:
            variables["UV_INDEX"] = " ".join(options["extra-index-url"].split())
    links = options.get("find-links", "").split()
    folders = {link: Path(link).expanduser() for link in links if "://" not in link}
    kept = [str(folders.get(link, link)) for link in links if link not in folders or folders[link].exists()]
    if any("," in link for link in kept):
        raise NotTranslatableError("find-links with a comma")
    if kept:
        variables["UV_FIND_LINKS"] = ",".join(kept)
    if _is_true(options.get("no-cache-dir", "")):
        variables["UV_NO_CACHE"] = "true"
    elif "cache-dir" in options:
        variables.setdefault("UV_CACHE_DIR", str(Path(options["cache-dir"]).expanduser() / "uv"))


def _network(options: Mapping[str, str], settings: Settings) -> None:
    variables = settings.environment
    if "trusted-host" in options:
        variables["UV_INSECURE_HOST"] = " ".join(options["trusted-host"].split())
    bundle = options.get("cert") or next((variables[name] for name in BUNDLES if variables.get(name)), "")
    if bundle:
        variables["SSL_CERT_DIR" if Path(bundle).is_dir() else "SSL_CERT_FILE"] = bundle
    else:
        variables["UV_SYSTEM_CERTS"] = "true"
    if "client-cert" in options:
        variables["SSL_CLIENT_CERT"] = options["client-cert"]
    if "proxy" in options:
        proxy = options["proxy"] if "://" in options["proxy"] else f"http://{options['proxy']}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            variables[name] = variables[name.lower()] = proxy
        variables["NO_PROXY"] = variables["no_proxy"] = ""  # pip reads no other proxy variables then
    timeout = options.get("timeout", options.get("default-timeout"))
    if timeout:
        variables["UV_HTTP_TIMEOUT"] = str(round(float(timeout)))
    if "retries" in options:
        variables["UV_HTTP_RETRIES"] = options["retries"]
    provider = options.get("keyring-provider", "auto")
    if provider == "subprocess":
        variables["UV_KEYRING_PROVIDER"] = provider
    elif provider not in ("auto", "disabled"):
        raise NotTranslatableError(f"keyring-provider {provider}")


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "t", "yes", "y", "on")
