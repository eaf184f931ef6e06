"""Options of stores: hidden if secret, checked against the known names, and used.

obstore rejects most unknown names without a hint, and values without a name; unknown
names within ``retry_config`` it ignores.
"""

import base64
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from aioloader.datasets._stores.failures import OPTION, Reason, failure_of
from aioloader.datasets._stores.flights import import_obstore, obstore_errors
from aioloader.datasets._stores.redact import Sealed, revealed, secret_options

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Sealed if some are secret.
Options: TypeAlias = Mapping[str, Any] | Sealed[Mapping[str, Any]]

_QUICK = {"max_retries": 2}
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# Options of the HTTP client. With them among its own, a store of S3, Google or Azure
# panics.
_CLIENT = (
    "allow_http", "allow_invalid_certificates", "connect_timeout",
    "default_content_type", "default_headers", "http1_only",
    "http2_keep_alive_interval", "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle", "http2_max_frame_size", "http2_only",
    "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate",
    "proxy_excludes", "proxy_url", "randomize_addresses", "root_certificate", "timeout",
    "user_agent",
)  # fmt: skip
# For hints: these, and the options of S3, Google and Azure, with and without prefix.
_KNOWN = (
    *_CLIENT,
    "access_key_id", "account_key", "account_name", "application_credentials",
    "authority_id", "aws_access_key_id", "aws_allow_http", "aws_bucket",
    "aws_default_region", "aws_endpoint_url", "aws_region", "aws_secret_access_key",
    "aws_session_token", "aws_skip_signature", "azure_client_id", "azure_client_secret",
    "azure_storage_account_key", "azure_storage_account_name", "azure_tenant_id",
    "bucket", "bucket_name", "checksum_algorithm", "client_id", "client_options",
    "client_secret", "config", "container_name", "credential_provider",
    "default_region", "disable_tagging", "endpoint", "endpoint_url",
    "google_application_credentials", "google_bucket", "google_service_account",
    "google_service_account_key", "imdsv1_fallback", "metadata_endpoint", "region",
    "request_payer", "retry_config", "s3_express", "sas_key", "secret_access_key",
    "service_account", "service_account_key", "service_account_path", "session_token",
    "skip_signature", "tenant_id", "token", "unsigned_payload", "use_emulator",
    "use_fabric_endpoint", "virtual_hosted_style_request",
)  # fmt: skip


def hidden(options: Mapping[str, Any] | None) -> Options:
    """Return a copy of options, with secrets hidden."""
    given: Any = {} if options is None else options
    if not isinstance(given, Mapping) or not all(isinstance(n, str) for n in given):
        raise TypeError(
            "store_options must be a dict of names to values, such as "
            f"{{'region': 'eu-west-1'}}, got {type(given).__name__}"
        )
    secrets = ", ".join(secret_options(given))
    return Sealed({**given}, f"the store options {secrets}") if secrets else {**given}


def check_no_options(path: str, options: Options) -> None:
    """Check that local files have no options."""
    if names := ", ".join(revealed(options)):
        raise ValueError(f"{path!r} is local, and takes no store_options: {names}")


def open_store(url: str, label: str, options: Mapping[str, Any]) -> "ObjectStore":
    """Return the store of a URL, not of local files."""
    if (text := _complaint(options)) is None:
        try:
            return _made(url, options)
        except obstore_errors() as exc:
            reason, failure = Reason(exc), failure_of("open", label, exc)
            text = None if reason.code else _hint(url, options, exc, reason.text)
        if text is None:
            raise failure  # without a context, whose text may hold secrets
    raise ValueError(f"cannot open {label!r}: {text}")


def _hint(url: str, options: Mapping[str, Any], exc: Exception, said: str) -> str:
    """Return what is wrong with options that obstore refuses."""
    text, option = str(exc), _culprit(url, options, exc)
    if type(exc).__name__ == "UnknownConfigurationKeyError" or "Invalid key:" in text:
        named = [name for name, _ in OPTION.findall(text)][:1]
        return _unknown(option or "".join(named))
    if "does not accept" in text:
        return (
            f"{said}; it accepts only the store_options client_options and retry_config"
        )
    if "Missing" in said or "must be" in said:
        return f"{said}: name it in store_options, or set it in the environment"
    if option is not None:
        return f"it refuses the value of the store option {option!r} ({said})"
    return f"{said}; check its options"


