"""Authorisation of gRPC calls by the role in the caller's TLS certificate.

A certificate names its role by a URI among its alternative names: `eaas://ROLE/anything`, where ROLE is a
value of `Role` or "operator". Connections without a client certificate are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

__all__ = ["OPERATOR", "RoleGuard", "role_among", "role_of", "role_uri", "served_by"]

OPERATOR = "operator"
"""The role of operators and their programs, in certificates."""

_SCHEME = "eaas://"


def served_by(handler: grpc.RpcMethodHandler) -> tuple[str, Callable[[Any, Any], Any]]:
    """Return a gRPC method's kind ("unary_stream") and its function, for interceptors that wrap it."""
    sides = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if streams else "unary" for streams in sides)
    return kind, getattr(handler, kind)


def role_uri(role: str) -> str:
    """Make the URI that names a role in a certificate, for `eaas certs`."""
    return f"{_SCHEME}{role}"


def role_of(context: Any) -> str | None:
    """The role in a caller's certificate; empty if the certificate names none, None without a certificate."""
    shown = context.auth_context()
    if not shown.get("x509_common_name") and not shown.get("x509_subject_alternative_name"):
        return None
    names = shown.get("x509_subject_alternative_name", ())
    return role_among(name.decode(errors="replace") for name in names)


def role_among(names: Iterable[str]) -> str:
    """The role that the alternative names of a certificate name; empty if none does."""
    for name in names:
        if name.startswith(_SCHEME):
            return name.removeprefix(_SCHEME).partition("/")[0]
    return ""


class RoleGuard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Server interceptor that refuses calls from roles without permission, with PERMISSION_DENIED.

    Args:
        allowed: Roles by method ("/package.Service/Method"); other methods are open to all roles.
    """

    def __init__(self, allowed: Mapping[str, Iterable[str]]) -> None:
        self._allowed = {method: frozenset(roles) for method, roles in allowed.items()}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap a method's handler with the check of the caller's role (gRPC's interceptor interface)."""
        handler = continuation(details)
        roles = self._allowed.get(details.method)
        if handler is None or roles is None:
            return handler
        kind, serve = served_by(handler)

        def guarded(request: Any, context: Any) -> Any:
            role = role_of(context)
            if role is not None and role not in roles:
                who = role or "a certificate without a role"
                context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{details.method} is for {', '.join(sorted(roles))}, not for {who}",
                )
            return serve(request, context)

        return getattr(grpc, f"{kind}_rpc_method_handler")(
            guarded, handler.request_deserializer, handler.response_serializer
        )
