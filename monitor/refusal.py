"""How a call of the contract is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from monitor.registry import IdTakenError, UnknownLifeError

__all__ = ["Refused", "refusals"]


class Refused(Exception):
    """The call ends with this status (`monitor.proto` says what each of them means).

    Args:
        code: Of the status.
        details: For people.
        trailing: Metadata of the refusal.
    """

    def __init__(
        self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(details)
        self.code = code
        self.trailing = trailing


@asynccontextmanager
async def refusals(context: Any) -> AsyncIterator[None]:
    """Within it, what the registry or the service refuses ends the call."""
    code = grpc.StatusCode.INVALID_ARGUMENT
    trailing: tuple[tuple[str, str], ...] = ()
    try:
        yield
        return
    except ValueError as error:
        details = str(error)
    except IdTakenError as error:
        code, details = grpc.StatusCode.ALREADY_EXISTS, str(error)
    except UnknownLifeError as error:
        code, details = grpc.StatusCode.NOT_FOUND, str(error)
    except Refused as error:
        code, details, trailing = error.code, str(error), error.trailing
    context.set_trailing_metadata(trailing)
    await context.abort(code, details)
