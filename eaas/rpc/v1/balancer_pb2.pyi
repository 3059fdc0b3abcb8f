from eaas.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetPlacementRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlacementResponse(_message.Message):
    __slots__ = ("placement",)
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    placement: _common_pb2.Placement
    def __init__(self, placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ...) -> None: ...

class WatchPlacementRequest(_message.Message):
    __slots__ = ("known_epoch",)
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    known_epoch: int
    def __init__(self, known_epoch: _Optional[int] = ...) -> None: ...

class WatchPlacementResponse(_message.Message):
    __slots__ = ("placement", "epoch")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    placement: _common_pb2.Placement
    epoch: int
    def __init__(self, placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class DrainServerRequest(_message.Message):
    __slots__ = ("server_id",)
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    def __init__(self, server_id: _Optional[str] = ...) -> None: ...

class DrainServerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: int
    def __init__(self, servers: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetScaleRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetScaleResponse(_message.Message):
    __slots__ = ("fewest",)
    FEWEST_FIELD_NUMBER: _ClassVar[int]
    fewest: int
    def __init__(self, fewest: _Optional[int] = ...) -> None: ...

class WatchScaleRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchScaleResponse(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: int
    def __init__(self, servers: _Optional[int] = ...) -> None: ...
