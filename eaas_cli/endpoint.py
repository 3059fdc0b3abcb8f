"""The commands' calls to a cluster's HTTP endpoint, and the errors of these calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaas.errors import ClusterError
from eaas.net.api_keys import authorization
from eaas.net.http_client import failure, http_settings
from eaas_cli.local.running_clusters import running, up_at

if TYPE_CHECKING:
    import httpx

__all__ = [
    "ANSWER_S",
    "base_url",
    "check",
    "fetch_status",
    "live_members",
    "reason",
    "unreachable_error",
]

ANSWER_S = 5.0
"""Deadline of a call to the endpoint, seconds."""


def fetch_status(endpoint: str, key_file: Path | None = None) -> dict[str, Any]:
    """Fetch the status document of a cluster from its HTTP endpoint.

    Args:
        endpoint: URL of the endpoint.
        key_file: File with the API key; None: the key of the environment, if any.

    Raises:
        ClusterError: The endpoint does not answer, or refuses the key or its own name.
        ConfigError: The file holds no key.
    """
    import httpx

    headers = authorization(key_file)
    try:
        url = f"{base_url(endpoint)}/eaas/v1/status"
        with httpx.Client(**http_settings(url), headers=headers, timeout=ANSWER_S) as http:
            response = http.get(url)
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            check(response)
        response.raise_for_status()
        document: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ClusterError(unreachable_error(endpoint, error)) from error
    return document


def live_members(document: dict[str, Any], role: str) -> list[dict[str, Any]]:
    """Select a role's members from a status document, without dead ones and those that left.

    The rest need not serve: they may be loading, suspected or draining.
    """
    members = document["members"]
    return [m for m in members if m["role"] == role and m["state"] not in ("DEAD", "LEFT")]


def check(response: httpx.Response) -> None:
    """Raise ClusterError, with the endpoint's reason, if the endpoint refused the request."""
    if response.is_error:
        try:
            why = reason(response.json())
        except ValueError:  # of a proxy before it
            why = response.reason_phrase
        raise ClusterError(f"the endpoint refused ({response.status_code}): {why}")


def reason(document: Any) -> str:
    """Extract the message from the endpoint's error document, for a command's error text."""
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def base_url(endpoint: str) -> str:
    """Strip `/v1` from an endpoint's URL, because the status and the pages lie beside it."""
    return endpoint.rstrip("/").removesuffix("/v1")


def unreachable_error(endpoint: str, error: Exception) -> str:
    """Build the error text for an endpoint that does not answer; it names this user's clusters."""
    why = failure(endpoint, error)
    if up_at(endpoint) is not None:
        return f"{endpoint}: your `eaas up` there does not answer ({why})"
    ups = running()
    remedy = (
        f"give --endpoint or EAAS_ENDPOINT: your `eaas up` serves at {', '.join(map(str, ups))}"
        if ups
        else "start one with `eaas up`, or give --endpoint or EAAS_ENDPOINT"
    )
    return f"{endpoint}: no cluster answers there ({why}); {remedy}"