def _made(url: str, options: Mapping[str, Any]) -> "ObjectStore":
    """Make a store.

    Plain HTTP is allowed where an address uses it. User and password of a URL, which
    obstore would not send, become the equivalent header.
    """
    stores, client = import_obstore().store, dict(options.get("client_options") or {})
    scheme, _, rest = url.partition("://")
    is_web = scheme.lower() in {"http", "https"}
    if any(address.startswith("http://") for address in _addresses(url, options)):
        client.setdefault("allow_http", True)
    user = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")[0]
    if not is_web:  # a key may have ? or #, but obstore parses a URL
        url = url.replace("#", "%23").replace("?", "%3F")
    elif user:
        token = base64.b64encode(unquote(user).encode()).decode()
        headers = {"authorization": f"Basic {token}"}
        client["default_headers"] = headers | (client.get("default_headers") or {})
        url = f"{scheme}://{rest[len(user) + 1 :]}"
    # One loop retries, and counts its time and errors: `requests.Tries`.
    prepared = {"retry_config": _QUICK, **options}
    if client:
        prepared["client_options"] = client
    # A signed URL of S3, Google or Azure is read as is: their stores drop the query.
    make = stores.HTTPStore if is_web and "?" in url else stores.from_url
    store: ObjectStore = make(url, **prepared)
    return store


def _addresses(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URL and every endpoint in the options or the environment."""
    yield url
    for name, value in {**(options.get("config") or {}), **options}.items():
        if "endpoint" in name.lower() or name.lower().endswith("base_url"):
            yield str(value)
    if url.startswith(("s3://", "s3a://")):
        yield from (os.environ.get(name, "") for name in _ENDPOINT_VARIABLES)


def _complaint(options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with options that obstore does not check."""
    if misplaced := {*_CLIENT}.intersection([*options, *(options.get("config") or ())]):
        name = min(misplaced)
        return (
            f"{name!r} is an option of the HTTP client; pass it in client_options, as "
            f"store_options={{'client_options': {{{name!r}: ...}}}}"
        )
    retry = options.get("retry_config")
    backoff = retry.get("backoff") if isinstance(retry, Mapping) else None
    parts = {
        "retry_config": (retry, ("backoff", "max_retries", "retry_timeout")),
        "retry_config.backoff": (backoff, ("base", "init_backoff", "max_backoff")),
        "client_options": (options.get("client_options"), None),
    }
    for path, (part, known) in parts.items():
        if part is not None and not isinstance(part, Mapping):
            kind = type(part).__name__
            return f"the store option {path!r} must be a dict, got {kind}"
        unknown = [name for name in part or () if known and name not in known]
        if unknown:
            return _unknown(f"{path}.{unknown[0]}", known)
    return None


def _unknown(path: str, known: Iterable[str] | None = None) -> str:
    """Return the error text for an unknown option, or one nested in another."""
    names = sorted(known or _KNOWN)
    nearest = difflib.get_close_matches(path.rpartition(".")[2].lower(), names, 1)
    hint = "its options are in the documentation of obstore"
    if nearest:
        hint = f"did you mean {nearest[0]!r}?"
    elif known:
        hint = f"known are {', '.join(names)}"
    return f"the store does not know the option {path!r}: {hint}"


def _culprit(url: str, options: Mapping[str, Any], refusal: Exception) -> str | None:
    """Return the option that is refused by itself, as all of them are, if any is."""
    found = None
    for name, value in options.items():
        inside = value.items() if isinstance(value, Mapping) else ()
        alone = {f"{name}.{inner}": {inner: one} for inner, one in inside}
        for path, one in {name: value, **alone}.items():
            try:
                _made(url, {name: one})
            except Exception as exc:  # noqa: BLE001  (compared, and not raised)
                if (type(exc), str(exc)) == (type(refusal), str(refusal)):
                    found = path  # innermost last
    return found
