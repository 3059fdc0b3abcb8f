"""Write docs/api.md from the comments of proto/, its only source. `make proto` runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
FILES = ("balancer", "monitor", "expert", "common")
HEAD = """# The gRPC API

Made from the comments in `proto/` by `make proto`; do not edit. Every server has gRPC's health and reflection
services, too: `grpcurl -plaintext HOST:PORT describe eaas.rpc.v1.BalancerService` (on loopback with the
[cluster's secret](security.md#the-secret-of-a-cluster-on-loopback)). For Python there is
`eaas.control_plane.balancer_client.BalancerClient`; for people there are `eaas plan`, `rebalance`, `pin`,
`unpin` and `history`.
"""
# Numbers of fields in descriptor.proto: the path to a comment is made of them.
MESSAGE, ENUM, SERVICE, METHOD, FIELD, NESTED_ENUM, VALUE = 4, 5, 6, 2, 2, 4, 2
TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in pb.FieldDescriptorProto.Type.items()
}


class File:
    """A .proto file and its comments."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(place.path): place.leading_comments for place in file.source_code_info.location
        }

    def comment(self, *path: int) -> str:
        """As one paragraph for each of the source's."""
        lines = [line.strip() for line in self._comments.get(path, "").split("\n")]
        paragraphs = "\n".join(lines).strip().split("\n\n")
        return "\n\n".join(" ".join(p.split()) for p in paragraphs)

    def markdown(self) -> Iterator[str]:
        """Section by section."""
        yield f"## {self.file.name}"
        for i, service in enumerate(self.file.service):
            yield f"### service {service.name}"
            yield self.comment(SERVICE, i)
            yield from self._methods(i, service)
        for i, message in enumerate(self.file.message_type):
            yield f"### {message.name}"
            yield self.comment(MESSAGE, i)
            yield self._fields(i, message)
        for i, enum in enumerate(self.file.enum_type):
            yield f"### enum {enum.name}"
            yield self.comment(ENUM, i)
            rows = [
                (f"`{value.name}` = {value.number}", self.comment(ENUM, i, VALUE, j))
                for j, value in enumerate(enum.value)
            ]
            yield _table(("value", ""), rows)

    def _methods(self, i: int, service: pb.ServiceDescriptorProto) -> Iterator[str]:
        for j, method in enumerate(service.method):
            asked, answered = (
                ("stream " if streams else "") + f"[{_last(name)}](#{_last(name).lower()})"
                for name, streams in (
                    (method.input_type, method.client_streaming),
                    (method.output_type, method.server_streaming),
                )
            )
            yield f"**{method.name}** ({asked}) → {answered}"
            yield self.comment(SERVICE, i, METHOD, j)

    def _fields(self, i: int, message: pb.DescriptorProto) -> str:
        maps = {n.name: n for n in message.nested_type if n.options.map_entry}
        rows = [
            (f"`{f.name}`", _type(f, maps), self.comment(MESSAGE, i, FIELD, j))
            for j, f in enumerate(message.field)
        ]
        return _table(("field", "type", ""), rows) if rows else "No fields."


def _type(field: pb.FieldDescriptorProto, maps: dict[str, pb.DescriptorProto]) -> str:
    entry = maps.get(_last(field.type_name))
    if entry is not None:
        key, value = (_type(f, {}) for f in entry.field)
        return f"map of {key} to {value}"
    name = TYPES[field.type]
    if field.type_name:
        target = _last(field.type_name)
        anchor = f"enum-{target.lower()}" if name == "enum" else target.lower()
        name = f"[{target}](#{anchor})"
    if field.label == field.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    return f"{name}, one of several" if field.HasField("oneof_index") else name


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[cell.replace("\n\n", " ").replace("|", "\\|") for cell in row] for row in lines]
    return "\n".join("| " + " | ".join(row).strip() + " |" for row in cells)


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "set.pb"
        names = [f"eaas/rpc/v1/{name}.proto" for name in FILES]
        arguments = ["", f"-I{ROOT / 'proto'}", f"--descriptor_set_out={target}"]
        if protoc.main([*arguments, "--include_source_info", *names]):
            raise SystemExit("protoc failed")
        found = pb.FileDescriptorSet.FromString(target.read_bytes())
    files = {file.name: File(file) for file in found.file}
    parts = [part for name in names for part in files[name].markdown() if part]
    (ROOT / "docs" / "api.md").write_text("\n\n".join([HEAD.rstrip(), *parts]) + "\n")


if __name__ == "__main__":
    main()
