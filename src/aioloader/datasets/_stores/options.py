"""Options of stores: hidden if secret, and checked against the known names.

obstore rejects most unknown names without a hint, and values without a name; unknown
names within ``retry_config`` it ignores.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from aioloader.datasets._stores.redact import Sealed, secret_options

# Sealed if some are secret.
Options: TypeAlias = Mapping[str, Any] | Sealed[Mapping[str, Any]]

_KNOWN_IN = {
    "retry_config": ("backoff", "max_retries", "retry_timeout"),
    "retry_config.backoff": ("base", "init_backoff", "max_backoff"),
}
# For hints: the options of S3, Google and Azure, with and without prefix, and of HTTP.
_KNOWN = (
    "access_key_id", "account_key", "account_name", "allow_http",
    "allow_invalid_certificates", "application_credentials", "authority_id",
    "aws_access_key_id", "aws_allow_http", "aws_bucket", "aws_default_region",
    "aws_endpoint_url", "aws_region", "aws_secret_access_key", "aws_session_token",
    "aws_skip_signature", "azure_client_id", "azure_client_secret",
    "azure_storage_account_key", "azure_storage_account_name", "azure_tenant_id",
    "bucket", "bucket_name", "checksum_algorithm", "client_id", "client_options",
    "client_secret", "config", "connect_timeout", "container_name",
    "credential_provider", "default_content_type", "default_headers", "default_region",
    "disable_tagging", "endpoint", "endpoint_url", "google_application_credentials",
    "google_bucket", "google_service_account", "google_service_account_key",
    "http1_only", "http2_only", "imdsv1_fallback", "metadata_endpoint",
    "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate",
    "proxy_excludes", "proxy_url", "region", "request_payer", "retry_config",
    "root_certificate", "s3_express", "sas_key", "secret_access_key",
    "service_account", "service_account_key", "service_account_path", "session_token",
    "skip_signature", "tenant_id", "timeout", "token", "unsigned_payload",
    "use_emulator", "use_fabric_endpoint", "user_agent", "virtual_hosted_style_request",
)  # fmt: skip


class OptionError(ValueError):
    """An option is wrong; the message may be shown."""


def hidden(options: Mapping[str, Any] | None) -> Options:
    """Return a copy of options, with secrets hidden.

    Raises:
        TypeError: If they are not a mapping of names.
    """
    given: Any = {} if options is None else options
    if not isinstance(given, Mapping) or not all(isinstance(n, str) for n in given):
        raise TypeError(
            "store_options must be a dict of names to values, such as "
            f"{{'region': 'eu-west-1'}}, got {type(given).__name__}"
        )
    secrets = ", ".join(secret_options(given))
    return Sealed({**given}, f"the store options {secrets}") if secrets else {**given}


def revealed(options: Options) -> Mapping[str, Any]:
    """Return the options, for a store; do not keep them in an attribute."""
    return options.value if isinstance(options, Sealed) else options


def check_options(options: Mapping[str, Any]) -> None:
    """Check options that obstore does not.

    Raises:
        OptionError: If a name is unknown, or a mapping is expected.
    """
    retry = options.get("retry_config")
    parts = {"retry_config": retry}
    if isinstance(retry, Mapping):
        parts["retry_config.backoff"] = retry.get("backoff")
    parts["client_options"] = options.get("client_options")
    for path, part in parts.items():
        if part is not None and not isinstance(part, Mapping):
            raise OptionError(
                f"the store option {path!r} must be a dict, got {type(part).__name__}"
            )
        known = _KNOWN_IN.get(path)
        unknown = [name for name in part or () if known and name not in known]
        if unknown:
            raise OptionError(unknown_option(f"{path}.{unknown[0]}", known))


def check_no_options(path: str, options: Options) -> None:
    """Check that local files have no options.

    Raises:
        ValueError: If there are some.
    """
    if names := ", ".join(revealed(options)):
        raise ValueError(f"{path!r} is local, and takes no store_options: {names}")


def unknown_option(path: str, known: Iterable[str] | None = None) -> str:
    """Return the error text for an unknown option, or one nested in another."""
    _, _, name = path.rpartition(".")
    names = sorted(known or _KNOWN)
    nearest = difflib.get_close_matches(name.lower(), names, 1)
    hint = "its options are in the documentation of obstore"
    if nearest:
        hint = f"did you mean {nearest[0]!r}?"
    if known and not nearest:
        hint = f"known are {', '.join(names)}"
    return f"the store does not know the option {path!r}: {hint}"


def culprit(
    make: Callable[[Mapping[str, Any]], None],
    options: Mapping[str, Any],
    refusal: Exception,
) -> str | None:
    """Return the option that ``make`` refuses by itself, if there is one.

    Args:
        make: Makes a store with some of the options.
        options: All of them.
        refusal: What ``make`` raised for all.
    """
    single: dict[str, Mapping[str, Any]] = {}
    for name, value in options.items():
        single[name] = {name: value}
        if isinstance(value, Mapping):
            for inner, one in value.items():
                single[f"{name}.{inner}"] = {name: {inner: one}}
    found = None
    for path, alone in single.items():
        try:
            make(alone)
        except Exception as exc:  # noqa: BLE001  (compared, and not raised)
            if (type(exc), str(exc)) == (type(refusal), str(refusal)):
                found = path  # innermost last
    return found
